"""Reports of a sweep: lines during the run, tables and a JSON object at the end.

The functions read a plain `SweepView`, and print to a given console or return plain data. `cli/display/board.py`
formats a line as each trial ends or is left to a later run, and `cli/display/output.py` reports the whole sweep at the
end; for `HydraExecutor.live`, `pool/views/live.py` does both, in notebooks without the report. `cli/inspect/run_output.py`
formats the trials of a run. The module must hold no part of the engine.

Note: each field of `TrialView` and `DeviceView` becomes part of the JSON object, unless `_trial` or `_device` drops the field.
"""

from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hydra_tune.observe.event_log.writer import in_words
from hydra_tune.observe.live import text
from hydra_tune.observe.live.snapshot import LEFT, DeviceView, SweepView, TrialView
from hydra_tune.quantities import format_bytes, format_seconds

_NUM_BEST = 10
_NUM_ERRORS = 3
_NUM_UNFINISHED = 10
_NUM_WEIGHTS = 3
_COUNTED = ("completed", "pruned", "failed", "cancelled")
_ENDS = {
    "completed": "done",
    "interrupted": "interrupted",
    "failed": "ended by an error",
    "running": "running",
    "stopping": "stopping",
}


def trial_line(trial: TrialView, metric: str) -> str:
    """Format one line for a trial: `trial 7  pruned  val_loss 0.31  epoch 3/10  lr=0.001`."""
    parts = [text.label(trial), trial.state]
    if trial.value is not None:
        parts.append(f"{metric} {text.number(trial.value)}")
    if trial.epoch is not None:
        parts.append(f"epoch {text.epochs(trial.epoch, trial.epochs)}")
    if trial.params:
        parts.append(text.params(trial.params))
    if trial.error:
        parts.append(trial.error)
    return "  ".join(parts)


def print_summary(console: Console, view: SweepView) -> None:
    """Print the best trials, the errors of failed trials, the devices and the totals."""
    ranked = view.ranked
    console.print()
    if ranked:
        console.print(_best_table(ranked[:_NUM_BEST], view))
        if len(ranked) > _NUM_BEST:
            console.print(Text(f"... and {len(ranked) - _NUM_BEST} more", style="dim"))
        console.print()
    _print_unfinished(console, view)
    # A `Text`, here and below, because rich reads markup in a str: brackets of an error or a path would vanish.
    for warning in view.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    for line in _error_lines(view):
        console.print(Text(line, style="red"))
    best = view.best
    if best is None:
        missing = "no completed trial fulfils the constraints" if view.count("completed") else "no trial completed"
        console.print(Text(f"{missing}{_unfinished(view)}", style="bold red"), soft_wrap=True)
    else:
        console.print(Text(f"best: {text.label(best)}, {view.metric} {text.number(best.value)}", style="bold green"))
        for name, value in best.params.items():
            # All digits, unlike in tables: users copy the parameters into programs.
            console.print(Text(f"  {name}: {value}"), soft_wrap=True)
    console.print()
    if view.devices:
        console.print(_device_table(view.devices))
        console.print()
    for line in _totals(view):
        console.print(Text(line), soft_wrap=True)  # unwrapped, for users copy the paths
    if view.next_step is not None:
        console.print(Text(view.next_step, style="bold"), soft_wrap=True)


def _unfinished(view: SweepView) -> str:
    best = view.best_unfinished
    if best is None or best.value is None:
        return ""
    epoch = "" if best.epoch is None else f" in epoch {text.epochs(best.epoch, best.epochs)}"
    params = f" ({text.params(best.params)})" if best.params else ""
    return f"; the best so far: {text.label(best)}, {view.metric} {text.number(best.value)}{epoch}{params}"


def _print_unfinished(console: Console, view: SweepView) -> None:
    trials = view.unfinished if view.status == "interrupted" else ()
    if not trials:
        return
    lines = [f"  {trial_line(trial, view.metric)}" for trial in trials[:_NUM_UNFINISHED]]
    rest = [f"  ... and {len(trials) - _NUM_UNFINISHED} more"] if len(trials) > _NUM_UNFINISHED else []
    for line in (f"running at the interruption: {len(trials)}", *lines, *rest, ""):
        console.print(Text(line), soft_wrap=True)


