"""Finds candidate shards that are alike: equal but for names and positions, so that the pilot runs only one of them.

The layers of a deep model are alike, and so are candidates with the same start and end within different layers. A key
holds everything that decides a unit's bytes: operators and constants in order, the users of each value, the geometry of
values from outside, common storages among such values, gradients, overwrites, and uses by later shards. `ShardPilot`
(`shard/cost/pilot.py`) looks up the key of each candidate before running the candidate. A new property that decides bytes
must enter the key, or a candidate gets the bytes of another. The module must run no operator.
"""

import operator
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from hydra_tune.shard.analysis.graph_analysis import GraphAnalysis
from hydra_tune.shard.capture.opaque_call import OpaqueCall
from hydra_tune.shard.capture.step_capture import CapturedStepGraph

_UNKNOWN = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSignature:
    """Properties of a candidate before the cut.

    Attributes:
        key: equal for candidates that are alike; None if the likeness is unknown.
        state: canonical names of the parameters and buffers used, in argument order.
    """

    key: Hashable
    state: tuple[str, ...]


class ShardSignatureBuilder:
    """Finds candidates of a single captured step that are alike.

    Args:
        given: constants, batch tensors and state by placeholder, as fake tensors.
    """

    def __init__(self, captured: CapturedStepGraph, analysis: GraphAnalysis, given: Mapping[str, Tensor]) -> None:
        self._captured = captured
        self._analysis = analysis
        self._given = given
        self._nodes = captured.nodes
        self._index = {node: position for position, node in enumerate(self._nodes)}
        self._order = {node: number for number, node in enumerate(captured.module.graph.nodes)}
        self._results = frozenset(captured.outputs)
        self._last_use = {
            node: max((self._index.get(user, -1) for user in node.users), default=-1) for node in self._order
        }
        self._state_use: dict[str, int] = {}
        for node, last in self._last_use.items():
            name = captured.state.get(node.name)
            if name is not None:
                self._state_use[name] = max(last, self._state_use.get(name, -1))
        self._last_write: dict[str, int] = {}
        for position, names in analysis.written_values.items():
            for name in (captured.state[n] for n in names if n in captured.state):
                self._last_write[name] = max(position, self._last_write.get(name, -1))
        self._tokens = [self._token(node) for node in self._nodes]

    def of(self, first: int, last: int) -> ShardSignature:
        """Likeness of the nodes `first` up to, not including, `last`."""
        table = _ExternalValueTable(self, first, last)
        body = tuple(
            (self._tokens[position], *(table.reference(argument) for argument in self._nodes[position].all_input_nodes))
            for position in range(first, last)
        )
        is_known = all(self._tokens[position] is not _UNKNOWN for position in range(first, last)) and table.is_known
        ends = tuple(
            (position - first, node.name in self._results, self._has_gradient(node))
            for position, node in enumerate(self._nodes[first:last], first)
            if node.name in self._results or self._last_use[node] >= last
        )
        # In the order of the graph, as the arguments of a shard (`cut_shard`).
        placeholders = sorted((n for n in table.numbers if n.name in self._captured.state), key=self._order.__getitem__)
        return ShardSignature(
            # The end of the graph belongs to the key: the last shard of a training step has no forward unit.
            key=(last == len(self._nodes), body, tuple(table.descriptions), ends) if is_known else None,
            state=tuple(dict.fromkeys(self._captured.state[node.name] for node in placeholders)),
        )

    def _token(self, node: fx.Node) -> object:
        """Operator with its plain arguments; `_UNKNOWN` for an operator that cannot be compared."""
        is_operator = isinstance(node.target, torch._ops.OpOverload | OpaqueCall)  # noqa: SLF001
        is_plain = is_operator or node.target is operator.getitem
        if node.op != "call_function" or not is_plain:
            return _UNKNOWN
        try:
            token = (node.target, _plain((node.args, node.kwargs)))
            hash(token)
        except TypeError:
            return _UNKNOWN
        return token

    def _has_gradient(self, node: fx.Node) -> bool:
        value = self._analysis.values.get(node.name)
        return value is not None and value.requires_grad

    def describe(self, node: fx.Node, first: int, last: int, storages: dict[object, int]) -> Hashable | None:
        """Description of a value from outside; None if the value is not a plain tensor."""
        captured, name = self._captured, node.name
        if name in captured.state:
            canonical_name = captured.state[name]
            # By canonical name, because tied placeholders are a single tensor.
            number = storages.setdefault(("state", canonical_name), len(storages))
            # A buffer overwritten here or later is saved for a recompute (`ShardGraph.saved_state`), at the cost of a
            # copy.
            is_saved = self._last_write.get(canonical_name, -1) >= first
            fake = self._given[name]
            # A parameter used by later shards enters the backward with a gradient.
            is_used_later = self._state_use[canonical_name] >= last
            return ("state", number, _geometry(fake), fake.requires_grad, is_saved, is_used_later)
        if name in captured.constants or name in captured.inputs:
            fake = self._given[name]
            storage = fake.untyped_storage()
            number = storages.setdefault(storage._cdata, len(storages))  # noqa: SLF001 - the storage's identity
            return ("given", number, _geometry(fake), storage.nbytes())
        value = self._analysis.values.get(name)
        if value is None or not isinstance(node.meta.get("val"), Tensor):
            return None
        number = storages.setdefault(("value", value.storage), len(storages))
        is_used_later = self._last_use[node] >= last
        return ("value", number, _geometry(node.meta["val"]), value.storage_bytes, value.requires_grad, is_used_later)

    def position(self, node: fx.Node) -> int | None:
        """Position of a computing node."""
        return self._index.get(node)


@dataclass(slots=True)
class _ExternalValueTable:
    """Values from outside used by a candidate so far, numbered in the order of first use."""

    likenesses: ShardSignatureBuilder
    first: int
    last: int
    numbers: dict[fx.Node, int] = field(default_factory=dict)
    descriptions: list[Hashable] = field(default_factory=list)
    storages: dict[object, int] = field(default_factory=dict)
    is_known: bool = True

    def reference(self, node: fx.Node) -> int:
        """Number of an argument: from 0 within the candidate, below 0 outside."""
        position = self.likenesses.position(node)
        if position is not None and position >= self.first:
            return position - self.first
        if node not in self.numbers:
            self.numbers[node] = -len(self.numbers) - 1
            description = self.likenesses.describe(node, self.first, self.last, self.storages)
            self.is_known &= description is not None
            self.descriptions.append(description)
        return self.numbers[node]


def _geometry(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype


def _plain(value: Any) -> Hashable:
    """Arguments with nodes left out, but with repeated nodes numbered.

    `all_input_nodes` lists each node once, in the same order, so the numbers tell which arguments are the same node.
    """
    numbers: dict[fx.Node, int] = {}

    def walk(item: Any) -> Hashable:
        """Return an argument as a hashable value, with its nodes as numbers."""
        if isinstance(item, fx.Node):
            return ("node", numbers.setdefault(item, len(numbers)))
        if isinstance(item, list | tuple):
            return (type(item).__name__, *(walk(part) for part in item))
        if isinstance(item, dict):
            return ("dict", *((key, walk(part)) for key, part in item.items()))
        if isinstance(item, slice):
            return ("slice", walk(item.start), walk(item.stop), walk(item.step))
        # With the class, because 1, 1.0 and True are equal. By `repr`, so that 0.0 and -0.0 differ and NaN equals NaN.
        return (type(item).__name__, repr(item) if isinstance(item, float) else item)

    return walk(value)
