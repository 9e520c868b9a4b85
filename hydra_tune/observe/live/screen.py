"""Formats a `SweepView` as lines of a terminal: the sweep, its devices, its trials, and the last printed lines.

Column widths do not depend on reported values, speeds or times, which change from picture to picture. `LiveView`
(`terminal.py`) and `NotebookView` (`notebook.py`) call `sweep_lines` for each picture of a sweep. The module must hold no part
of the engine: a plain `SweepView` comes in.
"""

import functools
from collections.abc import Iterable, Sequence

from rich.segment import Segment
from rich.text import Text

from hydra_tune.observe.live import text
from hydra_tune.observe.live.rows import Line, ScreenCell, ScreenColumn, bar, heads, one_line, row
from hydra_tune.observe.live.snapshot import DeviceView, SweepView, TrialView
from hydra_tune.observe.live.sparkline import sparkline
from hydra_tune.quantities import format_bytes, format_seconds

_STYLES = {"running": "green", "waiting": "cyan", "preparing": "yellow", "queued": "dim"}
_ORDER = {"running": 0, "waiting": 1, "preparing": 2, "queued": 3}
_TABLE = 2  # lines of a table's blank line and column names
_WIDE = 120  # columns from which on there is room for less important figures
_LEAST_TRIALS = 4  # lines reserved for trials
_ASCII = str.maketrans("▁▂▃▄▅▆▇█━─×↑↓…", "__..--==#-x^v~")  # noqa: RUF001


def sweep_lines(
    view: SweepView, recent: Iterable[str], width: int, height: int, *, is_ascii: bool = False
) -> list[Line]:
    """Format a sweep within a given number of lines and columns."""
    lines = _header(view, width)
    lines += _devices(view.devices, width, height - len(lines) - _LEAST_TRIALS)
    active = sorted(
        (trial for trial in view.trials if not trial.is_over),
        key=lambda trial: (_ORDER.get(trial.state, 9), trial.number),
    )
    lines += _trials(active, view.metric, width, height - len(lines))
    lines = (lines + _tail(tuple(recent), width, height - len(lines)))[:height]
    if is_ascii:
        return [[Segment(_to_ascii(segment.text), segment.style) for segment in line] for line in lines]
    return lines


def _to_ascii(shown: str) -> str:
    return shown.translate(_ASCII).encode("ascii", "replace").decode()


def _header(view: SweepView, width: int) -> list[Line]:
    lines = [one_line([ScreenCell(view.name, "bold"), *_times(view)], width), one_line(_counts(view, width), width)]
    best = view.best
    if best is None:
        missing = (
            "no completed trial fulfils the constraints" if view.count("completed") else "no trial has completed yet"
        )
        lines.append(one_line([ScreenCell(missing, "dim")], width))
    else:
        value = ScreenCell(f"{view.metric} {text.number(best.value)}", "bold green")
        where = ScreenCell(f" in {text.label(best)}: {text.params(best.params)}".rstrip(": "))
        lines.append(one_line([ScreenCell("best "), value, where], width))
    if view.status == "stopping":
        lines.append(one_line([ScreenCell("stopping as soon as the running units end ...", "bold yellow")], width))
    return lines


def _times(view: SweepView) -> list[ScreenCell]:
    cells = [ScreenCell(f"  {format_seconds(view.elapsed_seconds)}")]
    if view.makespan_seconds is not None:
        cells.append(ScreenCell(f" of about {format_seconds(view.makespan_seconds)}"))
        if view.bound_seconds and view.makespan_seconds >= view.SHORT_SECONDS:
            cells.append(ScreenCell(f", at least {format_seconds(view.bound_seconds)} of it units", "dim"))
    return cells


