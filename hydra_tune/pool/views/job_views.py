"""Plain views of jobs for displays: the conversion from progress and results to `TrialView` and `SweepView`.

`SweepMonitor` (`live_snapshot.py`) makes the views of a pool's jobs at each snapshot; `cli/display/trial_views.py` and
`cli/display/board.py` do so for `hydra-tune sweep`. A view must hold no job, task or tensor. `with_progress` takes the
pool's lock for a moment (`Job.progress`).
"""

from collections.abc import Sequence
from dataclasses import replace

from hydra_tune.errors import HydraTuneError
from hydra_tune.observe.live.snapshot import SweepView, TrialView
from hydra_tune.pool.job import Job, Result
from hydra_tune.pool.stats import PoolStats
from hydra_tune.pool.views.eta import MakespanForecaster, TrialComputeTime

_BEFORE_TRAINING = frozenset({"queued", "preparing"})


def with_progress(view: TrialView, job: Job, *, state: str) -> TrialView:
    """View of a trial with a live job, as of now; `view` has the constant fields of the trial."""
    progress, metric = job.progress, job.task.metrics[0]
    value = progress.metrics.get(metric)
    return replace(
        view,
        state=state,
        value=None if value is None else float(value),
        values=_values(progress.history, metric),
        # Displays count epochs from 1; 0 stands for a trial that has not begun.
        epoch=0 if state in _BEFORE_TRAINING else progress.epoch + 1,
        epochs=progress.epochs,
        step=progress.step,
        num_steps=progress.num_steps,
        remaining_seconds=progress.remaining_seconds,
        num_shards=progress.num_shards,
        units_run=progress.units_run,
        compute_seconds=progress.compute_seconds,
        group_size=progress.group_size,
    )


def with_result(view: TrialView, job: Job, result: Result) -> TrialView:
    """View of a trial whose job is over."""
    metric = job.task.metrics[0]
    last_report = result.history[-1] if result.history else {}
    return replace(
        view,
        state=result.status,
        value=float(last_report[metric]) if metric in last_report else None,
        values=_values(tuple(result.history), metric),
        epoch=int(last_report["epoch"]) + 1 if last_report else 0,
        epochs=job.task.epochs,
        num_shards=result.num_shards,
        one_shard_bytes=result.one_shard_bytes,
        units_run=result.units_run,
        units_saved=result.units_saved,
        remaining_seconds=0.0,
        compute_seconds=result.compute_seconds,
        group_size=result.group_size,
        error=None if result.error is None else one_line(result.error),
    )


def with_outlook(
    view: SweepView, forecaster: MakespanForecaster, *, num_unstarted: int | None, stats: PoolStats
) -> SweepView:
    """View of a sweep with the forecast makespan and a lower bound of the makespan, as far as both are known.

    `num_unstarted` counts the trials still to come, beside the trials in `view`; None: unknown.
    """
    outlook = forecaster.outlook(_works(view), num_unstarted, stats)
    if outlook is None:
        return view
    return replace(
        view, makespan_seconds=view.elapsed_seconds + outlook.left_seconds, bound_seconds=outlook.bound_seconds
    )


def _works(view: SweepView) -> list[TrialComputeTime]:
    """Compute times of the trials in the present run; trials of earlier runs are excluded."""
    return [
        TrialComputeTime(
            done_seconds=trial.compute_seconds,
            left_seconds=trial.remaining_seconds,
            is_over=trial.is_over,
        )
        for trial in view.trials
        if not trial.earlier
    ]


def _values(history: Sequence[dict[str, float]], metric: str) -> tuple[float, ...]:
    return tuple(float(report[metric]) for report in history if metric in report)


def one_line(error: BaseException) -> str:
    """Format an error as `TypeError: what (file.py:12)`; the package's own errors omit the place."""
    # The innermost frame counts: the outer ones are the pool's.
    trace = None if isinstance(error, HydraTuneError) else error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if trace is None:
        return text
    file = trace.tb_frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]
    return f"{text} ({file}:{trace.tb_lineno})"
