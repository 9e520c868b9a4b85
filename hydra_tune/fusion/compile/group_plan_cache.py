"""`GroupPlanCache`: the plans of a group, by the kinds of batches that its members want.

A kind is a mode and a batch signature, and may have several plans, each for other values or numbers. `GroupPlanCache`
makes a plan when a new kind appears, and finds smaller batches that can be padded and computed together with larger
batches, such as the last batch of an epoch. `GroupTrial` (`fusion/group/group_trial.py`) asks `GroupPlanCache` whenever
the group chooses the members to compute next, and `MemberComparison` (`fusion/group/member_comparison.py`) for a
member's own plan before a comparison. `fusion/group/group_executor.py` and `fusion/group/batch_bucketing.py` take
`wanted_of`. The module must not decide which trials are in a group.

Note: all plans of a group are cut as `first` is, because all run on the state that `first` has cut. Only the thread
that advances the group may call, except for `make_ready` and `stacked`.
"""

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hydra_tune.errors import GroupBatchError, UnfusableError
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory, layout_of, parts_of
from hydra_tune.fusion.group.member import MemberBatchRequest, MemberTrial
from hydra_tune.fusion.group.slot import GroupSlot
from hydra_tune.fusion.matching.plan_diff import MemberDifferences
from hydra_tune.fusion.ragged.masked_loss import MaskedReduction
from hydra_tune.fusion.ragged.sample_independence import PlanBatchSpec, counted_losses
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.capture.step_capture import state_specs
from hydra_tune.shard.partition.plan_cache import PreparedPlan
from hydra_tune.shard.partition.plan_request import TrialStateLayout
from hydra_tune.shard.python_state.number_inputs import NumberInputError

_LOGGER = logging.getLogger(__name__)

_MAX_PAIRS = 256  # remembered comparisons of two plans; a further comparison makes the cache forget all pairs
_MAX_PLANS = 8  # kept for each kind of batch: steps that depend on values of the batch or on numbers need several


