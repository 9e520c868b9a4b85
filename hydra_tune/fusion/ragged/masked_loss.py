"""Losses over the leading samples of a batch only; the remaining samples are padding and do not count.

`counted_losses` (`sample_independence.py`) makes the reductions when a group meets a second batch size;
`fusion/compile/batched_plan.py` writes the reductions into the plan of the padded batch by `with_counts`, and `StackedGraph`
(`fusion/batching/batched_graph.py`) calls a node's `MaskedReduction` at each run. The module must not know groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from hydra_tune.fusion.batching.batching_rules import cross_entropy

aten: Any = torch.ops.aten
_NONE, _MEAN = 0, 1  # torch's codes for reductions
COUNTS, LOSS = "samples_that_count", "counted_loss"


@dataclass(frozen=True, slots=True)
class MaskedReduction:
    """A reduction over samples for stacked members, each with its own number of samples that count.

    The padding contributes zero to the result and receives zero gradients, whatever finite values it holds.

    Attributes:
        dim: dimension of the operator's input that holds the samples.
        each: positions of a sample in the dimension.
    """

    target: Any
    dim: int
    rows: int
    each: int
    reduction: int
    keywords: dict[str, Any] = field(default_factory=dict)

    def __call__(self, counts: Tensor, *tensors: Tensor) -> Tensor:
        """Return each member's loss.

        Args:
            counts: number of samples that count, `(N,)`.
            tensors: the operator's inputs, with the members in front.
        """
        places = torch.arange(self.rows, device=counts.device)
        # A sample's positions lie one after another, so the samples that count come first.
        is_own = places < (counts * self.each).unsqueeze(1)
        if self.target in (aten.cross_entropy_loss.default, aten.nll_loss_nd.default):
            return self._of_classes(is_own, *tensors)
        if self.target in (aten.mean.default, aten.sum.default):
            (single,) = tensors
        else:
            single = self.target(*tensors, reduction=_NONE, **self.keywords)
        is_own = is_own.view(len(counts), *[1] * self.dim, self.rows, *[1] * (single.dim() - self.dim - 2))
        # Select instead of multiplying by a mask: zero times infinity would be NaN.
        # Rounded once, at the end, as torch's mean and sum of numbers in low precision.
        wide = torch.promote_types(single.dtype, torch.float32)
        total = torch.where(is_own, single, torch.zeros_like(single)).flatten(1).sum(1, dtype=wide)
        if self.reduction == _MEAN:
            # As many elements as torch's mean would divide by, of the samples that count alone.
            total = total / (counts * (single[0].numel() // self.rows * self.each))
        return total.to(single.dtype)

    def _of_classes(self, is_own: Tensor, scores: Tensor, target: Tensor) -> Tensor:
        ignored = self.keywords["ignore_index"]
        # Ignored targets drop out of the sum and of the mean's divisor.
        target = torch.where(is_own, target, torch.full_like(target, ignored))
        if self.target is aten.cross_entropy_loss.default:
            losses = cross_entropy(scores, target, None, self.reduction, ignored)
            assert losses is not None, "only such losses are counted"
            return losses
        single: Tensor = aten.nll_loss_nd.default(scores.flatten(0, 1), target.flatten(), None, _NONE, ignored)
        total = single.view_as(target).sum(1)
        return total / (target != ignored).sum(1) if self.reduction == _MEAN else total


def counted_loss(loss: MaskedReduction, counts: Tensor, *tensors: Tensor) -> Tensor:
    """Call `loss`; as the target of a node, a mark: `StackedGraph` calls the `MaskedReduction` in the node's `meta`."""
    return loss(counts, *tensors)


def with_counts(code: fx.GraphModule, counted: Mapping[str, MaskedReduction], after: int) -> fx.GraphModule:
    """Return a graph that takes the number of samples that count, and reduces over those samples."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    counts: fx.Node | None = None
    for number, node in enumerate(code.graph.nodes):
        # Arguments come first, so the counts are the last argument.
        if number == after:
            counts = graph.placeholder(COUNTS)
        reduction = counted.get(node.name)
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], copies.__getitem__))
        elif reduction is None:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        else:
            assert counts is not None, "arguments come first"
            tensors = [copies[argument] for argument in node.all_input_nodes]
            copies[node] = graph.create_node("call_function", counted_loss, (counts, *tensors), {}, node.name)
            copies[node].meta = {**node.meta, LOSS: reduction}
    return fx.GraphModule(code, graph)
