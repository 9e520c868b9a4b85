"""Room for the user's own code, which may need more than its pilot has seen."""

from torch import Tensor

from hydra_tune.memory.lease import Lease
from hydra_tune.shard.pilot import StorageTracker


class RoomTracker(StorageTracker):  # type: ignore[no-untyped-call]
    """Follows what a unit makes, and takes more room on the ledger when that outgrows the workspace.

    The pilot of a model that cannot be captured is one real run. Another batch, or another draw, may take another way
    through the code and need more. That is seen when it has been made, so the ledger is behind by one tensor at most.

    Args:
        lease: of the unit.
        workspace_bytes: what it has been given.
        alignment: of the device.
    """

    def __init__(self, lease: Lease, workspace_bytes: int, alignment: int) -> None:
        super().__init__(alignment)
        self._lease = lease
        self._granted_bytes = workspace_bytes
        self.know(*lease.data)

    def _track(self, tensor: Tensor, size: int | None = None) -> None:
        super()._track(tensor, size)
        if self.peak_bytes > self._granted_bytes:
            self._lease.grow(self.peak_bytes - self._granted_bytes)
            self._granted_bytes = self.peak_bytes
