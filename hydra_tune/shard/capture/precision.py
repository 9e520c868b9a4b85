"""Mixed precision: enters autocast around captured code, and makes casts shared by several operators part of the graph.

A capture inside autocast does not record autocast, so autocast is entered again around every piece of a captured graph.
In an eager step, a single region spans the whole forward. A parameter used by several operators is cast once, so its
gradients are added in the low precision. Regions around pieces would cast the parameter once per piece. `share_casts`
therefore puts the single cast into the graph, as a value that may cross cuts like any other value; parameters used
once, except by an operator in `_LOOPING`, are left to autocast. `cut_shard` (`shard/partition/subgraph.py`) wraps each new
shard in `under_autocast`, and `captured_graph` (`shard/partition/trial_step.py`) calls `share_casts` after each
capture. `train/loop/direct.py` and `shard/execute/eager_plan.py` run the user's own steps in `eager_autocast`; so do
the checks and measurements of such steps (`shard/verify/step_outcome.py`, `shard/cost/eager_pilot.py`,
`value_replay.py`). Captures and `analyse` (`shard/analysis/graph_analysis.py`) run in `autocast`; stacked operators
(`fusion/batching/`) use `autocast` and `without_autocast`.

A step may enter `torch.autocast` itself. A capture records such a region as a single operator, which no cut can divide, so
`merge_regions` puts the operators of the region into the graph and has the whole graph run in the region's precision.

Note: torch keeps a process-wide cache of casts and clears the cache when any thread leaves a `torch.autocast` region.
Regions of captured code neither use nor clear the cache, because other threads may be in eager code that relies on the
cache. Regions of eager code use the cache, as in a plain loop, so only a single thread at a time is in such a region: a region
of `precision=` (`eager_autocast`), and one that a step enters itself (`regions_in_turn`). Threads of `pool.loop` and of the
user's own take no turns, because such a thread may wait for the pool within its region. But whoever clears the cache waits
until no step is in a region.
"""

import itertools
import operator
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from hydra_tune.shard.capture.graph_device import REGION, is_region_of_host
from hydra_tune.shard.capture.step_capture import CapturedStepGraph, StateSpec
from hydra_tune.task import Precision

_CASTING = {
    # Operators that autocast runs in the low precision, by the positions of the arguments that it casts.
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d"), (0, 1, 2)),
    **dict.fromkeys(("conv_transpose2d", "conv_transpose3d", "convolution", "_convolution"), (0, 1, 2)),
    **dict.fromkeys(("matmul", "mm", "mv", "bmm", "prelu", "linalg_matmul"), (0, 1)),
    **dict.fromkeys(("addmm", "addmv", "addbmm", "baddbmm"), (0, 1, 2)),
    "scaled_dot_product_attention": (0, 1, 2),
    # Recurrent operators are made of `linear`; where an argument is a list, all of it.
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), (2, 3, 4, 5)),
    **dict.fromkeys(("gru", "rnn_tanh", "rnn_relu"), (2,)),
}
_CASTS = threading.RLock()
_INCREMENT, _DECREMENT = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
_LOOPING = frozenset({"gru", "rnn_tanh", "rnn_relu"})  # use their weights once per time step


@contextmanager
def autocast(precision: Precision, device_type: str = "cpu") -> Iterator[None]:
    """`torch.autocast` for captured code: does not use the cache, and does not clear the casts of other threads."""
    if precision == "float32":
        yield
        return
    before = (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    )
    _set(device_type, True, getattr(torch, precision), False)
    try:
        yield
    finally:
        _set(device_type, *before)


@contextmanager
def without_autocast(device_type: str) -> Iterator[None]:
    """Leave autocast for captured code; as `autocast`, does not clear the casts of other threads."""
    before = torch.is_autocast_enabled(device_type)
    torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before)


@contextmanager
def eager_autocast(precision: Precision, device_type: str = "cpu") -> Iterator[None]:
    """`torch.autocast` for the user's own code, which threads enter in turn."""
    with regions_in_turn:
        if precision == "float32":
            yield
        else:
            with torch.autocast(device_type, dtype=getattr(torch, precision)):
                yield


