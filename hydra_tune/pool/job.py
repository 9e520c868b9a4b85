"""Jobs, results, and the events for a driver of the pool.

A driver submits a task, holds the `Job`, and either waits for `Job.result` or reads `Reported`, `Finished` and `Failed`
events from an `EventStream`. `Pool` (`pool.py`), `FusedPool` (`fusion/fused_pool.py`) and `IsolatedPoolClient`
(`isolation/parent.py`) make a `Job` at each submission. Events come from `JobDispatcher` (`runtime/dispatcher.py`), with
fusion from `fusion/live_group.py` and `fusion/job_table.py`, and from an isolated pool through `IsolatedPoolClient`.
Programs import `Job`, `Result`, `EventStream` and the events from `hydra_tune`.

Drivers with an `EventStream` are `OptimizeDriver` (`integrations/hydra_tune_optuna/search/driver.py`), `LeasedTrialTable`
(`integrations/hydra_tune_ray/node/trial_leases.py`) and the process of an isolated pool (`isolation/child.py`).

Note: threads. Pools call `EventStream.put` on any thread, a driver's included: for a report always, and when a pool breaks
down perhaps, under the pool's lock. So a replacement of `put` must not wait, and must not call the pool at a report.

Note: `Job.result` and `EventStream.get` leave the capture gate while they wait, so a trial's own code that waits for
another pool does not stop captures.
"""

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hydra_tune.errors import ConfigError, HydraTuneError
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.task import TrainTask
from hydra_tune.train.explain import explained
from hydra_tune.train.trained import TrainingOutcome

_LOGGER = logging.getLogger(__name__)

OVER = ("completed", "pruned", "cancelled", "failed")
"""Final states of a job."""


