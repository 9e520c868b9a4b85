"""Run an operator without a batched form for each member in turn, and stack the results.

`StackedGraph` (`batched_graph.py`) calls `apart` at each run of a node for which neither a rule nor `torch.vmap` works, of
a random operator that `random_decomposition.py` cannot record, and of recurrent layers in low precision for which torch has a
kernel of their own. A random operator runs for active members only, each with the member's own generator (`for_each` of
`batched/batched_random.py`). The module must not know trials, groups or pools.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from hydra_tune.batched.batched_random import for_each
from hydra_tune.shard.capture.precision import without_autocast

_BATCHED = ("FuncTorchBatched", "FuncTorchBatchedDecomposition", "CompositeImplicitAutograd")


def has_batched_form(target: OpOverload[..., Any]) -> bool:
    """Return whether `torch.vmap` has a rule or a decomposition of an operator."""
    name = target.name()  # type: ignore[no-untyped-call]
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in _BATCHED)  # noqa: SLF001


def apart(
    target: Callable[..., Any],
    found: Sequence[Any],
    keywords: dict[str, Any],
    is_stacked: Sequence[bool],
    count: int,
    *,
    draws: bool,
) -> Any:
    """Return a node's value, computed separately for each member.

    Args:
        target: the function that the node calls.
        found: positional arguments; stacked tensors have the members in front.
        keywords: keyword arguments, likewise.
        is_stacked: for every tensor among the arguments, whether the tensor is stacked.
        count: number of members.
        draws: whether the operator draws random numbers.
    """
    leaves, spec = pytree.tree_flatten((tuple(found), keywords))
    flags = iter(is_stacked)
    are_stacked = [isinstance(leaf, Tensor) and next(flags) for leaf in leaves]

    def run(index: int) -> Any:
        """Compute the value of a single member, from the member's rows of the stacked arguments."""
        # A selected row is a view, so an in-place operator writes into the stack.
        member_leaves = [
            leaf.select(0, index) if is_wide else leaf for leaf, is_wide in zip(leaves, are_stacked, strict=True)
        ]
        arguments, named_arguments = pytree.tree_unflatten(member_leaves, spec)
        result = target(*arguments, **named_arguments)
        # An in-place operator returns its argument. Later nodes must
        # see the stacked argument itself, not a stack of copied rows.
        places = {id(row): place for place, row in enumerate(member_leaves) if are_stacked[place]}
        return pytree.tree_map_only(
            Tensor, lambda t: _OverwrittenArgument(places[id(t)], t) if id(t) in places else t, result
        )

    rows = for_each(run, count) if draws else [run(index) for index in range(count)]
    flat = [pytree.tree_leaves(row, is_leaf=_is_same) for row in rows]
    shape = pytree.tree_structure(rows[0], is_leaf=_is_same)
    stacked_results = [
        leaves[member_results[0].place]
        if isinstance(member_results[0], _OverwrittenArgument)
        else _stack(member_results)
        for member_results in zip(*flat, strict=True)
    ]
    return pytree.tree_unflatten(stacked_results, shape)


class _OverwrittenArgument:
    """Result that is an overwritten argument."""

    def __init__(self, place: int, tensor: Tensor) -> None:
        self.place = place
        self.tensor = tensor  # keep the row alive, so no other tensor reuses its id


def _is_same(value: Any) -> bool:
    return isinstance(value, _OverwrittenArgument)


def _stack(rows: Sequence[Any]) -> Any:
    if not isinstance(rows[0], Tensor):
        return rows[0]
    # Autocast refuses to stack numbers in the other low precision, or in float64, which a member's region may give.
    with without_autocast(rows[0].device.type):
        return torch.stack(list(rows))
