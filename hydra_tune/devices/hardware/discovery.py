"""Discovery of devices, and of the memory that the pool may use on them.

`"auto"` takes every visible GPU, or one CPU device per usable core on a machine without GPUs. A GPU named several times
becomes several devices, each with its own budget, so that code for several GPUs can be tried on a single GPU.
`ExecutorSettings` (`pool/runtime/settings.py`) opens all devices when a pool starts, or stand-ins for a pool that only plans;
`HydraExecutor.add_device` (`executor.py`) opens a further device, and `survey.py` opens devices for `hydra-tune devices`.
`pool/pool.py`, `pool/runtime/cut_budget.py` and `pool/devices/device_reservation.py` compare devices by `device_kind`, and
`pool/runtime/option_checks.py` and `HydraExecutor` parse bandwidths. The module must not hold memory for trials, or know
blocks, models or trials.
"""

import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import psutil
import torch

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.cuda import CudaDevice, exclusive_allocator
from hydra_tune.devices.device import Device
from hydra_tune.devices.hardware import nvml
from hydra_tune.devices.hardware.caps import capped
from hydra_tune.devices.hardware.libraries import LIBRARY_BYTES
from hydra_tune.devices.hardware.nvml import NvmlError
from hydra_tune.errors import ConfigError
from hydra_tune.quantities import format_bytes, parse_bytes

_RESERVE = 0.08  # of a GPU's free memory, for fragmentation and for workspaces that a pilot on the host cannot see
_WHOLE = 1.25  # of CUDA's total memory of a GPU; NVML reports a few percent more for a whole GPU
_CPU_SHARE = 0.5  # of the free host memory, for all CPU devices together; the rest holds spilled state
_MOST_CPU_DEVICES_PER_CORE = 32  # each has its own threads; more devices than cores help only tests
_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_CPU = re.compile(r"cpu(?::(\d+))?")
_CPU_NAME, _CUDA_NAME = re.compile(r"cpu:(\d+)"), re.compile(r"cuda:(\d+)")
_CUDA = re.compile(r"cuda(?::(\d+(?:,\d+)*))?")


def open_devices(
    devices: str = "auto", device_memory: str | int | None = None, link_bandwidth: str | int | None = None
) -> list[Device]:
    """Open the devices named by a text.

    Args:
        devices: "auto"; "cuda" for all GPUs; "cuda:0,2" for some; "cuda:0,0" for two devices, "cuda:0/0" and
            "cuda:0/1", on one GPU; "cpu:2" for two CPU devices.
        device_memory: budget of each device, e.g. "11GiB"; None for a GPU's free memory less a reserve, shared by the
            devices on the GPU, or for half of the free host memory, shared by the CPU devices.
        link_bandwidth: simulated bandwidth of the copies of CPU devices, e.g. "200MB/s"; None: not limited.

    Raises:
        ConfigError: not a device text, no such GPU, too many CPU devices, more memory than a GPU has or the host has free, or
            a bandwidth for GPUs.
    """
    budget = None if device_memory is None else parse_bytes(device_memory, what="device_memory")
    if devices == "auto":
        devices = "cuda" if torch.cuda.is_available() else f"cpu:{num_cores()}"
    cpu, cuda = _CPU.fullmatch(devices), _CUDA.fullmatch(devices)
    if cpu:
        return _open_cpu(int(cpu[1] or 1), budget, parse_bandwidth(link_bandwidth))
    if cuda:
        return _open_cuda(cuda[1], budget, link_bandwidth)
    raise ConfigError(f"devices must be 'auto', 'cuda', 'cuda:0,1' or 'cpu:2', not {devices!r}")


