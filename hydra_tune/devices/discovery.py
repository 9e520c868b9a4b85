"""Which devices there are, and what of them the pool may use.

`"auto"` takes every visible GPU, or one CPU device per core where there is none. A GPU that is named several times is several
devices, each with a budget of its own, so that what needs several GPUs can be tried on one.
"""

import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from hydra_tune.devices import nvml
from hydra_tune.devices.caps import capped
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.cuda import CudaDevice, exclusive_allocator
from hydra_tune.devices.device import Device
from hydra_tune.devices.libraries import LIBRARY_BYTES
from hydra_tune.devices.nvml import NvmlError
from hydra_tune.errors import ConfigError
from hydra_tune.quantities import format_bytes, parse_bytes

_RESERVE = 0.08  # of a GPU's free memory: fragmentation, and kernels' workspaces that no pilot on the host has seen
_WHOLE = 1.25  # of what CUDA calls all of a GPU's memory; NVML counts a few hundredths more
_CPU_SHARE = 0.5  # of the free host memory that CPU devices take together; the rest holds spilled state
_MOST_CPU_DEVICES_PER_CORE = 32  # each has threads of its own; more than cores is of use in tests only
_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_CPU = re.compile(r"cpu(?::(\d+))?")
_CPU_NAME, _CUDA_NAME = re.compile(r"cpu:(\d+)"), re.compile(r"cuda:(\d+)")
_CUDA = re.compile(r"cuda(?::(\d+(?:,\d+)*))?")


