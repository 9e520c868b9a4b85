"""Decompose random operators into torch's primitives; each primitive that draws gets an argument for a generator.

A member's numbers must come from the member's own generator, but operators such as dropout accept none. Their
primitives do. Torch decomposes such operators above autograd, so running the primitives equals running the operator,
including gradients. `StackedGraph` (`batched_graph.py`) decomposes the random operators of a graph, except recurrent
layers, when the graph is stacked, and runs an operator without a record for each member (`per_member_fallback.py`). The
module must not know trials, groups or pools.

Note: bits. The primitives must be those that the operator itself runs, else a member's numbers would differ from a plain
loop's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hydra_tune.shard.capture.precision import autocast
from hydra_tune.task import Precision


def recorded(node: fx.Node, precision: Precision = "float32") -> fx.Graph | None:
    """Return the primitives of a random operator, as a graph of a generator and the node's tensors.

    Args:
        node: a node of a captured graph, with values under `meta["val"]`.
        precision: precision of the step; the casts of autocast are among the primitives, which run without autocast.

    Returns:
        The graph; None if the node is no operator on fake tensors, or a primitive cannot be replayed with a generator.
    """
    target = node.target
    tensors: list[Any] = [argument.meta.get("val") for argument in node.all_input_nodes]
    if not isinstance(target, OpOverload) or not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        return None
    mode = getattr(tensors[0], "fake_mode", None)
    if mode is None:
        return None
    with mode:
        # The recorder tells tensors by their ids, so every input gets a tensor of its own.
        stand_ins = {
            n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            for n, t in zip(node.all_input_nodes, tensors, strict=True)
        }
        arguments = fx.node.map_arg(node.args, stand_ins.__getitem__)
        keywords = fx.node.map_arg(dict(node.kwargs), stand_ins.__getitem__)
        recorder = _PrimitiveRecorder([stand_ins[n] for n in node.all_input_nodes])
        with recorder, torch.enable_grad(), autocast(precision):
            result = target(*arguments, **keywords)
    return recorder.record(result)


class _PrimitiveRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the primitives of an operator, and adds a generator to random primitives.

    Autograd runs additional primitives: it detaches saved tensors, and regenerates views of an overwritten base. A
    replay above autograd causes the same, so these primitives and their dependents are not recorded.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = fx.Graph()
        self._generator = self._graph.placeholder("generator")
        self._nodes = {id(t): self._graph.placeholder(f"tensor_{i}") for i, t in enumerate(tensors)}
        for tensor in tensors:
            self._nodes[id(tensor)].meta["val"] = tensor
        self._alive = list(tensors)  # tensors are identified by id, so none may be freed and its id reused
        self._possible = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim" and func is not torch.ops.aten.detach.default:  # prim: queries, such as the device
            self._possible = self._possible and self._note(func, args, kwargs or {}, result)
        return result

    def record(self, result: Any) -> fx.Graph | None:
        """Return the graph, or None as of `recorded`."""
        node = self._nodes.get(id(result))
        if not self._possible or node is None:
            return None
        self._graph.output(node)
        self._graph.lint()
        return self._graph

    def _note(self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Record a primitive; return False if the primitive cannot be replayed."""
        draws = torch.Tag.nondeterministic_seeded in func.tags
        primitive = _drawing(func) if draws else func
        if primitive is None or not isinstance(result, Tensor):
            return False
        self._alive.append(result)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not all(id(tensor) in self._nodes for tensor in tensors):
            # The primitive reads values of autograd that are not recorded. Leaving the primitive
            # out together with its dependents is safe, unless the primitive draws or writes.
            return not (draws or func._schema.is_mutable)  # noqa: SLF001
        noted_args, noted_kwargs = tree_map(self._node, (args, kwargs))
        if draws:
            noted_kwargs["generator"] = self._generator
        node = self._nodes[id(result)] = self._graph.call_function(primitive, noted_args, noted_kwargs)
        node.meta["val"] = result
        return True

    def _node(self, value: Any) -> Any:
        return self._nodes[id(value)] if isinstance(value, Tensor) else value


def _drawing(func: OpOverload[..., Any]) -> OpOverload[..., Any] | None:
    """Return the overload of a random primitive that accepts a generator and otherwise the same arguments."""
    packet: Any = func._overloadpacket  # noqa: SLF001
    for candidate in (func, *(getattr(packet, name) for name in packet.overloads())):
        takes = _signature(candidate)
        if takes.pop("generator", None) is not None and takes == _signature(func, but="generator"):
            return candidate  # type: ignore[no-any-return]
    return None


def _signature(func: OpOverload[..., Any], but: str = "") -> dict[str, str]:
    return {a.name: str(a.type) for a in func._schema.arguments if a.name != but}  # noqa: SLF001
