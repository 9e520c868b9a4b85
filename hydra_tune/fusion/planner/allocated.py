"""What a sub-array takes where each storage is an allocation of its own, of whole units of the allocator's.

A GPU's allocator gives 512 bytes for a number, and steps of several trials have hundreds of small storages. On a CPU budgets
are held by ledgers alone, which count bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hydra_tune.fusion.planner.arrays import Array, Op
from hydra_tune.fusion.planner.step_graph import StepGraph


def allocated(array: Array, step: StepGraph, rounding: int) -> Array:
    """A sub-array with its storages as large as they lie in memory.

    Parameters, buffers and optimizer state stay as they are: several lie in one allocation, which others count.

    Args:
        array: profiled; what its operators work in holds the rounding of what they make.
        step: its graph.
        rounding: bytes to which the allocator rounds; 1 leaves all as it is.
    """
    if rounding == 1:
        return array
    elsewhere = {*step.state.values(), *step.moments.values()}
    sizes = step.seen.sizes
    beyond = {name: -size % rounding for name, size in sizes.items()}
    return replace(
        array,
        sizes={name: size + beyond[name] for name, size in array.sizes.items()},
        static_bytes=array.static_bytes
        + sum(beyond[name] for name in sizes if name not in array.sizes and name not in elsewhere),
        forward=tuple(_without(op, beyond) for op in array.forward),
        backward=tuple(_without(op, beyond) for op in array.backward),
    )


def _without(op: Op, beyond: Mapping[str, int]) -> Op:
    """An operator that does not work in what its results are rounded by."""
    return replace(op, workspace_bytes=max(0, op.workspace_bytes - sum(beyond[name] for name in op.makes)))


def on_all(arrays: Sequence[Array]) -> Array:
    """A sub-array as it was profiled on several kinds of devices: with the first's times, and room on any of them.

    Args:
        arrays: of one graph.
    """
    first = arrays[0]
    if len(arrays) == 1:
        return first
    return replace(
        first,
        forward=tuple(map(_roomiest, *(one.forward for one in arrays))),
        backward=tuple(map(_roomiest, *(one.backward for one in arrays))),
    )


def _roomiest(*same: Op) -> Op:
    return replace(same[0], workspace_bytes=max(op.workspace_bytes for op in same))
