"""Memory that is freed and taken again in each step stays with the process, where the C library is told so.

A step frees its last feature map when it ends and takes that memory again in the next. The C library of Linux gives
memory at the end of its heap back to the system, and large pieces always; then each page of it is a fault of its own
in the next step, which for a fused step of a small network was a fifth of its time.
"""

import ctypes
import functools
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_BYTES = 1 << 30


@functools.cache
def keep_freed_memory() -> bool:
    """Have the C library keep up to 1 GiB that is free, for the rest of the process.

    Does nothing where the user has decided on it (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`), and where the
    library is not glibc.

    Returns:
        Whether it does.
    """
    if not sys.platform.startswith("linux") or {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(which, _BYTES) == 1 for which in (_TRIM_THRESHOLD, _MMAP_THRESHOLD))
