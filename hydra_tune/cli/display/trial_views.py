"""Plain views of a trial: live views while its job runs, and a final view.

`SweepProgressTracker` (`board.py`) makes live views at each snapshot, and the last view of a trial when the tuner reports
that the trial has ended or is left to a later run. The tracker calls all functions here under its lock. The module must not
run anything.
"""

from dataclasses import dataclass, replace

from hydra_tune.cli.sweep_file.request import TrialRecord
from hydra_tune.observe.live.snapshot import ENDED, LEFT, TrialView
from hydra_tune.pool.job import Job, Result
from hydra_tune.pool.views.job_views import one_line, with_progress, with_result
from hydra_tune.task import TrainTask


@dataclass(slots=True, kw_only=True)
class TrackedTrial:
    """A trial.

    Args:
        view: the values known without the job.
        task: the built task, until the pool has taken it.
        job: the job, until the trial ends.
        error: error of building the task.
    """

    view: TrialView
    task: TrainTask | None = None
    job: Job | None = None
    error: BaseException | None = None


def live_view(entry: TrackedTrial) -> TrialView:
    """Return the present view of a trial."""
    job = entry.job
    if job is None:
        return entry.view
    # The pool may have ended the job before the tuner knows: for the sweep the trial is not over yet.
    return with_progress(entry.view, job, state="waiting" if job.state in ENDED else job.state)


def left_view(entry: TrackedTrial) -> TrialView:
    """View of a trial left to a later run."""
    job = entry.job
    if job is None:
        return replace(entry.view, state=LEFT)
    if job.state not in ENDED:
        return with_progress(entry.view, job, state=LEFT)
    # The job was cancelled to be saved, which is no error of the trial.
    return replace(with_result(entry.view, job, job.result(timeout=0)), state=LEFT, error=None)


def final_view(entry: TrackedTrial, record: TrialRecord, *, stopping: bool) -> tuple[TrialView, BaseException | None]:
    """Return the final view of a trial, and the trial's error if the trial failed.

    `stopping` tells whether a signal has asked for the end before, perhaps while the task was being built.
    """
    result = entry.job.result(timeout=0) if entry.job is not None and entry.job.state in ENDED else None
    error = None
    if record.state == "failed":
        error = (result.error if result is not None else None) or entry.error
    # A tuner has no state for a cancelled trial, and records it as failed.
    cancelled = record.state == "failed" and error is None and (stopping or _is_cancelled(result))
    last = result.history[-1] if result is not None and result.history else {}
    view = replace(
        entry.view,
        state="cancelled" if cancelled else record.state,
        params=dict(record.params) or entry.view.params,
        value=record.value,
        is_feasible=record.is_feasible,
        epoch=int(last["epoch"]) + 1 if last else entry.view.epoch,
        num_shards=result.num_shards if result is not None else 0,
        one_shard_bytes=result.one_shard_bytes if result is not None else 0,
        optimizer_placement=result.optimizer_placement if result is not None else None,
        group_size=result.group_size if result is not None else 1,
        units_run=result.units_run if result is not None else 0,
        units_saved=result.units_saved if result is not None else 0,
        compute_seconds=result.compute_seconds if result is not None else 0.0,
        error=None if error is None else one_line(error),
    )
    return view, error


def _is_cancelled(result: Result | None) -> bool:
    return result is not None and result.status == "cancelled"
