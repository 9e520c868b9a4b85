"""Analyses a captured graph: results, lifetimes and overwrites of each node, and the positions of allowed cuts.

A cut is a position between two nodes. A cut is allowed where the crossing values are plain tensors whose storages are
not overwritten later behind the back of another value (see `_overwrite_hazards`); in training, no cut follows the loss.
`PlanLibrary` (`shard/partition/plan_cache.py`) calls `analyse` after each capture, and `shard/verify/sample_check.py` through
the library. The pilot (`shard/cost/pilot.py`), the partitioners (`shard/partition/partitioner.py`), the splitter
(`shard/partition/subgraph.py`), `shard/partition/plan.py`, `shard/partition/plan_request.py` and
`shard/partition/shard_equivalence.py` read the `GraphAnalysis`. The pilot takes its inputs from `placeholders`, and
`shard/cost/update_pilot.py` its stand-ins from `fake_like`. The analysis runs on fake tensors alone, and must not change
the graph.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hydra_tune.errors import CaptureError
from hydra_tune.shard.analysis.random_ops import body_of, draws_random_numbers, named_arguments
from hydra_tune.shard.analysis.rng_consumption import CountedRandomOpFinder, CountedRandomOps
from hydra_tune.shard.capture.precision import autocast
from hydra_tune.shard.capture.step_capture import CapturedStepGraph, StateSpec

_RUNNING_STATISTICS = {
    # Operators that overwrite `running_mean` and `running_var` without saying so in their schema: which argument says so.
    "aten::batch_norm": "training",
    "aten::instance_norm": "use_input_stats",
    "aten::native_batch_norm": "training",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTensorSpec:
    """Result of a node that makes a single tensor."""

    storage: int
    storage_bytes: int
    requires_grad: bool


@dataclass(slots=True, kw_only=True)
class GraphAnalysis:
    """Facts about a captured graph; positions count the nodes of `CapturedStepGraph.nodes`.

    Attributes:
        values: node or placeholder name -> the tensor; nodes that make no single tensor are missing.
        cuts: positions of allowed cuts, ascending, without 0 and the end.
        crossing_bytes: for each position the bytes of the values that cross, each value with its whole storage.
        written_state: canonical names of the buffers overwritten by the step.
        written_values: position of an overwriting node -> all nodes that see the overwritten storage.
        stochastic: positions of the nodes that draw random numbers.
        draws: random operators whose draws are known beforehand.
        layers: for each position the name of the node's module ("" outside any).
        classes: for each position the class of the node's module, as `module.name`.
    """

    values: dict[str, NodeTensorSpec]
    cuts: list[int]
    crossing_bytes: list[int]
    written_state: frozenset[str]
    written_values: dict[int, frozenset[str]]
    stochastic: frozenset[int]
    draws: CountedRandomOps
    layers: list[str]
    classes: list[str]


class _AnalysisInterpreter(CountedRandomOpFinder):
    """Collects facts while the graph runs on fake tensors."""

    def __init__(self, module: fx.GraphModule, draws: CountedRandomOps) -> None:
        super().__init__(module, draws)
        self.values: dict[str, NodeTensorSpec] = {}
        # Storages are identified by address, so no storage may be freed.
        self._kept: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and record the node's tensor; a result that is no tensor is left out."""
        result = super().run_node(n)
        if n.op != "output" and isinstance(result, Tensor):
            self._kept[n.name] = result
            storage = result.untyped_storage()
            self.values[n.name] = NodeTensorSpec(
                storage=storage._cdata,  # noqa: SLF001 - the storage's identity
                storage_bytes=storage.nbytes(),
                requires_grad=result.requires_grad,
            )
        return result

    def settle(self) -> None:
        """Update `requires_grad`: writing values with gradients into a tensor, or a view, gives the tensor gradients."""
        for name, tensor in self._kept.items():
            self.values[name] = replace(self.values[name], requires_grad=tensor.requires_grad)


def fake_like(mode: FakeTensorMode, spec: StateSpec) -> Tensor:
    """Return a fake tensor of a parameter's or buffer's geometry; a leaf that requires gradients if the parameter does."""
    with mode:
        fake = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
    return fake.requires_grad_(spec.requires_grad)


