"""What bounds the memory of all plans from below: the operator that needs most beside what no plan takes away.

A plan takes feature maps away between their last use in the forward and their first in the backward, and those that it may
bring back several times also between their uses there. So there are at each operator, whatever is decided: what only the
forward or only the backward uses, while it is used; feature maps from making to last use in the forward, and from first to
last use in the backward, or at their uses alone; and maps that are never moved, for they are small, always.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from hydra_tune.fusion.planner.arrays import Array, Op
from hydra_tune.fusion.planner.candidates import candidates_of


@dataclass(frozen=True, slots=True)
class Least:
    """The bound of a sub-array; a pair's is that of the one that needs more, for they need not be there together.

    Attributes:
        num_bytes: beside static tensors.
        op: the operator that needs it.
        used_bytes: of what that one reads, makes and works in.
    """

    num_bytes: int
    op: str
    used_bytes: int


def least(array: Array) -> Least:
    """Less than this no plan needs.

    Args:
        array: the sub-array.
    """
    kept = array.maps.keys() - candidates_of(array, 0).keys()
    there: set[str] = set()
    forward = list(_needs(array, array.forward, _forward_ends(array, kept), {}, there))
    returns: dict[int, list[str]] = {}
    ends = {rank: list(names) for rank, names in array.all_backward_ends.items()}
    for name, one in array.maps.items():
        if name in array.returning and name in array.in_seconds and name not in kept:
            for rank in array.backward_ranks[name]:
                returns.setdefault(rank, []).append(name)
                ends.setdefault(rank, []).append(name)
        else:
            returns.setdefault(one.first_backward, []).append(name)
    backward = list(_needs(array, array.backward, ends, returns, there))
    return max([*forward, *backward], key=lambda one: one.num_bytes, default=Least(0, "", 0))


def _needs(
    array: Array,
    ops: Sequence[Op],
    ends: Mapping[int, Sequence[str]],
    returns: Mapping[int, Sequence[str]],
    there: set[str],
) -> Iterator[Least]:
    """What each operator needs; `there` is what is there before the first, and then behind the last."""
    for rank, op in enumerate(ops):
        there.update(op.makes, returns.get(rank, ()))
        used = {name for name in (*op.reads, *op.writes, *op.makes) if name in array.sizes}
        yield Least(
            num_bytes=sum(array.sizes[name] for name in there) + op.workspace_bytes,
            op=op.name,
            used_bytes=sum(array.sizes[name] for name in used) + op.workspace_bytes,
        )
        there.difference_update(ends.get(rank, ()))


def _forward_ends(array: Array, kept: AbstractSet[str]) -> dict[int, list[str]]:
    """What need not be there any more behind each forward operator."""
    ends = {rank: list(names) for rank, names in array.forward_ends.items()}
    for name, one in array.maps.items():
        if name not in kept:
            ends.setdefault(one.last_forward, []).append(name)
    return ends
