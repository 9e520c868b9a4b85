"""Small maps are copied by the thread that computes, for handing them over takes longer; what handing over takes is counted."""

from dataclasses import replace

import pytest

from hydra_tune.planner.cost.latency import timed, times_of
from hydra_tune.planner.cost.peak_memory import simulated
from hydra_tune.planner.ir import planner_ops
from hydra_tune.planner.ir.lowering import lowered
from hydra_tune.planner.ir.plan_state import ScheduleSegment, undecided
from hydra_tune.planner.ir.verify import verify_schedule
from hydra_tune.planner.passes.candidates import candidates_of
from hydra_tune.planner.passes.swap_overhead import swap_overhead
from hydra_tune.planner.passes.swap_recompute import AllowedPlanActions, planned
from tests.unit.planner.hand import chain
from tests.unit.planner.run.test_planned_run import array, assert_same_as_unplanned, limited, tracked

FORWARD, BACKWARD = ScheduleSegment(None, 0), ScheduleSegment(0, None)


def swapping(at_once=(), hand_seconds=0.0):
    """A chain whose first map is swapped, with a prompt two operators before its use."""
    made = chain(4, num_bytes=10, copy=0.25)
    out = dict.fromkeys(made.maps, 0.5)
    schedule = undecided((replace(made, out_seconds=out, at_once=frozenset(at_once), hand_seconds=hand_seconds),), 1000)
    schedule.decisions[0].swaps["z0"] = 1
    return schedule


def told(schedule, segment):
    return [(one.kind.value, one.storage or one.rank) for one in lowered(schedule, segment)]


def test_it_leaves_and_comes_back_where_it_is_used():
    schedule = swapping(["z0"])
    verify_schedule(schedule)
    assert told(schedule, FORWARD)[:4] == [("run", 0), ("run", 1), ("offload", "z0"), ("release", "z0")]
    assert told(schedule, BACKWARD)[-3:] == [("prefetch", "z0"), ("arrive", "z0"), ("run", 3)]
    assert simulated(schedule, FORWARD).peak_bytes == 40 - 10
    found = times_of(schedule, is_duplex=True)
    assert (found.stall, found.copies) == (0.75, 0.75)


def test_handing_over_delays_the_operators_and_not_the_copy_alone():
    found = times_of(swapping(hand_seconds=0.1), is_duplex=True)
    assert found.stall == pytest.approx(0.2)
    assert found.seconds == pytest.approx(times_of(swapping(), is_duplex=True).seconds + 0.2)


def test_a_copy_at_once_does_not_wait_for_those_that_others_make():
    schedule = swapping(["z1"])
    schedule.decisions[0].swaps["z1"] = 1
    schedule = schedule.timed_by((replace(schedule.arrays[0], out_seconds={"z0": 50.0, "z1": 0.5}),))
    assert told(schedule, FORWARD) == [
        ("run", 0), ("run", 1), ("offload", "z0"), ("run", 2), ("offload", "z1"), ("release", "z1"), ("run", 3),
        ("run", 4), ("release", "z0"),
    ]  # fmt: skip
    assert timed(lowered(schedule, FORWARD), is_duplex=True).stall == pytest.approx(50 - 3 - 0.5 + 0.5)


def test_algorithm_c_counts_what_the_computing_thread_spends():
    hidden = undecided((chain(6, copy=0.25),), 10)
    candidate = candidates_of(hidden.arrays[0], 0)["z0"]
    free = swap_overhead(hidden, candidate).seconds
    handed = undecided((replace(hidden.arrays[0], hand_seconds=0.1),), 10)
    assert swap_overhead(handed, candidate).seconds == pytest.approx(free + 0.2)
    at_once = undecided((replace(hidden.arrays[0], at_once=frozenset(["z0"])),), 10)
    found = swap_overhead(at_once, candidate)
    assert (found.seconds, found.prompt) == (0.25, candidate.map.first_backward)


def test_what_costs_more_to_hand_over_than_to_compute_again_is_computed_again():
    def swaps(hand_seconds):
        made = replace(chain(6, num_bytes=10, copy=0.25), hand_seconds=hand_seconds)
        schedule, _ = planned(undecided((made,), 40), AllowedPlanActions())
        return len(schedule.decisions[0].swaps)

    assert swaps(0.0) > swaps(5.0) == 0


@pytest.fixture
def small():
    """A plan of two CNNs that swaps, all of it at once."""
    share = limited(("cnn", "cnn"), 0.5, AllowedPlanActions(recomputes=False))
    made = replace(array("cnn"), at_once=frozenset(array("cnn").maps))
    schedule, _ = planned(undecided((made, made), share.limit_bytes), AllowedPlanActions(recomputes=False))
    assert all(one.swaps for one in schedule.decisions)
    return schedule


def test_results_are_the_unplanned_runs_bit_for_bit(small):
    verify_schedule(small)
    merged = assert_same_as_unplanned(small, ("cnn", "cnn"))
    targets = {node.target for one in merged.values() for node in one.graph.nodes}
    assert {planner_ops.offload_at_once, planner_ops.prefetch_at_once} <= targets
    assert targets.isdisjoint({planner_ops.offload, planner_ops.prefetch})


@pytest.mark.cases(1 / 3)
def test_an_independent_tracker_finds_the_peak_that_was_planned(small):
    measured, predicted = tracked(small, ("cnn", "cnn"))
    assert 0.9 * predicted <= measured <= predicted
