"""Steps captured once for all pools of a block: for tests of what pools do with steps, not of how these are captured.

Each pool still cuts the step for its own budget, and holds the numbers of what it has cut against those of the eager step.
"""

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from hydra_tune.shard.capture.meta_models import is_unbuilt
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.shard.partition.plan_request import CapturedStep, key_of


@contextmanager
def captured_once(known: dict[Hashable, CapturedStep] | None = None) -> Iterator[dict[Hashable, CapturedStep]]:
    """Libraries that ask for equal steps are given the same capture, with what has been measured of its parts.

    Yields what is known; a test that counts captures, or changes how they are made, clears it first. What is known from an
    earlier block may be given.
    """
    known = {} if known is None else known
    measured_step, lock = PlanLibrary._measured_step, threading.RLock()

    def once(self: PlanLibrary, request: Any, answers: Any) -> CapturedStep:
        step_key = None if answers else key_of(request)
        if step_key is None:
            return measured_step(self, request, answers)
        key = (step_key, self.budget.alignment, is_unbuilt(request.model))
        with lock:
            if key not in known:
                known[key] = measured_step(self, request, answers)
            return known[key]

    with mock.patch.object(PlanLibrary, "_measured_step", once):
        yield known
