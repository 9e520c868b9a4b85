"""What is printed while something else has the terminal: kept, shown in its place, and printed when the terminal is free."""

import io
import logging
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO

_NUM_KEPT = 1000


class Printed(io.TextIOBase):
    """A text file that keeps its last lines, and shows them among the recent ones. Written to from many threads.

    Args:
        recent: where each line is shown as well.
    """

    def __init__(self, recent: deque[str]) -> None:
        super().__init__()
        self._recent = recent
        self._kept: deque[str] = deque(maxlen=_NUM_KEPT)
        self._open = ""
        self._lock = threading.Lock()

    def writable(self) -> bool:
        """It is written to."""
        return True

    def write(self, text: str) -> int:
        """Keep a text; a line is shown when it is whole."""
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


@contextmanager
def kept(recent: deque[str]) -> Iterator[None]:
    """Within the block, what is printed or logged to the terminal is kept; then it goes to standard error.

    Args:
        recent: where each line is shown meanwhile.
    """
    printed, stdout, stderr = Printed(recent), sys.stdout, sys.stderr
    try:
        with redirect_stdout(printed), redirect_stderr(printed), _logged_to(printed, (stdout, stderr)):
            yield
    finally:
        printed.replay(stderr)


@contextmanager
def _logged_to(printed: Printed, streams: tuple[TextIO, TextIO]) -> Iterator[None]:
    """Handlers of loggers hold the stream that was there when they were made: have those write elsewhere for so long."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    moved: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
    for logger in loggers:
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
                moved.append((handler, handler.stream))
                handler.setStream(printed)
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)
