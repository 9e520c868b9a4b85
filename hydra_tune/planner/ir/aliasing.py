"""Storages that the nodes of a graph make, read and overwrite, found by a run on tensors without bytes.

The planner keeps, swaps and recomputes whole storages, so every pass has to know which tensors share memory. A run on
fake tensors shows aliasing that operator schemas do not declare. `planner/trace/step_graph.py` runs graphs here while a
step is traced, and `planner/profile/output_layouts.py` again where a device lays results out otherwise.
`planner/profile/profiler.py` and `planner/passes/graph_rewrite.py` ask which arguments a node overwrites.
`planner/profile/profiling_interpreter.py` compares layouts, and `planner/trace/grad_clip_graph.py` reads `StorageView`. The
module must not know devices, clocks or how a plan is found.

Note: gate. `seen` runs operators under a fake mode, so its caller holds `GATE` (`shard/capture/capture_lock.py`) alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hydra_tune.planner.ir.planner_ops import draw

_RUNNING_STATISTICS = {
    # Operators that overwrite arguments in training, although their schema does not declare the write: positions of the
    # overwritten arguments, and of the training switch.
    "aten::native_batch_norm": ((3, 4), 5),
    "aten::cudnn_batch_norm": ((3, 4), 5),
}


Layout = tuple[tuple[int, ...] | None, ...]
"""Strides of each result of a node, in order; None for a result without tensor.

Strides that place nothing are 0: of dimensions of at most one element, and of empty tensors.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageView:
    """Position of a tensor in its storage.

    Attributes:
        stride: of each dimension, in elements.
        offset: of the first element, in elements.
    """

    storage: str
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class StorageAccessTable:
    """Findings of the run, by node name.

    A storage bears the name of the node that makes the storage, followed by the number of the result where the node has
    several tensors.

    Attributes:
        storages: storages of a node's results.
        makes: new storages among the results; of an input, the input's own storage unless seen before.
        reads: storages of a node's arguments.
        writes: storages of the arguments that a node overwrites.
        sizes: bytes of each storage.
        places: position of a node's result in its storage, where the result is a single tensor.
        layouts: strides of all results of a node.
    """

    storages: dict[str, tuple[str, ...]] = field(default_factory=dict)
    makes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    reads: dict[str, tuple[str, ...]] = field(default_factory=dict)
    writes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    places: dict[str, StorageView] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)


def seen(
    graph: fx.Graph,
    owner: fx.GraphModule,
    arguments: Mapping[str, Tensor],
    drawn: Sequence[Tensor],
    mode: FakeTensorMode,
    layouts: Mapping[str, Layout] | None = None,
) -> StorageAccessTable:
    """Run a graph on tensors without bytes and record the storages of each node.

    Args:
        graph: of operators alone.
        owner: module that holds the graph's constants.
        arguments: by name, made under `mode`.
        drawn: results of the draw nodes, by number.
        mode: for tensors without bytes.
        layouts: strides, by node name, of nodes whose results lie otherwise on the device than the traced operators say.
    """
    table = StorageAccessTable()
    storage_names: dict[int, str] = {}
    values: dict[fx.Node, Any] = {}
    with mode, torch.no_grad():
        for node in graph.nodes:
            if node.op == "output":
                break
            if node.op == "placeholder":
                values[node] = arguments[node.name]
            elif node.op == "get_attr":
                constant = getattr(owner, str(node.target))
                # Where the graph runs; the constant may lie elsewhere now.
                place = next(iter(arguments.values())).device
                values[node] = torch.empty_strided(
                    constant.size(), constant.stride(), dtype=constant.dtype, device=place
                )
            elif node.target is draw:
                values[node] = drawn[node.args[0]]
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
                if layouts and node.name in layouts:
                    values[node] = _laid(values[node], layouts[node.name])
            _note(table, storage_names, node, values)
    return table


