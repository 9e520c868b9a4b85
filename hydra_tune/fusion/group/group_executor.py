"""`GroupExecutor`: compute the members' batches together as units on stacked tensors, and hand every member its results.

`GroupTrial` (`group_trial.py`) calls `GroupExecutor` for each step, round or evaluated batch, after the choice of the
members, and makes a further `GroupExecutor` for each part of an evaluation that does not fit a device whole. The module must
not choose the members of a batch. A single thread at a time runs a group, so no lock is taken.

Note: masks. `set_up` names the active slots to the streams and, before a training batch, to the optimizer. Units draw
for active slots only, and results of resting slots reach no member.
"""

import math
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import Any

from hydra_tune.batched.batched_optimizer import StackedOptimizer
from hydra_tune.devices.device import Device
from hydra_tune.fusion.compile.group_plan_cache import wanted_of
from hydra_tune.fusion.group.batched_inputs import StackedBatches
from hydra_tune.fusion.group.group_step import GroupEvaluation, GroupStep
from hydra_tune.fusion.group.member import MemberBatchRequest
from hydra_tune.fusion.group.membership import go_on
from hydra_tune.fusion.group.multi_step_unit import GroupRound, RoundContext
from hydra_tune.fusion.group.slot import GroupSlot
from hydra_tune.fusion.group.slot_table import GroupPart, SlotTable
from hydra_tune.fusion.ragged.loss_heads import HeadAssignment
from hydra_tune.fusion.runtime.paired_unit import PairRoundHalf
from hydra_tune.fusion.runtime.plan_autotuner import StepPlanAutotuner
from hydra_tune.fusion.runtime.planned_unit import GroupStepRunner, PlannedRound
from hydra_tune.shard.capture.batch import BatchLeaves
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.shard.partition.plan_cache import PreparedPlan
from hydra_tune.train.loop.batch_units import PendingUnit
from hydra_tune.train.loop.training_batch import BatchPart
from hydra_tune.train.state.model_state import ModelState
from hydra_tune.train.timing.unit_times import UnitTimes

_UNKNOWN = 0  # number of batches in a step whose last batch is only known afterwards


