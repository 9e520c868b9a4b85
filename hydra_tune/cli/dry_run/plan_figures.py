"""Formats the result of `hydra-tune plan --profile` as text: the paper's Figures 3 and 9, for a terminal or a file.

`run_plan` (`planning.py`) calls `print_figures` after the tables, unless the output is JSON. A forecast with neither
figures nor a reason for their absence prints nothing, as without `--profile`. The module must compute no figures:
`planner/search/figures.py` does.
"""

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from hydra_tune.planner.search.figures import ComparedSystem, FusedPeak, IdleFeatureMap, MemoryCurvePoint, StepFigures
from hydra_tune.pool.dry_run.report import PoolForecast
from hydra_tune.quantities import format_bytes

_MOST_MAPS = 12
_ROWS = 8  # rows of the curve's plot
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_NOTHING = "-"
_ASCII = str.maketrans(
    {**dict.fromkeys("▁▂▃▄", "."), **dict.fromkeys("▅▆▇", ":"), "█": "#", "│": "|", "─": "-", "μ": "u"}
)


def print_figures(console: Console, found: Sequence[tuple[int, PoolForecast]]) -> None:
    """Print the profile of each kind of trial once, and each reason for no profile with the trials that have the reason.

    `found` has numbers of trials, and their forecasts.
    """
    kinds: dict[int, tuple[StepFigures, list[int]]] = {}
    without: dict[str, list[int]] = {}
    for number, forecast in found:
        fusion = forecast.trials[0].fusion
        if fusion.figures is not None:
            # Trials of one kind share one object of figures.
            kinds.setdefault(id(fusion.figures), (fusion.figures, []))[1].append(number)
        elif fusion.why_no_figures is not None:
            without.setdefault(fusion.why_no_figures, []).append(number)
    lines: list[str] = []
    for figures, numbers in kinds.values():
        lines += ["", f"profile of trial {_numbers(numbers)}", *figure_lines(figures, console.width)]
    lines += [
        f"\ntrial {_numbers(numbers)} cannot be planned in less memory: {why}" for why, numbers in without.items()
    ]
    for line in lines:
        text = line.translate(_ASCII) if console.options.ascii_only else line
        console.print(Text(text), soft_wrap=True)


def figure_lines(figures: StepFigures, width: int) -> list[str]:
    """Format a whole profile, with bars and a curve that end at column `width`."""
    return [
        "",
        f"how long feature maps lie idle in a step of one trial ({_ms(figures.curve[-1].seconds)} ms)",
        *_idle(figures.maps, width),
        "",
        f"memory over that step, beside {format_bytes(figures.static_bytes)} of static tensors",
        *_curve(figures.curve, figures.static_bytes, width),
        "",
        f"most memory that a step needs, by trials fused; the device has {format_bytes(figures.device_bytes)}",
        *_peaks(figures.peaks, figures.device_bytes, width),
        "",
        *_limit(figures),
        *_systems(figures.systems),
    ]


def _limit(figures: StepFigures) -> list[str]:
    count, limit = figures.num_trials, format_bytes(figures.limit_bytes)
    if not figures.fits:
        return [f"{count} trials on the device's {limit}, milliseconds of a step of all of them"]
    return [
        f"all {count} fit; had the device only {limit}, milliseconds of a step of all of them:",
    ]


def _idle(maps: Sequence[IdleFeatureMap], width: int) -> list[str]:
    if not maps:
        return ["  none: its backward uses nothing that its forward makes"]
    top_maps = maps[:_MOST_MAPS]
    rows = [("feature map", "size", "idle ms", "copy ms", "again ms")]
    rows += [
        (
            _cut(feature_map.name, 28),
            format_bytes(feature_map.num_bytes),
            _ms(feature_map.inactive_seconds),
            _NOTHING if feature_map.in_seconds is None else _ms(feature_map.in_seconds),
            _NOTHING if feature_map.recompute_seconds is None else _ms(feature_map.recompute_seconds),
        )
        for feature_map in top_maps
    ]
    lines = _table(rows)
    room, longest = width - len(lines[0]) - 2, maps[0].inactive_seconds
    bars = ["", *(_bar(feature_map.inactive_seconds, longest, room) for feature_map in top_maps)]
    lines_with_bars = [f"{line}  {bar}".rstrip() for line, bar in zip(lines, bars, strict=True)]
    hidden_maps = maps[_MOST_MAPS:]
    more = format_bytes(sum(feature_map.num_bytes for feature_map in hidden_maps))
    return [*lines_with_bars, *([f"  and {len(hidden_maps)} more, {more} together"] if hidden_maps else [])]


