"""Silence around `torch.export`: its advice is for people who export; what matters to us comes as an error."""

import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import TextIO

_TALKERS = ("torch.fx.experimental.symbolic_shapes", "torch.export")


class _OtherThreads(io.TextIOBase):
    """Passes on what other threads write, and drops what this one does."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._muted = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._muted else self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


@contextmanager
def quiet_export() -> Iterator[None]:
    """No warnings, no log lines below errors, and not the half of a graph that it prints before it fails."""
    talkers = [logging.getLogger(name) for name in _TALKERS]
    levels = [talker.level for talker in talkers]
    with warnings.catch_warnings(), redirect_stderr(_OtherThreads(sys.stderr)):
        warnings.simplefilter("ignore")
        for talker in talkers:
            talker.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for talker, level in zip(talkers, levels, strict=True):
                talker.setLevel(level)
