"""Shows a sweep as plain lines without a terminal: a regular line of progress, and a limited rate of all lines.

`SweepOutput` (`cli/display/output.py`) shows a command's sweep with a `PlainView` where no live view runs, and sends the
lines of ended trials through a `RateLimit`, too; `pool/views/live.py` does so for `HydraExecutor.live` outside terminals and
notebooks. The module must hold no part of the engine.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from hydra_tune.observe.live import text
from hydra_tune.observe.live.snapshot import SweepView
from hydra_tune.observe.live.ticker import ViewRefreshTimer
from hydra_tune.quantities import format_seconds

_PERIOD_SECONDS, _LOOK_SECONDS = 30.0, 1.0
_MOST_AT_ONCE, _MOST_PER_SECOND = 50, 5.0

_LOGGER = logging.getLogger(__name__)


def progress_line(view: SweepView) -> str:
    """Format a sweep's progress on one line.

    Example: `1m32s of about 2m10s  5/16 trials  4 in flight  best val_acc 0.97 (trial 3)  devices 93%`.
    """
    total_text = f" of about {format_seconds(view.makespan_seconds)}" if view.makespan_seconds is not None else ""
    ended = sum(trial.is_over for trial in view.trials)
    planned = f"/{view.num_planned}" if view.num_planned is not None else ""
    parts = [format_seconds(view.elapsed_seconds) + total_text, f"{ended}{planned} trials"]
    parts.append(f"{len(view.trials) - ended} in flight")
    if view.best is not None:
        parts.append(f"best {view.metric} {text.number(view.best.value)} ({text.label(view.best)})")
    if view.devices:
        use = sum(device.busy_share for device in view.devices) / len(view.devices)
        parts.append(f"devices {use:.0%}")
    return "  ".join(parts)


class RateLimit:
    """Limits the rate of lines: at most 50 at once, and 5 a second in the long run, besides counts. Thread-safe.

    Held-back lines are counted, and the count is written as a line of its own before the next passing line, or by `flush`.
    After a line that cannot be written, a warning says so, and no more are tried. Lines are written under the lock.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._room, self._at = float(_MOST_AT_ONCE), time.monotonic()
        self._num_held, self._is_broken = 0, False
        self._lock = threading.Lock()

    def __call__(self, line: str) -> None:
        """Write a line, or count the line as held back."""
        with self._lock:
            # Also held while writing, so that lines of several threads stay in order behind their count.
            now = time.monotonic()
            # A token bucket: room refills with time, up to the burst of 50 lines.
            self._room = min(_MOST_AT_ONCE, self._room + (now - self._at) * _MOST_PER_SECOND)
            self._at = now
            if self._room < 1:
                self._num_held += 1
                return
            self._room -= 1
            self._say_held()
            self._put(line)

    def flush(self) -> None:
        """Write the number of held-back lines."""
        with self._lock:
            self._say_held()

    def _say_held(self) -> None:
        num_held, self._num_held = self._num_held, 0
        if num_held:
            self._put(f"... and {num_held} more {'line' if num_held == 1 else 'lines'}, too many to print")

    def _put(self, line: str) -> None:
        if self._is_broken:
            return
        try:
            self._write(line)
        # The reader of a pipe has gone, or a disk is full: nothing is wrong with the training.
        except OSError as error:
            self._is_broken = True
            _LOGGER.warning("no more lines can be printed, and training goes on without them: %s", error)


class PlainView(AbstractContextManager["PlainView"]):
    """Writes a sweep's progress every half a minute, until the `with` block exits.

    Args:
        write: writes a line; called from another thread.
        snapshot: returns the sweep's present state; likewise. A snapshot is taken about every second, because a snapshot
            finds trials that have ended.
    """

    def __init__(self, write: Callable[[str], None], snapshot: Callable[[], SweepView]) -> None:
        self._write, self._snapshot = write, snapshot
        self._due = time.monotonic() + _PERIOD_SECONDS
        self._ticker = ViewRefreshTimer(self._look, period_seconds=_LOOK_SECONDS)

    def _look(self) -> None:
        view, now = self._snapshot(), time.monotonic()
        if now >= self._due:
            self._due = now + _PERIOD_SECONDS
            self._write(progress_line(view))

    def __enter__(self) -> Self:
        self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ticker.stop()