def open_device(
    name: str, device_memory: str | int | None = None, link_bandwidth: str | int | None = None, *, cpu_budget: int
) -> Device:
    """Open a device by a name such as "cuda:1" or "cpu:3"; other arguments are as of `open_devices`.

    A CPU device gets the budget `cpu_budget`, in bytes, where `device_memory` is None.

    Raises:
        ConfigError: there is no such device, the device has less memory, or a bandwidth for a GPU.
    """
    cpu, cuda = _CPU_NAME.fullmatch(name), _CUDA_NAME.fullmatch(name)
    budget = None if device_memory is None else parse_bytes(device_memory, what="device_memory")
    if cpu:
        (device,) = _open_cpu(1, budget or cpu_budget, parse_bandwidth(link_bandwidth), first=int(cpu[1]))
        return device
    if cuda:
        return _open_cuda(cuda[1], budget, link_bandwidth)[0]
    raise ConfigError(f"a device's name is like 'cuda:1' or 'cpu:3', not {name!r}")


def open_planned_devices(
    devices: str, device_memory: str | int | None, link_bandwidth: str | int | None
) -> list[Device]:
    """Open devices for planning; CPU devices, which take no memory, stand in for devices that `open_devices` refuses.

    Args:
        devices: as of `open_devices`; stand-ins need a text with a count of devices ("cuda:0,1", "cpu:8").
        device_memory: as of `open_devices`; required for stand-ins.
        link_bandwidth: as of `open_devices`.

    Raises:
        ConfigError: not a device text, or refused devices without possible stand-ins.
    """
    try:
        return open_devices(devices, device_memory, link_bandwidth)
    except ConfigError as error:
        cpu, cuda = _CPU.fullmatch(devices), _CUDA.fullmatch(devices)
        count = int(cpu[1] or 1) if cpu else len(cuda[1].split(",")) if cuda and cuda[1] else 0
        if cpu and not count:
            raise
        if not count:
            raise ConfigError(f"{error}; to plan for absent GPUs, number them: devices='cuda:0,1'") from error
        if device_memory is None:
            raise ConfigError(f"{error}; to plan for absent devices, give device_memory") from error
        budget = parse_bytes(device_memory, what="device_memory")
        return [CpuDevice(index, budget, parse_bandwidth(link_bandwidth)) for index in range(count)]


def device_kind(device: Device) -> str:
    """Return the kind of a device.

    Devices of the same kind need equal time and memory for a step, and draw equal random numbers in the step.
    """
    place = device.torch_device
    if place.type != "cuda":
        return type(device).__name__
    # Both, because a part of a GPU may have the GPU's name, but has fewer multiprocessors.
    properties = torch.cuda.get_device_properties(place)
    return f"{properties.name}, {properties.multi_processor_count} multiprocessors"


