"""Which devices there are, and what of them the pool may use.

`"auto"` takes every visible GPU, or one CPU device per core where there is none.
"""

import os
import re
from typing import Any

import psutil
import pynvml
import torch

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.cuda import CudaDevice
from hydra_tune.devices.device import Device
from hydra_tune.errors import ConfigError
from hydra_tune.quantities import format_bytes, parse_bytes

_RESERVE = 0.08  # of a GPU's free memory: CUDA libraries' workspaces and fragmentation
_CPU_SHARE = 0.5  # of the free host memory that CPU devices take together; the rest holds spilled state
_MOST_CPU_DEVICES_PER_CORE = 32  # each has threads of its own; more than cores is of use in tests only
_CPU = re.compile(r"cpu(?::(\d+))?")
_CUDA = re.compile(r"cuda(?::(\d+(?:,\d+)*))?")


def open_devices(
    devices: str = "auto", device_memory: str | int | None = None, link_bandwidth: str | int | None = None
) -> list[Device]:
    """Open the devices a text names.

    Args:
        devices: "auto"; "cuda" for all GPUs; "cuda:0,2" for some; "cpu:2" for two CPU devices.
        device_memory: budget of each, e.g. "11GiB"; None for what is free, less a reserve.
        link_bandwidth: what the copies of CPU devices are slowed down to, e.g. "200MB/s"; None: not at all.

    Raises:
        ConfigError: not a device text, no such GPU, or more memory than the device has.
    """
    budget = None if device_memory is None else parse_bytes(device_memory, what="device_memory")
    if devices == "auto":
        devices = "cuda" if torch.cuda.is_available() else f"cpu:{num_cores()}"
    cpu, cuda = _CPU.fullmatch(devices), _CUDA.fullmatch(devices)
    if cpu:
        return _open_cpu(int(cpu[1] or 1), budget, parse_bandwidth(link_bandwidth))
    if cuda:
        if link_bandwidth is not None:
            raise ConfigError(
                f"link_bandwidth slows CPU devices down, but devices is {devices!r}; leave it out, or use cpu:N"
            )
        return _open_cuda(cuda[1], budget)
    raise ConfigError(f"devices must be 'auto', 'cuda', 'cuda:0,1' or 'cpu:2', not {devices!r}")


def num_cores() -> int:
    """Cores this process may use; not every system can tell them from those there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse_bandwidth(text: str | int | None, what: str = "link_bandwidth") -> int | None:
    """Bytes a second, from a text such as "200MB/s".

    Raises:
        ConfigError: not that.
    """
    if text is None:
        return None
    return parse_bytes(text.removesuffix("/s") if isinstance(text, str) else text, what=what)


def _open_cpu(count: int, budget: int | None, link_bandwidth: int | None) -> list[Device]:
    if count < 1:
        raise ConfigError("devices='cpu:N' needs N of at least 1")
    cores, most = num_cores(), num_cores() * _MOST_CPU_DEVICES_PER_CORE
    if count > most:
        raise ConfigError(
            f"devices='cpu:{count}' asks for more than {most} CPU devices, on {cores} cores; use cpu:{cores}"
        )
    available = psutil.virtual_memory().available
    if budget is not None and budget * count > available:
        raise ConfigError(
            f"{count} CPU devices of {format_bytes(budget)} need more memory than is free "
            f"({format_bytes(available)}); lower device_memory or the number of devices"
        )
    share = budget or int(available * _CPU_SHARE / count)
    return [CpuDevice(index, share, link_bandwidth) for index in range(count)]


def _open_cuda(wanted: str | None, budget: int | None) -> list[Device]:
    found = torch.cuda.device_count()
    if found == 0:
        raise ConfigError("devices='cuda' but no GPU is visible to torch; use devices='cpu:N', or install a CUDA build")
    indices = list(range(found)) if wanted is None else [int(index) for index in wanted.split(",")]
    for index in indices:
        if index >= found:
            raise ConfigError(f"devices names GPU {index}, but there are {found}, numbered from 0")
    if len(set(indices)) < len(indices):
        raise ConfigError(f"devices='cuda:{wanted}' names a GPU twice")
    return [_open_gpu(index, budget) for index in indices]


def _open_gpu(index: int, budget: int | None) -> Device:
    free, total = gpu_memory(index)
    if budget is not None and budget > total:
        raise ConfigError(f"device_memory is {format_bytes(budget)}, but cuda:{index} has {format_bytes(total)}")
    device = CudaDevice(index, budget or int(free * (1 - _RESERVE)))
    fraction = min(1.0, device.budget_bytes / total * (1 + _RESERVE))
    torch.cuda.set_per_process_memory_fraction(fraction, index)
    return device


def gpu_memory(index: int) -> tuple[int, int]:
    """Free and total bytes of a GPU, from NVML by its PCI address, which counts other processes' use without a context."""
    properties: Any = torch.cuda.get_device_properties(index)  # torch's stub lacks the PCI fields
    address = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # a GPU that is not NVIDIA's
        return torch.cuda.mem_get_info(index)
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByPciBusId(address.encode()))
        return int(memory.free), int(memory.total)
    finally:
        pynvml.nvmlShutdown()
