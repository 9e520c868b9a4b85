"""A schedule's segment as a list of instructions: what is run, moved, recomputed and freed, in order.

Note: room. A swapped storage is freed when its copy to the host has ended, not when the copy begins (Algorithm G as
printed frees it at once). Where that is depends on time, so it is an instruction of its own: it is put where the copy
will have ended, or sooner, before an operator for which there would be no room, which then waits. So the bytes on the
device are a function of the list.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from hydra_tune.fusion.planner.arrays import Array, FeatureMap
from hydra_tune.fusion.planner.schedule import Decisions, Schedule, Segment


class Kind(StrEnum):
    """What an instruction does."""

    RUN = "run"
    RERUN = "recompute"
    OFFLOAD = "offload"
    RELEASE = "release"
    PREFETCH = "prefetch"
    ARRIVE = "arrive"
    DELETE = "delete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One of a segment's.

    Attributes:
        kind: what it does.
        side: for which sub-array.
        is_backward: whether it belongs to that one's backward.
        rank: of the operator; of the next one, where it is none.
        storage: what is moved or deleted; what is recomputed.
        seconds: of the operator or the copy.
        makes: storages that are there from its beginning.
        frees: storages that are not there after its end.
        made_bytes: bytes of `makes`.
        freed_bytes: bytes of `frees`.
        workspace_bytes: what the operator needs while it runs.
    """

    kind: Kind
    side: int
    is_backward: bool
    rank: int
    storage: str = ""
    seconds: float = 0.0
    makes: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()
    made_bytes: int = 0
    freed_bytes: int = 0
    workspace_bytes: int = 0


def lowered(schedule: Schedule, segment: Segment) -> list[Instruction]:
    """The instructions of a segment.

    Args:
        schedule: what has been decided.
        segment: one of its segments or ends.
    """
    return _Lowering(schedule, segment).instructions()


def kept_bytes(array: Array, decisions: Decisions) -> int:
    """Bytes of the feature maps that stay on the device between a sub-array's forward and backward."""
    return sum(
        one.num_bytes
        for name, one in array.maps.items()
        if name not in decisions.swaps and name not in decisions.recomputes
    )


def copied(storage: str, made_for: str) -> str:
    """What a storage is called that is made again on the way to another."""
    return f"{storage}@{made_for}"


class _Side:
    """What the lowering asks of one sub-array, looked up once."""

    def __init__(self, schedule: Schedule, side: int) -> None:
        self.array, self.decisions, self.side = schedule.arrays[side], schedule.decisions[side], side
        self.prompts: dict[int, list[FeatureMap]] = {}
        self.arrivals: dict[int, list[FeatureMap]] = {}
        self.recomputed: dict[int, list[FeatureMap]] = {}
        self.ends: dict[int, list[str]] = {}
        self.leaves: dict[int, list[FeatureMap]] = {}
        needs = self.decisions.needs(self.array.maps)
        for name, one in self.array.maps.items():
            self._look_up(name, one, *needs[name])
        for found in self.prompts.values():
            found.sort(key=lambda one: (needs[one.name][0], one.made))

    def _look_up(self, name: str, one: FeatureMap, need: int, end: int) -> None:
        decided = self.decisions
        self.ends.setdefault(end, []).append(name)
        if name in decided.swaps:
            self.prompts.setdefault(min(decided.swaps[name], need), []).append(one)
            self.arrivals.setdefault(need, []).append(one)
            self.leaves.setdefault(one.last_forward, []).append(one)
        elif name in decided.recomputes:
            self.recomputed.setdefault(one.first_backward, []).append(one)
            self.leaves.setdefault(one.last_forward, []).append(one)


