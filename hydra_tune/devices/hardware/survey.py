"""Survey of the machine's devices before training: memory, the pool's budgets, and link speeds.

`hydra-tune devices` (`cli/commands/devices.py`) calls `survey`, which opens the devices like a pool, and closes the devices
again. The module imports torch, so the command imports the module only once the arguments are read. The module must not
hold memory for trials.
"""

import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from hydra_tune.devices.device import Device, DeviceCopyRoute
from hydra_tune.devices.hardware import nvml
from hydra_tune.devices.hardware.discovery import gpu_memory, open_devices
from hydra_tune.devices.hardware.link import LinkRates, crossing_rate, link_rates
from hydra_tune.devices.hardware.nvml import NvmlError


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedDevice:
    """A device.

    Attributes:
        name: e.g. "cpu:0" or "cuda:1".
        free_bytes: free memory in bytes: of the GPU, or of the host for CPU devices.
        budget_bytes: the budget that a pool would take, in bytes.
        compute_capability: of a GPU, e.g. "9.0"; None for CPU devices.
        rates: rates of the link to the host; None: not measured.
    """

    name: str
    model: str
    free_bytes: int
    total_bytes: int
    budget_bytes: int
    compute_capability: str | None
    rates: LinkRates | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPath:
    """The path from a GPU device to another GPU device.

    Attributes:
        is_direct: whether one copy suffices, on one GPU or because the source GPU can write to the target GPU; otherwise bytes
            go over the host.
        bytes_per_second: rate of a large copy; None: not direct, or not measured.
    """

    source: str
    target: str
    is_direct: bool
    bytes_per_second: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSurvey:
    """Result of a survey.

    Attributes:
        crossings: paths between each two GPU devices, in both directions.
        driver: version of the NVIDIA driver; None if NVML does not answer.
        notes: sentences that explain missing devices or facts.
    """

    devices: tuple[SurveyedDevice, ...]
    crossings: tuple[PeerPath, ...]
    driver: str | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return asdict(self)


def survey(devices: str = "auto", device_memory: str | int | None = None, *, measures: bool = True) -> DeviceSurvey:
    """Survey the machine.

    Args:
        devices: as of `open_devices`.
        device_memory: as of `open_devices`.
        measures: whether to measure links, which takes up to 128 MiB of each device in turn.

    Raises:
        ConfigError: as of `open_devices`.
    """
    # Read before devices are opened: a CUDA context takes hundreds of megabytes, and measurements take more.
    memory = {index: gpu_memory(index) for index in range(torch.cuda.device_count())}
    host = psutil.virtual_memory()
    opened = open_devices(devices, device_memory)
    try:
        surveyed = tuple(
            _found(device, memory.get(device.torch_device.index, (host.available, host.total)), measures=measures)
            for device in opened
        )
        crossings = _crossings(opened, measures=measures)
    finally:
        for device in opened:
            device.close()
    version, notes = _driver()
    return DeviceSurvey(devices=surveyed, crossings=crossings, driver=version, notes=notes)


def _found(device: Device, memory: tuple[int, int], *, measures: bool) -> SurveyedDevice:
    free, total = memory
    model, capability = _cpu_model(), None
    if device.torch_device.type == "cuda":
        properties = torch.cuda.get_device_properties(device.torch_device)
        model, capability = properties.name, f"{properties.major}.{properties.minor}"
    return SurveyedDevice(
        name=device.name,
        model=model,
        free_bytes=free,
        total_bytes=total,
        budget_bytes=device.budget_bytes,
        compute_capability=capability,
        rates=link_rates(device) if measures else None,
    )


def _crossings(devices: Sequence[Device], *, measures: bool) -> tuple[PeerPath, ...]:
    gpus = [device for device in devices if device.torch_device.type == "cuda"]
    paths = []
    for source in gpus:
        for target in gpus:
            if source is not target:
                is_direct = target.reach(source) is DeviceCopyRoute.NEAR
                rate = crossing_rate(source, target) if measures and is_direct else None
                crossing = PeerPath(source=source.name, target=target.name, is_direct=is_direct, bytes_per_second=rate)
                paths.append(crossing)
    return tuple(paths)


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"


def _driver() -> tuple[str | None, tuple[str, ...]]:
    num_visible, cuda_version = torch.cuda.device_count(), torch.version.cuda or torch.version.hip
    no_gpu_text = (
        "torch sees no GPU" if cuda_version else f"torch {torch.__version__} is built without CUDA, so it sees no GPU"
    )
    try:
        version, num_gpus = nvml.driver()
    except NvmlError as error:
        reason = str(error).strip().rstrip(".")
        if num_visible:
            return None, (f"NVML does not answer ({reason}): free memory is read from CUDA instead",)
        return None, (f"{no_gpu_text}; NVML does not answer either ({reason})",)
    if num_gpus and not num_visible:
        remedy = "look at CUDA_VISIBLE_DEVICES and the driver" if cuda_version else "install a CUDA build of torch"
        return version, (f"the driver has {num_gpus} GPU{'s' if num_gpus > 1 else ''}, but {no_gpu_text}; {remedy}",)
    return version, () if num_visible else (no_gpu_text,)