def _best_table(trials: tuple[TrialView, ...], view: SweepView) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("trial", justify="right", no_wrap=True)
    table.add_column(Text(view.metric), justify="right", no_wrap=True, max_width=20, overflow="ellipsis")
    table.add_column("epochs", justify="right", no_wrap=True)
    table.add_column("shards", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("parameters", overflow="fold")
    for rank, trial in enumerate(trials, start=1):
        table.add_row(
            str(rank),
            Text(trial.name or str(trial.number)),
            text.number(trial.value),
            text.epochs(trial.epoch, trial.epochs),
            str(trial.num_shards or ""),
            Text(trial.state, style="green" if trial.state == "completed" else "dim"),
            Text(text.params(trial.params)),
        )
    return table


def _error_lines(view: SweepView) -> list[str]:
    # Counted, because one mistake often fails all trials with the same error.
    errors = Counter(trial.error for trial in view.trials if trial.state == "failed" and trial.error)
    lines = [
        f"{count} {'trial' if count == 1 else 'trials'} failed: {error}"
        for error, count in errors.most_common(_NUM_ERRORS)
    ]
    if len(errors) > _NUM_ERRORS:
        lines.append(f"... and {len(errors) - _NUM_ERRORS} other errors")
    if view.error:
        lines.append(f"the sweep ended early: {view.error}")
    return lines


def _device_table(devices: tuple[DeviceView, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("device", no_wrap=True)
    for name in ("busy", "peak / budget", "bytes in", "bytes out", "across", "units"):
        table.add_column(name, justify="right", no_wrap=True)
    for device in devices:
        table.add_row(
            Text(device.name),
            f"{device.busy_share:.0%}",
            f"{format_bytes(device.peak_bytes)} / {format_bytes(device.budget_bytes)}",
            format_bytes(sum(device.bytes_in_by_kind.values())),
            format_bytes(sum(device.bytes_out_by_kind.values())),
            format_bytes(sum(device.bytes_across_by_kind.values())),
            str(device.units),
        )
    return table


def _totals(view: SweepView) -> list[str]:
    counts = [f"{view.count(state)} {state}" for state in _COUNTED]
    if view.count(LEFT):
        counts.append(f"{view.count(LEFT)} {LEFT}, to go on with --resume")
    earlier = sum(trial.earlier for trial in view.trials)
    earlier_text = f", {earlier} of them earlier" if earlier else ""
    planned = view.units_run + view.units_saved
    units = (
        [  # a sweep on Ray does not know its units
            f"units run: {view.units_run}",
            f"units saved by pruning: {view.units_saved} ({view.units_saved / planned:.0%} of what was planned)",
        ]
        if planned
        else []
    )
    weights = [f"weights of trial {number}: {path}" for number, path in view.weights.items()]
    log = [f"event log: {view.event_log}{_size(view)}"] if view.event_log else []
    return [
        f"sweep {view.name}: {_ENDS[view.status]} after {format_seconds(view.elapsed_seconds)}{_bound(view)}",
        f"trials: {len(view.trials)}{earlier_text}: {', '.join(counts)}",
        *_fused(view),
        *_memory(view),
        *units,
        *log,
        *weights[:_NUM_WEIGHTS],
        *([f"... and of {len(weights) - _NUM_WEIGHTS} more beside them"] if len(weights) > _NUM_WEIGHTS else []),
    ]


def _size(view: SweepView) -> str:
    size = "" if view.event_log_bytes is None else f", {format_bytes(view.event_log_bytes)}"
    dropped = f" (event_log_limit: {in_words(view.event_log_dropped)})" if view.event_log_dropped else ""
    return size + dropped


def _fused(view: SweepView) -> list[str]:
    sizes = [trial.group_size for trial in view.trials if trial.group_size > 1]
    return [f"computed together: {len(sizes)} trials, up to {max(sizes)} at a time"] if sizes else []


def _memory(view: SweepView) -> list[str]:
    largest = max(view.trials, key=lambda trial: trial.one_shard_bytes, default=None)
    device_bytes = min((device.budget_bytes for device in view.devices), default=0)
    if largest is None or not device_bytes or largest.one_shard_bytes <= device_bytes:
        return []
    needs = f"a plain loop would take at least {format_bytes(largest.one_shard_bytes)} for trial {largest.number}"
    return [f"memory: {needs} (counted, not run); a device had {format_bytes(device_bytes)}"]


def _bound(view: SweepView) -> str:
    if not view.bound_seconds or view.elapsed_seconds < view.SHORT_SECONDS:
        return ""
    return f", of which {format_seconds(view.bound_seconds)} is the least that its units take on these devices"


def to_json(view: SweepView) -> dict[str, Any]:
    """Convert a sweep to plain data for machines, with the names and units of `SweepView`.

    Args:
        view: the finished sweep.

    Returns:
        Plain data without NaN and infinity, since JSON has no form for either; the texts `nan`, `inf` and `-inf` stand
        in.
    """
    best = view.best
    return {
        "name": view.name,
        "study": view.study,
        "status": view.status,
        "error": view.error,
        "warnings": list(view.warnings),
        "metric": {"name": view.metric, "goal": view.goal},
        "best": None if best is None else _trial(best),
        "trials": [_trial(trial) for trial in view.trials],
        "counts": {state: view.count(state) for state in (*_COUNTED, LEFT)},
        "units_run": view.units_run,
        "units_saved": view.units_saved,
        "devices": {device.name: _device(device) for device in view.devices},
        "elapsed_seconds": view.elapsed_seconds,
        "bound_seconds": view.bound_seconds,
        "scheduler_seconds": view.scheduler_seconds,
        "event_log": view.event_log,
        "event_log_bytes": view.event_log_bytes,
        "event_log_dropped": dict(view.event_log_dropped),
        "weights": {str(number): path for number, path in view.weights.items()},
        "next_step": view.next_step,
    }


def _trial(trial: TrialView) -> dict[str, Any]:
    data = asdict(trial)
    # Only the views for people and the ranking need these fields.
    for live in ("step", "num_steps", "remaining_seconds", "name", "values", "metrics", "is_feasible"):
        del data[live]
    return {name: text.plain(value) for name, value in data.items()}


def _device(device: DeviceView) -> dict[str, Any]:
    data = asdict(device)
    for live in ("name", "loads_under_way", "bytes_in_per_second", "bytes_out_per_second"):
        del data[live]
    return data
