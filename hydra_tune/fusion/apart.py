"""What has no form for several members at once, run for one of them after the other; the results are stacked."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from hydra_tune.fusion.drawing import for_each

_BATCHED = ("FuncTorchBatched", "FuncTorchBatchedDecomposition", "CompositeImplicitAutograd")


def has_batched_form(target: OpOverload[..., Any]) -> bool:
    """Whether `torch.vmap` runs an operator as one, by a rule of its own or by what it is made of."""
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
    """A node's value, each member's computed by itself.

    Args:
        target: what the node runs.
        found: its arguments; tensors that are stacked have the members in front.
        keywords: likewise.
        is_stacked: of each tensor among them.
        count: members.
        draws: whether it draws random numbers.
    """
    leaves, spec = pytree.tree_flatten((tuple(found), keywords))
    flags = iter(is_stacked)
    wide = [isinstance(leaf, Tensor) and next(flags) for leaf in leaves]

    def run(index: int) -> Any:
        # A selected row is a view, so that what an operator overwrites is overwritten in the stack.
        own = [leaf.select(0, index) if is_wide else leaf for leaf, is_wide in zip(leaves, wide, strict=True)]
        arguments, given = pytree.tree_unflatten(own, spec)
        made = target(*arguments, **given)
        places = {id(row): place for place, row in enumerate(own) if wide[place]}
        return pytree.tree_map_only(Tensor, lambda t: _Same(places[id(t)], t) if id(t) in places else t, made)

    rows = for_each(run, count) if draws else [run(index) for index in range(count)]
    flat = [pytree.tree_leaves(row, is_leaf=_is_same) for row in rows]
    shape = pytree.tree_structure(rows[0], is_leaf=_is_same)
    stacked = [
        leaves[same[0].place] if isinstance(same[0], _Same) else _stack(same) for same in zip(*flat, strict=True)
    ]
    return pytree.tree_unflatten(stacked, shape)


class _Same:
    """A result that is an argument, overwritten."""

    def __init__(self, place: int, tensor: Tensor) -> None:
        self.place = place
        self.tensor = tensor  # or another one might be taken for it


def _is_same(value: Any) -> bool:
    return isinstance(value, _Same)


def _stack(rows: Sequence[Any]) -> Any:
    return torch.stack(list(rows)) if isinstance(rows[0], Tensor) else rows[0]
