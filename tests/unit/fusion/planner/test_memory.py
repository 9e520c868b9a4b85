"""Algorithm G and the instructions that it follows: every storage counted once, from its making to its end."""

import pytest

from hydra_tune.fusion.planner.candidates import candidates_of
from hydra_tune.fusion.planner.instructions import Kind
from hydra_tune.fusion.planner.lowering import lowered
from hydra_tune.fusion.planner.memory import curve, peak_of, simulated
from hydra_tune.fusion.planner.schedule import Segment, undecided
from hydra_tune.fusion.planner.timeline import timed, times_of
from hydra_tune.fusion.planner.verify import verify_instructions, verify_schedule
from tests.unit.fusion.planner.hand import array, chain, op

BACKWARD, FORWARD = Segment(0, None), Segment(None, 0)


def one(made, limit=1000):
    return undecided((made,), limit)


def told(schedule, segment):
    return [(i.kind.value, i.storage or i.rank) for i in lowered(schedule, segment)]


def test_feature_maps_pile_up_in_the_forward_and_go_in_the_backward():
    schedule = one(chain(4, num_bytes=10, static=5))
    assert curve(schedule, FORWARD) == (15, 25, 35, 45, 45)
    assert curve(schedule, BACKWARD) == (45, 35, 25, 15)
    assert peak_of(schedule)[1].peak_bytes == 45


def test_workspace_and_what_only_the_forward_uses_count_while_they_are_there():
    made = array([op("t", workspace=7), op("a", reads=["t"])], [op("d", reads=["a"])], {"t": 3, "a": 2, "d": 1})
    assert curve(one(made), FORWARD) == (10, 5)
    assert curve(one(made), BACKWARD) == (3,)


def test_a_recomputed_map_goes_after_its_last_use_and_is_there_again_from_its_first_on():
    schedule = one(chain(4, num_bytes=10))
    schedule.decisions[0].recomputes["z1"] = candidates_of(schedule.arrays[0], 0)["z1"]
    assert told(schedule, FORWARD)[2:4] == [("run", 2), ("delete", "z1")]
    assert simulated(schedule, FORWARD).peak_bytes == 30
    assert told(schedule, BACKWARD) == [("run", 0), ("run", 1), ("recompute", "z1"), ("run", 2), ("run", 3)]
    assert curve(schedule, BACKWARD) == (30, 20, 20, 20, 10)
    verify_schedule(schedule)


def test_what_is_made_on_the_way_to_a_recomputed_map_goes_at_once():
    forward = [op("a"), op("t", reads=["a"]), op("b", reads=["t"]), op("end")]
    made = array(forward, [op("d", reads=["b"]), op("e", reads=["a"])], {"a": 1, "t": 100, "b": 10})
    schedule = one(made)
    schedule.decisions[0].recomputes["b"] = candidates_of(made, 0)["b"]
    assert curve(schedule, BACKWARD) == (101, 111, 11, 1)
    verify_schedule(schedule)


def test_a_recomputation_keeps_its_sources():
    """`z1` is used before, and stays until `z0`... is made of it."""
    forward = [op("a"), op("b", reads=["a"]), op("end")]
    made = array(forward, [op("d", reads=["a"]), op("e"), op("f", reads=["b"])], {"a": 10, "b": 10})
    schedule = one(made)
    assert simulated(schedule, BACKWARD).by_rank == (20, 10, 10, 0)
    schedule.decisions[0].recomputes["b"] = candidates_of(made, 0)["b"]
    assert simulated(schedule, BACKWARD).by_rank == (10, 10, 20, 0)


