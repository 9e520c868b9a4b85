"""Lowering of a schedule's segment to a list of instructions: runs, copies, recomputations and deletions, in order.

`planner/cost/peak_memory.py` and `planner/cost/latency.py` have a segment lowered for each simulation, and so does
`planner/passes/swap_recompute.py` for each change that would polish a plan. `planner/passes/graph_rewrite.py` has all segments
of a plan lowered before the plan runs. `verify.py` and `planner/search/figures.py` lower finished schedules. The lowering must
not decide anything: decisions come with the schedule.

Note: room. A swapped storage is freed when its copy to the host has ended, not when the copy begins (Algorithm G as printed
frees the storage at once). The end depends on time, so the release is an instruction of its own. The lowering puts the
release where the copy will have ended; on a link shared with copies back, the copy may end later. If an operator would find
no room before then, the release comes sooner, and the operator waits. The bytes on the device are therefore a function of
the list.

Note: reuse. A search compares schedules that differ in a few decisions. Decisions change which instructions there are,
and behind which operator a source of recomputations or a returning map is freed, but no instruction otherwise. So each
instruction is made once for a sub-array (`SubArrayProfile.lowered`) and used again, as are whole slices of operators
(note on speed in `instructions.py`). The cache has no lock: an entry depends on its key alone, so two threads may make
the same entry.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from hydra_tune.planner.ir.instructions import (
    Instruction,
    InstructionKind,
    InstructionSequence,
    InstructionSlice,
    ticks,
)
from hydra_tune.planner.ir.plan_state import ScheduleSegment, SubArrayDecisions, SubArraySchedule
from hydra_tune.planner.ir.step_profile import FeatureMap, OperatorProfile, SubArrayProfile


def lowered(schedule: SubArraySchedule, segment: ScheduleSegment) -> list[Instruction]:
    """Return the instructions of a segment, or of an end of the schedule."""
    instructions: list[Instruction] = []
    for piece in stretched(schedule, segment):
        if isinstance(piece, InstructionSlice):
            instructions += piece.line.instructions[piece.begin : piece.end]
        else:
            instructions.append(piece)
    return instructions


def stretched(schedule: SubArraySchedule, segment: ScheduleSegment) -> list[Instruction | InstructionSlice]:
    """Return the instructions of a segment, or of an end of the schedule, with consecutive operators as slices."""
    return _SegmentLowering(schedule, segment).pieces()


def kept_bytes(array: SubArrayProfile, decisions: SubArrayDecisions) -> int:
    """Bytes of the feature maps that stay on the device between a sub-array's forward and backward."""
    moved_bytes = (array.maps[name].num_bytes for name in (*decisions.swaps, *decisions.recomputes))
    return array.kept_bytes - sum(moved_bytes)


def copied(storage: str, made_for: str) -> str:
    """Return the name of a storage that is made again on the way to another storage."""
    return f"{storage}@{made_for}"


