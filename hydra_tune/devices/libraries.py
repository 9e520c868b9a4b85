"""What a GPU's libraries leave of its memory, by what units have really taken there.

Note: what is beside the ledger. cuBLAS and cuDNN have their workspaces from torch's allocator, and no pilot on the host has
seen them: they are what the allocator has given at most, less what the ledger has counted at most meanwhile. Kernels that are
loaded when they are first used, and what other programs take, lie outside the allocator; of those it is known what is not free
any more.

Note: what comes back. Half of what a reserve has too much stays, for another model's workspaces may be larger, and free memory
may lie in pieces.
"""

from dataclasses import dataclass

import torch

LIBRARY_BYTES = 256 << 20  # of each device: cuBLAS keeps up to 32 MiB for each thread and stream that has used it


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What of a device's memory its ledger may count.

    Attributes:
        limit_bytes: at most, as things are.
        gain_bytes: what the pool may hold beyond its budget; none where the user has chosen the budget.
    """

    limit_bytes: int
    gain_bytes: int


class CudaLibraries:
    """Looks at a GPU's memory while one unit at a time runs there.

    Args:
        device: the GPU, on which the pool has one device.
        budget_bytes: of that.
        gives_back: whether a part of what it leaves free may come back.
    """

    def __init__(self, device: torch.device, budget_bytes: int, *, gives_back: bool) -> None:
        self._device = device
        self._budget_bytes = budget_bytes
        self._gives_back = gives_back
        self._own_bytes = torch.cuda.memory_allocated(device)  # by whoever else computes in this process
        self._beside_bytes = 0  # that the allocator has given beside the ledger, in all units so far

    def begin(self) -> None:
        """Look from now on."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def room(self, counted_bytes: int) -> Room:
        """As of `device.UnitMemory`."""
        device, own = self._device, self._own_bytes
        beside = torch.cuda.max_memory_allocated(device) - own - counted_bytes
        self._beside_bytes = beside = max(self._beside_bytes, beside)
        free, total = torch.cuda.mem_get_info(device)
        cap = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        limit = max(0, min(free + torch.cuda.memory_reserved(device), cap) - own - beside)
        spare = limit - max(beside, LIBRARY_BYTES) - self._budget_bytes
        gain = max(0, spare // 2) if self._gives_back else 0
        return Room(limit_bytes=limit, gain_bytes=gain)
