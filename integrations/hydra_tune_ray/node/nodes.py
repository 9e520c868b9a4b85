"""Finds the cluster's nodes with devices, and the share of each node that its pool takes.

`start_pools` (`pools.py`) looks for devices before any pool starts, and `PoolDirectory` (`pool_directory.py`) lists the
nodes and the draining nodes anew about every two seconds, in a worker thread, because Ray may not answer. No function here
may be called on an event loop. `actors.py`, `messages.py` and the pools pass each `DeviceNode` on.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import state
from ray._private.worker import global_worker

from hydra_tune.errors import ConfigError

_CPU = re.compile(r"cpu(?::\d+)?")
_ANSWER_SECONDS = 10
_SOME = re.compile(r"cuda:(\d+(?:[,/]\d+)*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNode:
    """A node for a pool.

    Attributes:
        node_id: Ray's id of the node.
        devices: as of `HydraExecutor`.
        num_gpus: GPUs reserved for the pool.
        num_devices: number of the pool's devices.
    """

    node_id: str
    devices: str
    num_gpus: int
    num_devices: int


def device_nodes(options: Mapping[str, Any]) -> list[DeviceNode]:
    """List the cluster's nodes with devices, ordered by id.

    Args:
        options: of `HydraExecutor`. `devices="auto"` takes the nodes with GPUs; in a cluster without GPUs, the nodes
            with CPUs, with one device for each CPU that Ray counts.

    Raises:
        ConfigError: `devices` is no text.
    """
    devices = options.get("devices", "auto")
    if not isinstance(devices, str):
        raise ConfigError(f"devices must be a text such as 'auto', 'cuda' or 'cpu:2', not {devices!r}")
    nodes = [(str(node["NodeID"]), node.get("Resources", {})) for node in _alive()]
    if devices == "auto":
        # For the cluster as a whole: beside nodes with GPUs, a node without GPUs gets no pool.
        devices = "cuda" if any(_count(resources, "GPU") for _, resources in nodes) else "cpu:*"
    candidates = [_device_node(node_id, resources, devices) for node_id, resources in nodes]
    return sorted((node for node in candidates if node is not None), key=lambda node: node.node_id)


def draining_nodes() -> frozenset[str]:
    """Ids of the nodes about to leave, as announced by `ray drain-node` or a cloud's notice."""
    # Ray has no public call yet; Ray's own libraries call this one. The package checks the range of Ray's versions.
    client = global_worker.gcs_client  # type: ignore[attr-defined]
    if hasattr(client, "get_draining_nodes"):
        return frozenset(map(str, client.get_draining_nodes(timeout=_ANSWER_SECONDS)))
    return frozenset(map(str, state.get_draining_nodes()))  # older versions of Ray


def no_devices(options: Mapping[str, Any]) -> str:
    """Error message for a cluster in which no node has devices."""
    devices = options.get("devices", "auto")
    nodes = [node.get("Resources", {}) for node in _alive()]
    counted = f"{sum(_count(r, 'GPU') for r in nodes)} GPUs and {sum(_count(r, 'CPU') for r in nodes)} CPUs"
    kind = "GPU" if devices.startswith("cuda") else "GPU and no CPU" if devices == "auto" else "CPU"
    return (
        f"devices={devices!r}, and no node of the Ray cluster has a {kind}: its {len(nodes)} nodes have {counted}; start nodes "
        "with --num-gpus or --num-cpus, or give other devices"
    )


def _device_node(node_id: str, resources: Mapping[str, float], devices: str) -> DeviceNode | None:
    cpus, gpus = _count(resources, "CPU"), _count(resources, "GPU")
    if devices == "cpu:*":
        return _node(node_id, f"cpu:{cpus}", 0, cpus)
    if _CPU.fullmatch(devices):
        count = int(devices.partition(":")[2] or 1)
        return _node(node_id, devices, 0, count if cpus else 0)
    chosen_gpus = _SOME.fullmatch(devices)
    if chosen_gpus is not None and gpus:
        gpu_names = chosen_gpus[1].split(",")
        # Several devices may share one GPU, which the pool reserves only once.
        return _node(node_id, devices, len({gpu_name.partition("/")[0] for gpu_name in gpu_names}), len(gpu_names))
    return _node(node_id, devices, gpus, gpus)  # the pool refuses a meaningless text, with the reason


def _node(node_id: str, devices: str, num_gpus: int, num_devices: int) -> DeviceNode | None:
    if not num_devices:
        return None
    return DeviceNode(node_id=node_id, devices=devices, num_gpus=num_gpus, num_devices=num_devices)


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _count(resources: Mapping[str, float], kind: str) -> int:
    return int(resources.get(kind, 0))
