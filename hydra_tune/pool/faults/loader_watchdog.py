"""`LoaderWatchdog`: keeps a hanging data loader from blocking other trials.

`Pool` (`pool/pool.py`) runs a `LoaderWatchdog` on a thread of its own, from the pool's start to the shutdown, and
`ExecutorSettings` (`pool/runtime/settings.py`) checks the times. `FusedPool` (`pool/fusion/fused_pool.py`) sets
`members`. The watch calls `JobDispatcher.detach` and `JobDispatcher.abandon` (`pool/runtime/dispatcher.py`). The module
must not retry a trial, or advance a trial.

Note: locks. The pool's lock comes before a clock's (`DrawClock.under_way`). Warnings are written, and leases ended, without
the pool's lock.

Note: three steps. A trial that waits longer than a second for a batch leaves its device to other trials, except in a
recorded run. The trial's thread keeps waiting, and the device gets a new worker thread (for first batches, the pool
gets a new preparer thread). When the batch arrives, the trial continues wherever there is room. After
`warning_seconds`, a warning names the loader and the line where it hangs; the warning is repeated whenever the wait has
doubled. After `timeout_seconds`, the watch interrupts the loader, which fails the trial. If the loader does not return
within `_GRACE_SECONDS`, the watch abandons its thread (`train/data/loader_clock.py`), also in a recorded run. For a trial
that is already over, for example pruned, the watch gives up at the time of the warning. After a breakdown of the pool,
the shutdown gives up.

A member of a fused group keeps the group's device: `MemberLoaders` (`pool/fusion/group_loaders.py`) shows such members.

A loader without worker processes draws in this process, inside the gate of captures (`shard/capture/capture_lock.py`).
A capture waits for such a loader, and computations behind the capture wait too, until the watch gives up on the loader.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch.utils.data import DataLoader

from hydra_tune.errors import LoaderTimeoutError
from hydra_tune.pool.job import Job
from hydra_tune.pool.runtime.dispatcher import JobDispatcher
from hydra_tune.pool.runtime.job_state import JobState
from hydra_tune.quantities import format_seconds, parse_seconds
from hydra_tune.schedule.record import JobPhase
from hydra_tune.train.data.loader_clock import DrawClock

# A logger, not `warnings`: a capture in another thread silences warnings for the whole process, and filters may turn
# warnings into errors.
_LOGGER = logging.getLogger(__name__)
_PATIENCE_SECONDS = 1.0  # until a trial leaves its device: long beside a unit, too short for anybody to notice
_LOOK_SECONDS = 0.25
_GRACE_SECONDS = 2.0  # until a loader that was interrupted is abandoned


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderWaitLimits:
    """How long the pool waits for data loaders, in seconds.

    Attributes:
        warning_seconds: wait before a warning.
        timeout_seconds: wait before the trial fails; None: the pool waits for ever.
    """

    warning_seconds: float = 60.0
    timeout_seconds: float | None = 1800.0


def check_loader_times(warning: object, timeout: object) -> LoaderWaitLimits:
    """Parse `loader_warning` and `loader_timeout`.

    Raises:
        ConfigError: an argument is no valid time.
    """
    return LoaderWaitLimits(
        warning_seconds=parse_seconds(warning, what="loader_warning"),
        timeout_seconds=None if timeout is None else parse_seconds(timeout, what="loader_timeout"),
    )


class MemberLoaderSource(Protocol):
    """Trials that belong to no record: present and future members of fused groups."""

    def clocks(self) -> Mapping[str, DrawClock]:
        """Return the clocks of the trials in preparation for records that have no trial yet, by the record's job."""

    def drawing(self) -> Iterable["DrawingMember"]:
        """Members whose own code runs outside their preparation."""


class DrawingMember(Protocol):
    """A member that is not the trial of a record."""

    job: Job

    def fails_with(self, error: BaseException) -> None:
        """Set the member's error for the coming interruption of its loader."""

    @property
    def clock(self) -> DrawClock | None:
        """Clock of the member's draws."""

    @property
    def is_stopped(self) -> bool:
        """Whether a driver has asked for the member's end."""

    @property
    def is_on_preparer(self) -> bool:
        """Whether the member draws on a preparer's thread, for the preparation of another job."""

    def abandon(self) -> bool:
        """Give up waiting for the member; return False if that is impossible or no longer necessary."""


