"""Silences `torch.export`: its advice is for users of export, and everything relevant here arrives as an error.

`capture` (`step_capture.py`) exports each step within `quiet_export`; `batched/joint_graph.py` traces a stacked step
within `quiet_fakes`.

Note: `quiet_export` changes the filters of warnings, the levels of two loggers and `sys.stderr` of the whole process, so
only a holder of the gate (`capture_lock.py`) that is alone may enter the context. Any thread may enter `quiet_fakes`, which
silences the calling thread alone.
"""

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO, cast

_FAKE_TENSORS = "torch._subclasses.fake_tensor"
_TALKERS = ("torch.fx.experimental.symbolic_shapes", "torch.export")


class _ThreadMutedStream:
    """Passes all on to a stream, apart from calls of `write` on the thread that created the object."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._muted = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._muted else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _ThreadMuteFilter(logging.Filter):
    """Drops log records on threads that have asked for silence."""

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


_FAKES = _ThreadMuteFilter()


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Silence this thread's log lines of torch's fake tensors, e.g. about a refusing operator."""
    logging.getLogger(_FAKE_TENSORS).addFilter(_FAKES)  # added once, however often called; lines of other threads pass
    with _FAKES.asked():
        yield


@contextmanager
def quiet_export() -> Iterator[None]:
    """Silence all threads' warnings and export's log lines below errors, and the graph that a failing export prints here."""
    talkers = [logging.getLogger(name) for name in _TALKERS]
    levels = [talker.level for talker in talkers]
    # The redirection holds for all threads, hence a stream that drops the text of this thread only.
    with quiet_fakes(), warnings.catch_warnings(), redirect_stderr(cast("TextIO", _ThreadMutedStream(sys.stderr))):
        warnings.simplefilter("ignore")
        for talker in talkers:
            talker.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for talker, level in zip(talkers, levels, strict=True):
                talker.setLevel(level)
