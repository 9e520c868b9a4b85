"""Carriers: jobs of the pool that run the jobs of a `FusedPool`, alone or as a group.

`FusedPool` (`fused_pool.py`) asks `GroupJobLauncher` for a carrier at each submission, and passes pauses on; the preparer
(`pool/runtime/preparer.py`) calls `make` once the carrier is admitted. `GroupEndHandler` (`group_completion.py`) and
`GroupMatcher` (`group_matcher.py`) ask for another carrier of a job that goes on (`carry_anew`), and `FusedPool`,
`GroupEndHandler` and `group_loaders.py` for jobs that could join a group (`look_later`). The module must not know how a
group computes.

Note: carriers. For each submitted job, `GroupJobLauncher` gives the pool a job of its own, the carrier. A carrier in
preparation collects waiting jobs with the same fusion key, as many as a group may have, stops the carriers of those
jobs, and runs the group. A carrier that finds no other job, or whose trial cannot be fused, runs its own job's trial; a
job that has left a group goes on in a group of its own, or with others. The end of a carrier is passed on to the jobs
that the carrier runs (`group_completion.py`).

Note: late joiners. While a group has room, a waiting job with the group's key may join. The trial is built and begun
beside the group, on the preparer's thread or the `building` thread, and joins between two steps (`live_group.py`). A
paused job leaves the group with its state, and returns as a joiner or gets another carrier.

Note: locks. The tables and the jobs' flags change under the pool's lock (`Pool.changed`). Members' trials are built,
and carriers submitted, stopped and cancelled, without the lock; a group's trial is put together, and `Pool.hold`
called, under the lock.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hydra_tune.devices.device import Device
from hydra_tune.errors import HydraTuneError, UnfusableError
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory
from hydra_tune.fusion.group.group_trial import GroupTrial
from hydra_tune.fusion.group.member import MemberBatchRequest, MemberTrial
from hydra_tune.fusion.group.slot import GroupDelegate, GroupSlot
from hydra_tune.fusion.matching.group_size_chooser import GroupSizeChooser
from hydra_tune.fusion.matching.group_timing import FusionBenchmark
from hydra_tune.fusion.runtime.pair_side import PairSide
from hydra_tune.fusion.runtime.pair_trial import PairTrial
from hydra_tune.fusion.runtime.planned_group_size import PlannedSizeChooser
from hydra_tune.fusion.runtime.step_planner import StepPlanner
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.memory.trial_context import TrialMemoryContext
from hydra_tune.pool.fusion.fused_job import FusedJob, GroupJobEventStream
from hydra_tune.pool.fusion.group_completion import GroupEndHandler
from hydra_tune.pool.fusion.group_matcher import GroupMatcher
from hydra_tune.pool.fusion.job_table import FusedJobTable
from hydra_tune.pool.fusion.live_group import LiveGroup, SmallerGroupFallback
from hydra_tune.pool.job import Job, Result
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.task import TrainTask
from hydra_tune.train.parallel.pool_offers import DeviceLender
from hydra_tune.train.timing.shared_times import SharedUnitTimes
from hydra_tune.train.trial import Trial

_LOGGER = logging.getLogger("hydra_tune.fusion")
_PATIENCE_SECONDS = 10.0  # until a carrier no longer waits for another carrier, which may hang in a user's code


class _AbsorbedTrial(Trial):
    """Stand-in for a trial that a group has taken over in the meantime; runs nothing."""

    def advance(self) -> None:
        self.outcome = "cancelled"


class GroupJobLauncher:
    """Gives jobs carriers, and prepares the carriers' trials.

    Args:
        plans_steps: as `fusion_planner` of `ExecutorSettings`.
    """

    def __init__(
        self,
        table: FusedJobTable,
        library: PlanLibrary,
        most: int,
        chooser: GroupSizeChooser | None,
        backend: str | None,
        plans_steps: str,
    ) -> None:
        self._table = table
        self._library = library
        self._plans = GroupPlanFactory(library, backend)
        self._planner: StepPlanner | None = None
        self._insists = plans_steps == "on"
        self._forming: FusedJob | None = None  # job whose carrier forms a group now
        sizes = None
        if plans_steps != "off":
            self._planner = StepPlanner(table.pool.budget_bytes, library.budget.alignment, lambda: table.pool.stands)
            num_devices = len(table.pool.device_names)
            sizes = PlannedSizeChooser(self._plans, self._planner, insists=self._insists, num_devices=num_devices)
        self._finder = GroupMatcher(table, self._plans, library, most, chooser, sizes, self.carry_anew)
        self.ends = GroupEndHandler(table, self)

    def carry(self, entry: FusedJob) -> None:
        """Submit a carrier for a job."""
        # An earlier carrier of the job, still in preparation, now finds an old ticket, and runs nothing.
        with self._table.pool.changed:
            ticket = entry.ticket = object()
        carrier = self._table.pool.submit(
            entry.job.task,
            entry.job.name,
            GroupJobEventStream(self.ends, entry),
            priority=entry.priority,
            staggered=entry.staggered,
            make_trial=partial(self.make, entry, ticket),
            is_carrier=True,
        )
        with self._table.pool.changed:
            # `make` may already run on the preparer's thread, where it waits for `entry.carrier`.
            entry.carrier = entry.carrier or carrier
            self._finder.last_submitted = time.monotonic()
            self._table.pool.changed.notify_all()

    def make(
        self,
        entry: FusedJob,
        ticket: object,
        task: TrainTask,
        library: PlanLibrary,
        device: Device,
        helpers: DeviceLender | None,
        host: HostTier | None,
        tenant: TrialMemoryContext | None,
        times: SharedUnitTimes | None,
        **_: Any,
    ) -> Trial:
        """Make the trial of a group or of the job alone, or a stand-in if the job is elsewhere; on the preparer's thread."""
        with self._table.pool.changed:
            self._table.pool.changed.wait_for(lambda: entry.ticket is not ticket or entry.carrier is not None)
            self._table.pool.changed.wait_for(
                lambda: entry.ticket is not ticket or not self._table.is_undecided(entry), _PATIENCE_SECONDS
            )
            # Checked again after the wait: meanwhile the job may have ended, joined a group, or got a newer carrier.
            if self._is_absorbed(entry, ticket) or entry.job.key not in self._table.entries:
                return _AbsorbedTrial(task, library, device)
            entry.is_forming = True
            entry.enter("preparing")
        try:
            taken_jobs = self._found(
                entry, ticket, device, lambda: self._finder.build(entry, device, helpers, host, tenant, times)
            )
            if taken_jobs is None:
                return _AbsorbedTrial(task, library, device)
            assert entry.trial is not None
            if entry.seat is None and not taken_jobs:
                return self._alone(entry, entry.trial)
            try:
                return self._formed(entry, taken_jobs, device, host, tenant, times)
            except BaseException as error:
                # The error ends only this job's carrier; the other jobs would never hear of the error.
                self._not_formed(taken_jobs, error)
                raise
        finally:
            with self._table.pool.changed:
                if self._forming is entry:
                    self._forming = None
                self._table.pool.changed.notify_all()

    def _found(
        self, entry: FusedJob, ticket: object, device: Device, build: Callable[[], MemberTrial]
    ) -> list[FusedJob] | None:
        """Take other members for a job's group; return None if another carrier or group has the job itself."""
        began = time.monotonic()
        try:
            if entry.trial is None:
                entry.trial = build()
            first_batch = None
            # Known already for a job that has been in a group, and lowered there if memory ran out.
            if not entry.most:
                entry.most, first_batch = self._finder.fusable(entry, entry.trial)
            if not self._takes_turn(entry, ticket, time.monotonic() - began) or self._joins(entry):
                return None
            return self._finder.others(entry, first_batch, device)
        except UnfusableError as error:
            _LOGGER.info("%s is not fused: %s", entry.job.name, error)
            return []
        except BaseException:
            self._finder.forget(entry)
            raise
        finally:
            with self._table.pool.changed:
                entry.is_forming = entry.is_offered = False
                self._table.pool.changed.notify_all()

    def _is_absorbed(self, entry: FusedJob, ticket: object) -> bool:
        """Return whether a carrier runs nothing, because another carrier has its job; under the lock.

        While the other carrier is undecided, the job stays without a carrier; `GroupMatcher` asks for another carrier if
        the job is put back.
        """
        if entry.ticket is not ticket:
            return True
        if self._table.is_undecided(entry):
            entry.carrier = None
        return entry.is_taken or entry.carrier is None

    def _takes_turn(self, entry: FusedJob, ticket: object, patience: float) -> bool:
        """Wait until a job may form a group; return False if another carrier has the job.

        Slow data loaders bring several jobs into preparation at once. The jobs form groups one after the other, and each
        waits for others of its kind whose first batch is still to come. Otherwise each job would find no other job to take.

        The job waits at most `patience` seconds for the first batches of others.
        """
        changed = self._table.pool.changed

        def is_gone() -> bool:
            return entry.is_taken or entry.ticket is not ticket

        def is_first() -> bool:
            is_busy = self._forming is not None and self._forming.job.key in self._table.entries
            return not is_busy and not entry.is_building

        def may_form() -> bool:
            waits_no_longer = is_gone() or entry.stop is not None
            return is_first() and (waits_no_longer or not any(map(entry.may_be_followed_by, entries)))

        with changed:
            entries = self._table.entries.values()
            entry.is_offered = True
            changed.notify_all()
            changed.wait_for(may_form, patience)
            # A carrier that has taken the job, or compares the job, decides first, unless that carrier takes too long.
            changed.wait_for(is_first, _PATIENCE_SECONDS)
            entry.is_offered = False
            if self._is_absorbed(entry, ticket):
                return False
            self._forming = entry
            return True

    def _not_formed(self, others: Sequence[FusedJob], error: BaseException) -> None:
        for other in others:
            with self._table.pool.changed:
                old_carrier, other.seat = other.carrier, None
            self.ends.carrier_over(other, Result(status="failed", error=error))
            if old_carrier is not None:
                old_carrier.cancel()

    def _alone(self, entry: FusedJob, member: MemberTrial) -> Trial:
        # A request to end the job went no further than `entry.stop` while the carrier looked for members.
        with self._table.pool.changed:
            entry.enter("running")
            stop, carrier = entry.stop, entry.carrier
        if stop is not None and carrier is not None:
            self._table.pool.stop(carrier, stop)
        return member

    def _formed(
        self,
        entry: FusedJob,
        others: Sequence[FusedJob],
        device: Device,
        host: HostTier | None,
        tenant: TrialMemoryContext | None,
        times: SharedUnitTimes | None,
    ) -> GroupTrial | PairTrial:
        """Make a group of the jobs found by a carrier, or a pair of groups that take turns."""
        all_entries = [entry, *others]
        if others:
            names = ", ".join(peer.job.name for peer in all_entries)
            _LOGGER.info("%d trials are fused: %s", len(all_entries), names)
        else:
            _LOGGER.info("%s has left its group and goes on in a group of its own", entry.job.name)
        with self._table.pool.changed:
            assert entry.carrier is not None
            pool, building, timer = self._table.pool, self._table.building, self._table.timer
            each = entry.each or entry.most
            most = max(each, len(all_entries))
            size, seconds = entry.kept, partial(self._unplanned_seconds, entry.kept, device)
            unplanned = (
                SmallerGroupFallback(size=size, seconds=seconds, is_compared=not self._insists) if size else None
            )
            group = LiveGroup(pool, entry.carrier, entry.key, most, self.ends, building, timer, unplanned)
            group.entries = all_entries
            seats = [peer.sit() for peer in all_entries]

            def made(members: Sequence[GroupSlot], desk: GroupDelegate, most: int) -> GroupTrial:
                return GroupTrial(
                    members, self._plans, self._library, device, desk, host, tenant, times, most, self._planner
                )

            if len(all_entries) > each and self._planner is not None:
                sides = PairSide(group), PairSide(group)
                groups = made(seats[:each], sides[0], each), made(seats[each:], sides[1], len(seats) - each)
                group.trial = PairTrial(sides, groups, self._library, device, group, self._planner, host, tenant)
            else:
                group.trial = made(seats, group, most)
            group.trial.hands_back = True
            old_carriers = [peer.carrier for peer in others]
            for peer in all_entries:
                peer.carrier, peer.is_seated = entry.carrier, True
                if peer.job.state != "waiting":
                    peer.enter("running")
            self._table.groups[entry.carrier.key] = group
            # From now on the slot knows of the job's pause; a paused carrier would stop all members.
            pool.hold(entry.carrier, paused=False)
        # Cancelled after the lock is free and after `entry.carrier` has changed, so the end of an old carrier no longer
        # concerns the job.
        for carrier in old_carriers:
            if carrier is not None:
                carrier.cancel()
        return group.trial

    def _unplanned_seconds(self, size: int, device: Device, member: MemberTrial, like: MemberBatchRequest) -> float:
        """Measure the seconds per step of a group of the given size without a planned step."""
        bench = FusionBenchmark(member.task, member.built()[0], like.batch, self._library, device)
        with self._table.pool.alone_on(device):
            return bench.together(size, self._plans)

    def _joins(self, entry: FusedJob) -> bool:
        """Let a job in preparation join a group with room; return False if there is no such group."""
        with self._table.pool.changed:
            # While there are more devices than groups, the job's carrier may form another group instead.
            grows = len(self._table.pool.device_names) <= len(self._table.groups)
            if self._table.group_for(entry, grows=grows) is None:
                return False
        self._finder.begin(entry)
        with self._table.pool.changed:
            # Looked up again: the trial began without the lock, and the group may have filled up or ended.
            group = self._table.group_for(entry, grows=grows)
            if group is not None:
                group.come(entry)
        return group is not None

    def look_later(self) -> None:
        """Search, on another thread, for a job that could join a group."""
        with self._table.pool.changed:
            if any(group.has_room(grows=True) for group in self._table.groups.values()):
                self._table.building.do(self._look)

    def _look(self) -> None:
        """Send waiting jobs to groups with room, until there is no match; runs on the `building` thread."""
        while True:
            # Searched anew each time: `takes` builds a trial without the lock, and meanwhile the tables change.
            with self._table.pool.changed:
                match = next(
                    (
                        (group, candidate)
                        for group in self._table.groups.values()
                        for candidate in self._table.entries.values()
                        if candidate.is_free and group.has_room(grows=True) and group.admits(candidate)
                    ),
                    None,
                )
            if match is None:
                return
            group, entry = match
            if self._finder.takes(entry, group.key, None, group.trial.any_device):
                self._send_to(entry)

    def _send_to(self, entry: FusedJob) -> None:
        """Send a taken job to a group, or back to a carrier if no group has room any more."""
        old_carrier, error = entry.carrier, None
        try:
            self._finder.begin(entry)
        except BaseException as raised:  # noqa: BLE001 - ends the job, as an error under its own carrier would
            error = raised
        if entry.job.key not in self._table.entries:
            return  # the watch has given up on the loader and ended the job (`group_loaders.py`)
        with self._table.pool.changed:
            group = None if error is not None else self._table.group_for(entry, grows=True)
            if group is not None:
                group.come(entry)
        if error is not None:
            self._finder.forget(entry)
            self._table.over(entry, Result(status=entry.stop or "failed", error=None if entry.stop else error))
        elif group is None:
            self.carry_anew(entry)
        # Last, as in `_formed`: by now the end of the old carrier no longer concerns the job.
        if old_carrier is not None:
            old_carrier.cancel()

    def carry_anew(self, entry: FusedJob) -> None:
        """Submit another carrier for a job that keeps its state; or end the job if its driver has asked for an end."""
        with self._table.pool.changed:
            if entry.job.key not in self._table.entries:
                return
            entry.carrier, entry.is_taken = None, False
            stop = entry.stop
        if stop is not None:
            self._table.over(entry, Result(status=stop))
            return
        try:
            self.carry(entry)
        except HydraTuneError:  # the pool ends
            self._table.over(entry, Result(status="cancelled"))
            return
        self._pass_on_pause(entry)

    def pause(self, job: Job, *, paused: bool) -> None:
        """Pause or unpause a job; a paused member leaves the group until unpaused."""
        with self._table.pool.changed:
            entry = self._table.entries.get(job.key)
            if entry is None:
                return
            job.hold(paused=paused)
            entry.note("paused" if paused else "unpaused")
            self._pass_on_pause(entry)

    def _pass_on_pause(self, entry: FusedJob) -> None:
        """Pause or unpause whatever runs the job, as the job is paused now."""
        # One hold of the lock for reading and passing on: the driver may unpause the job at any moment, and the carrier
        # may become that of a group, which one member's pause must not stop.
        with self._table.pool.changed:
            group, carrier = self._table.group_of(entry), entry.carrier
            if entry.seat is not None:
                entry.seat.is_paused = entry.job.paused
            if group is not None:
                group.wake()
            elif carrier is not None:
                self._table.pool.hold(carrier, paused=entry.job.paused)
            else:
                self._table.timer.do(partial(self.ends.go_on, entry))
