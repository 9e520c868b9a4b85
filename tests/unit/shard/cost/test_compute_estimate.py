"""What units are taken to take, where no clock is asked."""

import pytest
from torch.nn.modules import module

from hydra_tune.shard.cost.activation_policy import ActivationBudget, keeping
from hydra_tune.shard.cost.compute_estimate import estimated_seconds
from tests.unit.shard.bench import parity_bench


def test_to_keep_saves_a_forward():
    made = parity_bench("gpt2")
    plan = made.plan(*made.spread(3))
    kept = keeping(plan, made.pilot, "keep", ActivationBudget(capacity_bytes=1 << 40, budget_bytes=0))
    computed, played = estimated_seconds(made.pilot, plan, kept)
    assert computed.forward == played.forward
    assert min(computed.forward) > 0
    assert computed.backward == pytest.approx([3 * seconds for seconds in computed.forward])
    expected = [2 + (not shard.keeps_activations) for shard in kept.shards]
    assert played.backward == pytest.approx([n * s for n, s in zip(expected, computed.forward, strict=True)])
    assert expected == [2, 2, 3]


def test_each_shard_has_its_own_arithmetic_and_all_of_them_that_of_the_whole():
    made = parity_bench("gpt2")
    cut, whole = made.plan(*made.spread(3)), made.plan()
    parts, _ = estimated_seconds(made.pilot, cut, cut)
    total, _ = estimated_seconds(made.pilot, whole, whole)
    assert sum(parts.forward) == pytest.approx(sum(total.forward), rel=0.05)


def test_an_estimate_leaves_no_hook_of_all_modules_for_other_threads(monkeypatch):
    made = parity_bench("mlp")
    plan, forward, hooks = made.plan(), made.pilot.try_forward, []

    def looking(graph):
        hooks.append([*module._global_forward_hooks, *module._global_forward_pre_hooks])
        return forward(graph)

    monkeypatch.setattr(made.pilot, "try_forward", looking)
    seconds, _ = estimated_seconds(made.pilot, plan, plan)
    assert hooks == [[]]
    assert seconds.forward[0] > 0