def check_priority(priority: object) -> None:
    """Refuse an invalid priority.

    Raises:
        ConfigError: not an int.
    """
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ConfigError(f"priority must be an int, not {priority!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """Progress of a job.

    Attributes:
        epoch: the present epoch, from 0.
        epochs: total number of epochs.
        step: optimizer steps done.
        num_steps: total number of optimizer steps; None where the data has no known length yet.
        remaining_seconds: compute still to come in seconds, as known now; None before the job has started.
        num_shards: number of the model's shards; 0 before the job has started.
        units_run: shard units run.
        metrics: metrics of the last report.
        history: the last reports, as in `Result.history`, at most 64.
        compute_seconds: compute time of the job's units in seconds, copies excluded; a burst of the user's own code includes
            draws of batches.
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
class Result(TrainingOutcome):
    """The outcome of a job; see `TrainingOutcome` for status, metrics, history, error, and the trained module.

    Attributes:
        num_shards: number of the model's shards; 0 if the job failed before partitioning.
        one_shard_bytes: device memory in bytes that the training would take in a single shard, counted and not run. A
            plain loop takes no less. 0 where not counted: for a job that ran its own code, or in a fused group.
        activations: treatment of each shard's activations until the shard's backward, without the last shard: "keep",
            "spill" or "recompute". The last shard's forward and backward are a single unit.
        optimizer_placement: where updates were computed: "device" or "host"; None if the job failed before the choice.
        split_batches: number of pieces of each batch, from the task or, with "auto", chosen by the pool; None if the
            job failed before the choice.
        units_run: shard units run.
        units_saved: units that a pruned or cancelled job would still have run; 0 where unknown.
        checkpoint: folder of the job's checkpoints, if there are any.
        compute_seconds: compute time of the job's units in seconds, copies excluded; a burst of the user's own code includes
            draws of batches.
        faults: faults of the system after which the job began again; see docs/howto/faults.md.
        group_size: the largest number of members in the job's fused group, the job included; 1: the job ran alone. See
            docs/howto/small-models.md.
    """

    num_shards: int = 0
    one_shard_bytes: int = 0
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
        """How often the job began again."""
        return len(self.faults)


class JobController(Protocol):
    """Requests of a job to the job's pool: a `Pool`, a `FusedPool` or an `IsolatedPoolClient`."""

    def proceed(self, job: "Job") -> None:
        """Resume a job waiting at a report."""

    def stop(self, job: "Job", status: str) -> None:
        """End a job as "pruned" or "cancelled"."""

    def pause(self, job: "Job", *, paused: bool) -> None:
        """Pause or unpause a job."""

    def prioritize(self, job: "Job", priority: int) -> None:
        """Change a job's priority."""

    def progress(self, job: "Job") -> JobProgress:
        """Progress of a job."""

    def save(self, job: "Job", until: float = math.inf) -> "Future[Path]":
        """Save a job between two steps; the call itself returns by `until`, in seconds of `time.monotonic`."""

    def refuse_own_code(self, what: str) -> None:
        """Refuse a call by a trial's own code, on a thread of the pool, that would wait for the pool."""


class Job:
    """A task in the pool, made by `HydraExecutor.submit`; a driver may call its methods from any thread."""

    def __init__(
        self, *, key: str, name: str, task: TrainTask, pool: JobController, events: "EventStream | None"
    ) -> None:
        self.key = key
        self.name = name
        self.task = task
        self.events = events
        self._pool = pool
        self._state = "queued"
        self._paused = False
        self._result: Result | None = None
        self._over = threading.Event()
        self._process = os.getpid()

    @property
    def state(self) -> str:
        """One of "queued", "preparing", "running", "waiting" (for an answer), "completed", "pruned", "cancelled", "failed"."""
        return self._state

    @property
    def reports_freely(self) -> bool:
        """Whether the job's reports need no answer."""
        return self.events is None or not self.events.waits

    @property
    def paused(self) -> bool:
        """Whether `pause()` holds the job back."""
        return self._paused

    @property
    def progress(self) -> JobProgress:
        """Progress of the job."""
        return self._pool.progress(self)

    def proceed(self) -> None:
        """Answer a report with "go on"; no effect if the job is not waiting."""
        self._pool.proceed(self)

    def prune(self) -> None:
        """End the job as pruned, at a report or at any other time; no effect if the job is over.

        The remaining units are dropped, and the job's memory is free as soon as a running unit has ended.
        """
        self._pool.stop(self, "pruned")

    def cancel(self) -> None:
        """End the job like `prune`, with the status "cancelled"."""
        self._pool.stop(self, "cancelled")

    def pause(self) -> None:
        """Hold the job back until `unpause()`: no admission, and no further unit after the running unit.

        The job's state stays in place: on the host, and on a device until other jobs need the room there. The job's slot
        goes to another job. No effect if the job is over.
        """
        self._pool.pause(self, paused=True)

    def unpause(self) -> None:
        """Let a paused job continue; no effect if the job is not paused."""
        self._pool.pause(self, paused=False)

    def set_priority(self, priority: int) -> None:
        """Change the job's priority over other jobs.

        Args:
            priority: jobs of a higher priority are admitted, and get devices, before all others. The initial priority
                comes from `submit`, 0 by default.

        Raises:
            ConfigError: not an int.
        """
        check_priority(priority)
        self._pool.prioritize(self, priority)

    @GATE.left()  # as in `result`
    def checkpoint(self, timeout: float | None = None) -> Path:
        """Save the job after the present optimizer step, and wait until the checkpoint is on disk.

        A job waiting for an answer to a report is saved as is. A queued job is saved after the first step. For a job
        that is over, the call returns the folder of the existing checkpoints.

        Args:
            timeout: seconds to wait; None for ever.

        Returns:
            The folder of the job's checkpoints, for `submit(..., resume_from=...)`; only the two latest checkpoints are
            kept, and of a completed or pruned job only the latest.

        Raises:
            CheckpointError: the pool has no `checkpoint_dir`; the job is paused within a step, waits at a report within a
                pass that can be saved only at its end, or ends before the save;
                or no checkpoint can hold some object of the job.
            FileError: the checkpoint cannot be written.
            HydraTuneError: as of `result`.
            TimeoutError: the checkpoint is not on disk in time.
        """
        self._check_process()
        until = math.inf if timeout is None else time.monotonic() + timeout
        future = self._pool.save(self, until)
        return future.result(None if timeout is None else max(0.0, until - time.monotonic()))

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the job's end.

        Args:
            timeout: seconds to wait; None for ever.

        Returns:
            The result; a failed job's result carries the error, and the call does not raise the error.

        Raises:
            TimeoutError: the job is not over in time.
            HydraTuneError: a trial's own code waits for a job of the same pool, or a forked process for one of its parent.
        """
        if self._state not in OVER:
            self._check_process()
            self._pool.refuse_own_code("run() or result")
        with GATE.left():  # own code of another pool's trial: the job may have to be captured meanwhile
            is_over = self._over.wait(timeout)
        if not is_over:
            raise TimeoutError(f"job {self.name!r} is still {self._state} after {timeout} s")
        assert self._result is not None
        return self._result

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise HydraTuneError(
                f"job {self.name!r} trains in process {self._process}, and process {os.getpid()} was forked from that process "
                "without the pool's threads, and would wait for ever; wait for the job where it was submitted"
            )

    def __repr__(self) -> str:
        return f"<Job {self.name!r} {self._state}>"

    # The methods below are for pools, which call `end` exactly once; drivers call none of these methods.

    def enter(self, state: str) -> None:
        """Change the state."""
        self._state = state

    def hold(self, *, paused: bool) -> None:
        """Mark the job as paused or unpaused."""
        self._paused = paused

    def end(self, result: Result) -> None:
        """Mark the job as over; without a driver to notify, a failure goes to the log."""
        result.error = explained(result.error)
        if result.status == "failed" and self.events is None:
            _LOGGER.error("trial %r failed", self.name, exc_info=result.error)
        self._state = result.status
        self._paused = False
        self._result = result
        # Set last: `result()` on another thread reads `_result` and `_state` without a lock once the event is set.
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
    """Ordered events of the jobs submitted with the stream; each such job waits at every report for an answer, if `waits`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[PoolEvent] = queue.SimpleQueue()
        self.put: Callable[[PoolEvent], None] = self._queue.put

    @property
    def waits(self) -> bool:
        """Whether the stream's jobs wait at reports."""
        return True

    def get(self, timeout: float | None = None) -> PoolEvent | None:
        """Return the next event.

        Args:
            timeout: seconds to wait; None for ever.

        Returns:
            The event, or None if no event came in time.
        """
        try:
            with GATE.left():  # as in `Job.result`
                return self._queue.get(timeout=timeout)
        except queue.Empty:
            return None
