"""Plots a run's log: for each of the first 32 devices a row with a lane of units, and lanes of loads and spills below.

`hydra-tune trace` (`cli/commands/trace.py`) calls `plot_run` for `--plot`, after the figures and before the trace is
written. The module must read the log only, never a running pool.
"""

from collections.abc import Iterator
from pathlib import Path

from hydra_tune.errors import ConfigError
from hydra_tune.observe.event_log.reader import RunLog
from hydra_tune.observe.event_log.run_figures import RunFigures
from hydra_tune.observe.trace.gantt import GanttBar, GanttChart, GanttLane, draw
from hydra_tune.quantities import format_short_seconds

_PALE = 0.35
_MOST_DEVICES = 32
_LANES = {
    "wait": GanttLane(top=-0.42, height=0.46, alpha=_PALE),
    "unit": GanttLane(top=-0.42, height=0.46, label="units"),
    "load": GanttLane(top=0.09, height=0.13, alpha=_PALE, label="loads"),
    "load ahead": GanttLane(top=0.09, height=0.13),
    "spill": GanttLane(top=0.27, height=0.13, alpha=_PALE, label="spills"),
    "spill ahead": GanttLane(top=0.27, height=0.13),
}
_SECOND = 1e9


def plot_run(
    log: RunLog, figures: RunFigures, path: Path, *, start: float | None = None, end: float | None = None
) -> None:
    """Draw a run: solid bars are units with their inputs there, and background copies; pale bars are waits and other copies.

    The picture begins at second `start`, or with the first unit, and ends at second `end`, or with the last unit. A wide unit
    is labelled with the first letter of its kind and the number of its shard.

    Raises:
        ConfigError: matplotlib is not installed, or nothing ran in the drawn range.
        OSError: the file cannot be written.
    """
    first = min(unit.start_ns for unit in log.units) / _SECOND
    span = (first if start is None else start, figures.makespan_seconds if end is None else end)
    bars = list(_bars(log))
    if not any(bar.end > span[0] and bar.start < span[1] for bar in bars):
        raise ConfigError(
            f"nothing ran between {span[0]:g} and {span[1]:g} seconds; units ran from {first:.3f} to "
            f"{figures.makespan_seconds:.3f}"
        )
    title = (
        f"{figures.policy}: makespan {format_short_seconds(figures.makespan_seconds)}, utilisation {figures.utilisation:.1%}, "
        f"{figures.overlap:.1%} of the copying under compute (pale: waited for)"
    )
    rows = list(log.budgets)[:_MOST_DEVICES]
    draw(GanttChart(title=title, rows=rows, lanes=_LANES, bars=bars, span=span, row_inches=1.1, names_jobs=True), path)


def _bars(log: RunLog) -> Iterator[GanttBar]:
    for unit in log.units:
        start, ready, end = (time / _SECOND for time in (unit.start_ns, unit.ready_ns, unit.end_ns))
        if ready > start:
            yield GanttBar(unit.device, "wait", unit.job, start, ready)
        yield GanttBar(unit.device, "unit", unit.job, ready, end, f"{unit.kind[:1].upper()}{unit.shard}")
    for copy in log.copies:
        lane = ("spill" if copy.what == "out" else "load") + (" ahead" if copy.is_in_background else "")
        yield GanttBar(copy.device, lane, copy.job or "", copy.start_ns / _SECOND, copy.end_ns / _SECOND)
