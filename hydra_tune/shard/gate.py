"""The gate between capture and everything that computes.

`torch.export` changes the whole process while it runs in one thread: `torch.compiler.is_compiling()` is true everywhere, so
that eager code that asks (optimizers, many models) takes other branches; and oneDNN is switched off, so that convolutions in
other threads run other kernels, which round differently. So captures run alone: whatever computes for a trial, its own code
or a shard unit, passes the gate shared, a capture passes it exclusively.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CaptureGate:
    """A lock that many may share or one may hold alone; who wants it alone goes first. Not reentrant."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._sharing = 0
        self._alone = False
        self._waiting = 0
        self._forgotten: set[int] = set()  # threads that have passed and are not expected back

    @property
    def is_wanted(self) -> bool:
        """Whether a capture waits for whatever computes."""
        return self._waiting > 0

    def forget(self, thread: int) -> None:
        """A thread that has passed `shared`, once, computes no more, and will not say so."""
        with self._condition:
            self._forgotten.add(thread)
            self._sharing -= 1
            self._condition.notify_all()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """For whatever computes."""
        with self._condition:
            self._condition.wait_for(lambda: not self._alone and not self._waiting)
            self._sharing += 1
        try:
            yield
        finally:
            with self._condition:
                if threading.get_ident() in self._forgotten:
                    self._forgotten.discard(threading.get_ident())
                else:
                    self._sharing -= 1
                    self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """For a capture."""
        with self._condition:
            self._waiting += 1
            self._condition.wait_for(lambda: not self._alone and not self._sharing)
            self._waiting -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._condition:
                self._alone = False
                self._condition.notify_all()


GATE = CaptureGate()  # one for the process, as the flag it guards
