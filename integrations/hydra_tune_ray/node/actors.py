"""Creation and lookup of the package's Ray actors: names, placement, and the entry point of a pool's process.

A pool is an actor whose method `call` forwards to `NodePool` (`node_pool.py`), so processes that start a pool or talk to a
pool import no torch. `PoolDirectory` (`pool_directory.py`) calls `start_pool` for each node that lacks a pool.
`TrialClient` (`client.py`) finds directory and pool when a trial begins, and `DirectoryConnection` (`heartbeat.py`) and
`Pools` (`pools.py`) find the directory. `start_pools` (`pools.py`) makes the directory's actor, in the same `NAMESPACE`.
`NodePool` (`node_pool.py`) takes the `NodePoolSpec` of its actor.

Note: lifetimes. A pool's actor is detached, and Ray restarts the actor, so the actor itself has to notice that nobody needs
the pool: `_watch` before the devices are open, the heartbeat afterwards. `_watch` has a thread of its own, and calls run on
the actor's event loop.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hydra_tune_ray.node.nodes import DeviceNode
from hydra_tune_ray.version import VERSION

NAMESPACE = "hydra_tune"
GONE_TIMES = 6
"""Consecutive answers of Ray that an actor does not exist before the actor counts as gone: Ray also answers so when unsure."""

_WATCH_SECONDS = 2.0
_ABREAST = 10_000  # concurrent calls; nearly all of them wait


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePoolSpec:
    """Identity of a pool, the name of its directory, and the options of its `HydraExecutor`."""

    name: str
    directory: str
    node: DeviceNode
    options: Mapping[str, Any]


class PoolActor:
    """The process of a pool."""

    def __init__(self, place: NodePoolSpec) -> None:
        self._place = place
        self._pool: Any = None
        threading.Thread(target=self._watch, name="hydra-watch", daemon=True).start()

    async def version(self) -> str:
        """Version of hydra-tune in this process."""
        return VERSION

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the `NodePool`."""
        if self._pool is None:
            from hydra_tune_ray.node.node_pool import NodePool  # noqa: PLC0415 - imports torch, which only this process needs

            # The import above takes long, and another call may have made the pool meanwhile.
            self._pool = self._pool or NodePool(self._place)
        return await getattr(self._pool, method)(*args, **options)

    def _watch(self) -> None:
        """End the actor if the directory vanishes before the pool is open; Ray may restart pools that nobody wants."""
        num_missing = 0
        while self._pool is None or not self._pool.is_open:
            time.sleep(_WATCH_SECONDS)
            try:
                find_actor(self._place.directory)
            except ValueError:
                num_missing += 1
                if num_missing == GONE_TIMES:
                    ray.kill(ray.get_runtime_context().current_actor)
            except RayError:  # Ray does not answer now
                continue
            else:
                num_missing = 0


def start_pool(place: NodePoolSpec) -> Any:
    """Start the actor of a pool on its node, or find the running actor. The actor outlives its creator."""
    # Not soft: name and devices of the pool belong to this node, and another node has a pool of its own.
    strategy = NodeAffinitySchedulingStrategy(node_id=place.node.node_id, soft=False)
    actor_class = ray.remote(PoolActor).options(
        name=place.name,
        namespace=NAMESPACE,
        get_if_exists=True,
        # Outlives the directory, which Ray may restart; the pool's heartbeat ends a pool that nobody needs.
        lifetime="detached",
        num_cpus=0,
        num_gpus=place.node.num_gpus,
        max_concurrency=_ABREAST,
        max_restarts=-1,
        scheduling_strategy=strategy,
    )
    return actor_class.remote(place)


def find_actor(name: str) -> Any:
    """Find the actor of a directory or a pool.

    Raises:
        ValueError: no actor has this name.
    """
    return ray.get_actor(name, namespace=NAMESPACE)
