"""`SweepMonitor`: a `SweepView` of a pool's jobs, for drivers in Python.

`shown` (`live.py`) takes a snapshot each time the display is drawn; `HydraExecutor` (`hydra_tune/executor.py`) adds the
pool's jobs at the start of `HydraExecutor.live`, and each new job after.

Note: lock. A monitor reads jobs under its own lock, which comes before the pool's lock, and calls `ended` after releasing
the lock. The module must change nothing in the pool.
"""

import threading
import time
from collections.abc import Callable, Iterable

from hydra_tune.observe.live.snapshot import Goal, SweepView, TrialView
from hydra_tune.pool.devices.utilization import UtilizationMeter
from hydra_tune.pool.job import OVER, Job
from hydra_tune.pool.stats import PoolStats
from hydra_tune.pool.views.eta import MakespanForecaster
from hydra_tune.pool.views.job_views import with_outlook, with_progress, with_result


class SweepMonitor:
    """Remembers the outcomes of jobs; a job is let go, with its model, at the first snapshot after its end. Thread-safe.

    Args:
        name: title of the display.
        goal: direction in which the first metric of the tasks improves.
        ended: called with each job found to be over.
    """

    def __init__(self, name: str, goal: Goal, ended: Callable[[TrialView, str], None]) -> None:
        self._name, self._goal, self._ended = name, goal, ended
        self._metric = "metric"
        self._jobs: dict[int, Job] = {}
        self._keys: set[str] = set()
        self._views: dict[int, TrialView] = {}
        self._meter, self._forecaster = UtilizationMeter(), MakespanForecaster()
        self._lock = threading.Lock()
        self._started_seconds = time.monotonic()

    def add(self, jobs: Iterable[Job]) -> None:
        """Show further jobs from now on."""
        with self._lock:
            for job in jobs:
                if job.key in self._keys:  # added twice: submitted while the earlier jobs are listed
                    continue
                self._keys.add(job.key)
                number = len(self._views)
                self._metric = job.task.metrics[0]
                self._jobs[number] = job
                self._views[number] = TrialView(number=number, state=job.state, name=job.name, epochs=job.task.epochs)

    def snapshot(self, stats: PoolStats, *, is_over: bool = False) -> SweepView:
        """Return the present view of the jobs."""
        with self._lock:
            ended_views = [self._look(number, job) for number, job in list(self._jobs.items())]
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
        # Without the lock, because `ended` is the caller's code.
        for trial in ended_views:
            if trial is not None:
                self._ended(trial, metric)
        return view

    def _look(self, number: int, job: Job) -> TrialView | None:
        """Update the view of a job; return the view if the job is over."""
        if job.state not in OVER:
            self._views[number] = with_progress(self._views[number], job, state=job.state)
            return None
        self._views[number] = view = with_result(self._views[number], job, job.result())
        # The job would keep its model alive; the view is plain values.
        del self._jobs[number]
        return view
