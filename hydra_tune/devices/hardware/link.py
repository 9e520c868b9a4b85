"""Speed of copies between a device and the host, assumed or measured, and speed of the host's memory.

Decisions before a run use the assumed speed (`link_of`), because a decision by measurement could differ from run to run
(note in `shard/cost/compute_estimate.py`). Two decisions use measured speeds: where updates run, with
`optimizer_placement="auto"` (`shard/partition/partition_planner.py`), and on GPUs the choice of activations to keep
(`shard/partition/plan_cache.py`). `pool/runtime/cut_budget.py` gives the planner of shards a function for either speed; the
speeds are measured when the function is first called. `survey.py` measures the links for `hydra-tune devices`.
`train/timing/step_timing.py` assumes a speed where the timed steps copied nothing that tells the speed.
`memory/link_meter.py` and `pool/dry_run/report.py` make `LinkCostModel`s of measured copies; `devices/weightless.py`,
`shard/cost/activation_policy.py` and `train/timing/fake_trial.py` compute with a `LinkCostModel`. The module must not hold
memory for trials.

Note: threads. `measured_link`, `link_rates` and `crossing_rate` measure on threads of their own, as a device's worker would;
`dram_bandwidth` measures on the calling thread.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.device import Device
from hydra_tune.devices.single_thread import SingleThreadExecutor

T = TypeVar("T")

_LARGE_BYTES, _SMALL_BYTES = 4 << 20, 64
_ROUNDS = 3
_MOST_BYTES = 64 << 20  # larger than most caches, and long enough to hide the fixed cost of a copy
_PART = 4  # a block of `link_rates` or `crossing_rate` takes at most this part of the budget
_BYTES_PER_SECOND = 4e9  # of a core that copies uncached memory
_SECONDS_PER_BLOCK = 2e-5  # overhead of each copy


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCostModel:
    """Cost of copies between a device and the host.

    Attributes:
        bytes_per_second: rate of a large copy.
        seconds_per_block: fixed cost of each copy.
    """

    bytes_per_second: float
    seconds_per_block: float = 0.0

    def seconds(self, nbytes: int, blocks: int) -> float:
        """Seconds for copying blocks one way, `nbytes` in total."""
        return nbytes / self.bytes_per_second + blocks * self.seconds_per_block


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Bytes per second between a device and the host, for large copies.

    Attributes:
        to_device: rate without a copy in the opposite direction.
        to_host: rate without a copy in the opposite direction.
        both_ways: rate of two simultaneous copies in opposite directions, both counted.
    """

    to_device: float
    to_host: float
    both_ways: float


def link_of(device: Device) -> LinkCostModel | None:
    """Return a device's assumed link; None for a GPU, whose copy times are not comparable with seconds of the host."""
    if not isinstance(device, CpuDevice):
        return None
    pace = _BYTES_PER_SECOND if device.bandwidth is None else min(_BYTES_PER_SECOND, device.bandwidth)
    return LinkCostModel(bytes_per_second=pace, seconds_per_block=_SECONDS_PER_BLOCK)


def measured_link(device: Device) -> LinkCostModel:
    """Measure the link of a device, whose memory is free again afterwards."""

    def measured() -> LinkCostModel:
        # The time of a tiny copy is almost exactly the fixed cost.
        per_block = _seconds(device, _SMALL_BYTES)
        large = max(_seconds(device, _LARGE_BYTES) - per_block, 1e-9)
        return LinkCostModel(bytes_per_second=_LARGE_BYTES / large, seconds_per_block=per_block)

    # On a worker: on a GPU, the copies are then ordered after the last use of the memory that they get.
    return _on_worker(device, measured)


def link_rates(device: Device) -> LinkRates:
    """Measure the link of a device that no pool is using; takes up to twice 64 MiB of the device, and as much of the host."""
    return _on_worker(device, lambda: _rates(device))


def crossing_rate(source: Device, target: Device) -> float:
    """Measure bytes per second from a device's memory to the memory of a device in whose reach the source is."""
    nbytes = min(_size(source), _size(target))
    # Each device's own worker allocates, as in a pool: on a GPU, the memory then belongs to that device's compute
    # stream.
    data = _on_worker(source, lambda: _zeros(source, nbytes))

    def measured() -> float:
        here = _zeros(target, nbytes)
        return nbytes / _fastest(lambda: target.take_over(source, [(data, here)]))

    return _on_worker(target, measured)


def _rates(device: Device) -> LinkRates:
    nbytes = _size(device)
    # Zeroed, so that no page is touched for the first time during a measured copy.
    hosts = device.on_host(lambda: [device.host_empty(nbytes).zero_() for _ in range(2)])
    blocks = [_zeros(device, nbytes) for _ in range(2)]
    inward, outward = [(hosts[0], blocks[0])], [(blocks[1], hosts[1])]

    def both() -> None:
        copies = [device.start_load(inward), device.start_spill(outward)]
        for copy in copies:
            copy.wait()

    return LinkRates(
        to_device=nbytes / _fastest(lambda: device.load(inward)),
        to_host=nbytes / _fastest(lambda: device.spill(outward)),
        both_ways=2 * nbytes / _fastest(both),
    )


def _on_worker(device: Device, function: Callable[[], T]) -> T:
    def run() -> T:
        with device.worker():
            return function()

    with SingleThreadExecutor(f"hydra-measure-{device.name}") as thread:
        return thread.submit(run).result()


def _size(device: Device) -> int:
    return max(1, min(_MOST_BYTES, device.budget_bytes // _PART))


def _zeros(device: Device, nbytes: int) -> Tensor:
    # The pages are touched before the measured copies.
    data = device.empty(nbytes).zero_()
    device.synchronize()
    return data


def _seconds(device: Device, nbytes: int) -> float:
    host, data = device.on_host(lambda: device.host_empty(nbytes).zero_()), _zeros(device, nbytes)
    return _fastest(lambda: device.load([(host, data)]))


@functools.cache
def dram_bandwidth() -> float:
    """Return the host's memory bandwidth in bytes per second, reads plus writes; measured once per process.

    The bandwidth is that of a core if the calling thread has a single intra-op thread, as a preparer has.
    """
    source, target = (torch.zeros(_MOST_BYTES, dtype=torch.uint8) for _ in range(2))
    return 2 * _MOST_BYTES / _fastest(lambda: target.copy_(source))


def _fastest(copy: Callable[[], object]) -> float:
    round_seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        copy()
        round_seconds.append(time.perf_counter() - start)
    # The fastest round is the least disturbed. The floor keeps a rate finite where the clock is too coarse.
    return max(min(round_seconds), 1e-9)