def placeholders(
    captured: CapturedStepGraph, specs: dict[str, StateSpec], batch: tuple[Tensor, ...], mode: FakeTensorMode
) -> dict[str, Tensor]:
    """Return fake tensors for all the graph's inputs, with tied names bound to a single tensor."""
    state = {name: fake_like(mode, specs[name]) for name in dict.fromkeys(captured.state.values())}
    fakes = {placeholder: state[name] for placeholder, name in captured.state.items()}
    fakes |= {placeholder: mode.from_tensor(tensor) for placeholder, tensor in captured.constants.items()}
    fakes |= {placeholder: mode.from_tensor(batch[index]) for placeholder, index in captured.inputs.items()}
    return fakes


def analyse(captured: CapturedStepGraph, specs: dict[str, StateSpec], batch: tuple[Tensor, ...]) -> GraphAnalysis:
    """Run the graph on fake tensors and find the allowed cuts.

    Of `batch`, only the geometry is used.

    Raises:
        CaptureError: the graph overwrites a parameter or its batch, so that no part could be computed a second time.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = placeholders(captured, specs, batch, mode)
    draws = CountedRandomOps()
    recorder = _AnalysisInterpreter(captured.module, draws)
    arguments = [inputs.get(n.name) for n in captured.module.graph.nodes if n.op == "placeholder"]
    # In the modes of a real run, so that gradients and dtypes of the values are right.
    with mode, torch.set_grad_enabled(captured.mode == "train"), autocast(captured.precision):
        recorder.run(*arguments)
    recorder.settle()
    nodes = captured.nodes
    writes = [(position, name) for position, node in enumerate(nodes) for name in _written_arguments(node)]
    written_storages = {recorder.values[name].storage for _, name in writes if name in recorder.values}
    written_state = frozenset(
        name for placeholder, name in captured.state.items() if recorder.values[placeholder].storage in written_storages
    )
    if any(recorder.values[placeholder].storage in written_storages for placeholder in captured.inputs):
        raise CaptureError(
            "the step overwrites its batch in place, which later shards and epochs would see; clone it first"
        )
    for name in written_state:
        if specs[name].is_parameter:
            raise CaptureError(f"the model's forward overwrites its parameter {name!r} in place")
    forbidden = _overwrite_hazards(captured, recorder.values, writes)
    crossing, plain = _crossings(nodes, recorder.values)
    end = _last_cut(captured)
    cuts = [position for position in range(1, end + 1) if plain[position] and position not in forbidden]
    return GraphAnalysis(
        values=recorder.values,
        cuts=cuts,
        crossing_bytes=crossing,
        written_state=written_state,
        written_values=_written_storages(writes, recorder.values),
        stochastic=frozenset(position for position, node in enumerate(nodes) if draws_random_numbers(node)),
        draws=draws,
        layers=[_layer(node) for node in nodes],
        classes=[_class(node) for node in nodes],
    )


def _last_cut(captured: CapturedStepGraph) -> int:
    """Last position of a cut; in training, nodes after the loss stay with the loss, because the backward starts there."""
    nodes = captured.nodes
    if captured.mode != "train":
        return len(nodes) - 1
    return max((position for position, node in enumerate(nodes) if node.name in captured.outputs), default=0)


def _written_arguments(node: fx.Node) -> list[str]:
    """Names of the nodes whose tensors are overwritten by this node."""
    if not isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001
        return _written_by_body_of(node)
    schema = node.target._schema  # noqa: SLF001
    named = named_arguments(node)
    switch = _RUNNING_STATISTICS.get(schema.name)
    hidden = ("running_mean", "running_var") if switch is not None and named[switch] else ()
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    values = [named[name] for name in (*written, *(h for h in hidden if h in named))]
    flat = [item for value in values for item in (value if isinstance(value, list | tuple) else (value,))]
    return [item.name for item in flat if isinstance(item, fx.Node)]


def _written_by_body_of(node: fx.Node) -> list[str]:
    """Operands overwritten by a higher-order operator (a `no_grad` or autocast region)."""
    written: list[str] = []
    for position, argument in enumerate(node.args):
        body = body_of(node, argument)
        if body is None:
            continue
        # The operands of a region follow its body among the arguments.
        formal = [n for n in body.graph.nodes if n.op == "placeholder"]
        operands = dict(zip((n.name for n in formal), node.args[position + 1 :], strict=False))
        inside = {n.name: n for n in body.graph.nodes}
        for inner in body.graph.nodes:
            for name in _written_arguments(inner) if inner.op == "call_function" else ():
                operand = operands.get(_view_base(inside[name]).name)
                if isinstance(operand, fx.Node):
                    written.append(operand.name)
    return written


def _view_base(node: fx.Node) -> fx.Node:
    """Node at the start of a chain of views and in-place operators, which owns the storage."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001
        schema = node.target._schema  # noqa: SLF001
        # A result without alias has a new storage, so the chain starts here.
        if not schema.returns or schema.returns[0].alias_info is None:
            break
        named = named_arguments(node)
        bases = [named[a.name] for a in schema.arguments if a.alias_info is not None]
        if not bases or not isinstance(bases[0], fx.Node):
            break
        node = bases[0]
    return node


