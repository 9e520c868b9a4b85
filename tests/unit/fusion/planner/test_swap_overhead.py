"""Algorithm C: where a swap begins, what hides it, and what is left to wait for."""

import pytest

from hydra_tune.fusion.planner.candidates import candidates_of
from hydra_tune.fusion.planner.policy import Policy, planned
from hydra_tune.fusion.planner.schedule import Segment, undecided
from hydra_tune.fusion.planner.swap_overhead import Case, swap_overhead
from tests.unit.fusion.planner.hand import array, chain, op, paper

LIMIT = 10


def test_the_papers_example_case_by_case():
    """§4.2.2: Z1 behind two forward operators; Z2 behind one and a backward one; Z3 in part; Z4 not at all."""
    schedule, decided = planned(undecided(paper(), LIMIT), Policy(recomputes=False))
    assert [(one.name, one.case, one.seconds) for one in decided] == [
        ("z1", Case.FORWARD_ONLY, 0.0),
        ("z2", Case.MIXED, 0.0),
        ("z3", Case.PARTIAL, 1.0),
        ("z4", Case.NO_OVERLAP, 2.0),
    ]
    assert schedule.decisions[0].swaps == {"z1": 6, "z2": 3, "z3": 1, "z4": 0}


def test_the_earlier_swap_takes_the_first_forward_operator_and_the_later_one_those_behind():
    """`adjust_graph`: Z1 was hidden by the first two operators, and is by the second and third when Z2 takes the first."""
    schedule = undecided(paper(), LIMIT)
    candidates = candidates_of(schedule.arrays[0], 0)
    proposal = swap_overhead(schedule, candidates["z1"])
    schedule.decisions[0].swaps["z1"], schedule.decisions[0].slots = proposal.prompt, proposal.slots
    assert schedule.forward_before(Segment(0, 1)) == [0, 0, 0, 0, 0, 0, 2]
    proposal = swap_overhead(schedule, candidates["z2"])
    schedule.decisions[0].slots = proposal.slots
    assert schedule.forward_before(Segment(0, 1)) == [0, 0, 0, 0, 1, 1, 3]


def test_a_candidate_whose_stall_is_longer_than_its_recomputation_is_recomputed():
    """§4.2.2: "At this point we can also switch to recompute Z3"."""
    _, decided = planned(undecided(paper(), LIMIT), Policy())
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
    assert proposal.case is Case.MIXED
    assert proposal.prompt == 5
    assert sum(proposal.slots.values()) == 1.0


def test_nothing_is_multiplexed_unless_it_may_be():
    schedule = undecided(paper(), LIMIT)
    proposal = swap_overhead(schedule, candidates_of(schedule.arrays[0], 0)["z1"], is_interleaved=False)
    assert (proposal.case, proposal.prompt, proposal.slots) == (Case.PARTIAL, 5, {})


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
    assert (proposal.case, proposal.seconds, proposal.prompt) == (Case.NO_OVERLAP_CONFLICT, 5.0, 1)


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
    assert (found.case, found.prompt) == (Case.NO_OVERLAP_CONFLICT, 2)
    assert found.seconds == 3.0 - 1.0 + (2.5 - 1.0)


@pytest.mark.parametrize(("limit", "prompt"), [(8, 3), (7, 4)])
def test_a_copy_begins_only_where_there_is_room_for_it(limit, prompt):
    made = chain(5, copy=1.0)
    schedule = undecided((made,), limit)
    proposal = swap_overhead(schedule, candidates_of(made, 0)["z0"])
    assert proposal.prompt == prompt
