"""Suspension of jobs for a later session: each begun job is saved between two steps, if possible, and then cancelled.

`HydraExecutor.suspend` (`executor.py`) suspends jobs here when a driver asks, and when Ctrl-C or SIGTERM ends `run` or
the executor's `with` block. With an isolated pool, `isolation/child.py` calls `HydraExecutor.suspend` in the pool's process.

Note: hanging jobs. A job that hangs, in its data or its model, must not keep other jobs from being saved. So all jobs
are asked first. A job that is saved, or cannot be saved, is cancelled at the next look, and leaves its device to the rest.
The caller's thread waits here, and must not hold the pool's lock. The module must not know the format of checkpoints.
"""

import contextlib
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, Protocol

from hydra_tune.errors import CheckpointError
from hydra_tune.interrupts import let_interrupts_through
from hydra_tune.pool.job import OVER, Job

_POLL_SECONDS = 0.05
_NOT_BEGUN = ("queued", "preparing")


class JobSaver(Protocol):
    """Owner of jobs that can be saved: a `Pool` or a `FusedPool`."""

    def ask_to_save(self, job: Job) -> "Future[Path]":
        """Request a checkpoint at the end of the job's present step.

        Raises:
            CheckpointError: the job cannot be saved.
        """

    def answer(self, job: Job, waiting_for: "Future[Any] | None" = None) -> None:
        """Serve a pending request now, if the job stands between two steps.

        Raises:
            CheckpointError: the job is paused within a step, or waits at a report where the job cannot be saved.
        """


def suspend(pool: JobSaver, jobs: Iterable[Job], seconds: float) -> None:
    """Save and cancel jobs, without waiting for units that still run at the end.

    Args:
        pool: the pool of the jobs, with a folder for checkpoints.
        jobs: any jobs; jobs that are over stay as they are, and jobs that have not begun have nothing new to save.
        seconds: the longest wait; a job not saved by then is cancelled, and keeps its earlier checkpoints.

    Raises:
        KeyboardInterrupt, Terminated: Ctrl-C or SIGTERM during the wait; all jobs are cancelled, as after any other error.
    """
    deadline = time.monotonic() + seconds
    jobs = [job for job in jobs if job.state not in OVER]
    pending_saves: dict[Job, Future[Path]] = {}
    try:
        for job in jobs:
            if job.state in _NOT_BEGUN:
                job.cancel()
                continue
            # Refused where the job has just ended; the others are to be saved all the same.
            with contextlib.suppress(CheckpointError):
                pending_saves[job] = pool.ask_to_save(job)
        while pending_saves and time.monotonic() < deadline:
            for job in [job for job, future in pending_saves.items() if _is_settled(pool, job, future)]:
                job.cancel()
                del pending_saves[job]
            if pending_saves:
                # Ctrl-C has to end the wait, even where a caller holds interrupts back.
                with let_interrupts_through():
                    wait(pending_saves.values(), timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
    finally:
        # Also after Ctrl-C or an error: no job may go on, saved or not. Cancelling twice has no effect.
        for job in jobs:
            job.cancel()


def _is_settled(pool: JobSaver, job: Job, future: "Future[Path]") -> bool:
    """Return whether a job is saved, or cannot be saved any more."""
    if not future.done() and job.state not in OVER:
        try:
            pool.answer(job)
        except (
            CheckpointError
        ):  # the job is paused within a step: the open request saves the job at the end of the step
            job.unpause()
    return future.done() or job.state in OVER
