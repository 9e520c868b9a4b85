"""Captures output printed while a live view has the terminal: shown within the view; the last lines are printed again.

`SweepOutput` (`cli/display/output.py`) and `pool/views/live.py` enter `kept` just before a `LiveView` opens, and leave
`kept` after the terminal is restored. Only streams and log handlers of Python are redirected, not the output of libraries
in C. The lock of a stream is held for its lines alone, never while the destination writes.
"""

import io
import logging
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO

_NUM_KEPT = 1000


class CapturedOutputStream(io.TextIOBase):
    """A text file that keeps its last 1000 lines, and shows new lines among the recent lines. Any thread may write.

    After `replay`, the file passes its text on: a log handler made meanwhile keeps the file as its stream.
    """

    def __init__(self, recent: deque[str]) -> None:
        super().__init__()
        self._recent = recent
        # Bounded, because a program may print as long as it runs.
        self._kept: deque[str] = deque(maxlen=_NUM_KEPT)
        self._open = ""
        self._lock = threading.Lock()
        self._is_replayed = False
        self._destination: TextIO | None = None

    def writable(self) -> bool:
        """Always true: the file takes only writes."""
        return True

    def write(self, text: str) -> int:
        """Keep a text until `replay`; a line is shown once complete."""
        with self._lock:
            if not self._is_replayed:
                self._keep(text)
                return len(text)
        print(text, end="", file=self._destination)
        return len(text)

    def _keep(self, text: str) -> None:
        *lines, rest = (self._open + text).split("\n")
        # Without the earlier states, because a bar may be redrawn for hours before its line ends.
        self._open = _last_state(rest) + ("\r" if rest.endswith("\r") else "")
        for line in map(_last_state, lines):
            self._kept.append(line)
            self._recent.append(line)

    def replay(self, stream: TextIO) -> None:
        """Write the kept lines, also those of stdout, to `stream`, and from now on all further text."""
        with self._lock:
            self._is_replayed, self._destination = True, stream
            lines = [*self._kept, *([self._open] if self._open else [])]
            self._kept.clear()
            self._open = ""
        # Outside the lock: the destination may block.
        for line in lines:
            print(line, file=stream)


def _last_state(line: str) -> str:
    """Return the last state of a line; a progress bar redraws its line after a carriage return."""
    return line.rstrip("\r").rpartition("\r")[2]


@contextmanager
def kept(recent: deque[str]) -> Iterator[None]:
    """Within the block, capture output printed or logged to the terminal; afterwards the last lines go to standard error."""
    printed, stdout, stderr = CapturedOutputStream(recent), sys.stdout, sys.stderr
    try:
        with redirect_stdout(printed), redirect_stderr(printed), _logged_to(printed, (stdout, stderr)):
            yield
    finally:
        printed.replay(stderr)


@contextmanager
def _logged_to(printed: CapturedOutputStream, streams: tuple[TextIO, TextIO]) -> Iterator[None]:
    """Redirect handlers of loggers, since a handler keeps the stream of its creation."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    redirected: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
    for logger in loggers:
        # The manager's dictionary also holds placeholders, which have no handlers.
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            if not isinstance(handler, logging.StreamHandler):
                continue
            # A handler made during an earlier view passes its text on to a terminal that this view has now.
            if handler.stream in streams or isinstance(handler.stream, CapturedOutputStream):
                redirected.append((handler, handler.stream))
                handler.setStream(printed)
    try:
        yield
    finally:
        for handler, stream in redirected:
            handler.setStream(stream)
