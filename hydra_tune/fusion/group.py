"""`GroupTrial`: several trials as one, which the pool runs as it runs any trial.

Note: lock-step. Each member says which batch it wants computed next, and those that want the same kind of batch are computed
together (`buckets.py`). A member that has reported rests until it is answered; the group waits where all of them do.

Note: places. A group has so many places, and between two steps a member that is over, or paused, leaves its own to another one,
that begins its training, or goes on with it, while the others are in the middle of theirs (`put_in`). A place that nobody takes
is masked. What passes between a group and a member that comes or goes is the member's own module and optimizer; and where a
group has more or fewer places from now on (`sizes.py`), all of its members go, and come to a new stack.
"""

import time
from collections.abc import Collection, Generator, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from hydra_tune.devices.device import Device
from hydra_tune.fusion.batches import StackedBatches
from hydra_tune.fusion.buckets import Buckets
from hydra_tune.fusion.kinds import Kinds, wanted_of
from hydra_tune.fusion.likeness import Likeness
from hydra_tune.fusion.member import Member, Wanted
from hydra_tune.fusion.optimizers import StackedOptimizer
from hydra_tune.fusion.plans import GroupPlans
from hydra_tune.fusion.rounds import Round, Rules, may_go_round
from hydra_tune.fusion.seat import Desk, Seat, vacant
from hydra_tune.fusion.sizes import Sizes
from hydra_tune.fusion.stack import StackedModule, adopt, hand_out, put_in, stacked_optimizer
from hydra_tune.fusion.steps import GroupEvaluation, GroupGradients, GroupStep
from hydra_tune.fusion.streams import GroupStreams
from hydra_tune.fusion.tails import Rows
from hydra_tune.memory.host import HostTier
from hydra_tune.memory.tenant import Tenant
from hydra_tune.shard.library import PlanLibrary, Prepared
from hydra_tune.train.shared_times import SharedTimes
from hydra_tune.train.spread import Spread
from hydra_tune.train.state import ModelState
from hydra_tune.train.step import PendingUnit
from hydra_tune.train.training_batch import Part
from hydra_tune.train.trial import Report, Trial

_MAX_STACKED = 64  # plans that are remembered here

PATIENCE_SECONDS = 0.05
"""For which members that are answered wait for those that have reported with them."""


