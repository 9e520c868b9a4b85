"""Pictures of what the benchmarks of schedules print. Need matplotlib, imported only when a picture is drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Series = Mapping[str, Sequence[float]]
"""For each contender, a value at each place of the horizontal axis."""

MARKERS = "osD^vPX*"


def figure(num_panels: int) -> tuple[Any, list[Any]]:
    """An empty figure, with a panel beside another."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise SystemExit("a plot needs matplotlib; install it with: pip install 'hydra-tune[plot]'") from error
    drawing = Figure(figsize=(5.6 * num_panels, 4.2), layout="constrained")
    FigureCanvasAgg(drawing)
    axes = drawing.subplots(1, num_panels, squeeze=False)[0]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", alpha=0.3)
        one.set_axisbelow(True)
    return drawing, list(axes)


def lines(
    path: Path,
    panels: Mapping[str, tuple[Sequence[float], Series]],
    *,
    x_label: str,
    from_zero: bool = True,
) -> None:
    """A line for each contender, one panel for each title, which says what its values are.

    Contenders that cannot be told apart share a line and say so.
    """
    drawing, axes = figure(len(panels))
    for one, (title, (places, series)) in zip(axes, panels.items(), strict=True):
        for number, (name, values) in enumerate(_merged(series).items()):
            dashed = name.startswith("ideal")
            style = {"linestyle": "--", "color": "0.5"} if dashed else {"marker": MARKERS[number % len(MARKERS)]}
            one.plot(places, values, label=name, linewidth=1.4, markersize=5, alpha=0.85, **style)
        one.set_title(title, fontsize=10)
        one.set_xticks(list(places))
        one.set_xlabel(x_label)
        if from_zero:
            one.set_ylim(bottom=0)
        one.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2)
    drawing.savefig(path, format="png", dpi=100)


def _merged(series: Series) -> dict[str, Sequence[float]]:
    names: dict[tuple[float, ...], list[str]] = {}
    for name, values in series.items():
        names.setdefault(tuple(round(value, 2) for value in values), []).append(name)
    return {", ".join(alike): series[alike[0]] for alike in names.values()}


def bars(path: Path, panels: Mapping[str, Mapping[str, float]], *, x_label: str, note: Mapping[str, float]) -> None:
    """A horizontal bar for each contender, one panel for each title; `note` are vertical lines with their names."""
    drawing, axes = figure(len(panels))
    for one, (title, values) in zip(axes, panels.items(), strict=True):
        drawn = one.barh(list(values), list(values.values()), color=[_colour(name) for name in values], height=0.7)
        one.bar_label(drawn, fmt="%.2f", fontsize=8, padding=2)
        for name, value in note.items():
            one.axvline(value, linestyle="--", linewidth=1, color="0.4", zorder=0)
            one.annotate(name, (value, 1.0), xycoords=("data", "axes fraction"), fontsize=7, ha="center", va="bottom")
        one.invert_yaxis()
        one.grid(visible=False, axis="y")
        one.tick_params(axis="y", labelsize=8)
        one.set_title(title, fontsize=10, pad=16)
        one.set_xlabel(x_label)
        one.margins(x=0.12)
    drawing.savefig(path, format="png", dpi=100)


def _colour(name: str) -> str:
    return "C0" if name.startswith("HYDRA") else "C1" if name.startswith("pipeline") else "0.6"
