"""Finds the random operators of a captured graph that move the generator by the same distance at each run.

Batches that run side by side draw from separate streams; each stream begins at the end of the previous batch's stream.
The distance by which a batch moves the stream must therefore be known beforehand. Dropout moves the stream by the same
distance at each run; other operators move the stream by their actual draws. The kind of each operator is found while
the graph runs on fake tensors, from the primitives into which torch decomposes each operator. `analyse`
(`graph_analysis.py`) runs each new capture once in a subclass of `CountedRandomOpFinder`; `cut_shard`
(`shard/partition/subgraph.py`) then asks whether all random operators of a shard are counted.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_tune.shard.analysis.random_ops import body_of, draws_random_numbers, is_foreign

_COUNTED = frozenset(
    # Random primitives that move the generator by the same distance for any values and any state of the generator.
    [torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli.p, torch.ops.aten.bernoulli.default]
)
_REGIONS = (
    # Operators whose body runs exactly once, unchanged.
    torch.ops.higher_order.wrap_with_set_grad_enabled,
    torch.ops.higher_order.wrap_with_autocast,
)


@dataclass(slots=True, kw_only=True)
class CountedRandomOps:
    """The counted random operators of a graph.

    Attributes:
        counted: random operators that move the generator by the same distance at each run.
    """

    counted: set[fx.Node] = field(default_factory=set)

    def are_counted(self, nodes: list[fx.Node]) -> bool:
        """Whether all random operators among `nodes` are counted."""
        return all(node in self.counted for node in nodes if node.op == "call_function" and draws_random_numbers(node))


class CountedRandomOpFinder(fx.Interpreter):
    """Runs a graph and finds its counted random operators on the way.

    Args:
        draws: receives the counted operators.
    """

    def __init__(self, module: fx.GraphModule, draws: CountedRandomOps) -> None:
        super().__init__(module)
        self._draws = draws

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        if n.op != "call_function" or not draws_random_numbers(n):
            return super().run_node(n)
        if isinstance(n.target, HigherOrderOperator) and n.target in _REGIONS:
            return self._enter(n, n.target)
        if not isinstance(n.target, OpOverload):
            return super().run_node(n)
        primitives = _RandomPrimitiveRecorder()
        with primitives:
            result = super().run_node(n)
        # On fake tensors an operator of another library runs no code that draws.
        if primitives.drawing <= _COUNTED and not is_foreign(n.target):
            self._draws.counted.add(n)
        return result

    def _enter(self, n: fx.Node, target: HigherOrderOperator) -> Any:
        """Run a region, body included."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        bodies = {
            position: body for position, operand in enumerate(n.args) if (body := body_of(n, operand)) is not None
        }
        inside = CountedRandomOps()
        # Each body runs through a finder of its own, because the operators inside have to be classified as well.
        runs = [
            CountedRandomOpFinder(bodies[i], inside).run if i in bodies else argument for i, argument in enumerate(args)
        ]
        result = target(*runs, **kwargs)
        if all(inside.are_counted(list(body.graph.nodes)) for body in bodies.values()):
            self._draws.counted.add(n)
        return result


class _RandomPrimitiveRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the random primitives run by an operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawing: set[Any] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawing.add(func)
        return func(*args, **(kwargs or {}))