def num_cores() -> int:
    """Return the number of cores that this process may use, or of all cores where the system cannot tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse_bandwidth(text: str | int | None, what: str = "link_bandwidth") -> int | None:
    """Parse a text such as "200MB/s" to bytes per second.

    Raises:
        ConfigError: not a bandwidth.
    """
    if text is None:
        return None
    return parse_bytes(text.removesuffix("/s") if isinstance(text, str) else text, what=what)


def _open_cpu(count: int, budget: int | None, link_bandwidth: int | None, first: int = 0) -> list[Device]:
    if count < 1:
        raise ConfigError(
            f"devices='cpu:{count}' asks for {count} CPU devices, which must be at least 1; for one give cpu:1"
        )
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


def _open_cuda(wanted: str | None, budget: int | None, link_bandwidth: str | int | None) -> list[Device]:
    if link_bandwidth is not None:
        name = "cuda" if wanted is None else f"cuda:{wanted}"
        raise ConfigError(
            f"link_bandwidth={link_bandwidth!r} is for CPU devices only, and {name!r} names GPUs; remove link_bandwidth, or "
            "use cpu:N"
        )
    num_visible = torch.cuda.device_count()
    if num_visible == 0:
        raise ConfigError("devices='cuda' but no GPU is visible to torch; use devices='cpu:N', or install a CUDA build")
    indices = list(range(num_visible)) if wanted is None else [int(index) for index in wanted.split(",")]
    for index in indices:
        if index >= num_visible:
            raise ConfigError(
                f"devices names GPU {index}, but torch sees {num_visible}, numbered from 0; name visible GPUs only"
            )
    let_segments_grow()
    shares: dict[int, tuple[int, float]] = {}
    for index, count in Counter(indices).items():
        with exclusive_allocator():
            torch.cuda.synchronize(index)  # creates the CUDA context first: its hundreds of MiB must not count as free
        free, total = gpu_memory(index)
        each, fraction = gpu_share(index, count, budget, free, total, torch.cuda.memory_allocated(index))
        shares[index] = each, fraction / count
    devices: list[Device] = []
    with ExitStack() as opened:  # closed again if a later device cannot be opened
        for index, part in gpu_parts(indices):
            closed = opened.callback(capped(index, shares[index][1]))
            devices.append(CudaDevice(index, shares[index][0], part, closed, gives_back=budget is None))
            opened.callback(devices[-1].close)
        opened.pop_all()
    return devices


def let_segments_grow() -> bool:
    """Let the caching allocator grow segments in place, so that memory freed in small pieces serves a large request.

    Shards of all sizes come and go; segments of fixed sizes would end up in pieces, with no piece large enough.

    Returns:
        Whether the setting was made: False where the user has configured the allocator, or torch lacks the setting.
    """
    if any(os.environ.get(name) for name in _ALLOCATOR_SETTINGS):
        return False
    try:
        # The only public way is the environment, which torch reads once, possibly earlier. Later versions of torch warn
        # and name another private function, which earlier versions lack.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")  # noqa: SLF001
    except (AttributeError, RuntimeError):
        return False
    return True


def gpu_parts(indices: Sequence[int]) -> list[tuple[int, int | None]]:
    """Return the devices of a list of GPUs: pairs of GPU and number on the GPU, None for a GPU's only device."""
    counts, num_named = Counter(indices), Counter[int]()
    parts: list[tuple[int, int | None]] = []
    for index in indices:
        parts.append((index, num_named[index] if counts[index] > 1 else None))
        num_named[index] += 1
    return parts


def gpu_share(index: int, count: int, budget: int | None, free: int, total: int, own: int = 0) -> tuple[int, float]:
    """Return each device's budget on a GPU, and the GPU's memory fraction for all of the devices together.

    Args:
        index: index of the GPU, for errors.
        count: number of devices on the GPU.
        budget: the requested budget of each device in bytes; None: an equal share of the free memory less a reserve.
        free: free bytes of the GPU.
        total: total bytes of the GPU.
        own: bytes of this process's tensors, which are not free either.

    Raises:
        ConfigError: the budgets exceed the GPU's memory.
    """
    if budget is not None and budget * count > total:
        request_text = format_bytes(budget) if count == 1 else f"{format_bytes(budget)} for each of {count} devices"
        raise ConfigError(
            f"device_memory is {request_text}, but cuda:{index} has {format_bytes(total)}; lower device_memory"
        )
    # A part for each device, because each has streams of its own, and cuBLAS keeps a workspace for each stream.
    libraries = count * LIBRARY_BYTES
    # Never more than half of the free memory, or a nearly full GPU would get no budget at all.
    spare = min(max(int(free * _RESERVE), libraries), free // 2)
    each = budget or (free - spare) // count
    # The cap exceeds the budgets: fragmentation and libraries also take memory from the allocator, outside the ledger.
    return each, min(1.0, (each * count * (1 + _RESERVE) + libraries + own) / total)


def gpu_memory(index: int) -> tuple[int, int]:
    """Return free and total bytes of a GPU, from NVML by PCI address, other processes' use included.

    NVML needs no CUDA context. For a part of a GPU (MIG), NVML reports the whole GPU's memory; then, and where NVML does not
    answer, the figures come from CUDA.
    """
    properties: Any = torch.cuda.get_device_properties(index)  # torch's stub lacks the PCI fields
    address = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        free, total = nvml.memory(address)
    except NvmlError:  # not an NVIDIA GPU, or the driver does not answer
        return torch.cuda.mem_get_info(index)
    is_part = total > _WHOLE * properties.total_memory
    return torch.cuda.mem_get_info(index) if is_part else (free, total)
