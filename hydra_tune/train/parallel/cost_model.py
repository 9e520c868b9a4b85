"""Cost model of splitting: the time of an optimizer step on one device, data-parallel on several, and pipelined.

Seconds of units come from the trial's `UnitTimes`; bytes come from the pilot; the bandwidth of a link is that of the
pool's copies so far. The model takes all devices to be alike. A device either computes or copies, because units of a split step
are not prefetched. A copy between two devices occupies the links of both at the same time, and so counts once. `arrange`
(`step_strategy.py`) compares the ways by this model before each step of several batches for which the pool offers idle devices
(`pool/devices/idle_devices.py`), and `TrialRehearsal` (`train/timing/fake_trial.py`) for a forecast. All compared ways give the
same bits. The module must not use devices or a clock.

Note: bytes copied in a step of m batches. Let W be the bytes of parameters, G of their gradients and O of optimizer
state, each summed over all shards. Let m' be the number of batches on one of D devices: m / D rounded up.

* **One device**: nothing is copied if parameters, gradients and the largest unit fit the device. Otherwise each shard's
  parameters are loaded for each forward and each backward unit, and the sums of gradients are loaded and spilled with
  each backward: m (2W + 2G). Where the batches go through each shard together, parameters cost 2W, and the boundaries
  at the cuts are loaded and spilled once more.
* **Data-parallel**: parameters go to the host and to each other device, 2W. Each batch that runs on another device than
  the batch before takes the sums over, G for each of the m - m' batches on helping devices. Where parameters and
  gradients do not fit, batches go through each shard in N *teams*, each on a device: 2W + G on each device, at
  the same time, so 2N W of parameters in all. A team runs one shard behind the team before. With few shards the delay
  would be long: then each batch runs by itself, m' (2W + 4G) on each device, 2m W in all.
* **Pipelined**: parameters and sums stay. Boundaries at cuts between devices are copied across, forward and back. Where
  a device's shards fit the device, neighbouring shards share a device, and a step takes one batch's way through all
  devices plus m - 1 times the slowest device. Where the shards do not fit, shards are *dealt*, each to the device with
  the least work so far, and each shard runs all batches back to back. Each shard is then loaded twice: 2W in all (with
  the write-back of the update, Harmony's 3|W|), and nearly every cut lies between devices. The pipe fills in D - 1
  units; with fewer batches than devices, the devices wait for each other.
* **Updates**: the parts of W, G and O that are not on the device are loaded, and changes are spilled, where W, G and O
  do not all fit the device: 2O + W where the update follows the backward. After data-parallel batches without teams, W
  + G more are copied, because the sums are ready only when all batches have run.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.task import Parallel
from hydra_tune.train.timing.unit_times import UnitTimes

ONE_DEVICE = "one device"
GROUPED = "grouped"
DATA_PARALLEL = "data-parallel"
PIPELINED = "pipelined"
# Shards for each device from which teams pay: with fewer, teams mostly wait for each other.
_SHARDS_FOR_EACH = 2
WAYS = (ONE_DEVICE, GROUPED, DATA_PARALLEL, PIPELINED)
CHOSEN_WAYS = {"data": DATA_PARALLEL, "pipeline": PIPELINED}
"""The ways that a task may choose, by its `parallel`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOffer:
    """Devices that could work on a step, the trial's own device included.

    Attributes:
        devices: names of the devices, in the same order from step to step.
        budget_bytes: memory of the smallest device.
        bytes_per_second: bandwidth of a link.
        most_devices: largest number of devices that may be free before the step is over.
    """

    devices: tuple[str, ...]
    budget_bytes: int
    bytes_per_second: float
    most_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStepCost:
    """Measured and piloted costs of one shard.

    Attributes:
        seconds: seconds of the forward and backward units for one batch.
        state_bytes: bytes of parameters and buffers.
        value_bytes: bytes of values that come in forward.
        handed_bytes: bytes of gradients of values that come in backward.
        work_bytes: largest need of a unit beside parameters, in bytes.
    """

    seconds: float
    state_bytes: int
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    value_bytes: int = 0
    handed_bytes: int = 0
    work_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStrategyEstimate:
    """Estimated cost of a step that runs one way.

    Attributes:
        way: one of `WAYS`.
        seconds: seconds of the step, without the costs that all ways have in common.
        parameter_bytes: bytes of parameters and buffers loaded, by all devices.
        homes: the device of each shard, where the step is pipelined.
        is_dealt: whether a pipelined step deals shards one by one, because the shards do not fit.
        teams: for a data-parallel step, the number of teams that go through each shard together because the shards do
            not fit.
    """

    way: str
    seconds: float
    parameter_bytes: int = 0
    homes: tuple[str, ...] = ()
    is_dealt: bool = False
    teams: int = 0


