"""`start_pools`: starts a pool on each node of a Ray cluster with devices; `Pools` is the driver's handle.

People import `start_pools` from `hydra_tune_ray` and call the function before a search; `trainable` (`trainable.py`)
does so unless given `pools=`, and `sweep.py` before each sweep on a cluster. `PoolCallback` (`callback.py`) ends trials
through `Pools`, which `pools_of` finds from a trainable class. The module must not import torch.
"""

import contextlib
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hydra_tune.errors import ConfigError
from hydra_tune_ray.errors import PoolError
from hydra_tune_ray.messages import PoolFigures
from hydra_tune_ray.node.actors import NAMESPACE, find_actor
from hydra_tune_ray.node.nodes import device_nodes, no_devices
from hydra_tune_ray.node.pool_directory import DirectoryOptions, PoolDirectory
from hydra_tune_ray.pickling import pickled
from hydra_tune_ray.version import check_directory

_ANSWER_SECONDS = 60.0
_ABREAST = 1000
_REFUSED = {
    "checkpoint_dir": "Ray says where checkpoints are; give storage_path of RunConfig",
    "checkpoint_every": "Ray says when trials are saved; give checkpoint_frequency of CheckpointConfig",
    "plans_only": "pools train",
}
"""Options of `HydraExecutor` that pools refuse: the reason or the remedy of each."""

_KEPT: dict[str, "Pools"] = {}
"""Actors that end with this program: Ray would end an actor as soon as no handle exists."""


class Pools:
    """Handle of the pools on a cluster's nodes, made by `start_pools`.

    A pickle holds only the name: Ray stores a search together with its callbacks, and may restore the search after the
    pools, or the whole cluster, are gone.

    Attributes:
        name: of the set of pools, for `start_pools(name=...)` in another program.
    """

    def __init__(self, name: str, directory: Any = None) -> None:
        self.name = name
        self._directory = directory

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        # Without the handle, which means nothing to a program that restores the search later.
        return type(self), (self.name,)

    @property
    def directory(self) -> Any:
        """Handle of the directory's actor.

        Raises:
            PoolError: the directory is gone, or of another version of hydra-tune.
        """
        if self._directory is None:
            try:
                actor = find_actor(f"pools-{self.name}")
                check_directory(actor, self.name)
            except (ValueError, RayError) as error:
                raise PoolError(f"the pools {self.name!r} are gone; start them again") from error
            self._directory = actor
        return self._directory

    def figures(self) -> tuple[PoolFigures, ...]:
        """Return the figures of each pool; pools that do not answer are left out.

        Raises:
            PoolError: the directory does not answer.
        """
        figures: tuple[PoolFigures, ...] = self._asked(self.directory.figures.remote())
        return figures

    def options(self) -> Mapping[str, Any]:
        """Return the options that the pools were made with.

        Raises:
            PoolError: the directory does not answer.
        """
        options: Mapping[str, Any] = self._asked(self.directory.options.remote())
        return options

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
        """Make every pool drop a trial of Ray; does not wait.

        Raises:
            PoolError: the directory is gone, or of another version of hydra-tune.
        """
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
    """Start a pool on each node of the cluster with devices, and on each such node that joins later.

    Connects to Ray as `ray.init()` does, unless the program is connected already. A node with GPUs gives all GPUs to the
    pool, or the GPUs named by `devices`; in a cluster without GPUs, each node's pool has as many CPU devices as Ray
    counts CPUs there. Pools take no CPUs from Ray's account.

    Args:
        name: shared name under which other programs find the pools; existing pools of the name are reused. None: a
            unique name.
        detached: whether the pools outlive this program, for other programs to use.
        idle_seconds: seconds after which pools without trials end; None: at `close()` or, unless detached, with this
            program. Required for detached pools.
        start_seconds: time limit for the start of each pool, in seconds.
        executor_options: of the `HydraExecutor` of each node, except options of checkpoints, for Ray manages
            checkpoints.

    Returns:
        The pools; a context manager that closes them.

    Raises:
        ConfigError: an option that makes no sense; no node has such devices; or pools of this name have other options.
        BuildPickleError: an option that cannot be sent to a pool.
        PoolError: a pool has not started in time; or pools of this name run another version of hydra-tune.
    """
    _check(executor_options, detached=detached, idle_seconds=idle_seconds, start_seconds=start_seconds)
    if not ray.is_initialized():
        ray.init()
    # A directory without nodes would open without an error, and wait for nodes to join.
    if not device_nodes(executor_options):
        raise ConfigError(no_devices(executor_options))
    pools_name = name or uuid.uuid4().hex[:12]
    plan = DirectoryOptions(
        name=f"pools-{pools_name}", options=executor_options, start_seconds=start_seconds, idle_seconds=idle_seconds
    )
    pools = Pools(pools_name, _directory(plan, detached=detached))
    try:
        _check_opened(pools, start_seconds)
        _check_same(pools, executor_options)
    except BaseException:
        # Pools with a shared name may serve other programs: leave those alone.
        if name is None:
            pools.close()
        raise
    if not detached:
        _KEPT[pools_name] = pools
    return pools


