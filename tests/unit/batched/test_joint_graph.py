"""A traced step makes the gradients where the group's optimizer takes them."""

import pytest
import torch

from hydra_tune.batched.flat_tensors import runs
from hydra_tune.fusion.compile.batched_plan import stacked_plan, trace_step
from hydra_tune.memory.block import lay_out
from hydra_tune.shard.execute.compute import ShardOperands
from tests.unit.shard.bench import parity_bench

MEMBERS = 2


def in_one_block(tensors):
    slots, size = lay_out(tensors, 64)
    block = torch.zeros(size, dtype=torch.uint8)
    return [slot.view(block).copy_(t) for t, slot in zip(tensors, slots, strict=True)]


@pytest.mark.cases(1 / 3)
def test_gradients_lie_as_the_parameters_do_and_are_the_same():
    """Of linear layers, whose gradients are written there, and of convolutions, whose gradients are copied there."""
    made = parity_bench("cnn")
    plan = stacked_plan(made.plan(), MEMBERS)
    (shard,) = plan.shards
    names = shard.graph.state
    trains = [made.state[name].requires_grad for name in names]
    state = [torch.stack([made.state[name].detach()] * MEMBERS) for name in names]
    block = iter(in_one_block([tensor for tensor, is_trained in zip(state, trains, strict=True) if is_trained]))
    state = [
        next(block).requires_grad_() if is_trained else tensor for tensor, is_trained in zip(state, trains, strict=True)
    ]
    inputs = tuple(torch.stack([tensor] * MEMBERS) for tensor in made.inputs)
    assert trace_step(plan, state, inputs, MEMBERS)
    trace = plan.computing.traces[shard.graph.first]
    assert 0 < len(trace.written) < len(trace.trained)
    operands = ShardOperands(
        state=state,
        constants=[plan.constants[name] for name in shard.graph.constants],
        inputs=[inputs[index] for index in shard.graph.inputs],
        live_in=(),
    )
    apart, together = (trace.run(operands, [], is_laid_out=is_laid_out).parameters for is_laid_out in (False, True))
    assert apart.keys() == together.keys()
    parameters = dict(zip(names, state, strict=True))
    ((layout, run),) = runs([(parameters[name], name) for name in together])
    gradients = [together[name] for _, name in run]
    assert layout.gathered(gradients).whole.data_ptr() == gradients[0].data_ptr()
    for name, gradient in apart.items():
        assert torch.equal(gradient, together[name])
