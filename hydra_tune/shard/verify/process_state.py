"""Restores the calling thread's random streams and number of computing threads after trying code on copies.

`PlanLibrary` (`shard/partition/plan_cache.py`) enters `preserved_streams` to make a plan, and `intraop_threads` and
`undisturbed`, which keeps other trials out, to check the plan. The pilots (`shard/cost/eager_pilot.py`,
`shard/cost/update_pilot.py`), `shard/partition/trial_step.py` and `train/loop/microbatches.py` enter `preserved_streams`, too,
and so does the integration of the Trainer (`integrations/hydra_tune_transformers/task.py`) while a `Trainer` is made.

Note: streams. A thread that works for a trial has streams of its own, and only these are restored. On any other thread the
streams are those of the process, and draws of other threads would be undone as well.
"""

import math
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.python_state.state_guard import shares_state
from hydra_tune.task import TrainTask


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


def undisturbed(task: TrainTask, mode: str) -> AbstractContextManager[object]:
    """Context of steps that are compared with each other.

    Where another trial reaches values that the step reads, others wait. The check would take their changes of these values
    for the step's own, and put the values back.
    """
    return GATE.alone(math.inf) if shares_state(task, mode) else GATE.shared()
