"""Horizontal fusion in a pool: jobs with compatible trials run as a fused group.

`FusedPool` wraps a `Pool`: with fusion, `HydraExecutor` (`hydra_tune/executor.py`) submits every job here, and each
`Job` (`pool/job.py`) passes the driver's later requests on to `FusedPool`. `ExecutorSettings.open_pool`
(`pool/runtime/settings.py`) makes the `FusedPool`. `group_jobs.py` submits carrier jobs to the pool, `group_matcher.py`
finds trials for a group, `live_group.py` manages a running group, and `group_completion.py` turns the ends of carriers
and members into the ends of jobs.

`suspend` (`pool/checkpointing/suspend.py`) saves jobs through a `FusedPool`. The module must not know how a group
computes.

Note: two kinds of jobs. A driver's job never enters the scheduler; the job's carrier does. Requests of drivers reach a
member through marks in the member's `FusedJob` and `GroupSlot`, and the pool through the carrier. The marks change under
the pool's lock; all calls into the pool here come without the lock.
"""

import math
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra_tune.checkpoint.saved import CheckpointContent
from hydra_tune.errors import CheckpointError
from hydra_tune.fusion.matching.group_size_chooser import GroupSizeChooser
from hydra_tune.interrupts import hold_interrupts
from hydra_tune.pool.checkpointing.writer import StartCheckpointSource, TrialCheckpointer
from hydra_tune.pool.fusion.fused_job import FusedJob
from hydra_tune.pool.fusion.group_jobs import GroupJobLauncher
from hydra_tune.pool.fusion.group_loaders import MemberLoaders
from hydra_tune.pool.fusion.job_table import FusedJobTable
from hydra_tune.pool.job import OVER, EventStream, Job, JobProgress
from hydra_tune.pool.pool import Pool, refuse_saving
from hydra_tune.pool.runtime.job_state import progress_of, progress_without_trial
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.task import TrainTask


