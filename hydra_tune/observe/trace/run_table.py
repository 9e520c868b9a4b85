"""Prints a run's figures as tables.

`hydra-tune trace` (`cli/commands/trace.py`) calls `print_run` once all files are written, unless the user gives `--json`.
The module must not read a running pool: the figures come from a log.
"""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hydra_tune.observe.event_log.run_figures import DeviceFigures, RunFigures
from hydra_tune.observe.event_log.writer import in_words
from hydra_tune.quantities import format_bytes, format_seconds, format_short_seconds

_ENDS = ("completed", "pruned", "failed", "cancelled", "unknown")
_MOST_CHOICES = 6  # choices of fusion shown
_MOST_LINES = 12  # lines of plans shown
_WAYS = (("in", "bytes_in_by_kind"), ("out", "bytes_out_by_kind"), ("across", "bytes_across_by_kind"))


def print_run(console: Console, figures: RunFigures) -> None:
    """Print the devices, the bytes by kind, the totals, and a warning if the log is not whole."""
    console.print()
    console.print(_device_table(figures.devices))
    console.print()
    bytes_table = _bytes_table(figures.devices)
    if bytes_table.row_count:
        console.print(bytes_table)
        console.print()
    for name, value in _totals(figures):
        console.print(Text(f"{name:<12} {value}"))
    if not figures.is_whole:
        console.print(Text(_unfinished(figures), style="yellow"))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, name in enumerate(columns):
        table.add_column(name, no_wrap=True, justify="left" if number == 0 else "right")
    return table


def _device_table(devices: tuple[DeviceFigures, ...]) -> Table:
    table = _table("device", "utilisation", "busy", "waiting", "copying", "overlap", "units")
    for device in devices:
        table.add_row(
            Text(device.name),
            f"{device.utilisation:.1%}",
            format_short_seconds(device.busy_seconds),
            format_short_seconds(device.waiting_seconds),
            format_short_seconds(device.copying_seconds),
            f"{device.overlap:.1%}",
            str(device.units),
        )
    return table


def _bytes_table(devices: tuple[DeviceFigures, ...]) -> Table:
    kinds = {kind for device in devices for _, field in _WAYS for kind in getattr(device, field)}
    table = _table("bytes", *(way for way, _ in _WAYS))
    for kind in sorted(kinds):
        sums = [sum(getattr(device, field).get(kind, 0) for device in devices) for _, field in _WAYS]
        if any(sums):
            table.add_row(Text(kind), *(format_bytes(num_bytes) for num_bytes in sums))
    return table


def _totals(figures: RunFigures) -> Iterator[tuple[str, str]]:
    # Above 0, because `read_log` refuses a run without a unit.
    planned = figures.units_run + figures.units_saved
    ends = [f"{figures.trials[end]} {end}" for end in _ENDS if figures.trials.get(end)]
    yield "trials", ", ".join(ends)
    yield "makespan", format_short_seconds(figures.makespan_seconds)
    yield "utilisation", f"{figures.utilisation:.1%}"
    yield "overlap", f"{figures.overlap:.1%} of the time that copies took lies under compute"
    yield (
        "units",
        f"{figures.units_run} run, {figures.units_saved} saved by pruning ({figures.units_saved / planned:.0%})",
    )
    updating = sum(device.host_update_seconds for device in figures.devices)
    if updating:
        # A mean of the devices' shares, weighted by their times.
        under = sum(device.host_update_seconds * device.host_update_overlap for device in figures.devices)
        yield "updates", f"{format_seconds(updating)} on the host, {under / updating:.1%} of it under compute"
    if figures.disk_seconds:
        read, written = format_bytes(figures.disk_read_bytes), format_bytes(figures.disk_written_bytes)
        yield "disk", f"{read} read, {written} written, busy for {format_seconds(figures.disk_seconds)}"
    reasons = list(dict.fromkeys(str(choice["why"]) for choice in figures.fusion))
    for reason in reasons[:_MOST_CHOICES]:
        yield "fusion", reason
    if len(reasons) > _MOST_CHOICES:
        yield "fusion", f"and {len(reasons) - _MOST_CHOICES} more choices, which --json has"
    plan_lines = list(dict.fromkeys((str(plan["what"]), str(line)) for plan in figures.plans for line in plan["told"]))
    yield from plan_lines[:_MOST_LINES]
    if len(plan_lines) > _MOST_LINES:
        yield "plan", f"and {len(plan_lines) - _MOST_LINES} more lines, which --json has"


def _unfinished(figures: RunFigures) -> str:
    if figures.lost:
        return f"the log had no room for {figures.lost} events, so that these figures are too small"
    if figures.dropped_from_seconds is not None:
        left_out = f" ({in_words(figures.dropped)})" if figures.dropped else ""
        return (
            f"the log reached its limit after {format_seconds(figures.dropped_from_seconds)}, and these figures, but for "
            f"trials, are of the time before{left_out}; raise event_log_limit to log more"
        )
    return (
        "the log ends before the run: the run goes on, was killed, or could write no more; these are the figures so far"
    )
