"""The live view of a sweep on a terminal.

The view draws on the terminal's second screen: after a resize the next picture fills the whole screen, and leaving the
screen restores the earlier content. The view calls a function for a plain `SweepView`, and must know nothing of the
data's origin. Nothing may be drawn after the screen is restored. `SweepOutput` (`cli/display/output.py`) opens the view
for a command's sweep, and `pool/views/live.py` for the block of `HydraExecutor.live`.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console

from hydra_tune.observe.live.paint import AlternateScreen
from hydra_tune.observe.live.screen import sweep_lines
from hydra_tune.observe.live.snapshot import SweepView
from hydra_tune.observe.live.ticker import ViewRefreshTimer


class LiveView(AbstractContextManager["LiveView"]):
    """Shows a sweep until the `with` block exits, and then restores the terminal, whatever happened.

    A view that can no longer draw, for example after the terminal has gone, ends; the block continues.

    Args:
        snapshot: returns the sweep's present state; called first on the thread of the block, then at most twice a
            second on another thread.
        recent: the last lines of the log, newest last; only read.
    """

    def __init__(self, console: Console, snapshot: Callable[[], SweepView], recent: deque[str]) -> None:
        self._snapshot = snapshot
        self._recent = recent
        self._screen = AlternateScreen(console)
        self._ticker = ViewRefreshTimer(self.refresh, on_error=self._screen.close)

    def refresh(self) -> None:
        """Draw the sweep's present state."""
        width, height = size = self._screen.size
        # A copy, because other threads append lines meanwhile, and a deque that changes cannot be iterated.
        lines = sweep_lines(self._snapshot(), self._recent.copy(), width, height, is_ascii=self._screen.is_ascii)
        self._screen.paint(lines, size)

    def __enter__(self) -> Self:
        self._screen.open()
        # Draw once on this thread: an error of the first picture raises here, with the terminal restored.
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
