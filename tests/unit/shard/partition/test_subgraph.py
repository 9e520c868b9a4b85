"""A shard's graph takes what it uses and gives what others use, and nothing else."""

import torch
from torch import nn
from torch.nn import functional

from hydra_tune.shard.execute import compute
from hydra_tune.shard.partition.subgraph import cut_shard
from tests.parity.models import build
from tests.unit.shard.bench import bench, seeded, task_of


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("scale", torch.full((), 2.0))

    def forward(self, x):
        early = self.first(x)
        late = self.middle(early * self.scale)
        return self.last(functional.relu(late, inplace=True)) + early + x


def test_live_values_skip_over_shards():
    made = bench(task_of(Skip()))
    first, middle = made.position("aten.linear.default", 1), made.position("aten.linear.default", 2)
    plan = made.plan(first, middle)
    one, two, three = (shard.graph for shard in plan.shards)
    early = made.captured.nodes[0].name
    assert (one.live_in, one.inputs, one.state) == ((), (0,), ("first.weight", "first.bias", "scale"))
    assert early in one.live_out
    assert early not in two.live_in, "it passes the second shard by"
    assert early in three.live_in
    assert two.state == ("middle.weight", "middle.bias")
    assert two.inputs == ()
    assert set(three.inputs) == {0, 1}, "the input is used again, and the target"
    assert three.live_out == made.captured.outputs


def test_an_overwritten_live_in_is_copied_and_the_stored_value_stays():
    made = bench(task_of(Skip()))
    relu = made.position("aten.relu_.default")
    plan = made.plan(relu)
    shard = plan.shards[1].graph
    assert len(shard.cloned) == 1
    values = compute.forward(plan.shards[0].graph, operands(made, plan.shards[0].graph, {}))
    before = {name: tensor.clone() for name, tensor in values.items()}
    compute.forward(shard, operands(made, shard, values))
    assert all(values[name].equal(before[name]) for name in values)
    assert any((tensor < 0).any() for tensor in before.values()), "there was something to overwrite"


def test_shards_run_one_after_the_other_are_the_whole_step():
    for name in ("mlp", "cnn"):
        made = bench(build(name))
        plan = made.plan(*made.spread(5))
        whole = cut_shard(made.captured, made.analysis, 0, made.end)
        buffers = {n: b.clone() for n, b in made.model.named_buffers()}
        with seeded(1):
            (expected,) = compute.forward(whole, operands(made, whole, {})).values()
        for n, buffer in made.model.named_buffers():
            buffer.copy_(buffers[n])
        values = {}
        with seeded(1):
            for shard in plan.shards:
                values |= compute.forward(shard.graph, operands(made, shard.graph, values))
        assert values[made.captured.outputs[0]].equal(expected)


def operands(made, shard, values):
    return compute.ShardOperands(
        state=[made.state[name] for name in shard.state],
        constants=[made.captured.constants[name] for name in shard.constants],
        inputs=[made.inputs[index] for index in shard.inputs],
        live_in=[values[name] for name in shard.live_in],
    )


def test_subgraphs_are_copied_into_the_shard_that_uses_them():
    class NoGrad(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            with torch.no_grad():
                scale = x.abs().max() + x.mean()
            return self.linear(x) * scale

    made = bench(task_of(NoGrad()))
    shard = cut_shard(made.captured, made.analysis, 0, made.end)
    loss = compute.forward(shard, operands(made, shard, {}))[made.captured.outputs[0]]
    assert loss.equal(made.task.loss(made.model(made.inputs[0]), made.inputs[1]))


def test_written_buffers_and_random_numbers_are_known_by_shard():
    made = bench(build("cnn"))
    norms = [i for i, node in enumerate(made.captured.nodes) if "batch_norm" in str(node.target)]
    plan = made.plan(norms[4])
    one, two = (shard.graph.written_state for shard in plan.shards)
    assert {name.split(".")[1] for name in one if "running" in name} == {"0", "1", "2", "3"}
    assert {name.split(".")[1] for name in two if "running" in name} == {"4", "5", "6", "7"}
    assert not any(shard.graph.stochastic for shard in plan.shards)
    made = bench(build("mlp"))
    drops = sorted(made.analysis.stochastic)
    plan = made.plan(drops[0], drops[0] + 1)
    assert [shard.graph.stochastic for shard in plan.shards] == [False, True, True]
