"""`LoaderWatch`: looks after trials that wait for their data loaders, so that one which hangs holds up nobody else.

Note: three steps. A trial that has waited for a batch longer than a moment leaves its device to the others: its thread goes
on waiting, and the device gets a new worker (the preparer as well, for first batches). When the batch comes, the trial goes on
where there is room. After `warning_seconds` a warning names the loader and says where it hangs; it comes again when twice as
much time has passed. After `timeout_seconds` the trial fails: its loader is interrupted, and if it is not back a moment later,
abandoned (`train/drawing.py`). Of a trial that is over, pruned for instance, the loader is waited for until the time of the
warning.

A loader without workers draws in this process, inside the gate of captures (`shard/gate.py`). A capture waits for such a
loader, and whoever wants to compute behind that capture waits as well, until a loader that hangs is given up on.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch.utils.data import DataLoader

from hydra_tune.errors import LoaderTimeoutError
from hydra_tune.pool.core import Core
from hydra_tune.pool.job import Job
from hydra_tune.pool.record import Record
from hydra_tune.quantities import format_seconds, parse_seconds
from hydra_tune.schedule.record import Phase
from hydra_tune.train.drawing import DrawClock

# Not `warnings`: a capture in another thread silences them for the whole process, and filters may turn them into errors.
_LOGGER = logging.getLogger(__name__)
_PATIENCE_SECONDS = (
    1.0  # until a device is left to others: long beside a unit, short beside a wait that anybody notices
)
_LOOK_SECONDS = 0.25
_GRACE_SECONDS = 2.0  # until a loader that was interrupted is abandoned


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTimes:
    """How long loaders are waited for, in seconds.

    Attributes:
        warning_seconds: until a warning.
        timeout_seconds: until the trial fails; None: never.
    """

    warning_seconds: float = 60.0
    timeout_seconds: float | None = 1800.0


def check_loader_times(warning: object, timeout: object) -> LoaderTimes:
    """`loader_warning` and `loader_timeout`, read.

    Raises:
        ConfigError: one of them is no time.
    """
    return LoaderTimes(
        warning_seconds=parse_seconds(warning, what="loader_warning"),
        timeout_seconds=None if timeout is None else parse_seconds(timeout, what="loader_timeout"),
    )


class Members(Protocol):
    """Who knows of trials that are not a record's own: members of groups, and such as are about to be."""

    def clock(self, record: Record) -> DrawClock | None:
        """Of the trial that is made while a record, which has none yet, is prepared."""

    def drawing(self) -> Iterable["Drawing"]:
        """Members whose own code runs elsewhere."""


class Drawing(Protocol):
    """A member that is no record's trial.

    Attributes:
        job: its own.
    """

    job: Job

    def fails_with(self, error: BaseException) -> None:
        """Its loader is about to be interrupted, which is what it fails with then."""

    @property
    def clock(self) -> DrawClock | None:
        """Of its draws."""

    @property
    def is_stopped(self) -> bool:
        """Whether somebody wants it to be over."""

    def abandon(self) -> bool:
        """Wait for it no longer; False: that is not possible, or no longer needed."""


