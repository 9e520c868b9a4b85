"""`SweepProgressTracker`: the state of a running sweep, and its snapshots.

The tuner's thread reports events, and takes the first snapshot of a live view and the last snapshot of all; the drawing
thread takes all others. An ended trial leaves only plain values, because its job holds a trained model that must not
outlive the trial. The lock guards the trials, and no line is written under the lock, because writing may block. `stop` runs
in a signal handler, and so takes no lock. `cli/run/sweep_run.py` and `cli/run/cluster.py` make the board before a sweep,
hand the board to the tuner (`integrations/hydra_tune_optuna/sweep.py`, `integrations/hydra_tune_ray/sweep.py`) as the
observer, tell the board the end, and take the last snapshot for the summary. The module must not run anything.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra_tune.cli.display.next_step import how_to_go_on, how_to_run_more, masked
from hydra_tune.cli.display.trial_views import TrackedTrial, final_view, left_view, live_view
from hydra_tune.cli.sweep_file.request import TrialRecord
from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.observe.live.snapshot import Status, SweepView, TrialView
from hydra_tune.observe.live.summary import trial_line
from hydra_tune.pool.devices.utilization import UtilizationMeter
from hydra_tune.pool.job import Job
from hydra_tune.pool.stats import PoolStats
from hydra_tune.pool.views.eta import MakespanForecaster
from hydra_tune.pool.views.job_views import one_line, with_outlook
from hydra_tune.task import TrainTask

_FIRST_FAILURES = 5
"""Number of failed trials of a run, with none completed or pruned, after which the sweep counts as wrong and ends."""


class SweepProgressTracker:
    """The state of one sweep; a `SweepObserver`.

    Args:
        log: receives one line for each trial that has ended or is left, and for each note or warning about the sweep.
        event_log: the file of the event log; None: no log.
        warnings: warnings about the sweep itself, already shown.
        command: the command that goes on with the sweep; None where not known.

    Attributes:
        last_error: error of the last failed trial, or of the sweep's end.
        on_settled: called when the process may end at any moment.
        on_noted: receives facts about the study and its trials, for the event log.
    """

    def __init__(
        self,
        spec: SweepSpec,
        log: Callable[[str], None],
        event_log: Path | None = None,
        warnings: Iterable[str] = (),
        command: str | None = None,
    ) -> None:
        self.last_error: BaseException | None = None
        self.on_settled: Callable[[], None] | None = None
        self.on_noted: Callable[..., None] | None = None
        self._spec = spec
        self._log = log
        self._event_log = event_log
        self._command = command
        self._status: Status = "running"
        self._error: str | None = None
        self._study: str | None = None
        self._num_planned: int | None = None
        self._entries: dict[int, TrackedTrial] = {}
        self._warnings = list(warnings)
        self._weights: dict[int, str] = {}
        self._meter, self._forecaster = UtilizationMeter(), MakespanForecaster()
        self._lock = threading.Lock()
        self._started_seconds = time.monotonic()
        self._ended_seconds: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the study is open."""
        return self._study is not None

    def opened(self, study: str, earlier: tuple[TrialRecord, ...], num_planned: int | None) -> None:
        """Note the open study with its earlier trials."""
        with self._lock:
            self._study = study
            self._num_planned = num_planned
            for record in earlier:
                view = TrialView(number=record.number, state=record.state, earlier=True)
                view = replace(view, params=dict(record.params), value=record.value, is_feasible=record.is_feasible)
                self._entries[record.number] = TrackedTrial(view=view)
        spec = self._spec
        self._note(
            what="opened",
            name=spec.name,
            study=study,
            is_named=spec.study is not None,
            storage=None if spec.storage is None else masked(spec.storage),
            checkpoint_dir=spec.checkpoint_dir,
            metric=spec.metric,
            goal=spec.goal,
            planned=num_planned,
            file=spec.file,
            folder=str(Path.cwd()),
            command=self._command,
        )

    def noted(self, text: str) -> None:
        """Show a line about the sweep itself."""
        self._log(text)

    def warned(self, text: str) -> None:
        """Show a warning about the sweep itself, at once and in the summary."""
        with self._lock:
            self._warnings.append(text)
        # Outside the lock: writing a line may block.
        self._log(f"warning: {text}")

    def kept(self, weights: Mapping[int, Path]) -> None:
        """Note the kept weights, at the end of the sweep."""
        with self._lock:
            self._weights = {number: str(path) for number, path in weights.items()}

    def asked(self, number: int) -> None:
        """Note a new trial, before its task is built."""
        with self._lock:
            self._entries[number] = TrackedTrial(view=TrialView(number=number, state="preparing"))

    def built(self, number: int, params: Mapping[str, Any], task: TrainTask) -> None:
        """Note a trial's task, before the submission."""
        with self._lock:
            entry = self._entries[number]
            entry.view = replace(entry.view, state="queued", params=dict(params), epoch=0, epochs=task.epochs)
            entry.task = task
        epochs = task.epochs if task.report_every == "epoch" else None
        self._note(what="built", number=number, params=dict(params), epochs=epochs)

    def submitted(self, job: Job) -> None:
        """Note the job of a task; the task object itself identifies the trial."""
        with self._lock:
            # Identity, not equality: two trials may have equal tasks.
            for entry in self._entries.values():
                if entry.task is job.task:
                    entry.job, entry.task = job, None

    def broke(self, number: int, error: Exception) -> None:
        """Note the error of a failed build."""
        with self._lock:
            self._entries[number].error = error

    def finished(self, record: TrialRecord) -> bool:
        """Note the end of a trial. Return True to ask for no more trials, because the first of this run have all failed."""
        with self._lock:
            view, error = final_view(self._entries[record.number], record, stopping=self._status == "stopping")
            # A new entry without the job: the job's trained model can be freed.
            self._entries[record.number] = TrackedTrial(view=view)
            self.last_error = error or self.last_error
            # Trials of earlier runs do not count: they may have failed for a reason that is mended now.
            states = [entry.view.state for entry in self._entries.values() if not entry.view.earlier]
            is_hopeless = states.count("failed") >= _FIRST_FAILURES and not {"completed", "pruned"} & set(states)
            if is_hopeless:
                self._error = f"the first {_FIRST_FAILURES} trials have all failed"
        self._log(trial_line(view, self._spec.metric))
        self._note_end(view)
        return is_hopeless

    def left(self, number: int) -> None:
        """Note a trial left to a later run."""
        with self._lock:
            view = left_view(self._entries[number])
            self._entries[number] = TrackedTrial(view=view)
        self._log(trial_line(view, self._spec.metric))
        self._note_end(view)

    def settled(self) -> None:
        """Pass on that the process may end at any moment."""
        if self.on_settled is not None:
            self.on_settled()

    def stop(self) -> None:
        """Note a signal's request for the end; takes no lock, for the signal may interrupt a holder of the lock."""
        self._status = "stopping"

    def end(self, *, interrupted: bool = False, error: Exception | None = None) -> None:
        """Note the end of the sweep.

        Args:
            interrupted: whether a signal ended the sweep.
            error: another reason for an early end, not a trial's error.
        """
        if error is not None:
            self._error, self.last_error = one_line(error), error
        self._status = "interrupted" if interrupted else "failed" if self._error else "completed"
        self._ended_seconds = time.monotonic()

    def snapshot(self, stats: PoolStats) -> SweepView:
        """Take a snapshot of the sweep, of plain values only."""
        # A snapshot after the end shows the time of the end.
        now = self._ended_seconds or time.monotonic()
        with self._lock:
            trials = tuple(live_view(self._entries[number]) for number in sorted(self._entries))
            view = SweepView(
                name=self._spec.name or self._spec.task,
                metric=self._spec.metric,
                goal=self._spec.goal,
                status=self._status,
                trials=trials,
                devices=self._meter.lately(stats) if self._ended_seconds is None else self._meter.overall(stats),
                num_planned=self._num_planned,
                elapsed_seconds=now - self._started_seconds,
                units_run=stats.units_run,
                # The pool's own count includes units saved by Ctrl-C.
                units_saved=sum(trial.units_saved for trial in trials if trial.state == "pruned"),
                scheduler_seconds=stats.scheduler_seconds,
                study=self._study,
                error=self._error,
                warnings=tuple(self._warnings),
                event_log=self._log_file(),
                event_log_bytes=None if stats.event_log is None else stats.event_log.nbytes,
                event_log_dropped={} if stats.event_log is None else stats.event_log.dropped,
                weights=dict(self._weights),
                next_step=self._next_step(),
            )
            # Still under the lock: `_num_unstarted` counts the entries that the view shows.
            return with_outlook(view, self._forecaster, num_unstarted=self._num_unstarted(), stats=stats)

    def _num_unstarted(self) -> int | None:
        if self._ended_seconds is not None:
            return 0
        # A stopping sweep starts no further trial, but its end is not the end of the study.
        if self._num_planned is None or self._status == "stopping":
            return None
        return max(0, self._num_planned - len(self._entries))

    def _next_step(self) -> str | None:
        """Return advice after an interruption, or where this run had no trial to begin."""
        spec, entries = self._spec, self._entries.values()
        if self._command is None:
            return None
        if self._status == "interrupted":
            is_kept = spec.storage is not None and spec.study is not None
            return how_to_go_on(self._command, is_kept=is_kept, saves=spec.checkpoint_dir is not None)
        has_nothing = self._num_planned is not None and all(entry.view.earlier for entry in entries)
        if self._status == "completed" and has_nothing:
            return how_to_run_more(len(entries), spec.file, is_grid=spec.method == "grid" and spec.run_cap is None)
        return None

    def _note(self, **facts: Any) -> None:
        if self.on_noted is not None:
            self.on_noted(**facts)

    def _note_end(self, view: TrialView) -> None:
        names = ("number", "state", "value", "params", "error")
        self._note(what="ended", **{name: getattr(view, name) for name in names})

    def _log_file(self) -> str | None:
        """Path of the event log, once the file exists: the log begins with the first trial."""
        path = self._event_log
        return str(path) if path is not None and path.exists() else None
