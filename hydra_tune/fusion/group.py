"""`GroupTrial`: several trials as one, which the pool runs as it runs any trial.

Note: lock-step. Each member says which batch it wants computed next, and those that want the same kind of batch are computed
together; where their kinds differ, those that are behind go first, and the others rest meanwhile. When members have reported,
the group waits until all of them are answered.
"""

from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from hydra_tune.devices.device import Device
from hydra_tune.errors import TaskError, UnfusableError
from hydra_tune.fusion.batches import stacked
from hydra_tune.fusion.member import Member, Wanted
from hydra_tune.fusion.optimizers import StackedOptimizer
from hydra_tune.fusion.plans import GroupPlans, layout_of
from hydra_tune.fusion.stack import StackedModule, hand_out, stacked_optimizer
from hydra_tune.fusion.steps import GroupEvaluation, GroupGradients, GroupStep
from hydra_tune.fusion.streams import GroupStreams
from hydra_tune.memory.host import HostTier
from hydra_tune.memory.tenant import Tenant
from hydra_tune.shard.gate import GATE
from hydra_tune.shard.library import PlanLibrary, Prepared
from hydra_tune.shard.request import Layout
from hydra_tune.train.shared_times import SharedTimes
from hydra_tune.train.spread import Spread
from hydra_tune.train.state import ModelState
from hydra_tune.train.step import PendingUnit
from hydra_tune.train.training_batch import Part
from hydra_tune.train.trial import Report, Trial

_MAX_PLANS = 8  # kept of each kind of batch, where the step asks for values of the batch


