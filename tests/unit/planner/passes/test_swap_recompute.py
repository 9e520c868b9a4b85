"""Algorithm B: what is swapped, what is recomputed, and that nothing is done which is not needed."""

from dataclasses import replace

import pytest

from hydra_tune.planner.cost.latency import times_of
from hydra_tune.planner.cost.peak_memory import peak_of
from hydra_tune.planner.ir.plan_state import undecided
from hydra_tune.planner.ir.verify import verify_schedule
from hydra_tune.planner.passes.candidates import candidates_of
from hydra_tune.planner.passes.swap_overhead import SwapCase, swap_overhead
from hydra_tune.planner.passes.swap_recompute import AllowedPlanActions, planned
from hydra_tune.planner.profile.profiler import copied_at
from tests.unit.planner.hand import array, chain, op

PAIR = (chain(8, num_bytes=10, copy=1.0), chain(8, num_bytes=10, copy=1.0))


def test_within_the_limit_nothing_is_done():
    schedule, decided = planned(undecided(PAIR, 80))
    assert decided == []
    assert times_of(schedule, is_duplex=True).seconds == sum(a.seconds for a in PAIR)


@pytest.mark.parametrize(
    "policy",
    [
        AllowedPlanActions(),
        AllowedPlanActions(swaps=False),
        AllowedPlanActions(recomputes=False),
        AllowedPlanActions(interleaves=False),
    ],
)
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
    _, decided = planned(undecided(PAIR, 60), AllowedPlanActions(recomputes=False))
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
    """A copy of 3 seconds, of which the backward before it hides one, and a partner's forward of 4 that takes no memory."""
    forward = [op("a"), op("b", reads=["a"]), op("loss", reads=["b"], workspace=10)]
    made = array(forward, [op("d", reads=["b"]), op("e", reads=["a"])], {"a": 10}, copy={"a": 3.0})
    partner = array([op(f"y{i}", makes=()) for i in range(4)], [op("w")], {})
    waits, _ = planned(undecided((made, partner), 15), AllowedPlanActions(recomputes=False, interleaves=False))
    hides, _ = planned(undecided((made, partner), 15), AllowedPlanActions(recomputes=False))
    assert [peak_of(one)[1].peak_bytes for one in (waits, hides)] == [10, 10]
    assert waits.decisions[0].slots == {}
    assert hides.decisions[0].slots == {1: 3.0}
    assert [times_of(one, is_duplex=True).stall for one in (waits, hides)] == [2.0, 0.0]


def sized(**sizes):
    """Five maps of a chain, of which some are larger, and a loss that works in 10 bytes beside them; z0 is not computed again,
    and alone is copied."""
    made = chain(5, copy=2.0, workspace=10)
    copies = {name: seconds for name, seconds in made.in_seconds.items() if name == "z0"}
    forward = tuple(replace(one, is_random=one.name in ("z0", "z2")) for one in made.forward)
    return replace(
        made, forward=forward, sizes={**made.sizes, **sizes}, in_seconds=copies, out_seconds=dict.fromkeys(copies, 0.0)
    )


@pytest.mark.parametrize(("again", "prompt"), [(1.0, 3), (0.5, 2)])
def test_a_recomputation_on_its_way_lets_a_swap_begin_later(again, prompt):
    """Line 22. z0 takes 2 seconds and is used at rank 4: it is sent for before rank 2. Then z1 is to be computed again at rank
    3, of a parameter: in the second that this takes the copy may go on, and so begin before rank 3; half a second does not
    spare a whole operator."""
    made = sized(z1=12)
    (z1,) = (one for one in made.forward if one.name == "z1")
    made = replace(made, forward=(made.forward[0], replace(z1, seconds=again, reads=()), *made.forward[2:]))
    schedule, found = planned(undecided((made,), 24))
    assert [(one.name, one.case) for one in found] == [("z0", SwapCase.MIXED), ("z1", None)]
    assert schedule.decisions[0].recomputes["z1"].sources == frozenset()
    assert schedule.decisions[0].swaps == {"z0": prompt}
    assert times_of(schedule, is_duplex=True).stall == 0


def test_a_recomputation_from_a_swapped_map_does_not_hide_its_copy():
    """As above, but z1 is made of z0, which is needed at rank 3 for that: one second is beside its copy of two."""
    schedule, found = planned(undecided((sized(z1=12),), 24))
    assert [one.name for one in found] == ["z0", "z1"]
    assert schedule.decisions[0].recomputes["z1"].sources == {"z0"}
    assert schedule.decisions[0].swaps == {"z0": 2}
    assert times_of(schedule, is_duplex=True).stall == 1.0


