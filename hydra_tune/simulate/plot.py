"""The timeline as a picture. Needs matplotlib, which is imported here only and only when a picture is asked for."""

from collections.abc import Sequence
from pathlib import Path

from hydra_tune.errors import ConfigError
from hydra_tune.simulate.outcome import Interval, SimulationResult

_MOST_DEVICES = 64
_UNIT_HEIGHT, _LOAD_HEIGHT = 0.62, 0.16
_PALETTE = (
    *("#4477aa", "#ee8866", "#44aa77", "#aa3377", "#ddaa33", "#66ccee"),
    *("#774411", "#bb5566", "#332288", "#888888", "#99cc55", "#222222"),
)


def plot_timeline(result: SimulationResult, path: Path) -> None:
    """Draw the kept part of the timeline: a row for each device, a colour for each trial, loads as thin bars below.

    Args:
        result: simulated with a timeline.
        path: the PNG file to write.

    Raises:
        ConfigError: matplotlib is not installed, or the simulation kept no timeline.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib; install it with: pip install 'hydra-tune[plot]'") from error
    if not result.timeline:
        raise ConfigError("a plot needs a timeline; simulate with timeline=2000 or so")
    names = [device.name for device in result.devices][:_MOST_DEVICES]
    rows = {name: row for row, name in enumerate(names)}
    colours = _colours(result.timeline)
    figure = Figure(figsize=(12, 1.5 + 0.4 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row in rows.values():
        for is_load in (False, True):
            bars = [bar for bar in result.timeline if rows.get(bar.device) == row and (bar.kind == "load") == is_load]
            if bars:
                axes.broken_barh(
                    [(bar.start_seconds, bar.end_seconds - bar.start_seconds) for bar in bars],
                    _span(row, is_load=is_load),
                    facecolors=[colours[bar.job] for bar in bars],
                    edgecolor="white",
                    linewidth=0.3,
                    alpha=0.5 if is_load else 1.0,
                )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, _end(result.timeline))
    axes.set_xlabel("seconds")
    axes.set_title(f"{result.policy}: makespan {result.makespan_seconds:.6g} s, utilisation {result.utilisation:.1%}")
    figure.savefig(path, format="png", dpi=120)


def _colours(bars: Sequence[Interval]) -> dict[str, str]:
    """A colour for each trial; from the thirteenth on they come again."""
    jobs = list(dict.fromkeys(bar.job for bar in bars))
    return {job: _PALETTE[number % len(_PALETTE)] for number, job in enumerate(jobs)}


def _span(row: int, *, is_load: bool) -> tuple[float, float]:
    return (row + 0.3, _LOAD_HEIGHT) if is_load else (row - 0.4, _UNIT_HEIGHT)


def _end(bars: tuple[Interval, ...]) -> float:
    return max(bar.end_seconds for bar in bars)
