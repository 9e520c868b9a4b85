"""`start_pools`: a pool on each node of a Ray cluster that has devices, and what a driver can ask of them."""

import contextlib
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hydra_tune.errors import ConfigError
from hydra_tune_ray.actors import NAMESPACE, find_actor
from hydra_tune_ray.directory import Directory, Plan
from hydra_tune_ray.errors import PoolError
from hydra_tune_ray.messages import PoolFigures
from hydra_tune_ray.nodes import device_nodes, no_devices
from hydra_tune_ray.pickling import pickled
from hydra_tune_ray.version import check_directory

_ANSWER_SECONDS = 60.0
_ABREAST = 1000
_REFUSED = {
    "checkpoint_dir": "Ray says where checkpoints are; give storage_path of RunConfig",
    "checkpoint_every": "Ray says when trials are saved; give checkpoint_frequency of CheckpointConfig",
    "plans_only": "pools train",
}
"""Options of `HydraExecutor` that Ray has its own of."""

_KEPT: dict[str, "Pools"] = {}
"""Those that end with this program: Ray would end them as soon as nobody has a handle."""


class Pools:
    """Pools on the nodes of a cluster. Made by `start_pools`.

    Pickled, they are their name: Ray stores a search with its callbacks, to be restored when these pools, or the whole cluster,
    may be gone.

    Attributes:
        name: of them all, for `start_pools(name=...)` in another program.
    """

    def __init__(self, name: str, directory: Any = None) -> None:
        self.name = name
        self._directory = directory

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (self.name,)

    @property
    def directory(self) -> Any:
        """The actor that knows them.

        Raises:
            PoolError: it is gone, or of another version of hydra-tune.
        """
        if self._directory is None:
            try:
                found = find_actor(f"pools-{self.name}")
                check_directory(found, self.name)
            except (ValueError, RayError) as error:
                raise PoolError(f"the pools {self.name!r} are gone; start them again") from error
            self._directory = found
        return self._directory

    def figures(self) -> tuple[PoolFigures, ...]:
        """What each pool has done and has to do; pools that do not answer are left out.

        Raises:
            PoolError: there is no answer.
        """
        found: tuple[PoolFigures, ...] = self._asked(self.directory.figures.remote())
        return found

    def options(self) -> Mapping[str, Any]:
        """Those that the pools were made with.

        Raises:
            PoolError: there is no answer.
        """
        found: Mapping[str, Any] = self._asked(self.directory.options.remote())
        return found

    def close(self) -> None:
        """End all trials and all pools, here and on the other nodes. May be called again."""
        _KEPT.pop(self.name, None)
        if not ray.is_initialized():
            return
        try:
            directory = self.directory
        except PoolError:
            return
        with contextlib.suppress(RayError):
            ray.get(directory.close.remote(), timeout=_ANSWER_SECONDS)
        ray.kill(directory)

    def end_trial(self, trial_id: str) -> None:
        """Have no pool train a trial of Ray any more; does not wait."""
        self.directory.end_trial.remote(trial_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _asked(self, call: Any) -> Any:
        try:
            return ray.get(call, timeout=_ANSWER_SECONDS)
        except RayError as error:
            raise PoolError(f"the pools {self.name!r} do not answer: {error}; start them again") from error


def start_pools(
    *,
    name: str | None = None,
    detached: bool = False,
    idle_seconds: float | None = None,
    start_seconds: float = 120.0,
    **executor_options: Any,
) -> Pools:
    """Start a pool on each node of the cluster that has devices, and on each that joins later.

    Connects to Ray as `ray.init()` does, where the program has not. A node with GPUs gives all of them to its pool, or those
    that `devices` names; where the cluster has none, each node's pool has as many CPU devices as Ray counts CPUs there.
    Pools take no CPUs from Ray's account.

    Args:
        name: for other programs to find them by; if there are some of this name, those are taken. None: a name of their own.
        detached: whether they outlive this program, for others to use.
        idle_seconds: how long they stay without trials; None: until `close()` and, if they are not detached, no longer than
            this program. Detached pools need it.
        start_seconds: how long each may take to start.
        executor_options: of the `HydraExecutor` of each node; but for checkpoints, which are Ray's.

    Returns:
        The pools; a context manager that closes them.

    Raises:
        ConfigError: an option that makes no sense; or no node has such devices.
        BuildPickleError: an option that cannot be sent to a pool.
        PoolError: a pool has not started in time; or there are pools of this name of another version of hydra-tune.
    """
    _check(executor_options, detached=detached, idle_seconds=idle_seconds, start_seconds=start_seconds)
    if not ray.is_initialized():
        ray.init()
    if not device_nodes(executor_options):
        raise ConfigError(no_devices(executor_options))
    own = name or uuid.uuid4().hex[:12]
    plan = Plan(name=f"pools-{own}", options=executor_options, start_seconds=start_seconds, idle_seconds=idle_seconds)
    pools = Pools(own, _directory(plan, detached=detached))
    try:
        _check_opened(pools, start_seconds)
        _check_same(pools, executor_options)
    except BaseException:
        if name is None:
            pools.close()
        raise
    if not detached:
        _KEPT[own] = pools
    return pools


def _directory(plan: Plan, *, detached: bool) -> Any:
    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=True)
    made = ray.remote(Directory).options(
        name=plan.name,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached" if detached else None,
        num_cpus=0,
        max_concurrency=_ABREAST,
        max_restarts=-1,
        scheduling_strategy=here,
    )
    return made.remote(plan)