class LoaderWatch:
    """Watches the loaders of a pool's trials, on a thread of its own.

    Args:
        core: of the pool.
        times: how long loaders are waited for.
        replace_worker: gives a device a new worker, under the pool's lock.
        replace_preparer: has the next jobs prepared by another thread than this one, likewise.
        leaves_devices: whether a trial that waits leaves its device before it is given up on.

    Attributes:
        members: knows of trials that are not the records' own; None: there are none.
    """

    members: Members | None = None

    def __init__(
        self,
        core: Core,
        times: LoaderTimes,
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
        self._warned: dict[str, float] = {}  # by job: after how many seconds of this draw it was named last
        self._interrupted: dict[str, float] = {}  # likewise
        self._abandoned: list[DrawClock] = []
        self._is_over = threading.Event()
        soonest = min(_PATIENCE_SECONDS, times.warning_seconds, times.timeout_seconds or _PATIENCE_SECONDS)
        self._look_seconds = min(_LOOK_SECONDS, soonest / 4)

    def work(self) -> None:
        """The thread's life."""
        with self._core.breaking():
            while not self._is_over.wait(self._look_seconds):
                self._look()

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()

    def is_left_behind(self, thread: threading.Thread) -> bool:
        """Whether a thread hangs in a loader that was abandoned."""
        return any(clock.thread == thread.ident for clock in self._abandoned)

    def _look(self) -> None:
        core = self._core
        for abandoned in self._abandoned:
            abandoned.interrupt()  # whatever it has made of the last time
        with core.changed:
            records = list(core.records.values())
        late = []
        for record in records:
            clock = self._clock(record)
            if clock is not None and clock.seconds > self._look_seconds:
                late.append(record.job.key)
                self._look_at(record, clock)
        for member in () if self.members is None else self.members.drawing():
            clock = member.clock
            if clock is not None and clock.seconds > self._look_seconds:
                late.append(member.job.key)
                self._look_at_member(member, clock)
        for known in (self._warned, self._interrupted):
            for key in known.keys() - set(late):
                del known[key]

    def _clock(self, record: Record) -> DrawClock | None:
        if record.trial is not None:
            return record.trial.clock
        return None if self.members is None else self.members.clock(record)

    def _look_at(self, record: Record, clock: DrawClock) -> None:
        seconds, limit = clock.seconds, self._times.timeout_seconds
        if seconds >= _PATIENCE_SECONDS and self._leaves_devices:
            self._detach(record, clock)
        self._warn(record.job, clock, seconds)
        most = limit if record.outcome is None else self._times.warning_seconds
        if most is not None and seconds >= most:
            self._give_up(record, clock, seconds)

    def _warn(self, job: Job, clock: DrawClock, seconds: float) -> None:
        if seconds >= 2 * self._warned.get(job.key, self._times.warning_seconds / 2):
            self._warned[job.key] = seconds
            _LOGGER.warning("%s", self._message(job, clock))

    def _look_at_member(self, member: Drawing, clock: DrawClock) -> None:
        seconds, key = clock.seconds, member.job.key
        self._warn(member.job, clock, seconds)
        most = self._times.warning_seconds if member.is_stopped else self._times.timeout_seconds
        if most is None or seconds < most or self._interrupt(member, clock, seconds):
            return
        if seconds >= self._interrupted[key] + _GRACE_SECONDS and member.abandon():
            self._left_behind(member.job, clock)

    def _detach(self, record: Record, clock: DrawClock) -> bool:
        """Have the device, or the preparer, work for others meanwhile; whether it does."""
        core, key, trial = self._core, record.job.key, record.trial
        try:
            with core.changed, clock.under_way():
                if record.is_detached or core.error is not None or not clock.seconds:
                    return record.is_detached
                if core.scheduler.phases.get(key) is Phase.PREPARING:
                    self._replace_preparer(clock.thread)
                    return True
                if trial is None:
                    return False
                places = [device for device, job in core.scheduler.running.items() if job == key]
                if len(places) != 1:
                    return False  # a worker that ran beside is still saying so
                trial.leave_device()
                core.detach(record, places[0], 0.0)
                self._replace_worker(places[0])
                return True
        finally:
            if trial is not None:
                trial.end_lease()
            core.release_all()

    def _give_up(self, record: Record, clock: DrawClock, seconds: float) -> None:
        key, core = record.job.key, self._core
        if self._interrupt(record, clock, seconds):
            return
        if seconds < self._interrupted[key] + _GRACE_SECONDS or not self._detach(record, clock):
            return
        assert record.loader_error is not None
        with core.changed:
            is_preparing = core.scheduler.phases.get(key) is Phase.PREPARING
            is_abandoned = core.abandon(record, clock, record.loader_error, is_preparing=is_preparing)
        if is_abandoned:
            self._left_behind(record.job, clock)
        core.release_all()

    def _interrupt(self, waiting: Record | Drawing, clock: DrawClock, seconds: float) -> bool:
        """Have the draw raise, if it has not been done; whether it is done now."""
        if waiting.job.key in self._interrupted:
            return False
        limit = self._times.timeout_seconds
        late = "" if limit is None else f" (loader_timeout is {format_seconds(limit)})"
        waiting.fails_with(LoaderTimeoutError(self._message(waiting.job, clock) + late))
        self._interrupted[waiting.job.key] = seconds
        clock.interrupt()
        return True

    def _left_behind(self, job: Job, clock: DrawClock) -> None:
        self._abandoned.append(clock)
        _LOGGER.warning(
            "the loader of trial %r does not come back; its thread is left behind, and the trial's memory is given back",
            job.name,
        )

    def _message(self, job: Job, clock: DrawClock) -> str:
        task, handle = job.task, clock.handle
        which = "validate" if handle is task.validate and handle is not task.train else "train"
        if clock.is_in_process:
            held = (
                "it draws in this process, so that a trial whose model is to be captured waits for it as well, and other "
                "trials behind that one; num_workers=1 would have it wait alone"
            )
        else:
            held = "other trials go on meanwhile"
        return (
            f"trial {job.name!r} has been waiting for {format_seconds(clock.seconds)} for a batch of {which}= "
            f"({_described(handle)}), at {clock.where()}; {held}. If it hangs, cancel the trial, give the loader a timeout=, "
            "or have such trials fail sooner, with loader_timeout of the HydraExecutor"
        )


def _described(handle: object) -> str:
    if isinstance(handle, DataLoader):
        return f"DataLoader over {type(handle.dataset).__name__}, num_workers={handle.num_workers}"
    return str(getattr(handle, "__qualname__", type(handle).__name__))
