"""Algorithm G and the instructions that it follows: every storage counted once, from its making to its end."""

from dataclasses import replace

import pytest

from hydra_tune.planner.cost.latency import timed, times_of
from hydra_tune.planner.cost.peak_memory import curve, peak_of, simulated
from hydra_tune.planner.ir.instructions import InstructionKind
from hydra_tune.planner.ir.lowering import lowered
from hydra_tune.planner.ir.plan_state import ScheduleSegment, undecided
from hydra_tune.planner.ir.verify import verify_instructions, verify_schedule
from hydra_tune.planner.passes.candidates import candidates_of
from tests.unit.planner.hand import array, chain, op

BACKWARD, FORWARD = ScheduleSegment(0, None), ScheduleSegment(None, 0)


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


def test_what_is_recomputed_at_a_use_is_beside_the_copy_that_the_use_waits_for():
    """Algorithm H: first what is sent for, then what is recomputed, then the wait; but sources are waited for before."""
    forward = [op("a"), op("m", is_random=True), op("b"), op("c", reads=["m"]), op("end")]
    made = array(
        forward, [op("p"), op("d", reads=["a", "b", "c"])], dict.fromkeys("abc", 10), copy={"a": 1.5, "m": 0.0}
    )
    schedule = one(made)
    schedule.decisions[0].swaps["a"] = 1
    schedule.decisions[0].recomputes["b"] = candidates_of(made, 0)["b"]
    assert told(schedule, BACKWARD) == [
        ("run", 0), ("prefetch", "a"), ("recompute", "b"), ("arrive", "a"), ("run", 1),
    ]  # fmt: skip
    verify_schedule(schedule)
    found = times_of(schedule, is_duplex=True)
    assert (found.recompute, found.stall, found.copies) == (1.0, 0.5, 1.5)


def test_both_sub_arrays_of_a_segment_count():
    schedule = undecided((chain(3, num_bytes=10, static=1), chain(2, num_bytes=100, static=2)), 1000)
    assert curve(schedule, ScheduleSegment(0, 1)) == (33, 23, 13, 103, 203, 203)
    schedule.decisions[0].slots[2] = 1.0
    assert curve(schedule, ScheduleSegment(0, 1)) == (33, 23, 113, 113, 203, 203)
    verify_schedule(schedule)


def test_times_say_what_is_computed_waited_for_and_hidden():
    made = chain(4, copy=1.5)
    schedule = one(made)
    schedule.decisions[0].swaps["z0"] = 2
    found = times_of(schedule, is_duplex=True)
    assert (found.compute, found.recompute, found.stall, found.copies) == (9.0, 0.0, 0.5, 1.5)
    assert found.seconds == 9.5


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
        kind = {
            "missing": InstructionKind.PREFETCH,
            "unreleased": InstructionKind.RELEASE,
            "early": InstructionKind.ARRIVE,
        }[spoil]
        del instructions[next(place for place, i in enumerate(instructions) if i.kind is kind)]
    with pytest.raises(AssertionError):
        verify_instructions(schedule, segment, instructions)


def test_the_peak_is_where_both_sub_arrays_have_come_to_then():
    """Backward of z2, z1, z0 of 10 bytes each and `dw` with 7 more; between rank 1 and 2 the other's two of 100, of which the
    second works in 50 beside."""
    first = array(
        [op("z0"), op("z1"), op("z2")],
        [op("d2", reads=["z2"]), op("dw", reads=["z1"], workspace=7), op("d0", reads=["z0"])],
        dict.fromkeys(["z0", "z1", "z2"], 10),
    )
    second = array([op("y0"), op("y1", workspace=50), op("y2")], [op("e", reads=["y0", "y1"])], {"y0": 100, "y1": 100})
    schedule = undecided((first, second), 1000)
    schedule.decisions[0].slots[2] = 2.0
    found = simulated(schedule, ScheduleSegment(0, 1))
    assert found.by_rank == (30, 27, 260, 200)
    assert (found.peak_bytes, found.peak_backward, found.peak_forward) == (260, 2, 1)
    alone = simulated(undecided((first,), 1000), BACKWARD)
    assert (alone.peak_bytes, alone.peak_backward, alone.by_rank) == (30, 0, (30, 27, 10, 0))
    busier = replace(
        first, backward=(first.backward[0], replace(first.backward[1], workspace_bytes=17), first.backward[2])
    )
    alone = simulated(undecided((busier,), 1000), BACKWARD)
    assert (alone.peak_bytes, alone.peak_backward) == (37, 1)
    alone = simulated(undecided((second,), 1000), FORWARD)
    assert (alone.peak_bytes, alone.peak_forward) == (250, 1)


def test_the_workspace_of_an_operator_that_ends_a_source_counts():
    """`e` works in 40 bytes beside `a`, which it ends though it does not read it: `b` is made of it there."""
    forward = [op("a"), op("b", reads=["a"]), op("end")]
    made = array(forward, [op("d", reads=["a"]), op("e", reads=["b"], workspace=40)], {"a": 10, "b": 20})
    schedule = one(made)
    schedule.decisions[0].recomputes["b"] = candidates_of(made, 0)["b"]
    assert curve(schedule, BACKWARD) == (10, 30, 70)
    assert simulated(schedule, BACKWARD).peak_bytes == 70
    assert simulated(schedule, BACKWARD).by_rank == (10, 70, 0)


def test_copies_to_the_host_go_one_after_the_other():
    """Both leave behind the second operator, with 1.5 seconds each: until 3.5 and 5 seconds, the fourth and the fifth."""
    made = array([op(name) for name in ("a", "b", "p", "q", "r")], [op("d", reads=["a", "b"])], {"a": 10, "b": 10})
    forward = [made.forward[0], op("b", reads=["a"]), *made.forward[2:]]
    made = replace(made, forward=tuple(forward), out_seconds={"a": 1.5, "b": 1.5}, in_seconds={"a": 1.0, "b": 1.0})
    schedule = one(made)
    schedule.decisions[0].swaps.update(a=0, b=0)
    assert told(schedule, FORWARD) == [
        ("run", 0), ("run", 1), ("offload", "a"), ("offload", "b"), ("run", 2), ("run", 3), ("release", "a"), ("run", 4),
        ("release", "b"),
    ]  # fmt: skip
