"""Builds the trials of waiting jobs, and finds the trials that can form a group.

`GroupJobLauncher` (`group_jobs.py`) asks which waiting jobs join a carrier's job in a new group, when the carrier is
prepared, and whether a job may join a running group, when a group has room. `GroupJobLauncher` also has trials built, begun
and forgotten here, and notes each submission (`last_submitted`). The module must not run a group, or know how a group
computes: `GroupJobLauncher` makes the group's trial of the jobs found here.

Note: a trial is built and compared without the pool's lock, on the preparer's thread or the `building` thread, so each
job's flags are checked again under the lock afterwards. A taken job that no group uses must be put back (`_leave`), or
the job never runs.
"""

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from hydra_tune.devices.device import Device
from hydra_tune.errors import TaskError, UnfusableError, first_line
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory, layout_of, most_evaluated, room_for
from hydra_tune.fusion.group.member import MemberBatchRequest, MemberTrial
from hydra_tune.fusion.matching.fusion_key import FusionKey, differing_parts, fusion_key
from hydra_tune.fusion.matching.group_size_chooser import GroupSizeChoice, GroupSizeChooser, steps_of
from hydra_tune.fusion.matching.group_size_policy import LEAST_GAIN
from hydra_tune.fusion.runtime.planned_group_size import PlannedSizeChooser
from hydra_tune.fusion.runtime.step_planner import check_planned
from hydra_tune.pool.fusion.fused_job import FusedJob
from hydra_tune.pool.fusion.job_table import FusedJobTable
from hydra_tune.pool.views.job_logging import log_fusion, log_plan
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.shard.python_state.state_guard import check_gradients, check_kept
from hydra_tune.train.data.loader_clock import LoaderInterrupt

_LOGGER = logging.getLogger("hydra_tune.fusion")
_SETTLED_SECONDS = 0.05  # time without a submission before a group is closed
_PATIENCE_SECONDS = 1.0


