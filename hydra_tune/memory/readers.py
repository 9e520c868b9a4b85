"""`Readers`: while a trial's own code may read its tensors, none of their bytes goes away under it.

Between units a trial's blocks are not pinned: other devices' workers and the disk's thread move them as they need the room. The
tensors are pointed at the new place, where the same bytes are, but whoever has begun to read may still be at the old one. So
what the tensors leave stays until the code has ended. Nothing waits for that: the room counts as free, and is, that much later.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor


class Readers:
    """Those of one trial's tensors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for microseconds, inside a block's lock
        self._count = 0
        self._left: list[Tensor] = []

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The code runs; may be entered again within."""
        with self._lock:
            self._count += 1
        try:
            yield
        finally:
            left: list[Tensor] = []
            with self._lock:
                self._count -= 1
                if not self._count:
                    left, self._left = self._left, left
            del left  # to free it may take a while

    def point(self, tensors: Sequence[Tensor], views: Sequence[Tensor]) -> None:
        """Have tensors be views of another place with the same bytes."""
        with self._lock:
            if self._count:
                self._left += [tensor.data for tensor in tensors]
            for tensor, view in zip(tensors, views, strict=True):
                tensor.data = view
