"""Invariants of all lists of instructions and all merged graphs.

A failed check is a defect of a pass, and says nothing about the user's model. `Planner` (`planner/search/portfolio.py`)
checks each schedule as soon as a way is planned, and `planner/passes/graph_rewrite.py` checks each merged graph as soon
as the graph is written. A check must change nothing.
"""

from collections.abc import Sequence

from torch import fx

from hydra_tune.planner.ir import planner_ops
from hydra_tune.planner.ir.instructions import Instruction, InstructionKind
from hydra_tune.planner.ir.lowering import copied, lowered
from hydra_tune.planner.ir.plan_state import ScheduleSegment, SubArraySchedule


def verify_schedule(schedule: SubArraySchedule) -> None:
    """Verify all segments and ends of a schedule.

    Raises:
        AssertionError: an invariant does not hold.
    """
    for segment in (*schedule.segments, *schedule.ends):
        verify_instructions(schedule, segment, lowered(schedule, segment))


def verify_instructions(
    schedule: SubArraySchedule, segment: ScheduleSegment, instructions: Sequence[Instruction]
) -> None:
    """Verify that operators run once and in order, read only storages that are on the device, and that all copies end.

    Raises:
        AssertionError: an invariant does not hold.
    """
    state = _SegmentVerifier(schedule, segment)
    for instruction in instructions:
        if instruction.kind in (InstructionKind.RUN, InstructionKind.RERUN):
            state.runs(instruction)
        else:
            state.moves(instruction)
        state.changes(instruction)
    state.ends()


class _SegmentVerifier:
    """Storages on the device and copies under way, followed from one instruction to the next."""

    def __init__(self, schedule: SubArraySchedule, segment: ScheduleSegment) -> None:
        self._schedule, self._segment = schedule, segment
        self._there: set[tuple[int, str]] = set()
        self._moving: dict[InstructionKind, set[tuple[int, str]]] = {
            InstructionKind.OFFLOAD: set(),
            InstructionKind.PREFETCH: set(),
        }
        self._done = {True: 0, False: 0}
        if segment.backward is not None:
            decisions = schedule.decisions[segment.backward]
            names = schedule.arrays[segment.backward].maps.keys() - decisions.swaps.keys() - decisions.recomputes.keys()
            # Only these stay on the device between the forward and the backward.
            self._there = {(segment.backward, name) for name in names}

    def runs(self, one: Instruction) -> None:
        """Check an operator: in its turn, and on storages that are on the device."""
        array = self._schedule.arrays[one.side]
        op = (
            array.backward[one.rank] if one.kind is InstructionKind.RUN and one.is_backward else array.forward[one.rank]
        )
        if one.kind is InstructionKind.RUN:
            num_done = self._done[one.is_backward]
            assert one.rank == num_done, f"operator {one.rank} of {array.name} runs when {num_done} have run"
            self._done[one.is_backward] += 1
        for name in (*op.reads, *op.writes):
            # Static tensors have no size here, and are always on the device.
            if name not in array.sizes or name in op.makes:
                continue
            # A recomputation reads its own copy of a storage before the original, as in the merged graph.
            names = [name] if one.kind is InstructionKind.RUN else [copied(name, one.storage), name]
            present_names = [n for n in names if (one.side, n) in self._there]
            assert present_names, f"{one.kind} {one.rank} of {array.name} uses {name}, which is not there"
            # A copy to the host leaves the bytes readable, so only copies back are checked.
            is_coming = (one.side, present_names[0]) in self._moving[InstructionKind.PREFETCH]
            assert not is_coming, f"{one.kind} {one.rank} of {array.name} uses {name}, which is on its way"

    def moves(self, one: Instruction) -> None:
        key = (one.side, one.storage)
        if one.kind in self._moving:
            assert one.kind is InstructionKind.PREFETCH or key in self._there, f"{key} is sent away and is not there"
            self._moving[one.kind].add(key)
        elif one.kind is not InstructionKind.DELETE:
            copies = self._moving[
                InstructionKind.OFFLOAD if one.kind is InstructionKind.RELEASE else InstructionKind.PREFETCH
            ]
            assert key in copies, f"{one.kind} of {key}, whose copy has not begun"
            copies.remove(key)

    def changes(self, one: Instruction) -> None:
        """Apply the storages that an instruction makes and frees."""
        made_keys, freed_keys = {(one.side, name) for name in one.makes}, {(one.side, name) for name in one.frees}
        assert not made_keys & self._there, f"{made_keys & self._there} are made while they are there"
        self._there |= made_keys
        assert freed_keys <= self._there, f"{freed_keys - self._there} are freed and are not there"
        self._there -= freed_keys

    def ends(self) -> None:
        assert not any(self._moving.values()), f"{self._moving} are on their way at the end"
        for side, is_backward in ((self._segment.backward, True), (self._segment.forward, False)):
            if side is not None:
                ops = self._schedule.arrays[side].backward if is_backward else self._schedule.arrays[side].forward
                assert self._done[is_backward] == len(ops), f"{self._done[is_backward]} of {len(ops)} operators run"


def verify_graph(graph: fx.Graph) -> None:
    """Verify that every copy is waited for, and no later node uses the tensor that a node has sent away or deleted.

    Raises:
        AssertionError: an invariant does not hold.
    """
    graph.lint()
    for node in graph.nodes:
        if node.target in (planner_ops.offload, planner_ops.offload_at_once):
            assert [user.target for user in node.users] == [planner_ops.release], f"{node} is not released once"
            (value, _) = node.args
            later = [user for user in value.users if user > node]
            assert not later, f"{later} use {value}, which {node} has sent away"
        if node.target in (planner_ops.prefetch, planner_ops.prefetch_at_once):
            assert [user.target for user in node.users] == [planner_ops.arrived], f"{node} is not waited for once"
        if node.target is planner_ops.delete:
            later = [user for value in node.args for user in value.users if user > node]
            assert not later, f"{later} use what {node} has deleted"
