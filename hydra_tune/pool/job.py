"""Jobs, their results, and the events that a driver of the pool listens to."""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hydra_tune.errors import ConfigError
from hydra_tune.task import TrainTask
from hydra_tune.train.explain import explained
from hydra_tune.train.trained import Trained

_LOGGER = logging.getLogger(__name__)

OVER = ("completed", "pruned", "cancelled", "failed")
"""States from which a job does not come back."""


def check_priority(priority: object) -> None:
    """Refuse what is no priority.

    Raises:
        ConfigError: not an int.
    """
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ConfigError(f"priority must be an int, not {priority!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job is.

    Attributes:
        epoch: the epoch it is in, from 0.
        epochs: epochs in all.
        step: optimizer steps done.
        num_steps: optimizer steps in all; None where the data does not tell before it has been seen.
        remaining_seconds: compute to come, as known now; None before the job has started.
        num_shards: shards its model is cut into; 0 before the job has started.
        units_run: shard units run.
        metrics: of the last report.
        history: the last reports, as in `Result.history`, up to 64 of them.
        compute_seconds: time that its units computed, copies left out.
        group_size: as in `Result`.
    """

    epoch: int
    epochs: int
    step: int
    num_steps: int | None
    remaining_seconds: float | None
    num_shards: int
    units_run: int
    metrics: dict[str, float]
    history: tuple[dict[str, float], ...] = ()
    compute_seconds: float = 0.0
    group_size: int = 1


@dataclass(slots=True, kw_only=True)
class Result(Trained):
    """The outcome of a job; see `Trained` for status, metrics, history, error, and the trained module.

    Attributes:
        num_shards: shards its model was cut into; 0 if it failed before that.
        activations: what was done with the activations of each shard but the last until its backward: "keep", "spill" or
            "recompute". The last shard's forward and backward are one unit.
        optimizer_placement: where its updates were made: "device" or "host"; None if it failed before that.
        split_batches: pieces that each of its batches was cut into, as the task says or, where that is "auto", as the pool has
            chosen; None if it failed before that.
        units_run: shard units run.
        units_saved: units it would still have run, had it not been pruned or cancelled; 0 where that is unknown.
        checkpoint: the folder of its checkpoints, if it has any.
        compute_seconds: time that its units computed, copies left out.
        faults: what has had it begin again, through no fault of its own; see docs/faults.md.
        group_size: the most trials that its group had when it was computed, itself counted; 1: it ran by itself. See
            docs/fusion.md.
    """

    num_shards: int = 0
    activations: tuple[str, ...] = ()
    optimizer_placement: str | None = None
    split_batches: int | None = None
    units_run: int = 0
    units_saved: int = 0
    checkpoint: Path | None = None
    compute_seconds: float = 0.0
    faults: tuple[str, ...] = ()
    group_size: int = 1

    @property
    def retries(self) -> int:
        """How often it was begun again."""
        return len(self.faults)


class Steering(Protocol):
    """What a job asks of the pool it is in."""

    def proceed(self, job: "Job") -> None:
        """Let a job that waits at a report go on."""

    def stop(self, job: "Job", status: str) -> None:
        """End a job as "pruned" or "cancelled"."""

    def pause(self, job: "Job", *, paused: bool) -> None:
        """Hold a job back, or let it go on."""

    def prioritize(self, job: "Job", priority: int) -> None:
        """Give a job another priority."""

    def progress(self, job: "Job") -> Progress:
        """How far a job is."""

    def save(self, job: "Job") -> "Future[Path]":
        """Save a job when it is between two steps."""


class Job:
    """A task in the pool. Made by `HydraExecutor.submit`; all methods may be called from any thread."""

    def __init__(self, *, key: str, name: str, task: TrainTask, pool: Steering, events: "EventStream | None") -> None:
        self.key = key
        self.name = name
        self.task = task
        self.events = events
        self._pool = pool
        self._state = "queued"
        self._paused = False
        self._result: Result | None = None
        self._over = threading.Event()

    @property
    def state(self) -> str:
        """One of "queued", "preparing", "running", "waiting" (for an answer to a report), and the states in `OVER`."""
        return self._state

    @property
    def reports_freely(self) -> bool:
        """Whether nobody answers its reports."""
        return self.events is None or not self.events.waits

    @property
    def paused(self) -> bool:
        """Whether `pause()` holds the job back."""
        return self._paused

    @property
    def progress(self) -> Progress:
        """How far the job is."""
        return self._pool.progress(self)

    def proceed(self) -> None:
        """Answer a report: go on. Does nothing if the job is not waiting."""
        self._pool.proceed(self)

    def prune(self) -> None:
        """Answer a report, or end the job at any other time: its units are dropped, its memory is free at once."""
        self._pool.stop(self, "pruned")

    def cancel(self) -> None:
        """End the job; like `prune`, but the result says so."""
        self._pool.stop(self, "cancelled")

    def pause(self) -> None:
        """Hold the job back until `unpause()`: it is not admitted, and gets no unit after the one that runs now.

        Its state stays where it is, on the host and on devices that do not need the room; its slot goes to another job.
        Does nothing if the job is over.
        """
        self._pool.pause(self, paused=True)

    def unpause(self) -> None:
        """Let a paused job go on, from where it was. Does nothing if it is not paused."""
        self._pool.pause(self, paused=False)

    def set_priority(self, priority: int) -> None:
        """Have the job go before, or after, others whenever there is a choice.

        Args:
            priority: those of a higher one are admitted, and get devices, before all others; jobs begin with what
                `submit` was given, 0 by default.

        Raises:
            ConfigError: not an int.
        """
        check_priority(priority)
        self._pool.prioritize(self, priority)

    def checkpoint(self, timeout: float | None = None) -> Path:
        """Save the job as it is when its present optimizer step is over, and wait until that is on disk.

        A job that waits for an answer to a report is saved as it is now. One that is queued is saved after its first step. Of
        one that is over the folder of what it has saved is returned.

        Args:
            timeout: seconds to wait; None for ever.

        Returns:
            The folder of the job's checkpoints, for `submit(..., resume_from=...)`; what it had two checkpoints ago is gone.

        Raises:
            CheckpointError: the pool has no `checkpoint_dir`; the job is paused within a step, or ends before it is saved; or
                it has something that no checkpoint can hold.
            FileError: the checkpoint cannot be written.
            TimeoutError: it is not there by then.
        """
        return self._pool.save(self).result(timeout)

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the job's end.

        Args:
            timeout: seconds to wait; None for ever.

        Returns:
            The result; a failed job's has the error, and nothing is raised for it here.

        Raises:
            TimeoutError: the job is not over by then.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"job {self.name!r} is still {self._state} after {timeout} s")
        assert self._result is not None
        return self._result

    def __repr__(self) -> str:
        return f"<Job {self.name!r} {self._state}>"

    # What follows is the pool's side.

    def enter(self, state: str) -> None:
        """Change the state."""
        self._state = state

    def hold(self, *, paused: bool) -> None:
        """The job is held back now, or no longer."""
        self._paused = paused

    def end(self, result: Result) -> None:
        """The job is over; where no driver is told of its failure, the log is."""
        result.error = explained(result.error)
        if result.status == "failed" and self.events is None:
            _LOGGER.error("trial %r failed", self.name, exc_info=result.error)
        self._state = result.status
        self._paused = False
        self._result = result
        self._over.set()


@dataclass(frozen=True, slots=True)
class Reported:
    """A job has reported and waits for `proceed()`, `prune()` or `cancel()`.

    Attributes:
        job: the job.
        step: the epoch, from 0, or with `report_every=n` the optimizer steps done.
        metrics: `train_loss` and `val_<name>`.
    """

    job: Job
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Finished:
    """A job is over: completed, pruned or cancelled."""

    job: Job
    result: Result


@dataclass(frozen=True, slots=True)
class Failed:
    """A job has failed; `result.error` says why."""

    job: Job
    result: Result


PoolEvent = Reported | Finished | Failed


class EventStream:
    """Events of the jobs submitted with it, in order. A job with a stream waits at each report until it is answered."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[PoolEvent] = queue.SimpleQueue()
        self.put: Callable[[PoolEvent], None] = self._queue.put

    @property
    def waits(self) -> bool:
        """Whether its jobs wait at their reports."""
        return True

    def get(self, timeout: float | None = None) -> PoolEvent | None:
        """The next event.

        Args:
            timeout: seconds to wait; None for ever.

        Returns:
            The event, or None if none came in time.
        """
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return None
