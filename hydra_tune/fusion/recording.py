"""Random operators taken apart: the primitives that torch makes of one, each with a place for a generator.

A member's numbers have to be drawn from its own generator, and an operator such as dropout takes none. What it is made of does:
torch takes such operators apart above autograd, so that running the primitives is running the operator, gradients included.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


def recorded(node: fx.Node) -> fx.Graph | None:
    """The primitives of a random operator, in a graph of a generator and of the tensors that the node is given.

    Args:
        node: of a captured graph, whose nodes have what they make under `meta["val"]`.

    Returns:
        The graph; None where the operator draws in a way that takes no generator.
    """
    target = node.target
    tensors: list[Any] = [argument.meta.get("val") for argument in node.all_input_nodes]
    if not isinstance(target, OpOverload) or not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        return None
    mode = getattr(tensors[0], "fake_mode", None)
    if mode is None:
        return None
    with mode:
        own = {
            n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            for n, t in zip(node.all_input_nodes, tensors, strict=True)
        }
        arguments = fx.node.map_arg(node.args, own.__getitem__)
        keywords = fx.node.map_arg(dict(node.kwargs), own.__getitem__)
        recorder = _Recorder([own[n] for n in node.all_input_nodes])
        with recorder, torch.enable_grad():
            result = target(*arguments, **keywords)
    return recorder.record(result)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the primitives that one operator runs, with a generator for those that draw.

    Autograd runs some of its own: it detaches what it keeps, and makes views anew whose base was overwritten. A replay above
    autograd brings these about by itself, so they are not noted; nor is what depends on them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = fx.Graph()
        self._generator = self._graph.placeholder("generator")
        self._nodes = {id(t): self._graph.placeholder(f"tensor_{i}") for i, t in enumerate(tensors)}
        self._alive = list(tensors)  # told apart by identity, so none may be freed
        self._possible = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim" and func is not torch.ops.aten.detach.default:  # prim: questions, as for the device
            self._possible = self._possible and self._note(func, args, kwargs or {}, result)
        return result

    def record(self, result: Any) -> fx.Graph | None:
        """The record, or None if the operator cannot be replayed with a generator."""
        node = self._nodes.get(id(result))
        if not self._possible or node is None:
            return None
        self._graph.output(node)
        self._graph.lint()
        return self._graph

    def _note(self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Note one primitive; returns False if none like it can be replayed."""
        draws = torch.Tag.nondeterministic_seeded in func.tags
        primitive = _drawing(func) if draws else func
        if primitive is None or not isinstance(result, Tensor):
            return False
        self._alive.append(result)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not all(id(tensor) in self._nodes for tensor in given):
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
    """The overload of a random primitive that takes a generator, and else the same arguments."""
    packet: Any = func._overloadpacket  # noqa: SLF001
    for candidate in (func, *(getattr(packet, name) for name in packet.overloads())):
        takes = _signature(candidate)
        if takes.pop("generator", None) is not None and takes == _signature(func, but="generator"):
            return candidate  # type: ignore[no-any-return]
    return None


def _signature(func: OpOverload[..., Any], but: str = "") -> dict[str, str]:
    return {a.name: str(a.type) for a in func._schema.arguments if a.name != but}  # noqa: SLF001
