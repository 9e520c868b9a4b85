"""Algorithm H: run merged graphs node by node, with copies beside the computation (`copy_engine.py`).

`MergedGraphRunner` (`runner.py`) makes an interpreter for each merged graph before the first step, and calls `run` for each
segment, on the thread of a device's worker. The module must not decide anything: all decisions are nodes of the graph.

Differs: the algorithm reads attributes of nodes (`to_prefetch`, `to_recompute`, `to_delete`, `to_ofload`). Here the
attributes are nodes of the graph, so the interpreter maps nodes to actions, and frees values. The memory of an offloaded
storage is given back at the node that waits for the copy.

Note: names. The side of a draw is read off its node's name, which begins with the prefix `a0_` or `a1_` of
`planner/passes/graph_rewrite.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from hydra_tune.planner.ir import planner_ops
from hydra_tune.planner.passes.graph_rewrite import MergedGraph
from hydra_tune.planner.run.copy_engine import CopyEngine
from hydra_tune.planner.run.filling import filled, located
from hydra_tune.shard.capture.graph_device import moved


@dataclass(frozen=True, slots=True)
class _InterpretedCall:
    """A node, prepared to run; `ends` are the places of the values that nobody needs afterwards."""

    place: int
    run: Callable[..., Any]
    args: Any
    kwargs: Any
    ends: tuple[int, ...]


class MergedGraphInterpreter:
    """Runs a merged graph again and again.

    Args:
        draw: (side of a sub-array, number of the noise) -> random numbers.
        place: the device, in place of any device that the graph names: the graph may have been traced for another
            device of the same kind.
    """

    def __init__(
        self, merged: MergedGraph, copies: CopyEngine, draw: Callable[[int, int], Tensor], place: torch.device
    ) -> None:
        self._outputs = merged.outputs
        self._copies, self._draw, self._place = copies, draw, place
        self._places = {node: place for place, node in enumerate(merged.graph.nodes)}
        self._arguments: list[tuple[str, int]] = []
        self._constants: list[tuple[int, Tensor]] = []
        self._calls: list[_InterpretedCall] = []
        ends = self._ends(merged.graph)
        for node in merged.graph.nodes:
            if node.op == "placeholder":
                self._arguments.append((str(node.target), self._places[node]))
            elif node.op == "get_attr":
                self._constants.append((self._places[node], getattr(merged.owner, str(node.target)).to(place)))
            elif node.op == "output":
                self._results = [self._places[result] for result in node.args[0]]
            else:
                self._calls.append(self._call(node, ends.get(node, ())))

    @property
    def arguments(self) -> list[str]:
        """Names of the arguments, in order."""
        return [name for name, _ in self._arguments]

    def run(self, given: dict[str, Any]) -> dict[str, Any]:
        """Run the graph, and free each argument and value behind its last use, unless others hold it; empty `given`.

        Returns:
            Outputs of the graph: losses, and the values that the forward leaves for its backward.
        """
        values: list[Any] = [None] * len(self._places)
        for name, place in self._arguments:
            values[place] = given.pop(name)
        # The caller's dict must not keep any value alive.
        given.clear()
        for place, constant in self._constants:
            values[place] = constant
        with torch.no_grad():
            for call in self._calls:
                values[call.place] = call.run(*filled(call.args, values), **filled(call.kwargs, values))
                for place in call.ends:
                    values[place] = None
        return dict(zip(self._outputs, (values[place] for place in self._results), strict=True))

    def _call(self, node: fx.Node, ends: tuple[int, ...]) -> _InterpretedCall:
        arguments, keywords = moved(tuple(node.args), self._place), moved(dict(node.kwargs), self._place)
        args, kwargs = located(arguments, self._places), located(keywords, self._places)
        return _InterpretedCall(self._places[node], self._meaning(node), args, kwargs, ends)

    def _meaning(self, node: fx.Node) -> Callable[..., Any]:
        meanings: Mapping[Any, Callable[..., Any]] = {
            planner_ops.offload: self._copies.offload,
            planner_ops.offload_at_once: self._copies.offload_at_once,
            planner_ops.release: self._copies.release,
            planner_ops.prefetch: self._copies.prefetch,
            planner_ops.prefetch_at_once: self._copies.prefetch_at_once,
            planner_ops.arrived: self._copies.arrived,
            # Nothing to do: the node is the last user of its values, and `ends` frees them.
            planner_ops.delete: lambda *_values: None,
        }
        if node.target is planner_ops.draw:
            # The rewriter's prefix, `a0_` or `a1_`.
            side = int(node.name[1 : node.name.index("_")])
            return lambda number: self._draw(side, number)
        assert callable(node.target), "an operator"
        return meanings.get(node.target, node.target)

    def _ends(self, graph: fx.Graph) -> dict[fx.Node, tuple[int, ...]]:
        """For each node, the places of values that no later node needs."""
        last_users: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            # A value without users ends with its own node.
            last_users[node] = node
            for argument in node.all_input_nodes:
                last_users[argument] = node
        ends: dict[fx.Node, list[int]] = {}
        for node, end in last_users.items():
            if end.op != "output":
                ends.setdefault(end, []).append(self._places[node])
        return {node: tuple(places) for node, places in ends.items()}
