"""GPU facts from NVIDIA's management library (NVML), without a CUDA context.

NVML comes with the driver. The library may be absent, and may fail on a machine with GPUs, so callers have to work without
NVML. `discovery.py` reads a GPU's memory before the budget is set, and for `survey.py`; `survey.py` also reads the version
of the driver for `hydra-tune devices`. Every call opens NVML and closes NVML again. The module must not hold memory for
trials.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pynvml


class NvmlError(Exception):
    """NVML is absent, or does not answer; the text gives the reason."""


def memory(address: str) -> tuple[int, int]:
    """Return free and total bytes of the GPU at a PCI address, other processes' use included.

    Raises:
        NvmlError: the memory cannot be read.
    """
    with _opened():
        gpu_memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByPciBusId(address.encode()))
        return int(gpu_memory.free), int(gpu_memory.total)


def driver() -> tuple[str, int]:
    """Return the driver's version and number of GPUs.

    Raises:
        NvmlError: the driver cannot be read.
    """
    with _opened():
        return str(pynvml.nvmlSystemGetDriverVersion()), int(pynvml.nvmlDeviceGetCount())


@contextmanager
def _opened() -> Iterator[None]:
    try:
        pynvml.nvmlInit()
        try:
            yield
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NvmlError(str(error)) from error
