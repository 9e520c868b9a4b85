"""Jobs that are to go on another time: saved as soon as their present step is over, and ended.

Note: who is waited for. A job has its steps to itself; one that hangs, in its data or its model, is not to keep the others from
being saved. So all are asked first, and whoever has answered is ended at once, which leaves the devices to the others.
"""

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


class Saving(Protocol):
    """Whoever has jobs that can be saved; see `Pool`."""

    def ask_to_save(self, job: Job) -> "Future[Path]":
        """Have a job saved when it comes to the end of a step."""

    def answer(self, job: Job, waiting_for: "Future[Any] | None" = None) -> None:
        """Save a job now, as was asked for, if it is between two steps."""


def suspend(pool: Saving, jobs: Iterable[Job], seconds: float) -> None:
    """Save jobs and cancel them; does not wait for the units that run then.

    Args:
        pool: has the jobs, and a folder for checkpoints.
        jobs: any; those that are over stay as they are, and of those that have not begun there is nothing new to save.
        seconds: how long to wait; who is not saved by then is cancelled, and has the checkpoints it had.

    Raises:
        KeyboardInterrupt: Ctrl-C while this waits; all are cancelled, as with any other error.
    """
    deadline = time.monotonic() + seconds
    jobs = [job for job in jobs if job.state not in OVER]
    asked: dict[Job, Future[Path]] = {}
    try:
        for job in jobs:
            if job.state not in _NOT_BEGUN:
                asked[job] = pool.ask_to_save(job)
            else:
                job.cancel()
        while asked and time.monotonic() < deadline:
            for job in [job for job, future in asked.items() if _is_settled(pool, job, future)]:
                job.cancel()
                del asked[job]
            if asked:
                with let_interrupts_through():
                    wait(asked.values(), timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
    finally:
        for job in jobs:
            job.cancel()


def _is_settled(pool: Saving, job: Job, future: "Future[Path]") -> bool:
    """Whether a job is saved, or will not be."""
    if not future.done() and job.state not in OVER:
        try:
            pool.answer(job)
        except CheckpointError:  # paused within a step
            return True
    return future.done() or job.state in OVER
