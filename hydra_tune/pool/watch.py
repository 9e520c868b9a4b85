"""`Watch`: the jobs of a pool as a `SweepView`, for whoever drives the pool from Python."""

import threading
import time
from collections.abc import Callable, Iterable

from hydra_tune.observe.snapshot import Goal, SweepView, TrialView
from hydra_tune.pool.job import OVER, Job
from hydra_tune.pool.job_views import with_outlook, with_progress, with_result
from hydra_tune.pool.meter import Meter
from hydra_tune.pool.outlook import Forecaster
from hydra_tune.pool.stats import PoolStats


class Watch:
    """Remembers what became of jobs; their models are let go as soon as they are over and have been looked at.

    Args:
        name: what the whole is called.
        goal: which way the first metric of the tasks is better.
        ended: is called with each job that was found to be over.
    """

    def __init__(self, name: str, goal: Goal, ended: Callable[[TrialView, str], None]) -> None:
        self._name, self._goal, self._ended = name, goal, ended
        self._metric = "metric"
        self._jobs: dict[int, Job] = {}
        self._keys: set[str] = set()
        self._views: dict[int, TrialView] = {}
        self._meter, self._forecaster = Meter(), Forecaster()
        self._lock = threading.Lock()
        self._started_seconds = time.monotonic()

    def add(self, jobs: Iterable[Job]) -> None:
        """Jobs that are to be shown from now on."""
        with self._lock:
            for job in jobs:
                if job.key in self._keys:  # one that is submitted while those of before are listed
                    continue
                self._keys.add(job.key)
                number = len(self._views)
                self._metric = job.task.metrics[0]
                self._jobs[number] = job
                self._views[number] = TrialView(number=number, state=job.state, name=job.name, epochs=job.task.epochs)

    def snapshot(self, stats: PoolStats, *, is_over: bool = False) -> SweepView:
        """The jobs as they are now.

        Args:
            stats: the pool's figures.
            is_over: nobody watches any longer.
        """
        with self._lock:
            ended = [self._look(number, job) for number, job in list(self._jobs.items())]
            view = SweepView(
                name=self._name,
                metric=self._metric,
                goal=self._goal,
                status="completed" if is_over else "running",
                trials=tuple(self._views.values()),
                devices=self._meter.overall(stats) if is_over else self._meter.lately(stats),
                elapsed_seconds=time.monotonic() - self._started_seconds,
                units_run=stats.units_run,
                units_saved=stats.units_saved,
                scheduler_seconds=stats.scheduler_seconds,
            )
            view = with_outlook(view, self._forecaster, num_unstarted=0, stats=stats)
            metric = self._metric
        for trial in ended:
            if trial is not None:
                self._ended(trial, metric)
        return view

    def _look(self, number: int, job: Job) -> TrialView | None:
        """Take over what is known of a job; returns it if the job is over."""
        if job.state not in OVER:
            self._views[number] = with_progress(self._views[number], job, state=job.state)
            return None
        self._views[number] = found = with_result(self._views[number], job, job.result())
        del self._jobs[number]
        return found
