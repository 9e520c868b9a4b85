"""The live view of a sweep on a terminal.

Draws on the terminal's second screen: whatever size the terminal becomes, the next refresh fills all of it anew, and
leaving it brings back what was there. It is given a function that returns a plain `SweepView` and knows nothing of
where that comes from; it calls that function from a thread of its own.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hydra_tune.observe import text
from hydra_tune.observe.snapshot import ENDED, DeviceView, SweepView, TrialView
from hydra_tune.quantities import format_bytes, format_seconds

_REFRESHES_PER_SECOND = 4
_STYLES = {"running": "green", "waiting": "cyan", "preparing": "yellow", "queued": "dim"}
_ORDER = {"running": 0, "waiting": 1, "preparing": 2, "queued": 3}
_HEADINGS = 2  # a table's blank line and column names


class SweepScreen:
    """A `SweepView` as something rich can draw, cut to the height there is.

    Args:
        view: what to draw.
        recent: lines to fill the rest of the screen with; the last ones are shown.
    """

    def __init__(self, view: SweepView, recent: Iterable[str] = ()) -> None:
        self._view = view
        self._recent = tuple(recent)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or options.max_height
        header = list(_header(self._view))
        yield from header
        rest = height - sum(len(console.render_lines(line, options, pad=False)) for line in header)
        devices = self._view.devices
        if devices and rest > len(devices) + _HEADINGS:
            yield from _section(_devices(devices))
            rest -= len(devices) + _HEADINGS
        active = sorted(
            (t for t in self._view.trials if t.state not in ENDED), key=lambda t: (_ORDER.get(t.state, 9), t.number)
        )
        room = rest - _HEADINGS
        if active and room > 0:
            shown = active if len(active) <= room else active[: room - 1]
            yield from _section(_trials(shown, self._view.metric))
            if len(shown) < len(active):
                yield Text(f"... and {len(active) - len(shown)} more", style="dim")
            room -= len(active)
        yield from _tail(self._recent, room - 1)


def _section(table: Table) -> Iterator[RenderableType]:
    yield Text()
    yield table


def _header(view: SweepView) -> Iterator[Text]:
    ended = sum(trial.state in ENDED for trial in view.trials)
    planned = f"/{view.num_planned}" if view.num_planned is not None else ""
    parts = [f"{ended}{planned} trials", f"{view.count('completed')} done", f"{view.count('pruned')} pruned"]
    parts += [f"{view.count('failed')} failed", format_seconds(view.elapsed_seconds)]
    title = Text(view.name, style="bold", no_wrap=True, overflow="ellipsis")
    yield title.append("  " + "  ".join(parts), style="not bold")
    best = view.best
    line = Text("no trial has completed yet", style="dim", no_wrap=True, overflow="ellipsis")
    if best is not None:
        line = Text("best ", no_wrap=True, overflow="ellipsis")
        line.append(f"{view.metric} {text.number(best.value)}", style="bold green")
        line.append(f" in trial {best.number}: {text.params(best.params)}")
    yield line
    if view.status == "stopping":
        yield Text("stopping as soon as the running units end ...", style="bold yellow")


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", expand=True)


def _devices(devices: tuple[DeviceView, ...]) -> Table:
    table = _table()
    table.add_column("device", no_wrap=True)
    table.add_column("", width=16)
    table.add_column("busy", justify="right", no_wrap=True)
    table.add_column("resident / budget", justify="right", no_wrap=True)
    table.add_column("", ratio=1)
    for device in devices:
        held = f"{format_bytes(device.resident_bytes)} / {format_bytes(device.budget_bytes)}"
        share = device.resident_bytes / device.budget_bytes if device.budget_bytes else 0.0
        table.add_row(
            Text(device.name), _bar(device.busy_share, 16), f"{device.busy_share:.0%}", held, _bar(share, None)
        )
    return table


def _trials(trials: list[TrialView], metric: str) -> Table:
    table = _table()
    table.add_column("trial", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("", width=12)
    table.add_column("epoch", justify="right", no_wrap=True)
    table.add_column(metric, justify="right", no_wrap=True, max_width=14, overflow="ellipsis")
    table.add_column("ETA", justify="right", no_wrap=True)
    table.add_column("parameters", no_wrap=True, overflow="ellipsis", ratio=1)
    for trial in trials:
        left = trial.remaining_seconds
        table.add_row(
            str(trial.number),
            Text(trial.state, style=_STYLES.get(trial.state, "")),
            _bar(trial.share_done, 12),
            text.epochs(trial.epoch, trial.epochs),
            text.number(trial.value),
            "-" if left is None else format_seconds(left),
            Text(text.params(trial.params)),
        )
    return table


def _bar(share: float, width: int | None) -> ProgressBar:
    return ProgressBar(total=1.0, completed=min(1.0, max(0.0, share)), width=width)


def _tail(lines: tuple[str, ...], room: int) -> Iterator[RenderableType]:
    if lines and room > 0:
        yield Text()
        for line in lines[-room:]:
            yield Text.from_ansi(line, no_wrap=True, overflow="ellipsis", style="dim")


class LiveView(AbstractContextManager["LiveView"]):
    """Shows a sweep until the `with` block is left, then gives the terminal back, whatever happened.

    Args:
        console: the terminal.
        snapshot: returns the sweep as it is now; called from another thread, several times a second.
        recent: the last lines of the log, newest last; only read.
    """

    def __init__(self, console: Console, snapshot: Callable[[], SweepView], recent: deque[str]) -> None:
        self._snapshot = snapshot
        self._recent = recent
        self._live = Live(
            console=console,
            screen=True,
            get_renderable=self._screen,
            refresh_per_second=_REFRESHES_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def _screen(self) -> RenderableType:
        return SweepScreen(self._snapshot(), self._recent.copy())

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