def _written_storages(writes: list[tuple[int, str]], values: dict[str, NodeTensorSpec]) -> dict[int, frozenset[str]]:
    """Position -> all nodes that see the storage overwritten there."""
    sharing: dict[int, set[str]] = defaultdict(set)
    for name, value in values.items():
        sharing[value.storage].add(name)
    sharers: dict[int, frozenset[str]] = {}
    for position, name in writes:
        if name in values:
            sharers[position] = sharers.get(position, frozenset()) | sharing[values[name].storage]
    return sharers


def _last_uses(nodes: list[fx.Node]) -> dict[str, int]:
    """Node name -> position of the node's last user; the graph's output counts as the position after the last node."""
    index = {node: position for position, node in enumerate(nodes)}
    last: dict[str, int] = {}
    for node in nodes[0].graph.nodes if nodes else ():
        last[node.name] = max((index.get(user, len(nodes)) for user in node.users), default=-1)
    return last


def _crossings(nodes: list[fx.Node], values: dict[str, NodeTensorSpec]) -> tuple[list[int], list[bool]]:
    """For each position, the bytes that cross, and whether all crossing values are plain tensors."""
    last = _last_uses(nodes)
    size = len(nodes) + 1
    # Differences per position, summed up below: a walk over all pairs would be quadratic in the nodes.
    change, blocked = [0] * (size + 1), [0] * (size + 1)
    for position, node in enumerate(nodes):
        end = last[node.name]
        if end <= position:
            continue
        # A result without a tensor of its own, such as a tuple, cannot be stored between shards and blocks the cut.
        value = values.get(node.name)
        into = blocked if value is None else change
        into[position + 1] += 1 if value is None else value.storage_bytes
        into[min(end, len(nodes)) + 1] -= 1 if value is None else value.storage_bytes
    crossing, plain, total, bad = [], [], 0, 0
    for position in range(size):
        total, bad = total + change[position], bad + blocked[position]
        crossing.append(total)
        plain.append(bad == 0)
    return crossing, plain


def _overwrite_hazards(
    captured: CapturedStepGraph, values: dict[str, NodeTensorSpec], writes: list[tuple[int, str]]
) -> set[int]:
    """Positions where a cut would separate a value from its overwriter to the harm of another use.

    A value that crosses a cut reaches the later shard as a separate tensor. If the later shard overwrites the value, no
    other crossing value may share the storage, because the other value would not see the change, and no node may read
    the value after the overwrite. A storage of an input of the graph must not be overwritten while a view of it crosses.

    Example: in `y = x.view(-1); x.add_(1); z = x + y`, no cut lies between the first two nodes, because `x` and `y` would
    cross as two tensors, and `y` would miss the addition.
    """
    nodes = captured.nodes
    last = _last_uses(nodes)
    index = {node.name: position for position, node in enumerate(nodes)}
    outside = {values[name].storage for name in (*captured.state, *captured.constants, *captured.inputs)}
    sharing: dict[int, list[str]] = defaultdict(list)
    for name, value in values.items():
        sharing[value.storage].append(name)
    forbidden: set[int] = set()
    for position, name in writes:
        if name not in values:
            continue
        shared = values[name].storage
        family = [n for n in sharing[shared] if n in index]
        external = shared in outside
        for cut in range(1, position + 1):
            # Values on the storage that are made before the cut and used behind it.
            alive = [n for n in family if index[n] < cut <= last[n]]
            stale = any(last[n] > position for n in alive)
            if len(alive) > 1 or (alive and (stale or external)):
                forbidden.add(cut)
    return forbidden


def _layer(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    # The step's wrapper holds the model as `model`, a name that means nothing to the user.
    return paths[-1].removeprefix("model").removeprefix(".") if paths else ""


def _class(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    kinds = [kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}" for _, kind in stack.values()]
    return kinds[-1] if kinds else ""