def _curve(curve: Sequence[MemoryCurvePoint], static_bytes: int, width: int) -> list[str]:
    """Plot memory beside the static tensors, time to the right and bytes upwards; each column shows its maximum."""
    whole, margin = curve[-1].seconds, 12
    columns = width - margin - 1
    heights, backwards, at = [0] * columns, columns, 0
    for point in curve:
        end = columns if not whole else max(at, round(point.seconds / whole * columns))
        if point.is_backward:
            backwards = min(backwards, at)
        # At least one column, so that a point shorter than a column still shows its peak.
        for column in range(min(at, columns - 1), max(end, min(at + 1, columns))):
            heights[column] = max(heights[column], point.num_bytes - static_bytes)
        at = end
    # The scale ends at the highest column, beside the static tensors, which are the same all the time.
    most = max(heights)
    lines = []
    for row in range(_ROWS - 1, -1, -1):
        label = format_bytes(most) if row == _ROWS - 1 else ""
        cells = "".join(_cell(height, most, row) for height in heights)
        lines.append(f"{label:>{margin - 1}} │{cells}".rstrip())
    lines.append(f"{'0 B':>{margin - 1}} │{'─' * columns}")
    lines.append(
        " " * margin + " " + "forward".ljust(backwards)[:backwards] + "backward and updates"[: columns - backwards]
    )
    return [line.rstrip() for line in lines]


def _cell(height: int, most: int, row: int) -> str:
    # The block characters divide a line into eighths.
    eighths = round(height / most * _ROWS * 8) if most else 0
    return _EIGHTHS[max(0, min(8, eighths - row * 8))]


def _peaks(peaks: Sequence[FusedPeak], device_bytes: int, width: int) -> list[str]:
    rows = [("trials", "static", "peak", "ms")]
    rows += [
        (str(peak.num_trials), format_bytes(peak.static_bytes), format_bytes(peak.peak_bytes), _ms(peak.seconds))
        for peak in peaks
    ]
    lines = _table(rows)
    # The last peak is of the most trials, and so the largest.
    room, most = width - len(lines[0]) - 2 - len("  too much"), peaks[-1].peak_bytes
    lines_with_bars = [lines[0]]
    for line, peak in zip(lines[1:], peaks, strict=True):
        remark = "  too much" if peak.peak_bytes > device_bytes else ""
        lines_with_bars.append(f"{line}  {_bar(peak.peak_bytes, most, room)}{remark}".rstrip())
    return lines_with_bars


def _systems(systems: Sequence[ComparedSystem]) -> list[str]:
    rows: list[tuple[str, ...]] = [("", "all", "compute", "again", "stall", "hidden", "peak", "")]
    for system in systems:
        hidden = _NOTHING if not system.copy_seconds else f"{system.overlapped_seconds / system.copy_seconds:.0%}"
        times = map(_ms, (system.seconds, system.compute_seconds, system.recompute_seconds, system.stall_seconds))
        verdict = "chosen" if system.is_chosen else "" if system.fits else "too much"
        rows.append((_cut(system.name, 24), *times, hidden, format_bytes(system.peak_bytes), verdict))
    lines = _table(rows)
    names = [
        f"  {system.name}: {_parts(system)}" + (f" ({system.stands_for})" if system.stands_for else "")
        for system in systems
    ]
    return [*(line.rstrip() for line in lines), "", *names]


def _parts(system: ComparedSystem) -> str:
    """List sub-arrays, a run of equal sub-arrays once: `3 x (1, 1)`."""
    counted_sizes = [(sizes, len(list(same))) for sizes, same in groupby(system.sub_arrays)]
    return " + ".join(
        f"{count} x ({', '.join(map(str, sizes))})" if count > 1 else f"({', '.join(map(str, sizes))})"
        for sizes, count in counted_sizes
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(c.ljust(w) if not i else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]


def _bar(value: float, most: float, room: int) -> str:
    return "█" * max(1, round(value / most * room)) if most > 0 and room > 0 else ""


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.3f}" if milliseconds < 100 else f"{milliseconds:.0f}"  # noqa: PLR2004 - digits that count


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
