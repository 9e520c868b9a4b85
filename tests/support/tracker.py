"""A storage tracker that shares nothing with the engine: what tensors really hold while units run.

A `TorchDispatchMode` sees every tensor operation of the thread that entered it and follows the storages the operations
make or compute on, until they are freed. Given as `instrument=` it is entered on the worker threads around every unit,
and keeps one account per thread. Storages that are only copied from, copied to or viewed are not followed: they may be
host memory. Nor are those that a test has left out. `resize_` of a storage is not seen.
"""

import threading
import weakref
from collections import deque
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COPIES = {"aten::copy_", "aten::_to_copy", "aten::clone"}
_ASSIGNS = "aten::_has_compatible_shallow_copy_type"  # `tensor.data = other` asks it of both, and computes nothing


class Account:
    """The bytes of the storages that one thread's operations made or computed on.

    A finalizer may run at any moment on any thread, even amid an update: it only leaves a note, which is read at the
    next operation.

    Args:
        left_out: storages that are not followed.
    """

    def __init__(self, left_out: weakref.WeakSet[UntypedStorage] | None = None) -> None:
        self._lock = threading.Lock()
        self._left_out = weakref.WeakSet() if left_out is None else left_out
        self._bytes: dict[int, int] = {}
        self._freed: deque[int] = deque()
        self._current_bytes = 0
        self._peak_bytes = 0

    @property
    def current_bytes(self) -> int:
        """Bytes of storages that are still alive."""
        with self._lock:
            self._settle()
            return self._current_bytes

    @property
    def peak_bytes(self) -> int:
        """The most there were at once, between any two operations."""
        return self._peak_bytes

    def forget_peak(self) -> None:
        """Have the peak be what there is now."""
        self._peak_bytes = self.current_bytes

    def follow(self, tensors: list[Tensor]) -> None:
        """Account for the storages of `tensors` that are not followed yet."""
        with self._lock:
            self._settle()
            for tensor in tensors:
                if tensor.is_meta:
                    continue  # has no bytes
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._bytes and storage not in self._left_out:
                    self._bytes[key] = storage.nbytes()
                    self._current_bytes += storage.nbytes()
                    weakref.finalize(storage, self._freed.append, key)
            self._peak_bytes = max(self._peak_bytes, self._current_bytes)

    def _settle(self) -> None:
        while self._freed:
            self._current_bytes -= self._bytes.pop(self._freed.popleft())


class Mode(TorchDispatchMode):
    """Reports what each operation makes and computes on to an account."""

    def __init__(self, account: Account) -> None:
        super().__init__()
        self._account = account

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {tensor.untyped_storage()._cdata for tensor in before}
        made = [
            leaf
            for leaf in tree_leaves(result)
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in known
        ]
        computes = func._schema.name not in {*_COPIES, _ASSIGNS} and not func.is_view
        self._account.follow(made + (before if computes else []))
        return result


class StorageTracker:
    """One account per thread that enters it; call it for a context manager, as `instrument=` does.

    Args:
        is_common: whether all threads have one account, for storages that are handed from one to another.
    """

    def __init__(self, *, is_common: bool = False) -> None:
        self._is_common = is_common
        self._accounts: dict[int, Account] = {}
        self._lock = threading.Lock()
        self._left_out: weakref.WeakSet[UntypedStorage] = weakref.WeakSet()

    def __call__(self) -> Mode:
        with self._lock:
            key = 0 if self._is_common else threading.get_ident()
            return Mode(self._accounts.setdefault(key, Account(self._left_out)))

    def leave_out(self, *tensors: Tensor) -> None:
        """Do not follow the storages of these, which no operation has computed on yet: of data that the host holds anyway."""
        for tensor in tensors:
            self._left_out.add(tensor.untyped_storage())

    @property
    def accounts(self) -> list[Account]:
        """An account per thread, in the order in which they came."""
        with self._lock:
            return list(self._accounts.values())

    @property
    def peak_bytes(self) -> list[int]:
        """The peak of each thread."""
        return [account.peak_bytes for account in self.accounts]

    def forget_peaks(self) -> None:
        """Begin anew to look for peaks."""
        for account in self.accounts:
            account.forget_peak()

    @property
    def current_bytes(self) -> int:
        """What is alive now, over all threads."""
        return sum(account.current_bytes for account in self.accounts)
