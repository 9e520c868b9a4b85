"""How much of a GPU the caching allocator may take: what the devices open there may together, and then as much as before."""

import threading
from collections.abc import Callable
from contextlib import suppress

import torch

_LOCK = threading.Lock()
_BEFORE: dict[int, float] = {}  # by GPU: the part of its memory that the user has left to torch
_HELD: dict[int, list[float]] = {}  # by GPU: the part of each device that is open there


def is_alone(index: int) -> bool:
    """Whether one device is open on a GPU, of all pools of the process."""
    return len(_HELD.get(index, ())) == 1


def capped(index: int, fraction: float) -> Callable[[], None]:
    """Hold a GPU's allocator to the part of one device more.

    Args:
        index: of the GPU.
        fraction: of its memory, for this device.

    Returns:
        To be called when the device is closed; once counts.
    """
    with _LOCK:
        if not _HELD.get(index):
            _BEFORE[index] = torch.cuda.get_per_process_memory_fraction(index)
        held = _HELD.setdefault(index, [])
        held.append(fraction)
        torch.cuda.set_per_process_memory_fraction(min(1.0, sum(held)), index)
    is_open = [True]

    def closed() -> None:
        with _LOCK:
            if not is_open:
                return
            is_open.clear()
            held.remove(fraction)
            with suppress(RuntimeError):  # of a GPU that is lost
                torch.cuda.set_per_process_memory_fraction(min(1.0, sum(held)) if held else _BEFORE[index], index)

    return closed