class _Lowering:
    def __init__(self, schedule: Schedule, segment: Segment) -> None:
        self._schedule, self._segment = schedule, segment
        self._sides = {side: _Side(schedule, side) for side in (segment.backward, segment.forward) if side is not None}
        self._found: list[Instruction] = []
        self._live = start_bytes(schedule, segment)
        self._now = self._link_free = 0.0
        self._leaving: deque[tuple[float, int, str]] = deque()  # end of the copy, side, storage
        self._done = {True: 0, False: 0}

    def instructions(self) -> list[Instruction]:
        segment = self._segment
        if segment.backward is not None:
            before = self._schedule.forward_before(segment)
            assert before is not None, "slots want more forward operators than there are"
            for rank, num_forward in enumerate(before):
                self._backward(self._sides[segment.backward], rank, num_forward)
        if segment.forward is not None:
            self._forward_to(len(self._schedule.arrays[segment.forward].forward))
        while self._leaving:
            self._release()
        return self._found

    def _backward(self, side: _Side, rank: int, num_forward: int) -> None:
        for one in side.prompts.get(rank, ()):
            self._move(Kind.PREFETCH, side, one, is_backward=True, seconds=one.in_seconds, makes=(one.name,))
        self._forward_to(num_forward)
        for one in side.arrivals.get(rank, ()):
            self._move(Kind.ARRIVE, side, one, is_backward=True)
        for one in sorted(side.recomputed.get(rank, ()), key=lambda one: one.made):
            self._recompute(side, one)
        ends = (*side.array.backward_ends.get(rank, ()), *side.ends.get(rank, ()))
        self._run(Kind.RUN, side, rank, is_backward=True, makes=side.array.backward[rank].makes, frees=ends)
        self._done[True] = rank + 1

    def _forward_to(self, num_forward: int) -> None:
        while self._done[False] < num_forward:
            assert self._segment.forward is not None, "no forward"
            side, rank = self._sides[self._segment.forward], self._done[False]
            ends = side.array.forward_ends.get(rank, ())
            self._run(Kind.RUN, side, rank, is_backward=False, makes=side.array.forward[rank].makes, frees=ends)
            self._done[False] = rank + 1
            for one in side.leaves.get(rank, ()):
                if one.name in side.decisions.swaps:
                    self._move(Kind.OFFLOAD, side, one, is_backward=False, seconds=one.out_seconds)
                    self._link_free = max(self._link_free, self._now) + one.out_seconds
                    self._leaving.append((self._link_free, side.side, one.name))
                else:
                    self._move(Kind.DELETE, side, one, is_backward=False, frees=(one.name,))

    def _recompute(self, side: _Side, one: FeatureMap) -> None:
        how = side.decisions.recomputes[one.name]
        ranks = sorted(how.ops)
        last: dict[str, int] = {}
        for rank in ranks:
            op = side.array.forward[rank]
            for storage in (*op.reads, *op.makes):
                last[storage] = rank
        made: set[str] = set()
        for rank in ranks:
            op = side.array.forward[rank]
            made.update(op.makes)
            ended = [storage for storage in made if last[storage] == rank and storage != one.name]
            self._run(
                Kind.RERUN,
                side,
                rank,
                is_backward=True,
                makes=[storage if storage == one.name else copied(storage, one.name) for storage in op.makes],
                frees=[copied(storage, one.name) for storage in sorted(ended)],
                storage=one.name,
            )
            made.difference_update(ended)

    def _run(
        self,
        kind: Kind,
        side: _Side,
        rank: int,
        *,
        is_backward: bool,
        makes: Iterable[str],
        frees: Iterable[str],
        storage: str = "",
    ) -> None:
        ops = side.array.backward if kind is Kind.RUN and is_backward else side.array.forward
        made = tuple(makes)
        self._make_room(_bytes(side, made) + ops[rank].workspace_bytes)
        self._now += ops[rank].seconds
        self._add(
            kind,
            side,
            rank,
            is_backward=is_backward,
            storage=storage,
            seconds=ops[rank].seconds,
            makes=made,
            frees=tuple(frees),
            workspace_bytes=ops[rank].workspace_bytes,
        )
        while self._leaving and self._leaving[0][0] <= self._now:
            self._release()

    def _move(
        self,
        kind: Kind,
        side: _Side,
        one: FeatureMap,
        *,
        is_backward: bool,
        seconds: float = 0.0,
        makes: tuple[str, ...] = (),
        frees: tuple[str, ...] = (),
    ) -> None:
        self._make_room(_bytes(side, makes))
        rank = self._done[is_backward]
        self._add(
            kind, side, rank, is_backward=is_backward, storage=one.name, seconds=seconds, makes=makes, frees=frees
        )

    def _make_room(self, num_bytes: int) -> None:
        while self._leaving and self._live + num_bytes > self._schedule.limit_bytes:
            self._release()

    def _release(self) -> None:
        end, number, storage = self._leaving.popleft()
        self._now = max(self._now, end)
        self._add(
            Kind.RELEASE,
            self._sides[number],
            self._done[False],
            is_backward=False,
            storage=storage,
            seconds=0.0,
            makes=(),
            frees=(storage,),
        )

    def _add(
        self,
        kind: Kind,
        side: _Side,
        rank: int,
        *,
        is_backward: bool,
        storage: str,
        seconds: float,
        makes: tuple[str, ...],
        frees: tuple[str, ...],
        workspace_bytes: int = 0,
    ) -> None:
        made, freed = _bytes(side, makes), _bytes(side, frees)
        self._live += made - freed
        self._found.append(
            Instruction(
                kind=kind,
                side=side.side,
                is_backward=is_backward,
                rank=rank,
                storage=storage,
                seconds=seconds,
                makes=makes,
                frees=frees,
                made_bytes=made,
                freed_bytes=freed,
                workspace_bytes=workspace_bytes,
            )
        )


def start_bytes(schedule: Schedule, segment: Segment) -> int:
    """What is on the device when a segment begins."""
    side = segment.backward
    return schedule.static_bytes + (0 if side is None else kept_bytes(schedule.arrays[side], schedule.decisions[side]))


def _bytes(side: _Side, names: tuple[str, ...]) -> int:
    sizes = side.array.sizes
    return sum([sizes[name.partition("@")[0]] for name in names]) if names else 0
