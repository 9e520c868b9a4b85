"""The budget for cutting models, from a pool's devices and options.

`ExecutorSettings.open_pool` (`settings.py`) makes the budget when the pool starts; `PlanLibrary`
(`shard/partition/plan_cache.py`) cuts each model of the pool by the budget. One budget serves all devices: the memory is
the smallest device's, the alignment suits every device, and the speed of copies is the first device's. The module must
not measure anything when the pool starts: speeds and the link are measured at the first question.
"""

import functools
import math
from collections.abc import Sequence
from typing import Literal

from hydra_tune.devices.device import Device
from hydra_tune.devices.hardware.discovery import device_kind, num_cores
from hydra_tune.devices.hardware.link import dram_bandwidth, link_of, measured_link
from hydra_tune.shard.cost.optimizer_placement import MachineSpeeds
from hydra_tune.shard.partition.budget import ShardPlanConstraints
from hydra_tune.shard.partition.partitioner import NumShards


def budget_of(
    devices: Sequence[Device],
    *,
    trials: int,
    host_bytes: int,
    buffer_fraction: float | Literal["auto"],
    num_shards: NumShards,
    optimizer_placement: Literal["device", "host", "auto"],
    stand_for_gpus: bool = False,
) -> ShardPlanConstraints:
    """Return the budget for which every model of a pool is cut.

    At most `trials` are admitted at the same time, and share `host_bytes` of host memory. With `stand_for_gpus` the devices
    stand for GPUs, which may be absent from this machine.
    """
    has_cpu = any(device.torch_device.type == "cpu" for device in devices)
    return ShardPlanConstraints(
        budget_bytes=min(device.budget_bytes for device in devices),
        buffer_fraction=buffer_fraction,
        # A plan serves every device, so views are aligned for all of them.
        alignment=math.lcm(*(device.alignment for device in devices)),
        num_shards=num_shards,
        optimizer_placement=optimizer_placement,
        # Measured on first use and only once: most pools never choose a placement, and a measurement takes time.
        speeds=functools.cache(lambda: _speeds(devices, is_host=has_cpu)),
        # Rounded up: the trials in flight of the fullest device.
        trials=-(-trials // len(devices)),
        host_bytes=host_bytes // trials,
        has_link=stand_for_gpus or not all(device.keeps_tensors for device in devices),
        link=functools.cache(lambda: link_of(devices[0])),
        # A host beside GPUs is slower than the GPUs, so the host computes as little as possible. All cores may take part
        # (`host_threads`), because the host has nothing else to compute.
        checks_sample=not has_cpu,
        # Devices of two kinds may take other numbers of random draws for the same operator.
        counts_draws=len({device_kind(device) for device in devices}) == 1,
        # A plan serves every device, so the larger temporaries count in a pool of both kinds.
        uses_foreach=stand_for_gpus or any(not device.is_host for device in devices),
        host_threads=1 if has_cpu else num_cores(),
    )


def _speeds(devices: Sequence[Device], *, is_host: bool) -> MachineSpeeds:
    """Measure the speeds for choosing the placement of updates; takes time, so at the first question only."""
    return MachineSpeeds(
        link=measured_link(devices[0]),
        dram_bytes_per_second=dram_bandwidth(),
        is_host=is_host,
        # A CPU device keeps a core busy, so updates beside the devices need a further core.
        has_core=not is_host or num_cores() > len(devices),
    )
