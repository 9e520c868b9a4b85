"""What a graph saves is taken out of it once per storage, and read where it is when the backward runs."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune.shard.capture.batch import same_bits
from hydra_tune.shard.execute import compute
from hydra_tune.shard.execute.saved_activations import KeptActivations, NotKeepableError
from tests.unit.shard.bench import bench, task_of


def weight() -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def forward(x, w, kept):
    with kept.hooks():
        hidden = (x @ w).relu()
        return (hidden.t() @ hidden).sigmoid().sum()


def test_operands_are_referred_to_and_the_rest_is_kept_once_per_storage():
    x, w = weight().requires_grad_(), weight().requires_grad_()
    kept = KeptActivations([x, w])
    loss = forward(x, w, kept)
    found = kept.settle()
    assert sorted(flat.numel() for flat in found.values()) == [256, 256], (
        "hidden, also as its transpose, and the sigmoid"
    )
    kept.present([x, w], found.__getitem__, found.__delitem__)
    loss.backward()
    assert found == {}, "each storage goes with the last node that reads it"
    x_grad, w_grad = x.grad, w.grad
    x.grad = w.grad = None
    hidden = (x @ w).relu()
    (hidden.t() @ hidden).sigmoid().sum().backward()
    assert same_bits(x.grad, x_grad)
    assert same_bits(w.grad, w_grad)


@pytest.mark.cases(1 / 3)
def test_between_the_units_a_graph_holds_no_memory():
    x, w = weight().requires_grad_(), weight().requires_grad_()
    kept = KeptActivations([x.detach(), w.detach()])
    loss = forward(x, w, kept)
    storages = [weakref.ref(flat.untyped_storage()) for flat in kept.settle().values()]
    gc.collect()
    assert len(storages) == 2
    assert [reference() for reference in storages] == [None, None]
    del loss


def test_operands_are_read_where_they_are_now():
    w = weight()
    x = weight().requires_grad_()
    kept = KeptActivations([w])
    with kept.hooks():
        y = x @ w
    kept.settle()
    kept.present([2 * w], lambda number: torch.empty(0), lambda number: None)
    y.sum().backward()
    assert x.grad.equal(torch.ones(8, 8) @ (2 * w).t())


def test_what_is_overwritten_after_it_was_saved_is_refused_as_by_autograd():
    w, buffer = weight().requires_grad_(), weight()
    kept = KeptActivations([buffer])
    with kept.hooks():
        y = w * buffer
    kept.settle()
    buffer.add_(1)
    kept.present([buffer], lambda number: torch.empty(0), lambda number: None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_graph_that_is_given_up_tells_nobody():
    x, w = weight().requires_grad_(), weight().requires_grad_()
    kept, freed = KeptActivations([x, w]), []
    loss = forward(x, w, kept)
    kept.settle()
    kept.present([x, w], lambda number: torch.empty(0), freed.append)
    kept.absent()
    del loss
    assert freed == []


def test_more_than_a_view_of_plain_memory_is_not_kept():
    z = torch.randn(4, dtype=torch.complex64).requires_grad_()
    with pytest.raises(NotKeepableError, match="not plain memory"), KeptActivations([z]).hooks():
        (z * z.conj()).abs().sum()


def test_what_is_not_on_the_device_of_the_unit_stays_where_it_is():
    x = torch.randn(8, 8, device="meta").requires_grad_()
    kept = KeptActivations([weight()])
    with kept.hooks():
        y = x.exp()
    assert kept.settle() == {}
    y.sum().backward()
    assert x.grad.device.type == "meta"


class Tied(nn.Module):
    """One parameter in both shards, and twice in the first: its gradients are added in one order only."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(weight())
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = functional.linear(functional.linear(x, self.weight).tanh(), self.weight) * self.scale
        return functional.linear(x, self.weight)


def test_a_tape_gives_the_gradients_of_a_recompute():
    made = bench(task_of(Tied()))
    first, last = made.plan(made.position("aten.linear.default", 2)).shards

    def operands(shard, values):
        return compute.ShardOperands(
            state=[made.state[name] for name in shard.graph.state],
            constants=(),
            inputs=[made.inputs[index] for index in shard.graph.inputs],
            live_in=[values[name] for name in shard.graph.live_in],
        )

    values, tape = compute.taped_forward(first.graph, operands(first, {}), first.needs_gradient)
    found = tape.settle()
    top = compute.backward(
        last.graph,
        operands(last, values),
        needs_gradient=last.needs_gradient,
        incoming=compute.IncomingGradients(outputs=dict.fromkeys(last.losses), live_in={}, parameters={}),
    )
    incoming = compute.IncomingGradients(outputs=top.live_in, live_in={}, parameters=top.parameters)
    ours = tape.backward(first.graph, operands(first, {}), incoming, found.__getitem__, found.__delitem__)
    again = compute.backward(first.graph, operands(first, {}), needs_gradient=first.needs_gradient, incoming=incoming)
    assert ours.parameters.keys() == again.parameters.keys() == {"weight", "scale"}
    assert all(same_bits(ours.parameters[name], again.parameters[name]) for name in again.parameters)
    assert all(parameter.grad is None for parameter in made.model.parameters())
