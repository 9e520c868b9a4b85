"""Draws bars over time as a picture.

The module imports matplotlib only when a picture is asked for, and knows neither logs nor simulations: callers make the
bars. `run_plot.py` calls `draw` for `hydra-tune trace --plot`, and `simulate/plot.py` for `hydra-tune simulate --plot`,
which calls `import_matplotlib` before the simulation (`cli/commands/simulate.py`).
"""

import colorsys
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from hydra_tune.errors import ConfigError

_PALETTE = (
    *("#4477aa", "#ee8866", "#44aa77", "#aa3377", "#ddaa33", "#66ccee"),
    *("#774411", "#bb5566", "#332288", "#888888", "#99cc55", "#222222"),
)
_GOLDEN = (math.sqrt(5) - 1) / 2
_MANY_BARS = 3000  # above this number the edges of bars would hide the bars
_PIXELS = 4000  # in a picture of many bars, gaps narrower than one in so many parts of the picture are not shown
_LABELS = 60  # bars narrower than one in so many parts of the picture have no label


class GanttBar(NamedTuple):
    """One bar: its row and lane, the job that sets the colour, its times in seconds, and the label of a wide bar."""

    row: str
    lane: str
    job: str
    start: float
    end: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class GanttLane:
    """A part of a row.

    Args:
        top: of the lane's bars, from -0.5 to 0.5 within the row.
        label: beside the lane; None: no label.
    """

    top: float
    height: float
    alpha: float = 1.0
    label: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GanttChart:
    """A picture to draw.

    Args:
        rows: names, the first at the top.
        lanes: parts of each row, by name; drawn in this order.
        span: visible range, in seconds.
        names_jobs: whether a legend names the jobs' colours, unless there are more jobs than colours of the palette.
    """

    title: str
    rows: Sequence[str]
    lanes: dict[str, GanttLane]
    bars: Sequence[GanttBar]
    span: tuple[float, float]
    row_inches: float = 0.4
    names_jobs: bool = False


def draw(chart: GanttChart, path: Path) -> None:
    """Draw bars as a PNG: a row for each name in `rows`, a colour for each job.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure_class, canvas_class = import_matplotlib()
    # A figure with its own canvas, without pyplot: no global state, no display, and any thread may draw.
    figure = figure_class(figsize=(12, 1.5 + chart.row_inches * len(chart.rows)), layout="constrained")
    canvas_class(figure)
    axes = figure.subplots()
    _draw_bars(chart, axes)
    _name_rows(chart, axes)
    # Upside down, because the first row is at the top.
    axes.set_ylim(len(chart.rows) - 0.5, -0.5)
    axes.set_xlim(*chart.span)
    axes.set_xlabel("seconds")
    axes.set_title(chart.title)
    figure.savefig(path, format="png", dpi=120)


def import_matplotlib() -> tuple[Any, Any]:
    """Return matplotlib's classes for a figure and for its canvas.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib; install it with: pip install matplotlib") from error
    return Figure, FigureCanvasAgg


def _draw_bars(chart: GanttChart, axes: Any) -> None:
    # Of all bars, not of those shown, so that a job keeps its colour in a picture of a part of the run.
    colours = colours_of(bar.job for bar in chart.bars)
    visible_bars = [bar for bar in chart.bars if bar.row in chart.rows and _is_shown(bar, chart)]
    is_many = len(visible_bars) > _MANY_BARS
    for (row, lane), bars in _by_place(chart, visible_bars, is_many=is_many):
        lane_style, place = chart.lanes[lane], chart.rows.index(row)
        axes.broken_barh(
            [(bar.start, bar.end - bar.start) for bar in bars],
            (place + lane_style.top, lane_style.height),
            facecolors=[colours[bar.job] for bar in bars],
            edgecolor="white",
            linewidth=0.0 if is_many else 0.3,
            alpha=lane_style.alpha,
        )
        for bar in bars:
            start, end = max(bar.start, chart.span[0]), min(bar.end, chart.span[1])
            if bar.label and end - start > (chart.span[1] - chart.span[0]) / _LABELS:
                middle = (start + end) / 2, place + lane_style.top + lane_style.height / 2
                axes.text(*middle, bar.label, color="white", fontsize=7, ha="center", va="center")
    # With more jobs the colours are hard to tell apart by a legend.
    jobs = dict.fromkeys(bar.job for bar in visible_bars)
    if chart.names_jobs and len(jobs) <= len(_PALETTE):
        for job in sorted(jobs):
            # A line without points only makes an entry of the legend.
            axes.plot([], [], color=colours[job], linewidth=6, label=job)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, frameon=False)


def _name_rows(chart: GanttChart, axes: Any) -> None:
    axes.set_yticks(range(len(chart.rows)), chart.rows)
    labels = [
        (number + look.top + look.height / 2, look.label)
        for number in range(len(chart.rows))
        for look in chart.lanes.values()
        if look.label
    ]
    if labels:
        axes.set_yticks([place for place, _ in labels], [label for _, label in labels], minor=True, fontsize=7)
        # The devices' names go left of the lanes' labels, which are the minor ticks.
        axes.tick_params(axis="y", which="major", pad=36, length=0)


def colours_of(jobs: Iterable[str]) -> dict[str, str]:
    """Assign a colour of its own to each job, in order."""
    return {job: _colour(number) for number, job in enumerate(dict.fromkeys(jobs))}


def _colour(number: int) -> str:
    if number < len(_PALETTE):
        return _PALETTE[number]
    # Steps of the golden ratio around the circle of hues come back to no earlier hue.
    parts = colorsys.hsv_to_rgb(number * _GOLDEN % 1.0, 0.55 + 0.1 * (number % 4), 0.9 - 0.15 * (number % 3))
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def _is_shown(bar: GanttBar, chart: GanttChart) -> bool:
    return bar.end > chart.span[0] and bar.start < chart.span[1]


def _by_place(
    chart: GanttChart, shown: Sequence[GanttBar], *, is_many: bool
) -> Iterator[tuple[tuple[str, str], list[GanttBar]]]:
    """Group bars by row and lane; in a large picture, merge neighbours of one job with an invisible gap."""
    lanes = list(chart.lanes)
    # Minus infinity merges nothing.
    gap = (chart.span[1] - chart.span[0]) / _PIXELS if is_many else -math.inf
    # By lane first, because lanes are drawn in their order, the later over the earlier.
    ordered = sorted(shown, key=lambda bar: (lanes.index(bar.lane), bar.row, bar.start))
    for place, bars in groupby(ordered, key=lambda bar: (bar.row, bar.lane)):
        merged: list[GanttBar] = []
        for bar in bars:
            last = merged[-1] if merged else None
            if last is not None and last.job == bar.job and bar.start - last.end < gap:
                merged[-1] = last._replace(end=max(last.end, bar.end), label="")
            else:
                merged.append(bar)
        yield place, merged
