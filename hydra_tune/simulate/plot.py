"""Plots the timeline of a simulation.

`hydra-tune simulate --plot` (`cli/commands/simulate.py`) calls `plot_timeline` after the simulation, and so does
`benchmarks/hydra_figures.py`. `observe/trace/gantt.py` draws. The module must not import the pool, torch or numpy.
"""

from pathlib import Path

from hydra_tune.errors import ConfigError
from hydra_tune.observe.trace.gantt import GanttBar, GanttChart, GanttLane, draw
from hydra_tune.quantities import format_short_seconds
from hydra_tune.simulate.outcome import SimulationResult

_MOST_DEVICES = 64
_LANES = {"unit": GanttLane(top=-0.4, height=0.62), "load": GanttLane(top=0.3, height=0.16, alpha=0.5)}


def plot_timeline(result: SimulationResult, path: Path) -> None:
    """Draw the kept part of the timeline as a PNG file: a row for each of the first 64 devices, loads as thin bars below.

    Raises:
        ConfigError: matplotlib is not installed, or the simulation kept no timeline.
        OSError: the file cannot be written.
    """
    if not result.timeline:
        raise ConfigError("a plot needs a timeline; simulate with timeline=2000 or so")
    bars = [
        GanttBar(
            interval.device,
            "load" if interval.kind == "load" else "unit",
            interval.job,
            interval.start_seconds,
            interval.end_seconds,
        )
        for interval in result.timeline
    ]
    rows = [device.name for device in result.devices][:_MOST_DEVICES]
    span = (0.0, max(bar.end for bar in bars))
    title = f"{result.policy}: makespan {format_short_seconds(result.makespan_seconds)}, utilisation {result.utilisation:.1%}"
    # The figures are of the whole simulation, so the title says which part of the simulation the picture shows.
    parts = [f"the first {format_short_seconds(span[1])}"] if span[1] < result.makespan_seconds else []
    parts += [f"{len(rows)} of {len(result.devices)} devices"] if len(rows) < len(result.devices) else []
    title += f" (shown: {' of '.join(parts)})" if parts else ""
    draw(GanttChart(title=title, rows=rows, lanes=_LANES, bars=bars, span=span), path)
