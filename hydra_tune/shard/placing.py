"""A captured graph on another device than it was captured on.

A capture notes the device of each tensor that the step's code makes (`torch.arange(n, device=x.device)`), or moves, or that a
conversion checks. It is made on the host, so that device is the CPU, whatever the code asked for. On another device these
nodes mean that one: the plain loop has its model, its batch and what it makes of them in one place, too.
"""

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx


def placed(
    module: fx.GraphModule,
    make: Callable[[fx.GraphModule], Callable[..., Any]] = lambda module: module.forward,
    home: torch.device = torch.device("cpu"),  # noqa: B008 - a value
) -> Callable[..., Any]:
    """What runs a graph on the device of its operands.

    Args:
        module: the graph, which may name a device.
        make: makes what runs a graph; called once for each device that there are operands on.
        home: the device that it names.
    """
    here = make(module)
    if not any(_names_a_device(body) for body in _bodies(module)):
        return here
    others: dict[torch.device, Callable[..., Any]] = {}
    lock = threading.Lock()

    def run(*arguments: Tensor) -> Any:
        place = arguments[0].device if arguments else None
        if place is None or place == home:
            return here(*arguments)
        with lock:
            if place not in others:
                others[place] = make(on(module, place))
        return others[place](*arguments)

    return run


def on(module: fx.GraphModule, place: torch.device) -> fx.GraphModule:
    """A copy of a graph that names this device wherever it named one."""
    found = copy.deepcopy(module)
    for body in _bodies(found):
        for node in body.graph.nodes:
            node.args, node.kwargs = moved(node.args, place), moved(node.kwargs, place)
        body.recompile()
    return found


def moved(arguments: Any, place: torch.device) -> Any:
    """A node's arguments, with this device in the place of any that they name."""
    return fx.node.map_aggregate(arguments, lambda one: place if isinstance(one, torch.device) else one)


def names_a_device(arguments: Any) -> bool:
    """Whether a node's arguments name one."""
    found: list[object] = []
    fx.node.map_aggregate(arguments, found.append)
    return any(isinstance(one, torch.device) for one in found)


def _names_a_device(body: fx.GraphModule) -> bool:
    return any(names_a_device((node.args, node.kwargs)) for node in body.graph.nodes)


def _bodies(module: fx.GraphModule) -> list[fx.GraphModule]:
    """The graph, and those of its regions."""
    return [one for one in module.modules() if isinstance(one, fx.GraphModule)]
