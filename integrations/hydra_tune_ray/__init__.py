"""Ray Tune with shared pools: `import hydra_tune_ray`.

Pass `trainable(build)` to a `ray.tune.Tuner`; schedulers, searchers and stoppers are Ray's own, and trials share the
devices of each node instead of owning fractions of devices.

Public names are imported on first use: a pool must not need Ray Tune, and a trial's process must not need torch. Read
`trainable` first (a trial as Ray sees the trial), then `client` and `messages` (a trial's way to its pool), `node` (the
pools) and `pools`, with which a driver starts pools. `sweep` serves the command line, `callback` reports ends,
`checkpoint_transfer` and `weights` move trained state, and `pickling`, `version` and `installed` check beforehand.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hydra_tune_ray.installed import check_ray, check_tune

if TYPE_CHECKING:
    from hydra_tune_ray.callback import PoolCallback
    from hydra_tune_ray.errors import BuildPickleError, PoolError, RayVersionError, TrialError
    from hydra_tune_ray.messages import PoolFigures
    from hydra_tune_ray.pools import Pools, start_pools
    from hydra_tune_ray.trainable import trainable
    from hydra_tune_ray.weights import load_module

check_ray()

__all__ = [
    "BuildPickleError",
    "PoolCallback",
    "PoolError",
    "PoolFigures",
    "Pools",
    "RayVersionError",
    "TrialError",
    "load_module",
    "start_pools",
    "trainable",
]

_HOMES = {
    "BuildPickleError": "errors",
    "PoolCallback": "callback",
    "PoolError": "errors",
    "PoolFigures": "messages",
    "Pools": "pools",
    "RayVersionError": "errors",
    "TrialError": "errors",
    "load_module": "weights",
    "start_pools": "pools",
    "trainable": "trainable",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hydra_tune_ray' has no attribute {name!r}")
    with check_tune():
        value: object = getattr(import_module(f"hydra_tune_ray.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
