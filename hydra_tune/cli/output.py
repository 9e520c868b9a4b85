"""Where a sweep is shown: a live view, a line for each trial, or one JSON object.

Decides which of the three, and keeps what the user's code prints out of the other two.
"""

import io
import json
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO

from rich.console import Console

from hydra_tune.cli.options import Display
from hydra_tune.observe.snapshot import SweepView
from hydra_tune.observe.summary import print_summary, to_json
from hydra_tune.observe.terminal import LiveView

_NUM_KEPT = 1000
_NUM_RECENT = 200


class Output:
    """Standard output of one sweep.

    Args:
        display: how it is to be shown.
    """

    def __init__(self, display: Display) -> None:
        self._stdout = sys.stdout
        self._stderr = sys.stderr
        self._console = Console(file=self._stdout, highlight=False)
        self._as_json = display.as_json
        terminal = self._stdout.isatty() and not self._console.is_dumb_terminal
        self._live = display.live and terminal and not display.as_json
        self._recent: deque[str] = deque(maxlen=_NUM_RECENT)

    def log(self, line: str) -> None:
        """Show one line about a trial that has ended."""
        if self._live:
            self._recent.append(line)
        else:
            print(line, file=self._stderr if self._as_json else self._stdout, flush=True)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Within the block, what the user's code prints stays off standard output if that is for JSON."""
        if self._as_json:
            with redirect_stdout(self._stderr):
                yield
        else:
            yield

    @contextmanager
    def showing(self, snapshot: Callable[[], SweepView]) -> Iterator[None]:
        """Within the block, show the sweep.

        Args:
            snapshot: returns the sweep as it is now; for the live view called from another thread.
        """
        if not self._live:
            with self.quiet():
                yield
            return
        printed = _Lines(self._recent)
        try:
            with (
                redirect_stdout(printed),
                redirect_stderr(printed),
                LiveView(self._console, snapshot, self._recent),
            ):
                yield
        finally:
            printed.replay(self._stderr)

    def report(self, view: SweepView) -> None:
        """Show what the sweep came to."""
        if self._as_json:
            json.dump(to_json(view), self._stdout, allow_nan=False)
            self._stdout.write("\n")
            self._stdout.flush()
        else:
            print_summary(self._console, view)


class _Lines(io.TextIOBase):
    """A text file that keeps its last lines, and shows them among the recent ones. Written to from many threads."""

    def __init__(self, recent: deque[str]) -> None:
        super().__init__()
        self._recent = recent
        self._kept: deque[str] = deque(maxlen=_NUM_KEPT)
        self._open = ""
        self._lock = threading.Lock()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._open = (self._open + text).split("\n")
            for line in lines:
                # A progress bar redraws its line after a carriage return; the last state is the one to show.
                shown = line.rstrip("\r").rpartition("\r")[2]
                self._kept.append(shown)
                self._recent.append(shown)
        return len(text)

    def replay(self, stream: TextIO) -> None:
        """Write the lines that were kept where they were meant to go."""
        with self._lock:
            lines = [*self._kept, *([self._open] if self._open else [])]
            self._kept.clear()
            self._open = ""
        for line in lines:
            print(line, file=stream)
