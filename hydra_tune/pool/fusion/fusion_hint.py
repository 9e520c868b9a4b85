"""`FusionAdvisor`: suggests fusion, once, where trials are short, alike and run one by one.

`Worker` (`pool/runtime/worker.py`) shows a trial to the pool's `FusionAdvisor` before it reports the end of a unit to the
scheduler, if the executor has `fusion="off"`, until the advisor is over. `Pool.hint_at_fusion` (`pool/pool.py`) makes the
advisor. The advisor must keep no trial and no model alive. Several workers may call `look` at once: a lock guards the
counts, and the log line is written outside the lock.
"""

import logging
import math
import threading
from collections import Counter
from collections.abc import Hashable
from weakref import WeakSet

from hydra_tune.loop_task import LoopTask
from hydra_tune.train.trial import Trial

# A logger, not `warnings`: filters may turn warnings into errors, and a hint is no error.
_LOGGER = logging.getLogger(__name__)
_MOST_STEP_SECONDS = 2e-3  # in shorter steps, overhead around the operators dominates
_LEAST_STEPS = 20  # of a trial, before its step time is reliable
_LEAST_TRIALS = 4
_LEAST_SECONDS = (
    4.0  # of alike trials' steps: of much less work, "auto" times no groups (`fusion/matching/group_size_policy.py`)
)


class FusionAdvisor:
    """Watches the trials of a pool without fusion.

    Attributes:
        is_over: whether there is nothing left to suggest.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._lock = threading.Lock()
        self._alike: Counter[Hashable] = Counter()
        self._seen: WeakSet[Trial] = WeakSet()  # weak: a hint must not keep models alive

    def look(self, trial: Trial) -> None:
        """Look at a trial after a unit, on the worker's thread."""
        if isinstance(trial.task, LoopTask):  # never fused
            return
        steps, seconds = trial.progress.steps, trial.unit_times.total
        if self.is_over or steps < _LEAST_STEPS or not 0 < seconds <= _MOST_STEP_SECONDS or trial.module is None:
            return
        shapes = tuple(tuple(parameter.shape) for parameter in trial.module.parameters())
        steps_planned = trial.progress.num_steps
        trial_seconds = math.inf if steps_planned is None else steps_planned * seconds
        kind = type(trial.module), shapes, type(trial.optimizer)
        with self._lock:
            if self.is_over or trial in self._seen:
                return
            self._seen.add(trial)
            self._alike[kind] += 1
            num_alike = self._alike[kind]
            self.is_over = num_alike >= _LEAST_TRIALS and num_alike * trial_seconds >= _LEAST_SECONDS
            if not self.is_over:
                return
        _LOGGER.warning(
            "%d trials of one architecture with steps of %.1f ms: fusion='auto' may train them several times faster, with "
            "results that are equal up to rounding",
            num_alike,
            seconds * 1e3,
        )
