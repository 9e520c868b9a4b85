"""Chooses the place of a trial's updates, on the device or on the host, if the user leaves the choice to the pool.

`ShardPartitionPlanner` (`shard/partition/partition_planner.py`) calls `choose_placement` if the executor has
`optimizer_placement="auto"`, when the first training step of a trial is cut. `budget_of` (`pool/runtime/cut_budget.py`)
has the `MachineSpeeds` measured.

Note: the rule. A step with updates on the device moves parameters, gradients and optimizer state that do not fit beside
each other. A step with updates on the host moves the gradients down and the parameters up, whatever fits, and moves no
state. The traffic of both is simulated (`traffic_model.py`) and converted to seconds by the speed of the device's link,
measured once. The host's own time is the time of the user's optimizer, tried on a stand-in, but not less than the time
for the touched bytes at the speed of the host's memory, measured once. Updates on the host overlap with the following
backward units if there is a free core and no update waits for all gradients; the last update never overlaps. The
placement with the shorter expected step is chosen, and the device if both are about equal. Without such a comparison, updates
run on the host if no cut fits with updates on the device, and on the device if nothing of a step would move.

Note: unknowns. The times of a GPU's units are unknown on the host and small compared with the copies, so the times are
left out, and so is a GPU's own update. On CPU devices the times of units are estimated, and an update takes the same
time as on the host.

Times are measured, so the same task on the same budget may be placed differently on another machine, or on another day
if both are about equal. On CPU devices the place changes no number. On GPUs the place may change numbers, and the user
accepts such a change by leaving the choice to the pool.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from hydra_tune.devices.hardware.link import LinkCostModel
from hydra_tune.quantities import format_bytes, format_short_seconds
from hydra_tune.shard.cost.pilot import ShardCost
from hydra_tune.shard.cost.traffic_model import StepAccessPattern, step_traffic
from hydra_tune.shard.cost.update_pilot import stand_in_for, trying
from hydra_tune.shard.verify.step_outcome import UnitSeconds

OptimizerPlacement = Literal["device", "host"]

_WORTH = 0.97  # share of a step with updates on the device; updates stay there unless the host is below
_MOST_ELEMENTS = 1 << 20  # largest stand-in for timing an optimizer
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeeds:
    """Measured speeds of a pool's machine.

    Attributes:
        link: speed of the copies of the pool's devices.
        dram_bytes_per_second: bytes per second read and written by the host's memory.
        is_host: whether the devices are CPU devices, whose units and updates take the time of the host.
        has_core: whether the host has a free core for updates while all devices compute.
    """

    link: LinkCostModel
    dram_bytes_per_second: float
    is_host: bool
    has_core: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCandidate:
    """A step cut for a given placement.

    Attributes:
        costs: costs of the shards, with the activations that the shards keep.
        seconds: seconds of the units; None if unknown.
    """

    costs: Sequence[ShardCost]
    seconds: UnitSeconds | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPlacementChoice:
    """Place of the updates, and the reason."""

    place: OptimizerPlacement
    reason: str


def choose_placement(
    on_device: PlacementCandidate | None,
    on_host: PlacementCandidate,
    budget_bytes: int,
    habits: StepAccessPattern,
    speeds: MachineSpeeds,
    seconds_per_byte: float,
) -> OptimizerPlacementChoice:
    """Return the placement with the shorter expected step; see the note.

    `on_device` is None if no such cut fits; `seconds_per_byte` comes from `update_seconds`.
    """
    if on_device is None:
        return OptimizerPlacementChoice(
            place="host",
            reason="updates on the host: some shard would not fit beside its optimizer state on the device",
        )
    traffic = step_traffic(on_device.costs, budget_bytes, habits)
    if not traffic.nbytes:
        return OptimizerPlacementChoice(
            place="device",
            reason="updates on the device: the model and its optimizer state stay there, and nothing moves",
        )
    # A CPU device updates at the host's speed, and a GPU's update is left out (note above).
    updating = (
        sum(_update_seconds(cost, speeds, seconds_per_byte) for cost in on_device.costs) if speeds.is_host else 0.0
    )
    computing = _computing(on_device, habits.num_batches) + updating
    device = _beside(computing, speeds.link.seconds(traffic.nbytes, traffic.copies), habits)
    host, host_bytes = _on_host(on_host, budget_bytes, habits, speeds, seconds_per_byte)
    place: OptimizerPlacement = "host" if host < device * _WORTH else "device"
    return OptimizerPlacementChoice(
        place=place, reason=_reason(place, device, traffic.nbytes, host, host_bytes, speeds)
    )


def update_seconds(optimizer: Optimizer, parameters: Sequence[Tensor]) -> float:
    """Seconds of an optimizer's update on the host, on a single core, per byte of parameters.

    The time is measured on a stand-in for the largest parameter, inside the capture gate. The optimizer is only read.
    """
    groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    largest = max((p for p in parameters if id(p) in groups), key=lambda p: p.numel(), default=None)
    if largest is None:
        return 0.0
    shape = list(largest.shape)
    if shape and largest.numel() > _MOST_ELEMENTS:
        shape[0] = max(1, shape[0] * _MOST_ELEMENTS // largest.numel())
    leaf = torch.zeros(shape, dtype=largest.dtype).requires_grad_()
    leaf.grad = torch.ones_like(leaf)  # as of `update_pilot.py`
    stand_in = stand_in_for(optimizer, [("", groups[id(largest)])], [leaf])
    round_seconds = []
    with trying(optimizer):
        stand_in.step()  # creates the state, so that the timed steps do not
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            stand_in.step()
            round_seconds.append(time.perf_counter() - start)
    # The minimum: other work on the machine only ever makes a step longer.
    return min(round_seconds) / max(leaf.nbytes, 1)


def _update_seconds(cost: ShardCost, speeds: MachineSpeeds, seconds_per_byte: float) -> float:
    """Seconds of a shard's update on the host: the larger of memory traffic and arithmetic of the optimizer."""
    touched = 3 * cost.trained_bytes + 2 * cost.optimizer_bytes  # parameters and state twice, gradients once
    return max(touched / speeds.dram_bytes_per_second, cost.trained_bytes * seconds_per_byte)


