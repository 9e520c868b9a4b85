"""The plans of groups: one member's plan for a kind of batch, stacked and traced once for all groups of a size."""

import logging
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.counted import Counted
from hydra_tune.fusion.likeness import Likeness, likeness
from hydra_tune.fusion.member import Member, Wanted
from hydra_tune.fusion.plan import is_traced, stacked_plan, trace_step
from hydra_tune.fusion.tails import Rows
from hydra_tune.shard.gate import GATE
from hydra_tune.shard.library import PlanLibrary, Prepared
from hydra_tune.shard.request import Layout

_LOGGER = logging.getLogger("hydra_tune.fusion")
CUDA_GRAPHS = "cudagraphs"
"""For `backend`: steps are recorded as CUDA graphs by hydra-tune itself (`captures.py`)."""
_MAX_KEPT = 64  # stacked plans of one kind of batch, and comparisons


class GroupPlans:
    """Makes and keeps them, for one pool.

    Args:
        library: where the plans of single members come from.
        backend: of `torch.compile`, which traced steps are compiled with; None: they are not; `CUDA_GRAPHS`: they are
            recorded, on GPUs.

    Attributes:
        records: whether they are recorded.
    """

    def __init__(self, library: PlanLibrary, backend: str | None = None) -> None:
        self.records = backend == CUDA_GRAPHS
        self._backend = None if self.records else backend
        self._told: set[str] = set()
        self._library = library
        self._lock = threading.Lock()
        self._alike: set[Hashable] = set()
        self._unlike: dict[Hashable, str] = {}  # pairs of architectures, and what they differ in
        self._likenesses: dict[tuple[Prepared, ...], Likeness] = {}  # of the plans of members
        self._stacked: WeakKeyDictionary[Prepared, dict[Hashable, Prepared]] = WeakKeyDictionary()

    def of_member(self, member: Member, wanted: Wanted, like: Layout | None = None) -> Prepared:
        """The plan of one member for a batch that it wants computed.

        Args:
            member: any of the group, built; only read.
            wanted: the batch.
            like: how the group's state has been cut, if it has.

        Raises:
            UnfusableError: it cannot be stacked; with the reason.
            HydraTuneError: as `PlanLibrary.prepare`.
        """
        module, optimizer = member.built()
        with member.streams.everything():
            prepared = self._library.prepare(member.task, module, optimizer, wanted.batch, wanted.mode, like)
        module.train()
        check_updates(prepared)
        return prepared

    def of_members(
        self, members: Sequence[Member], wanted: Wanted, like: Layout | None = None
    ) -> tuple[Prepared, Likeness]:
        """The plan of the first of some members, and what the others' have otherwise: probabilities of dropout, and losses.

        Args:
            members: of one group, or such as may be; built; only read.
            wanted: a batch that the first of them wants computed.
            like: as of `of_member`.

        Returns:
            The plan, and for each member what is its own.

        Raises:
            UnfusableError: as `of_member`, or they differ in something else.
        """
        known: dict[Hashable, Prepared] = {}
        own: list[Prepared] = []
        for member in members:
            key = object() if member.architecture is None else member.architecture
            if key not in known:
                known[key] = self.of_member(member, wanted, like)
            own.append(known[key])
        found = self._likeness(own)
        if found.rows is not None and any(one.guard is not None for one in own):
            raise UnfusableError("its loss is another, and the step's Python asks for values of the batch")
        return own[0], found

    def _likeness(self, own: Sequence[Prepared]) -> Likeness:
        key = tuple(own)
        with self._lock:
            known = self._likenesses.get(key)
        if known is not None:
            return known
        found = likeness([one.plan for one in own])
        with self._lock:
            for other in self._likenesses.values():
                found = _with_tails_of(found, other)
            if len(self._likenesses) >= _MAX_KEPT:
                self._likenesses.clear()
            self._likenesses[key] = found
        return found

    def check_alike(self, first: Member, other: Member) -> None:
        """Refuse two trials that cannot be of one group, though their families are the same.

        Args:
            first: built; only read.
            other: likewise.

        Raises:
            UnfusableError: with what they differ in.
        """
        if first.architecture == other.architecture:
            return
        pair = (first.architecture, other.architecture)
        if pair in self._alike:
            return
        if pair in self._unlike:
            raise UnfusableError(self._unlike[pair])
        try:
            self._check_plans(first, other)
        except UnfusableError as error:
            self._unlike[pair] = str(error)
            raise
        self._alike.add(pair)

    def are_known(self, first: Hashable, other: Hashable) -> bool:
        """Whether trials of two architectures are known to be alike."""
        return first == other or (first, other) in self._alike

    def _check_plans(self, first: Member, other: Member) -> None:
        like: Layout | None = None
        for wanted in _compared(first, other):  # the training first, by whose plan the state is cut
            prepared, found = self.of_members([first, other], wanted, like)
            self.stacked(prepared, 2, slots=found.drops, rows=found.rows)
            like = like or layout_of(prepared)

    def stacked(
        self,
        prepared: Prepared,
        count: int,
        slots: Iterable[str] = (),
        rows: Rows | None = None,
        counted: Mapping[str, Counted] | None = None,
    ) -> Prepared:
        """The same for a group of so many.

        Args:
            prepared: of one member.
            count: members.
            slots: names of nodes that drop with a probability of each member's own.
            rows: as of `stacked_plan`.
            counted: as of `stacked_plan`.

        Raises:
            UnfusableError: it cannot be stacked; with the reason.
        """
        own = frozenset(slots)
        with self._lock:
            known = self._stacked.setdefault(prepared, {})
            key = (count, own, rows, counted is not None)
            if key not in known:
                if len(known) >= _MAX_KEPT:
                    known.clear()
                known[key] = replace(prepared, plan=stacked_plan(prepared.plan, count, own, rows, counted))
            return known[key]

    def trace(
        self,
        prepared: Prepared,
        state: dict[str, Tensor],
        inputs: tuple[Tensor, ...],
        count: int,
        *,
        accumulate: int = 1,
        may_compile: bool = True,
        place: torch.device | None = None,
    ) -> None:
        """Trace a group's plan, if that has not been done and can be; on GPUs only where it is to be recorded.

        Args:
            prepared: the group's.
            state: its stacked parameters and buffers.
            inputs: its stacked batch.
            count: members.
            accumulate: batches of a step.
            may_compile: whether it is compiled where steps are; not where members have batches of several sizes, whose
                counts a compiler's code would be tried without.
            place: the device to trace for; None: the CPU.
        """
        plan = prepared.plan
        is_on_gpu = place is not None and place.type != "cpu"
        if is_on_gpu != self.records:
            self._tell(is_on_gpu=is_on_gpu)
        if len(plan.shards) > 1 or is_traced(plan) or (is_on_gpu and not self.records):
            return
        with GATE.exclusive():
            try:
                own = [state[name] for name in plan.shards[0].graph.state]
                trace_step(plan, own, inputs, count, self._backend if may_compile else None, accumulate, place)
            except Exception as error:  # noqa: BLE001 - what cannot be traced runs operator by operator
                _LOGGER.info("a group's step is not traced: %s", error)

    def _tell(self, *, is_on_gpu: bool) -> None:
        """Say once that what was asked for is for other devices."""
        why = ""
        if self.records:
            why = (
                f"fusion_compile={CUDA_GRAPHS!r} is for GPUs: on CPU devices the steps of groups run as they are traced"
            )
        elif is_on_gpu and self._backend is not None:
            why = f"fusion_compile={self._backend!r} is for CPU devices: on GPUs the steps of groups run operator by operator"
        if why and why not in self._told:
            self._told.add(why)
            _LOGGER.warning("%s", why)