class GroupPlanCache:
    """Plans of a group's batches; each plan is for a single member, and the group stacks the plans.

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
        # A member's batch for each plan. `forget` keeps the batches, because another thread may be tracing a forgotten plan.
        self._inputs: WeakKeyDictionary[PreparedPlan, Sequence[Tensor]] = WeakKeyDictionary()
        self._known: dict[tuple[str, Hashable], list[PreparedPlan]] = {}

    def found(self, wanted: MemberBatchRequest) -> PreparedPlan | None:
        """Return the plan that serves a request, if there is such a plan already."""
        plans = self._known.get((wanted.mode, wanted.leaves.signature), ())
        return next((plan for plan in plans if _serves(plan, wanted)), None)

    def made(self, seat: GroupSlot, member: MemberTrial) -> PreparedPlan:
        """Return the plan for a member's request; make the plan if necessary.

        Raises:
            GroupBatchError: the plan cannot be stacked.
            NumberInputError: the group has needed too many plans for numbers of this kind of batch.
        """
        request = wanted_of(seat)
        try:
            if self.first is None:
                if request.mode == "train":
                    self.first = self._made(member, request)
                else:
                    with seat.member.peek() as first_batches:
                        self.first = self._made(member, first_batches["train"])
                # Later plans are cut alike, because all of them run on the state that this plan cuts.
                self._layout = layout_of(self.first)
            plan = self.found(request)
            # Of the member itself, if the plan depends on the member's numbers.
            return self._made(seat.member if request.places else member, request) if plan is None else plan
        except UnfusableError as error:
            raise _not_together(error) from error

    def forget(self) -> None:
        """Forget all plans but the cut of the group's state: the members' Python state has changed."""
        self._known.clear()
        self._pairs.clear()

    def confirm(self, own: PreparedPlan, seat: GroupSlot) -> bool:
        """Return whether a member's own plan is right for the member's present numbers.

        Raises:
            NumberInputError: the plan gives other numbers than the eager step.
        """
        wanted = wanted_of(seat)
        if own.numbers is None or not own.numbers.hold(wanted.numbers):
            return own.numbers is None
        if not own.numbers.serve(wanted.numbers):
            self._plans.confirm(own, seat.member, wanted)
        return True

    def of_member(self, own: PreparedPlan, member: MemberTrial, request: MemberBatchRequest) -> PreparedPlan:
        """Return the plan of a member that is computed together with the member of another plan.

        Raises:
            HydraTuneError: as of `PlanLibrary.prepare`.
        """
        return self._plans.of_member(member, request, None if own is self.first else self._layout)

    def likeness(self, own: PreparedPlan, members: Sequence[MemberTrial]) -> MemberDifferences:
        """Return the differences between the members for a plan.

        Raises:
            GroupBatchError: the members differ in more than dropout probabilities and losses.
        """
        request, by = self._wanted[own]
        if request.mode == "evaluate":  # members without validation have no metrics to compare
            members = [by if member.task.validate is None else member for member in members]
        try:
            # The member behind `own` goes first, as the differences are those from its plan; its entry is dropped below.
            layout = None if own is self.first else self._layout
            _, differences = self._plans.of_members([by, *members], request, layout, own)
        except UnfusableError as error:
            raise _not_together(error) from error
        return differences.part(1)

    def _made(self, member: MemberTrial, wanted: MemberBatchRequest) -> PreparedPlan:
        plans = self._known.setdefault((wanted.mode, wanted.leaves.signature), [])
        if wanted.places and len(plans) == _MAX_PLANS:
            raise NumberInputError(wanted.mode, wanted.places, f"they have needed {_MAX_PLANS} captures in a group")
        plan = self._plans.of_member(member, wanted, self._layout)
        self._wanted[plan] = wanted, member
        self._plans.stacked(plan, 1)  # raises now if the plan cannot be stacked
        # Keep only the geometry: the batch itself may be large.
        self._inputs[plan] = [torch.empty_like(tensor, device="meta") for tensor in wanted.tensors]
        plans.append(plan)
        del plans[:-_MAX_PLANS]
        return plan

    def lacking(self, seats: Sequence[GroupSlot]) -> list[GroupSlot]:
        """Return a member for every kind of batch without a plan, if several kinds are wanted in the same mode.

        Only a comparison of plans shows whether one kind can be padded to another.
        """
        signatures: dict[str, dict[Hashable, GroupSlot]] = {}
        for seat in seats:
            request = wanted_of(seat)
            signatures.setdefault(request.mode, {})[request.leaves.signature] = seat
        several = [(mode, by) for mode, by in signatures.items() if len(by) > 1]
        return [seat for mode, by in several for key, seat in by.items() if (mode, key) not in self._known]

    def counted(self, own: PreparedPlan) -> dict[str, MaskedReduction]:
        """Return the reductions over samples in a plan whose smaller batches are padded."""
        return self._counted[own]

    def of(self, seats: Sequence[GroupSlot], members: Sequence[MemberTrial]) -> dict[Hashable, list[GroupSlot]]:
        """Group the members by what is computed together: the mode, and the plan that serves the batch.

        Where smaller batches are padded, members with the largest batches come first.
        """
        # Fast path for every ordinary step: all members share the
        # very same `BatchLeaves` object, so no signatures need comparing.
        first_request = wanted_of(seats[0])
        if all(
            wanted_of(seat).leaves is first_request.leaves and wanted_of(seat).mode == first_request.mode
            for seat in seats
        ):
            plan = self.found(first_request)
            if plan is not None and plan.guard is None and plan.numbers is None:
                return {(first_request.mode, first_request.leaves.signature, id(plan)): list(seats)}
        kinds: dict[Hashable, list[GroupSlot]] = {}
        for seat in seats:
            request = wanted_of(seat)
            plan = self.found(request)
            key = (request.mode, request.leaves.signature, None if plan is None else id(plan))
            kinds.setdefault(key, []).append(seat)
        if len(kinds) == 1 or members[0].architecture is None or len({member.architecture for member in members}) > 1:
            return kinds  # a single kind, or members with different numbers, whose batches are never padded
        return self._merged(kinds)

    def _merged(self, kinds: Mapping[Hashable, list[GroupSlot]]) -> dict[Hashable, list[GroupSlot]]:
        kinds_left = sorted(kinds.items(), key=lambda item: -wanted_of(item[1][0]).num_samples)
        merged_kinds: dict[Hashable, list[GroupSlot]] = {}
        while kinds_left:
            (key, largest), *smaller_kinds = kinds_left
            unpadded_kinds = [
                (smaller_key, seats) for smaller_key, seats in smaller_kinds if not self._may_pad(seats[0], largest[0])
            ]
            unpadded_keys = {smaller_key for smaller_key, _ in unpadded_kinds}
            merged_kinds[key] = [
                *largest,
                *(seat for smaller_key, seats in smaller_kinds if smaller_key not in unpadded_keys for seat in seats),
            ]
            kinds_left = unpadded_kinds
        return merged_kinds

    def _may_pad(self, small: GroupSlot, large: GroupSlot) -> bool:
        a, b = wanted_of(small), wanted_of(large)
        small_plan, large_plan = self.found(a), self.found(b)
        if (
            a.mode != b.mode
            or a.num_samples == b.num_samples
            or small_plan is None
            or large_plan is None
            or small_plan.guard is not None
            or large_plan.guard is not None
        ):
            return False
        if (small_plan, large_plan) not in self._pairs:
            if len(self._pairs) >= _MAX_PAIRS:
                self._pairs.clear()
            sizes = (a.num_samples, b.num_samples)
            try:
                counted = counted_losses(self._batched(small_plan), self._batched(large_plan))
                # All smaller batches padded to a plan must agree on its
                # reductions, since the plan is rewritten once for all of them.
                self._pairs[small_plan, large_plan] = self._counted.setdefault(large_plan, counted) == counted
            except UnfusableError as error:
                self._pairs[small_plan, large_plan] = False
                _LOGGER.info("members with batches of %d samples and of %d take turns (%s): %s", *sizes, a.mode, error)
        return self._pairs[small_plan, large_plan]

    def _batched(self, own: PreparedPlan) -> PlanBatchSpec:
        request, member = self._wanted[own]
        return PlanBatchSpec(own.plan, state_specs(member.built()[0]), self._inputs[own], request.num_samples)

    def served(self, own: PreparedPlan, seats: Sequence[GroupSlot]) -> list[GroupSlot]:
        """Return the members, all with the same kind of batch, that a plan serves."""
        return [seat for seat in seats if _serves(own, wanted_of(seat))]

    def make_ready(self, size: int, state: Mapping[str, Tensor], place: torch.device, budget_bytes: int) -> None:
        """Stack and trace all plans for a number of members; any thread may call."""
        # The group's thread may add plans meanwhile, so iterate over copies.
        for plans in list(self._known.values()):
            for plan in list(plans):
                parts = parts_of(self._plans.stacked(plan, size).plan, size, budget_bytes)
                for part_size in {len(slots) for slots in parts}:
                    self.trace(plan, part_size, state, place)

    def stacked(self, size: int) -> Iterator[tuple[PreparedPlan, Sequence[Tensor]]]:
        """Yield every plan stacked for a number of members, with a member's batch (only the geometry counts)."""
        for plans in list(self._known.values()):
            for plan in list(plans):
                yield self._plans.stacked(plan, size), self._inputs[plan]

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
        stacked_plan = self._plans.stacked(own, size, slots=likeness.drops, rows=likeness.rows, counted=counted)
        inputs = self._inputs[own]
        if counted is not None:
            # The counts of samples, a number for each member, which `StackedBatches` appends.
            inputs = [*inputs, torch.empty((), dtype=torch.int64, device="meta")]
        self._plans.trace(
            stacked_plan,
            {name: _of_size(tensor, size, tensor.shape[1:]) for name, tensor in state.items()},
            tuple(_of_size(tensor, size, tensor.shape) for tensor in inputs),
            size,
            divisor=self._wanted[own][1].task.loss_divisor,
            may_compile=counted is None,
            place=place,
        )
        return stacked_plan


def _not_together(error: UnfusableError) -> GroupBatchError:
    return GroupBatchError(
        f"the trials of a group have come to a kind of batch that they cannot compute together: {error}"
    )


def wanted_of(seat: GroupSlot) -> MemberBatchRequest:
    """Return the member's request for a batch."""
    assert isinstance(seat.wants, MemberBatchRequest), "it wants nothing computed"
    return seat.wants


def _of_size(tensor: Tensor, size: int, shape: Sequence[int]) -> Tensor:
    return torch.empty((size, *shape), dtype=tensor.dtype, device="cpu").requires_grad_(tensor.requires_grad)


def _serves(own: PreparedPlan, wanted: MemberBatchRequest) -> bool:
    """Return whether a plan serves the given batch, among batches of the plan's kind."""
    if own.numbers is not None and not own.numbers.hold(wanted.numbers):
        return False
    if own.guard is None:
        return True
    with GATE.shared():
        return own.serves(wanted.tensors)