def _check_opened(pools: Pools, start_seconds: float) -> None:
    try:
        check_directory(pools.directory, pools.name)  # of this name there may have been some before
        opened = pools.directory.open.remote()
        error = str(ray.get(opened, timeout=start_seconds + _ANSWER_SECONDS))
    except GetTimeoutError as late:
        raise PoolError(
            f"the pools have not started within {start_seconds + _ANSWER_SECONDS:g} s; see `ray status`, or raise start_seconds"
        ) from late
    except RayError as broken:
        raise PoolError(f"the pools could not be started: {broken}") from broken
    kind, _, text = error.partition(": ")
    if kind in ("ConfigError", "DeviceLostError"):
        raise ConfigError(text)
    if error:
        raise PoolError(error)


def _check_same(pools: Pools, options: Mapping[str, Any]) -> None:
    found = pools.options()
    if dict(found) != dict(options):
        raise ConfigError(
            f"there are pools named {pools.name!r} with other options, {dict(found)!r}; give these, or another name"
        )


def _check(options: Mapping[str, Any], *, detached: bool, idle_seconds: object, start_seconds: object) -> None:
    for option, why in _REFUSED.items():
        if option in options:
            raise ConfigError(f"pools take no {option}: {why}")
    for what, value in (("idle_seconds", idle_seconds), ("start_seconds", start_seconds)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if not is_number and not (value is None and what == "idle_seconds"):
            raise ConfigError(f"{what} must be a number of seconds above 0, not {value!r}")
    if detached and idle_seconds is None:
        raise ConfigError(
            "detached pools outlive this program and keep their devices; say for how long with idle_seconds="
        )
    for option, value in options.items():
        pickled(value, option)


def pools_of(trained: Any) -> Pools:
    """The pools in which a class that `hydra_tune_ray.trainable` has made trains.

    Raises:
        ConfigError: it is no such class, or its pools are gone.
    """
    name = getattr(trained, "pools", None)
    if not isinstance(name, str):
        raise ConfigError(f"{trained!r} was not made by hydra_tune_ray.trainable")
    try:
        return Pools(name, find_actor(f"pools-{name}"))
    except ValueError as error:
        raise ConfigError(f"the pools {name!r} are gone; start them again") from error
