"""`Readers`: while a trial's own code may read its tensors, none of their bytes goes away under it.

Between units a trial's blocks are not pinned: other devices' workers and the disk's thread move them as they need the room. The
tensors are pointed at the new place, where the same bytes are, but whoever has begun to read may still be at the old one. So
what the tensors leave stays until the code has ended. Nothing waits for that: the room counts as free, and is, that much later.

Note: in common. What nobody trains may be one object in several trials, such as a frozen embedding. As long as that is so, none
of them moves it: another may be computing with it.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

_LOCK = threading.Lock()  # of what is in common; held for microseconds, inside a trial's lock
_ALL: "weakref.WeakSet[Readers]" = weakref.WeakSet()


class Readers:
    """Those of one trial's tensors."""

    def __init__(self) -> None:
        self._untrained: Counter[int] = Counter()  # by `id`: in how many of the trial's groups it is
        with _LOCK:
            _ALL.add(self)
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

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """A group of the trial has these parameters or buffers."""
        with _LOCK:
            self._untrained.update(id(tensor) for tensor in tensors if not tensor.requires_grad)

    def let_go(self, tensors: Sequence[Tensor]) -> None:
        """It has them no longer."""
        with _LOCK:
            for key in map(id, tensors):
                if self._untrained[key] > 1:
                    self._untrained[key] -= 1
                else:
                    del self._untrained[key]

    def in_common(self, tensors: Sequence[Tensor]) -> set[int]:
        """Those of these tensors, by `id`, that another trial has as well."""
        keys = [id(tensor) for tensor in tensors if not tensor.requires_grad]
        with _LOCK:
            others = [other._untrained for other in _ALL if other is not self and other._untrained] if keys else []  # noqa: SLF001
            return {key for key in keys if any(key in other for other in others)}

    def point(self, tensors: Sequence[Tensor], views: Sequence[Tensor]) -> set[int]:
        """Have tensors be views of another place with the same bytes; those in common stay, and are returned by `id`."""
        with self._lock:
            if self._count:
                self._left += [tensor.data for tensor in tensors]
            with _LOCK:  # so that no other trial takes one up meanwhile
                stay = self._in_common(tensors)
                pairs = [pair for pair in zip(tensors, views, strict=True) if id(pair[0]) not in stay]
                for tensor, view in pairs:
                    if id(tensor) in self._untrained:
                        tensor.data = view
            for tensor, view in pairs:
                if id(tensor) not in self._untrained:
                    tensor.data = view
        return stay

    def _in_common(self, tensors: Sequence[Tensor]) -> set[int]:
        own = [key for key in map(id, tensors) if key in self._untrained]
        others = [other._untrained for other in _ALL if other is not self] if own else []  # noqa: SLF001 - of its class
        return {key for key in own if any(key in other for other in others)}