class _RegionsInTurn(threading.local):
    """Context for a step's own code, in which autocast regions of several threads are entered one at a time.

    torch counts the regions that a thread is in. The first region with autocast on takes the turn; its end clears the casts.
    """

    def __init__(self) -> None:
        self.num_contexts = 0
        self.first: int | None = None

    def __enter__(self) -> None:
        _install()
        self.num_contexts += 1

    def __exit__(self, *_: object) -> None:
        self.num_contexts -= 1
        if not self.num_contexts:
            self._end()  # of a region that the step has not left

    def entered(self) -> int:
        """In the place of `torch.autocast_increment_nesting`."""
        nesting = _INCREMENT()
        if self.num_contexts and self.first is None and torch._C._is_any_autocast_enabled():  # noqa: SLF001
            _CASTS.acquire()
            self.first = nesting
        return nesting

    def left(self) -> int:
        """In the place of `torch.autocast_decrement_nesting`; where 0 is returned, torch clears the casts of all threads."""
        nesting = _DECREMENT()
        if self.num_contexts:
            if self.first is not None and nesting < self.first:
                self._end()
            return nesting or -1
        # A thread of torch's own may work for the thread whose turn is now, and must not wait for that thread.
        if nesting or isinstance(threading.current_thread(), threading._DummyThread):  # noqa: SLF001
            return nesting
        with _CASTS:
            torch.clear_autocast_cache()
        return -1

    def _end(self) -> None:
        if self.first is not None:
            self.first = None
            torch.clear_autocast_cache()
            _CASTS.release()


regions_in_turn = _RegionsInTurn()


# Workers of a loader may be forked at any moment, and begin with the turn free.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_CASTS.acquire, after_in_parent=_CASTS.release, after_in_child=_CASTS.release)


def _install() -> None:
    torch.autocast_increment_nesting, torch.autocast_decrement_nesting = regions_in_turn.entered, regions_in_turn.left


def _set(device_type: str, enabled: bool, dtype: torch.dtype, cached: bool) -> None:
    torch.set_autocast_enabled(device_type, enabled)
    torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(cached)


def under_autocast(
    module: Callable[..., tuple[Tensor, ...]], precision: Precision
) -> Callable[..., tuple[Tensor, ...]]:
    """Return a piece of a captured graph that runs in the given precision."""
    if precision == "float32":
        return module

    def run(*arguments: Tensor) -> tuple[Tensor, ...]:
        device_type = arguments[0].device.type if arguments else "cpu"
        with autocast(precision, device_type):
            return module(*arguments)

    return run


def merge_regions(captured: CapturedStepGraph) -> CapturedStepGraph:
    """Return the graph of a step that enters autocast in bfloat16 itself as one that runs in bfloat16 as a whole.

    Operators outside of the regions that would compute otherwise inside are put into regions without autocast. A graph stays as
    it is where such an operator is a call of the user's own code, or a region of another kind. So does a graph with regions of
    float16, because its precision would say that the losses are scaled. And so does a graph with a parameter that several
    regions cast: each region of the user's casts the parameter once, and a capture may have divided a region.
    """
    module = captured.module
    regions = [node for node in module.graph.nodes if _is_region(node)]
    if captured.precision != "float32" or not regions:
        return captured
    cast = Counter(argument.name for region in regions for argument in _cast_in(module, region))
    if captured.mode == "train" and any(cast[name] > 1 for name in captured.state):
        return captured
    outside = [node for node in module.graph.nodes if node not in regions and _changes_in_autocast(node)]
    if not all(isinstance(node.target, torch._ops.OpOverload) for node in outside):  # noqa: SLF001 - the public type
        return captured
    for region in regions:
        _inline(module, region)
    for node in outside:
        _put_into_region(module, node)
    module.graph.lint()
    module.recompile()
    (results,) = next(iter(reversed(module.graph.nodes))).args
    return replace(captured, outputs=tuple(node.name for node in results), precision="bfloat16")


def _is_region(node: fx.Node) -> bool:
    """Whether a node is a region of autocast in bfloat16, on the device of the capture."""
    return is_region_of_host(node) and node.args[1:3] == (torch.bfloat16, True)


def _changes_in_autocast(node: fx.Node) -> bool:
    """Whether an operator computes in another precision inside autocast, which its result's dtype shows."""
    if is_region_of_host(node) or not callable(node.target) or node.target is operator.getitem:
        return False  # a region has an autocast of its own
    if not isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001
        return True
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    found = pytree.tree_leaves(node.meta["val"])
    mode = next((value.fake_mode for value in found if isinstance(value, FakeTensor)), None)
    if mode is None:  # of a check without a result
        return False
    with mode, autocast("bfloat16"):
        inside = pytree.tree_leaves(node.target(*args, **kwargs))
    return [getattr(value, "dtype", None) for value in found] != [getattr(value, "dtype", None) for value in inside]


def _opened(module: fx.GraphModule, region: fx.Node) -> tuple[fx.GraphModule, dict[fx.Node, Any]]:
    """The body of a region, and the argument of each of the body's placeholders."""
    body = getattr(module, region.args[4].target)  # type: ignore[union-attr, arg-type]
    return body, dict(zip(body.graph.find_nodes(op="placeholder"), region.args[5:], strict=True))


