"""Clipping as nodes of a step's graph: the norms of gradients as they come, and what each member's are multiplied with.

The arithmetic is that of `fusion/clipping.py`, traced. No gradient is overwritten: each is multiplied where its parameter's
update has copied it (`updates.py`), so until then all of them stay where they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hydra_tune.fusion.clipping import factors_of, norms_of
from hydra_tune.fusion.planner.storages import Place


class ClippedGradients:
    """Emits the nodes of one step.

    Args:
        graph: where to.
        limits: the argument that has the members' limits.
        order: the optimizer's parameters.
        mode: for tensors without bytes.
    """

    def __init__(self, graph: fx.Graph, limits: fx.Node, order: Sequence[str], mode: FakeTensorMode) -> None:
        self._graph, self._limits, self._order, self._mode = graph, limits, tuple(order), mode
        self._norms: dict[str, fx.Node] = {}
        self._traced: dict[Any, fx.Graph] = {}
        self._factors: dict[torch.dtype, fx.Node] = {}

    def take(self, name: str, gradient: fx.Node, place: Place) -> None:
        """The norms of a gradient.

        Args:
            name: of the parameter.
            gradient: it.
            place: how it lies.
        """
        key = place.dtype, place.size, place.stride
        if key not in self._traced:
            like = self._tensor(place.size, place.stride, place.dtype)
            self._traced[key] = make_fx(norms_of, tracing_mode="fake")(like).graph
        self._norms[name] = self._emitted(self._traced[key], [gradient])

    def factors(self, dtype: torch.dtype) -> fx.Node:
        """What gradients of a dtype are multiplied with, when the norms of all have been taken.

        Args:
            dtype: of the gradients.
        """
        if torch.float64 not in self._factors:
            norms = [self._norms[name] for name in self._order if name in self._norms]
            like = self._tensor(self._limits.meta["val"].shape, (1,), torch.float64)

            def factors(limits: Tensor, *each: Tensor) -> Tensor:
                return factors_of(each, limits)

            traced = make_fx(factors, tracing_mode="fake")(like, *[like.clone() for _ in norms]).graph
            self._factors[torch.float64] = self._emitted(traced, [self._limits, *norms])
        if dtype not in self._factors:
            cast = torch.ops.aten._to_copy.default  # noqa: SLF001 - what `Tensor.to` comes to
            self._factors[dtype] = self._graph.call_function(cast, (self._factors[torch.float64],), {"dtype": dtype})
        return self._factors[dtype]

    def _tensor(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        with self._mode:
            return torch.empty_strided(size, stride, dtype=dtype, device=self._limits.meta["val"].device)

    def _emitted(self, traced: fx.Graph, given: Sequence[fx.Node]) -> fx.Node:
        return emitted(self._graph, traced, given)[0]


def emitted(graph: fx.Graph, traced: fx.Graph, given: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Append the operators of a traced function to a graph; what it gives.

    Args:
        graph: appended to.
        traced: of operators alone.
        given: its arguments.
    """
    arguments = iter(given)
    new: dict[fx.Node, fx.Node] = {}
    for node in traced.nodes:
        if node.op == "placeholder":
            new[node] = next(arguments)
        elif node.op == "call_function":
            new[node] = graph.node_copy(node, new.__getitem__)
        elif node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
            return tuple(new[one] for one in results)
    raise AssertionError("a graph has an output")