class Seat:
    """A member's place in a group.

    Args:
        member: who has it.
        waits: whether its reports wait for an answer.

    Attributes:
        wants: what the member wants next; None when it is over.
        is_answered: whether the report that it waits with has been answered.
        stop: how it is to end, "pruned" or "cancelled", if it is; may be set at any time, on any thread.
        status: how it has ended; None while it has not.
        error: why it has failed.
        module, optimizer: of a member that has completed, with its weights and state.
    """

    def __init__(self, member: Member, *, waits: bool) -> None:
        self.member = member
        self.waits = waits
        self.wants: Wanted | Report | None = None
        self.is_answered = False
        self.stop: str | None = None
        self.status: str | None = None
        self.error: BaseException | None = None
        self.module: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for an answer."""
        return self.status is None and self.stop is None and isinstance(self.wants, Report) and not self.is_answered


class GroupTrial(Trial):
    """A group under way.

    Args:
        seats: the members, built, whose fusion keys are equal.
        plans: makes the group's plans.
        library: where plans come from.
        device: any device of the pool, for host memory.
        ended: told of each member that is over, on the thread that has the group go on.
        host, tenant, times: as of `Trial`.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        plans: GroupPlans,
        library: PlanLibrary,
        device: Device,
        ended: Callable[[Seat], None],
        host: HostTier | None = None,
        tenant: Tenant | None = None,
        times: SharedTimes | None = None,
    ) -> None:
        members = [seat.member for seat in seats]
        super().__init__(members[0].task, library, device, None, host, tenant, times)
        self.seats = list(seats)
        self._ended = ended
        self._group_plans = plans
        self._times = times or SharedTimes()
        self._group_streams = GroupStreams([member.streams for member in members])
        self._gradients = GroupGradients([member.task for member in members])
        self._layout: Layout | None = None
        self._known: dict[Any, list[Prepared]] = {}  # several where the step asks for values of the batch
        for member in members:
            member.is_fused = True

    @property
    def remaining_seconds(self) -> float:
        """Seconds of compute to come: those of the member that has most before it."""
        steps = max((seat.member.progress.steps_left for seat in self._live), default=0)
        evaluated = max((seat.member.progress.evaluated_batches_left for seat in self._live), default=0)
        ahead = max(0.0, steps * self._train_times.total - self._train_times.total)
        return self._step_left + ahead + evaluated * self._evaluation_times.total

    @property
    def units_planned(self) -> int | None:
        """Not known: which members go on to their ends is not."""
        return None

    def finished(self, unit: PendingUnit, seconds: float) -> None:
        """A unit took so long; of which each member that took part has a share."""
        super().finished(unit, seconds)
        taking_part = [s for s, active in zip(self.seats, self._group_streams.active, strict=True) if active]
        for seat in taking_part:
            seat.member.units_run += 1
            seat.member.compute_seconds += seconds / len(taking_part)

    def close(self, *, keep: bool) -> None:
        """End the group; what members have is theirs by now."""
        del keep
        super().close(keep=False)
        for seat in self._live:
            seat.member.close(keep=False)

    @property
    def _live(self) -> list[Seat]:
        return [seat for seat in self.seats if seat.status is None]

    def _train(self) -> Generator[PendingUnit | Spread | Report, None, None]:
        for seat in self.seats:
            self._advance(seat)
        while True:
            yield from self._answered()
            bucket = self._next_bucket()
            if not bucket:
                return
            yield from self._compute(bucket)
            for seat in bucket:
                self._advance(seat)

    def _advance(self, seat: Seat) -> None:
        """Have a member go on to what it wants next, or end it."""
        if seat.stop is not None:
            self._end(seat, seat.stop)
            return
        try:
            seat.wants, seat.is_answered = seat.member.go_on(), False
        except BaseException as error:  # noqa: BLE001 - whatever a trial's code raises ends that trial alone
            seat.error = error
            self._end(seat, "failed")
            return
        if seat.wants is None:
            self._end(seat, seat.member.outcome)

    def _end(self, seat: Seat, status: str) -> None:
        member = seat.member
        if status == "completed":
            module, optimizer = member.built()
            if self.state is not None:
                hand_out(self.state, self.seats.index(seat), module, optimizer)
            seat.module, seat.optimizer = module, optimizer
        seat.status, seat.wants = status, None
        try:
            member.close(keep=False)
        except Exception as error:  # noqa: BLE001 - the user's data iterator may fail when it is closed
            seat.status, seat.error, seat.module, seat.optimizer = "failed", error, None, None
        self._ended(seat)

    def _answered(self) -> Generator[Report, None, None]:
        """Go on when no member has a report that is not answered."""
        while True:
            for seat in self._live:
                if seat.stop is not None:
                    self._end(seat, seat.stop)
            reports = [seat for seat in self._live if isinstance(seat.wants, Report)]
            if not reports:
                return
            if any(seat.is_waiting and seat.waits for seat in reports):
                yield Report(step=max(seat.member.progress.steps for seat in reports), metrics={})
            for seat in reports:
                self._advance(seat)

    def _next_bucket(self) -> list[Seat]:
        """Members that want the same kind of batch: evaluations first, then those that are most behind."""
        live = self._live
        wants = [seat.wants for seat in live if isinstance(seat.wants, Wanted)]
        known = self._known.get((wants[0].mode, wants[0].leaves.signature)) if wants else None
        is_one_kind = all(one.leaves is wants[0].leaves and one.mode == wants[0].mode for one in wants)
        if is_one_kind and known and known[0].guard is None:
            return live
        kinds: dict[Any, list[Seat]] = {}
        for seat in live:
            assert isinstance(seat.wants, Wanted)
            kinds.setdefault(self._kind(seat.wants), []).append(seat)
        bucket = min(kinds.values(), key=_urgency, default=[])
        if not bucket or self._found(_wanted(bucket[0])) is not None:
            return bucket
        prepared = self._prepared(bucket[0].member, _wanted(bucket[0]))
        return [seat for seat in bucket if _serves(prepared, _wanted(seat))]

    def _kind(self, wanted: Wanted) -> Hashable:
        """What members whose batches are computed together have in common: which plan serves them."""
        found = self._found(wanted)
        return (wanted.mode, wanted.leaves.signature, None if found is None else id(found))

    def _found(self, wanted: Wanted) -> Prepared | None:
        known = self._known.get((wanted.mode, wanted.leaves.signature), ())
        return next((prepared for prepared in known if _serves(prepared, wanted)), None)

    def _compute(self, bucket: Sequence[Seat]) -> Generator[PendingUnit, None, None]:
        first = bucket[0].wants
        assert isinstance(first, Wanted)
        taking_part = {id(seat) for seat in bucket}
        active = [id(seat) in taking_part for seat in self.seats]
        # A member that rests computes on somebody else's batch.
        wants = [
            seat.wants if isinstance(seat.wants, Wanted) and on else first
            for seat, on in zip(self.seats, active, strict=True)
        ]
        leaves = stacked(wants)
        prepared = self._found(first)
        assert prepared is not None
        resting = tuple(index for index, one in enumerate(active) if not one)
        self._group_streams.active = active
        state = self.state
        assert state is not None
        times = self._times.of(prepared)
        self._step_left = times.total
        for seat in bucket:
            seat.member.runs_at(times, first.mode)
        if first.mode == "train":
            assert isinstance(state.optimizer, StackedOptimizer)
            state.optimizer.active = list(active)
            self._train_times = times
            yield from self._step(Part(plan=prepared.plan, times=times, leaves=leaves), state, resting)
            return
        self._evaluation_times = times
        evaluation = GroupEvaluation(prepared.plan, times, state, leaves, self._group_streams, self._device)
        evaluation.resting = resting
        try:
            yield from evaluation.units()
        finally:
            evaluation.close()
        for index, seat in enumerate(self.seats):
            seat.member.values = {name: values[index] for name, values in evaluation.values.items()}

    def _step(self, part: Part, state: ModelState, resting: tuple[int, ...]) -> Generator[PendingUnit, None, None]:
        step = GroupStep(1, state, self._group_streams, self._device, self._gradients)
        step.resting = resting
        try:
            yield from step.batch(part)
            yield from step.finish()
            for seat, loss in zip(self.seats, step.member_losses, strict=True):
                seat.member.loss = loss
        finally:
            step.close()

    def _prepared(self, member: Member, wanted: Wanted) -> Prepared:
        """The group's plan for a kind of batch, made now."""
        try:
            own = self._group_plans.of_member(member, wanted, self._layout)
            found = self._group_plans.stacked(own, len(self.seats))
        except UnfusableError as error:
            raise TaskError(
                f"the trials of a group have come to a kind of batch that they cannot compute together: {error}; "
                "train them with fusion='off'"
            ) from error
        if self.state is None:
            self._layout = layout_of(own)
            self._make_group_state(found)
        assert self.state is not None
        self.state.adopt_state(list(found.plan.used_state()), self._device)
        if self._device.torch_device.type == "cpu":
            rows = [torch.stack([tensor] * len(self.seats)) for tensor in wanted.tensors]
            with self.state.whole():
                self._group_plans.trace(found, self.state.tensors, tuple(rows), len(self.seats))
        known = self._known.setdefault((wanted.mode, wanted.leaves.signature), [])
        known.append(found)
        del known[:-_MAX_PLANS]
        return found

    def _make_group_state(self, prepared: Prepared) -> None:
        built = [seat.member.built() for seat in self.seats]
        module = StackedModule([module for module, _ in built])
        optimizer = stacked_optimizer([optimizer for _, optimizer in built], built[0][0], module)
        self._share.check(prepared.plan)
        self.state = ModelState(module, optimizer, prepared.plan, self._device, self._host, self._tenant)
        self.num_shards = len(prepared.plan.shards)
        for seat in self.seats:
            seat.member.num_shards = self.num_shards
        self.optimizer_placement = prepared.plan.optimizer_placement


def _wanted(seat: Seat) -> Wanted:
    assert isinstance(seat.wants, Wanted)
    return seat.wants


def _serves(prepared: Prepared, wanted: Wanted) -> bool:
    """Whether a plan is for this batch, of the kind that it was made for."""
    if prepared.guard is None:
        return True
    with GATE.shared():
        return prepared.serves(wanted.tensors)


def _urgency(bucket: Sequence[Seat]) -> tuple[bool, int]:
    wants = bucket[0].wants
    assert isinstance(wants, Wanted)
    return wants.mode == "train", min(seat.member.progress.steps for seat in bucket)