class LoaderWatchdog:
    """Watches the loaders of a pool's trials, on a thread of its own.

    Args:
        replace_worker: starts a new worker for a device; called under the pool's lock.
        replace_preparer: starts a new preparer in place of the given thread; called under the pool's lock.
        leaves_devices: whether a waiting trial leaves its device before the pool gives up on its loader.

    Attributes:
        members: trials that belong to no record; None without fusion.
    """

    members: MemberLoaderSource | None = None

    def __init__(
        self,
        core: JobDispatcher,
        times: LoaderWaitLimits,
        replace_worker: Callable[[str], None],
        replace_preparer: Callable[[int], None],
        *,
        leaves_devices: bool,
    ) -> None:
        self._core = core
        self._times = times
        self._replace_worker = replace_worker
        self._replace_preparer = replace_preparer
        self._leaves_devices = leaves_devices
        self._warned: dict[str, float] = {}  # by job: the wait in seconds at the last warning about the present draw
        self._interrupted: dict[str, float] = {}  # by job: the wait in seconds at the interruption
        self._abandoned: list[DrawClock] = []
        self._is_over = threading.Event()
        # Four looks within the shortest limit, so no limit is overrun by more than about a quarter.
        soonest = min(_PATIENCE_SECONDS, times.warning_seconds, times.timeout_seconds or _PATIENCE_SECONDS)
        self._look_seconds = min(_LOOK_SECONDS, soonest / 4)

    def work(self) -> None:
        """Run the thread's main loop."""
        with self._core.breaking():
            while not self._is_over.wait(self._look_seconds):
                self._look()

    def close(self) -> None:
        """Stop the thread."""
        self._is_over.set()

    def give_up_all(self) -> None:
        """Abandon the draws of the trials that a breakdown has ended; at the shutdown, after the end of the watch's thread."""
        core = self._core
        clocks = self._clocks()
        for record in core.abandoned:
            clock, trial = _clock(record, clocks), record.trial
            if clock is None:
                continue
            with core.changed:  # decides the race with a thread that comes back
                if trial is not None and core.scheduler.phases.get(record.job.key) is not JobPhase.PREPARING:
                    # The draw may have begun on a device's worker too late for `_detach`.
                    with clock.under_way():
                        if clock.seconds:
                            trial.leave_device()
                            record.is_detached, record.detached_ns = True, time.perf_counter_ns()
                is_abandoned = clock.abandon()
                record.is_abandoned |= is_abandoned
            if is_abandoned:
                if trial is not None:
                    trial.end_lease()
                self._left_behind(record.job, clock)

    def is_left_behind(self, thread: threading.Thread) -> bool:
        """Return whether a thread hangs in an abandoned loader."""
        return any(clock.thread == thread.ident for clock in self._abandoned)

    def _look(self) -> None:
        core = self._core
        # Again, because a loader may have swallowed the last interruption. A draw that is over is forgotten: the system may
        # give the number of its thread to a worker, and the clock keeps the data set alive.
        self._abandoned = [clock for clock in self._abandoned if clock.interrupt()]
        # A copy, so that the clocks are read, and warnings written, without the pool's lock.
        with core.changed:
            records = list(core.records.values())
        waiting_keys = []
        # Once for all records, of which there may be thousands.
        clocks = self._clocks()
        for record in records:
            clock = _clock(record, clocks)
            if clock is not None and clock.seconds > self._look_seconds:
                waiting_keys.append(record.job.key)
                self._look_at(record, clock)
        for member in () if self.members is None else self.members.drawing():
            clock = member.clock
            if clock is not None and clock.seconds > self._look_seconds:
                waiting_keys.append(member.job.key)
                self._look_at_member(member, clock)
        # A job that no longer waits starts afresh: its next draw may hang as well.
        for seconds_by_job in (self._warned, self._interrupted):
            for key in seconds_by_job.keys() - set(waiting_keys):
                del seconds_by_job[key]

    def _clocks(self) -> Mapping[str, DrawClock]:
        return {} if self.members is None else self.members.clocks()

    def _look_at(self, record: JobState, clock: DrawClock) -> None:
        seconds, limit = clock.seconds, self._times.timeout_seconds
        if seconds >= _PATIENCE_SECONDS and self._leaves_devices:
            self._detach(record, clock)
        self._warn(record.job, clock, seconds)
        # Nobody needs the batch of a job that is already over, so the pool gives up sooner.
        limit_now = limit if record.outcome is None else self._times.warning_seconds
        if limit_now is not None and seconds >= limit_now:
            self._give_up(record, clock, seconds)

    def _warn(self, job: Job, clock: DrawClock, seconds: float) -> None:
        if seconds >= 2 * self._warned.get(job.key, self._times.warning_seconds / 2):
            self._warned[job.key] = seconds
            _LOGGER.warning("%s", self._message(job, clock))

    def _look_at_member(self, member: DrawingMember, clock: DrawClock) -> None:
        seconds, key = clock.seconds, member.job.key
        if seconds >= _PATIENCE_SECONDS and self._leaves_devices:
            # Both locks, as in `_detach`.
            with self._core.changed, clock.under_way():
                if clock.seconds and member.is_on_preparer:
                    self._replace_preparer(clock.thread)
        self._warn(member.job, clock, seconds)
        limit_now = self._times.warning_seconds if member.is_stopped else self._times.timeout_seconds
        if limit_now is None or seconds < limit_now or self._interrupt(member, clock, seconds):
            return
        if seconds >= self._interrupted[key] + _GRACE_SECONDS and member.abandon():
            self._left_behind(member.job, clock)

    def _detach(self, record: JobState, clock: DrawClock) -> bool:
        """Let the device, or the preparer, serve other jobs meanwhile; return whether the trial has left either."""
        core, key, trial = self._core, record.job.key, record.trial
        try:
            # Both locks: the job must not change its phase, and the draw must not end, before the decision is carried out.
            with core.changed, clock.under_way():
                if record.is_detached or core.error is not None or not clock.seconds:
                    return record.is_detached
                if core.scheduler.phases.get(key) is JobPhase.PREPARING:
                    self._replace_preparer(clock.thread)
                    return True
                if trial is None:
                    return False
                places = [device for device, job in core.scheduler.running.items() if job == key]
                if len(places) != 1:
                    return False  # the worker of a unit beside this one has not reported its end yet; look again later
                # The draw cannot end while `clock.under_way()` is held, so the burst learns in time that its device is
                # taken away.
                trial.leave_device()
                core.detach(record, places[0], 0.0)
                self._replace_worker(places[0])
                return True
        finally:
            if trial is not None:
                # Without the pool's lock, because ending a lease takes the locks of blocks.
                trial.end_lease()
            core.release_all()

    def _give_up(self, record: JobState, clock: DrawClock, seconds: float) -> None:
        key, core = record.job.key, self._core
        if self._interrupt(record, clock, seconds):
            return
        # A job can be abandoned only after it has left its device or the preparer.
        if seconds < self._interrupted[key] + _GRACE_SECONDS or not self._detach(record, clock):
            return
        assert record.loader_error is not None
        with core.changed:
            is_preparing = core.scheduler.phases.get(key) is JobPhase.PREPARING
            is_abandoned = core.abandon(record, clock, record.loader_error, is_preparing=is_preparing)
        if is_abandoned:
            self._left_behind(record.job, clock)
        core.release_all()

    def _interrupt(self, waiting: JobState | DrawingMember, clock: DrawClock, seconds: float) -> bool:
        """Interrupt the draw, unless it has been interrupted already; return whether the call interrupted the draw."""
        if waiting.job.key in self._interrupted:
            return False
        limit = self._times.timeout_seconds
        limit_hint = "" if limit is None else f" (loader_timeout is {format_seconds(limit)})"
        # Before the interruption, because the interrupted thread reads the error.
        waiting.fails_with(LoaderTimeoutError(self._message(waiting.job, clock) + limit_hint))
        self._interrupted[waiting.job.key] = seconds
        clock.interrupt()
        return True

    def _left_behind(self, job: Job, clock: DrawClock) -> None:
        self._abandoned.append(clock)
        _LOGGER.warning(
            "the loader of trial %r does not return; its thread is left behind, and the trial's memory is given back",
            job.name,
        )

    def _message(self, job: Job, clock: DrawClock) -> str:
        task, handle = job.task, clock.handle
        argument = "validate" if handle is task.validate and handle is not task.train else "train"
        if clock.is_in_process:
            consequence = (
                "it draws in this process, and blocks captures of other trials, which block further trials; with "
                "num_workers=1 only this trial would wait"
            )
        else:
            consequence = "other trials go on meanwhile"
        return (
            f"trial {job.name!r} has been waiting for {format_seconds(clock.seconds)} for a batch of {argument}= "
            f"({_described(handle)}), at {clock.where()}; {consequence}. If it hangs, cancel the trial, give the "
            "loader a timeout=, or let such trials fail sooner, by loader_timeout of the HydraExecutor"
        )


def _clock(record: JobState, forming: Mapping[str, DrawClock]) -> DrawClock | None:
    return forming.get(record.job.key) if record.trial is None else record.trial.clock


def _described(handle: object) -> str:
    if isinstance(handle, DataLoader):
        return f"DataLoader over {type(handle.dataset).__name__}, num_workers={handle.num_workers}"
    return str(getattr(handle, "__qualname__", type(handle).__name__))
