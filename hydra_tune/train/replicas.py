"""Parameters and buffers that several devices read at the same time.

A block is on one device at most. So that units of one trial may run side by side, a device that finds a group elsewhere loads
a copy of it, from the host: a block like any other, on that device's ledger, loaded and spilled as room allows. It is read
only and lives until the trial's next update.

Note: which device has the original. While units run side by side, a group that some device has, or is about to have, stays
there or goes to the host, and other devices take copies. So two units never wait for each other's blocks, and none changes
one.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from hydra_tune.memory.block import Block, Group
from hydra_tune.memory.pager import Lease, Pager, drop
from hydra_tune.train.state import ModelState


class Replicas:
    """Read-only copies of one trial's groups, on any number of devices.

    Args:
        state: the trial's long-lived tensors; nothing may change them until `close`.
    """

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self._copies: dict[tuple[Group, Pager], Block] = {}
        self._lock = threading.Lock()

    @contextmanager
    def lease(
        self, pager: Pager, names: Sequence[str], blocks: Sequence[Block], workspace_bytes: int
    ) -> Iterator[tuple[Lease, dict[str, Tensor]]]:
        """Parameters and buffers, or copies of them, on a device, with other blocks and room to work.

        Yields:
            The lease, and by name the tensors to read in place of the trial's own.
        """
        groups = self._state.groups(names)
        chosen: dict[Group, Block] = {}
        try:
            for group in groups:
                chosen[group] = self._choose(group, pager)
        except BaseException:
            for block in chosen.values():
                with block.lock:
                    block.pinned_for = None
            raise
        with pager.lease([*chosen.values(), *blocks], workspace_bytes) as lease:
            yield lease, self._stand_ins(names, chosen)

    def close(self) -> None:
        """Give up all copies; no unit that reads them may be running."""
        for copy in self._copies.values():
            drop(copy)
        self._copies.clear()

    def _choose(self, group: Group, pager: Pager) -> Block:
        """The group itself, pinned so that it stays or comes here, or else a copy."""
        with group.lock:
            with self._lock:
                copy = self._copies.get((group, pager))
            if copy is None or copy.home is None:
                if group.pinned_for in (None, pager) and group.home in (None, pager):
                    group.pinned_for = pager
                    return group
                if isinstance(group.home, Pager):
                    group.home.write_back(group)
            if copy is None:
                copy = Block(group.kind, group.size, pager.device.alignment)
                copy.owner, copy.host = (
                    group.owner,
                    group.host,
                )  # never written: a copy is never changed, and the group not before `close`
                with self._lock:
                    self._copies[group, pager] = copy
            return copy

    def _stand_ins(self, names: Sequence[str], chosen: dict[Group, Block]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for group, block in chosen.items():
            if block is group:
                continue
            assert block.data is not None, "leased blocks are on the device"
            for tensor, view in zip(group.tensors, group.views(block.data), strict=True):
                name = self._state.name_of(tensor)
                if name in names:
                    found[name] = view.detach().requires_grad_(tensor.requires_grad)
        return found