def _counts(view: SweepView, width: int) -> list[ScreenCell]:
    ended = sum(trial.is_over for trial in view.trials)
    planned = f"/{view.num_planned}" if view.num_planned is not None else ""
    failed, cancelled = view.count("failed"), view.count("cancelled")
    cells = [ScreenCell(f"{ended}{planned} {'trials' if planned else 'ended'}  ")]
    if view.num_planned:
        cells.append(ScreenCell(bar(ended / view.num_planned, min(40, width // 6)) + "  "))
    cells.append(ScreenCell(f"{view.count('completed')} done  {view.count('pruned')} pruned  "))
    cells.append(ScreenCell(f"{failed} failed", "red" if failed else ""))
    if cancelled:
        cells.append(ScreenCell(f"  {cancelled} cancelled"))
    fused = sum(trial.group_size > 1 for trial in view.trials if not trial.is_over)
    return [*cells, ScreenCell(f"  {len(view.trials) - ended} in flight" + (f", {fused} in groups" if fused else ""))]


def _devices(devices: Sequence[DeviceView], width: int, room: int) -> list[Line]:
    room -= _TABLE
    if not devices or room < 1:
        return []
    is_wide = width >= _WIDE
    name = min(16, max(6, *(len(device.name) for device in devices)))
    # The other columns of a narrow table and the gaps take 63.
    bars = 20 if is_wide else max(4, min(20, width - name - 64))
    columns = [ScreenColumn("device", name), ScreenColumn("use", bars), ScreenColumn("", 4, is_right=True)]
    columns += [ScreenColumn("", bars)] if is_wide else []
    columns += [ScreenColumn("resident / budget", 21, is_right=True), ScreenColumn("loading", 7, is_right=True)]
    columns += [ScreenColumn("in", 12, is_right=True), ScreenColumn("out", 12, is_right=True)]
    columns += [ScreenColumn("in all", 11, is_right=True), ScreenColumn("units", 8, is_right=True)] if is_wide else []
    columns.append(ScreenColumn("", 0))
    # The last line of the room then counts the devices that are not shown.
    visible_devices = devices if len(devices) <= room else devices[: room - 1]
    lines: list[Line] = [[], heads(columns, width)]
    lines += [
        row(columns, [*_device(device, bars, is_wide=is_wide), ScreenCell("")], width) for device in visible_devices
    ]
    hidden_devices = devices[len(visible_devices) :]
    if hidden_devices:
        use = sum(device.busy_share for device in hidden_devices) / len(hidden_devices)
        lines.append(one_line([ScreenCell(f"... and {len(hidden_devices)} more, used {use:.0%}", "dim")], width))
    return lines


def _device(device: DeviceView, bars: int, *, is_wide: bool) -> list[ScreenCell]:
    share = device.resident_bytes / device.budget_bytes if device.budget_bytes else 0.0
    cells = [
        ScreenCell(device.name),
        ScreenCell(bar(device.busy_share, bars), "cyan"),
        ScreenCell(f"{device.busy_share:.0%}"),
        *([ScreenCell(bar(share, bars), "magenta")] if is_wide else []),
        ScreenCell(f"{format_bytes(device.resident_bytes)} / {format_bytes(device.budget_bytes)}"),
        ScreenCell(str(device.loads_under_way or "-")),
        ScreenCell(_rate(device.bytes_in_per_second)),
        ScreenCell(_rate(device.bytes_out_per_second)),
    ]
    if is_wide:
        num_bytes = sum(device.bytes_in_by_kind.values()) + sum(device.bytes_out_by_kind.values())
        cells += [
            ScreenCell(format_bytes(num_bytes + sum(device.bytes_across_by_kind.values()))),
            ScreenCell(str(device.units)),
        ]
    return cells


def _rate(bytes_per_second: float) -> str:
    return f"{format_bytes(bytes_per_second)}/s" if bytes_per_second >= 1 else "-"


def _trials(active: Sequence[TrialView], metric: str, width: int, room: int) -> list[Line]:
    room -= _TABLE
    if not active or room < 1:
        return []
    bars, spark = (6, 10) if width < _WIDE else (20, 32)
    epochs = max(5, *(len(text.epochs(trial.epochs, trial.epochs)) for trial in active))
    order = _varying_first(active)
    name = min(20, max(5, *(len(trial.name or str(trial.number)) for trial in active)))
    columns = [ScreenColumn("trial", name, is_right=True), ScreenColumn("state", 9), ScreenColumn("done", bars)]
    columns += [
        ScreenColumn("epoch", epochs, is_right=True),
        ScreenColumn(metric, max(10, min(14, len(metric))), is_right=True),
    ]
    columns += [ScreenColumn("reports", spark), ScreenColumn("left", 6, is_right=True), ScreenColumn("parameters", 0)]
    visible_trials = active if len(active) <= room else active[: room - 1]
    lines: list[Line] = [[], heads(columns, width)]
    lines += [row(columns, _trial(trial, bars, spark, order), width) for trial in visible_trials]
    hidden_trials = active[len(visible_trials) :]
    if hidden_trials:
        counts = ", ".join(
            f"{count} {state}" for state in _ORDER if (count := sum(t.state == state for t in hidden_trials))
        )
        lines.append(one_line([ScreenCell(f"... and {len(hidden_trials)} more: {counts}", "dim")], width))
    return lines


def _varying_first(trials: Sequence[TrialView]) -> list[str]:
    """Order parameter names with varying parameters first: where room is short, equal values tell nothing."""
    names = dict.fromkeys(name for trial in trials for name in trial.params)
    kinds = {name: len({repr(trial.params.get(name)) for trial in trials if trial.params}) for name in names}
    # `sorted` is stable: within either half the study's order stays.
    return sorted(names, key=lambda name: kinds[name] == 1)


def _trial(trial: TrialView, bars: int, spark: int, order: Sequence[str]) -> list[ScreenCell]:
    remaining_seconds = trial.remaining_seconds
    return [
        ScreenCell(trial.name or str(trial.number)),
        ScreenCell(trial.state, _STYLES.get(trial.state, "")),
        ScreenCell(bar(trial.share_done, bars), "green"),
        ScreenCell(text.epochs(trial.epoch, trial.epochs)),
        ScreenCell(text.number(trial.value)),
        ScreenCell(sparkline(trial.values, spark), "cyan"),
        ScreenCell("-" if remaining_seconds is None else format_seconds(remaining_seconds)),
        ScreenCell(text.params({name: trial.params[name] for name in order if name in trial.params})),
    ]


def _tail(recent: Sequence[str], width: int, room: int) -> list[Line]:
    if not recent or room < 2:  # noqa: PLR2004 - a blank line, and one to read
        return []
    return [[], *(one_line([ScreenCell(_plain(line), "dim")], width) for line in recent[-(room - 1) :])]


# The same recent lines are drawn picture after picture.
@functools.lru_cache(maxsize=256)
def _plain(line: str) -> str:
    return Text.from_ansi(line).plain