class _SubArrayLowering:
    """A sub-array as the lowering sees it: instructions common to all schedules, and the changes by decisions."""

    def __init__(self, schedule: SubArraySchedule, side: int) -> None:
        self.array, self.decisions, self.side = schedule.arrays[side], schedule.decisions[side], side
        self.known: dict[Any, Any] = self.array.lowered.setdefault(side, {})
        self.forward = self._line("forward", self.array.forward, self.array.forward_ends)
        self.backward = self._line("backward", self.array.backward, self.array.all_backward_ends)
        self.changed: dict[int, Instruction] = {}
        self.prompts: dict[int, list[FeatureMap]] = {}
        self.arrivals: dict[int, list[FeatureMap]] = {}
        self.recomputed: dict[int, list[FeatureMap]] = {}
        self.leaves: dict[int, list[FeatureMap]] = {}
        maps, needs = self.array.maps, self.decisions.changed_needs(self.array.maps)
        for name in sorted((*self.decisions.swaps, *self.decisions.recomputes), key=self.array.order.__getitem__):
            self._look_up(name, maps[name], needs)
        for maps_due in self.prompts.values():
            maps_due.sort(key=lambda feature_map: (_first(feature_map, needs), feature_map.made))
        self._change_ends(
            needs, {name: self._returns(maps[name], prompts) for name, prompts in self.decisions.returns.items()}
        )
        self.leaving_ranks = sorted(self.leaves)

    def _line(
        self, key: str, ops: Sequence[OperatorProfile], ends: Mapping[int, tuple[str, ...]]
    ) -> InstructionSequence:
        if key not in self.known:
            runs = [self._run(rank, op, ends.get(rank, ()), key) for rank, op in enumerate(ops)]
            self.known[key] = InstructionSequence(runs)
        line: InstructionSequence = self.known[key]
        return line

    def _run(self, rank: int, op: OperatorProfile, frees: tuple[str, ...], which: str) -> Instruction:
        return Instruction(
            kind=InstructionKind.RUN,
            side=self.side,
            is_backward=which == "backward",
            rank=rank,
            seconds=op.seconds,
            makes=op.makes,
            frees=frees,
            made_bytes=_bytes(self.array, op.makes),
            freed_bytes=_bytes(self.array, frees),
            workspace_bytes=op.workspace_bytes,
        )

    def _look_up(self, name: str, one: FeatureMap, needs: Mapping[str, tuple[int, int]]) -> None:
        decisions = self.decisions
        self.leaves.setdefault(one.last_forward, []).append(one)
        if name in decisions.swaps:
            need = _first(one, needs)
            # A map that the computing thread copies itself is copied where it is needed: an earlier begin would hide
            # nothing.
            if name not in self.array.at_once:
                self.prompts.setdefault(min(decisions.swaps[name], need), []).append(one)
            self.arrivals.setdefault(need, []).append(one)
        else:
            self.recomputed.setdefault(one.first_backward, []).append(one)

    def _returns(self, one: FeatureMap, each: Mapping[int, int]) -> set[int]:
        """Add the copies back after a map's absences; return the ranks behind which the map is freed for an absence."""
        uses, departure_ranks = self.decisions.uses(one, self.array.backward_ranks[one.name]), set[int]()
        for departure, prompt in each.items():
            next_use = bisect_left(uses, departure + 1)
            if not 0 < next_use < len(uses) or uses[next_use - 1] in departure_ranks:
                continue  # a recomputation that needed the map there has been undone, or needs the map only now
            last_use, need = uses[next_use - 1], uses[next_use]
            departure_ranks.add(last_use)
            if one.name not in self.array.at_once:
                # Other decisions may have moved either use since the prompt was set.
                self.prompts.setdefault(min(max(prompt, last_use + 1), need), []).append(one)
            self.arrivals.setdefault(need, []).append(one)
        return departure_ranks

    def _change_ends(self, needs: Mapping[str, tuple[int, int]], away: Mapping[str, set[int]]) -> None:
        """Change the backward operators that free feature maps.

        A source of recomputations is freed behind the last of them, and a returning map is freed before each absence.
        """
        maps, base = self.array.maps, self.array.all_backward_ends
        # Base ends hold for an undecided schedule. Only ranks with a moved end get instructions of their own.
        later_ends = {name: end for name, (_, end) in needs.items() if end != maps[name].last_backward}
        for rank in {*later_ends.values(), *(maps[name].last_backward for name in later_ends), *chain(*away.values())}:
            other_storages = [name for name in base.get(rank, ()) if name not in maps]
            freed_maps = [name for name in base.get(rank, ()) if name in maps and name not in later_ends]
            freed_maps += [name for name, end in later_ends.items() if end == rank]
            freed_maps += [name for name, ranks in away.items() if rank in ranks]
            ends = (*other_storages, *sorted(freed_maps, key=self.array.order.__getitem__))
            # The key holds the freed storages, so all decisions that free the same storages here share the instruction.
            key = ("ends", rank, ends)
            if key not in self.known:
                self.known[key] = self._run(rank, self.array.backward[rank], ends, "backward")
            self.changed[rank] = self.known[key]

    def move(self, kind: InstructionKind, one: FeatureMap, rank: int) -> Instruction:
        """Return a copy, the end of a copy, or a deletion, after `rank` operators have run."""
        key = (kind, one.name, rank)
        if key not in self.known:
            freed_storages = (one.name,) if kind in (InstructionKind.DELETE, InstructionKind.RELEASE) else ()
            made_storages = (one.name,) if kind is InstructionKind.PREFETCH else ()
            seconds = {InstructionKind.PREFETCH: one.in_seconds, InstructionKind.OFFLOAD: one.out_seconds}.get(kind)
            is_at_once = seconds is not None and one.name in self.array.at_once
            # The computing thread is busy for a whole copy of its own, and for the hand-over of any other.
            hand_seconds = 0.0 if seconds is None else seconds if is_at_once else self.array.hand_seconds
            self.known[key] = Instruction(
                kind=kind,
                side=self.side,
                is_backward=kind in (InstructionKind.PREFETCH, InstructionKind.ARRIVE),
                rank=rank,
                storage=one.name,
                seconds=seconds or 0.0,
                hand_seconds=hand_seconds,
                is_at_once=is_at_once,
                makes=made_storages,
                frees=freed_storages,
                made_bytes=_bytes(self.array, made_storages),
                freed_bytes=_bytes(self.array, freed_storages),
            )
        instruction: Instruction = self.known[key]
        return instruction

    def again(self, one: FeatureMap) -> InstructionSequence:
        recomputation = self.decisions.recomputes[one.name]
        key = ("again", one.name, recomputation.ops)
        if key not in self.known:
            self.known[key] = InstructionSequence(tuple(self._again(one, sorted(recomputation.ops))))
        sequence: InstructionSequence = self.known[key]
        return sequence

    def _again(self, one: FeatureMap, ranks: list[int]) -> Iterator[Instruction]:
        ops = self.array.forward
        last_uses = {storage: rank for rank in ranks for storage in (*ops[rank].reads, *ops[rank].makes)}
        live_names: set[str] = set()
        for rank in ranks:
            op = ops[rank]
            live_names.update(op.makes)
            ended_names = sorted(
                storage for storage in live_names if last_uses[storage] == rank and storage != one.name
            )
            # Storages made on the way get names of their own, since the originals, or copies for other maps, may exist
            # too.
            yield Instruction(
                kind=InstructionKind.RERUN,
                side=self.side,
                is_backward=True,
                rank=rank,
                storage=one.name,
                seconds=op.seconds,
                makes=tuple(name if name == one.name else copied(name, one.name) for name in op.makes),
                frees=tuple(copied(name, one.name) for name in ended_names),
                made_bytes=_bytes(self.array, op.makes),
                freed_bytes=_bytes(self.array, ended_names),
                workspace_bytes=op.workspace_bytes,
            )
            live_names.difference_update(ended_names)


