"""Runs a captured graph on another device than the device of the capture.

A capture records the device of each tensor that the step's code creates (`torch.arange(n, device=x.device)`), moves, or
checks before a conversion, and the device type of each autocast region (`torch.autocast(x.device.type, enabled=False)`).
A capture runs on the host, so the recorded device is the CPU, whatever device the code asked for. On another device, such
nodes mean the other device, because the plain loop keeps its model, its batch and all results in a single place, too.
`cut_shard` (`shard/partition/subgraph.py`) applies `placed` when a shard is cut, and `batched/joint_graph.py` to a traced
step; `fusion/batching/batched_graph.py` and the interpreters of `planner/` move single nodes' arguments likewise.
`own_functions.py` walks a graph by `bodies`, and `precision.py` finds regions. Workers of several devices call a placed
graph at the same time, so the graph itself must not change.
"""

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from hydra_tune.devices.device import worker_place

REGION = torch.ops.higher_order.wrap_with_autocast


def placed(
    module: fx.GraphModule,
    make: Callable[[fx.GraphModule], Callable[..., Any]] = lambda module: module.forward,
    home: torch.device = torch.device("cpu"),  # noqa: B008 - a value
) -> Callable[..., Any]:
    """Return a callable that runs a graph on the device of its first operand; without operands, on the calling worker's device.

    Args:
        module: the graph, which may name a device.
        make: makes a callable of a graph; called at once for the graph itself, and once for each other device at its first run.
        home: the device named by the graph.
    """
    here = make(module)
    if not any(_names_a_device(body) for body in bodies(module)):
        return here
    runs_by_device: dict[torch.device, Callable[..., Any]] = {}
    lock = threading.Lock()

    def run(*arguments: Tensor) -> Any:
        """Run the graph on the device of the first operand."""
        place = arguments[0].device if arguments else worker_place()
        if place is None or place == home:
            return here(*arguments)
        # Workers of several devices share a plan, and a copy of a graph must be made only once.
        with lock:
            if place not in runs_by_device:
                runs_by_device[place] = make(on(module, place))
        return runs_by_device[place](*arguments)

    return run


def on(module: fx.GraphModule, place: torch.device) -> fx.GraphModule:
    """Copy a graph, and replace every device in the copy by `place`."""
    # A copy, because workers of other devices may be running the original.
    copied_graph = copy.deepcopy(module)
    for body in bodies(copied_graph):
        for node in body.graph.nodes:
            node.args, node.kwargs = moved(node.args, place), moved(node.kwargs, place)
            if is_region_of_host(node):
                node.args = (place.type, *node.args[1:])
        body.recompile()
    return copied_graph


def moved(arguments: Any, place: torch.device) -> Any:
    """A node's arguments with every device replaced by `place`."""
    return fx.node.map_aggregate(arguments, lambda argument: place if isinstance(argument, torch.device) else argument)


def names_a_device(arguments: Any) -> bool:
    """Whether a node's arguments name a device."""
    leaves: list[object] = []
    fx.node.map_aggregate(arguments, leaves.append)
    return any(isinstance(leaf, torch.device) for leaf in leaves)


def _names_a_device(body: fx.GraphModule) -> bool:
    return any(names_a_device((node.args, node.kwargs)) or is_region_of_host(node) for node in body.graph.nodes)


def is_region_of_host(node: fx.Node) -> bool:
    """Whether a node is an autocast region of the host, whose device type counts as read from a tensor of the capture."""
    return node.target is REGION and node.args[0] == "cpu"


def bodies(module: fx.GraphModule) -> list[fx.GraphModule]:
    """The graph, and the graphs of its regions."""
    return [submodule for submodule in module.modules() if isinstance(submodule, fx.GraphModule)]