class GroupMatcher:
    """Finds members for groups.

    Args:
        chooser: decides whether trials gain by fusion; None: all compatible trials are fused.
        sizes: decides how many trials beyond a device's room form a group with planned steps; None: no planned steps.
        carry_anew: submits another carrier for a job whose carrier has ended meanwhile.

    Attributes:
        last_submitted: time of the latest submission, by the monotonic clock.
    """

    def __init__(
        self,
        table: FusedJobTable,
        plans: GroupPlanFactory,
        library: PlanLibrary,
        most: int,
        chooser: GroupSizeChooser | None,
        sizes: PlannedSizeChooser | None,
        carry_anew: Callable[[FusedJob], None],
    ) -> None:
        self._table = table
        self._plans = plans
        self._library = library
        self._most = most
        self._chooser = chooser
        self._sizes = sizes
        self._carry_anew = carry_anew
        self.last_submitted = 0.0

    def build(self, entry: FusedJob, device: Device, *beside: Any) -> MemberTrial:
        """Build a job's trial, with the saved state to continue from."""
        keeper = entry.keeper
        if keeper is not None:
            keeper.open()
        beginning = entry.begin()
        if keeper is not None and beginning is not None:
            keeper.goes_on_from(beginning.saved.path)
        member = MemberTrial(entry.job.task, self._library, device, *beside, beginning=beginning, keeper=keeper)
        member.on_report = entry.on_report
        try:
            member.begin_to_build()
            key = fusion_key(entry.job.task, *member.built())
            member.identify()
            entry.key = replace(key, architecture=member.architecture)
        # In place of a key: equal to no key, and raised once the job asks for a group (`fusable`).
        except UnfusableError as error:
            entry.key = error
        except BaseException:
            member.discard()
            raise
        return member

    @staticmethod
    def forget(entry: FusedJob) -> None:
        """Close and drop a job's trial, which will be built anew."""
        member, entry.trial = entry.trial, None
        if member is not None:
            member.discard()

    def fusable(self, entry: FusedJob, member: MemberTrial) -> tuple[int, MemberBatchRequest]:
        """Return how many trials of the same kind a group may have on a device, and the trial's first batch.

        Raises:
            UnfusableError: the trial cannot be fused.
        """
        if isinstance(entry.key, UnfusableError):
            raise entry.key
        limit = self._table.limits.get(entry.key)
        if limit is not None and limit.most <= 1:
            raise UnfusableError(f"trials of its kind were fused before, and {limit.why}")
        with member.peek() as first_batches:
            try:
                return self._checked(entry, member, first_batches), first_batches["train"]
            except TaskError as error:  # a trial that may not be captured may run as it is
                raise UnfusableError(str(error)) from error

    def _checked(self, entry: FusedJob, member: MemberTrial, first_batches: dict[str, MemberBatchRequest]) -> int:
        """Check the steps of a member; return the largest number of members in a group."""
        prepared = self._plans.of_member(member, first_batches["train"])
        self._plans.stacked(prepared, self._most)
        budget_bytes = self._table.pool.budget_bytes
        most, kept_names = self._most_of(entry), {"train": prepared.effects.kept_names}
        # A group also evaluates its members: this step has to be stackable as well.
        if "evaluate" in first_batches:
            evaluated = self._plans.of_member(member, first_batches["evaluate"], layout_of(prepared))
            self._plans.stacked(evaluated, self._most)
            kept_names["evaluate"] = evaluated.effects.kept_names
            most = min(most, most_evaluated(evaluated, budget_bytes))
        check_kept(member.task, member.built()[0], kept_names)
        check_gradients(member.task, *member.built())
        # Planned steps may compute more members than fit, so with a planner room for a single trial is enough.
        return room_for(prepared, budget_bytes, most, 2 if self._sizes is None else 1)

    def _most_of(self, entry: FusedJob) -> int:
        """Return the largest number of members in a job's group, lowered where memory has run out before."""
        limit = self._table.limits.get(entry.key)
        return min(self._most if limit is None else limit.most, entry.fusion_size or self._most)

    def others(self, entry: FusedJob, wanted: MemberBatchRequest | None, device: Device) -> list[FusedJob]:
        """Find the other members for a job's group; `wanted` is the first batch of a job that has not begun in a group.

        Raises:
            UnfusableError: the job has to run alone.
        """
        room = entry.most
        taken_jobs = self._fitting(entry, wanted, device)
        # Not where the gain of fusion, rather than the room, has limited the size (`_fitting`).
        if entry.most == room and wanted is not None:
            taken_jobs = self._beyond(entry, taken_jobs, wanted, device)
        if entry.most == 1 and entry.seat is None:
            raise UnfusableError("a device has no room for two of its kind at once")
        if not taken_jobs and entry.seat is None:
            raise UnfusableError(self._why_nobody(entry))
        return taken_jobs

    def _why_nobody(self, entry: FusedJob) -> str:
        """Say why no waiting job has been taken for a job's group."""
        waiting = [other for other in self._table.free() if other is not entry]
        if not waiting:
            return "no other trial waits to be fused"
        alike = [other for other in waiting if other.key == entry.key]
        for other in alike:
            if other.why_apart:
                return f"{other.job.name} is of its kind, and cannot share its graph: {other.why_apart}"
        if alike:
            return "the waiting trials of its kind were taken or came too late"
        for other in waiting:
            if isinstance(entry.key, FusionKey) and isinstance(other.key, FusionKey):
                parts = " and ".join(differing_parts(entry.key, other.key))
                return f"no waiting trial is of its kind; {other.job.name} differs in {parts}"
        return "none of the waiting trials can be fused"

    def _beyond(
        self, entry: FusedJob, taken: list[FusedJob], wanted: MemberBatchRequest, device: Device
    ) -> list[FusedJob]:
        """Add members beyond a device's room, if a planned step of all members is preferable."""
        room, most = entry.most, self._most_of(entry)
        if len(taken) + 1 < room or room >= most or self._sizes is None:
            return taken
        kind = (entry.key, wanted.leaves.signature)
        further = self._further(entry, taken, wanted, kind, device, self._sizes)
        if not further:
            return taken
        candidates = [entry, *taken, *further]
        members = [candidate.trial for candidate in candidates if candidate.trial is not None]
        # With room for a single trial, planned steps compete with no fusion at all, over which "auto" demands a gain.
        least = LEAST_GAIN if self._chooser is not None and room == 1 else 1.0
        try:
            choice = self._sizes.best(kind, members, wanted, room, least)
        except BaseException:
            # The caller knows nothing of the members taken here, and a job that stays taken would never run.
            self._leave(candidates[1:])
            raise
        if choice is not None:
            entry.most, entry.each = choice.size, choice.each
            entry.kept = room if choice.size > room else 0
            with self._table.pool.changed:
                carrier = entry.carrier
            if carrier is not None:
                log_plan(self._table.pool.log, carrier.key, choice, len(candidates))
        self._leave(candidates[entry.most :])
        return candidates[1 : entry.most]

    def _further(
        self,
        entry: FusedJob,
        taken: list[FusedJob],
        wanted: MemberBatchRequest,
        kind: Hashable,
        device: Device,
        sizes: PlannedSizeChooser,
    ) -> list[FusedJob]:
        """Take waiting jobs beyond a device's room.

        Nothing is built if the planner is already known to refuse a planned step, because building a trial is
        expensive.
        """
        room, most, free = entry.most, self._most_of(entry), self._table.free()
        assert entry.trial is not None
        try:
            own = self._plans.of_member(entry.trial, wanted)
            check_planned(entry.job.task, own)
            sizes.check_worth(own, steps_of(entry.trial) * min(most, 1 + len(taken) + len(free)))
        except UnfusableError as error:
            if any(candidate.key in (None, entry.key) for candidate in free):
                _LOGGER.info("no more than %d trials like %s are computed together: %s", room, entry.job.name, error)
            return []
        clips = entry.job.task.max_grad_norm is not None
        if sizes.keeps(kind, min(most, 1 + len(taken) + len(free)), room, clips=clips):
            return []
        return self._take(entry, entry.trial, most - 1 - len(taken), device)

    def _fitting(self, entry: FusedJob, wanted: MemberBatchRequest | None, device: Device) -> list[FusedJob]:
        """Take as many jobs as there is room for, and no more than gain by fusion."""
        member = entry.trial
        assert member is not None
        if self._chooser is None or wanted is None or entry.seat is not None:
            return self._take(entry, member, entry.most - 1, device)
        kind, steps = (entry.key, wanted.leaves.signature, device.torch_device.type), steps_of(member)
        if entry.most == 1:
            return []
        # An upper bound of all steps: a refusal now spares building the other trials.
        most = min(entry.most, 1 + len(self._table.free()))
        self._chooser.refuse(kind, steps * most, most)
        taken_jobs = self._take_for(kind, entry, device, self._chooser)
        if not taken_jobs:
            return taken_jobs
        try:
            choice = self._chosen(kind, entry, wanted, device, taken_jobs, self._chooser)
        except BaseException:
            self._leave(taken_jobs)
            raise
        self._leave(taken_jobs[choice.size - 1 :])
        if choice.size == 1:
            raise UnfusableError(choice.why)
        if choice.size < min(1 + len(taken_jobs), entry.most):
            entry.most = choice.size  # further members, late joiners included, would gain less
        return taken_jobs[: choice.size - 1]

    def _chosen(
        self,
        kind: Hashable,
        entry: FusedJob,
        wanted: MemberBatchRequest,
        device: Device,
        taken: Sequence[FusedJob],
        chooser: GroupSizeChooser,
    ) -> GroupSizeChoice:
        member = entry.trial
        assert member is not None
        all_steps = _steps([entry, *taken])
        choice = chooser.choose(kind, member, wanted, device, all_steps, entry.most)
        with self._table.pool.changed:
            carrier = entry.carrier
        if carrier is not None:
            log_fusion(self._table.pool.log, carrier.key, choice, len(all_steps))
        return choice

    def _take_for(self, kind: Hashable, entry: FusedJob, device: Device, chooser: GroupSizeChooser) -> list[FusedJob]:
        """Take jobs of the same family that match the job.

        The comparison of two trials is expensive, so jobs are compared only if there are enough to gain by fusion.
        """
        first = entry.trial
        taken_jobs = self._take(entry, None, entry.most - 1, device)
        try:
            chooser.refuse(kind, sum(_steps([entry, *taken_jobs])), 1 + len(taken_jobs))
        except UnfusableError:
            self._leave(taken_jobs)
            raise
        alike = [other for other in taken_jobs if first is not None and self._is_alike(other, first, other.trial)]
        if len(alike) < len(taken_jobs):
            self._leave([other for other in taken_jobs if other not in alike])
            alike += self._take(entry, first, entry.most - 1 - len(alike), device)
        return alike

    def _leave(self, taken: Sequence[FusedJob]) -> None:
        """Put taken jobs back among the waiting jobs."""
        for entry in reversed(taken):  # the counts of the job taken last can be undone first
            with self._table.pool.changed:
                stop, carrier = entry.stop, entry.carrier
                entry.is_taken = carrier is None  # `_put_back` puts back a job that has lost its carrier
                keeps_trial = entry.is_offered or entry.seat is not None
                self._table.pool.changed.notify_all()
            if carrier is None:
                self._put_back(entry)
            elif not keeps_trial:
                self.forget(entry)
            # A stop request that came while the job was taken did not reach the pool (`FusedPool.stop`).
            if stop is not None and carrier is not None:
                self._table.pool.stop(carrier, stop)

    def _put_back(self, entry: FusedJob) -> None:
        """Give another carrier to a job whose carrier has ended while the job was compared or taken."""
        # The trial was perhaps built for the carrier that has ended.
        if entry.seat is None:
            self.forget(entry)
            entry.most = 0
        self._carry_anew(entry)

    def _take(self, entry: FusedJob, first: MemberTrial | None, most: int, device: Device) -> list[FusedJob]:
        """Take waiting jobs with the same key as another job, and build them; no other group can take them any more.

        Args:
            entry: the other job.
            first: the other job's trial, as a pattern that all taken jobs have to match; None: no comparison.
            most: the largest number of jobs to take.
            device: any device of the pool.
        """
        # Drivers often submit a burst of jobs; a short wait lets the group contain all of them. The patience bounds the
        # wait for a driver that never stops submitting.
        began = time.monotonic()
        while (
            time.monotonic() - self.last_submitted < _SETTLED_SECONDS and time.monotonic() - began < _PATIENCE_SECONDS
        ):
            time.sleep(_SETTLED_SECONDS / 10)
        taken_jobs: list[FusedJob] = []
        for candidate in self._table.free():
            if len(taken_jobs) == most:
                break
            if candidate.key in (None, entry.key) and self.takes(candidate, entry.key, first, device):
                taken_jobs.append(candidate)
        return taken_jobs

    def takes(self, entry: FusedJob, key: Hashable, first: MemberTrial | None, device: Device) -> bool:
        """Build a job's trial, and take the job if its key is `key` and its trial matches `first`, where given."""
        with self._table.pool.changed:
            if not entry.is_free:
                return False
            entry.is_building = True
        member: MemberTrial | None = entry.trial
        try:
            if member is None:
                member = self.build(entry, device)
        except BaseException:  # noqa: BLE001 - the own carrier meets the error again when it builds the trial
            # A key equal to no other key: no group asks for the job again.
            entry.key = object()
        # Visible to `MemberLoaders` during the comparison, which may run the trial's data code.
        entry.candidate = member
        is_alike = entry.key == key and (first is None or self._is_alike(entry, first, member))
        entry.candidate = None
        with self._table.pool.changed:
            entry.is_building = False
            # Checked again: the driver may have stopped or paused the job while the trial was built without the lock.
            is_taken = is_alike and entry.is_free
            if is_taken:
                entry.is_taken, entry.trial = True, member
            has_carrier = entry.carrier is not None
            self._table.pool.changed.notify_all()
        if not is_taken and member is not None and entry.trial is None:
            member.discard()
        if not has_carrier:
            self._put_back(entry)
        return is_taken

    def _is_alike(self, entry: FusedJob, first: MemberTrial, member: MemberTrial | None) -> bool:
        """Return whether two trials with the same key can be members of a single group."""
        if member is None:
            return False
        try:
            self._plans.check_alike(first, member)
        except UnfusableError as error:
            entry.why_apart = str(error)
        except (Exception, LoaderInterrupt) as error:  # noqa: BLE001 - the error comes up again when the trial runs
            entry.why_apart = f"the comparison has failed: {first_line(error)}"
        else:
            return True
        _LOGGER.info("%s cannot be fused with trials of its kind: %s", entry.job.name, entry.why_apart)
        return False

    @staticmethod
    def begin(entry: FusedJob) -> None:
        """Run a trial's own code up to the first batch, which is where a group takes over."""
        # A job that has been in a group stands at a batch already.
        if entry.seat is None:
            seat = entry.sit()
            seat.member.is_fused = True
            try:
                seat.go_on()
            except BaseException:
                entry.seat = None
                raise


def _steps(entries: Sequence[FusedJob]) -> list[float]:
    return [steps_of(entry.trial) for entry in entries if entry.trial is not None]
