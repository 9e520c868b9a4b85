"""The live view of a sweep on a terminal.

Draws on the terminal's second screen: whatever size the terminal becomes, the next refresh fills all of it anew, and
leaving it brings back what was there. It is given a function that returns a plain `SweepView` and knows nothing of
where that comes from; it calls that function from a thread of its own.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live

from hydra_tune.observe.screen import SweepScreen
from hydra_tune.observe.snapshot import SweepView
from hydra_tune.observe.ticker import Ticker


class LiveView(AbstractContextManager["LiveView"]):
    """Shows a sweep until the `with` block is left, then gives the terminal back, whatever happened.

    A view that cannot be drawn any more, because the terminal has gone for example, ends; the block goes on.

    Args:
        console: the terminal.
        snapshot: returns the sweep as it is now; called from another thread, about twice a second.
        recent: the last lines of the log, newest last; only read.
    """

    def __init__(self, console: Console, snapshot: Callable[[], SweepView], recent: deque[str]) -> None:
        self._snapshot = snapshot
        self._recent = recent
        self._live = Live(
            console=console,
            screen=True,
            get_renderable=self._screen,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._ticker = Ticker(self._live.refresh, on_error=self._live.stop)

    @property
    def cpu_seconds(self) -> float:
        """CPU time that the view's thread has used."""
        return self._ticker.cpu_seconds

    def _screen(self) -> RenderableType:
        return SweepScreen(self._snapshot(), self._recent.copy())

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._ticker.stop()
        finally:
            self._live.stop()