class GroupExecutor:
    """Computes batches for the members of a group.

    Args:
        device: any device of the pool, for host memory.

    Attributes:
        rows: assignment of results to members for the running plan; None where all members have all results.
        numbered: the members' own plans, by slot, where Python computes inputs of the running plan from numbers.
    """

    def __init__(self, places: SlotTable, device: Device) -> None:
        self._places = places
        self._device = device
        self.rows: HeadAssignment | None = None
        self.numbered: Sequence[PreparedPlan] = ()
        self.round: GroupRound | None = None

    def set_up(
        self,
        bucket: Sequence[GroupSlot],
        part: GroupPart,
        plan: ShardPlan,
        times: UnitTimes,
        like: MemberBatchRequest | None,
    ) -> tuple[BatchPart, StackedBatches, Collection[int]]:
        """Configure the slots for the given members; return the part, the batches and the resting slots."""
        self.numbered, self.rows = part.differences.numbered, part.differences.rows
        batches = self.batches_of(bucket, like)
        taking_part = {id(seat) for seat in bucket}
        # Resting members must not draw: their streams would advance,
        # and their later numbers would depend on the group's schedule.
        active = [id(seat) in taking_part for seat in self._places.seats]
        self._places.streams.active = active
        self._places.streams.probabilities = part.differences.drops
        if plan.mode == "train":
            assert self._places.state is not None
            assert isinstance(self._places.state.optimizer, StackedOptimizer)
            self._places.state.optimizer.active = list(active)
        resting = frozenset(index for index, is_active in enumerate(active) if not is_active)
        return BatchPart(plan=plan, times=times, leaves=batches.leaves()), batches, resting

    def batches_of(self, bucket: Sequence[GroupSlot], like: MemberBatchRequest | None) -> StackedBatches:
        """Return the batches of all slots; a resting slot computes on the first batch of the bucket."""
        requests = {id(seat): wanted_of(seat) for seat in bucket}
        first_request = wanted_of(bucket[0])
        wanted = [requests.get(id(seat), first_request) for seat in self._places.seats]
        return StackedBatches(wanted, like, [] if not self.numbered else self._inputs_of(bucket))

    def _inputs_of(self, bucket: Sequence[GroupSlot]) -> list[list[float]]:
        """Return the inputs that Python computes from the members' numbers, for each slot; zeros for a resting member."""
        numbers = [prepared.numbers for prepared in self.numbered]
        inputs = [
            own.computed(wanted_of(seat).numbers) if own is not None and seat in bucket else []
            for own, seat in zip(numbers, self._places.seats, strict=True)
        ]
        most = max(map(len, inputs))
        return [[*values, *[0.0] * (most - len(values))] for values in inputs]

    def go_round(
        self,
        bucket: Sequence[GroupSlot],
        part: BatchPart,
        batches: StackedBatches,
        resting: Collection[int],
        like: MemberBatchRequest | None,
        planned: StepPlanAutotuner[GroupStepRunner] | None = None,
        *,
        is_all: bool = True,
    ) -> Generator[PendingUnit, None, int]:
        """Run a unit of several steps, planned or not; return the number of steps.

        If the bucket holds all members that want a batch (`is_all`), the members advance inside the unit.
        """
        arguments = self._of_round(bucket, part, batches, resting, like, is_all=is_all)
        self.round = new_round = GroupRound(*arguments) if planned is None else PlannedRound(*arguments, planned)
        try:
            yield new_round.unit()
        # The pool calls `GroupTrial.finished`, which reads the round, before it resumes this generator.
        finally:
            self.round = None
        return new_round.steps

    def half(
        self,
        bucket: Sequence[GroupSlot],
        part: BatchPart,
        batches: StackedBatches,
        resting: Collection[int],
        *,
        is_all: bool,
    ) -> PairRoundHalf:
        """Return the same steps prepared to run in turn with another group's steps."""
        return PairRoundHalf(*self._of_round(bucket, part, batches, resting, None, is_all=is_all))

    def _of_round(
        self,
        bucket: Sequence[GroupSlot],
        part: BatchPart,
        batches: StackedBatches,
        resting: Collection[int],
        like: MemberBatchRequest | None,
        *,
        is_all: bool,
    ) -> tuple[
        RoundContext, StackedBatches, BatchLeaves, Callable[[Sequence[Any]], None], Callable[[], StackedBatches | None]
    ]:
        state = self._places.state
        assert state is not None
        first_requests = [wanted_of(bucket[0])] if like is None else [wanted_of(seat) for seat in bucket]
        rules = RoundContext(
            plan=part.plan,
            times=part.times,
            state=state,
            streams=self._places.streams,
            gradients=self._places.gradients,
            resting=resting,
            collects=self._collects,
        )

        def next_batches() -> StackedBatches | None:
            """Return the batches of the same members' next step, or None where the unit has to end before that step."""
            # Members outside the bucket also wait for the device, and a
            # member that is to end or leave is served between units only.
            if not is_all or any(seat.stop is not None or seat.is_paused for seat in bucket):
                return None
            for seat in bucket:
                # Every member's code has advanced by now, even where the round must end because a member
                # wants something else. `is_ahead` tells `MemberCoordinator.advance` not to advance again.
                go_on(seat)
                seat.is_ahead = True
            number(bucket)
            if not all(any(_wants_alike(seat, request) for request in first_requests) for seat in bucket):
                return None
            # Their own code may have changed what the round's plan has baked in.
            if any(seat.member.changed_state(part.plan.mode) is not None for seat in bucket):
                return None
            if not all(self._serves(seat) for seat in bucket):
                return None
            for seat in bucket:
                seat.is_ahead = False
            return self.batches_of(bucket, like)

        def settle(made: Sequence[Any]) -> None:
            if part.plan.mode == "train":
                self._take_losses(made, resting)
            else:
                self._take_values(made, resting)

        return rules, batches, part.leaves, settle, next_batches

    def _serves(self, seat: GroupSlot) -> bool:
        """Whether the running plan is known to be right for a member's present numbers."""
        if not self.numbered:
            return True
        numbers = self.numbered[self._places.seats.index(seat)].numbers
        return numbers is None or numbers.serve(wanted_of(seat).numbers)

    def step(self, part: BatchPart, state: ModelState, resting: Collection[int]) -> Generator[PendingUnit, None, None]:
        """Run a step for the active members."""
        step = GroupStep(1, state, self._places.streams, self._device, self._places.gradients)
        step.resting = tuple(resting)
        try:
            yield from step.batch(part)
            yield from step.finish()
            self._take_losses([step.member_losses], resting)
        finally:
            step.close()

    def accumulated(
        self,
        members: Sequence[GroupSlot],
        prepare: Callable[[Sequence[GroupSlot]], tuple[Sequence[GroupSlot], BatchPart, Collection[int]]],
        advance: Callable[[GroupSlot], None],
    ) -> Generator[PendingUnit, None, None]:
        """Run a step of several batches for each of some members, which begin the step together.

        Between batches each member advances to its next batch, or ends. Members that then want another kind of batch
        compute separately. The update runs when every member has had all its batches, or as many as its data had left.
        """
        places, step = self._places, None
        batches_left = {id(seat): seat.member.task.accumulate for seat in members}
        try:
            while wanting := [
                seat for seat in members if batches_left[id(seat)] and isinstance(seat.wants, MemberBatchRequest)
            ]:
                together, part, resting = prepare(wanting)
                if step is None:
                    assert places.state is not None
                    step = GroupStep(_UNKNOWN, places.state, places.streams, self._device, places.gradients)
                # Members of this step that are not in this batch keep the gradients of their earlier batches.
                holding = {id(seat) for seat in members if seat.status is None} - {id(seat) for seat in together}
                step.resting = tuple(resting)
                step.holding = [index for index, seat in enumerate(places.seats) if id(seat) in holding]
                yield from step.batch(part)
                self._take_losses([step.member_losses], resting)
                for seat in together:
                    batches_left[id(seat)] -= 1
                    if batches_left[id(seat)]:
                        advance(seat)
            # A member with a loss that is not finite takes no update,
            # so its parameters stay at their last good values.
            finite_members = [
                seat for seat in members if seat.status is None and all(map(math.isfinite, seat.member.results))
            ]
            if step is not None and finite_members:
                yield from self._updated(step, finite_members)
        finally:
            if step is not None:
                step.close()

    def _updated(self, step: GroupStep, members: Sequence[GroupSlot]) -> Generator[PendingUnit, None, None]:
        # The last batch has left only its own members active.
        taking_part = {id(seat) for seat in members}
        active = [id(seat) in taking_part for seat in self._places.seats]
        state = self._places.state
        assert state is not None
        assert isinstance(state.optimizer, StackedOptimizer), "not a group's state"
        self._places.streams.active = state.optimizer.active = active
        yield from step.finish()

    def evaluated(self, part: BatchPart, resting: Collection[int]) -> Generator[PendingUnit, None, None]:
        """Evaluate a batch of every active member."""
        state = self._places.state
        assert state is not None
        evaluation = GroupEvaluation(part.plan, part.times, state, part.leaves, self._places.streams, self._device)
        evaluation.resting, evaluation.collects = tuple(resting), self._collects
        try:
            yield from evaluation.units()
        finally:
            evaluation.close()
        self._take_values([evaluation.values], resting)

    @property
    def _collects(self) -> bool:
        """Whether the members' evaluations return tensors for `finish=`; a group's members are alike in this."""
        return any(seat.member.task.finish is not None for seat in self._places.seats)

    def _take_losses(self, steps: Sequence[Sequence[float]], resting: Collection[int]) -> None:
        for index, losses in enumerate(zip(*steps, strict=True)):
            if index not in resting:
                self._places.seats[index].member.results = losses

    def _take_values(self, steps: Sequence[Mapping[str, Sequence[Any]]], resting: Collection[int]) -> None:
        for index, seat in enumerate(self._places.seats):
            if index not in resting:
                names = None if self.rows is None else self.rows.names(index)
                seat.member.results = [
                    {name: values[index] for name, values in step.items() if names is None or name in names}
                    for step in steps
                ]


def number(seats: Iterable[GroupSlot]) -> None:
    """Give the members' requests the numbers of this moment, which are inputs of the graph."""
    for seat in seats:
        if isinstance(seat.wants, MemberBatchRequest):
            seat.wants = seat.member.numbered(seat.wants)


def are_padded(bucket: Sequence[GroupSlot]) -> bool:
    """Return whether the batches of a bucket have several sizes."""
    first_leaves = wanted_of(bucket[0]).leaves
    all_leaves = (wanted_of(seat).leaves for seat in bucket)
    return any(leaves is not first_leaves and leaves.signature != first_leaves.signature for leaves in all_leaves)


def _wants_alike(seat: GroupSlot, first: MemberBatchRequest) -> bool:
    request = seat.wants
    if not isinstance(request, MemberBatchRequest) or request.mode != first.mode:
        return False
    return request.leaves is first.leaves or request.leaves.signature == first.leaves.signature
