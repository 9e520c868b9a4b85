"""Algorithm B: what is swapped, what is recomputed, and that nothing is done which is not needed."""

from dataclasses import replace

import pytest

from hydra_tune.fusion.planner.memory import peak_of
from hydra_tune.fusion.planner.policy import Policy, planned
from hydra_tune.fusion.planner.profiler import copied_at
from hydra_tune.fusion.planner.schedule import undecided
from hydra_tune.fusion.planner.timeline import times_of
from hydra_tune.fusion.planner.verify import verify_schedule
from tests.unit.fusion.planner.hand import chain

PAIR = (chain(8, num_bytes=10, copy=1.0), chain(8, num_bytes=10, copy=1.0))


def test_within_the_limit_nothing_is_done():
    schedule, decided = planned(undecided(PAIR, 80))
    assert decided == []
    assert times_of(schedule, is_duplex=True).seconds == sum(a.seconds for a in PAIR)


@pytest.mark.parametrize("policy", [Policy(), Policy(swaps=False), Policy(recomputes=False), Policy(interleaves=False)])
@pytest.mark.parametrize("limit", [70, 50, 40])
def test_the_limit_is_kept_by_whatever_may_be_done(limit, policy):
    schedule, _ = planned(undecided(PAIR, limit), policy)
    assert peak_of(schedule)[1].peak_bytes <= limit
    verify_schedule(schedule)
    for one in schedule.decisions:
        assert policy.swaps or not one.swaps
        assert policy.recomputes or not one.recomputes
        assert policy.interleaves or not one.slots


def test_maps_that_lie_idle_longest_are_swapped_first():
    _, decided = planned(undecided(PAIR, 60), Policy(recomputes=False))
    assert {one.name for one in decided} == {"z0", "z1"}


def test_a_recomputed_candidate_is_taken_out_by_its_own_name():
    """Line 17 as printed takes out the one that would have been swapped."""
    cheap = replace(PAIR[0], in_seconds=dict.fromkeys(PAIR[0].maps, 100.0))
    schedule, decided = planned(undecided((cheap,), 50))
    assert all(one.case is None for one in decided)
    assert [one.name for one in decided] == list(schedule.decisions[0].recomputes)
    assert peak_of(schedule)[1].peak_bytes <= 50


def test_where_nothing_helps_the_schedule_says_so():
    schedule, _ = planned(undecided(PAIR, 5))
    assert peak_of(schedule)[1].peak_bytes > 5


def test_a_slower_link_shifts_decisions_from_swaps_to_recomputations_and_never_back():
    """The curve of the share of swaps over bandwidth."""
    shares = []
    for bandwidth in (1e4, 30.0, 10.0, 5.0, 3.0, 2.0, 1.0, 1e-3):
        arrays = tuple(copied_at(array, bandwidth) for array in PAIR)
        schedule, _ = planned(undecided(arrays, 40))
        assert peak_of(schedule)[1].peak_bytes <= 40
        swaps = sum(len(one.swaps) for one in schedule.decisions)
        recomputes = sum(len(one.recomputes) for one in schedule.decisions)
        shares.append(swaps / (swaps + recomputes))
    assert shares[0] == 1.0
    assert shares[-1] < 0.5
    assert shares == sorted(shares, reverse=True), shares


def test_interleaving_hides_copies_that_would_be_waited_for():
    """A backward that is short beside its copies, and a partner whose forward takes none of its memory."""
    waits, _ = planned(undecided(PAIR, 40), Policy(recomputes=False, interleaves=False))
    hides, _ = planned(undecided(PAIR, 40), Policy(recomputes=False))
    assert times_of(hides, is_duplex=True).seconds <= times_of(waits, is_duplex=True).seconds
