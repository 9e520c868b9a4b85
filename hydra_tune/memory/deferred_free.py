"""`TrialTensorReaders`: keeps the memory of a trial's tensors alive while the trial's own code may read the tensors.

Between units, a trial's blocks are not pinned: workers of devices and the disk's thread move the blocks to make
room. A move points the tensors at the new place of the same bytes, but a reader already under way may still use the old
place. Memory left behind therefore stays alive until the code has ended. No thread waits for the end: the ledger counts
the room as free at once, and the room becomes free a little later. `TensorGroups` (`train/state/tensor_groups.py`)
makes the readers of a trial. `Trial` (`train/trial.py`) enters `reading` while the trial's own code runs between units,
and so does `fusion/group/stacked_state.py` while members' tensors are copied; `TensorBlock` (`block.py`) and `ModelState`
(`train/state/model_state.py`) move tensors through `point`. The module must not know blocks.

Note: locks. The lock of a block comes first, then the lock of a trial's readers, then the lock of the process.

Note: tensors in common. An untrained tensor, such as a frozen embedding, may be a single object in several trials. No
trial moves such a tensor, because another trial may be computing with it.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

_LOCK = threading.Lock()  # guards tensors in common; held for microseconds, inside a trial's lock
_ALL: "weakref.WeakSet[TrialTensorReaders]" = weakref.WeakSet()


class TrialTensorReaders:
    """Readers of a single trial's tensors."""

    def __init__(self) -> None:
        self._untrained: Counter[int] = Counter()  # by `id` of a tensor: number of the trial's groups with the tensor
        with _LOCK:
            _ALL.add(self)
        self._lock = threading.Lock()  # held for microseconds, inside a block's lock
        self._count = 0
        self._left: list[Tensor] = []

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context around code that may read the tensors; may be nested."""
        with self._lock:
            self._count += 1
        try:
            yield
        finally:
            unread_memory: list[Tensor] = []
            with self._lock:
                self._count -= 1
                if not self._count:
                    unread_memory, self._left = self._left, unread_memory
            del unread_memory  # freed outside the lock, because freeing may take a while

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Note that a group of the trial has these parameters or buffers; only tensors without `requires_grad` are noted."""
        with _LOCK:
            self._untrained.update(id(tensor) for tensor in tensors if not tensor.requires_grad)

    def let_go(self, tensors: Sequence[Tensor]) -> None:
        """Note that a group of the trial no longer has these tensors."""
        with _LOCK:
            for key in map(id, tensors):
                if self._untrained[key] > 1:
                    self._untrained[key] -= 1
                else:
                    del self._untrained[key]

    def in_common(self, tensors: Sequence[Tensor]) -> set[int]:
        """Tensors, by `id`, that another trial has as well."""
        keys = [id(tensor) for tensor in tensors if not tensor.requires_grad]
        with _LOCK:
            elsewhere = [other._untrained for other in _ALL if other is not self and other._untrained] if keys else []  # noqa: SLF001
            return {key for key in keys if any(key in other for other in elsewhere)}

    def point(self, tensors: Sequence[Tensor], views: Sequence[Tensor]) -> set[int]:
        """Point tensors at another place of the same bytes; return the tensors in common, by `id`, which stay in place."""
        with self._lock:
            if self._count:
                # The old memory is kept for readers that may already hold a pointer to the memory.
                self._left += [tensor.data for tensor in tensors]
            # Held across check and move, so that no other trial takes a tensor up in between.
            with _LOCK:
                common_ids = self._in_common(tensors)
                pairs = [pair for pair in zip(tensors, views, strict=True) if id(pair[0]) not in common_ids]
                for tensor, view in pairs:
                    if id(tensor) in self._untrained:
                        tensor.data = view
            # Trained tensors are never in common, so moving them needs no lock of the process.
            for tensor, view in pairs:
                if id(tensor) not in self._untrained:
                    tensor.data = view
        return common_ids

    def _in_common(self, tensors: Sequence[Tensor]) -> set[int]:
        keys = [key for key in map(id, tensors) if key in self._untrained]
        elsewhere = [other._untrained for other in _ALL if other is not self] if keys else []  # noqa: SLF001 - of its class
        return {key for key in keys if any(key in other for other in elsewhere)}