def open_devices(
    devices: str = "auto", device_memory: str | int | None = None, link_bandwidth: str | int | None = None
) -> list[Device]:
    """Open the devices a text names.

    Args:
        devices: "auto"; "cuda" for all GPUs; "cuda:0,2" for some; "cuda:0,0" for two devices, "cuda:0/0" and "cuda:0/1", on
            one GPU; "cpu:2" for two CPU devices.
        device_memory: budget of each, e.g. "11GiB"; None for what is free, less a reserve, shared by the devices on a GPU.
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


def open_device(
    name: str, device_memory: str | int | None = None, link_bandwidth: str | int | None = None, *, cpu_budget: int
) -> Device:
    """Open one device by its name.

    Args:
        name: "cuda:1", "cpu:3".
        device_memory: as of `open_devices`.
        link_bandwidth: likewise.
        cpu_budget: of a CPU device, where `device_memory` is None.

    Raises:
        ConfigError: there is no such device, or it has less memory.
    """
    cpu, cuda = _CPU_NAME.fullmatch(name), _CUDA_NAME.fullmatch(name)
    budget = None if device_memory is None else parse_bytes(device_memory, what="device_memory")
    if cpu:
        (device,) = _open_cpu(1, budget or cpu_budget, parse_bandwidth(link_bandwidth), first=int(cpu[1]))
        return device
    if cuda:
        return _open_cuda(cuda[1], budget)[0]
    raise ConfigError(f"a device's name is like 'cuda:1' or 'cpu:3', not {name!r}")


def open_planned_devices(
    devices: str, device_memory: str | int | None, link_bandwidth: str | int | None
) -> list[Device]:
    """Open devices to plan for: where they are not there, or not as large, CPU devices stand for them and take no memory.

    Args:
        devices: as of `open_devices`; only devices that are counted ("cuda:0,1", "cpu:8") can be stood for,
        device_memory: and only with this.
        link_bandwidth: as of `open_devices`.

    Raises:
        ConfigError: not a device text, or devices that are not there and cannot be stood for.
    """
    try:
        return open_devices(devices, device_memory, link_bandwidth)
    except ConfigError as error:
        cpu, cuda = _CPU.fullmatch(devices), _CUDA.fullmatch(devices)
        count = int(cpu[1] or 1) if cpu else len(cuda[1].split(",")) if cuda and cuda[1] else 0
        if not count:
            raise ConfigError(f"{error}; to plan for GPUs that are not here, say which: devices='cuda:0,1'") from error
        if device_memory is None:
            raise ConfigError(f"{error}; to plan for devices that are not here, give device_memory") from error
        budget = parse_bytes(device_memory, what="device_memory")
        return [CpuDevice(index, budget, parse_bandwidth(link_bandwidth)) for index in range(count)]


def device_kind(device: Device) -> str:
    """Devices of one kind run one step in the same time and memory, and draw the same random numbers for it."""
    place = device.torch_device
    if place.type != "cuda":
        return type(device).__name__
    found = torch.cuda.get_device_properties(place)  # parts of one GPU may have its name, and fewer multiprocessors
    return f"{found.name}, {found.multi_processor_count} multiprocessors"


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


def _open_cpu(count: int, budget: int | None, link_bandwidth: int | None, first: int = 0) -> list[Device]:
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
    return [CpuDevice(index, share, link_bandwidth) for index in range(first, first + count)]


def _open_cuda(wanted: str | None, budget: int | None) -> list[Device]:
    found = torch.cuda.device_count()
    if found == 0:
        raise ConfigError("devices='cuda' but no GPU is visible to torch; use devices='cpu:N', or install a CUDA build")
    indices = list(range(found)) if wanted is None else [int(index) for index in wanted.split(",")]
    for index in indices:
        if index >= found:
            raise ConfigError(f"devices names GPU {index}, but there are {found}, numbered from 0")
    let_segments_grow()
    shares: dict[int, tuple[int, float]] = {}
    for index, count in Counter(indices).items():
        with exclusive_allocator():
            torch.cuda.synchronize(
                index
            )  # has a context made, which takes hundreds of MiB that would be counted as free
        free, total = gpu_memory(index)
        each, fraction = gpu_share(index, count, budget, free, total, torch.cuda.memory_allocated(index))
        shares[index] = each, fraction / count
    return [
        CudaDevice(index, shares[index][0], part, capped(index, shares[index][1]), gives_back=budget is None)
        for index, part in gpu_parts(indices)
    ]


def let_segments_grow() -> bool:
    """Have the caching allocator grow its segments in place, so that memory freed in small pieces serves a large one.

    Shards of all sizes come and go, and segments of fixed sizes would be left in pieces of which none is large enough.

    Returns:
        Whether it was asked to: not where the user has set the allocator up, nor where torch does not know how.
    """
    if any(os.environ.get(name) for name in _ALLOCATOR_SETTINGS):
        return False
    try:
        # There is no public way but the environment, which is read once, and may have been by now. Later versions of torch warn
        # and name another function, no more public, which earlier ones lack.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")  # noqa: SLF001
    except (AttributeError, RuntimeError):
        return False
    return True


def gpu_parts(indices: Sequence[int]) -> list[tuple[int, int | None]]:
    """The devices that a list of GPUs names: each with its number among those on its GPU, or None if it is the only one."""
    counts, seen = Counter(indices), Counter[int]()
    found: list[tuple[int, int | None]] = []
    for index in indices:
        found.append((index, seen[index] if counts[index] > 1 else None))
        seen[index] += 1
    return found


def gpu_share(index: int, count: int, budget: int | None, free: int, total: int, own: int = 0) -> tuple[int, float]:
    """What each of some devices on one GPU may use, and the part of its memory to which the allocator is held for all of them.

    Args:
        index: of the GPU.
        count: of devices on it.
        budget: what each is to have; None: their share of what is free.
        free: bytes of the GPU that nobody uses.
        total: all of its bytes.
        own: bytes that this process has tensors in by now, which are not free either.

    Raises:
        ConfigError: that is more than there is.
    """
    if budget is not None and budget * count > total:
        asked = format_bytes(budget) if count == 1 else f"{format_bytes(budget)} for each of {count} devices"
        raise ConfigError(f"device_memory is {asked}, but cuda:{index} has {format_bytes(total)}")
    libraries = count * LIBRARY_BYTES
    spare = min(max(int(free * _RESERVE), libraries), free // 2)
    each = budget or (free - spare) // count
    return each, min(1.0, (each * count * (1 + _RESERVE) + libraries + own) / total)


def gpu_memory(index: int) -> tuple[int, int]:
    """Free and total bytes of a GPU, from NVML by its PCI address, which counts other processes' use without a context.

    Of a part of a GPU (MIG) NVML tells by that address what the whole has; then CUDA is asked.
    """
    properties: Any = torch.cuda.get_device_properties(index)  # torch's stub lacks the PCI fields
    address = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        free, total = nvml.memory(address)
    except NvmlError:  # a GPU that is not NVIDIA's, or a driver that does not answer
        return torch.cuda.mem_get_info(index)
    is_part = total > _WHOLE * properties.total_memory
    return torch.cuda.mem_get_info(index) if is_part else (free, total)
