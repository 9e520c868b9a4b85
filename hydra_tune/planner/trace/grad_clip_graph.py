"""Clipping as nodes of a step's graph: the norms of gradients as they come, and the factors of each member.

The arithmetic is that of `batched/gradient_clipping.py`, traced. No gradient is overwritten: the factors multiply the
copy that the parameter's update makes (`optimizer_graph.py`), so all gradients stay in memory until then.
`step_graph.py` emits the nodes while the graph of a step with clipped gradients is built, and appends every update,
clipped or not, by `emitted`.

Note: bits. Norms are joined in the order of the module's parameters, because the norm of the norms rounds by its order.
Factors are computed in float64, and then rounded to the dtype of each parameter.

Note: gate. The emitter traces, so the caller holds `GATE` (`shard/capture/capture_lock.py`) alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hydra_tune.batched.gradient_clipping import factors_of, norms_of
from hydra_tune.planner.ir.aliasing import StorageView


class ClippingNodeEmitter:
    """Emits the clipping nodes of a step.

    Args:
        limits: the argument that holds the members' limits.
        order: the optimizer's parameters, in the module's order.
    """

    def __init__(self, graph: fx.Graph, limits: fx.Node, order: Sequence[str], mode: FakeTensorMode) -> None:
        self._graph, self._limits, self._order, self._mode = graph, limits, tuple(order), mode
        self._norms: dict[str, fx.Node] = {}
        self._traced: dict[Any, fx.Graph] = {}
        self._factors: dict[torch.dtype, fx.Node] = {}

    def take(self, name: str, gradient: fx.Node, place: StorageView) -> None:
        """Emit the norms of a gradient."""
        # Gradients of equal geometry share a trace: tracing is much slower than copying the nodes.
        key = place.dtype, place.size, place.stride
        if key not in self._traced:
            like = self._tensor(place.size, place.stride, place.dtype)
            self._traced[key] = make_fx(norms_of, tracing_mode="fake")(like).graph
        self._norms[name] = self._emitted(self._traced[key], [gradient])

    def factors(self, dtype: torch.dtype) -> fx.Node:
        """Return the factors for gradients of a dtype, once the norms of all gradients have been taken."""
        if torch.float64 not in self._factors:
            # In the module's order, as in steps without a plan: the norm of the norms rounds by its order.
            norms = [self._norms[name] for name in self._order if name in self._norms]
            like = self._tensor(self._limits.meta["val"].shape, (1,), torch.float64)

            def factors(limits: Tensor, *each: Tensor) -> Tensor:
                return factors_of(each, limits)

            traced = make_fx(factors, tracing_mode="fake")(like, *[like.clone() for _ in norms]).graph
            self._factors[torch.float64] = self._emitted(traced, [self._limits, *norms])
        if dtype not in self._factors:
            cast = torch.ops.aten._to_copy.default  # noqa: SLF001 - the operator behind `Tensor.to`
            self._factors[dtype] = self._graph.call_function(cast, (self._factors[torch.float64],), {"dtype": dtype})
        return self._factors[dtype]

    def _tensor(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        with self._mode:
            return torch.empty_strided(size, stride, dtype=dtype, device=self._limits.meta["val"].device)

    def _emitted(self, traced: fx.Graph, given: Sequence[fx.Node]) -> fx.Node:
        return emitted(self._graph, traced, given)[0]


def emitted(graph: fx.Graph, traced: fx.Graph, given: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Append the operators of a traced function to a graph, and return the nodes of the results."""
    arguments = iter(given)
    copies: dict[fx.Node, fx.Node] = {}
    for node in traced.nodes:
        if node.op == "placeholder":
            copies[node] = next(arguments)
        elif node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
        elif node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
            return tuple(copies[result] for result in results)
    raise AssertionError("a graph has an output")
