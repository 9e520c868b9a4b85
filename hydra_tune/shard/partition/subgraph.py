"""The splitter: makes a separate graph of a contiguous range of a captured graph.

The inputs of a shard are all values used but not made by the shard: state, constants, batch tensors, and values of earlier
shards. The outputs are the values used by later shards or by the step's result. `build_plan` (`plan.py`) cuts the shards of
a plan with `cut_shard`, and the pilot (`shard/cost/pilot.py`) cuts each candidate shard that the pilot measures.
`fusion/batching/subgraph.py` cuts the graphs of groups with `copy_nodes`, and `fusion/compile/torch_compile.py` compiles such
graphs with `compiled`. `shard/execute/eager_plan.py` makes the `ShardGraph` of a step in the user's own code, and
`fusion/compile/batched_plan.py` adapts shards to groups. `ShardChain` (`shard/execute/chain.py`) runs the shards; this module
must run no unit.

Note: bits. A shard's nodes are copies in the captured order, so its operators run as in the captured graph. Nothing here
may merge, reorder or replace operators; only a compiler, where the task asks for one, may do so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from hydra_tune.shard.analysis.graph_analysis import GraphAnalysis
from hydra_tune.shard.capture.graph_device import placed
from hydra_tune.shard.capture.own_functions import opaque_calls
from hydra_tune.shard.capture.precision import under_autocast
from hydra_tune.shard.capture.step_capture import CapturedStepGraph
from hydra_tune.task import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGraph:
    """A shard of a captured step.

    `module(*state, *constants, *inputs, *live_in)` returns a tuple of the tensors named by `live_out`.

    Attributes:
        first, last: position of the first node, and position after the last node.
        state: canonical names of the parameters and buffers used, in argument order.
        constants: placeholder names of the constants used.
        inputs: indices of the batch tensors used.
        live_in: names of the values from earlier shards.
        live_out: names of the values made here that later shards or the step's results need.
        cloned: names in `live_in` that are overwritten in place here, so that the shard must work on a copy.
        written_state: canonical names of the buffers overwritten by the shard.
        saved_state: canonical names of the buffers used here and overwritten by this shard or a later shard; a
            recompute needs their old values.
        stochastic: whether the shard draws random numbers.
        counted_draws: whether a stochastic shard moves the generator by the same distance at each run.
        reads_state: whether an operator reads Python state as it runs (the user's own `torch.autograd.Function`).
        code: the graph run by `module`; None for a compiled graph or the user's own code.
        precision: precision in which `module` runs `code`.
    """

    module: Callable[..., tuple[Tensor, ...]]
    first: int
    last: int
    state: tuple[str, ...]
    constants: tuple[str, ...]
    inputs: tuple[int, ...]
    live_in: tuple[str, ...]
    live_out: tuple[str, ...]
    cloned: frozenset[str]
    written_state: tuple[str, ...]
    saved_state: tuple[str, ...]
    stochastic: bool
    counted_draws: bool = False
    reads_state: bool = False
    code: fx.GraphModule | None = None
    precision: Precision = "float32"


def cut_shard(
    captured: CapturedStepGraph, analysis: GraphAnalysis, first: int, last: int, backend: str | None = None
) -> ShardGraph:
    """Make the shard of the nodes from position `first` up to, not including, `last`.

    `backend` is a backend of `torch.compile`, which compiles the shard at its first run; None runs node by node.
    """
    nodes = captured.nodes[first:last]
    inside = set(nodes)
    used = _outside_arguments(captured, nodes, inside)
    state = tuple(dict.fromkeys(captured.state[n.name] for n in used if n.name in captured.state))
    constants = tuple(n.name for n in used if n.name in captured.constants)
    inputs = tuple(n for n in used if n.name in captured.inputs)
    external = (*captured.state, *captured.constants, *captured.inputs)
    live_in = tuple(n for n in used if n.op != "get_attr" and n.name not in external)
    live_out = _live_out(captured, nodes, inside)

    stochastic = any(first <= position < last for position in analysis.stochastic)
    graph = _copied(captured, used, (state, constants, (*inputs, *live_in)), nodes, live_out)
    overwritten = {name for position in range(first, last) for name in analysis.written_values.get(position, ())}
    from_here = {name for position, names in analysis.written_values.items() if position >= first for name in names}
    attributes = {str(n.target): getattr(captured.module, str(n.target)) for n in used if n.op == "get_attr"}
    module = fx.GraphModule(attributes, graph, class_name=f"Shard_{first}_{last}")
    written_state = tuple(
        dict.fromkeys(name for placeholder, name in captured.state.items() if placeholder in overwritten)
    )
    if backend is None:
        run = placed(module)
    else:
        written = [state.index(name) for name in written_state]
        run = placed(module, lambda placed_graph: compiled(placed_graph, backend, written))
    return ShardGraph(
        module=under_autocast(run, captured.precision),
        first=first,
        last=last,
        state=state,
        constants=constants,
        inputs=tuple(captured.inputs[n.name] for n in inputs),
        live_in=tuple(n.name for n in live_in),
        live_out=tuple(n.name for n in live_out),
        cloned=frozenset(n.name for n in live_in if n.name in overwritten),
        written_state=written_state,
        saved_state=tuple(
            dict.fromkeys(captured.state[n.name] for n in used if n.name in captured.state and n.name in from_here)
        ),
        stochastic=stochastic,
        # A compiler may replace the operators, so their draws are no longer known.
        counted_draws=stochastic and backend is None and analysis.draws.are_counted(nodes),
        reads_state=any(call.reads_state for call in opaque_calls(module)),
        code=module if backend is None else None,
        precision=captured.precision,
    )


def _copied(
    captured: CapturedStepGraph,
    used: Sequence[fx.Node],
    arguments: tuple[Sequence[str], Sequence[str], Sequence[fx.Node]],
    nodes: Sequence[fx.Node],
    live_out: Sequence[fx.Node],
) -> fx.Graph:
    """Copy nodes of a step into a graph of their own.

    `used` has the nodes outside on which `nodes` depend, `arguments` state, constants and values among `used`, in the
    order of the arguments of `ShardGraph.module`, and `live_out` the nodes whose values the graph returns.
    """
    state, constants, values = arguments
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    # Placeholders by canonical name: tied placeholders of the captured graph become a single argument.
    by_name = {name: graph.placeholder(f"state_{i}") for i, name in enumerate(state)}
    copies |= {n: by_name[captured.state[n.name]] for n in used if n.name in captured.state}
    by_constant = {name: graph.placeholder(name) for name in constants}
    copies |= {n: by_constant[n.name] for n in used if n.name in captured.constants}
    # The graph of a region (`no_grad`, autocast) is an attribute of the module, not an argument.
    copy_nodes(graph, copies, values, [node for node in used if node.op == "get_attr"], nodes, live_out)
    return graph


def copy_nodes(
    graph: fx.Graph,
    copies: dict[fx.Node, fx.Node],
    begins: Sequence[fx.Node],
    attributes: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    ends: Sequence[fx.Node],
) -> None:
    """Copy nodes into another graph, with an argument for each of `begins` and the values of `ends` as outputs.

    `copies` has the copies of further arguments of the nodes, and gets those of all other nodes.
    """
    for node in begins:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in attributes:
        copies[node] = graph.node_copy(node)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in ends))


def compiled(module: fx.GraphModule, backend: str, written: Sequence[int]) -> Callable[..., tuple[Tensor, ...]]:
    """Return a graph compiled at its first run.

    A shard's buffers lie side by side in a single block, and a compiler cannot tell that overwriting a buffer leaves the
    other buffers alone. Buffers at the positions `written` are therefore overwritten in separate copies.
    """
    # By default Inductor uses its own random generator; torch's generator can be rewound by a recompute.
    options: dict[str, str | int | bool | Callable[..., Any]] | None = None
    if backend == "inductor":
        options = {"fallback_random": True}
    # Not dynamic, because a plan serves a single kind of batch.
    compiled_graph: Callable[..., tuple[Tensor, ...]] = torch.compile(
        module, backend=backend, dynamic=False, options=options
    )

    def run(*arguments: Tensor) -> tuple[Tensor, ...]:
        """Run the compiled graph on copies of the overwritten buffers, and copy the results back."""
        copied_arguments = list(arguments)
        for position in written:
            copied_arguments[position] = arguments[position].clone()
        results = compiled_graph(*copied_arguments)
        with torch.no_grad():
            for position in written:
                arguments[position].copy_(copied_arguments[position])
        return results

    return run if written else compiled_graph


def _outside_arguments(captured: CapturedStepGraph, nodes: Sequence[fx.Node], inside: set[fx.Node]) -> list[fx.Node]:
    """Nodes used by the range and made outside the range, in graph order."""
    used = {argument for node in nodes for argument in node.all_input_nodes if argument not in inside}
    return [node for node in captured.module.graph.nodes if node in used]


def _live_out(captured: CapturedStepGraph, nodes: Sequence[fx.Node], inside: set[fx.Node]) -> tuple[fx.Node, ...]:
    outputs = set(captured.outputs)
    return tuple(
        node for node in nodes if node.name in outputs or any(u not in inside and u.op != "output" for u in node.users)
    )
