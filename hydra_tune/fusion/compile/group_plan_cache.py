"""`GroupPlanCache`: the plans of a group, by the kinds of batches that its members want.

A kind is a mode and a batch signature. `GroupPlanCache` makes a plan when a new kind appears, and finds smaller
batches that can be padded and computed together with larger batches, such as the last batch of an epoch.
"""

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hydra_tune.errors import TaskError, UnfusableError
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory, layout_of
from hydra_tune.fusion.group.member import MemberBatchRequest, MemberTrial
from hydra_tune.fusion.group.slot import GroupSlot
from hydra_tune.fusion.matching.plan_diff import MemberDifferences
from hydra_tune.fusion.ragged.masked_loss import MaskedReduction
from hydra_tune.fusion.ragged.sample_independence import PlanBatchSpec, counted_losses
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.capture.step_capture import state_specs
from hydra_tune.shard.partition.plan_cache import PreparedPlan
from hydra_tune.shard.partition.plan_request import TrialStateLayout

_LOGGER = logging.getLogger(__name__)

_MAX_PAIRS = 256  # remembered comparisons of kinds of batches
_MAX_PLANS = 8  # kept for each kind of batch: steps that depend on values of the batch need several


class GroupPlanCache:
    """Plans of a group's batches; each plan is for a single member, and the group stacks the plans.

    Args:
        plans: makes the plans.

    Attributes:
        first: the plan of a training step; decides how the group's state is cut; None before the first plan.
    """

    def __init__(self, plans: GroupPlanFactory) -> None:
        self.first: PreparedPlan | None = None
        self._plans = plans
        self._layout: TrialStateLayout | None = None
        self._wanted: WeakKeyDictionary[PreparedPlan, tuple[MemberBatchRequest, MemberTrial]] = WeakKeyDictionary()
        self._counted: WeakKeyDictionary[PreparedPlan, dict[str, MaskedReduction]] = WeakKeyDictionary()
        self._pairs: dict[tuple[PreparedPlan, PreparedPlan], bool] = {}
        self._known: dict[tuple[str, Hashable], list[tuple[PreparedPlan, Sequence[Tensor]]]] = {}

    def found(self, wanted: MemberBatchRequest) -> PreparedPlan | None:
        """Return the plan that serves a request, if there is such a plan already."""
        known = self._known.get((wanted.mode, wanted.leaves.signature), ())
        return next((own for own, _ in known if _serves(own, wanted)), None)

    def made(self, seat: GroupSlot, member: MemberTrial) -> PreparedPlan:
        """Return the plan for a member's request; make the plan if necessary.

        Args:
            seat: the member's place.
            member: provides the task for the plan: any member of the group.

        Raises:
            TaskError: the plan cannot be stacked.
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

    def likeness(self, own: PreparedPlan, members: Sequence[MemberTrial]) -> MemberDifferences:
        """Return the differences between the members for a plan.

        Raises:
            TaskError: the members differ in more than dropout probabilities and losses.
        """
        wanted, by = self._wanted[own]
        if wanted.mode == "evaluate":  # members without validation have no metrics to compare
            members = [by if member.task.validate is None else member for member in members]
        try:
            # `of_members` returns the plan of the first member, so the
            # member behind `own` goes first; its entry is dropped below.
            _, found = self._plans.of_members([by, *members], wanted, None if own is self.first else self._layout)
        except UnfusableError as error:
            raise _not_together(error) from error
        rows = None if found.rows is None else replace(found.rows, of=found.rows.of[1:])
        if rows is not None and set(rows.of) == {0}:
            rows = None
        return MemberDifferences({name: ps[1:] for name, ps in found.drops.items()}, rows)

    def _made(self, member: MemberTrial, wanted: MemberBatchRequest) -> PreparedPlan:
        own = self._plans.of_member(member, wanted, self._layout)
        self._wanted[own] = wanted, member
        self._plans.stacked(own, 1)  # raises now if the plan cannot be stacked
        known = self._known.setdefault((wanted.mode, wanted.leaves.signature), [])
        # Keep only the geometry: the batch itself may be large.
        known.append((own, [torch.empty_like(tensor, device="meta") for tensor in wanted.tensors]))
        del known[:-_MAX_PLANS]
        return own

    def lacking(self, seats: Sequence[GroupSlot]) -> list[GroupSlot]:
        """Return a member for every kind of batch without a plan, if several kinds are wanted in the same mode.

        Only a comparison of plans shows whether one kind can be padded to another.
        """
        signatures: dict[str, dict[Hashable, GroupSlot]] = {}
        for seat in seats:
            wanted = wanted_of(seat)
            signatures.setdefault(wanted.mode, {})[wanted.leaves.signature] = seat
        several = [(mode, by) for mode, by in signatures.items() if len(by) > 1]
        return [seat for mode, by in several for key, seat in by.items() if (mode, key) not in self._known]

    def counted(self, own: PreparedPlan) -> dict[str, MaskedReduction]:
        """Return the reductions over samples in a plan whose smaller batches are padded."""
        return self._counted[own]

    def of(self, seats: Sequence[GroupSlot], members: Sequence[MemberTrial]) -> dict[Hashable, list[GroupSlot]]:
        """Group the members by what is computed together: the mode, and the plan that serves the batch.

        Where smaller batches are padded, members with the largest batches come first.

        Args:
            seats: members that want a batch.
            members: all members of the group.
        """
        # Fast path for every ordinary step: all members share the
        # very same `Leaves` object, so no signatures need comparing.
        first = wanted_of(seats[0])
        if all(wanted_of(seat).leaves is first.leaves and wanted_of(seat).mode == first.mode for seat in seats):
            found = self.found(first)
            if found is not None and found.guard is None:
                return {(first.mode, first.leaves.signature, id(found)): list(seats)}
        kinds: dict[Hashable, list[GroupSlot]] = {}
        for seat in seats:
            wanted = wanted_of(seat)
            found = self.found(wanted)
            key = (wanted.mode, wanted.leaves.signature, None if found is None else id(found))
            kinds.setdefault(key, []).append(seat)
        if len(kinds) == 1 or members[0].architecture is None or len({one.architecture for one in members}) > 1:
            return kinds  # a single kind, or members with different numbers, whose batches are never padded
        return self._merged(kinds)

    def _merged(self, kinds: Mapping[Hashable, list[GroupSlot]]) -> dict[Hashable, list[GroupSlot]]:
        """Merge kinds of smaller batches into kinds of larger batches where padding is possible."""
        left = sorted(kinds.items(), key=lambda item: -wanted_of(item[1][0]).num_samples)
        made: dict[Hashable, list[GroupSlot]] = {}
        while left:
            (key, largest), *others = left
            apart = [(other, seats) for other, seats in others if not self._may_pad(seats[0], largest[0])]
            kept = {other for other, _ in apart}
            made[key] = [*largest, *(seat for other, seats in others if other not in kept for seat in seats)]
            left = apart
        return made

    def _may_pad(self, small: GroupSlot, large: GroupSlot) -> bool:
        """Return whether a member's batch may be padded and computed as a larger batch."""
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
                # All smaller batches padded to a plan must agree on its
                # reductions, since the plan is rewritten once for all of them.
                self._pairs[own, other] = self._counted.setdefault(other, counted) == counted
            except UnfusableError as error:
                self._pairs[own, other] = False
                _LOGGER.info("members with batches of %d samples and of %d take turns (%s): %s", *sizes, a.mode, error)
        return self._pairs[own, other]

    def _batched(self, own: PreparedPlan) -> PlanBatchSpec:
        wanted, member = self._wanted[own]
        inputs = next(kind for known in self._known.values() for one, kind in known if one is own)
        return PlanBatchSpec(own.plan, state_specs(member.built()[0]), inputs, wanted.num_samples)

    def served(self, own: PreparedPlan, seats: Sequence[GroupSlot]) -> list[GroupSlot]:
        """Return the members, all with the same kind of batch, that a plan serves."""
        return [seat for seat in seats if _serves(own, wanted_of(seat))]

    def make_ready(self, size: int, state: Mapping[str, Tensor], place: torch.device) -> None:
        """Stack and trace all plans for a number of members; any thread may call.

        Args:
            size: number of members.
            state: the group's parameters and buffers; only the geometry counts.
            place: the device to trace for.
        """
        # The group's thread may add plans meanwhile, so iterate over copies.
        for known in list(self._known.values()):
            for own, _ in list(known):
                self.trace(own, size, state, place)

    def stacked(self, size: int) -> Iterator[tuple[PreparedPlan, Sequence[Tensor]]]:
        """Yield every plan stacked for a number of members, with a member's batch (only the geometry counts)."""
        for known in list(self._known.values()):
            for own, inputs in list(known):
                yield self._plans.stacked(own, size), inputs

    def trace(
        self,
        own: PreparedPlan,
        size: int,
        state: Mapping[str, Tensor],
        place: torch.device,
        likeness: MemberDifferences | None = None,
        counted: Mapping[str, MaskedReduction] | None = None,
    ) -> PreparedPlan:
        """Return the stacked plan for a number of members, traced if possible.

        Arguments are as of `make_ready`; `likeness` holds the differences between members.
        """
        likeness = likeness or MemberDifferences({})
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


def wanted_of(seat: GroupSlot) -> MemberBatchRequest:
    """Return the member's request for a batch."""
    assert isinstance(seat.wants, MemberBatchRequest), "it wants nothing computed"
    return seat.wants


def _of_size(tensor: Tensor, size: int, shape: Sequence[int]) -> Tensor:
    """Return an uninitialized tensor with the shape of a stacked tensor."""
    return torch.empty((size, *shape), dtype=tensor.dtype, device="cpu").requires_grad_(tensor.requires_grad)


def _serves(own: PreparedPlan, wanted: MemberBatchRequest) -> bool:
    """Return whether a plan serves the given batch, among batches of the plan's kind."""
    if own.guard is None:
        return True
    with GATE.shared():
        return own.serves(wanted.tensors)
