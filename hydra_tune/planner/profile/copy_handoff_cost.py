"""Time that the computing thread needs to hand a copy to another thread (`planner/run/copy_engine.py`), beside the copy itself.

Two Python threads take turns. The copying thread wakes up and waits for the interpreter lock, and the computing thread
waits to get the lock back, while both compete for memory. For small copies, all this takes longer than copying. So
`SubArrayProfiler` (`profiler.py`) calls `hand_seconds` once for each device, under its lock and before the first profile
on the device, and plans count the time. The module must not know graphs or plans.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from hydra_tune.planner.run.copy_engine import ThreadCopyEngine

_BYTES = 1 << 20  # about where handing over begins to pay
_COPIES = 3  # each there and back
_TURNS = 9
_OPERATORS = 120  # small ones beside each copy, which take longer than the copy
_LEAST_SECONDS = 2e-5  # about what a thread needs to wake up, in case noise hides the hand-over


def hand_seconds(device: torch.device, now: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that the hand-over of a copy takes of the computing thread; 0 on a GPU, where streams copy."""
    if device.type != "cpu":
        return 0.0
    copies = ThreadCopyEngine({"map": _BYTES})
    source, operand = torch.zeros(_BYTES, dtype=torch.uint8), torch.zeros(1024)
    try:
        handoff_seconds: list[float] = []
        for turn in range(_TURNS + 1):
            alone_seconds = _seconds(now, None, source, operand)
            if turn:  # the first turn does not count: memory is taken for the first time, and the thread is cold
                # The difference leaves only the hand-overs, since both runs compute the same.
                handoff_seconds.append((_seconds(now, copies, source, operand) - alone_seconds) / (2 * _COPIES))
            else:
                _seconds(now, copies, source, operand)
    finally:
        copies.close()
    return max(_LEAST_SECONDS, statistics.median(handoff_seconds))


def _seconds(now: Callable[[], float], copies: ThreadCopyEngine | None, source: Tensor, other: Tensor) -> float:
    """Seconds to make a map, compute, and use the map, `_COPIES` times; with `copies`, the map goes to the host and back."""
    begin = now()
    for _ in range(_COPIES):
        source.add_(1)
        outgoing_copy = None if copies is None else copies.offload(source, "map")
        _compute(other)
        incoming_copy = None if copies is None else copies.prefetch(copies.release(outgoing_copy))  # type: ignore[arg-type]
        _compute(other)
        (source if copies is None else copies.arrived(incoming_copy)).add_(1)  # type: ignore[arg-type]
    return now() - begin


def _compute(other: Tensor) -> None:
    for _ in range(_OPERATORS):
        other.add_(1)
