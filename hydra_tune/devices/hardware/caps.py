"""Cap of the caching allocator on each GPU: the sum of the open devices' shares, and the user's old cap afterwards.

`discovery.py` adds a device's share when a GPU device is opened (`capped`); `CudaDevice` (`devices/cuda.py`) asks `is_alone`
before a unit is measured, and takes the share back when the device is closed. The first device's share replaces the user's
cap.

Note: locks. `capped` and the function that `capped` returns change the cap under `_LOCK`; `is_alone` takes no lock. The
module must not hold memory for trials.
"""

import threading
from collections.abc import Callable
from contextlib import suppress

import torch

_LOCK = threading.Lock()
_BEFORE: dict[int, float] = {}  # by GPU: the memory fraction that the user had set for torch
_HELD: dict[int, list[float]] = {}  # by GPU: the memory fraction of each open device


def is_alone(index: int) -> bool:
    """Return whether exactly one device is open on a GPU, over all pools of the process."""
    return len(_HELD.get(index, ())) == 1


def capped(index: int, fraction: float) -> Callable[[], None]:
    """Add a device's fraction of a GPU's memory to the fractions that make the allocator's cap.

    Returns:
        A function to call when the device is closed; only the first call has an effect.
    """
    with _LOCK:
        # The first device on the GPU: the user's cap is restored after the last one is closed.
        if not _HELD.get(index):
            _BEFORE[index] = torch.cuda.get_per_process_memory_fraction(index)
        shares = _HELD.setdefault(index, [])
        shares.append(fraction)
        torch.cuda.set_per_process_memory_fraction(min(1.0, sum(shares)), index)
    # A list, because `closed` clears it: another device may have an equal share, which a second call would remove.
    is_open = [True]

    def closed() -> None:
        with _LOCK:
            if not is_open:
                return
            is_open.clear()
            shares.remove(fraction)
            with suppress(RuntimeError):  # raised by a lost GPU
                torch.cuda.set_per_process_memory_fraction(min(1.0, sum(shares)) if shares else _BEFORE[index], index)

    return closed