def _computing(cut: PlacementCandidate, num_batches: int) -> float:
    """Seconds of a step's forward and backward units."""
    if cut.seconds is None:
        return 0.0
    # The last shard has no forward unit of its own.
    return num_batches * (sum(cut.seconds.forward[:-1]) + sum(cut.seconds.backward))


def _beside(computing: float, copying: float, habits: StepAccessPattern) -> float:
    """Seconds of computing and copying together, overlapped if blocks are sent ahead."""
    return max(computing, copying) if habits.sends_ahead else computing + copying


def _on_host(
    cut: PlacementCandidate,
    budget_bytes: int,
    habits: StepAccessPattern,
    speeds: MachineSpeeds,
    seconds_per_byte: float,
) -> tuple[float, int]:
    """Seconds of a step with updates on the host, and bytes moved by the step."""
    traffic = step_traffic(cut.costs, budget_bytes, habits)
    gradient_seconds = speeds.link.seconds(sum(cost.trained_bytes for cost in cut.costs), len(cut.costs))
    other_seconds = max(0.0, speeds.link.seconds(traffic.nbytes, traffic.copies) - gradient_seconds)
    computing = _computing(cut, habits.num_batches)
    updates = [_update_seconds(cost, speeds, seconds_per_byte) for cost in cut.costs]
    exposed_seconds = sum(updates)
    if speeds.has_core and not habits.waits:
        # Updates overlap with the backward units after the first update; the update of the first shard comes last.
        backward = 0.0 if cut.seconds is None else sum(cut.seconds.backward[:-1])
        # Half of the other copies are assumed to fall into the backward half of the step.
        beside = _beside(backward, other_seconds / 2, habits) + gradient_seconds * (1 - 1 / len(cut.costs))
        exposed_seconds = max(updates[0], exposed_seconds - beside)
    return _beside(computing, other_seconds, habits) + gradient_seconds + exposed_seconds, traffic.nbytes


def _reason(
    place: OptimizerPlacement, device: float, device_bytes: int, host: float, host_bytes: int, speeds: MachineSpeeds
) -> str:
    return (
        f"updates on the {place}: a step is expected to take {format_short_seconds(device)} with updates on the device, where "
        f"{format_bytes(device_bytes)} are moved, and {format_short_seconds(host)} with updates on the host, where "
        f"{format_bytes(host_bytes)} are; copies were measured at {_speed(speeds.link.bytes_per_second)}, the host's memory at "
        f"{_speed(speeds.dram_bytes_per_second)}"
    )


def _speed(bytes_per_second: float) -> str:
    return f"{format_bytes(bytes_per_second)}/s"
