"""`GroupTrial`: several trials that the pool runs as a single trial.

The group advances the members' own training loops (`membership.py`), picks the members whose batches run next
(`batch_bucketing.py`), and yields units that compute all of them on stacked tensors (`group_executor.py`).
`GroupJobLauncher` (`pool/fusion/group_jobs.py`) makes a `GroupTrial` when a job in preparation has found further
members, or has left a group; `FusionBenchmark` (`fusion/matching/group_timing.py`) makes a `GroupTrial` to time a group
size; and `PairTrial` (`fusion/runtime/pair_trial.py`) advances two groups. `LiveGroup` (`pool/fusion/live_group.py`) and
`PairSide` (`fusion/runtime/pair_side.py`) answer a group's questions about joins and sizes. The module must not plan for less
memory: `PlannedStepCache` (`fusion/runtime/planned_unit.py`) does.

Note: threads. A single thread at a time advances a group, and members' code, joins, leaves and changes of size run only
there, between two steps. Other threads may set `goes_back` and `most`, call `make_ready`, and ask `is_due`, `admits` or
`knows`.

Note: order. Recorded and planned steps are bound to the stacked state, and are dropped before the state is replaced or
released.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence

from typing_extensions import override

from hydra_tune.batched.batched_optimizer import StackedOptimizer
from hydra_tune.batched.per_member_optimizer import PerMemberOptimizer
from hydra_tune.devices.cuda_graphs import CudaRecorder
from hydra_tune.devices.device import Device
from hydra_tune.errors import GroupBatchError, UnfusableError
from hydra_tune.fusion.compile.batched_plan import is_traced
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory, parts_of
from hydra_tune.fusion.compile.cuda_graph_steps import GroupCaptureCache
from hydra_tune.fusion.compile.group_plan_cache import GroupPlanCache, wanted_of
from hydra_tune.fusion.group.batch_bucketing import BucketScheduler
from hydra_tune.fusion.group.batched_inputs import StackedBatches
from hydra_tune.fusion.group.group_executor import GroupExecutor, are_padded, number
from hydra_tune.fusion.group.member import MemberBatchRequest, MemberTrial
from hydra_tune.fusion.group.member_comparison import MemberComparison
from hydra_tune.fusion.group.membership import MemberCoordinator
from hydra_tune.fusion.group.multi_step_unit import may_go_round
from hydra_tune.fusion.group.resize_policy import GroupResizePolicy
from hydra_tune.fusion.group.slot import GroupDelegate, GroupSlot
from hydra_tune.fusion.group.slot_table import GroupPart, SlotTable
from hydra_tune.fusion.group.stacked_state import StackedModule, adopt, stacked_optimizer
from hydra_tune.fusion.matching.plan_diff import MemberDifferences
from hydra_tune.fusion.runtime.pair_offer import PairingOffer
from hydra_tune.fusion.runtime.planned_unit import PlannedStepCache
from hydra_tune.fusion.runtime.step_planner import StepPlanner
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.memory.trial_context import TrialMemoryContext
from hydra_tune.shard.partition.plan_cache import PlanLibrary, PreparedPlan
from hydra_tune.shard.python_state.number_inputs import NumberInputError
from hydra_tune.train.loop.batch_units import PendingUnit
from hydra_tune.train.loop.training_batch import BatchPart
from hydra_tune.train.parallel.parallel_step import ParallelStep
from hydra_tune.train.state.model_state import ModelState
from hydra_tune.train.timing.shared_times import SharedUnitTimes
from hydra_tune.train.trial import PendingReport, Trial

_LOGGER = logging.getLogger("hydra_tune.fusion")
_MAX_STACKED = 64  # stacked plans that a group remembers
_MAX_STATES = 8  # of a member's Python, for each of which the step is captured; then the members go on alone


class GroupTrial(Trial):
    """A running fused group.

    Args:
        seats: the members, with equal fusion keys; members may have begun in another group.
        device: any device of the pool, for host memory; traces are made for devices of its kind.
        desk: receives events about the slots and answers questions, on the thread that advances the group.
        host, tenant, times: as of `Trial`.
        most: largest number of slots; None: the present number.
        planner: plans steps that exceed a device's memory; None: no such steps are planned.

    Attributes:
        hands_back: whether `close` hands unfinished members back between two steps, because another group may continue
            the members.
        goes_back: whether the group ends before its next step so that the members continue elsewhere. A group of a pair
            ends with the pair instead.
        takes_turns: whether the group offers its steps, to run in turn with the steps of another group.
        offer: the steps of the due unit, offered to run in turn; None where the steps cannot run in turn.
    """

    hands_back = False
    goes_back = False
    takes_turns = False
    offer: PairingOffer | None = None
    beside: "GroupTrial | None" = None

    def __init__(
        self,
        seats: Sequence[GroupSlot],
        plans: GroupPlanFactory,
        library: PlanLibrary,
        device: Device,
        desk: GroupDelegate,
        host: HostTier | None = None,
        tenant: TrialMemoryContext | None = None,
        times: SharedUnitTimes | None = None,
        most: int | None = None,
        planner: StepPlanner | None = None,
    ) -> None:
        super().__init__(seats[0].member.task, library, device, None, host, tenant, times)
        self.buckets = BucketScheduler()
        self._desk = desk
        self._sizes = GroupResizePolicy(len(seats) if most is None else most)
        self._group_plans = plans
        self._times = times or SharedUnitTimes()
        self._kinds = GroupPlanCache(plans)
        self._places = SlotTable(seats, device)
        is_exact = not library.budget.checks_sample
        self._comparison = MemberComparison(self._places, self._kinds, library, is_exact=is_exact)
        self._attendance = MemberCoordinator(
            self._places, desk, self._resize, lambda seat: self._comparison.check(seat, self.unit_times.total)
        )
        self._computing = GroupExecutor(self._places, device)
        self.captures = GroupCaptureCache(CudaRecorder())
        self.records = plans.records and device.torch_device.type == "cuda"
        self._planned = None if planner is None else PlannedStepCache(planner, device, desk.measured)
        self._units_done = 0  # of the current step
        # Numbers of the members' Python state, in words, by mode: inputs of the graphs, and those that cannot be inputs.
        self._inputs: dict[str, frozenset[str]] = defaultdict(frozenset)
        self._not_inputs: dict[str, frozenset[str]] = defaultdict(frozenset)
        self._num_comparisons = 0  # of members, because of numbers
        self._architectures = {seat.member.architecture for seat in seats}
        for seat in seats:
            self._places.welcome(seat)

    @property
    def remaining_seconds(self) -> float:
        """Expected seconds of compute left, by the most steps and the most evaluated batches that any member has left."""
        steps = max((seat.member.progress.steps_left for seat in self._places.live), default=0)
        evaluated = max((seat.member.progress.evaluated_batches_left for seat in self._places.live), default=0)
        # The step under way counts in `_step_left`, so subtract it here.
        later_seconds = max(0.0, steps * self.unit_times.total - self.unit_times.total)
        return self._step_left + later_seconds + evaluated * self._evaluation_times.total

    def admits(self, member: MemberTrial) -> bool:
        """Return whether a new member would leave the bits of the present members unchanged.

        A member that clips gradients is admitted only where a member clipped when the slots were made.
        """
        if member.task.max_grad_norm is not None and not self._places.gradients.clips:
            return False  # the group did not reserve the memory that clipping needs
        optimizer = None if self.state is None else self.state.optimizer
        return not isinstance(optimizer, StackedOptimizer) or optimizer.admits(member.built()[1])

    def knows(self, architecture: Hashable) -> bool:
        """Return whether an architecture is already known to be like the members'.

        `GroupPlanFactory.check_alike` compares unknown pairs.
        """
        return any(self._group_plans.are_known(seat.member.architecture, architecture) for seat in self.seats)

    @property
    def plans(self) -> set[PreparedPlan]:
        """The stacked plans of the present members."""
        return {part.prepared for parts in self._places.stacked.values() for part in parts}

    @property
    def most(self) -> int:
        """Largest number of slots."""
        return self._sizes.most

    @most.setter
    def most(self, most: int) -> None:
        self._sizes.most = most

    @property
    def units_planned(self) -> int | None:
        """None: the number of units is unknown, since any member may be stopped early."""
        return None

    @property
    def host_bytes(self) -> int:
        """As of `Trial`, plus the host copies of swapped tensors."""
        return super().host_bytes + (0 if self._planned is None else self._planned.host_bytes)

    @property
    def fixed_host_bytes(self) -> int:
        """As of `Trial`; host copies of swapped tensors never move to disk."""
        return super().fixed_host_bytes + (0 if self._planned is None else self._planned.host_bytes)

    def finished(self, unit: PendingUnit, seconds: float) -> None:
        """Account for a finished unit; the time is shared equally among the members that took part."""
        super().finished(unit, seconds)
        self._units_done += 1
        if self._computing.round is not None:
            self._computing.round.measured(seconds)
        self.units_run += self.units_in(unit) - 1
        taking_part, units = self._taking_part, self._units_of_each(unit)
        for seat in taking_part:
            seat.member.units_run += units
            seat.member.compute_seconds += seconds / len(taking_part)

    @override
    def units_in(self, unit: PendingUnit) -> int:
        return self._units_of_each(unit) * len(self._taking_part)

    def _units_of_each(self, unit: PendingUnit) -> int:
        """Return the units that a member counts for a unit of the group."""
        # A round packs several steps into a single unit; count the
        # units that the same steps would have taken one by one.
        running_round = self._computing.round
        return 1 if running_round is None else running_round.steps * len(unit.times)

    @property
    def _taking_part(self) -> list[GroupSlot]:
        return [seat for seat, active in zip(self.seats, self._places.streams.active, strict=True) if active]

    def close(self, *, keep: bool) -> None:
        """End the group; hand back the unfinished members, or close all of them where that is impossible."""
        del keep
        # Members can continue elsewhere only from the state between two steps. Once
        # a unit of the current step has run, gradients or parameters are half-way.
        live, is_whole = self._places.live, self.hands_back and not self._units_done and self._computing.round is None
        try:
            if is_whole:
                for seat in live:
                    self._places.hand_out(seat)
        except RuntimeError:  # a lost device, or no memory for the copies
            is_whole = False
        # Recorded steps hold device memory, planned steps host memory, and both refer to the state's tensors.
        self._drop_steps()
        super().close(keep=False)
        self._places.state = None
        for seat in live:
            seat.member.fetch, seat.is_handed_back = None, is_whole
            if not is_whole:
                seat.member.close(keep=False)

    @property
    def seats(self) -> list[GroupSlot]:
        """The members, in the order of their slots."""
        return self._places.seats

    @property
    def is_due(self) -> bool:
        """Whether a waiting group has work to do; any thread may ask."""
        return self._attendance.is_due

    @property
    def is_held(self) -> bool:
        """Whether the group will have work soon without any answer; never true for a single group."""
        return False

    def _train(self) -> Generator[PendingUnit | ParallelStep | PendingReport, None, None]:
        while True:
            yield from self._attendance.settled()
            wanting = [seat for seat in self._places.live if isinstance(seat.wants, MemberBatchRequest)]
            # A group of a pair ends with the pair (`PairTrial._next`).
            if not wanting or (self.goes_back and not self.takes_turns):
                return
            bucket, plan = self._next(wanting, self.buckets.next)
            if wanted_of(bucket[0]).mode == "train":
                self._comparison.note(plan, wanted_of(bucket[0]))
            if self.task.accumulate > 1 and wanted_of(bucket[0]).mode == "train":
                yield from self._computing.accumulated(bucket, self._next_of_step, self._attendance.advance)
            else:
                steps = yield from self._compute(
                    bucket, self._prepared(plan, are_padded(bucket)), is_all=len(bucket) == len(wanting)
                )
                self._count(bucket, steps)
            self._units_done = 0
            for seat in bucket:
                if seat.status is None:
                    self._attendance.advance(seat)

    def _next(
        self, wanting: Sequence[GroupSlot], choose: Callable[[Mapping[Hashable, list[GroupSlot]]], list[GroupSlot]]
    ) -> tuple[list[GroupSlot], PreparedPlan]:
        """Choose the members computed next among members that want a batch; return the choice with a plan for all."""
        self._follow_state(wanting)
        try:
            return self._chosen(wanting, choose)
        except NumberInputError as error:
            _LOGGER.info("%s", error)
            self._inputs[error.mode] -= error.places
            self._not_inputs[error.mode] |= error.places
            return self._next(wanting, choose)

    def _chosen(
        self, wanting: Sequence[GroupSlot], choose: Callable[[Mapping[Hashable, list[GroupSlot]]], list[GroupSlot]]
    ) -> tuple[list[GroupSlot], PreparedPlan]:
        """As `_next`.

        Raises:
            NumberInputError: numbers of the members' Python state cannot be inputs of the graph.
        """
        number(wanting)
        for seat in self._kinds.lacking(wanting):
            self._made(seat)
        bucket = choose(self._kinds.of(wanting, [seat.member for seat in self.seats]))
        plan = self._kinds.found(wanted_of(bucket[0]))
        if plan is None:
            plan = self._made(bucket[0])
            # A new plan can carry a guard on values of the batch, so only
            # members whose batches pass the guard stay in the bucket.
            bucket = self._kinds.served(plan, bucket)
        self._check_numbers(plan, bucket)
        return bucket, plan

    def _check_numbers(self, plan: PreparedPlan, bucket: Sequence[GroupSlot]) -> None:
        """Compare the members once more where the members' own plans are not right for their present numbers.

        Raises:
            NumberInputError: there are no such plans.
        """
        for is_last in (False, True):
            parts = self._prepared(plan, are_padded(bucket))
            numbered = [own for part in parts for own in part.differences.numbered]
            if not numbered or all(self._kinds.confirm(numbered[self.seats.index(seat)], seat) for seat in bucket):
                return
            self._num_comparisons += 1
            if is_last or self._num_comparisons > _MAX_STATES:
                self._num_comparisons = 0
                places = wanted_of(bucket[0]).places
                raise NumberInputError(plan.plan.mode, places, "the steps of a group's members ask for other values")
            del self._places.stacked[plan, are_padded(bucket)]

    def _follow_state(self, wanting: Sequence[GroupSlot]) -> None:
        """Forget the plans if the members' own code has changed what the plans have baked in.

        Raises:
            GroupBatchError: the state changes too often, or in the middle of a step, or cannot be compared.
        """
        # All members, because their plans are compared: also those that want something else now, or have just joined.
        modes = sorted({wanted_of(seat).mode for seat in wanting})
        changes = [
            (seat, mode, change)
            for seat in self._places.live
            for mode in modes
            if (change := seat.member.changed_state(mode)) is not None
        ]
        what = changes[0][2] if changes else "its state"
        if changes:
            if self._units_done:
                raise GroupBatchError(f"{what} has changed within a step")
            _LOGGER.info("%s has changed, so the step of a group is captured again", what)
        for seat, mode, _ in changes:
            self._inputs[mode] |= seat.member.changed_numbers(mode) - self._not_inputs[mode]
        changed_seats = {id(seat) for seat, _, _ in changes}
        stale_seats = [
            seat for seat in self._places.live if id(seat) in changed_seats or seat.member.inputs != self._inputs
        ]
        if not stale_seats:
            return
        for seat in stale_seats:
            try:
                seat.member.identify(self._inputs)
            except UnfusableError as error:
                raise GroupBatchError(f"{what} has changed: {error}") from error
        # A joiner is stale without a change of state, because the joiner was compared with the numbers as constants.
        self._architectures |= {seat.member.architecture for seat in stale_seats if id(seat) in changed_seats}
        if len(self._architectures) > _MAX_STATES * len(self.seats):
            raise GroupBatchError(f"{what} has had {_MAX_STATES} values, and a group's step is captured for each")
        self._kinds.forget()
        self._places.stacked.clear()
        self._drop_steps()

    def _next_of_step(self, going: Sequence[GroupSlot]) -> tuple[Sequence[GroupSlot], BatchPart, Collection[int]]:
        """Prepare the next batch of an accumulated step; as of `GroupExecutor.accumulated`."""
        bucket, plan = self._next(going, lambda kinds: max(kinds.values(), key=len))
        seconds_left = self._step_left
        (whole,) = self._prepared(plan, are_padded(bucket))
        part, _, resting, _ = self._set_up(bucket, whole)
        if self._units_done:  # the step has begun: `_set_up` must not restart its clock
            self._step_left = seconds_left
        self._count(bucket, 1)
        return bucket, part, resting

    def _count(self, bucket: Sequence[GroupSlot], batches: int) -> None:
        for seat in bucket:
            seat.most_together = max(seat.most_together, len(self._places.live))
        for _ in range(batches):
            self._sizes.computed(len(self.seats), len(self._places.live))

    def _resize(self) -> None:
        live = len(self._places.live)
        if not live:
            return  # vacant slots need a live member to stand for, so the joiners take the present slots first
        size = self._sizes.wanted(len(self.seats), live, self._desk.waiting())
        if size == len(self.seats) or not self._desk.make_ready(size):
            return
        # Recorded steps and planned steps are made for the old size and hold its addresses.
        self._drop_steps()
        self._places.resize(size)
        self._sizes.changed()
        if self.state is not None:
            assert self._kinds.first is not None
            # `SlotTable.resize` has copied the old state to the members;
            # the new stack is built from the members' own modules.
            self._make_group_state(self._group_plans.stacked(self._kinds.first, size), self.state)

    def _drop_steps(self) -> None:
        self.captures.close()
        if self._planned is not None:
            self._planned.clear()

    def make_ready(self, size: int) -> None:
        """Make the plans for another number of slots, for every kind of batch seen so far; any thread may call."""
        if self.state is not None:
            self._kinds.make_ready(size, self.state.tensors, self._device.torch_device, self._budget_bytes)
        if self._planned is not None and self._kinds.first is not None:
            seats = self._places.live or self.seats
            # Vacant slots compute on a member's tensors too, so the last member stands for them.
            built = [seats[min(index, len(seats) - 1)].member.built() for index in range(size)]
            is_clipped = any(seat.member.task.max_grad_norm is not None for seat in seats)
            for prepared, inputs in self._kinds.stacked(size):
                self._planned.make_ready(prepared, built, inputs, is_clipped=is_clipped)

    def _compute(
        self, bucket: Sequence[GroupSlot], parts: Sequence[GroupPart], *, is_all: bool
    ) -> Generator[PendingUnit, None, int]:
        """Run the wanted batches, plus further batches where a unit runs several; return the number run for each member."""
        if len(parts) > 1:
            yield from self._evaluate_in(parts, bucket)
            return 1
        (whole,) = parts
        prepared, likeness = whole.prepared, whole.differences
        part, batches, resting, like = self._set_up(bucket, whole)
        state = self.state
        assert state is not None
        if self.takes_turns and part.plan.mode == "train" and self._may_take_turns(prepared, likeness, like):
            half = self._computing.half(bucket, part, batches, resting, is_all=is_all)
            self.offer = PairingOffer(
                half=half,
                prepared=prepared,
                wanted=wanted_of(bucket[0]),
                state=state,
                inputs=part.leaves.tensors,
                gradients=self._places.gradients,
                steps_done=min(seat.member.progress.steps for seat in bucket),
            )
            # The pair that owns this group either runs the offer in turn with the other group (`half.steps`
            # > 0), or declines; a declined offer falls through to a step of this group alone.
            yield half.unit()
            self.offer, self._computing.round = None, None
            if half.steps:
                return half.steps
        planned = None
        if self._planned is not None:
            planned = self._planned.steps(
                prepared,
                state,
                part.leaves.tensors,
                self._places.gradients,
                wanted_of(bucket[0]),
                self.plans,
                is_one_loss=likeness.rows is None,
            )
        if planned is not None or (is_all and self._goes_round(prepared)):
            return (yield from self._computing.go_round(bucket, part, batches, resting, like, planned, is_all=is_all))
        if part.plan.mode == "train":
            yield from self._computing.step(part, state, resting)
        else:
            yield from self._computing.evaluated(part, resting)
        return 1

    def _evaluate_in(
        self, parts: Sequence[GroupPart], bucket: Sequence[GroupSlot]
    ) -> Generator[PendingUnit, None, None]:
        like, chosen = wanted_of(bucket[0]) if are_padded(bucket) else None, {id(seat) for seat in bucket}
        members = [
            [seat for seat in self.seats[part.slots.start : part.slots.stop] if id(seat) in chosen] for part in parts
        ]
        num_parts = sum(map(bool, members))
        self._step_left = 0.0
        for part, own in zip(parts, members, strict=True):
            if not own:
                continue
            times = self._evaluation_times = self._times.of(part.prepared, num_parts)
            for seat in own:
                seat.member.runs_at(times, "evaluate")
            self._step_left = self._step_left or times.total
            computing = GroupExecutor(self._places.part(part.slots), self._device)
            batch, _, resting = computing.set_up(own, part, part.prepared.plan, times, like)
            self._places.streams.active = [any(seat is one for one in own) for seat in self.seats]
            yield from computing.evaluated(batch, resting)

    def _set_up(
        self, bucket: Sequence[GroupSlot], whole: GroupPart
    ) -> tuple[BatchPart, StackedBatches, Collection[int], MemberBatchRequest | None]:
        """Configure the group for the given members.

        Return the part, the batches, the resting slots, and the largest batch (None where all batches have one size).
        """
        first_request = wanted_of(bucket[0])  # `GroupPlanCache.of` puts the largest batch first
        like = first_request if are_padded(bucket) else None
        plan, is_training = whole.prepared.plan, first_request.mode == "train"
        if self.records and is_training and self.task.accumulate == 1 and is_traced(plan):
            plan = self.captures.of(plan)
        times = self._times.of(whole.prepared, self.task.accumulate if is_training else 1)
        part, batches, resting = self._computing.set_up(bucket, whole, plan, times, like)
        self._step_left = times.total
        for seat in bucket:
            seat.member.runs_at(times, first_request.mode)
        if is_training:
            self.unit_times = times
        else:
            self._evaluation_times = times
        return part, batches, resting, like

    def takes_part(self, offer: PairingOffer) -> None:
        """Accept that the offered steps are about to run in turn with another group's steps."""
        self._computing.round = offer.half

    def _may_take_turns(
        self, prepared: PreparedPlan, likeness: MemberDifferences, like: MemberBatchRequest | None
    ) -> bool:
        is_whole = len(prepared.plan.shards) == 1 and prepared.guard is None and self.task.accumulate == 1
        return is_whole and likeness.rows is None and like is None

    def _goes_round(self, prepared: PreparedPlan) -> bool:
        return prepared.guard is None and may_go_round(prepared.plan, self._device, self._budget_bytes)

    @property
    def _budget_bytes(self) -> int:
        return self._plans.library.budget.budget_bytes

    def _made(self, seat: GroupSlot) -> PreparedPlan:
        clipping_members = (
            live_seat.member for live_seat in self._places.live if live_seat.member.task.max_grad_norm is not None
        )
        # Plan for a member that clips, if there is any: such a step needs more memory.
        plan = self._kinds.made(seat, next(clipping_members, seat.member))
        if self.state is None:
            assert self._kinds.first is not None
            self._make_group_state(self._group_plans.stacked(self._kinds.first, len(self.seats)))
        return plan

    def _prepared(self, own: PreparedPlan, is_padded: bool) -> Sequence[GroupPart]:
        """Return a member's plan stacked for the present slots, or for the parts that are evaluated at once."""
        if (own, is_padded) not in self._places.stacked:
            size, state = len(self.seats), self.state
            likeness = self._kinds.likeness(own, [seat.member for seat in self.seats])
            counted = self._kinds.counted(own) if is_padded else None
            whole = self._group_plans.stacked(own, size, slots=likeness.drops, rows=likeness.rows, counted=counted)
            assert state is not None
            state.adopt_state(list(whole.plan.used_state()), self._device)
            parts: list[GroupPart] = []
            for slots in parts_of(whole.plan, size, self._budget_bytes):
                part = likeness.part(slots.start, slots.stop)
                place = self._device.torch_device
                stacked = self._kinds.trace(own, len(slots), state.tensors, place, part, counted)
                parts.append(GroupPart(slots, stacked, part))
            if len(self._places.stacked) > _MAX_STACKED:
                self._places.stacked.clear()
            self._places.stacked[own, is_padded] = tuple(parts)
        return self._places.stacked[own, is_padded]

    def _make_group_state(self, prepared: PreparedPlan, before: ModelState | None = None) -> None:
        built = [seat.member.built() for seat in self.seats]
        module = StackedModule([module for module, _ in built])
        optimizer = stacked_optimizer([optimizer for _, optimizer in built], built[0][0], module)
        self._share.check(prepared.plan)
        # Number and watcher carry over from the first group, so that a job has a single state to its observers.
        if before is None and self.beside is not None:
            before = self.beside.state
        self.state = self._places.state = ModelState(
            module,
            optimizer,
            prepared.plan,
            self._device,
            self._host,
            self._tenant,
            before,
            # Batched kernels update by parameter; the check's small stand-ins have too few members to be stepped.
            is_separable=True,
        )
        if isinstance(optimizer, PerMemberOptimizer):
            optimizer.around_member = self._places.streams.of_member
            self.state.around_step = self._places.streams.updating
        adopt(self.state, built, [seat.status is None for seat in self.seats], self._device)
        self.num_shards = len(prepared.plan.shards)
        for seat in self.seats:
            seat.member.num_shards = self.num_shards
        self.optimizer_placement = prepared.plan.optimizer_placement
