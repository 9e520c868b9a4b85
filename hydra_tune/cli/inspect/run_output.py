"""Prints runs: a line for each (`hydra-tune list`), a paragraph for each (`hydra-tune status`), or one JSON object.

`cli/commands/list.py` prints or writes `to_json`, and `cli/commands/show.py` and `cli/run/export.py` write `to_json`.
`cli/commands/best.py` and `cli/run/export.py` write a trial alone (`trial_data`), and `trial_output.py` asks for the
`best_trials`. The keys of the JSON are documented, and other programs read them, so no key may be renamed. The module must
read no file and no study, which `run_scan.py` has done, and must not import torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hydra_tune.cli.display.next_step import masked
from hydra_tune.cli.inspect.sweep_run_record import UNDER_WAY, SweepRunRecord
from hydra_tune.observe.live import text
from hydra_tune.observe.live.snapshot import TrialView
from hydra_tune.observe.live.summary import trial_line

_STYLES = {"running": "bold green", "killed": "red", "interrupted": "yellow"}
_NUM_UNDER_WAY = 10
_NUM_FAILED = 3
_MEANINGS = {
    "running": "its process is at work",
    "killed": "its process has ended without a word",
    "interrupted": "its process has ended before all planned trials",
    "finished": "all planned trials are there",
    "idle": "no trial is running, and no event log or lock here says whether more will",
    "unclear": "trials are running in the storage",
}


def print_list(console: Console, runs: Sequence[SweepRunRecord]) -> None:
    """Print a line for each run."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("run", "state", "trials", "by state", "best", "started"):
        table.add_column(name, no_wrap=name not in ("run", "by state"), overflow="fold")
    for run in runs:
        table.add_row(
            Text(run.name),
            Text(run.phase, style=_STYLES.get(run.phase, "")),
            _progress(run),
            _counts(run),
            Text(_best(run)),
            _started(run),
        )
    console.print(table)


def print_status(console: Console, runs: Sequence[SweepRunRecord]) -> None:
    """Print a paragraph for each run: state, trials under way, last failures, best trial, places, and how to go on."""
    for number, run in enumerate(runs):
        if number:
            console.print()
        console.print(Text.assemble((run.name, "bold"), f": {run.phase} ({_MEANINGS[run.phase]})"), soft_wrap=True)
        for line in _status_lines(run):
            console.print(Text(f"  {line}"), soft_wrap=True)


def to_json(run: SweepRunRecord, *, with_trials: bool = True) -> dict[str, Any]:
    """Convert a run to plain data for machines, with the names of `SweepRunRecord`, except that `phase` is called `state`."""
    data: dict[str, Any] = {
        "name": run.name,
        "state": run.phase,
        "study": run.study,
        "storage": None if run.storage is None else masked(run.storage),
        "logs": [str(path) for path in run.logs],
        "file": run.file,
        "metric": run.metric,
        "goals": list(run.goals),
        "planned": run.planned,
        "counts": run.counts,
        "best": [trial_data(trial) for trial in best_trials(run)],
        "started_at": None if run.started_at is None else run.started_at.isoformat(),
        "next_step": run.next_step,
    }
    return data | {"trials": [trial_data(trial) for trial in run.ranked]} if with_trials else data


def trial_data(trial: TrialView) -> dict[str, Any]:
    """Convert a trial to plain data."""
    names = ("number", "state", "value", "step", "params", "metrics", "error")
    return {name: text.plain(getattr(trial, name)) for name in names}


def best_trials(run: SweepRunRecord) -> list[TrialView]:
    """The best completed trial; with several objectives the Pareto front; nothing where the goal is not known.

    Where a study is known, no trial that violates its constraints is the best.
    """
    if run.best is not None:
        return [trial for trial in run.trials if trial.number in run.best]
    first = next(iter(run.ranked), None)
    return [first] if first is not None and run.goals and first.state == "completed" and first.value is not None else []


def _progress(run: SweepRunRecord) -> str:
    return str(len(run.trials)) if run.planned is None else f"{run.num_ended}/{run.planned}"


def _counts(run: SweepRunRecord) -> str:
    return ", ".join(f"{count} {state}" for state, count in run.counts.items()) or "none"


def _best(run: SweepRunRecord) -> str:
    trials = best_trials(run)
    if len(run.goals) > 1:
        return f"{len(trials)} on the Pareto front" if trials else "-"
    return f"{run.metric_name} {text.number(trials[0].value)}" if trials else "-"


def _started(run: SweepRunRecord) -> str:
    return "-" if run.started_at is None else f"{run.started_at.astimezone():%Y-%m-%d %H:%M}"


def _status_lines(run: SweepRunRecord) -> list[str]:
    under_way = [trial for trial in run.trials if trial.state in UNDER_WAY]
    lines = [f"trials: {_progress(run)}: {_counts(run)}"]
    lines += [_under_way(trial, run) for trial in under_way[:_NUM_UNDER_WAY]]
    lines += [f"... and {len(under_way) - _NUM_UNDER_WAY} more"] if len(under_way) > _NUM_UNDER_WAY else []
    failed = [trial for trial in run.trials if trial.state == "failed"]
    lines += [trial_line(trial, run.metric_name) for trial in failed[-_NUM_FAILED:]]
    best = best_trials(run)
    if len(best) == 1:
        lines.append(f"best: {text.label(best[0])}, {_best(run)}, {text.params(best[0].params)}".rstrip(", "))
    elif best:
        lines.append(f"best: {_best(run)}")
    if run.storage is not None:
        lines.append(f"study: {run.study} in {masked(run.storage)}")
    lines += [f"log: {_near(path)}, started {_started(run)}" for path in run.logs[-1:]]
    return lines if run.next_step is None else [*lines, run.next_step]


def _under_way(trial: TrialView, run: SweepRunRecord) -> str:
    line = trial_line(trial, run.metric_name)
    if trial.value is None:
        return line
    # Steps are those of reports: epochs from 0, or optimizer steps with report_every.
    step = f"step {trial.step}" if trial.epochs is None else f"epoch {text.epochs(trial.step + 1, trial.epochs)}"
    return f"{line}  last report: {step}"


def _near(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
