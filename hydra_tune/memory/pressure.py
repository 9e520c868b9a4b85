"""What it looks like when memory really runs out, whatever the ledgers say, and where nothing can be done about it.

The ledgers know what the pool holds. What else there is on a device (other processes, fragmentation, what libraries take for
themselves) they do not know, so an allocation may fail although its bytes are on the ledger.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SIGNS = (
    "DefaultCPUAllocator: ",  # "can't allocate memory", "not enough memory": its only errors
    "not enough memory: you tried to allocate",
    "CUDA error: out of memory",  # of pinned host memory, and of what CUDA takes beside the caching allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


class NotRepeatableError(Exception):
    """Memory has run out where what a unit has done by then cannot be undone; the cause is the error itself.

    Args:
        reason: what it was doing.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that memory could not be had, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@contextmanager
def not_repeatable(reason: str) -> Iterator[None]:
    """Around what must not be begun a second time.

    Args:
        reason: what is done here, to go on from "it cannot be repeated, because".

    Raises:
        NotRepeatableError: memory has run out meanwhile.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise NotRepeatableError(reason) from error
        raise
