"""The gate between captures and computation.

`torch.export` changes the whole process while running in a thread. `torch.compiler.is_compiling()` is true everywhere,
so eager code that asks (optimizers, many models) takes other branches. And oneDNN is switched off, so convolutions in
other threads run other kernels, which round differently. Captures therefore run alone: all computation for a trial, the
trial's own code or a shard unit, passes the gate shared, and a capture passes the gate exclusively.

`captured_graph` (`shard/partition/trial_step.py`) takes the gate exclusively for each capture; the units of a batch
(`train/loop/batch_units.py`) and a trial's own code between units (`train/trial.py`) take the gate shared.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CaptureGate:
    """A lock shared by many threads or held by a single thread; a thread that waits for exclusive access goes first.

    A thread inside `shared` may enter `shared` again, but not `exclusive`.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._sharing = 0
        self._alone = False
        self._waiting = 0
        self._forgotten: set[int] = set()  # threads inside `shared` not expected to leave
        self._here = threading.local()

    @property
    def is_wanted(self) -> bool:
        """Whether a capture waits for computations to end."""
        return self._waiting > 0

    def forget(self, thread: int) -> None:
        """Stop waiting for a thread inside `shared` that computes no more and is not expected to leave."""
        with self._condition:
            self._forgotten.add(thread)
            self._sharing -= 1
            self._condition.notify_all()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Context for computations."""
        if getattr(self._here, "is_inside", False):
            yield  # a wait for a capture, which waits for this thread, would never end
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Context for waits, which may be waits for a capture: outside `shared`, if the thread is inside."""
        if not getattr(self._here, "is_inside", False):
            yield
            return
        self._leave()
        try:
            yield
        finally:
            self._enter()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Context for a capture."""
        with self._condition:
            # Counted before the wait, so that no further computation enters `shared`.
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

    def _enter(self) -> None:
        with self._condition:
            # Waiting captures go first: a steady stream of units would otherwise keep a capture out for ever.
            self._condition.wait_for(lambda: not self._alone and not self._waiting)
            self._sharing += 1
        self._here.is_inside = True

    def _leave(self) -> None:
        self._here.is_inside = False
        with self._condition:
            if threading.get_ident() in self._forgotten:
                # The thread came back after all; `forget` has given back its share already.
                self._forgotten.discard(threading.get_ident())
            else:
                self._sharing -= 1
                self._condition.notify_all()


GATE = CaptureGate()  # one per process, like the flag guarded by the gate