def shard_facts(plan: ShardPlan, times: UnitTimes) -> list[ShardStepCost]:
    """Collect the costs of a plan's shards."""
    return [
        ShardStepCost(
            seconds=times.of(("forward", index)) + times.of(("backward", index)),
            state_bytes=shard.cost.state_bytes,
            gradient_bytes=shard.cost.trained_bytes,
            optimizer_bytes=shard.cost.optimizer_bytes,
            value_bytes=shard.cost.value_bytes,
            handed_bytes=shard.cost.handed_bytes,
            work_bytes=max(shard.cost.forward_bytes, shard.cost.backward_bytes) - shard.cost.state_bytes,
        )
        for index, shard in enumerate(plan.shards)
    ]


def fastest(
    shards: Sequence[ShardStepCost],
    num_batches: int,
    offer: DeviceOffer,
    ways: Sequence[str] = WAYS,
    parallel: Parallel = "auto",
) -> StepStrategyEstimate:
    """Return the way that takes the least time; of equal ways, the first in `WAYS`.

    Args:
        shards: the trial's shards, in forward order.
        num_batches: batches of the step.
        offer: the devices.
        ways: the ways that are exact for the trial; `GROUPED` among them means that batches on one device run grouped.
        parallel: the task's choice; other than "auto", the task's way is taken at any cost, where that way is exact.
    """
    alone = on_one_device(shards, num_batches, offer, grouped=GROUPED in ways)
    estimates = [alone]
    if DATA_PARALLEL in ways and num_batches > 1:
        estimates.append(data_parallel(shards, num_batches, offer))
    if PIPELINED in ways and num_batches > 1 and len(shards) > 1:
        estimates.append(pipelined(shards, num_batches, offer))
    if parallel != "auto":
        return next((estimate for estimate in estimates if estimate.way == CHOSEN_WAYS.get(parallel)), alone)
    return min(estimates, key=lambda estimate: estimate.seconds)


def on_one_device(
    shards: Sequence[ShardStepCost], num_batches: int, offer: DeviceOffer, *, grouped: bool = False
) -> StepStrategyEstimate:
    """Estimate all batches on one device, one after the other or through each shard together."""
    copied, loaded = _of_updates(shards, offer, split=False)
    if not fits(shards, offer.budget_bytes) and grouped:
        loaded += 2 * _state(shards)
        copied += 2 * _state(shards) + num_batches * 3 * sum(_crossing(shards))
    elif not fits(shards, offer.budget_bytes):
        loaded += 2 * num_batches * _state(shards)
        # The note's m (2W + 2G), and the boundaries at the cuts.
        copied += num_batches * (2 * _state(shards) + 2 * _gradients(shards) + 2 * sum(_crossing(shards)))
    seconds = num_batches * _seconds(shards) + copied / offer.bytes_per_second
    return StepStrategyEstimate(way=ONE_DEVICE, seconds=seconds, parameter_bytes=loaded)


