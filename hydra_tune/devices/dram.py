"""How fast the host's memory is: measured once in a process."""

import functools
import time

import torch

_BYTES = 64 << 20  # beyond what processors keep close to themselves
_ROUNDS = 3


@functools.cache
def dram_bandwidth() -> float:
    """Bytes a second that one core reads and writes, both counted: of the fastest of a few large copies."""
    source, target = (torch.zeros(_BYTES, dtype=torch.uint8) for _ in range(2))
    found = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        target.copy_(source)
        found.append(time.perf_counter() - start)
    return 2 * _BYTES / max(min(found), 1e-9)
