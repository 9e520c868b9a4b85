"""Lower bound of the memory of all plans: the operator that needs most beside the storages that no plan takes away.

A plan takes a feature map away between the last use in the forward and the first use in the backward. A map that may
come back several times is away between its uses in the backward as well. So every plan has on the device, at each
operator: storages that only the forward or only the backward uses, while in use; feature maps from making to last use
in the forward, and from first to last use in the backward, or at the uses alone; and at all times the maps that are
never moved because they are small.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from hydra_tune.planner.ir.step_profile import OperatorProfile, SubArrayProfile
from hydra_tune.planner.passes.candidates import candidates_of


@dataclass(frozen=True, slots=True)
class MemoryLowerBound:
    """Memory bound of a sub-array.

    The bound of a pair is the larger bound of its sub-arrays, because the two needs do not have to coincide.

    Attributes:
        num_bytes: beside static tensors.
        op: the operator that needs them.
        used_bytes: of the storages that the operator reads and makes, and of its workspace.
    """

    num_bytes: int
    op: str
    used_bytes: int


def least(array: SubArrayProfile) -> MemoryLowerBound:
    """Return the least memory of any plan of a sub-array.

    Args:
        array: the sub-array.
    """
    # Maps that are no candidates are never moved.
    kept_names = array.maps.keys() - candidates_of(array, 0).keys()
    present_names: set[str] = set()
    forward = list(_needs(array, array.forward, _forward_ends(array, kept_names), {}, present_names))
    # `there` now has the results and the maps that are never moved; all other maps must come back for their uses.
    returns: dict[int, list[str]] = {}
    ends = {rank: list(names) for rank, names in array.all_backward_ends.items()}
    for name, one in array.maps.items():
        if name in array.returning and name in array.in_seconds and name not in kept_names:
            for rank in array.backward_ranks[name]:
                returns.setdefault(rank, []).append(name)
                ends.setdefault(rank, []).append(name)
        else:
            returns.setdefault(one.first_backward, []).append(name)
    backward = list(_needs(array, array.backward, ends, returns, present_names))
    return max([*forward, *backward], key=lambda one: one.num_bytes, default=MemoryLowerBound(0, "", 0))


def _needs(
    array: SubArrayProfile,
    ops: Sequence[OperatorProfile],
    ends: Mapping[int, Sequence[str]],
    returns: Mapping[int, Sequence[str]],
    there: set[str],
) -> Iterator[MemoryLowerBound]:
    """Yield the need of each operator, and update `there`, the storages that stay on the device before and after."""
    for rank, op in enumerate(ops):
        there.update(op.makes, returns.get(rank, ()))
        used_names = {name for name in (*op.reads, *op.writes, *op.makes) if name in array.sizes}
        yield MemoryLowerBound(
            num_bytes=sum(array.sizes[name] for name in there) + op.workspace_bytes,
            op=op.name,
            used_bytes=sum(array.sizes[name] for name in used_names) + op.workspace_bytes,
        )
        there.difference_update(ends.get(rank, ()))


def _forward_ends(array: SubArrayProfile, kept: AbstractSet[str]) -> dict[int, list[str]]:
    """Storages that may leave the device behind each forward operator."""
    ends = {rank: list(names) for rank, names in array.forward_ends.items()}
    for name, feature_map in array.maps.items():
        if name not in kept:
            ends.setdefault(feature_map.last_forward, []).append(name)
    return ends