class FusedPool:
    """Takes jobs for a pool, and lets the pool run the jobs in fused groups.

    Args:
        chooser: decides whether trials gain by fusion; None: all compatible trials are fused.
        backend: backend of `torch.compile` for the steps of groups; None: steps are not compiled.
        plans_steps: whether groups too large for a device run planned steps: "auto" where planned steps should be
            faster than smaller groups, "on" wherever a plan exists, or "off".
    """

    def __init__(
        self,
        pool: Pool,
        library: PlanLibrary,
        most: int,
        chooser: GroupSizeChooser | None = None,
        backend: str | None = None,
        plans_steps: str = "off",
    ) -> None:
        self._pool = pool
        self._table = FusedJobTable(pool)
        self._carriers = GroupJobLauncher(self._table, library, most, chooser, backend, plans_steps)
        self._numbers = 0
        pool.loaders.members = MemberLoaders(self._table, self._carriers)
        pool.at_close.append(self._table.close)

    def submit(
        self,
        task: TrainTask,
        name: str | None,
        events: EventStream | None,
        *,
        priority: int,
        staggered: bool = False,
        fusion_size: int | None = None,
        origin: StartCheckpointSource | None = None,
        labels: Mapping[str, Any] | None = None,
        saved_as: str | None = None,
        max_retries: int = 0,
    ) -> Job:
        """Queue a task, as `Pool.submit` does; a group that the job forms has at most `fusion_size` members."""
        saving, origin = self._pool.checkpoints, origin or StartCheckpointSource()
        with self._pool.changed:
            number, self._numbers = self._numbers, self._numbers + 1
            shown_name = name or f"job {number}"
            job = Job(key=f"{number}:{name or 'job'}", name=shown_name, task=task, pool=self, events=events)
            folder = saving.place(saved_as or shown_name, origin.folder)
            keeper = TrialCheckpointer(saving, shown_name, folder, dict(labels or {}))
            begin = origin.beginning
            entry = FusedJob(
                *(job, keeper, begin, priority, max_retries),
                staggered=staggered,
                fusion_size=fusion_size,
                log=self._pool.log,
            )
            entry.note("submitted", priority=priority)
            # Entered before `carry`, because the preparer may look the job up before `carry` returns.
            self._table.entries[job.key] = entry
        try:
            self._carriers.carry(entry)
        except BaseException:
            with self._pool.changed:
                del self._table.entries[job.key]
            saving.leave(folder)
            raise
        self._carriers.look_later()
        return job

    def proceed(self, job: Job) -> None:
        """Resume a job waiting at a report."""
        with self._pool.changed:
            entry = self._table.entries.get(job.key)
            if entry is None:
                return
            entry.told.is_answered = True
            if job.state != "waiting":
                return
            entry.enter("running")
            seat, carrier, group = entry.seat, entry.carrier, self._table.group_of(entry)
            if seat is not None:
                seat.is_answered = True
            is_due = group is not None and group.trial.is_due
        # Without the pool's lock, as all calls into the pool here.
        if carrier is not None and (seat is None or is_due):
            carrier.proceed()
        # The other members of the report may be answered within a moment, too, and then go on together.
        elif group is not None:
            group.wake_in_time()
        elif carrier is None:
            self._table.timer.do(partial(self._carriers.ends.go_on, entry))

    def stop(self, job: Job, status: str) -> None:
        """End a job as "pruned" or "cancelled"."""
        with self._pool.changed:
            entry = self._table.entries.get(job.key)
            if entry is None:
                return
            entry.stop = entry.stop or status
            entry.note("stopped")
            if entry.seat is not None:
                entry.seat.stop = entry.stop
            group, carrier = self._table.group_of(entry), entry.carrier
            runs_alone = not (entry.is_seated or entry.is_taken or entry.is_forming)
            self._pool.changed.notify_all()  # a carrier that waits for others of the kind waits no longer
        if group is not None:
            # A waiting group runs no code that could notice the request, so its carrier is resumed.
            if group.carrier.state == "waiting":
                group.carrier.proceed()
        # The carrier may be stopped only while it runs this job alone; a carrier that forms a group reads `entry.stop`
        # itself.
        elif carrier is not None and runs_alone:
            self._pool.stop(carrier, status)
        elif carrier is None:
            self._table.timer.do(partial(self._carriers.ends.go_on, entry))

    # Where the job runs alone, the scheduler decides within the call, and Ctrl-C would leave half a decision.
    @hold_interrupts()
    def pause(self, job: Job, *, paused: bool) -> None:
        """Pause or unpause a job; a paused member leaves the group until unpaused."""
        self._carriers.pause(job, paused=paused)

    def prioritize(self, job: Job, priority: int) -> None:
        """Change the priority of a job and of its carrier, which the other members of the job's group share."""
        with self._pool.changed:
            entry = self._table.entries.get(job.key)
            carrier = None if entry is None else entry.carrier
            if entry is not None:
                entry.priority = priority
                entry.note("priority", priority=priority)
        # The priority stays with the job as well: another carrier takes it over.
        if carrier is not None:
            self._pool.prioritize(carrier, priority)

    def progress(self, job: Job) -> JobProgress:
        """Progress of a job."""
        with self._pool.changed:
            entry = self._table.entries.get(job.key)
            if entry is None or entry.trial is None:
                return progress_without_trial(job)
            group = self._table.group_of(entry)
            return replace(progress_of(job, entry.trial), group_size=1 if group is None else len(group.entries))

    def jobs(self) -> list[Job]:
        """Jobs that are not over, in the order of submission."""
        with self._pool.changed:
            return [entry.job for entry in self._table.entries.values()]

    def refuse_own_code(self, what: str) -> None:
        """As of `Pool`."""
        self._pool.refuse_own_code(what)

    def save(self, job: Job, until: float = math.inf) -> "Future[Path]":
        """As of `Pool`."""
        if job.state not in OVER:
            self.refuse_own_code("checkpoint")
        future = self.ask_to_save(job)
        self.answer(job, future, until=until)
        return future

    def ask_to_save(self, job: Job) -> "Future[Path]":
        """As of `Pool`."""
        if self._pool.checkpoints.root is None or job.state in OVER:
            return self._pool.ask_to_save(job)
        return self._keeper_of(job).save()

    def copy(self, job: Job) -> "Future[CheckpointContent]":
        """As of `Pool`."""
        future = self._keeper_of(job).copy()
        self.answer(job, future)
        return future

    def copy_at_end(self, job: Job) -> "Future[CheckpointContent]":
        """As of `Pool`."""
        return self._keeper_of(job).copy_at_end()

    def answer(self, job: Job, waiting_for: "Future[Any] | None" = None, *, until: float = math.inf) -> None:
        """As of `Pool`."""
        with self._pool.changed:
            entry = self._table.entries.get(job.key)
            if entry is None or entry.keeper is None:
                return
            group, carrier, member = self._table.group_of(entry), entry.carrier, entry.trial
            is_refused = job.state == "waiting" and member is not None and not member.may_be_saved
        if is_refused:
            refuse_saving(job, waiting_for, until)
        # A group that waits saves on the timer's thread, any other between two of its steps.
        if group is not None:
            group.wake()
        elif carrier is not None and entry.seat is None:
            self._pool.answer(carrier, waiting_for, entry.keeper, until=until)
        # The job has left its group, so no other thread runs its trial.
        elif member is not None and member.may_be_saved:
            entry.keeper.answer(member)
        else:
            refuse_saving(job, waiting_for, until)

    def _keeper_of(self, job: Job) -> TrialCheckpointer:
        with self._pool.changed:
            entry = self._table.entries.get(job.key)
        if entry is None or entry.keeper is None:
            raise CheckpointError(f"{job.name!r} is over ({job.state})")
        return entry.keeper
