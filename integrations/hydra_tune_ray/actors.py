"""How the actors of this package are made and found: names, places, and the entry of a pool's process.

A pool is an actor with one method, `call`, which hands on to `hydra_tune_ray.pool.NodePool`. So whoever makes a pool, or talks
to one, imports no torch.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hydra_tune_ray.nodes import DeviceNode
from hydra_tune_ray.version import VERSION

NAMESPACE = "hydra_tune"
GONE_TIMES = 6
"""How often in a row Ray has to say that there is no such actor: it also does when it cannot tell."""

_WATCH_SECONDS = 2.0
_ABREAST = 10_000  # calls under way at once; nearly all of them wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which pool one is.

    Attributes:
        name: of the pool.
        directory: the name of the directory that has it.
        node: where it is.
        options: of its `HydraExecutor`.
    """

    name: str
    directory: str
    node: DeviceNode
    options: Mapping[str, Any]


class PoolActor:
    """The process of a pool."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._pool: Any = None
        threading.Thread(target=self._watch, name="hydra-watch", daemon=True).start()

    async def version(self) -> str:
        """Of hydra-tune, where this runs."""
        return VERSION

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the `NodePool`."""
        if self._pool is None:
            from hydra_tune_ray.pool import NodePool  # noqa: PLC0415 - imports torch, which only this process needs

            self._pool = self._pool or NodePool(self._place)
        return await getattr(self._pool, method)(*args, **options)

    def _watch(self) -> None:
        """End with the directory, before the pool is open and does so itself: Ray starts pools again that nobody may want."""
        num_missing = 0
        while self._pool is None or not self._pool.is_open:
            time.sleep(_WATCH_SECONDS)
            try:
                find_actor(self._place.directory)
            except ValueError:
                num_missing += 1
                if num_missing == GONE_TIMES:
                    ray.kill(ray.get_runtime_context().current_actor)
            except RayError:  # it does not answer now
                continue
            else:
                num_missing = 0


def start_pool(place: Place) -> Any:
    """Start the actor of a pool on its node; one that is there is found. It outlives whoever starts it.

    Returns:
        Its handle.
    """
    strategy = NodeAffinitySchedulingStrategy(node_id=place.node.node_id, soft=False)
    made = ray.remote(PoolActor).options(
        name=place.name,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        num_gpus=place.node.num_gpus,
        max_concurrency=_ABREAST,
        max_restarts=-1,
        scheduling_strategy=strategy,
    )
    return made.remote(place)


def find_actor(name: str) -> Any:
    """A directory or a pool.

    Raises:
        ValueError: there is none of this name.
    """
    return ray.get_actor(name, namespace=NAMESPACE)
