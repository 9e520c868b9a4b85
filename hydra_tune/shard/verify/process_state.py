"""Restores process-wide state after trying code on copies: the random streams, and the number of computing threads.

`PlanLibrary` (`shard/partition/plan_cache.py`) enters `preserved_streams` to make a plan, and `intraop_threads` to
check the plan.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def preserved_streams() -> Iterator[None]:
    """Restore the random streams afterwards: draws of capture, pilot and verification must not show in the trial."""
    # Not imported here: numpy draws nothing before its import.
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
    """Compute operators of this thread on the host with `count` threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
