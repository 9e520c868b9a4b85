"""The live view of a sweep below a notebook's cell, with nothing installed but the kernel.

`pool/views/live.py` shows a `NotebookView` for the block of `HydraExecutor.live` where the process is a notebook's
kernel. The module must not import IPython before a view opens, and holds no part of the engine.
"""

import html
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from hydra_tune.observe.live.screen import sweep_lines
from hydra_tune.observe.live.snapshot import SweepView
from hydra_tune.observe.live.ticker import ViewRefreshTimer

_WIDTH, _HEIGHT = 110, 40
_PERIOD_SECONDS = 1.0


def is_notebook() -> bool:
    """Whether this process is a notebook's kernel; checked without any import."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class NotebookView(AbstractContextManager["NotebookView"]):
    """Shows a sweep below the cell until the `with` block exits; the last state stays.

    Args:
        snapshot: returns the sweep's present state; called at most once a second on another thread, and as the block
            begins and ends on its own.
    """

    def __init__(self, snapshot: Callable[[], SweepView]) -> None:
        self._snapshot = snapshot
        self._handle: Any = None
        self._ticker = ViewRefreshTimer(self._update, period_seconds=_PERIOD_SECONDS)

    def _shown(self) -> dict[str, str]:
        lines = sweep_lines(self._snapshot(), (), _WIDTH, _HEIGHT)
        # Plain text as well, for front ends without HTML.
        plain = "\n".join("".join(segment.text for segment in line).rstrip() for line in lines)
        style = "line-height: 1.2; white-space: pre"
        return {"text/plain": plain, "text/html": f'<pre style="{style}">{html.escape(plain)}</pre>'}

    def _update(self) -> None:
        self._handle.update(self._shown(), raw=True)

    def __enter__(self) -> Self:
        from IPython.display import display  # noqa: PLC0415 - a kernel has it, and nobody else needs it

        self._handle = display(self._shown(), raw=True, display_id=True)
        self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The ticker first, so that its last picture cannot replace the final one.
        self._ticker.stop()
        self._update()
