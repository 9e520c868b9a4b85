"""Memory that is freed and taken again in each step stays with the process, where the C library is told so.

A step frees its last feature map when it ends and takes that memory again in the next. The C library of Linux gives
memory at the end of its heap back to the system, and large pieces always; then each page of it is a fault of its own
in the next step. For a fused step of a small network that was a fifth of its time, and a tenth for a trial whose
`DataLoader` makes its batches on a thread other than the main one, to which the library gives less.
"""

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
STEP_BYTES, PLAN_BYTES = 32 << 20, 1 << 30
"""Of a trial's own steps, and of planned steps, whose memory is taken and freed as planned."""

_kept_bytes = 0


def keep_freed_memory(nbytes: int) -> bool:
    """Have the C library keep so many bytes that are free, or more if it was told so before, for the rest of the process.

    Does nothing where the user has decided on it (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`), and where the
    library is not glibc.

    Returns:
        Whether it does.
    """
    global _kept_bytes  # noqa: PLW0603 - of the process, as what the library is told
    if not sys.platform.startswith("linux") or {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys():
        return False
    if nbytes > _kept_bytes:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is None or not all(mallopt(which, nbytes) == 1 for which in (_TRIM_THRESHOLD, _MMAP_THRESHOLD)):
            return False
        _kept_bytes = nbytes
    return True
