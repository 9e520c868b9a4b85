"""Operators that follow one another are added up at once, and are what they are one by one."""

from dataclasses import replace
from random import Random

import pytest

from hydra_tune.planner.cost.latency import timed
from hydra_tune.planner.cost.peak_memory import curve, followed, peak_of
from hydra_tune.planner.ir.instructions import Instruction, InstructionKind, InstructionSequence, InstructionSlice
from hydra_tune.planner.ir.lowering import _SegmentLowering, lowered, start_bytes, stretched
from hydra_tune.planner.ir.plan_state import undecided
from hydra_tune.planner.passes.swap_recompute import planned
from tests.unit.planner.test_same_plans import drawn

NEEDS = ((3, 1, 0), (2, 4, 5), (7, 0, 0), (0, 6, 1), (1, 1, 8))  # made, freed, workspace


def line():
    each = [
        Instruction(kind=InstructionKind.RUN, side=0, is_backward=False, rank=rank, seconds=rank + 1.0,
                    made_bytes=made, freed_bytes=freed, workspace_bytes=workspace)
        for rank, (made, freed, workspace) in enumerate(NEEDS)
    ]  # fmt: skip
    return InstructionSequence(each)


def test_sums_are_of_what_each_makes_frees_and_takes():
    made = line()
    assert made.before == [0, 2, 0, 7, 1, 1]
    assert made.during == [3, 9, 7, 8, 10]
    assert [one // 10**12 for one in made.clock] == [0, 1, 3, 6, 10, 15]


@pytest.mark.parametrize("begin", range(5))
def test_places_are_those_that_a_search_one_by_one_finds(begin):
    made = line()
    for end in range(begin + 1, 6):
        each = range(begin, end)
        assert made.top(begin, end) == max(each, key=lambda rank: (made.during[rank], -rank))
        for level in range(12):
            assert made.first_above(begin, end, level) == next((r for r in each if made.during[r] > level), end)
            late = (r for r in each if made.clock[r + 1] - made.clock[begin] >= level * 10**12)
            assert made.first_after(begin, end, level * 10**12) == next(late, end)


def one_by_one(self, line, begin, end):
    for rank in range(begin, end):
        self._run(line.instructions[rank])
        if not line.is_backward and not line.is_again:
            self._num_forward = rank + 1


@pytest.mark.parametrize("seed", range(4))
def test_copies_end_where_they_do_operator_by_operator(seed, monkeypatch):
    random = Random(seed)
    pair = tuple(replace(drawn(seed + side)) for side in (20, 40))
    limit = int(peak_of(undecided(pair, 1 << 60))[1].peak_bytes * random.choice((0.7, 0.5, 0.4)))
    schedule, _ = planned(undecided(pair, limit))
    assert any(one.swaps for one in schedule.decisions)
    for segment in (*schedule.segments, *schedule.ends):
        pieces, start = stretched(schedule, segment), start_bytes(schedule, segment)
        assert any(isinstance(one, InstructionSlice) and one.end > one.begin + 1 for one in pieces)
        instructions = lowered(schedule, segment)
        assert followed(pieces, start) == followed(instructions, start)
        assert followed(pieces, start).peak_bytes == max(start, *curve(schedule, segment))
        assert timed(pieces, is_duplex=False) == timed(instructions, is_duplex=False)
        with monkeypatch.context() as patch:
            patch.setattr(_SegmentLowering, "_run_all", one_by_one)
            expected = lowered(schedule, segment)
        assert list(map(told, instructions)) == list(map(told, expected))


def told(one):
    """All but how many have run when a copy has ended, which nothing reads."""
    return (one.kind, one.side, one.is_backward, one.storage, one.kind is InstructionKind.RELEASE or one.rank)
