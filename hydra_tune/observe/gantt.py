"""Bars over time as a picture. Needs matplotlib, which is imported here only and only when a picture is asked for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from hydra_tune.errors import ConfigError

_PALETTE = (
    *("#4477aa", "#ee8866", "#44aa77", "#aa3377", "#ddaa33", "#66ccee"),
    *("#774411", "#bb5566", "#332288", "#888888", "#99cc55", "#222222"),
)
_MANY_BARS = 3000  # whose edges would be all there is to see
_PIXELS = 4000  # gaps narrower than this part of the picture are not shown


class Bar(NamedTuple):
    """One bar: its row and lane, the job that it has its colour from, and its seconds."""

    row: str
    lane: str
    job: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Lane:
    """A part of a row.

    Args:
        top: of its bars, from -0.5 to 0.5 within the row.
        height: of them.
        alpha: their opacity.
        label: beside it; None: none.
    """

    top: float
    height: float
    alpha: float = 1.0
    label: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What is drawn.

    Args:
        title: above.
        rows: names, the first at the top.
        lanes: parts of each row, by name; drawn in this order.
        bars: all of them.
        span: seconds that are shown.
        row_inches: height of a row.
    """

    title: str
    rows: Sequence[str]
    lanes: dict[str, Lane]
    bars: Sequence[Bar]
    span: tuple[float, float]
    row_inches: float = 0.4


def draw(chart: Chart, path: Path) -> None:
    """Draw bars as a PNG: a row for each device, a colour for each job.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib; install it with: pip install 'hydra-tune[plot]'") from error
    figure = Figure(figsize=(12, 1.5 + chart.row_inches * len(chart.rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = colours_of(bar.job for bar in chart.bars)
    line = 0.3 if len(chart.bars) <= _MANY_BARS else 0.0
    for (row, lane), bars in _by_place(chart):
        look = chart.lanes[lane]
        axes.broken_barh(
            [(bar.start, bar.end - bar.start) for bar in bars],
            (chart.rows.index(row) + look.top, look.height),
            facecolors=[colours[bar.job] for bar in bars],
            edgecolor="white",
            linewidth=line,
            alpha=look.alpha,
        )
    axes.set_yticks(range(len(chart.rows)), chart.rows)
    labels = [
        (number + look.top + look.height / 2, look.label)
        for number in range(len(chart.rows))
        for look in chart.lanes.values()
        if look.label
    ]
    if labels:
        axes.set_yticks([place for place, _ in labels], [label for _, label in labels], minor=True, fontsize=7)
        axes.tick_params(axis="y", which="major", pad=52, length=0)
    axes.set_ylim(len(chart.rows) - 0.5, -0.5)
    axes.set_xlim(*chart.span)
    axes.set_xlabel("seconds")
    axes.set_title(chart.title)
    figure.savefig(path, format="png", dpi=120)


def colours_of(jobs: Iterable[str]) -> dict[str, str]:
    """A colour for each job, in their order; from the thirteenth on they come again."""
    return {job: _PALETTE[number % len(_PALETTE)] for number, job in enumerate(dict.fromkeys(jobs))}


def _by_place(chart: Chart) -> Iterable[tuple[tuple[str, str], list[Bar]]]:
    """The bars of each row and lane that are within the span; neighbours of one job that nobody could tell apart as one."""
    lanes, rows = list(chart.lanes), set(chart.rows)
    start, end = chart.span
    shown = [bar for bar in chart.bars if bar.row in rows and bar.end > start and bar.start < end]
    gap = (end - start) / _PIXELS if len(shown) > _MANY_BARS else -1.0
    shown.sort(key=lambda bar: (lanes.index(bar.lane), bar.row, bar.start))
    for place, bars in groupby(shown, key=lambda bar: (bar.row, bar.lane)):
        merged: list[Bar] = []
        for bar in bars:
            last = merged[-1] if merged else None
            if last is not None and last.job == bar.job and bar.start - last.end < gap:
                merged[-1] = last._replace(end=max(last.end, bar.end))
            else:
                merged.append(bar)
        yield place, merged
