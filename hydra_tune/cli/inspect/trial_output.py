"""Prints the trials of one run: a table, CSV, or one trial with all digits (`hydra-tune show`, `best` and `export`).

`cli/commands/show.py` (`print_trials`, `write_csv`), `cli/commands/best.py` (`chosen_trial`, `trial_text`) and
`cli/run/export.py` (all but `print_trials`) call the functions once the run is found. The module must not import torch,
train anything or import a tuner. Where several trials are best, the module must not choose one of the trials.
"""

import csv
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hydra_tune.cli.inspect.run_output import best_trials
from hydra_tune.cli.inspect.sweep_run_record import SweepRunRecord
from hydra_tune.errors import ConfigError
from hydra_tune.observe.live import text
from hydra_tune.observe.live.snapshot import TrialView


def print_trials(console: Console, run: SweepRunRecord, top: int) -> None:
    """Print a table of the `top` best trials: value, unless there are several objectives, state, parameters and metrics."""
    trials = run.ranked[:top]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("trial", justify="right", no_wrap=True)
    if len(run.goals) <= 1:
        table.add_column(Text(run.metric_name), justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("parameters", overflow="fold")
    metrics = _names(trials, "metrics", without=run.metric)
    if metrics:
        table.add_column("metrics", overflow="fold")
    for trial in trials:
        value = [text.number(trial.value)] if len(run.goals) <= 1 else []
        params = Text(text.params(trial.params))
        noted = text.params({name: trial.metrics[name] for name in metrics if name in trial.metrics})
        table.add_row(
            text.label(trial).removeprefix("trial "), *value, trial.state, params, *([Text(noted)] if metrics else [])
        )
    console.print(table)
    if len(run.trials) > len(trials):
        console.print(
            Text(f"... and {len(run.trials) - len(trials)} more, which --top {len(run.trials)} shows", style="dim")
        )


def write_csv(file: TextIO, run: SweepRunRecord, top: int | None) -> None:
    """Write a line for each of the `top` best trials, or of all, with a column for each parameter and each metric.

    The tuner's metric has a column of its own in front of both.
    """
    trials = run.ranked[:top]
    params, metrics = _names(trials, "params"), _names(trials, "metrics", without=run.metric)
    writer = csv.writer(file, lineterminator="\n")
    # A parameter and a metric may have one name, so each has its kind in front.
    writer.writerow(
        [
            "trial",
            "state",
            run.metric_name,
            *(f"param.{name}" for name in params),
            *(f"metric.{name}" for name in metrics),
        ]
    )
    for trial in trials:
        values = [trial.params.get(name) for name in params] + [trial.metrics.get(name) for name in metrics]
        writer.writerow([trial.number, trial.state, trial.value, *values])


def chosen_trial(run: SweepRunRecord, number: int | None) -> TrialView:
    """Return a trial by number, or the best trial.

    Raises:
        ConfigError: no such trial, no completed trial, or several best trials.
    """
    if number is not None:
        trial = next((trial for trial in run.trials if trial.number == number), None)
        if trial is None:
            raise ConfigError(f"run {run.name!r} has no trial {number}; it has {len(run.trials)}, from 0 on")
        return trial
    best = best_trials(run)
    if len(best) == 1:
        return best[0]
    if best:
        numbers = ", ".join(str(trial.number) for trial in best)
        raise ConfigError(
            f"run {run.name!r} has several objectives and no single best trial; give one of {numbers} with "
            "hydra-tune best --trial N"
        )
    has_completed = any(trial.state == "completed" for trial in run.trials)
    why = (
        "no completed trial fulfils the constraints"
        if has_completed and run.best is not None
        else "no trial has completed"
    )
    raise ConfigError(
        f"run {run.name!r} has no best trial: {why}; give one of its trials with hydra-tune best --trial N"
    )


def trial_text(run: SweepRunRecord, trial: TrialView) -> str:
    """Format one trial, its parameters with all digits, because users copy the parameters into programs."""
    params = "".join(f"\n  {name}: {param}" for name, param in trial.params.items())
    value = "" if trial.value is None else f", {run.metric_name} {text.plain(trial.value)}"
    return f"{text.label(trial)} of {run.name}, {trial.state}{value}{params}"


def _names(trials: Sequence[TrialView], which: str, without: str | None = None) -> list[str]:
    return [
        name for name in dict.fromkeys(name for trial in trials for name in getattr(trial, which)) if name != without
    ]
