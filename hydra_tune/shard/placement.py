"""Where a trial's updates are made, on its device or on the host, where that is left to the pool.

Note: the rule. A step on the device moves parameters, gradients and optimizer state as far as they do not fit beside each
other; one on the host moves the gradients down and the parameters up, whatever fits, and no state, and is cut into fewer
shards. What each moves is played through (`traffic.py`); what that takes is told by the device's link, measured once. The
host's own time is that of the user's optimizer, tried on a stand-in, and not less than the bytes it touches take at the speed
of the host's memory, measured once. It goes by beside the backward units that follow, if there is a core for it and no update
has to wait for all gradients; the last one never does. The placement that is expected to take less time is chosen, and the
device where they are about equal.

Note: what is not known. What the units of a GPU take cannot be told from the host, and next to its copies it is little: it is
left out, and so is a GPU's own update. On CPU devices units are estimated, and an update takes what it takes on the host.

Times are measured, so the same task on the same budget may be placed otherwise on another machine, or on another day where it
is about equal. On CPU devices that changes no number. Where it does, on GPUs, the choice is the user's to leave to the pool.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from hydra_tune.devices.link import Link
from hydra_tune.quantities import format_bytes, format_short_seconds
from hydra_tune.shard.outcome import UnitSeconds
from hydra_tune.shard.pilot import ShardCost
from hydra_tune.shard.traffic import Habits, step_traffic
from hydra_tune.shard.update_pilot import stand_in_for

OptimizerPlacement = Literal["device", "host"]

_WORTH = 0.97  # of a step with updates on the device: above it, they stay there
_MOST_ELEMENTS = 1 << 20  # of the stand-in that an optimizer is timed with
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What is measured of a pool's machine.

    Attributes:
        link: of its devices' copies.
        dram_bytes_per_second: that the host's memory reads and writes.
        is_host: whether the devices are CPU devices, whose units and updates take what they take on the host.
        has_core: whether the host has a core for updates while all devices compute.
    """

    link: Link
    dram_bytes_per_second: float
    is_host: bool
    has_core: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A step cut for one placement.

    Attributes:
        costs: of its shards, with whatever activations they keep.
        seconds: of its units; None where they are not known.
    """

    costs: Sequence[ShardCost]
    seconds: UnitSeconds | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where updates are made, and why.

    Attributes:
        place: "device" or "host".
        reason: a sentence for people.
    """

    place: OptimizerPlacement
    reason: str


def choose_placement(
    on_device: Cut | None,
    on_host: Cut,
    budget_bytes: int,
    habits: Habits,
    speeds: Speeds,
    seconds_per_byte: float,
) -> Placement:
    """The placement with which a step is expected to take less time; see the note.

    Args:
        on_device: the step cut for updates on the device; None if it cannot be cut so that it fits.
        on_host: the same for updates on the host.
        budget_bytes: of the device.
        habits: how a step uses its shards.
        speeds: of the machine.
        seconds_per_byte: that the optimizer takes for each byte of parameters, by `update_seconds`.
    """
    if on_device is None:
        return Placement(
            place="host",
            reason="updates on the host: some shard would not fit beside its optimizer state on the device",
        )
    traffic = step_traffic(on_device.costs, budget_bytes, habits)
    if not traffic.nbytes:
        return Placement(
            place="device",
            reason="updates on the device: the model and its optimizer state stay there, and nothing moves",
        )
    updating = (
        sum(_update_seconds(cost, speeds, seconds_per_byte) for cost in on_device.costs) if speeds.is_host else 0.0
    )
    computing = _computing(on_device, habits.num_batches) + updating
    device = _beside(computing, speeds.link.seconds(traffic.nbytes, traffic.copies), habits)
    host, host_bytes = _on_host(on_host, budget_bytes, habits, speeds, seconds_per_byte)
    place: OptimizerPlacement = "host" if host < device * _WORTH else "device"
    return Placement(place=place, reason=_reason(place, device, traffic.nbytes, host, host_bytes, speeds))


def update_seconds(optimizer: Optimizer, parameters: Sequence[Tensor]) -> float:
    """Seconds that an optimizer takes on the host, on one core, for each byte of parameters: of a stand-in for the largest.

    Args:
        optimizer: a trial's optimizer; it is only read.
        parameters: its parameters.
    """
    groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    largest = max((p for p in parameters if id(p) in groups), key=lambda p: p.numel(), default=None)
    if largest is None:
        return 0.0
    shape = list(largest.shape)
    if shape and largest.numel() > _MOST_ELEMENTS:
        shape[0] = max(1, shape[0] * _MOST_ELEMENTS // largest.numel())
    leaf = torch.zeros(shape, dtype=largest.dtype).requires_grad_()
    leaf.grad = torch.zeros_like(leaf)
    stand_in = stand_in_for(optimizer, [("", groups[id(largest)])], [leaf])
    stand_in.step()  # makes the state
    found = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        stand_in.step()
        found.append(time.perf_counter() - start)
    return min(found) / max(leaf.nbytes, 1)


def _update_seconds(cost: ShardCost, speeds: Speeds, seconds_per_byte: float) -> float:
    """Of a shard's update on the host: what it reads and writes, and the optimizer's own arithmetic."""
    touched = 3 * cost.trained_bytes + 2 * cost.optimizer_bytes  # parameters and state twice, gradients once
    return max(touched / speeds.dram_bytes_per_second, cost.trained_bytes * seconds_per_byte)


def _computing(cut: Cut, num_batches: int) -> float:
    """Seconds of a step's forward and backward units."""
    if cut.seconds is None:
        return 0.0
    return num_batches * (sum(cut.seconds.forward[:-1]) + sum(cut.seconds.backward))


def _beside(computing: float, copying: float, habits: Habits) -> float:
    """Both together."""
    return max(computing, copying) if habits.sends_ahead else computing + copying


def _on_host(cut: Cut, budget_bytes: int, habits: Habits, speeds: Speeds, seconds_per_byte: float) -> tuple[float, int]:
    """Seconds of a step with updates on the host, and bytes that it moves."""
    traffic = step_traffic(cut.costs, budget_bytes, habits)
    down = speeds.link.seconds(sum(cost.trained_bytes for cost in cut.costs), len(cut.costs))
    others = max(0.0, speeds.link.seconds(traffic.nbytes, traffic.copies) - down)
    computing = _computing(cut, habits.num_batches)
    updates = [_update_seconds(cost, speeds, seconds_per_byte) for cost in cut.costs]
    left = sum(updates)
    if speeds.has_core and not habits.waits:
        # Beside the backward units that come after the first update; and the first shard's update is the last.
        backward = 0.0 if cut.seconds is None else sum(cut.seconds.backward[:-1])
        beside = _beside(backward, others / 2, habits) + down * (1 - 1 / len(cut.costs))
        left = max(updates[0], left - beside)
    return _beside(computing, others, habits) + down + left, traffic.nbytes


def _reason(
    place: OptimizerPlacement, device: float, device_bytes: int, host: float, host_bytes: int, speeds: Speeds
) -> str:
    return (
        f"updates on the {place}: a step is expected to take {format_short_seconds(device)} with updates on the device, where "
        f"{format_bytes(device_bytes)} are moved, and {format_short_seconds(host)} with updates on the host, where "
        f"{format_bytes(host_bytes)} are; copies were measured at {_speed(speeds.link.bytes_per_second)}, the host's memory at "
        f"{_speed(speeds.dram_bytes_per_second)}"
    )


def _speed(bytes_per_second: float) -> str:
    return f"{format_bytes(bytes_per_second)}/s"