def test_a_source_that_is_sent_for_when_it_is_needed_is_sent_for_sooner():
    """Line 22. A copy without time begins where it is used, rank 4; it is needed at rank 3 when z1 is computed of it there."""
    made = replace(sized(z1=12), in_seconds={"z0": 0.0})
    schedule, _ = planned(undecided((made,), 24))
    assert schedule.decisions[0].swaps == {"z0": 3}


def test_forward_operators_added_for_a_swap_go_where_the_map_is_recomputed_instead():
    """The swap takes 5 seconds, of which the partner's forward hides one; computing the map again takes one."""
    made = array([op("a"), op("rest")], [op("d", reads=["a"])], {"a": 10}, copy={"a": 5.0})
    partner = array([op("y", makes=()), op("loss", seconds=0.0)], [op("e")], {})
    start = undecided((made, replace(partner, static_bytes=0)), 10)
    crowded = replace(start, arrays=(replace(made, forward=(made.forward[0], op("rest", workspace=5))), partner))
    assert swap_overhead(crowded, candidates_of(made, 0)["a"]).slots == {0: 1.0}
    schedule, found = planned(crowded)
    assert [(one.name, one.case) for one in found] == [("a", None)]
    assert not any(one.slots or one.swaps for one in schedule.decisions)


@pytest.mark.parametrize("is_backward", [False, True])
def test_maps_that_are_used_on_both_sides_of_the_peak_are_no_candidates(is_backward):
    """`a` is there at the peak, the operator of 30 bytes, whatever is done."""
    busy = op("busy", workspace=30)
    forward = [op("a"), op("p") if is_backward else busy, op("end", reads=["a"])]
    backward = [op("d", reads=["a"]), busy if is_backward else op("p"), op("e", reads=["a"])]
    made = array(forward, backward, {"a": 10}, copy={"a": 1.0})
    schedule, found = planned(undecided((made,), 35))
    assert found == []
    assert peak_of(schedule)[1].peak_bytes == 40


def test_where_nothing_else_helps_forward_operators_are_taken_out_of_the_backward():
    """The partner's `y` of 8 bytes was put before `d`, where 10 are needed; behind it there is room."""
    made = array([op("a", is_random=True)], [op("d", reads=["a"])], {"a": 10})
    partner = array([op("y", is_random=True), op("loss")], [op("e", reads=["y"])], {"y": 8})
    start = undecided((made, partner), 18)
    start.decisions[0].slots[0] = 1.0
    assert peak_of(start)[1].peak_bytes == 18
    tight = replace(start, limit_bytes=17)
    schedule, found = planned(tight)
    assert schedule.decisions[0].slots == {}
    assert found == []
    assert start.decisions[0].slots == {0: 1.0}


def test_what_has_proved_needless_is_undone():
    """`a` lies idle longest and its 4 bytes are not enough; with the 20 of `b` away it need not have gone."""
    forward = [op("a", is_random=True), op("b", is_random=True), op("end")]
    made = array(
        forward, [op("d"), op("e", reads=["b"]), op("f", reads=["a"])], {"a": 4, "b": 20}, copy={"a": 0.5, "b": 0.5}
    )
    made = replace(made, forward=(*made.forward[:2], op("end", workspace=10)))
    schedule, found = planned(undecided((made,), 24))
    assert [one.name for one in found] == ["b"]
    assert list(schedule.decisions[0].swaps) == ["b"]


def test_how_long_a_map_is_computed_again_in_all_is_kept():
    """z2 is larger, and comes first; z1 is then computed for itself and for z2."""
    made = replace(chain(5), in_seconds={}, out_seconds={}, sizes={**chain(5).sizes, "z2": 8})
    made = replace(made, forward=tuple(replace(one, is_random=one.name in ("z0", "z3", "z4")) for one in made.forward))
    schedule, found = planned(undecided((made,), 12))
    assert [one.name for one in found] == ["z2", "z1"]
    again = schedule.decisions[0].recomputes
    assert (again["z1"].seconds, again["z1"].total_seconds) == (1.0, 2.0)
    assert (again["z2"].seconds, again["z2"].total_seconds) == (2.0, 2.0)
