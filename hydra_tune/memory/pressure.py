"""Out-of-memory errors outside the ledgers: recognizes the errors and marks code that cannot be repeated afterwards.

The ledgers know only the bytes of the pool. Other processes, fragmentation and the memory of libraries are unknown to
the ledgers, so an allocation may fail although its bytes are on the ledger. Units (`train/loop/`,
`train/parallel/parallel_batch.py`, `train/state/model_state.py`, and groups in `fusion/group/` and `fusion/runtime/`)
enter `not_repeatable` around work that a repeat could not undo; `OutOfMemoryHandler` (`pool/devices/oom_retry.py`) looks
at the error when a unit has failed, and repeats the unit once unless the error is a `NotRepeatableError`. `UnitRollback`
(`train/loop/unit_rollback.py`) raises `NotRepeatableError` where a unit cannot be undone. `HostUpdateQueue`
(`train/state/host_optimizer.py`) and `GroupEndHandler` (`pool/fusion/group_completion.py`) look for `NotRepeatableError`, and
`Pager` (`pager.py`), `fusion/compile/batched_plan_cache.py` and `pool/faults/retry.py` ask `is_out_of_memory`. Work that
cannot be undone must run inside `not_repeatable`, or a repeat gives other numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SIGNS = (
    "DefaultCPUAllocator: ",  # "can't allocate memory", "not enough memory": its only errors
    "not enough memory: you tried to allocate",
    "CUDA error: out of memory",  # raised for pinned host memory and for CUDA memory outside the caching allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


class NotRepeatableError(Exception):
    """Memory has run out at a point where the work of a unit cannot be undone; the cause is the original error."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error reports exhausted memory, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@contextmanager
def not_repeatable(reason: str) -> Iterator[None]:
    """Context for work that must not begin a second time.

    Args:
        reason: the work done inside, as a continuation of "it cannot be repeated, because".

    Raises:
        NotRepeatableError: memory has run out inside.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise NotRepeatableError(reason) from error
        raise