def test_a_swapped_map_is_freed_when_its_copy_has_ended_and_not_before():
    made = chain(4, num_bytes=10)
    out = {name: (1.5 if name == "z0" else 0.0) for name in made.maps}
    slow = array(made.forward, made.backward, made.sizes, copy=dict.fromkeys(made.maps, 1.0), results=("loss",))
    slow = type(slow)(
        **{name: getattr(slow, name) for name in ("name", "forward", "backward", "sizes", "in_seconds", "results")},
        out_seconds=out,
    )
    schedule = one(slow)
    schedule.decisions[0].swaps["z0"] = 2
    assert told(schedule, FORWARD) == [
        ("run", 0), ("run", 1), ("offload", "z0"), ("run", 2), ("run", 3), ("release", "z0"), ("run", 4),
    ]  # fmt: skip
    assert curve(schedule, FORWARD) == (10, 20, 20, 30, 40, 40, 30)
    assert timed(lowered(schedule, FORWARD), is_duplex=True).stall == 0.0
    tight = undecided((slow,), 30)
    tight.decisions[0].swaps["z0"] = 2
    assert told(tight, FORWARD)[4:6] == [("release", "z0"), ("run", 3)]
    assert simulated(tight, FORWARD).peak_bytes == 30
    assert timed(lowered(tight, FORWARD), is_duplex=True).stall == pytest.approx(0.5)


def test_a_map_that_comes_back_counts_from_its_prompt_on():
    schedule = one(chain(4, num_bytes=10))
    schedule.decisions[0].swaps["z0"] = 1
    assert told(schedule, BACKWARD) == [
        ("run", 0), ("prefetch", "z0"), ("run", 1), ("run", 2), ("arrive", "z0"), ("run", 3),
    ]  # fmt: skip
    assert simulated(schedule, BACKWARD).by_rank == (30, 30, 20, 10, 0)


def test_a_swapped_map_comes_back_before_it_is_recomputed_from():
    schedule = one(chain(4, num_bytes=10))
    candidates = candidates_of(schedule.arrays[0], 0)
    schedule.decisions[0].recomputes["z1"] = candidates["z1"]
    schedule.decisions[0].swaps["z0"] = 3
    assert told(schedule, BACKWARD)[2:5] == [("prefetch", "z0"), ("arrive", "z0"), ("recompute", "z1")]
    verify_schedule(schedule)


def test_both_sub_arrays_of_a_segment_count():
    schedule = undecided((chain(3, num_bytes=10, static=1), chain(2, num_bytes=100, static=2)), 1000)
    assert curve(schedule, Segment(0, 1)) == (33, 23, 13, 103, 203, 203)
    schedule.decisions[0].slots[2] = 1.0
    assert curve(schedule, Segment(0, 1)) == (33, 23, 113, 113, 203, 203)
    verify_schedule(schedule)


def test_times_say_what_is_computed_waited_for_and_hidden():
    made = chain(4, copy=1.5)
    schedule = one(made)
    schedule.decisions[0].swaps["z0"] = 2
    found = times_of(schedule, is_duplex=True)
    assert (found.compute, found.recompute, found.stall, found.copies) == (9.0, 0.0, 0.5, 1.5)
    assert found.seconds == 9.5
    assert found.overlapped == pytest.approx(2 / 3)


def test_copies_share_a_link_that_is_not_duplex():
    first, second = chain(3, copy=1.0), chain(3, copy=1.0)
    out = dict.fromkeys(second.maps, 1.0)
    arrays = tuple(
        type(a)(
            **{n: getattr(a, n) for n in ("name", "forward", "backward", "sizes", "in_seconds", "results")},
            out_seconds=out,
        )
        for a in (first, second)
    )
    schedule = undecided(arrays, 1000)
    schedule.decisions[0].swaps["z0"] = 2
    schedule.decisions[0].slots[2] = 3.0
    schedule.decisions[1].swaps["z0"] = 2
    assert times_of(schedule, is_duplex=False).stall >= times_of(schedule, is_duplex=True).stall


@pytest.mark.parametrize("spoil", ["order", "missing", "unreleased", "early"])
def test_what_does_not_hold_is_found(spoil):
    schedule = one(chain(4, num_bytes=10))
    schedule.decisions[0].swaps["z0"] = 1
    segment = FORWARD if spoil == "unreleased" else BACKWARD
    instructions = lowered(schedule, segment)
    verify_instructions(schedule, segment, instructions)
    if spoil == "order":
        instructions[0], instructions[2] = instructions[2], instructions[0]
    else:
        kind = {"missing": Kind.PREFETCH, "unreleased": Kind.RELEASE, "early": Kind.ARRIVE}[spoil]
        del instructions[next(place for place, i in enumerate(instructions) if i.kind is kind)]
    with pytest.raises(AssertionError):
        verify_instructions(schedule, segment, instructions)
