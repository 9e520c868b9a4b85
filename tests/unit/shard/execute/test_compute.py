"""Gradients of several uses are added in autograd's own order, wherever the uses are."""

import pytest
import torch
from torch import nn

from hydra_tune.shard.execute import compute
from tests.unit.shard.bench import bench, task_of

# In float32 two small ones and a large one add up to 1 + 2 ** -23 in one order and to 1 in another: a wrong order shows.
LARGE, SMALL = 1.0, 2.0**-24


class Uses(nn.Module):
    """One value and one parameter, each used three times, with gradients whose sum depends on the order."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.ones(1))
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        value = self.start * x
        total = value * SMALL * self.weight
        total = total + value * SMALL * self.weight
        return total + value * LARGE * self.weight


def step(module, batch):
    return module(batch).sum()


def made_bench():
    return bench(task_of(Uses(), step=step), torch.ones(1))


def eager_gradients():
    module = Uses()
    step(module, torch.ones(1)).backward()
    return {name: p.grad.item() for name, p in module.named_parameters()}


def chain_gradients(made, cuts):
    """Backward through the shards by hand, as the chain does it."""
    plan = made.plan(*cuts)
    values = {}
    for shard in plan.shards:
        values |= compute.forward(shard.graph, operands(made, shard, values))
    gradients, parameters = {}, {}
    for shard in reversed(plan.shards):
        found = compute.backward(
            shard.graph,
            operands(made, shard, values),
            needs_gradient=shard.needs_gradient,
            incoming=compute.IncomingGradients(
                outputs={n: None if n in shard.losses else gradients.get(n) for n in shard.gradient_outputs},
                live_in={n: gradients[n] for n in shard.graph.live_in if n in gradients},
                parameters={n: parameters[n] for n in shard.graph.state if n in parameters},
            ),
        )
        gradients |= found.live_in
        parameters |= found.parameters
    return {name: gradient.item() for name, gradient in parameters.items()}


def operands(made, shard, values):
    return compute.ShardOperands(
        state=[made.state[name] for name in shard.graph.state],
        constants=(),
        inputs=[made.inputs[index] for index in shard.graph.inputs],
        live_in=[values[name] for name in shard.graph.live_in],
    )


def test_the_order_matters_here():
    small, large = torch.tensor(SMALL), torch.tensor(LARGE)
    assert ((large + small) + small).item() == LARGE
    assert ((small + small) + large).item() == LARGE + 2 * SMALL
    assert eager_gradients() == {"start": LARGE, "weight": LARGE}


@pytest.mark.parametrize("cut", range(1, 10))
def test_a_value_and_a_parameter_used_by_several_shards_sum_in_the_eager_order(cut):
    made = made_bench()
    assert cut in made.analysis.cuts
    assert chain_gradients(made, [cut]) == eager_gradients()


def test_every_node_in_a_shard_of_its_own():
    made = made_bench()
    assert chain_gradients(made, made.analysis.cuts) == eager_gradients()


def test_gradients_are_taken_from_the_parameters():
    made = made_bench()
    chain_gradients(made, [4])
    assert all(p.grad is None for p in made.model.parameters())


def test_a_forward_records_no_graph():
    made = made_bench()
    shard = made.plan(4).shards[0]
    assert not any(t.requires_grad for t in compute.forward(shard.graph, operands(made, shard, {})).values())


def test_the_loss_comes_back_with_the_backward():
    made = made_bench()
    shard = made.plan().shards[0]
    found = compute.backward(
        shard.graph,
        operands(made, shard, {}),
        needs_gradient=frozenset(),
        incoming=compute.IncomingGradients(outputs=dict.fromkeys(shard.losses), live_in={}, parameters={}),
    )
    assert found.outputs[made.captured.outputs[0]].equal(step(made.model, torch.ones(1)).detach())
    assert not found.live_in
