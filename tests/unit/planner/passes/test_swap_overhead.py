"""Algorithm C: where a swap begins, what hides it, and what is left to wait for."""

from dataclasses import replace

import pytest

from hydra_tune.planner.ir.plan_state import ScheduleSegment, undecided
from hydra_tune.planner.passes.candidates import candidates_of
from hydra_tune.planner.passes.swap_overhead import SwapCase, swap_overhead
from hydra_tune.planner.passes.swap_recompute import AllowedPlanActions, planned
from tests.unit.planner.hand import array, chain, op, paper

LIMIT = 10


def test_the_papers_example_case_by_case():
    """§4.2.2: Z1 behind two forward operators; Z2 behind one and a backward one; Z3 in part; Z4 not at all."""
    schedule, decided = planned(undecided(paper(), LIMIT), AllowedPlanActions(recomputes=False))
    assert [(one.name, one.case, one.seconds) for one in decided] == [
        ("z1", SwapCase.FORWARD_ONLY, 0.0),
        ("z2", SwapCase.MIXED, 0.0),
        ("z3", SwapCase.PARTIAL, 1.0),
        ("z4", SwapCase.NO_OVERLAP, 2.0),
    ]
    assert schedule.decisions[0].swaps == {"z1": 6, "z2": 3, "z3": 1, "z4": 0}


def test_the_earlier_swap_takes_the_first_forward_operator_and_the_later_one_those_behind():
    """`adjust_graph`: Z1 was hidden by the first two operators, and is by the second and third when Z2 takes the first."""
    schedule = undecided(paper(), LIMIT)
    candidates = candidates_of(schedule.arrays[0], 0)
    proposal = swap_overhead(schedule, candidates["z1"])
    schedule.decisions[0].swaps["z1"], schedule.decisions[0].slots = proposal.prompt, proposal.slots
    assert schedule.forward_before(ScheduleSegment(0, 1)) == [0, 0, 0, 0, 0, 0, 2]
    proposal = swap_overhead(schedule, candidates["z2"])
    schedule.decisions[0].slots = proposal.slots
    assert schedule.forward_before(ScheduleSegment(0, 1)) == [0, 0, 0, 0, 1, 1, 3]


def test_a_candidate_whose_stall_is_longer_than_its_recomputation_is_recomputed():
    """§4.2.2: "At this point we can also switch to recompute Z3"."""
    _, decided = planned(undecided(paper(), LIMIT), AllowedPlanActions())
    assert {one.name: one.case for one in decided}["z4"] is None


def test_a_proposal_leaves_the_schedule_as_it_was():
    schedule = undecided(paper(), LIMIT)
    before = schedule.copy()
    swap_overhead(schedule, candidates_of(schedule.arrays[0], 0)["z1"])
    assert schedule == before


def test_it_ends_with_the_forward_graph():
    first, _ = paper()
    short = array([op("y1", is_random=True)], [op("d", reads=["y1"])], {"y1": 2})
    schedule = undecided((first, short), LIMIT)
    proposal = swap_overhead(schedule, candidates_of(first, 0)["z1"])
    assert proposal.case is SwapCase.MIXED
    assert proposal.prompt == 5
    assert sum(proposal.slots.values()) == 1.0


def test_nothing_is_multiplexed_unless_it_may_be():
    schedule = undecided(paper(), LIMIT)
    proposal = swap_overhead(schedule, candidates_of(schedule.arrays[0], 0)["z1"], is_interleaved=False)
    assert (proposal.case, proposal.prompt, proposal.slots) == (SwapCase.PARTIAL, 5, {})


def test_a_forward_operator_that_proved_unsafe_is_taken_out_again():
    first, _ = paper()
    large = array([op("y1", is_random=True)], [op("d", reads=["y1"])], {"y1": 50})
    proposal = swap_overhead(undecided((first, large), LIMIT), candidates_of(first, 0)["z1"])
    assert proposal.slots == {}


def test_another_swap_on_its_way_does_not_hide_this_one():
    """Case 1b: no room before, and the link busy until the other has come."""
    forward = [op("a"), op("b"), op("rest")]
    backward = [op("d0", workspace=20), op("d1", reads=["b"]), op("d2", reads=["a"])]
    made = array(forward, backward, {"a": 4, "b": 4}, copy={"a": 3.0, "b": 2.0})
    schedule = undecided((made,), 12)
    schedule.decisions[0].swaps["a"] = 1
    proposal = swap_overhead(schedule, candidates_of(made, 0)["b"])
    assert (proposal.case, proposal.seconds, proposal.prompt) == (SwapCase.NO_OVERLAP_CONFLICT, 5.0, 1)


def test_recomputations_on_the_way_hide_a_swap():
    """Lines 4, 5, 39 and 40."""
    made = chain(5, copy=3.0)
    schedule = undecided((made,), 100)
    candidates = candidates_of(made, 0)
    assert swap_overhead(schedule, candidates["z0"]).prompt == 1
    schedule.decisions[0].recomputes["z2"] = candidates["z2"]
    assert swap_overhead(schedule, candidates["z0"]).prompt == 2


def test_a_recomputation_at_the_access_hides_the_copy_that_another_still_waits_for():
    """Lines 4, 5 and 13: `b` is made again where `a` is needed, and the copy of `c`, on its way, has had some beside it."""
    forward = [op("a"), op("b"), op("c"), op("rest")]
    backward = [op("d0", workspace=20), op("d1"), op("d2", reads=["a", "b"]), op("d3", reads=["c"])]
    made = array(forward, backward, {"a": 4, "b": 4, "c": 4}, copy={"a": 3.0, "c": 2.5})
    schedule = undecided((made,), 8)
    schedule.decisions[0].swaps["c"] = 1
    schedule.decisions[0].recomputes["b"] = candidates_of(made, 0)["b"]
    found = swap_overhead(schedule, candidates_of(made, 0)["a"])
    assert (found.case, found.prompt) == (SwapCase.NO_OVERLAP_CONFLICT, 2)
    assert found.seconds == 3.0 - 1.0 + (2.5 - 1.0)