def _cast_in(module: fx.GraphModule, region: fx.Node) -> set[Any]:
    """The arguments that a region casts."""
    _, arguments = _opened(module, region)
    return {argument for value, argument in arguments.items() if any(_casts(user, [value]) for user in value.users)}


def _inline(module: fx.GraphModule, region: fx.Node) -> None:
    """Put the operators of a region in the region's place."""
    body, values = _opened(module, region)
    with module.graph.inserting_before(region):
        for node in body.graph.nodes:
            if node.op == "output":
                results = fx.map_arg(node.args[0], values.__getitem__)
            elif node.op == "get_attr":  # the body of a region inside
                values[node] = _attribute(module, getattr(body, node.target))
            elif node.op != "placeholder":
                values[node] = module.graph.node_copy(node, values.__getitem__)
    for user in list(region.users):
        user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(region)


def _put_into_region(module: fx.GraphModule, node: fx.Node) -> None:
    """Put an operator into a region without autocast, in the operator's place."""
    body = fx.Graph()
    arguments = node.all_input_nodes
    values = {argument: body.placeholder(argument.name) for argument in arguments}
    for argument, value in values.items():
        value.meta = dict(argument.meta)
    body.output((body.node_copy(node, values.__getitem__),))
    with module.graph.inserting_before(node):
        attribute = _attribute(module, fx.GraphModule(module, body))
        region = module.graph.call_function(REGION, ("cpu", torch.bfloat16, False, False, attribute, *arguments))
        result = module.graph.call_function(operator.getitem, (region, 0))
    region.meta = {**node.meta, "val": (node.meta["val"],)}
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    module.graph.erase_node(node)


def _attribute(module: fx.GraphModule, body: nn.Module) -> fx.Node:
    """Make the body of a region an attribute of a graph."""
    name = next(name for name in map("region_{}".format, itertools.count()) if not hasattr(module, name))
    setattr(module, name, body)
    return module.graph.get_attr(name)


def share_casts(captured: CapturedStepGraph, specs: dict[str, StateSpec], precision: Precision) -> None:
    """Cast each trained float32 parameter of several low-precision operators, or of one in `_LOOPING`, before its first use."""
    if precision == "float32" or captured.mode != "train":
        return
    graph = captured.module.graph
    order = {node: position for position, node in enumerate(graph.nodes)}
    for name in dict.fromkeys(captured.state.values()):
        spec = specs[name]
        # An untrained parameter has no gradient, so the number of its casts changes no sum.
        if not spec.requires_grad or spec.dtype != torch.float32:
            continue
        tied = [node for node in graph.nodes if captured.state.get(node.name) == name]
        users = sorted((user for node in tied for user in node.users if _casts(user, tied)), key=order.__getitem__)
        if len(users) < 2 and not (users and _name(users[0]) in _LOOPING):  # noqa: PLR2004 - shared
            continue
        with graph.inserting_before(users[0]):
            cast = graph.call_function(torch.ops.aten.to.dtype, (tied[0], getattr(torch, precision)))
        # The meta names the module of a node: the cast counts as a part of its first user's layer.
        cast.meta = dict(users[0].meta)
        cast.meta["val"] = tied[0].meta["val"].to(getattr(torch, precision))
        for user in users:
            _replace(user, tied, cast)
    captured.module.recompile()


def _casts(node: fx.Node, operands: Sequence[fx.Node]) -> bool:
    """Whether autocast casts any of these operands for a node."""
    return any(operand in operands for argument in _cast_arguments(node).values() for operand in _nodes(argument))


def _cast_arguments(node: fx.Node) -> dict[int, Any]:
    positions = _CASTING.get(_name(node), ())
    return {position: node.args[position] for position in positions if position < len(node.args)}


def _nodes(argument: Any) -> list[fx.Node]:
    """A node, or the nodes of a list."""
    arguments = argument if isinstance(argument, list | tuple) else [argument]
    return [node for node in arguments if isinstance(node, fx.Node)]


def _name(node: fx.Node) -> str:
    """Name of an aten operator without its overload; empty for other nodes."""
    if not isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001 - the public type of aten operators
        return ""
    return str(node.target._schema.name.removeprefix("aten::"))  # noqa: SLF001


def _replace(node: fx.Node, old: Sequence[fx.Node], new: fx.Node) -> None:
    for position, argument in _cast_arguments(node).items():
        node.update_arg(position, fx.map_arg(argument, lambda operand: new if operand in old else operand))
