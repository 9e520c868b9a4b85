"""Decide whether the samples of a batch are independent, so that a smaller batch can be padded to a larger batch.

The check compares two captured graphs of the same step, for batches of b and of B samples. The graphs must be equal except
for sizes; a dimension of a node's value that scales as B to b holds the samples. Node by node, the check proves that the
first b of B samples produce what the smaller batch produces, up to rounding: every operator that receives samples must be
known to compute each sample separately. The chain ends at a loss that reduces over samples, and the loss is then told how
many samples count (`masked_loss.py`). `GroupPlanCache` (`fusion/compile/group_plan_cache.py`) asks for a pair of plans
whose batches members of a group want at the same time, and remembers the answers for a while. The module must not know
groups.

Note: an operator that receives samples and that no rule knows is refused. A wrong acceptance would change losses and
gradients silently.

Note: why the padding may hold any finite value. No value of the first b samples depends on the padding, and nothing
computed from the padding reaches a loss; its gradients are zeros times finite numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.ragged.masked_loss import MaskedReduction
from hydra_tune.fusion.ragged.sample_rules import LOSSES, ROW_MAJOR, keeps_samples_apart, outer_of
from hydra_tune.shard.analysis.random_ops import draws_random_numbers, named_arguments
from hydra_tune.shard.capture.step_capture import StateSpec
from hydra_tune.shard.partition.plan import ShardPlan

aten: Any = torch.ops.aten

_SIZES = {
    # Operators with a size argument that may name the batch size, and the name of the argument.
    aten.view.default: "size",
    aten.reshape.default: "shape",
    aten.expand.default: "size",
    aten.unflatten.int: "sizes",
    aten.zeros.default: "size",
    aten.ones.default: "size",
    aten.full.default: "size",
    aten.new_zeros.default: "size",
    aten.new_ones.default: "size",
}


@dataclass(frozen=True, slots=True)
class PlanBatchSpec:
    """A plan with the batch that it serves.

    Attributes:
        inputs: tensors of the batch; only the geometry counts.
    """

    plan: ShardPlan
    state: Mapping[str, StateSpec]
    inputs: Sequence[Tensor]
    samples: int

    def nodes(self) -> list[fx.Node]:
        """Return copies of the graph's nodes, with the geometry of every argument attached."""
        (shard,) = self.plan.shards
        graph = shard.graph
        assert graph.code is not None, "a compiled shard has no nodes"
        argument_values = [
            torch.empty(tuple(s.shape), dtype=s.dtype, device="meta") for s in map(self.state.__getitem__, graph.state)
        ]
        argument_values += [self.plan.constants[name] for name in graph.constants]
        argument_values += [self.inputs[index] for index in graph.inputs]
        arguments = iter(argument_values)
        copies: dict[fx.Node, fx.Node] = {}
        copied_graph = fx.Graph()
        for node in graph.code.graph.nodes:
            copies[node] = copied_graph.node_copy(node, copies.__getitem__)
            if node.op == "placeholder":
                copies[node].meta["val"] = next(arguments)
        return list(copies.values())


def counted_losses(one: PlanBatchSpec, other: PlanBatchSpec) -> dict[str, MaskedReduction]:
    """Return the reductions over samples in `other`, the plan of the larger batch, by node name.

    Raises:
        UnfusableError: the smaller batch cannot be computed as part of the larger batch; the message gives the reason.
    """
    small, large = one.plan, other.plan
    if small.eager or large.eager or len(small.shards) > 1 or len(large.shards) > 1:
        raise UnfusableError("its step is cut into shards, or runs whole")
    a, b = small.shards[0].graph, large.shards[0].graph
    # The padded graph takes the whole batch, and behind it the counts (`_stacked_shard`).
    if {*a.inputs} != {*range(len(one.inputs))} or len(one.inputs) != len(other.inputs):
        raise UnfusableError("its step does not use all tensors of the batch")
    names = ("state", "constants", "inputs", "live_in", "live_out")
    if any(getattr(a, name) != getattr(b, name) for name in names) or small.outputs != large.outputs:
        raise UnfusableError("its graphs for the two batch sizes use different tensors")
    constants = [(small.constants[name], large.constants[name]) for name in a.constants]
    if not all(x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y) for x, y in constants):
        raise UnfusableError("its graphs for the two batch sizes hold different constants")
    if a.code is None or b.code is None or not a.inputs or a.live_in:
        raise UnfusableError("its step has no graph of the batch")
    first_input = len(a.state) + len(a.constants)
    walk = _SampleWalk((one.samples, other.samples), range(first_input, first_input + len(a.inputs)))
    walk.go(one.nodes(), other.nodes())
    if not walk.counted:
        raise UnfusableError("none of its results is a loss over the samples")
    # A buffer such as a running mean would absorb the padding.
    if b.written_state or a.written_state:
        raise UnfusableError(f"its step overwrites {(*b.written_state, *a.written_state)[0]!r}")
    return walk.counted