def _directory(plan: DirectoryOptions, *, detached: bool) -> Any:
    # Beside the driver if possible, so that the directory outlives the loss of any other node.
    beside_driver = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=True)
    actor_class = ray.remote(PoolDirectory).options(
        name=plan.name,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached" if detached else None,
        num_cpus=0,
        # One byte of Ray's account: Ray takes any node for an actor that needs nothing, whatever node the strategy prefers.
        memory=1,
        max_concurrency=_ABREAST,
        max_restarts=-1,
        scheduling_strategy=beside_driver,
    )
    return actor_class.remote(plan)


def _check_opened(pools: Pools, start_seconds: float) -> None:
    try:
        check_directory(pools.directory, pools.name)  # the name may belong to pools started earlier
        opened = pools.directory.open.remote()
        error = str(ray.get(opened, timeout=start_seconds + _ANSWER_SECONDS))
    except GetTimeoutError as late:
        raise PoolError(
            f"the pools have not started within {start_seconds + _ANSWER_SECONDS:g} s; see `ray status`, or raise start_seconds"
        ) from late
    except RayError as broken:
        raise PoolError(f"the pools could not be started: {broken}") from broken
    # Errors of a pool arrive as text, because the driver may lack their classes.
    kind, _, text = error.partition(": ")
    if kind in ("ConfigError", "DeviceLostError"):
        raise ConfigError(text)
    if error:
        raise PoolError(error)


def _check_same(pools: Pools, options: Mapping[str, Any]) -> None:
    existing_options = pools.options()
    if dict(existing_options) != dict(options):
        raise ConfigError(
            f"there are pools named {pools.name!r} with other options, {dict(existing_options)!r}; give these, or another name"
        )


def _check(options: Mapping[str, Any], *, detached: bool, idle_seconds: object, start_seconds: object) -> None:
    for option, why in _REFUSED.items():
        if option in options:
            raise ConfigError(f"pools take no {option}: {why}")
    for option_name, value in (("idle_seconds", idle_seconds), ("start_seconds", start_seconds)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if not is_number and not (value is None and option_name == "idle_seconds"):
            raise ConfigError(f"{option_name} must be a number of seconds above 0, not {value!r}")
    if detached and idle_seconds is None:
        raise ConfigError(
            "detached pools outlive this program and keep their devices; say for how long with idle_seconds="
        )
    # Fail here, with a clear message, rather than later in a remote process.
    for option, value in options.items():
        pickled(value, option)


def pools_of(trained: Any) -> Pools:
    """Return the pools behind a class made by `hydra_tune_ray.trainable`.

    Raises:
        ConfigError: not such a class, or its pools are gone.
    """
    name = getattr(trained, "pools", None)
    if not isinstance(name, str):
        raise ConfigError(f"{trained!r} was not made by hydra_tune_ray.trainable")
    try:
        return Pools(name, find_actor(f"pools-{name}"))
    except ValueError as error:
        raise ConfigError(f"the pools {name!r} are gone; start them again") from error
