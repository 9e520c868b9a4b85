"""The plans of a group, by the kinds of batches that its members want."""

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hydra_tune.errors import TaskError, UnfusableError
from hydra_tune.fusion.counted import Counted
from hydra_tune.fusion.likeness import Likeness
from hydra_tune.fusion.member import Member, Wanted
from hydra_tune.fusion.plans import GroupPlans, layout_of
from hydra_tune.fusion.samples import Batched, counted_losses
from hydra_tune.fusion.seat import Seat
from hydra_tune.shard.capture import state_specs
from hydra_tune.shard.gate import GATE
from hydra_tune.shard.library import Prepared
from hydra_tune.shard.request import Layout

_LOGGER = logging.getLogger(__name__)

_MAX_PAIRS = 256  # of kinds of batches that have been compared
_MAX_PLANS = 8  # kept of each kind of batch, where the step asks for values of the batch


class Kinds:
    """What is known of the batches of one group. Its plans are those of one member; the group stacks them.

    Args:
        plans: makes them.

    Attributes:
        first: the plan of a training step, which the group's state is cut for; None before there is one.
    """

    def __init__(self, plans: GroupPlans) -> None:
        self.first: Prepared | None = None
        self._plans = plans
        self._layout: Layout | None = None
        self._wanted: WeakKeyDictionary[Prepared, tuple[Wanted, Member]] = WeakKeyDictionary()
        self._counted: WeakKeyDictionary[Prepared, dict[str, Counted]] = WeakKeyDictionary()
        self._pairs: dict[tuple[Prepared, Prepared], bool] = {}
        self._known: dict[tuple[str, Hashable], list[tuple[Prepared, Sequence[Tensor]]]] = {}

    def found(self, wanted: Wanted) -> Prepared | None:
        """The plan that serves a batch, if it has been made."""
        known = self._known.get((wanted.mode, wanted.leaves.signature), ())
        return next((own for own, _ in known if _serves(own, wanted)), None)

    def made(self, seat: Seat, member: Member) -> Prepared:
        """The plan for the batch that a member wants.

        Args:
            seat: its place.
            member: whose task the plan is made for: any of the group.

        Raises:
            TaskError: it cannot be stacked.
        """
        wanted = wanted_of(seat)
        try:
            if self.first is None:
                begins = wanted if wanted.mode == "train" else seat.member.peek()["train"]
                self.first = self._made(member, begins)
                self._layout = layout_of(self.first)
            found = self.found(wanted)
            return self._made(member, wanted) if found is None else found
        except UnfusableError as error:
            raise _not_together(error) from error

    def likeness(self, own: Prepared, members: Sequence[Member]) -> Likeness:
        """What of a plan is each member's own, where that is not the same for all.

        Raises:
            TaskError: they differ in more.
        """
        wanted, by = self._wanted[own]
        if wanted.mode == "evaluate":  # with those that do
            members = [by if member.task.validate is None else member for member in members]
        try:
            _, found = self._plans.of_members([by, *members], wanted, None if own is self.first else self._layout)
        except UnfusableError as error:
            raise _not_together(error) from error
        rows = None if found.rows is None else replace(found.rows, of=found.rows.of[1:])
        if rows is not None and set(rows.of) == {0}:
            rows = None
        return Likeness({name: ps[1:] for name, ps in found.drops.items()}, rows)

    def _made(self, member: Member, wanted: Wanted) -> Prepared:
        own = self._plans.of_member(member, wanted, self._layout)
        self._wanted[own] = wanted, member
        self._plans.stacked(own, 1)  # or refused here
        known = self._known.setdefault((wanted.mode, wanted.leaves.signature), [])
        known.append((own, [torch.empty_like(tensor, device="meta") for tensor in wanted.tensors]))
        del known[:-_MAX_PLANS]
        return own

    def lacking(self, seats: Sequence[Seat]) -> list[Seat]:
        """Members of which it is not known whether their batches can be padded, one for each kind that has no plan yet."""
        signatures: dict[str, dict[Hashable, Seat]] = {}
        for seat in seats:
            wanted = wanted_of(seat)
            signatures.setdefault(wanted.mode, {})[wanted.leaves.signature] = seat
        several = [(mode, by) for mode, by in signatures.items() if len(by) > 1]
        return [seat for mode, by in several for key, seat in by.items() if (mode, key) not in self._known]

    def counted(self, own: Prepared) -> dict[str, Counted]:
        """What reduces over samples in a plan that smaller batches are padded for."""
        return self._counted[own]

    def of(self, seats: Sequence[Seat], members: Sequence[Member]) -> dict[Hashable, list[Seat]]:
        """Members by what they have in common whose batches are computed together: the mode, and which plan serves them.

        Where smaller batches are padded, members with the largest come first.

        Args:
            seats: members that want a batch.
            members: all of the group.
        """
        first = wanted_of(seats[0])
        if all(wanted_of(seat).leaves is first.leaves and wanted_of(seat).mode == first.mode for seat in seats):
            found = self.found(first)
            if found is not None and found.guard is None:
                return {(first.mode, first.leaves.signature, id(found)): list(seats)}
        kinds: dict[Hashable, list[Seat]] = {}
        for seat in seats:
            wanted = wanted_of(seat)
            found = self.found(wanted)
            key = (wanted.mode, wanted.leaves.signature, None if found is None else id(found))
            kinds.setdefault(key, []).append(seat)
        if len(kinds) == 1 or members[0].architecture is None or len({one.architecture for one in members}) > 1:
            return kinds  # there is one, or members drop with other probabilities
        return self._merged(kinds)

    def _merged(self, kinds: Mapping[Hashable, list[Seat]]) -> dict[Hashable, list[Seat]]:
        """Kinds of smaller batches put to those of larger ones, as far as they can be."""
        left = sorted(kinds.items(), key=lambda item: -wanted_of(item[1][0]).num_samples)
        made: dict[Hashable, list[Seat]] = {}
        while left:
            (key, largest), *others = left
            apart = [(other, seats) for other, seats in others if not self._may_pad(seats[0], largest[0])]
            kept = {other for other, _ in apart}
            made[key] = [*largest, *(seat for other, seats in others if other not in kept for seat in seats)]
            left = apart
        return made

    def _may_pad(self, small: Seat, large: Seat) -> bool:
        """Whether a member's batch may be computed as part of a larger one."""
        a, b = wanted_of(small), wanted_of(large)
        own, other = self.found(a), self.found(b)
        if (
            a.mode != b.mode
            or a.num_samples == b.num_samples
            or own is None
            or other is None
            or own.guard is not None
            or other.guard is not None
        ):
            return False
        if (own, other) not in self._pairs:
            if len(self._pairs) >= _MAX_PAIRS:
                self._pairs.clear()
            sizes = (a.num_samples, b.num_samples)
            try:
                counted = counted_losses(self._batched(own), self._batched(other))
                self._pairs[own, other] = self._counted.setdefault(other, counted) == counted
            except UnfusableError as error:
                self._pairs[own, other] = False
                _LOGGER.info("members with batches of %d samples and of %d take turns (%s): %s", *sizes, a.mode, error)
        return self._pairs[own, other]

    def _batched(self, own: Prepared) -> Batched:
        wanted, member = self._wanted[own]
        inputs = next(kind for known in self._known.values() for one, kind in known if one is own)
        return Batched(own.plan, state_specs(member.built()[0]), inputs, wanted.num_samples)

    def served(self, own: Prepared, seats: Sequence[Seat]) -> list[Seat]:
        """Those of members with one kind of batch that a plan serves."""
        return [seat for seat in seats if _serves(own, wanted_of(seat))]

    def make_ready(self, size: int, state: Mapping[str, Tensor], place: torch.device) -> None:
        """Stack and trace all plans for a number of members; on any thread.

        Args:
            size: members.
            state: the group's parameters and buffers, of which only the geometry counts.
            place: the device to trace for.
        """
        for known in list(self._known.values()):
            for own, _ in list(known):
                self.trace(own, size, state, place)

    def stacked(self, size: int) -> Iterator[tuple[Prepared, Sequence[Tensor]]]:
        """All plans for a number of members, and the batch of one of them; only the geometry of its tensors counts."""
        for known in list(self._known.values()):
            for own, inputs in list(known):
                yield self._plans.stacked(own, size), inputs

    def trace(
        self,
        own: Prepared,
        size: int,
        state: Mapping[str, Tensor],
        place: torch.device,
        likeness: Likeness | None = None,
        counted: Mapping[str, Counted] | None = None,
    ) -> Prepared:
        """The stacked plan for a number of members, traced if it can be and has not been.

        Arguments are as of `make_ready`; `likeness` is what is each member's own.
        """
        likeness = likeness or Likeness({})
        stacked = self._plans.stacked(own, size, slots=likeness.drops, rows=likeness.rows, counted=counted)
        inputs = next((kind for known in self._known.values() for one, kind in known if one is own), ())
        if counted is not None:
            inputs = [*inputs, torch.empty((), dtype=torch.int64, device="meta")]
        self._plans.trace(
            stacked,
            {name: _of_size(tensor, size, tensor.shape[1:]) for name, tensor in state.items()},
            tuple(_of_size(tensor, size, tensor.shape) for tensor in inputs),
            size,
            accumulate=self._wanted[own][1].task.accumulate,
            may_compile=counted is None,
            place=place,
        )
        return stacked


def _not_together(error: UnfusableError) -> TaskError:
    return TaskError(
        f"the trials of a group have come to a kind of batch that they cannot compute together: {error}; train them with "
        "fusion='off'"
    )


def wanted_of(seat: Seat) -> Wanted:
    """The batch that a member wants computed."""
    assert isinstance(seat.wants, Wanted), "it wants nothing computed"
    return seat.wants


def _of_size(tensor: Tensor, size: int, shape: Sequence[int]) -> Tensor:
    """Memory of the shape that a stacked tensor has for a number of members, whatever is in it."""
    return torch.empty((size, *shape), dtype=tensor.dtype, device="cpu").requires_grad_(tensor.requires_grad)


def _serves(own: Prepared, wanted: Wanted) -> bool:
    """Whether a plan is for this batch, of the kind that it was made for."""
    if own.guard is None:
        return True
    with GATE.shared():
        return own.serves(wanted.tensors)
