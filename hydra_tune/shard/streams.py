"""What of the process is put back after whatever is tried on copies: its random streams, and how many threads compute."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def preserved_streams() -> Iterator[None]:
    """Capture, pilot and verification draw random numbers; none of that may show in the trial."""
    numpy = sys.modules.get("numpy")
    states = torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy is not None:
            numpy.random.set_state(states[2])


@contextmanager
def intraop_threads(count: int) -> Iterator[None]:
    """Let operators that this thread calls on the host compute with so many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
