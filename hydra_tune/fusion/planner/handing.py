"""What it takes of the thread that computes to have another one copy (`copies.py`), beside what the copy itself takes.

Two threads of Python take turns: the copying one wakes up, waits for the interpreter to be let go, and the computing one
for it to come back, while both want memory. That takes longer than small copies do: of four fused DLRMs, six swaps of
200 KiB that take 0.2 ms in all made a step of 7.6 ms 1.4 ms longer when they were handed over, and nothing to speak of
when the computing thread made them itself. So it is measured, and plans count it.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from hydra_tune.fusion.planner.copies import ThreadCopies

_BYTES = 1 << 20  # about where handing over begins to pay
_COPIES = 3  # each there and back
_TURNS = 9
_OPERATORS = 120  # beside each copy, small ones: together they take longer than it does
_LEAST_SECONDS = 2e-5  # what a thread needs to wake up, where noise has it as nothing


def hand_seconds(device: torch.device, now: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the computing thread for each copy that goes on beside; of a GPU, whose host is not in the way, none.

    Args:
        device: of the computing.
        now: seconds.
    """
    if device.type != "cpu":
        return 0.0
    copies = ThreadCopies({"map": _BYTES})
    source, other = torch.zeros(_BYTES, dtype=torch.uint8), torch.zeros(1024)
    try:
        found: list[float] = []
        for turn in range(_TURNS + 1):
            alone = _seconds(now, None, source, other)
            if turn:  # the first has memory to take and a thread to start
                found.append((_seconds(now, copies, source, other) - alone) / (2 * _COPIES))
            else:
                _seconds(now, copies, source, other)
    finally:
        copies.close()
    return max(_LEAST_SECONDS, statistics.median(found))


def _seconds(now: Callable[[], float], copies: ThreadCopies | None, source: Tensor, other: Tensor) -> float:
    """What it takes to make a map, compute something else, and use the map; with copies, it is away meanwhile."""
    begin = now()
    for _ in range(_COPIES):
        source.add_(1)
        leaving = None if copies is None else copies.offload(source, "map")
        _compute(other)
        coming = None if copies is None else copies.prefetch(copies.release(leaving))  # type: ignore[arg-type]
        _compute(other)
        (source if copies is None else copies.arrived(coming)).add_(1)  # type: ignore[arg-type]
    return now() - begin


def _compute(other: Tensor) -> None:
    for _ in range(_OPERATORS):
        other.add_(1)
