"""Memory of a sub-array whose storages are allocations of their own, in whole units of the allocator.

A GPU's allocator gives 512 bytes for a single number, and steps of several trials have hundreds of small storages. On a
CPU only the ledgers hold budgets, and the ledgers count bytes, so the unit is a single byte there. `StepPlanner`
(`fusion/runtime/step_planner.py`) rounds every profile of a group's step here before making a plan (`allocated`), and
joins the profiles of several kinds of devices into one (`on_all`). The module must not know plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hydra_tune.planner.ir.step_profile import OperatorProfile, SubArrayProfile
from hydra_tune.planner.trace.step_graph import StepGraph


def allocated(array: SubArrayProfile, step: StepGraph, rounding: int) -> SubArrayProfile:
    """Return a sub-array with storages as large as their allocations.

    Parameters, buffers and optimizer state keep their sizes: `StepPlanner` takes their rounding off the memory limit.

    Args:
        array: profiled; an operator's workspace includes the rounding of the storages that the operator makes.
        step: graph of the sub-array.
        rounding: unit of the allocator in bytes; 1 leaves everything as it is.
    """
    if rounding == 1:
        return array
    # A storage that no operator makes bears the name of its argument.
    state_names = {*step.state.values(), *step.moments.values()}
    sizes = step.seen.sizes
    rounding_bytes = {name: -size % rounding for name, size in sizes.items()}
    return replace(
        array,
        sizes={name: size + rounding_bytes[name] for name, size in array.sizes.items()},
        static_bytes=array.static_bytes
        + sum(rounding_bytes[name] for name in sizes if name not in array.sizes and name not in state_names),
        # An operator's peak was measured with the allocator's rounding, which the sizes above now hold.
        forward=tuple(_without(op, rounding_bytes) for op in array.forward),
        backward=tuple(_without(op, rounding_bytes) for op in array.backward),
    )


def _without(op: OperatorProfile, beyond: Mapping[str, int]) -> OperatorProfile:
    """Return an operator whose workspace excludes the rounding of its results."""
    return replace(op, workspace_bytes=max(0, op.workspace_bytes - sum(beyond[name] for name in op.makes)))


def on_all(arrays: Sequence[SubArrayProfile]) -> SubArrayProfile:
    """Return a sub-array with the times of the first profile, and with enough workspace for all profiled devices."""
    reference = arrays[0]
    if len(arrays) == 1:
        return reference
    return replace(
        reference,
        forward=tuple(map(_roomiest, *(array.forward for array in arrays))),
        backward=tuple(map(_roomiest, *(array.backward for array in arrays))),
    )


def _roomiest(*same: OperatorProfile) -> OperatorProfile:
    return replace(same[0], workspace_bytes=max(op.workspace_bytes for op in same))