def _compared(first: Member, other: Member) -> list[Wanted]:
    """Batches for which two trials are compared; an evaluated one too, if metrics may differ: who comes later may evaluate."""
    found = other.peek() | first.peek()
    found = {"train": found.pop("train"), **found}
    if (first.task.loss, first.task.evaluate) != (other.task.loss, other.task.evaluate):
        found.setdefault("evaluate", replace(found["train"], mode="evaluate"))
    return list(found.values())


def _with_tails_of(found: Likeness, other: Likeness) -> Likeness:
    """The same with the very tails of another, if they are of the same plans, so that what is stacked is found again."""
    if found.rows is None or other.rows is None:
        return found
    own, known = found.rows.tails.plans, other.rows.tails.plans
    if len(own) != len(known) or any(one is not two for one, two in zip(own, known, strict=True)):
        return found
    return replace(found, rows=replace(found.rows, tails=other.rows.tails))


def check_updates(prepared: Prepared) -> None:
    """Refuse a member's plan whose updates no group makes.

    Raises:
        UnfusableError: they are made on the host.
    """
    if prepared.plan.updates_on_host:
        raise UnfusableError("its updates are made on the host (optimizer_placement), and a group's on the device")


def room_for(prepared: Prepared, budget_bytes: int, most: int, least: int = 2) -> int:
    """How many members a device has room for, up to a number.

    Args:
        prepared: the plan of one.
        budget_bytes: memory of each.
        most: members of a group.
        least: for how many there must be room.

    Raises:
        UnfusableError: there is not.
    """
    room = min(most, budget_bytes // prepared.plan.peak_bytes)
    if room < least:
        raise UnfusableError("a device has no room for two of its kind at once")
    return room


def layout_of(prepared: Prepared) -> Layout:
    """How the state of whoever runs this plan first is cut."""
    owners = {name: shards[0] for name, shards in prepared.plan.used_state().items() if len(shards) == 1}
    return Layout(plan=prepared.plan, owners=owners)
