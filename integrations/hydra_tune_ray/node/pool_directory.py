"""The actor that manages a set of pools: starts a pool on each node with devices, and assigns trials to pools.

The directory stores nothing: a restarted directory rebuilds its view from the pools' next heartbeats, on any node.
`start_pools` (`pools.py`) makes the actor, and `Pools` asks for figures, options and the end of trials or of all pools.
`TrialClient` (`client.py`) asks for a pool when a trial begins, and each pool reports through `heartbeat.py`. All state
changes on the event loop of the actor, without locks. Lists of nodes and starts of pools run in threads, as Ray may not answer.

Note: lifetimes. A directory that is not detached ends with the driver. Pools are detached and end when no directory
answers; a directory that dies alone is restarted by Ray and finds its pools still running.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from hydra_tune_ray.messages import PoolFigures, PoolLoadReport
from hydra_tune_ray.node.actors import NodePoolSpec, start_pool
from hydra_tune_ray.node.balance import PoolBacklog, least_busy, moves
from hydra_tune_ray.node.nodes import DeviceNode, device_nodes, draining_nodes
from hydra_tune_ray.node.remaining_time import RemainingTimeEstimator
from hydra_tune_ray.version import VERSION, wrong_pool

_LOGGER = logging.getLogger("hydra_tune.ray")
_SEEN_SECONDS = 5.0
_PLACED_SECONDS = 5.0
_NODES_SECONDS = 2.0
_CALL_SECONDS = 10.0
_POLL_SECONDS = 0.5
_CLOSE_SECONDS = 40.0
_MOVE_SECONDS = 0.5
_REST_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryOptions:
    """Options of a directory.

    Attributes:
        name: of the directory, `pools-` and the name of the set of pools.
        options: of each pool's `HydraExecutor`.
        start_seconds: time limit for the start of a pool.
        idle_seconds: time after which pools without trials end; None: never.
    """

    name: str
    options: Mapping[str, Any]
    start_seconds: float
    idle_seconds: float | None


@dataclass(slots=True)
class _RegisteredPool:
    """The directory's view of a pool.

    Attributes:
        actor: handle of the pool's actor.
        load: the pool's last report of its load.
        seen: time of the last report.
        placed: times at which trials were sent to the pool, by key, until the pool reports the trials, or for
            `_PLACED_SECONDS`.
    """

    actor: Any
    load: PoolLoadReport
    seen: float
    placed: dict[str, float] = field(default_factory=dict)


class PoolDirectory:
    """See the module's docstring."""

    def __init__(self, plan: DirectoryOptions) -> None:
        self._plan = plan
        self._pools: dict[str, _RegisteredPool] = {}
        self._sent: dict[str, float] = {}
        self._left = RemainingTimeEstimator()
        self._watching: asyncio.Task[None] | None = None
        self._busy = time.monotonic()
        self._draining = frozenset[str]()
        self._starting: dict[str, asyncio.Task[str]] = {}
        self._wrong: dict[str, str] = {}

    async def open(self) -> str:
        """Start a pool on each node with devices; a repeated call starts only missing pools.

        Returns:
            The first error of a pool, or an empty text.
        """
        self._busy = time.monotonic()  # a program that has found these pools will use the pools soon
        await self._start_missing()
        errors = await asyncio.gather(*self._starting.values())
        self._watch_nodes()
        return next(filter(None, errors), "")

    async def version(self) -> str:
        """Version of hydra-tune in this process."""
        return VERSION

    async def options(self) -> Mapping[str, Any]:
        """Options of the pools."""
        return self._plan.options

    async def place(self, key: str, node_id: str, waits_seconds: float) -> str:
        """Choose the pool for a trial.

        Args:
            key: of the trial.
            node_id: node of the trial's client.
            waits_seconds: how long to wait for a pool to appear, in seconds.

        Returns:
            The name of the pool; empty without any pool.
        """
        self._busy = time.monotonic()
        until = self._busy + waits_seconds
        # Pools on draining nodes come second: better to train there for a while than to fail.
        while not (works := self._works() or self._works(self._pools.keys())):
            if time.monotonic() > until:
                return ""
            self._watch_nodes()
            await asyncio.sleep(_POLL_SECONDS)
        near = next((name for name in works if self._pools[name].load.node.node_id == node_id), None)
        pool_name = least_busy(works, self._left.usual, near=near)
        # Counted at once, or all trials of a burst would go to the same pool.
        self._pools[pool_name].placed[key] = time.monotonic()
        return pool_name

    async def pulse(self, name: str, load: PoolLoadReport, actor: Any) -> Mapping[str, str]:
        """Take a pool's load report; answer with the trials that should move, each with its target pool."""
        # A restarted directory may learn of a running pool here first.
        pool = self._pools.setdefault(name, _RegisteredPool(actor, load, 0.0))
        pool.load, pool.seen = load, time.monotonic()
        pool.placed = {
            key: at for key, at in pool.placed.items() if key not in load.trials and pool.seen - at < _PLACED_SECONDS
        }
        for key, (target, _) in load.leaving.items():
            if target in self._pools:  # on its way the trial is in neither pool's load
                self._pools[target].placed[key] = pool.seen
        self._remember(load)
        if load.trials:
            self._busy = pool.seen
        self._watch_nodes()
        return self._leaving(name)

    async def end_trial(self, trial_id: str) -> None:
        """Make every pool drop a trial that Ray has finished."""
        await self._asked_all("end_trial", trial_id)

    async def figures(self) -> tuple[PoolFigures, ...]:
        """Collect the figures of all pools; pools that do not answer are left out."""
        return tuple(await self._asked_all("figures"))

    async def close(self) -> None:
        """End all pools; the caller kills the directory afterwards."""
        # The watch task itself closes idle pools, and must not cancel itself.
        if self._watching is not None and self._watching is not asyncio.current_task():
            self._watching.cancel()
        starting = tuple(self._starting.values())
        for task in starting:
            task.cancel()
        # A cancelled start kills its own actor: wait for the start's end, or its pool would outlive the directory.
        await asyncio.gather(*starting, return_exceptions=True)
        # Emptied before the wait: `place` must not choose a pool that is ending.
        pools, self._pools = self._pools, {}
        await asyncio.gather(*(_closed(pool.actor) for pool in pools.values()))

    async def _asked_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every pool; return the answers of the pools that answer in time."""

        async def asked(known: _RegisteredPool) -> Any:
            return await asyncio.wait_for(known.actor.call.remote(method, *args), _CALL_SECONDS)

        answers = await asyncio.gather(*map(asked, self._pools.values()), return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def _works(self, names: AbstractSet[str] | None = None) -> dict[str, PoolBacklog]:
        """Known work of each live pool; without `names`, of the pools that stay."""
        names = self._pools.keys() - self._going() if names is None else names
        now = time.monotonic()
        backlogs = {}
        for name, pool in self._pools.items():
            if now - pool.seen > _SEEN_SECONDS or name not in names:
                continue
            trials = {key: self._left.seconds(key) for key in [*pool.placed, *pool.load.trials]}
            backlogs[name] = PoolBacklog(
                num_devices=pool.load.node.num_devices, trials=trials, started=set(pool.load.started)
            )
        for pool in self._pools.values():
            for key, (target, _) in pool.load.leaving.items():
                if target in backlogs:
                    backlogs[target].trials.setdefault(key, self._left.seconds(key))
        return backlogs

    def _remember(self, load: PoolLoadReport) -> None:
        """Note what trials have left: the next pool of a moving trial knows only after building the trial."""
        self._left.hear(load)
        known_keys = set[str]()
        for pool in self._pools.values():
            known_keys |= pool.load.trials.keys() | pool.load.leaving.keys() | pool.placed.keys()
        self._left.keep(known_keys)

    def _going(self) -> set[str]:
        """Pools on nodes that are about to leave the cluster."""
        return {name for name, pool in self._pools.items() if pool.load.node.node_id in self._draining}

    def _all_leave(self, name: str) -> dict[str, str]:
        """Targets for all trials of a pool whose node is about to leave."""
        works, targets = self._works(), {}
        for key in self._pools[name].load.trials if works else ():
            seconds = self._left.seconds(key)
            target = targets[key] = least_busy(works, seconds)
            # The next trial of the pool sees the balance with this one.
            works[target].trials[key] = seconds
            self._pools[target].placed[key] = time.monotonic()
        return targets

    def _leaving(self, name: str) -> dict[str, str]:
        if name in self._going():
            return self._all_leave(name)
        now = time.monotonic()
        self._sent = {key: at for key, at in self._sent.items() if now - at < _REST_SECONDS}
        # A trial marked to leave may take long to reach a report, and must not hold up other moves.
        waiting = {key for pool in self._pools.values() for key in pool.load.leaving}
        if any(not pool.placed.keys() <= waiting for pool in self._pools.values()):
            return {}  # trials are on their way, and will change the balance
        load = self._pools[name].load
        targets = {}
        for key, target in moves(self._works(), _MOVE_SECONDS).items():
            if key in load.trials and key not in self._sent:
                targets[key] = target
                self._sent[key] = now
                self._pools[target].placed[key] = now
        return targets

    async def _start_missing(self) -> None:
        """Drop lost pools, and start missing pools, each in its own task: one start may take minutes."""
        present_nodes = await asyncio.to_thread(
            device_nodes, self._plan.options
        )  # off the event loop: Ray may not answer now
        self._draining = await asyncio.to_thread(draining_nodes)
        nodes = {f"{self._plan.name}:{node.node_id}": node for node in present_nodes}
        now = time.monotonic()
        for name, pool in list(self._pools.items()):
            if name not in nodes or now - pool.seen > _SEEN_SECONDS:
                del self._pools[name]  # the node has left, or the pool has died; a pool that Ray restarts reports anew
        for name, node in nodes.items():
            if node.node_id in self._draining:
                continue
            if name not in self._pools and name not in self._starting:
                self._starting[name] = asyncio.create_task(self._start(name, node))

    async def _start(self, name: str, node: DeviceNode) -> str:
        """Start a pool; return the error, or an empty text."""
        actor = None
        try:
            # Off the event loop: Ray may not answer now.
            actor = await asyncio.to_thread(start_pool, self._place(name, node))
            error = await self._opened(node, actor)
        except asyncio.CancelledError:
            if actor is not None:
                ray.kill(actor)
            raise
        except (RayError, ValueError) as raised:  # the node may have left just now
            error = str(raised)
        finally:
            self._starting.pop(name, None)
        if not error:
            # The pool may have reported its load already: keep that entry.
            self._pools.setdefault(name, _RegisteredPool(actor, PoolLoadReport(node=node), time.monotonic()))
        elif actor is not None:
            ray.kill(actor)
        # Every watch round tries again: log the same error only once.
        if error and error != self._wrong.get(name):
            _LOGGER.warning("%s", error)
        self._wrong[name] = error
        return error

    def _place(self, name: str, node: DeviceNode) -> NodePoolSpec:
        return NodePoolSpec(name=name, directory=self._plan.name, node=node, options=self._plan.options)

    async def _opened(self, node: DeviceNode, actor: Any) -> str:
        try:
            # Absent in the first versions of the package.
            version_method = getattr(actor, "version", None)
            pool_version = (
                None
                if version_method is None
                else await asyncio.wait_for(version_method.remote(), self._plan.start_seconds)
            )
            if error := wrong_pool(pool_version, node.node_id):
                return error
            return str(await asyncio.wait_for(actor.call.remote("open"), self._plan.start_seconds))
        except TimeoutError:
            return (
                f"the pool on node {node.node_id[:8]} has not started within {self._plan.start_seconds:g} s; its devices "
                f"({node.num_gpus} GPUs) may be taken by others, see `ray status`"
            )
        except RayError as error:
            return f"the pool on node {node.node_id[:8]} could not be started: {error}"

    def _watch_nodes(self) -> None:
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Follow the cluster until idle: start pools on new nodes, drop lost pools, and finally end everything."""
        while True:
            await asyncio.sleep(_NODES_SECONDS)
            with contextlib.suppress(RayError):  # Ray does not answer now
                await self._start_missing()
            idle = self._plan.idle_seconds
            if idle is not None and time.monotonic() - self._busy > idle:
                await self.close()
                ray.kill(ray.get_runtime_context().current_actor)


async def _closed(actor: Any) -> None:
    with contextlib.suppress(RayError, TimeoutError):
        await asyncio.wait_for(actor.call.remote("close"), _CLOSE_SECONDS)
    ray.kill(actor)