class GroupTrial(Trial):
    """A group under way.

    Args:
        seats: the members, built, whose fusion keys are equal; they may have begun in another group.
        plans: makes the group's plans.
        library: where plans come from.
        device: any device of the pool, for host memory.
        desk: asked and told about the places, on the thread that has the group go on.
        host, tenant, times: as of `Trial`.
        most: places that there may be; None: as many as there are now.

    Attributes:
        seats: by place.
        buckets: says what was computed together.
        hands_back: whether members that are not over when the group is closed are wanted by somebody.
    """

    hands_back = False

    def __init__(
        self,
        seats: Sequence[Seat],
        plans: GroupPlans,
        library: PlanLibrary,
        device: Device,
        desk: Desk,
        host: HostTier | None = None,
        tenant: Tenant | None = None,
        times: SharedTimes | None = None,
        most: int | None = None,
    ) -> None:
        members = [seat.member for seat in seats]
        super().__init__(members[0].task, library, device, None, host, tenant, times)
        self.seats = list(seats)
        self.buckets = Buckets()
        self._desk = desk
        self._sizes = Sizes(len(seats) if most is None else most)
        self._waits = 0
        self._group_plans = plans
        self._times = times or SharedTimes()
        self._group_streams = GroupStreams([member.streams for member in members])
        self._gradients: GroupGradients = GroupGradients([member.task for member in members])
        self._stacked: dict[tuple[Prepared, bool], tuple[Prepared, Likeness]] = {}
        self._kinds = Kinds(plans)
        self._rows: Rows | None = None  # of the plan that runs
        self._round: Round | None = None  # while one is under way
        self._units_done = 0  # of the present step
        for seat in seats:
            self._welcome(seat)

    @property
    def remaining_seconds(self) -> float:
        """Seconds of compute to come: those of the member that has most before it."""
        steps = max((seat.member.progress.steps_left for seat in self._live), default=0)
        evaluated = max((seat.member.progress.evaluated_batches_left for seat in self._live), default=0)
        ahead = max(0.0, steps * self._train_times.total - self._train_times.total)
        return self._step_left + ahead + evaluated * self._evaluation_times.total

    def admits(self, member: Member) -> bool:
        """Whether a member that comes leaves the others' bits alone."""
        if member.task.max_grad_norm is not None and not self._gradients.has_two_phases:
            return False  # what its steps need in memory was not asked for
        optimizer = None if self.state is None else self.state.optimizer
        return not isinstance(optimizer, StackedOptimizer) or optimizer.admits(member.built()[1])

    def knows(self, architecture: Hashable) -> bool:
        """Whether members of an architecture are known to be like these; `GroupPlans.check_alike` finds out."""
        return any(self._group_plans.are_known(seat.member.architecture, architecture) for seat in self.seats)

    @property
    def any_device(self) -> Device:
        """Any device of the pool, for host memory."""
        return self._device

    @property
    def most(self) -> int:
        """Places that there may be."""
        return self._sizes.most

    @most.setter
    def most(self, most: int) -> None:
        self._sizes.most = most

    @property
    def units_planned(self) -> int | None:
        """Not known: which members go on to their ends is not."""
        return None

    def finished(self, unit: PendingUnit, seconds: float) -> None:
        """A unit took so long; of which each member that took part has a share."""
        super().finished(unit, seconds)
        self._units_done += 1
        units = 1
        if self._round is not None:
            self._round.measured(seconds)
            units = self._round.steps * len(unit.times)
            self.units_run += units - 1
        taking_part = [s for s, active in zip(self.seats, self._group_streams.active, strict=True) if active]
        for seat in taking_part:
            seat.member.units_run += units
            seat.member.compute_seconds += seconds / len(taking_part)

    def close(self, *, keep: bool) -> None:
        """End the group; a member that is not over is handed back if it can be, and else closed."""
        del keep
        live, is_whole = self._live, self.hands_back and not self._units_done and self._round is None
        try:
            if is_whole:  # no unit of the present step has changed anything
                for seat in live:
                    self._hand_out(seat)
        except RuntimeError:  # of a device that is lost, or has no memory
            is_whole = False
        super().close(keep=False)
        for seat in live:
            seat.member.fetch, seat.is_handed_back = None, is_whole
            if not is_whole:
                seat.member.close(keep=False)

    @property
    def _live(self) -> list[Seat]:
        return [seat for seat in self.seats if seat.status is None]

    def _train(self) -> Generator[PendingUnit | Spread | Report, None, None]:
        while True:
            yield from self._settled()
            wanting = [seat for seat in self._live if isinstance(seat.wants, Wanted)]
            if not wanting:
                return
            for seat in self._kinds.lacking(wanting):
                self._made(seat)
            bucket = self.buckets.next(self._kinds.of(wanting, [seat.member for seat in self.seats]))
            own = self._kinds.found(wanted_of(bucket[0]))
            if own is None:
                own = self._made(bucket[0])
                bucket = self._kinds.served(own, bucket)
            steps = yield from self._compute(
                bucket, *self._prepared(own, _are_padded(bucket)), is_all=len(bucket) == len(wanting)
            )
            self._units_done = 0
            for seat in bucket:
                seat.most_together = max(seat.most_together, len(self._live))
            for _ in range(steps):
                self.buckets.computed(len(bucket), len(wanting), len(self.seats))
                self._sizes.computed(len(self.seats), len(self._live))
            for seat in bucket:
                self._advance(seat)

    def _settled(self) -> Generator[Report, None, None]:
        """Go on when a member wants a batch computed, or nobody is left."""
        while True:
            self._attend()
            if not self._live or any(isinstance(seat.wants, Wanted) for seat in self._live):
                return
            self._waits += 1
            yield Report(step=self._waits, metrics={})

    def _attend(self) -> None:
        """Between two steps: members end, leave and report, those that are answered go on, and others come."""
        for seat in self._live:
            self._attend_to(seat)
        self._resize()
        free = [index for index, seat in enumerate(self.seats) if seat.status is not None]
        coming = self._desk.joining(len(free), ends=not self._live)
        for index, seat in zip(free, coming, strict=False):
            self._take_in(index, seat)
            self._attend_to(seat)
        if self._answers_are_in:
            for seat in self._live:
                if isinstance(seat.wants, Report) and seat.is_answered:
                    self._advance(seat)
                    self._attend_to(seat)

    def _attend_to(self, seat: Seat) -> None:
        """Have a member go on until it wants a batch, or waits for an answer."""
        while seat.status is None:
            if seat.stop is not None:
                self._end(seat, seat.stop)
            elif seat.is_paused:
                self._leave(seat)
                return
            elif seat.wants is None or (isinstance(seat.wants, Report) and not seat.waits):
                self._advance(seat)
            else:
                if isinstance(seat.wants, Report) and seat.told_at is None:
                    seat.told_at = time.monotonic()
                    self._desk.reported(seat)
                return

    @property
    def _answers_are_in(self) -> bool:
        """Whether members that are answered go on now: those that report together go on together, unless it takes long."""
        waiting = [seat.told_at for seat in self._live if seat.is_waiting and seat.told_at is not None]
        return not waiting or time.monotonic() - min(waiting) >= PATIENCE_SECONDS

    @property
    def is_due(self) -> bool:
        """Whether a group that waits has something to do; may be asked on any thread."""
        live = self._live
        answered = any(isinstance(seat.wants, Report) and seat.is_answered for seat in live)
        return any(seat.stop is not None or seat.is_paused for seat in live) or (answered and self._answers_are_in)

    def _advance(self, seat: Seat) -> None:
        """Have a member go on to what it wants next, or end it."""
        if seat.stop is not None:
            self._end(seat, seat.stop)
            return
        if not seat.is_ahead:
            _go_on(seat)
        seat.is_ahead = False
        if seat.error is not None:
            self._end(seat, "failed")
        elif seat.wants is None:
            self._end(seat, seat.member.outcome)

    def _end(self, seat: Seat, status: str) -> None:
        member = seat.member
        if status == "completed":
            self._hand_out(seat)
            seat.module, seat.optimizer = member.built()
        seat.status, seat.wants = status, None
        try:
            member.close(keep=False)
        except Exception as error:  # noqa: BLE001 - the user's data iterator may fail when it is closed
            seat.status, seat.error, seat.module, seat.optimizer = "failed", error, None, None
        self._desk.ended(seat)

    # Places.

    def _welcome(self, seat: Seat) -> None:
        seat.is_handed_back = False
        seat.member.is_fused = True
        seat.member.num_shards = self.num_shards
        seat.member.fetch = partial(self._hand_out, seat)

    def _take_in(self, index: int, seat: Seat) -> None:
        """Give a place to a member that comes."""
        member = seat.member
        self.seats[index] = seat
        self._group_streams.replace(index, member.streams)
        self._gradients.replace(index, member.task)
        self._stacked.clear()
        member.is_fused = True
        try:
            if seat.wants is None:  # what it goes on from is in its own module and optimizer then
                seat.go_on()
        except BaseException as error:  # noqa: BLE001 - as in `_advance`
            seat.error = error
            self._end(seat, "failed")
            return
        if self.state is not None:
            put_in(self.state, index, *member.built(), self._device)
        self._welcome(seat)

    def _leave(self, seat: Seat) -> None:
        """A member goes, with its state."""
        self._hand_out(seat)
        seat.member.fetch = None
        self.seats[self.seats.index(seat)] = vacant(seat)
        self._desk.left(seat)

    def _hand_out(self, seat: Seat) -> None:
        """Have a member's own module and optimizer be as its part of the group's state is."""
        if self.state is not None:
            hand_out(self.state, self.seats.index(seat), *seat.member.built())

    def _resize(self) -> None:
        """Have more or fewer places, if that is due and prepared."""
        live = self._live
        size = self._sizes.wanted(len(self.seats), len(live), self._desk.waiting())
        if size == len(self.seats) or not self._desk.make_ready(size):
            return
        if self.state is not None:
            for seat in live:
                self._hand_out(seat)
            self.state.drop()
        self.seats = [*live, *(vacant(live[0]) for _ in range(size - len(live)))]
        self._group_streams = GroupStreams([seat.member.streams for seat in self.seats])
        self._gradients = GroupGradients([seat.member.task for seat in self.seats])
        self._stacked.clear()
        self._sizes.changed()
        if self.state is not None:
            assert self._kinds.first is not None
            self._make_group_state(self._group_plans.stacked(self._kinds.first, size), self.state)

    def make_ready(self, size: int) -> None:
        """Make the plans for another number of places, of the kinds of batches that there were; on any thread.

        Args:
            size: places.
        """
        if self.state is not None and self._device.torch_device.type == "cpu":
            self._kinds.make_ready(size, self.state.tensors)

    def _compute(
        self, bucket: Sequence[Seat], prepared: Prepared, likeness: Likeness, *, is_all: bool
    ) -> Generator[PendingUnit, None, int]:
        """The batches that these members want, and further ones where several fit in a unit; returns how many of each."""
        first = wanted_of(bucket[0])  # none is larger
        like = first if _are_padded(bucket) else None
        batches = self._batches_of(bucket, like)
        part = Part(plan=prepared.plan, times=self._times.of(prepared), leaves=batches.leaves())
        taking_part = {id(seat) for seat in bucket}
        self._group_streams.active = active = [id(seat) in taking_part for seat in self.seats]
        resting = frozenset(index for index, one in enumerate(active) if not one)
        self._group_streams.probabilities = likeness.drops
        self._rows = likeness.rows
        state = self.state
        assert state is not None
        self._step_left = part.times.total
        for seat in bucket:
            seat.member.runs_at(part.times, first.mode)
        if first.mode == "train":
            assert isinstance(state.optimizer, StackedOptimizer)
            state.optimizer.active = list(active)
            self._train_times = part.times
        else:
            self._evaluation_times = part.times
        if is_all and self._goes_round(prepared):
            return (yield from self._go_round(bucket, part, batches, state, resting, like))
        if first.mode == "train":
            yield from self._step(part, state, resting)
        else:
            yield from self._evaluated(part, state, resting)
        return 1

    def _batches_of(self, bucket: Sequence[Seat], like: Wanted | None) -> StackedBatches:
        """The members' batches; a member that rests computes on somebody else's."""
        wanted = {id(seat): wanted_of(seat) for seat in bucket}
        first = wanted_of(bucket[0])
        return StackedBatches([wanted.get(id(seat), first) for seat in self.seats], like)

    def _goes_round(self, prepared: Prepared) -> bool:
        budget_bytes = self._plans.library.budget.budget_bytes
        return prepared.guard is None and may_go_round(prepared.plan, self._device, budget_bytes)

    def _go_round(
        self,
        bucket: Sequence[Seat],
        part: Part,
        batches: StackedBatches,
        state: ModelState,
        resting: Collection[int],
        like: Wanted | None,
    ) -> Generator[PendingUnit, None, int]:
        """A unit of several steps, in which the members go on; returns how many."""
        alike = [wanted_of(bucket[0])] if like is None else [wanted_of(seat) for seat in bucket]
        rules = Rules(
            plan=part.plan,
            times=part.times,
            state=state,
            streams=self._group_streams,
            gradients=self._gradients,
            resting=resting,
        )

        def go_on() -> StackedBatches | None:
            if any(seat.stop is not None or seat.is_paused for seat in bucket):
                return None
            for seat in bucket:
                _go_on(seat)
                seat.is_ahead = True
            if not all(any(_wants_alike(seat, one) for one in alike) for seat in bucket):
                return None
            for seat in bucket:
                seat.is_ahead = False
            return self._batches_of(bucket, like)

        def settle(made: Sequence[Any]) -> None:
            if part.plan.mode == "train":
                self._take_losses(made, resting)
            else:
                self._take_values(made, resting)

        self._round = going = Round(rules, batches, part.leaves, settle, go_on)
        try:
            yield going.unit()
        finally:
            self._round = None
        return going.steps

    def _take_losses(self, steps: Sequence[Sequence[float]], resting: Collection[int]) -> None:
        for index, losses in enumerate(zip(*steps, strict=True)):
            if index not in resting:
                self.seats[index].member.results = losses

    def _take_values(self, steps: Sequence[Mapping[str, Sequence[float]]], resting: Collection[int]) -> None:
        for index, seat in enumerate(self.seats):
            if index not in resting:
                own = None if self._rows is None else self._rows.names(index)
                seat.member.results = [
                    {name: values[index] for name, values in step.items() if own is None or name in own}
                    for step in steps
                ]

    def _evaluated(self, part: Part, state: ModelState, resting: Collection[int]) -> Generator[PendingUnit, None, None]:
        evaluation = GroupEvaluation(part.plan, part.times, state, part.leaves, self._group_streams, self._device)
        evaluation.resting = tuple(resting)
        try:
            yield from evaluation.units()
        finally:
            evaluation.close()
        self._take_values([evaluation.values], resting)

    def _step(self, part: Part, state: ModelState, resting: Collection[int]) -> Generator[PendingUnit, None, None]:
        step = GroupStep(1, state, self._group_streams, self._device, self._gradients)
        step.resting = tuple(resting)
        try:
            yield from step.batch(part)
            yield from step.finish()
            self._take_losses([step.member_losses], resting)
        finally:
            step.close()

    def _made(self, seat: Seat) -> Prepared:
        """The plan of what a member wants, made now; the group's state is cut as the first step of its training is."""
        clipped = (one.member for one in self._live if one.member.task.max_grad_norm is not None)
        own = self._kinds.made(seat, next(clipped, seat.member))  # a step that clips needs more memory
        if self.state is None:
            assert self._kinds.first is not None
            self._make_group_state(self._group_plans.stacked(self._kinds.first, len(self.seats)))
        return own

    def _prepared(self, own: Prepared, are_padded: bool) -> tuple[Prepared, Likeness]:
        """A member's plan, stacked for as many as there are places now; and what is each of theirs."""
        if (own, are_padded) not in self._stacked:
            size = len(self.seats)
            likeness = self._kinds.likeness(own, [seat.member for seat in self.seats])
            counted = self._kinds.counted(own) if are_padded else None
            found = self._group_plans.stacked(own, size, slots=likeness.drops, rows=likeness.rows, counted=counted)
            assert self.state is not None
            self.state.adopt_state(list(found.plan.used_state()), self._device)
            if self._device.torch_device.type == "cpu":
                self._kinds.trace(own, size, self.state.tensors, likeness, counted)
            if len(self._stacked) > _MAX_STACKED:
                self._stacked.clear()
            self._stacked[own, are_padded] = found, likeness
        return self._stacked[own, are_padded]

    def _make_group_state(self, prepared: Prepared, before: ModelState | None = None) -> None:
        """Stack the members' own modules and optimizers.

        Args:
            prepared: the plan that the state is cut for.
            before: the state of the group when it had another size.
        """
        built = [seat.member.built() for seat in self.seats]
        module = StackedModule([module for module, _ in built])
        optimizer = stacked_optimizer([optimizer for _, optimizer in built], built[0][0], module)
        self._share.check(prepared.plan)
        self.state = ModelState(module, optimizer, prepared.plan, self._device, self._host, self._tenant, before)
        adopt(self.state, built, [seat.status is None for seat in self.seats], self._device)
        self.num_shards = len(prepared.plan.shards)
        for seat in self.seats:
            seat.member.num_shards = self.num_shards
        self.optimizer_placement = prepared.plan.optimizer_placement


def _go_on(seat: Seat) -> None:
    """Run a member's own code until it wants something else."""
    try:
        seat.go_on()
    except BaseException as error:  # noqa: BLE001 - whatever a trial's code raises ends that trial alone
        seat.wants, seat.error = None, error


def _are_padded(bucket: Sequence[Seat]) -> bool:
    """Whether the batches of members that are computed together are of several sizes."""
    first = wanted_of(bucket[0]).leaves
    now = (wanted_of(seat).leaves for seat in bucket)
    return any(leaves is not first and leaves.signature != first.signature for leaves in now)


def _wants_alike(seat: Seat, first: Wanted) -> bool:
    """Whether a member wants the next batch of the kind that the first wanted."""
    now = seat.wants
    if not isinstance(now, Wanted) or now.mode != first.mode:
        return False
    return now.leaves is first.leaves or now.leaves.signature == first.leaves.signature
