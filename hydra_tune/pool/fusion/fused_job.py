"""A job of a `FusedPool`, with its carrier, its trial, and its slot in a fused group.

`FusedPool.submit` (`fused_pool.py`) makes a `FusedJob` for each task; the other modules here keep the state of the job's
fusion in the `FusedJob` until the job is over. `GroupJobLauncher` (`group_jobs.py`) gives each carrier a
`GroupJobEventStream`, which passes the carrier's events to `GroupEndHandler` (`group_completion.py`). The module must not
know how a group computes.

Note: locks. The `is_` flags change under the pool's lock. A trial is built and compared without the lock; the thread
that builds sets `key`, `candidate` and `why_apart` meanwhile. An event may arrive under the pool's lock, so a listener
passes calls into the pool to another thread.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Protocol

from hydra_tune.fusion.group.member import MemberTrial
from hydra_tune.fusion.group.slot import GroupSlot
from hydra_tune.observe.event_log.writer import EventLog
from hydra_tune.pool.checkpointing.writer import TrialCheckpointer
from hydra_tune.pool.job import OVER, EventStream, Job, PoolEvent, Result
from hydra_tune.pool.runtime.job_state import ReportCursor
from hydra_tune.train.checkpoint.trial_checkpoint import StartCheckpoint
from hydra_tune.train.trial import PendingReport


class FusedJob:
    """A job of a `FusedPool` and the state of its fusion.

    Args:
        job: the job as the driver sees it.
        max_retries: how often the job may begin again after faults of the system.
        fusion_size: the most members of a group that this job forms; None: as many as of any job.
        log: receives the job's life, beside the lives of its carriers; None: no log.

    Attributes:
        carrier: the pool's job that runs this job, alone or in a group; None while there is no carrier, also where the
            job's own carrier has ended before another carrier has decided whether to keep the job.
        ticket: identifies the latest carrier; a carrier with an older ticket runs nothing.
        stop: the end requested by the driver, if any.
        trial: the job's own trial, once built.
        key: the fusion key, once known; for a trial that cannot be fused, an object equal to no key.
        why_apart: reason of the latest failed comparison with a job of the same key; "" if none has failed.
        seat: the job's present or former slot in a group; None before the first slot.
        is_seated: whether the job holds the slot now.
        is_taken: whether another job's carrier, or a running group, has taken the job.
        is_building: whether the trial is being built and compared for another job's group.
        is_forming: whether the job's carrier is looking for other members.
        is_offered: whether the job's carrier waits, and another carrier may take the job.
        most: how many jobs of the same kind may form a group, or a pair of groups that take turns; 0: not determined
            yet.
        each: members of the larger group of such a pair; 0: as many as `most`.
        kept: members of a group that fits a device without a plan, to fall back to from planned steps; 0: no such group.
        candidate: the job's trial during the comparison with another job's trial.
        loader_error: the error of the job if its data loader is interrupted.
    """

    def __init__(
        self,
        job: Job,
        keeper: TrialCheckpointer,
        begin: Callable[[], StartCheckpoint | None],
        priority: int,
        max_retries: int,
        *,
        staggered: bool = False,
        fusion_size: int | None = None,
        log: EventLog | None = None,
    ) -> None:
        self.job = job
        self.keeper: TrialCheckpointer | None = keeper
        self.begin = begin
        self.priority = priority
        self.max_retries = max_retries
        self.staggered = staggered
        self.fusion_size = fusion_size
        self._log = log
        self.told = ReportCursor()
        self.ticket: object = None
        self.faults: tuple[str, ...] = ()
        self.key: Hashable | None = None
        self.stop: str | None = None
        self.begin_anew()

    def note(self, what: str, **facts: Any) -> None:
        """Log an event of the job."""
        if self._log is not None:
            self._log.job(self.job.key, what, **facts)

    def enter(self, state: str) -> None:
        """Change the job's state to "preparing" or "running", and log the change."""
        self.note("resumed" if self.job.state == "waiting" else state)
        self.job.enter(state)

    @property
    def on_report(self) -> Callable[[PendingReport], None]:
        """Logs a report of the job's trial; holds no reference to the job, whose result the trial would keep alive."""
        return partial(_log_report, self._log, self.job.key, None if self.job.events is None else self.told)

    def begin_anew(self) -> None:
        """Reset the carrier and everything built for the job."""
        self.carrier: Job | None = None
        self.most = 0
        self.each = 0
        self.kept = 0
        self.trial: MemberTrial | None = None
        self.candidate: MemberTrial | None = None
        self.loader_error: BaseException | None = None
        self.why_apart = ""
        self.seat: GroupSlot | None = None
        self.is_seated = False
        self.is_taken = False
        self.is_building = False
        self.is_forming = False
        self.is_offered = False

    @property
    def is_free(self) -> bool:
        """Whether a group may take the job."""
        return (
            not self.is_taken
            and (self.is_offered or not self.is_forming)
            and not self.is_building
            and self.carrier is not None
            # Not begun, or outside a group after a pause. A trial without a slot runs alone, and goes on alone.
            and (self.trial is None or self.is_offered or (self.seat is not None and not self.is_seated))
            and self.stop is None
            and self.job.state not in OVER
            and not self.job.paused
        )

    def may_be_followed_by(self, other: "FusedJob") -> bool:
        """Whether another job of this kind, as far as is known, will be ready for a group soon."""
        return other is not self and other.is_forming and not other.is_offered and other.key in (None, self.key)

    def sit(self) -> GroupSlot:
        """Return the job's slot, made if necessary, with the driver's present requests."""
        if self.seat is None:
            assert self.trial is not None
            self.seat = GroupSlot(self.trial, waits=self.job.events is not None)
        # Requests made while the job had no slot reached only the job.
        self.seat.stop, self.seat.is_paused = self.stop, self.job.paused
        return self.seat

    def result(self, result: Result) -> Result:
        """Complete the carrier's result with the figures of the job's own trial, and close the job's keeper."""
        member = self.trial
        if member is not None and self.seat is not None:
            planned_units = member.units_planned
            result.metrics, result.history = member.metrics, member.history
            result.num_shards, result.units_run = member.num_shards, member.units_run
            result.compute_seconds, result.split_batches = member.compute_seconds, member.split_batches
            if result.status in ("pruned", "cancelled") and planned_units is not None:
                result.units_saved = max(0, planned_units - member.units_run)
        result.faults = self.faults
        if self.keeper is not None:
            self.keeper.close(result.status)
            if self.keeper.has_any:
                result.checkpoint = self.keeper.path
        return result


def _log_report(log: EventLog | None, job: str, told: ReportCursor | None, report: PendingReport) -> None:
    if log is not None:
        waits = told is not None and told.takes(report)
        log.job(job, "report", step=report.step, metrics=report.metrics, waits=waits)


class GroupJobListener(Protocol):
    """Receiver of a carrier's events."""

    def told(self, entry: FusedJob, event: PoolEvent) -> None:
        """Handle an event of the carrier that was made for a job."""


class GroupJobEventStream(EventStream):
    """Event stream of a carrier; passes every event on to `GroupJobListener`."""

    def __init__(self, carried: GroupJobListener, entry: FusedJob) -> None:
        super().__init__()
        self.put = lambda event: carried.told(entry, event)
        self._entry = entry

    @property
    def waits(self) -> bool:
        """Whether the carrier waits at reports: a group reports only when a member waits for an answer."""
        return self._entry.seat is not None or self._entry.job.events is not None
