"""Losses over the first samples of a batch alone: what follows them in it is padding and counts for nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from hydra_tune.fusion.rules import cross_entropy

aten: Any = torch.ops.aten
_NONE, _MEAN = 0, 1  # of torch's numbers for reductions
COUNTS, LOSS = "samples_that_count", "counted_loss"


@dataclass(frozen=True, slots=True)
class Counted:
    """A reduction over the samples of a batch, for stacked members who each have so many of them.

    The others' part of the result is zero whatever they are, and so are their gradients.

    Attributes:
        target: the operator that reduces.
        dim: of what it reduces, the dimension with the samples.
        rows: its size.
        each: places of one sample in it.
        reduction: torch's number of the way it is reduced.
        keywords: further arguments of the operator.
    """

    target: Any
    dim: int
    rows: int
    each: int
    reduction: int
    keywords: dict[str, Any] = field(default_factory=dict)

    def __call__(self, counts: Tensor, *tensors: Tensor) -> Tensor:
        """Each member's loss.

        Args:
            counts: samples that count, `(N,)`.
            tensors: what the operator takes, with the members in front.
        """
        places = torch.arange(self.rows, device=counts.device)
        is_own = places < (counts * self.each).unsqueeze(1)
        if self.target in (aten.cross_entropy_loss.default, aten.nll_loss_nd.default):
            return self._of_classes(is_own, *tensors)
        if self.target in (aten.mean.default, aten.sum.default):
            (single,) = tensors
        else:
            single = self.target(*tensors, reduction=_NONE, **self.keywords)
        is_own = is_own.view(len(counts), *[1] * self.dim, self.rows, *[1] * (single.dim() - self.dim - 2))
        total = torch.where(is_own, single, torch.zeros_like(single)).flatten(1).sum(1)
        if self.reduction != _MEAN:
            return total
        return total / (counts * (single[0].numel() // self.rows * self.each))

    def _of_classes(self, is_own: Tensor, scores: Tensor, target: Tensor) -> Tensor:
        ignored = self.keywords["ignore_index"]
        target = torch.where(is_own, target, torch.full_like(target, ignored))
        if self.target is aten.cross_entropy_loss.default:
            made = cross_entropy(scores, target, None, self.reduction, ignored)
            assert made is not None, "only such losses are counted"
            return made
        single: Tensor = aten.nll_loss_nd.default(scores.flatten(0, 1), target.flatten(), None, _NONE, ignored)
        total = single.view_as(target).sum(1)
        return total / (target != ignored).sum(1) if self.reduction == _MEAN else total


def counted_loss(loss: Counted, counts: Tensor, *tensors: Tensor) -> Tensor:
    """What a graph calls where it reduces over the samples that count: `loss` of these."""
    return loss(counts, *tensors)


def with_counts(code: fx.GraphModule, counted: Mapping[str, Counted], after: int) -> fx.GraphModule:
    """A graph that takes how many samples count, and reduces over these.

    Args:
        code: the graph, of one member.
        counted: by the name of the node that reduces.
        after: the number of the argument that the counts come before.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    counts: fx.Node | None = None
    for number, node in enumerate(code.graph.nodes):
        if number == after:
            counts = graph.placeholder(COUNTS)
        one = counted.get(node.name)
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], copies.__getitem__))
        elif one is None:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        else:
            assert counts is not None, "arguments come first"
            tensors = [copies[given] for given in node.all_input_nodes]
            copies[node] = graph.create_node("call_function", counted_loss, (counts, *tensors), {}, node.name)
            copies[node].meta = {**node.meta, LOSS: one}
    return fx.GraphModule(code, graph)