class _SampleWalk:
    """Walks both graphs node by node, side by side."""

    def __init__(self, samples: tuple[int, int], inputs: range) -> None:
        self.counted: dict[str, MaskedReduction] = {}
        self._samples = samples
        self._inputs = inputs
        self._outer: dict[fx.Node, int] = {}  # number of consecutive sets of all samples in the dimension
        self._dims: dict[fx.Node, Any] = {}  # for nodes of the large graph; None: no samples

    def go(self, own: Sequence[fx.Node], other: Sequence[fx.Node]) -> None:
        """Walk all nodes of the smaller batch's graph and of the larger batch's graph."""
        if len(own) != len(other):
            raise UnfusableError("its graphs for the two batch sizes have different numbers of operators")
        numbers = {node: number for nodes in (own, other) for number, node in enumerate(nodes)}
        for number, (a, b) in enumerate(zip(own, other, strict=True)):
            if a.op != b.op or a.name != b.name or (a.op == "call_function" and a.target != b.target):
                raise UnfusableError(f"its graphs differ in {b.name}")
            if b.op == "placeholder":
                self._dims[b] = self._argument(number, a, b)
            elif b.op == "output":
                if any(self._dims[leaf] is not None for leaf in b.all_input_nodes):
                    raise UnfusableError("it returns values of single samples")
            elif b.target is aten._assert_tensor_metadata.default:  # noqa: SLF001 - true for every batch of the kind
                self._dims[b] = None
            elif b.op == "call_function":
                self._check_arguments(a, b, numbers)
                self._dims[b] = self._made(a, b)
            else:
                raise UnfusableError("its graph has a region with a grad mode of its own (torch.no_grad())")

    def dim(self, node: Any) -> Any:
        """Return the dimension of a node's value that holds the samples; None: no samples."""
        return self._dims[node] if isinstance(node, fx.Node) else None

    def _argument(self, number: int, a: fx.Node, b: fx.Node) -> int | None:
        dim = self._scaled(a.meta.get("val"), b.meta.get("val"), b)
        if dim is None:
            value = b.meta["val"]
            # `StackedBatches` recognizes samples by the size of the
            # first dimension, and would pad such a tensor as well.
            if number in self._inputs and value.dim() and value.shape[0] == self._samples[0]:
                raise UnfusableError(
                    "its batch has a tensor that is as long as the smaller batch and does not hold samples"
                )
            return None
        sizes = (a.meta["val"].shape[dim], b.meta["val"].shape[dim])
        if number not in self._inputs or dim != 0 or sizes != self._samples:
            raise UnfusableError("its batches have tensors whose first dimension is not the samples")
        return 0

    def _check_arguments(self, a: fx.Node, b: fx.Node, numbers: Mapping[fx.Node, int]) -> None:
        # Nodes print as positions, so equal text means equal arguments.
        place: Any = lambda leaf: _NodePosition(numbers[leaf])  # noqa: E731
        keys: list[Any]
        if not isinstance(b.target, OpOverload):
            keys = [fx.node.map_arg((n.args, n.kwargs), place) for n in (a, b)]
            are_equal = repr(keys[0]) == repr(keys[1])
        else:
            small_named, large_named = named_arguments(a), named_arguments(b)
            name = _SIZES.get(b.target, "")
            are_equal = _are_sizes(small_named.pop(name, ()), large_named.pop(name, ()), self._samples)
            keys = [fx.node.map_arg(named, place) for named in (small_named, large_named)]
            are_equal = are_equal and repr(keys[0]) == repr(keys[1])
        if not are_equal:
            raise UnfusableError(f"{b.target} has other arguments for other batch sizes ({b.name})")

    def _made(self, a: fx.Node, b: fx.Node) -> Any:
        """Return the sample dimension of a node's result, proved both by sizes and by the operator's rule."""
        if isinstance(b.target, OpOverload) and draws_random_numbers(b):
            raise UnfusableError(f"{b.target} draws random numbers for all samples of a batch ({b.name})")
        small, large = a.meta.get("val"), b.meta.get("val")
        if isinstance(large, tuple | list):
            by_size: Any = [self._scaled(one, other, b) for one, other in zip(small or (), large, strict=True)]
        else:
            by_size = self._scaled(small, large, b)
        sample_inputs = [node for node in b.all_input_nodes if _any(self._dims[node])]
        if not sample_inputs and not _any(by_size):
            return by_size
        target = b.target
        if isinstance(target, OpOverload):
            loss = LOSSES.get(target)
            is_plain = by_size is None and all(self._outer.get(one, 1) == 1 for one in sample_inputs)
            reduced = loss(self.dim, b) if loss is not None and is_plain else None
            if reduced is not None:
                dim, reduction, keywords = reduced
                rows = b.all_input_nodes[0].meta["val"].shape[dim]
                self.counted[b.name] = MaskedReduction(target, dim, rows, rows // self._samples[1], reduction, keywords)
            elif not self._keeps_apart(b, sample_inputs, by_size):
                raise _refused(b)
            return by_size
        if getattr(target, "__name__", "") != "getitem" or self.dim(b.args[0])[b.args[1]] != by_size:
            raise _refused(b)
        return by_size

    def _keeps_apart(self, node: fx.Node, given: Sequence[fx.Node], made: Any) -> bool:
        outer_before = [self._outer.get(argument, 1) for argument in given]
        if node.target in ROW_MAJOR and len(given) == 1:
            outer = outer_of(node, self._dims[given[0]], made, outer_before[0], self._samples[1])
            if outer is None:
                return False
            self._outer[node] = outer
            return True
        # The other rules expect a single set of samples in a dimension. A linear layer maps every position by itself,
        # however many sets there are.
        if any(outer > 1 for outer in outer_before):
            if node.target is not aten.linear.default:
                return False
            self._outer[node] = outer_before[0]
        return keeps_samples_apart(self.dim, node, made)

    def _scaled(self, small: Any, large: Any, node: fx.Node) -> int | None:
        """Return the dimension that scales with the number of samples; None: all sizes are equal."""
        if not isinstance(small, Tensor) or not isinstance(large, Tensor):
            if small is None and large is None and node.op == "call_function":
                return None
            raise UnfusableError(f"{node.name} is no tensor")
        a, b = tuple(small.shape), tuple(large.shape)
        if small.dtype != large.dtype or len(a) != len(b):
            raise UnfusableError(f"its graphs differ in {node.name}")
        dims = [dim for dim, (small_size, large_size) in enumerate(zip(a, b, strict=True)) if small_size != large_size]
        if not dims:
            return None
        if (
            len(dims) > 1
            or a[dims[0]] * self._samples[1] != b[dims[0]] * self._samples[0]
            or b[dims[0]] % self._samples[1]
        ):
            raise UnfusableError(f"{node.name} has different numbers of values for each sample")
        return dims[0]


class _NodePosition:
    def __init__(self, number: int) -> None:
        self._number = number

    def __repr__(self) -> str:
        return f"%{self._number}"


def _any(dims: Any) -> bool:
    return any(dim is not None for dim in dims) if isinstance(dims, list) else dims is not None


def _are_sizes(a: Sequence[Any], b: Sequence[Any], samples: tuple[int, int]) -> bool:
    if len(a) != len(b) or not all(isinstance(size, int) for size in (*a, *b)):
        return False
    return all(
        small_size == large_size or small_size * samples[1] == large_size * samples[0]
        for small_size, large_size in zip(a, b, strict=True)
    )


def _refused(node: fx.Node) -> UnfusableError:
    if "batch_norm" in str(node.target):
        return UnfusableError("batch normalization looks at all samples of a batch")
    return UnfusableError(f"{node.target} may look at several samples of a batch ({node.name})")
