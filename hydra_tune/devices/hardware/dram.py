"""Bandwidth of the host's memory, measured once per process."""

import functools
import time

import torch

_BYTES = 64 << 20  # larger than the processor's caches
_ROUNDS = 3


@functools.cache
def dram_bandwidth() -> float:
    """Return the memory bandwidth of a core in bytes per second, reads plus writes.

    The figure comes from the fastest of a few large copies.
    """
    source, target = (torch.zeros(_BYTES, dtype=torch.uint8) for _ in range(2))
    round_seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        target.copy_(source)
        round_seconds.append(time.perf_counter() - start)
    # The fastest round is the least disturbed by other processes.
    return 2 * _BYTES / max(min(round_seconds), 1e-9)
