"""Silence around `torch.export`: its advice is for people who export; what matters to us comes as an error."""

import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import TextIO

_FAKE_TENSORS = "torch._subclasses.fake_tensor"
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


class _NoComplaints(logging.Filter):
    """Drops what is logged on threads that have asked for that."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        del record
        return not getattr(self._depth, "value", 0)

    @contextmanager
    def asked(self) -> Iterator[None]:
        before = getattr(self._depth, "value", 0)
        self._depth.value = before + 1
        try:
            yield
        finally:
            self._depth.value = before


_FAKES = _NoComplaints()


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """No log lines of this thread about operators that refuse fake tensors: the error that is raised says the same.

    Whoever calls tries something that may fail, or runs the user's code for the first time; a code whose shapes do not fit has
    its own error from the eager run that follows.
    """
    logging.getLogger(_FAKE_TENSORS).addFilter(_FAKES)  # once, however often it is asked; other threads' lines pass
    with _FAKES.asked():
        yield


@contextmanager
def quiet_export() -> Iterator[None]:
    """No warnings, no log lines below errors, and not the half of a graph that it prints before it fails."""
    talkers = [logging.getLogger(name) for name in _TALKERS]
    levels = [talker.level for talker in talkers]
    with quiet_fakes(), warnings.catch_warnings(), redirect_stderr(_OtherThreads(sys.stderr)):
        warnings.simplefilter("ignore")
        for talker in talkers:
            talker.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for talker, level in zip(talkers, levels, strict=True):
                talker.setLevel(level)