class _SegmentLowering:
    def __init__(self, schedule: SubArraySchedule, segment: ScheduleSegment) -> None:
        self._schedule, self._segment, self._limit = schedule, segment, schedule.limit_bytes
        self._sides = {
            side: _SubArrayLowering(schedule, side) for side in (segment.backward, segment.forward) if side is not None
        }
        self._found: list[Instruction | InstructionSlice] = []
        self._live = start_bytes(schedule, segment)
        self._now = self._link_free = 0
        self._leaving: deque[tuple[int, int, FeatureMap]] = deque()  # end of the copy, side, map
        self._num_forward = 0

    def pieces(self) -> list[Instruction | InstructionSlice]:
        """Lower the segment: its backward with multiplexed operators, the rest of its forward, and the ends of copies."""
        segment = self._segment
        if segment.backward is not None:
            multiplexed = self._schedule.multiplexed(segment)
            assert multiplexed is not None, "slots want more forward operators than there are"
            self._backward(self._sides[segment.backward], multiplexed)
        if segment.forward is not None:
            self._forward_to(len(self._schedule.arrays[segment.forward].forward))
        # The next segment begins with the memory of `start_bytes`, which counts no copies under way.
        while self._leaving:
            self._end_copy()
        return self._found

    def _backward(self, side: _SubArrayLowering, multiplexed: Mapping[int, int]) -> None:
        num_done, line = 0, side.backward
        for rank in sorted({*side.prompts, *side.arrivals, *side.recomputed, *side.changed, *multiplexed}):
            self._run_all(line, num_done, rank)
            num_done = rank
            for prefetched_map in side.prompts.get(rank, ()):
                self._run(side.move(InstructionKind.PREFETCH, prefetched_map, rank))
            # Behind the beginning of the copies, so that the forward operators hide them.
            if rank in multiplexed:
                self._forward_to(multiplexed[rank])
            # Recomputations wait for their sources alone, and run beside the copies of the other maps (Algorithm H,
            # lines 11 to 18).
            recomputed_maps = sorted(side.recomputed.get(rank, ()), key=lambda feature_map: feature_map.made)
            sources = {
                source
                for feature_map in recomputed_maps
                for source in side.decisions.recomputes[feature_map.name].sources
            }
            self._arrive(
                side, [feature_map for feature_map in side.arrivals.get(rank, ()) if feature_map.name in sources], rank
            )
            for recompute_line in map(side.again, recomputed_maps):
                self._run_all(recompute_line, 0, len(recompute_line.instructions))
            self._arrive(
                side,
                [feature_map for feature_map in side.arrivals.get(rank, ()) if feature_map.name not in sources],
                rank,
            )
            if rank in side.changed:
                self._run(side.changed[rank])
                num_done = rank + 1
        self._run_all(line, num_done, len(line.instructions))

    def _arrive(self, side: _SubArrayLowering, maps: Sequence[FeatureMap], rank: int) -> None:
        """Wait for copies back; small maps are copied only here, by the computing thread."""
        for feature_map in maps:
            if feature_map.name in side.array.at_once:
                self._run(side.move(InstructionKind.PREFETCH, feature_map, rank))
            self._run(side.move(InstructionKind.ARRIVE, feature_map, rank))

    def _forward_to(self, num_forward: int) -> None:
        assert self._segment.forward is not None, "no forward"
        side = self._sides[self._segment.forward]
        places = side.leaving_ranks
        for rank in places[bisect_left(places, self._num_forward) : bisect_left(places, num_forward)]:
            self._run_all(side.forward, self._num_forward, rank + 1)
            for feature_map in side.leaves[rank]:
                self._leave(side, feature_map)
        self._run_all(side.forward, self._num_forward, num_forward)

    def _leave(self, side: _SubArrayLowering, one: FeatureMap) -> None:
        if one.name not in side.decisions.swaps:
            # The map is recomputed, so its bytes are free at once.
            self._run(side.move(InstructionKind.DELETE, one, self._num_forward))
            return
        self._run(side.move(InstructionKind.OFFLOAD, one, self._num_forward))
        if one.name in side.array.at_once:
            self._release(side.side, one)
            return
        # All copies to the host share a link, so a copy begins when the previous copy has ended.
        self._link_free = max(self._link_free, self._now) + ticks(one.out_seconds)
        self._leaving.append((self._link_free, side.side, one))

    def _run_all(self, line: InstructionSequence, begin: int, end: int) -> None:
        """Add a slice of a sequence, with the same result as `_run` for each operator."""
        while begin < end:
            stop = end
            if self._leaving:
                # Memory gets free when the copies to the host end. Stop before the first operator without room, so that
                # the oldest copy ends first; otherwise behind the operator during which the oldest copy ends, so that
                # the release follows.
                stop = line.first_above(begin, end, self._limit - self._live + line.before[begin])
                if stop == begin:
                    self._end_copy()
                    continue
                stop = min(stop, line.first_after(begin, end, self._leaving[0][0] - self._now) + 1)
            self._found.append(InstructionSlice(line, begin, stop))
            self._live += line.before[stop] - line.before[begin]
            self._now += line.clock[stop] - line.clock[begin]
            if not line.is_backward and not line.is_again:
                self._num_forward = stop
            self._release_ended()
            begin = stop

    def _run(self, one: Instruction) -> None:
        """Add the releases whose room an instruction needs, the instruction, and behind an operator the due releases."""
        while self._leaving and self._live + one.made_bytes + one.workspace_bytes > self._limit:
            self._end_copy()
        self._live += one.made_bytes - one.freed_bytes
        self._found.append(one)
        if one.kind is InstructionKind.RUN or one.kind is InstructionKind.RERUN:
            self._now += ticks(one.seconds)
            self._release_ended()
        else:
            self._now += ticks(one.hand_seconds)

    def _release_ended(self) -> None:
        while self._leaving and self._leaving[0][0] <= self._now:
            self._end_copy()

    def _end_copy(self) -> None:
        end, side, feature_map = self._leaving.popleft()
        self._now = max(self._now, end)
        self._release(side, feature_map)

    def _release(self, side: int, one: FeatureMap) -> None:
        release = self._sides[side].move(InstructionKind.RELEASE, one, self._num_forward)
        self._live -= release.freed_bytes
        self._found.append(release)


def start_bytes(schedule: SubArraySchedule, segment: ScheduleSegment) -> int:
    """Bytes on the device when a segment begins."""
    side = segment.backward
    return schedule.static_bytes + (0 if side is None else kept_bytes(schedule.arrays[side], schedule.decisions[side]))


def _first(one: FeatureMap, needs: Mapping[str, tuple[int, int]]) -> int:
    return needs[one.name][0] if one.name in needs else one.first_backward


def _bytes(array: SubArrayProfile, names: Sequence[str]) -> int:
    return sum(array.sizes[name] for name in names)