def data_parallel(shards: Sequence[ShardStepCost], num_batches: int, offer: DeviceOffer) -> StepStrategyEstimate:
    """Estimate whole batches on each device."""
    num_devices = len(offer.devices)
    batches_each = -(-num_batches // num_devices)
    copied, loaded = _of_updates(shards, offer, split=True)
    if fits(shards, offer.budget_bytes):
        loaded += (num_devices - 1) * _state(shards)
        copied += 2 * _state(shards) + _gradients(shards) * (num_batches - batches_each)
    elif len(shards) >= _SHARDS_FOR_EACH * num_devices:
        return _in_teams(shards, num_batches, offer)
    else:
        loaded += 2 * num_batches * _state(shards)
        copied += batches_each * (2 * _state(shards) + 4 * _gradients(shards) + 2 * sum(_crossing(shards)))
    seconds = batches_each * _seconds(shards) + copied / offer.bytes_per_second
    return StepStrategyEstimate(way=DATA_PARALLEL, seconds=seconds, parameter_bytes=loaded)


def _in_teams(shards: Sequence[ShardStepCost], num_batches: int, offer: DeviceOffer) -> StepStrategyEstimate:
    count = min(len(offer.devices), num_batches)
    batches_each = -(-num_batches // count)
    copied, reloaded = _of_updates(shards, offer, split=False)
    copied += 2 * _state(shards) + _gradients(shards) + batches_each * 3 * sum(_crossing(shards))
    # The delay of the last team, one shard for each team before.
    behind = (count - 1) * batches_each * max(shard.seconds for shard in shards)
    return StepStrategyEstimate(
        way=DATA_PARALLEL,
        seconds=batches_each * _seconds(shards) + behind + copied / offer.bytes_per_second,
        parameter_bytes=2 * count * _state(shards) + reloaded,
        teams=count,
    )


def pipelined(shards: Sequence[ShardStepCost], num_batches: int, offer: DeviceOffer) -> StepStrategyEstimate:
    """Estimate a pipeline with each shard on one device."""
    ends = neighbours(shards, len(offer.devices), offer.budget_bytes)
    return _dealt(shards, num_batches, offer) if ends is None else _in_runs(shards, num_batches, offer, ends)


def fits(shards: Sequence[ShardStepCost], budget_bytes: int) -> bool:
    """Whether parameters, gradients and the largest unit of the shards fit a device together."""
    return _state(shards) + _gradients(shards) + max(shard.work_bytes for shard in shards) <= budget_bytes


def neighbours(shards: Sequence[ShardStepCost], num_devices: int, budget_bytes: int) -> list[int] | None:
    """Cut the shards into runs of neighbours, one run for each device, so that the slowest run is as fast as possible.

    Returns:
        The shard index after the end of each run; fewer runs where there are fewer shards; None if no runs fit the
        devices.
    """
    count = len(shards)
    seconds = [list(_runs_to(shards, last, budget_bytes)) for last in range(count + 1)]
    # By number of leading shards: seconds of the slowest run under the best cut so far.
    least = [0.0] + [math.inf] * count
    # By round and number of leading shards: first shard of the last run.
    begins: list[list[int]] = []
    for _ in range(min(num_devices, count)):
        best = [
            min(((max(least[first], run), first) for run, first in seconds[last]), default=(math.inf, 0))
            for last in range(count + 1)
        ]
        least = [slowest for slowest, _ in best]
        begins.append([first for _, first in best])
    if least[count] == math.inf:
        return None
    ends = [count]
    # Backwards from the last run: each choice depends on where the run after it begins.
    for begin in reversed(begins[1:]):
        ends.append(begin[ends[-1]])
    return ends[::-1]


def _runs_to(shards: Sequence[ShardStepCost], last: int, budget_bytes: int) -> Iterator[tuple[float, int]]:
    """Yield seconds and first shard of each run that ends before `last` and fits a device."""
    seconds, held_bytes, work_bytes = 0.0, 0, 0
    for first in reversed(range(last)):
        shard = shards[first]
        seconds += shard.seconds
        held_bytes += shard.state_bytes + shard.gradient_bytes
        work_bytes = max(work_bytes, shard.work_bytes)
        if held_bytes + work_bytes > budget_bytes:
            return
        yield seconds, first


def _in_runs(
    shards: Sequence[ShardStepCost], num_batches: int, offer: DeviceOffer, ends: Sequence[int]
) -> StepStrategyEstimate:
    copied, loaded = 0, 0
    crossing = _crossing(shards)
    runs = [slice(first, last) for first, last in pairwise([0, *ends])]
    stages = [
        _seconds(shards[run]) + (crossing[run.start] if run.start else 0) / offer.bytes_per_second for run in runs
    ]
    for run in runs:
        # The update of a shard runs on the shard's device, so each device has to fit the state of its own run only.
        update_bytes, reloaded = _of_updates(shards[run], offer, split=False)
        copied, loaded = copied + update_bytes, loaded + reloaded
    # The first batch passes all devices, and each later batch follows the slowest device.
    seconds = sum(stages) + (num_batches - 1) * max(stages) + copied / offer.bytes_per_second
    homes = [device for device, run in zip(offer.devices, runs, strict=False) for _ in shards[run]]
    return StepStrategyEstimate(way=PIPELINED, seconds=seconds, parameter_bytes=loaded, homes=tuple(homes))


def _dealt(shards: Sequence[ShardStepCost], num_batches: int, offer: DeviceOffer) -> StepStrategyEstimate:
    num_devices = min(len(offer.devices), len(shards))
    places = _deal(shards, num_batches, num_devices, offer)
    loaded = 2 * _state(shards)
    busiest = 0.0
    crossing = _crossing(shards)
    for device in range(num_devices):
        indices = [index for index, place in enumerate(places) if place == device]
        facts = [shards[index] for index in indices]
        updating, reloaded = _of_updates(facts, offer, split=False)
        copied = 2 * _state(facts) + num_batches * 2 * sum(crossing[index] for index in indices) + updating
        # With fewer batches than devices, the devices wait for each other.
        computing = num_batches * _seconds(facts) * max(1.0, num_devices / num_batches)
        busiest, loaded = max(busiest, computing + copied / offer.bytes_per_second), loaded + reloaded
    filling = (num_devices - 1) * max(shard.seconds for shard in shards)
    homes = tuple(offer.devices[place] for place in places)
    return StepStrategyEstimate(
        way=PIPELINED, seconds=busiest + filling, parameter_bytes=loaded, homes=homes, is_dealt=True
    )


def _deal(shards: Sequence[ShardStepCost], num_batches: int, num_devices: int, offer: DeviceOffer) -> list[int]:
    """Give each shard to the device with the least work so far; devices with equal work take turns.

    Small and large shards often alternate, as attention and feed-forward layers do: dealing strictly in turn would give
    one device all large shards.
    """
    busy = [0.0] * num_devices
    places: list[int] = []
    for shard in shards:
        first = places[-1] + 1 if places else 0
        place = min(range(num_devices), key=lambda device: (busy[device], (device - first) % num_devices))
        copied = 3 * shard.state_bytes + 2 * shard.optimizer_bytes
        busy[place] += num_batches * shard.seconds + copied / offer.bytes_per_second
        places.append(place)
    return places


def _of_updates(shards: Sequence[ShardStepCost], offer: DeviceOffer, *, split: bool) -> tuple[int, int]:
    """Return the bytes that updates of shards on one device copy, and the bytes of reloaded parameters among them."""
    optimizer = sum(shard.optimizer_bytes for shard in shards)
    work = max(shard.work_bytes for shard in shards)
    if _state(shards) + _gradients(shards) + optimizer + work <= offer.budget_bytes:
        return 0, 0
    reloaded = _state(shards) if split else 0
    return 2 * optimizer + _state(shards) + reloaded + (_gradients(shards) if split else 0), reloaded


def _crossing(shards: Sequence[ShardStepCost]) -> list[int]:
    """Return the bytes that cross the cut before each shard, forward and back."""
    back = [0, *(shard.handed_bytes for shard in shards[:-1])]
    return [shard.value_bytes + handed for shard, handed in zip(shards, back, strict=True)]


def _seconds(shards: Sequence[ShardStepCost]) -> float:
    return sum(shard.seconds for shard in shards)


def _state(shards: Sequence[ShardStepCost]) -> int:
    return sum(shard.state_bytes for shard in shards)


def _gradients(shards: Sequence[ShardStepCost]) -> int:
    return sum(shard.gradient_bytes for shard in shards)
