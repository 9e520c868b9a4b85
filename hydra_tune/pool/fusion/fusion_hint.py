"""`FusionAdvisor`: suggests fusion, once, where trials are short, alike and run one by one.

`Worker` (`pool/runtime/worker.py`) shows a trial to the pool's `FusionAdvisor` after each unit, if the executor has
`fusion="off"`.
"""

import logging
import threading
from collections import Counter
from collections.abc import Hashable
from weakref import WeakSet

from hydra_tune.train.trial import Trial

# A logger, not `warnings`: filters may turn warnings into errors, and a hint is no error.
_LOGGER = logging.getLogger(__name__)
_MOST_STEP_SECONDS = 2e-3  # in shorter steps, overhead around the operators dominates
_LEAST_STEPS = 20  # of a trial, before its step time is reliable
_LEAST_TRIALS = 4
_MOST_GAIN = 8  # times; the measured gain of groups of 16 small networks (docs/results/fusion.md)


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

    def look(self, trial: Trial, num_trials: int) -> None:
        """Look at a trial that has run some steps; on the trial's worker thread.

        Args:
            trial: the trial.
            num_trials: number of the pool's live trials, waiting trials included.
        """
        steps, seconds = trial.progress.steps, trial.unit_times.total
        if self.is_over or steps < _LEAST_STEPS or not 0 < seconds <= _MOST_STEP_SECONDS or trial.module is None:
            return
        shapes = tuple(tuple(parameter.shape) for parameter in trial.module.parameters())
        num_alike = self._counted(trial, (type(trial.module), shapes, type(trial.optimizer)))
        if num_alike < _LEAST_TRIALS:
            return
        count = max(num_trials, num_alike)
        _LOGGER.warning(
            "%d trials of one architecture with steps of %.1f ms: fusion='auto' would make this about %dx faster, with "
            "results that are equal up to rounding",
            count,
            seconds * 1e3,
            min(_MOST_GAIN, max(2, count // 2)),
        )

    def _counted(self, trial: Trial, kind: Hashable) -> int:
        """Count a trial of a kind, and return the count so far; 0 for a trial counted before, or after the hint."""
        with self._lock:
            if self.is_over or trial in self._seen:
                return 0
            self._seen.add(trial)
            self._alike[kind] += 1
            self.is_over = self._alike[kind] >= _LEAST_TRIALS
            return self._alike[kind]
