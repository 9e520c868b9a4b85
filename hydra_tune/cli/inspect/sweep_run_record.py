"""`SweepRunRecord`: one run of the past or present, with its state.

`run_scan.py` makes the records and calls `phase_of`. `run_output.py`, `trial_output.py` and `hydra-tune best`
(`cli/commands/best.py`) print the records, and `cli/run/export.py` takes storage, study and trials from a record. The
module must not import torch or a tuner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from hydra_tune.observe.event_log.run_state import RunState
from hydra_tune.observe.live.snapshot import ENDED, LEFT, Goal, SweepView, TrialView

RunPhase = Literal["running", "killed", "interrupted", "finished", "idle", "unclear"]
UNDER_WAY = frozenset({"queued", "preparing", "running", "waiting", "paused", LEFT})
"""States of trials that have not ended, trials left to a later run included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRunRecord:
    """A run: a study with all its sweeps, or a run whose study was in memory.

    Args:
        name: of the study, else of the sweep or the log.
        phase: `running`: a process holds a lock of the run; `finished`: all planned trials have ended, or the log has
            ended, no number of trials is planned, and all trials have ended; `killed`: the log has no end, and no process
            holds a lock; `interrupted`: the log has ended before all planned trials or all known trials, or, without a log,
            trials have not ended and no process holds the lock of the sweep's folder; `idle`: there is no log, and all
            trials have ended; `unclear`: there is neither log nor folder, and trials have not ended.
        trials: all trials, by number.
        goals: one for each objective; empty where not known.
        best: numbers of the best trials, as the study has them; None where only a log is known.
        metric: name of the metric; None where not known.
        planned: number of trials planned; None where not known.
        study: name of the study; None for a study in memory.
        logs: files of the event logs, the newest last.
        weights_dir: folder for kept weights, as the sweep file gives it.
        started_at: start of the newest process, or of the first trial where no log is known.
        next_step: how to go on; None: nothing to do.
    """

    name: str
    phase: RunPhase
    trials: tuple[TrialView, ...]
    goals: tuple[Goal, ...] = ()
    best: tuple[int, ...] | None = None
    metric: str | None = None
    planned: int | None = None
    study: str | None = None
    storage: str | None = None
    logs: tuple[Path, ...] = ()
    file: str | None = None
    weights_dir: str | None = None
    started_at: datetime | None = None
    next_step: str | None = None

    @property
    def metric_name(self) -> str:
        """Name of the metric for tables."""
        return self.metric or "value"

    @property
    def ranked(self) -> tuple[TrialView, ...]:
        """All trials: the best, other completed trials and pruned trials by value, then the rest by number."""
        goal = self.goals[0] if self.goals else "minimize"
        view = SweepView(name=self.name, metric=self.metric_name, goal=goal, status="completed", trials=self.trials)
        first = [trial for trial in self.trials if trial.number in (self.best or ())]
        chosen = {trial.number: trial for trial in (*first, *view.ranked, *self.trials)}
        return tuple(chosen.values())

    @property
    def counts(self) -> dict[str, int]:
        """Number of trials by state, without states that no trial is in."""
        states = [trial.state for trial in self.trials]
        order = ("completed", "pruned", "failed", "cancelled", LEFT)
        return {state: states.count(state) for state in dict.fromkeys((*order, *sorted(states))) if state in states}

    @property
    def num_ended(self) -> int:
        """Number of trials that have ended."""
        return num_ended(self.trials)


def num_ended(trials: Sequence[TrialView]) -> int:
    """Count trials that have ended."""
    return sum(trial.state in ENDED for trial in trials)


def phase_of(
    trials: Sequence[TrialView], log: RunState | None, *, planned: int | None, is_alive: bool, has_folder: bool
) -> RunPhase:
    """Decide the state of a run (`SweepRunRecord.phase`).

    Args:
        trials: all trials.
        log: the newest event log; None: no log is known.
        planned: number of trials planned, if known.
        is_alive: whether a process holds a lock of the run.
        has_folder: whether the sweep has a folder, whose lock is free unless `is_alive`.
    """
    if is_alive:
        return "running"
    if planned is not None and num_ended(trials) >= planned:
        return "finished"
    if log is not None and not log.is_ended:
        return "killed"
    is_under_way = any(trial.state in UNDER_WAY for trial in trials)
    if log is not None:
        return "interrupted" if is_under_way or planned is not None else "finished"
    if is_under_way:
        return "interrupted" if has_folder else "unclear"
    return "idle"
