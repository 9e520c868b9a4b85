"""Ray Tune with shared pools: `import hydra_tune_ray`.

`trainable(build)` is what a `ray.tune.Tuner` is given; schedulers, searchers and stoppers are Ray's own, and trials share the
devices of each node instead of having fractions of them.
"""

from hydra_tune_ray.installed import check_ray

check_ray()

from hydra_tune_ray.callback import PoolCallback  # noqa: E402 - what follows imports Ray
from hydra_tune_ray.errors import BuildPickleError, PoolError, RayVersionError, TrialError  # noqa: E402
from hydra_tune_ray.messages import PoolFigures  # noqa: E402
from hydra_tune_ray.pools import Pools, start_pools  # noqa: E402
from hydra_tune_ray.trainable import trainable  # noqa: E402

__all__ = [
    "BuildPickleError",
    "PoolCallback",
    "PoolError",
    "PoolFigures",
    "Pools",
    "RayVersionError",
    "TrialError",
    "start_pools",
    "trainable",
]
