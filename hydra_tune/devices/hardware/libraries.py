"""GPU memory taken by libraries, measured on real units, and the rest for the ledger.

`discovery.py` sets `LIBRARY_BYTES` aside for each device before any unit has run. Each `CudaDevice` (`devices/cuda.py`)
has a `CudaUnitMemory`, and measures nothing where several devices share the GPU. `LedgerFitter`
(`pool/devices/library_memory.py`) measures the first unit of each kind and shard of each trial, on the device's worker
thread, so `CudaUnitMemory` takes no lock. `Pager.fit` (`memory/pager.py`) then fits the ledger to the `LedgerAllowance`. The
module must not hold memory for trials.

Note: memory beside the ledger. cuBLAS and cuDNN allocate workspaces from torch's allocator, unseen by a pilot on the
host. The workspaces are estimated as the allocator's peak less the ledger's peak in the same time. Kernels loaded at
first use, and other programs' memory, lie outside the allocator; for these, only the drop in the GPU's free memory is
known. Half of an excess reserve stays in reserve, because another model's workspaces may be larger, and free memory may be
fragmented.
"""

from dataclasses import dataclass

import torch

LIBRARY_BYTES = 256 << 20  # per device: cuBLAS keeps up to 32 MiB for each thread and stream in use


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAllowance:
    """Device memory available to the ledger.

    Attributes:
        limit_bytes: the most that the ledger may count at present, in bytes.
        gain_bytes: bytes that the pool may hold beyond its budget; 0 where the user has chosen the budget.
    """

    limit_bytes: int
    gain_bytes: int


class CudaUnitMemory:
    """Measures a GPU's memory while a single unit runs there.

    Args:
        device: the GPU, which carries a single device of the pool.
        gives_back: whether a part of an excess reserve may come back.
    """

    def __init__(self, device: torch.device, budget_bytes: int, *, gives_back: bool) -> None:
        self._device = device
        self._budget_bytes = budget_bytes
        self._gives_back = gives_back
        self._own_bytes = torch.cuda.memory_allocated(device)  # tensors of other code in this process
        self._beside_bytes = 0  # most allocated beside the ledger, over all units so far

    def begin(self) -> None:
        """Start measuring."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def room(self, counted_bytes: int) -> LedgerAllowance:
        """As of `UnitMemory`."""
        device, own_bytes = self._device, self._own_bytes
        beside_bytes = torch.cuda.max_memory_allocated(device) - own_bytes - counted_bytes
        self._beside_bytes = beside_bytes = max(self._beside_bytes, beside_bytes)
        free, total = torch.cuda.mem_get_info(device)
        cap = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        # Reserved memory counts as available, because the allocator can still hand out its cache.
        limit = max(0, min(free + torch.cuda.memory_reserved(device), cap) - own_bytes - beside_bytes)
        # The bytes seen so far once more, or the standard reserve: another model's workspaces may be larger.
        spare = limit - max(beside_bytes, LIBRARY_BYTES) - self._budget_bytes
        gain = max(0, spare // 2) if self._gives_back else 0
        return LedgerAllowance(limit_bytes=limit, gain_bytes=gain)
