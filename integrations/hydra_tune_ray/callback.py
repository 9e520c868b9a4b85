"""A callback by which the driver tells all pools of every trial's end, even if the trial's process has died.

People import `PoolCallback` from `hydra_tune_ray` for Ray's `RunConfig`; `sweep.py` adds the callback to each sweep on
a cluster.
"""

import contextlib
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial

from hydra_tune_ray.errors import PoolError
from hydra_tune_ray.pools import Pools, pools_of


class PoolCallback(Callback):
    """Tells the pools when trials end: `RunConfig(callbacks=[PoolCallback(trainable)])`.

    Without the callback, a trial whose process was killed stays in its pool until its lease ends. A trial whose process Ray
    keeps for reuse stays until the process takes another trial or ends.

    Args:
        trained: the class returned by `hydra_tune_ray.trainable`, or the pools of `start_pools`.
    """

    def __init__(self, trained: Any) -> None:
        self._pools = trained if isinstance(trained, Pools) else pools_of(trained)

    def on_trial_complete(
        self,
        iteration: int,  # noqa: ARG002 - the arguments are Ray's
        trials: list[Trial],  # noqa: ARG002
        trial: Trial,
        **info: Any,  # noqa: ARG002
    ) -> None:
        """End a trial stopped by Ray or done with all of its steps."""
        self._end(trial)

    def on_trial_error(
        self,
        iteration: int,  # noqa: ARG002 - the arguments are Ray's
        trials: list[Trial],  # noqa: ARG002
        trial: Trial,
        **info: Any,  # noqa: ARG002
    ) -> None:
        """End a trial after its final failure."""
        self._end(trial)

    def _end(self, trial: Trial) -> None:
        # A restored search keeps its callbacks from before, while its trials use new pools.
        trained = trial.get_trainable_cls()  # type: ignore[no-untyped-call]
        name = getattr(trained, "pools", self._pools.name)
        pools = self._pools if name == self._pools.name else Pools(name)
        with contextlib.suppress(PoolError):  # closed pools have nothing to end
            pools.end_trial(trial.trial_id)