def layout_of(value: Any) -> Layout:
    """Return the strides of a node's results, which are a tensor or several."""
    return tuple(_strides(leaf) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(value))


def is_like(layout: Layout, other: Layout) -> bool:
    """Whether the results of two runs of a node lie alike in memory.

    A result that is a tensor in only one of the runs is not compared, because no node uses such a result.
    """
    return all(a is None or b is None or a == b for a, b in zip(layout, other, strict=False))


def _strides(tensor: Tensor) -> tuple[int, ...]:
    # The stride of a dimension of at most one element places nothing, and kernels and fake tensors disagree there.
    pairs = zip(tensor.stride(), tensor.size(), strict=True)
    return tuple(stride if size > 1 and tensor.numel() else 0 for stride, size in pairs)


def _laid(value: Any, layout: Layout) -> Any:
    """Return a node's results, with tensors made anew where their strides differ from a layout."""
    leaves, structure = tree_flatten(value)
    for place, strides in enumerate(layout[: len(leaves)]):
        leaf = leaves[place]
        if isinstance(leaf, Tensor) and strides is not None and _strides(leaf) != strides:
            leaves[place] = torch.empty_strided(leaf.size(), strides, dtype=leaf.dtype, device=leaf.device)
    return tree_unflatten(leaves, structure)


def overwritten(node: fx.Node) -> tuple[list[fx.Node], bool]:
    """Return the arguments that a node overwrites, and whether None in their place leaves them untouched."""
    schema = getattr(node.target, "_schema", None)
    # Python functions such as `operator.getitem` have no schema, and overwrite nothing.
    if schema is None:
        return [], False
    if schema.name in _RUNNING_STATISTICS:
        places, switch = _RUNNING_STATISTICS[schema.name]
        statistics = [node.args[place] for place in places] if node.args[switch] else []
        return [argument for argument in statistics if isinstance(argument, fx.Node)], True
    written_nodes: list[fx.Node] = []
    for place, parameter in enumerate(schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            value = node.args[place] if place < len(node.args) else node.kwargs.get(parameter.name)
            written_nodes.extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, fx.Node))
    return written_nodes, False


def without_statistics(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a node's arguments for a recomputation, with None in place of running statistics.

    The first run has updated the statistics already, and a second update would make them differ from the unplanned
    step.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.name not in _RUNNING_STATISTICS:
        return args
    places, _ = _RUNNING_STATISTICS[schema.name]
    return tuple(None if place in places else value for place, value in enumerate(args))


def _note(found: StorageAccessTable, named: dict[int, str], node: fx.Node, values: dict[fx.Node, Any]) -> None:
    tensors = [leaf for leaf in tree_leaves(values[node]) if isinstance(leaf, Tensor)]
    new_storages: list[str] = []
    storages: list[str] = []
    for number, tensor in enumerate(tensors):
        key = tensor.untyped_storage()._cdata  # noqa: SLF001 - unique as long as all values are alive
        if key not in named:
            named[key] = node.name if len(tensors) == 1 else f"{node.name}.{number}"
            found.sizes[named[key]] = tensor.untyped_storage().nbytes()
            new_storages.append(named[key])
        storages.append(named[key])
    found.layouts[node.name] = layout_of(values[node])
    found.storages[node.name] = tuple(dict.fromkeys(storages))
    found.makes[node.name] = tuple(new_storages)
    read_names = (name for argument in node.all_input_nodes for name in found.storages[argument.name])
    found.reads[node.name] = tuple(dict.fromkeys(read_names))
    written_names = (name for argument in overwritten(node)[0] for name in found.storages[argument.name])
    found.writes[node.name] = tuple(dict.fromkeys(written_names))
    if isinstance(values[node], Tensor):
        result: Tensor = values[node]
        found.places[node.name] = StorageView(
            storage=storages[0],
            dtype=result.dtype,
            size=tuple(result.size()),
            stride=tuple(result.stride()),
            offset=int(result.storage_offset()),
        )
