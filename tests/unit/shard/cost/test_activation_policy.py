"""Which shards keep their activations, given what computing again and copying take, and what room there is."""

from dataclasses import replace
from functools import cache

import pytest

from hydra_tune.devices.hardware.link import LinkCostModel
from hydra_tune.shard.cost.activation_policy import (
    ActivationBudget,
    MeasuredActivationChoice,
    chosen,
    keeping,
    seconds_of,
)
from hydra_tune.shard.verify.step_outcome import UnitSeconds
from tests.unit.shard.bench import parity_bench

ENDLESS = 1 << 40
COMPUTED = UnitSeconds(forward=(1.0, 1.0, 1.0, 0.0), backward=(3.0, 3.0, 3.0, 3.0))
PLAYED = UnitSeconds(forward=(1.0, 1.0, 1.0, 0.0), backward=(2.0, 2.0, 2.0, 3.0))  # a second less each
FAST = LinkCostModel(bytes_per_second=1e12)


def room(**changes):
    return ActivationBudget(**({"capacity_bytes": ENDLESS, "budget_bytes": 0} | changes))


@cache
def plans():
    made = parity_bench("gpt2")
    plan = made.plan(*made.spread(4))
    return plan, keeping(plan, made.pilot, "auto", room())


def choice(link, there_is, computed=COMPUTED):
    plan, kept = plans()
    found = chosen(plan, kept, computed, PLAYED, link, there_is)
    for shard, before, after in zip(found.shards, plan.shards, kept.shards, strict=True):
        assert shard is (after if shard.keeps_activations else before)
    return [shard.keeps_activations for shard in found.shards]


@pytest.mark.cases(1 / 3)
def test_the_last_shard_has_nothing_to_keep_and_evaluation_neither():
    plan, kept = plans()
    assert [shard.activations for shard in kept.shards] == ["keep"] * 3 + ["recompute"]
    made = parity_bench("gpt2", "evaluate")
    evaluation = made.plan(*made.spread(3))
    assert keeping(evaluation, made.pilot, "keep", room()) is evaluation
    assert keeping(plan, parity_bench("gpt2").pilot, "recompute", room()) is plan


def test_a_shard_whose_unit_would_not_fit_recomputes():
    plan, kept = plans()
    sizes = [shard.cost.peak_bytes for shard in kept.shards[:-1]]
    assert min(sizes) < max(sizes)
    some = keeping(plan, parity_bench("gpt2").pilot, "spill", room(capacity_bytes=max(sizes) - 1))
    assert [s.activations for s in some.shards[:-1]] == [
        "spill" if size < max(sizes) else "recompute" for size in sizes
    ]


def test_what_copies_faster_than_it_is_computed_is_kept():
    _, kept = plans()
    assert choice(FAST, room()) == [True, True, True, False]
    sizes = [shard.cost.kept_bytes for shard in kept.shards[:-1]]
    exact = LinkCostModel(bytes_per_second=2 * max(sizes) * 1.001)
    assert choice(exact, room()) == [True, True, True, False], "two copies, of all that is kept"
    slower = LinkCostModel(bytes_per_second=2 * max(sizes) * 0.999)
    assert choice(slower, room()) == [size < max(sizes) for size in sizes] + [False]


def test_each_copy_costs_something_whatever_its_size():
    _, kept = plans()
    least = min(shard.cost.kept_blocks for shard in kept.shards[:-1])
    assert not any(choice(LinkCostModel(bytes_per_second=1e12, seconds_per_block=1 / least), room()))


def test_a_slow_link_leaves_what_never_has_to_move():
    _, kept = plans()
    slow = LinkCostModel(bytes_per_second=1.0)
    assert choice(slow, room()) == [False] * 4
    assert choice(slow, room(budget_bytes=ENDLESS)) == [True] * 3 + [False]
    *_, before, last = kept.shards
    beside = max(*(shard.cost.peak_bytes for shard in kept.shards), last.cost.peak_bytes + before.cost.kept_bytes)
    found = choice(slow, room(budget_bytes=beside))
    assert found[2:] == [True, False], "what the last shards keep waits for the shortest time"
    assert not all(found[:2])
    assert not any(choice(slow, room(budget_bytes=beside, trials=1000)))


def test_the_host_must_have_room_for_what_may_be_spilled():
    plan, kept = plans()
    needed = sum(shard.cost.state_bytes + shard.cost.held_bytes for shard in plan.shards)
    last = kept.shards[2].cost.kept_bytes
    assert not any(choice(FAST, room(host_bytes=needed)))
    assert choice(FAST, room(host_bytes=needed + last)) == [False, False, True, False]


def test_a_graph_that_keeps_no_bytes_needs_no_room_on_the_host():
    plan, kept = plans()
    first, *others = kept.shards
    bare = replace(kept, shards=(replace(first, cost=replace(first.cost, kept_bytes=0, kept_blocks=0)), *others))
    found = chosen(plan, bare, COMPUTED, PLAYED, FAST, room(host_bytes=0))
    assert [shard.keeps_activations for shard in found.shards] == [True, False, False, False]


def test_what_saves_no_time_is_not_kept():
    assert not any(choice(FAST, room(budget_bytes=ENDLESS), computed=PLAYED))


def test_where_nothing_is_known_of_copies_only_what_never_moves_is_kept():
    assert choice(None, room(budget_bytes=ENDLESS)) == [True] * 3 + [False]
    assert not any(choice(None, room()))


@pytest.mark.parametrize("is_running_kept", [False, True])
def test_measured_seconds_choose_as_estimates_do(is_running_kept):
    """A backward unit that keeps activations is measured without the forward, which a recomputing unit would add."""
    plan, kept = plans()
    sizes = [shard.cost.kept_bytes for shard in kept.shards[:-1]]
    exact = LinkCostModel(bytes_per_second=2 * max(sizes) * 0.999)
    running, seconds = (kept, PLAYED) if is_running_kept else (plan, COMPUTED)
    found, expected = MeasuredActivationChoice(plan, kept, exact, room()).made(running, seconds)
    assert [shard.keeps_activations for shard in found.shards] == [size < max(sizes) for size in sizes] + [False]
    assert expected == seconds_of(found, COMPUTED, PLAYED)


@pytest.mark.parametrize("there_is", [room(), room(host_bytes=0)])
def test_seconds_are_those_of_the_units_that_will_run(there_is):
    plan, kept = plans()
    found = chosen(plan, kept, COMPUTED, PLAYED, FAST, there_is)
    expected = COMPUTED if there_is.host_bytes == 0 else PLAYED
    assert seconds_of(found, COMPUTED, PLAYED) == expected
