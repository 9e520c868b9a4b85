"""Checks a step of a few samples in place of a step of many samples that would take the host too long.

If a pool has no CPU device, `PlanLibrary` (`shard/partition/plan_cache.py`) checks a new plan with a sample where the check by
numbers (`value_numbering.py`) fails, and with the whole batch where there is no sample or the check with the sample fails.
Pools with a CPU device never use a sample. The module runs no unit.

Note: why a sample is enough. A plan is checked against the eager step because a capture bakes in the actions of Python,
and baked-in actions show in the graph. The step is therefore captured once more, with the first two samples of the
batch. Suppose both graphs call the same operators, in the same order, on the same values, with the same numbers, and
with sizes that are equal or in the ratio of the batches. Then Python took the same path both times, and a check of the
small graph holds for the large graph: the arithmetic is the same, for more samples. If anything else differs, the large
step itself is checked.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from hydra_tune.shard.analysis.graph_analysis import GraphAnalysis
from hydra_tune.shard.capture.batch import BatchLeaves, flatten, same_values
from hydra_tune.shard.capture.step_capture import CapturedStepGraph
from hydra_tune.shard.cost.pilot import ShardPilot
from hydra_tune.shard.partition.plan import ShardPlan, build_plan
from hydra_tune.shard.verify.step_outcome import UnitSeconds

_COUNT = 2  # samples; BatchNorm refuses a single sample, and a dimension of 1 takes other operators


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledStep:
    """A plan's step for a few samples.

    Attributes:
        plan: plan with the cuts of the whole batch's plan, recomputing its activations.
        kept: the same plan, with activations kept as in the whole batch's plan; `plan` if that plan keeps none.
        size: samples in the whole batch.
    """

    batch: Any
    plan: ShardPlan
    kept: ShardPlan
    size: int

    def for_all(self, seconds: UnitSeconds) -> UnitSeconds:
        """Scale the seconds of the few samples to the units of the whole batch."""
        factor = self.size / _COUNT
        return UnitSeconds(
            forward=tuple(value * factor for value in seconds.forward),
            backward=tuple(value * factor for value in seconds.backward),
        )


def sample_of(
    captured: CapturedStepGraph,
    plan: ShardPlan,
    kept: ShardPlan,
    leaves: BatchLeaves,
    capture_again: Callable[[Any], CapturedStepGraph],
    measure: Callable[[CapturedStepGraph, tuple[Tensor, ...]], tuple[GraphAnalysis, ShardPilot]],
) -> SampledStep | None:
    """Make the step for the first samples of the batch that `captured` was captured with.

    `kept` is `plan` with activations kept, or `plan` itself. `capture_again` captures the step of another batch.

    Returns:
        The sample; None if the two graphs are not shown to be the same step with the same cuts, or if the batch is too small
        or has tensors of several lengths.
    """
    batch = _first_samples(leaves)
    if batch is None:
        return None
    size = leaves.tensors[0].shape[0]
    small = capture_again(batch)
    if not _is_one_step(captured, small, size):
        return None
    analysis, pilot = measure(small, flatten(batch).tensors)
    if not set(plan.cuts) <= set(analysis.cuts):
        return None
    small_plan = build_plan(small, analysis, pilot, [0, *plan.cuts, len(small.nodes)])
    small_kept = small_plan if kept is plan else _keeping_like(kept, small_plan, pilot)
    return None if small_kept is None else SampledStep(batch=batch, plan=small_plan, kept=small_kept, size=size)


def _first_samples(leaves: BatchLeaves) -> Any | None:
    sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in leaves.tensors}
    if len(sizes) != 1 or min(sizes) < 2 * _COUNT:
        return None  # not every tensor seems to have an entry per sample, or little would be saved
    return leaves.rebuild(tuple(tensor[:_COUNT].clone() for tensor in leaves.tensors))


def _keeping_like(kept: ShardPlan, plan: ShardPlan, pilot: ShardPilot) -> ShardPlan | None:
    shards = []
    for large_shard, shard in zip(kept.shards, plan.shards, strict=True):
        if large_shard.keeps_activations:
            cost = pilot.cost_keeping(shard.graph.first, shard.graph.last)
            if cost is None:
                return None
            shards.append(replace(shard, cost=cost, activations=large_shard.activations))
        else:
            shards.append(shard)
    return replace(plan, shards=tuple(shards))


class _SampleGraphComparison:
    """Walks through two graphs side by side: the first captured with `size` samples, the second with a few."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._numbers: dict[fx.Node, int] = {}

    def is_same(self, large: fx.Graph, small: fx.Graph) -> bool:
        """Whether the two graphs do the same, node by node."""
        large_nodes, small_nodes = list(large.nodes), list(small.nodes)
        if len(large_nodes) != len(small_nodes):
            return False
        for number, (large_node, small_node) in enumerate(zip(large_nodes, small_nodes, strict=True)):
            self._numbers[large_node] = self._numbers[small_node] = number
            # An attribute is the graph of a region, which is not compared; such a step is checked as a whole.
            if large_node.op == "get_attr" or large_node.op != small_node.op or large_node.target != small_node.target:
                return False
            if not self._is_alike((large_node.args, large_node.kwargs), (small_node.args, small_node.kwargs)):
                return False
        return True

    def _is_alike(self, one: Any, other: Any) -> bool:
        """Whether the arguments of two nodes are the same but for sizes."""
        (leaves, tree), (other_leaves, other_tree) = pytree.tree_flatten(one), pytree.tree_flatten(other)
        return tree == other_tree and all(map(self._is_same_argument, leaves, other_leaves))

    def _is_same_argument(self, one: Any, other: Any) -> bool:
        if type(one) is not type(other):
            return False
        if isinstance(one, fx.Node):
            # By position, because the two graphs have nodes of their own.
            return self._numbers[one] == self._numbers[other]
        if isinstance(one, float):
            # By `hex`, so that 0.0 and -0.0 differ and NaN equals NaN.
            return bool(one.hex() == other.hex())
        # Python's bool is an int, but True and False are no sizes.
        is_size = isinstance(one, int) and not isinstance(one, bool)
        return bool(one == other) or (is_size and one * _COUNT == other * self._size)


def _is_one_step(large: CapturedStepGraph, small: CapturedStepGraph, size: int) -> bool:
    constants = large.constants, small.constants
    return (
        (large.state, large.inputs, large.outputs, large.names)
        == (small.state, small.inputs, small.outputs, small.names)
        and constants[0].keys() == constants[1].keys()
        and all(same_values(tensor, constants[1][name]) for name, tensor in constants[0].items())
        and _SampleGraphComparison(size).is_same(large.module.graph, small.module.graph)
    )
