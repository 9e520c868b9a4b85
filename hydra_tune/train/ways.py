"""How long an optimizer step would take on one device, data-parallel on several, and pipelined: the cost model of splitting.

Seconds of units are the trial's own, measured; bytes are the pilot's; the bandwidth of a link is that of the pool's copies so
far. Devices are taken to be alike. A device computes or copies, one after the other, for units of a split step are not sent
ahead. What goes from one device to another has the links of both at the same time, and so counts once.

Note: what is copied in a step of m batches. Let W be the bytes of parameters, G of their gradients, O of optimizer state, all
of them over all shards, m' the batches that one of D devices runs, m / D rounded up.

* **One device**: nothing, if parameters, gradients and the largest unit fit it. Else each shard's parameters are loaded for
  each forward and each backward unit, and the sums of gradients come and go with each backward: m (2W + 2G). Where the batches
  go through each shard together, it is 2W, and what crosses the cuts comes and goes once more.
* **Data-parallel**: parameters go to the host and to each other device, 2W, and each batch that does not run where the one
  before did takes its sums over, G for each of the m - m' that help. Where they do not fit, batches go through each shard in
  *teams*, one for each device: 2W + G on each, at the same time, that is 2N W of parameters in all; with what the one update
  writes back less than Harmony's 3N|W|, where each device updates a replica. A team is one shard behind the one before. With
  few shards that would be long: then each batch is by itself, m' (2W + 4G) on each device, 2m W in all.
* **Pipelined**: parameters and sums stay. What crosses the cuts between devices is taken over, forward and back. Where a
  device's shards fit it, its shards are neighbours, and a step takes one batch's way through all devices and m - 1 times the
  slowest of them. Where they do not, shards are *dealt* to the devices in turn, as evenly as they let themselves, and each runs
  all batches back to back, so it is loaded twice: 2W in all (with what the update writes back, Harmony's 3|W|), and nearly
  every cut is one between devices. The pipe fills in D - 1 units; with fewer batches than devices, these wait for each other.
* **Updates**: what of W, G and O is not on the device comes and changes go, where all that does not fit the device: 2O + W
  where the update follows the backward, and W + G more after data-parallel batches, whose sums are ready when all have run.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hydra_tune.shard.plan import Plan
from hydra_tune.train.clock import UnitTimes

ONE_DEVICE = "one device"
GROUPED = "grouped"
DATA_PARALLEL = "data-parallel"
PIPELINED = "pipelined"
_SHARDS_FOR_EACH = 2  # with fewer for each device, teams would rather wait for each other than work
WAYS = (ONE_DEVICE, GROUPED, DATA_PARALLEL, PIPELINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Devices that could work on a step, that of the trial among them.

    Attributes:
        devices: their names, in an order that is the same from step to step.
        budget_bytes: memory on the smallest of them.
        bytes_per_second: of a link.
        most_devices: as many as may be free before the step is over.
        only: the only way there is to be beside `ONE_DEVICE`, whatever it costs; None: the fastest.
    """

    devices: tuple[str, ...]
    budget_bytes: int
    bytes_per_second: float
    most_devices: int
    only: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """What the model knows of one shard.

    Attributes:
        seconds: its forward and backward units for one batch.
        state_bytes: parameters and buffers.
        gradient_bytes: gradients of parameters.
        optimizer_bytes: optimizer state.
        value_bytes: what comes in forward.
        handed_bytes: gradients of values that come in backward.
        work_bytes: the most that a unit needs beside parameters.
    """

    seconds: float
    state_bytes: int
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    value_bytes: int = 0
    handed_bytes: int = 0
    work_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a step would take one way.

    Attributes:
        way: one of `WAYS`.
        seconds: of the step, but for what all ways have in common.
        parameter_bytes: parameters and buffers loaded, by all devices.
        homes: where it is pipelined, the device of each shard.
        is_dealt: where it is pipelined, whether shards are dealt one by one, because they do not fit.
        teams: where it is data-parallel, how many runs of batches go through each shard together, because they do not fit.
    """

    way: str
    seconds: float
    parameter_bytes: int = 0
    homes: tuple[str, ...] = ()
    is_dealt: bool = False
    teams: int = 0


def shard_facts(plan: Plan, times: UnitTimes) -> list[ShardFacts]:
    """What is known of a plan's shards."""
    return [
        ShardFacts(
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


def fastest(shards: Sequence[ShardFacts], num_batches: int, offer: Offer, ways: Sequence[str] = WAYS) -> Estimate:
    """The way that takes the least time; of equals the first of `WAYS`.

    Args:
        shards: the trial's, in forward order.
        num_batches: of the step.
        offer: the devices.
        ways: those that are exact for the trial; with `GROUPED`, that is how batches run on one device.
    """
    alone = on_one_device(shards, num_batches, offer, grouped=GROUPED in ways)
    found = [alone]
    if DATA_PARALLEL in ways and num_batches > 1:
        found.append(data_parallel(shards, num_batches, offer))
    if PIPELINED in ways and num_batches > 1 and len(shards) > 1:
        found.append(pipelined(shards, num_batches, offer))
    if offer.only is not None:
        return next((estimate for estimate in found if estimate.way == offer.only), alone)
    return min(found, key=lambda estimate: estimate.seconds)


def on_one_device(shards: Sequence[ShardFacts], num_batches: int, offer: Offer, *, grouped: bool = False) -> Estimate:
    """All batches one after the other, or through each shard together."""
    copied, loaded = _of_updates(shards, offer, split=False)
    if not fits(shards, offer.budget_bytes) and grouped:
        loaded += 2 * _state(shards)
        copied += 2 * _state(shards) + num_batches * 3 * sum(_crossing(shards))
    elif not fits(shards, offer.budget_bytes):
        loaded += 2 * num_batches * _state(shards)
        copied += num_batches * (2 * _state(shards) + 2 * _gradients(shards) + 2 * sum(_crossing(shards)))
    seconds = num_batches * _seconds(shards) + copied / offer.bytes_per_second
    return Estimate(way=ONE_DEVICE, seconds=seconds, parameter_bytes=loaded)


def data_parallel(shards: Sequence[ShardFacts], num_batches: int, offer: Offer) -> Estimate:
    """Whole batches on each device."""
    num_devices = len(offer.devices)
    each = -(-num_batches // num_devices)
    copied, loaded = _of_updates(shards, offer, split=True)
    if fits(shards, offer.budget_bytes):
        loaded += (num_devices - 1) * _state(shards)
        copied += 2 * _state(shards) + _gradients(shards) * (num_batches - each)
    elif len(shards) >= _SHARDS_FOR_EACH * num_devices:
        return _in_teams(shards, num_batches, offer)
    else:
        loaded += 2 * num_batches * _state(shards)
        copied += each * (2 * _state(shards) + 4 * _gradients(shards) + 2 * sum(_crossing(shards)))
    seconds = each * _seconds(shards) + copied / offer.bytes_per_second
    return Estimate(way=DATA_PARALLEL, seconds=seconds, parameter_bytes=loaded)


def _in_teams(shards: Sequence[ShardFacts], num_batches: int, offer: Offer) -> Estimate:
    count = min(len(offer.devices), num_batches)
    each = -(-num_batches // count)
    copied, again = _of_updates(shards, offer, split=False)
    copied += 2 * _state(shards) + _gradients(shards) + each * 3 * sum(_crossing(shards))
    behind = (count - 1) * each * max(shard.seconds for shard in shards)
    return Estimate(
        way=DATA_PARALLEL,
        seconds=each * _seconds(shards) + behind + copied / offer.bytes_per_second,
        parameter_bytes=2 * count * _state(shards) + again,
        teams=count,
    )


def pipelined(shards: Sequence[ShardFacts], num_batches: int, offer: Offer) -> Estimate:
    """Each shard on one device."""
    ends = neighbours(shards, len(offer.devices), offer.budget_bytes)
    return _dealt(shards, num_batches, offer) if ends is None else _in_runs(shards, num_batches, offer, ends)


def fits(shards: Sequence[ShardFacts], budget_bytes: int) -> bool:
    """Whether parameters, gradients and the largest unit of these shards fit a device together."""
    return _state(shards) + _gradients(shards) + max(shard.work_bytes for shard in shards) <= budget_bytes


def neighbours(shards: Sequence[ShardFacts], num_devices: int, budget_bytes: int) -> list[int] | None:
    """Runs of neighbouring shards, one for each device, whose slowest is the fastest there can be.

    Returns:
        After which shard each run ends; fewer runs where there are fewer shards; None if no runs fit the devices.
    """
    count = len(shards)
    seconds = [list(_runs_to(shards, last, budget_bytes)) for last in range(count + 1)]
    least = [0.0] + [math.inf] * count  # of the first shards, as many as the index says: their slowest run, cut best
    begins: list[list[int]] = []  # where the last of these runs begins
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
    for begin in reversed(begins[1:]):
        ends.append(begin[ends[-1]])
    return ends[::-1]


def _runs_to(shards: Sequence[ShardFacts], last: int, budget_bytes: int) -> Iterator[tuple[float, int]]:
    """Seconds and first shard of each run that ends before `last` and fits a device."""
    seconds, held, work = 0.0, 0, 0
    for first in reversed(range(last)):
        shard = shards[first]
        seconds += shard.seconds
        held += shard.state_bytes + shard.gradient_bytes
        work = max(work, shard.work_bytes)
        if held + work > budget_bytes:
            return
        yield seconds, first


def _in_runs(shards: Sequence[ShardFacts], num_batches: int, offer: Offer, ends: Sequence[int]) -> Estimate:
    copied, loaded = 0, 0
    crossing = _crossing(shards)
    runs = [slice(first, last) for first, last in pairwise([0, *ends])]
    stages = [
        _seconds(shards[run]) + (crossing[run.start] if run.start else 0) / offer.bytes_per_second for run in runs
    ]
    for run in runs:
        # A device has its own shards' state in the update too.
        more, again = _of_updates(shards[run], offer, split=False)
        copied, loaded = copied + more, loaded + again
    seconds = sum(stages) + (num_batches - 1) * max(stages) + copied / offer.bytes_per_second
    homes = [device for device, run in zip(offer.devices, runs, strict=False) for _ in shards[run]]
    return Estimate(way=PIPELINED, seconds=seconds, parameter_bytes=loaded, homes=tuple(homes))


def _dealt(shards: Sequence[ShardFacts], num_batches: int, offer: Offer) -> Estimate:
    num_devices = min(len(offer.devices), len(shards))
    places = _deal(shards, num_batches, num_devices, offer)
    loaded = 2 * _state(shards)
    busiest = 0.0
    crossing = _crossing(shards)
    for device in range(num_devices):
        own = [index for index, place in enumerate(places) if place == device]
        facts = [shards[index] for index in own]
        updating, again = _of_updates(facts, offer, split=False)
        copied = 2 * _state(facts) + num_batches * 2 * sum(crossing[index] for index in own) + updating
        computing = num_batches * _seconds(facts) * max(1.0, num_devices / num_batches)
        busiest, loaded = max(busiest, computing + copied / offer.bytes_per_second), loaded + again
    filling = (num_devices - 1) * max(shard.seconds for shard in shards)
    homes = tuple(offer.devices[place] for place in places)
    return Estimate(way=PIPELINED, seconds=busiest + filling, parameter_bytes=loaded, homes=homes, is_dealt=True)


def _deal(shards: Sequence[ShardFacts], num_batches: int, num_devices: int, offer: Offer) -> list[int]:
    """Each shard to the device that has the least to do so far, in turn where that is equal.

    Small shards and large ones often alternate, attention and what follows it: dealt in turn, one device would have all large
    ones.
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


def _of_updates(shards: Sequence[ShardFacts], offer: Offer, *, split: bool) -> tuple[int, int]:
    """Bytes that the updates of shards on one device copy, and those of parameters among them that are loaded."""
    optimizer = sum(shard.optimizer_bytes for shard in shards)
    work = max(shard.work_bytes for shard in shards)
    if _state(shards) + _gradients(shards) + optimizer + work <= offer.budget_bytes:
        return 0, 0
    again = _state(shards) if split else 0
    return 2 * optimizer + _state(shards) + again + (_gradients(shards) if split else 0), again


def _crossing(shards: Sequence[ShardFacts]) -> list[int]:
    """Bytes that cross the cut before each shard, forward and back."""
    back = [0, *(shard.handed_bytes for shard in shards[:-1])]
    return [shard.value_bytes + handed for shard, handed in zip(shards, back, strict=True)]


def _seconds(shards: Sequence[ShardFacts]) -> float:
    return sum(shard.seconds for shard in shards)


def _state(shards: Sequence[ShardFacts]) -> int:
    return sum(shard.state_bytes for shard in shards)


def _gradients(shards: Sequence[ShardFacts]) -> int:
    return sum(shard.gradient_bytes for shard in shards)