@pytest.mark.parametrize(("limit", "prompt"), [(8, 3), (7, 4)])
def test_a_copy_begins_only_where_there_is_room_for_it(limit, prompt):
    made = chain(5, copy=1.0)
    schedule = undecided((made,), limit)
    proposal = swap_overhead(schedule, candidates_of(made, 0)["z0"])
    assert proposal.prompt == prompt


def quiet(*seconds):
    """A partner whose forward makes nothing."""
    forward = [op(f"y{i}", makes=(), seconds=one) for i, one in enumerate(seconds)]
    return array([*forward, op("loss", seconds=0.0)], [op("e")], {}, name="quiet")


def test_nothing_hides_a_swap_that_is_needed_while_memory_is_short():
    """Line 6: the access is within the peak, and forward operators that take no memory are not put there either."""
    made = array([op("a"), op("rest")], [op("d0"), op("d1", reads=["a"], workspace=20)], {"a": 4}, copy={"a": 2.0})
    found = swap_overhead(undecided((made, quiet(1.0, 1.0)), 12), candidates_of(made, 0)["a"])
    assert (found.case, found.seconds, found.prompt, found.slots) == (SwapCase.NO_OVERLAP, 2.0, 1, {})


def test_forward_operators_are_added_only_where_the_peak_falls():
    """Of 24 bytes at `d2`, where `a` has come back, its swap takes none away; of 28 at `d0` it does."""

    def slots(at_first):
        backward = [op("d0", workspace=at_first), op("d1", reads=["a"]), op("d2", reads=["a"], workspace=20)]
        made = array([op("a"), op("rest")], backward, {"a": 4}, copy={"a": 1.0})
        return swap_overhead(undecided((made, quiet(1.0)), 14), candidates_of(made, 0)["a"]).slots

    assert slots(at_first=0) == {}
    assert slots(at_first=24) == {1: 1.0}


def test_a_swap_that_is_needed_by_the_same_operator_is_no_conflict():
    """It has to have come by then anyhow, and was counted when it was decided."""
    forward = [op("a"), op("b"), op("rest")]
    made = array(
        forward, [op("d0", workspace=20), op("d1", reads=["a", "b"])], {"a": 4, "b": 4}, copy={"a": 3.0, "b": 2.0}
    )
    schedule = undecided((made,), 8)
    schedule.decisions[0].swaps["a"] = 1
    found = swap_overhead(schedule, candidates_of(made, 0)["b"])
    assert (found.case, found.seconds) == (SwapCase.NO_OVERLAP, 2.0)


def test_operators_that_another_swap_has_beside_it_hide_no_second_one():
    """z0 is used at rank 4 and takes 1.5 seconds; the copy of z1, for rank 3, is on its way from rank 1 on. So ranks 3 and 0
    hide that of z0, and ranks 2 and 1 do not; without the other one ranks 3 and 2 do."""
    made = chain(5, copy=1.5)
    schedule = undecided((made,), 100)
    schedule.decisions[0].swaps["z1"] = 1
    found = swap_overhead(schedule, candidates_of(made, 0)["z0"])
    assert (found.case, found.prompt, found.seconds) == (SwapCase.MIXED, 0, 0.0)
    del schedule.decisions[0].swaps["z1"]
    assert swap_overhead(schedule, candidates_of(made, 0)["z0"]).prompt == 2


def test_handing_both_copies_over_is_added_and_small_ones_hide_nothing():
    """Half a second each: of z0 that is hidden, there and back; what the computing thread copies itself takes 1.0 and 2.0."""
    made = replace(chain(5, copy=2.0), hand_seconds=0.5, out_seconds=dict.fromkeys(chain(5).maps, 1.0))
    found = swap_overhead(undecided((made,), 100), candidates_of(made, 0)["z0"])
    assert (found.case, found.prompt, found.seconds) == (SwapCase.MIXED, 2, 1.0)
    at_once = replace(made, at_once=frozenset(["z0"]))
    found = swap_overhead(undecided((at_once,), 100), candidates_of(at_once, 0)["z0"])
    assert (found.case, found.prompt, found.seconds) == (SwapCase.NO_OVERLAP, 4, 3.0)


def test_a_source_is_sent_for_before_the_first_recomputation_that_needs_it():
    """z0 is used at rank 4, and z1 is made of it at rank 3; its copy takes two operators."""
    made = chain(5, copy=2.0)
    schedule = undecided((made,), 100)
    assert swap_overhead(schedule, candidates_of(made, 0)["z0"]).prompt == 2
    schedule.decisions[0].recomputes["z1"] = replace(candidates_of(made, 0)["z1"], seconds=0.0)
    assert swap_overhead(schedule, candidates_of(made, 0)["z0"]).prompt == 1


def test_what_is_recomputed_of_a_map_waits_for_its_copy():
    """z1 takes a second to be made of z0 at rank 3; before that there is room for z0 from rank 2 on."""
    made = chain(5, copy=3.0)
    schedule = undecided((made,), 12)
    schedule.decisions[0].recomputes["z1"] = candidates_of(made, 0)["z1"]
    found = swap_overhead(schedule, candidates_of(made, 0)["z0"])
    assert (found.prompt, found.seconds) == (1, 1.0)
    schedule.decisions[0].recomputes["z1"] = replace(candidates_of(made, 0)["z1"], sources=frozenset())
    assert swap_overhead(schedule, candidates_of(made, 0)["z0"]).seconds == 0.0
