"""What NVIDIA's management library (NVML) says of the machine's GPUs, with no CUDA context made for it.

It comes with the driver, so it is absent where there is no NVIDIA GPU, and it may fail where there is one: whoever asks goes on
without.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pynvml


class NvmlError(Exception):
    """NVML is not there, or does not answer; the text says why."""


def memory(address: str) -> tuple[int, int]:
    """Free and total bytes of a GPU, other processes' use counted.

    Args:
        address: its PCI address.

    Raises:
        NvmlError: that cannot be told.
    """
    with _opened():
        found = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByPciBusId(address.encode()))
        return int(found.free), int(found.total)


def driver() -> tuple[str, int]:
    """The driver's version, and how many GPUs it has.

    Raises:
        NvmlError: that cannot be told.
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
