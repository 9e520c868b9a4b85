"""Real shortage of memory: torch's own allocator refuses, at a chosen operation of a chosen unit.

Given as `instrument=` it is entered on the worker thread around every unit, and once more when that is repeated. At the chosen
operation, before it runs, it asks torch for more memory than any machine has; what is raised comes from the allocator.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TOO_MUCH_BYTES = 2**60


def run_out() -> None:
    """Ask for memory that there is not."""
    torch.empty(TOO_MUCH_BYTES, dtype=torch.uint8)


class _Mode(TorchDispatchMode):
    def __init__(self, due: Callable[[], bool]) -> None:
        super().__init__()
        self._due = due

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._due():
            run_out()
        return func(*args, **(kwargs or {}))


class Shortage:
    """Memory runs out once, or so many times, at an operation of a unit.

    Attributes:
        num_units: units begun since `arm`, repeats included.
        num_raised: how often memory has run out since then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.arm(-1, 0)

    def arm(self, unit: int, operation: int, times: int = 1) -> None:
        """Choose where: the unit's number from now on and the operation's in it, from 0; in so many of its runs."""
        with self._lock:
            self._unit, self._operation, self._left = unit, operation, times
            self.num_units = self.num_raised = 0

    def __call__(self) -> AbstractContextManager[Any]:
        with self._lock:
            number = self.num_units
            self.num_units += 1
            is_chosen = self._unit <= number and self._left > 0 and self._unit >= 0
            is_chosen = is_chosen and number <= self._unit + self.num_raised
        if not is_chosen:
            return nullcontext()
        left = iter(range(self._operation, -1, -1))
        return _Mode(lambda: next(left, None) == 0 and self._raises())

    def _raises(self) -> bool:
        self._left -= 1
        self.num_raised += 1
        return True
