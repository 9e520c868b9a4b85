"""A second way for pools to learn that Ray is done with a trial: the driver says so, whatever has become of its process."""

import contextlib
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial

from hydra_tune_ray.errors import PoolError
from hydra_tune_ray.pools import Pools, pools_of


class PoolCallback(Callback):
    """Tells the pools which trials have ended: `RunConfig(callbacks=[PoolCallback(trainable)])`.

    Without it a trial whose process was killed, or is kept for reuse, stays in its pool until its lease is over.

    Args:
        trained: what `hydra_tune_ray.trainable` has returned, or the pools that `start_pools` has.
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
        """Ray has stopped a trial, or it has done all of its steps."""
        self._end(trial)

    def on_trial_error(
        self,
        iteration: int,  # noqa: ARG002 - the arguments are Ray's
        trials: list[Trial],  # noqa: ARG002
        trial: Trial,
        **info: Any,  # noqa: ARG002
    ) -> None:
        """A trial has failed for good."""
        self._end(trial)

    def _end(self, trial: Trial) -> None:
        # A search that is restored has its callbacks of before, and its trials other pools.
        trained = trial.get_trainable_cls()  # type: ignore[no-untyped-call]
        name = getattr(trained, "pools", self._pools.name)
        pools = self._pools if name == self._pools.name else Pools(name)
        with contextlib.suppress(PoolError):  # pools that are gone have nothing to end
            pools.end_trial(trial.trial_id)
