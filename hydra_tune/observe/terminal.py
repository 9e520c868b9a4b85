"""The live view of a sweep on a terminal.

Draws on the terminal's second screen: whatever size the terminal becomes, the next picture fills all of it anew, and
leaving it brings back what was there. It is given a function that returns a plain `SweepView` and knows nothing of
where that comes from; it calls that function from a thread of its own.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console

from hydra_tune.observe.paint import Screen
from hydra_tune.observe.screen import sweep_lines
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
        self._screen = Screen(console)
        self._ticker = Ticker(self.refresh, on_error=self._screen.close)

    @property
    def cpu_seconds(self) -> float:
        """CPU time that the view's thread has used."""
        return self._ticker.cpu_seconds

    def refresh(self) -> None:
        """Draw the sweep as it is now."""
        width, height = size = self._screen.size
        lines = sweep_lines(self._snapshot(), self._recent.copy(), width, height, is_ascii=self._screen.is_ascii)
        self._screen.paint(lines, size)

    def __enter__(self) -> Self:
        self._screen.open()
        try:
            self.refresh()
        except BaseException:
            self._screen.close()
            raise
        self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._ticker.stop()
        finally:
            self._screen.close()
