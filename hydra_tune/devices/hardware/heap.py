"""Setting of the C library that keeps freed memory in the process between steps.

A step frees its last feature map at its end, and the next step allocates the same memory again. The C library of Linux
returns memory at the end of its heap to the system, and returns large pieces always; the next step then has a page
fault for every page. `CpuDevice` (`devices/cpu.py`) makes the setting when a CPU device is opened;
`planner/run/copy_engine.py` and `planner/profile/profiler.py` raise the amount before planned steps run or are profiled on
the CPU. The setting is the whole process's, and the module must never lower the amount.
"""

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
STEP_BYTES, PLAN_BYTES = 32 << 20, 1 << 30
"""Heap thresholds for a trial's own steps, and for planned steps, which allocate and free memory as planned."""

_kept_bytes = 0


def keep_freed_memory(nbytes: int) -> bool:
    """Let the C library keep up to `nbytes` of freed memory, for the rest of the process; never lowers the amount.

    Does nothing where the user has configured the library (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`), or
    where the library is not glibc.

    Returns:
        Whether the library keeps so much.
    """
    global _kept_bytes  # noqa: PLW0603 - global like the library's setting
    if not sys.platform.startswith("linux") or {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys():
        return False
    if nbytes > _kept_bytes:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        # Both thresholds: the library gives back the end of the heap by one, and large pieces by the other.
        if mallopt is None or not all(mallopt(which, nbytes) == 1 for which in (_TRIM_THRESHOLD, _MMAP_THRESHOLD)):
            return False
        _kept_bytes = nbytes
    return True
