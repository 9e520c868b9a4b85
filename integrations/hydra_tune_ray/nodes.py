"""Which nodes of a cluster have devices for a pool, and what of each node its pool takes."""

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
    """A node that gets a pool.

    Attributes:
        node_id: Ray's.
        devices: as of `HydraExecutor`.
        num_gpus: that the pool reserves.
        num_devices: it will have.
    """

    node_id: str
    devices: str
    num_gpus: int
    num_devices: int


def device_nodes(options: Mapping[str, Any]) -> list[DeviceNode]:
    """The nodes of the cluster that have devices, by their ids.

    Args:
        options: of `HydraExecutor`. With `devices="auto"`, these are the nodes with GPUs, or if there are none in the whole
            cluster those with CPUs, of which there is a device for each that Ray counts.

    Raises:
        ConfigError: `devices` is no text.
    """
    devices = options.get("devices", "auto")
    if not isinstance(devices, str):
        raise ConfigError(f"devices must be a text such as 'auto', 'cuda' or 'cpu:2', not {devices!r}")
    nodes = [(str(node["NodeID"]), node.get("Resources", {})) for node in _alive()]
    if devices == "auto":
        devices = "cuda" if any(_count(resources, "GPU") for _, resources in nodes) else "cpu:*"
    found = [_device_node(node_id, resources, devices) for node_id, resources in nodes]
    return sorted((node for node in found if node is not None), key=lambda node: node.node_id)


def draining_nodes() -> frozenset[str]:
    """The ids of nodes that are about to leave, as `ray drain-node` or a cloud's notice says."""
    # Ray's own libraries ask like this; there is no public way yet. The range of Ray's versions is checked.
    client = global_worker.gcs_client  # type: ignore[attr-defined]
    if hasattr(client, "get_draining_nodes"):
        return frozenset(map(str, client.get_draining_nodes(timeout=_ANSWER_SECONDS)))
    return frozenset(map(str, state.get_draining_nodes()))  # earlier versions


def no_devices(options: Mapping[str, Any]) -> str:
    """What to say where no node has devices."""
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
    some = _SOME.fullmatch(devices)
    if some is not None and gpus:
        named = some[1].split(",")
        return _node(node_id, devices, len({each.partition("/")[0] for each in named}), len(named))
    return _node(node_id, devices, gpus, gpus)  # a text that means nothing is refused by the pool, which says why


def _node(node_id: str, devices: str, num_gpus: int, num_devices: int) -> DeviceNode | None:
    if not num_devices:
        return None
    return DeviceNode(node_id=node_id, devices=devices, num_gpus=num_gpus, num_devices=num_devices)


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _count(resources: Mapping[str, float], kind: str) -> int:
    return int(resources.get(kind, 0))
