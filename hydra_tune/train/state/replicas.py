"""Parameters and buffers that several devices read at the same time.

A block is on one device at most. For units of a trial to run side by side, a device in need of a group on another device
loads a copy from the host. The device's ledger counts the copy, and the pager may drop the copy and load it again. The copy
is read-only and lives until the batches have run; parameters that are updated earlier are not read any more
(`train/parallel/ordered_queues.py`). `OptimizerStep` (`train/loop/optimizer_step.py`) makes a `ParameterReplicas` for each
step, `ParallelBatch` (`train/parallel/parallel_batch.py`) leases a shard's parameters and buffers there in each forward and
backward unit, and `ParallelStep` (`train/parallel/parallel_step.py`) gives up the copies. Where each shard has a home
device, groups that only one shard uses are not copied: such a group moves to the home of its shard.

In both cases units read trained parameters by *stand-ins*: separate tensors in the memory of the copy or group. So a backward
leaves no gradient on the trial's parameters, where a concurrent update of other parameters would find the gradient.

Note: location of the original. While units run side by side, a group that a device has, or is about to have, stays there or
goes to the host, and other devices take copies. So two units never wait for each other's parameters.

Note: host copies. A copy is loaded from the host copy of its group, and has no host copy of its own. Where host copies may
go to disk, the group's host copy is brought back for each load and held only until the load is done. Lock order: the lock
of a copy before the lock of its group, and the lock of a group before that of the table of copies.
"""

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from hydra_tune.devices.device import Device
from hydra_tune.memory.block import Block, TensorBlock
from hydra_tune.memory.block_release import await_home, drop
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.memory.lease import Lease
from hydra_tune.memory.pager import Pager
from hydra_tune.train.state.model_state import ModelState


class _ReplicaSourceTier:
    """Source of a copy where host copies may go to disk; acts as the tier of the copy of a `group`."""

    def __init__(self, group: TensorBlock, host: HostTier) -> None:
        self._group = group
        self._host = host
        self._is_held = False

    def recall(self, block: Block, device: Device | None = None) -> None:
        """Bring the group's bytes to the host, and hold the bytes there until `loaded`."""
        group = self._group
        with group.lock:
            if isinstance(group.home, Pager):
                # A group without a host copy is written back from its device rather than read from disk; `write_back`
                # skips clean blocks.
                group.dirty = group.dirty or group.host is None
                group.home.write_back(group)
            self._host.recall(group, device)
            self._host.hold(group, 1)
            self._is_held, block.host = True, group.host

    def loaded(self, block: Block) -> None:
        """Let the group's host copy go."""
        block.host = None
        if self._is_held:
            self._is_held = False
            with self._group.lock:
                self._host.hold(self._group, -1)

    def forget(self, block: Block) -> None:
        """Release the group when the copy is given up, also after a failed load."""
        self.loaded(block)
        block.tier = None

    def provide(self, block: Block, device: Device) -> None:
        """Fail: a copy is never changed, so no pager ever writes a copy back."""
        raise AssertionError(block.number, device.name)

    def written(self, block: Block) -> None:
        """Fail, as `provide`."""
        raise AssertionError(block.number)


class ParameterReplicas:
    """Read-only copies of a trial's groups: until `close`, code that changes a group reads no copy of the group."""

    def __init__(self, state: ModelState) -> None:
        self.moving: Collection[TensorBlock] = frozenset()
        """Groups used by a single unit at a time, which move instead of being copied."""
        self._state = state
        self._copies: dict[tuple[TensorBlock, Pager], Block] = {}
        self._lock = threading.Lock()

    @contextmanager
    def lease(
        self,
        pager: Pager,
        names: Sequence[str],
        blocks: Sequence[Block],
        workspace_bytes: int,
        *,
        copies: bool = False,
    ) -> Iterator[tuple[Lease, dict[str, Tensor]]]:
        """Lease parameters and buffers, or copies of them, on a device, with other blocks and workspace.

        Args:
            pager: pager of the device.
            names: the parameters and buffers.
            blocks: other blocks that the unit needs.
            workspace_bytes: room to work, in bytes.
            copies: whether originals that are not on the device are left to other devices.

        Yields:
            The lease, and by name the tensors to read in place of the trial's own.
        """
        groups = self._state.groups(names)
        chosen: dict[TensorBlock, Block] = {}
        try:
            for group in groups:
                chosen[group] = group if group in self.moving else self._choose(group, pager, copies=copies)
        except BaseException:
            # `_choose` has pinned groups beyond the lease, so a failure has to unpin them here.
            for block in chosen.values():
                with block.lock:
                    if block not in self.moving:
                        block.pinned_for = None
            raise
        shared = self._state.shared
        with pager.lease([*chosen.values(), *shared.blocks(names), *blocks], workspace_bytes) as lease:
            yield lease, self._stand_ins(names, chosen) | shared.views(names, pager)

    def close(self) -> None:
        """Give up all copies; no unit that reads a copy may be running."""
        for copy in self._copies.values():
            drop(copy)
        self._copies.clear()

    def _choose(self, group: TensorBlock, pager: Pager, *, copies: bool) -> Block:
        """Return the group itself, pinned to stay or to come here, or else a copy."""
        # Before the lock is taken: work on the host ends by taking the group's lock itself.
        await_home(group)
        homes = (pager,) if copies else (None, pager)
        with group.lock:
            with self._lock:
                copy = self._copies.get((group, pager))
            if copy is None or copy.home is None:
                if group.pinned_for in (None, pager) and group.home in homes:
                    group.pinned_for = pager
                    return group
                if group.tier is None and isinstance(group.home, Pager):
                    group.home.write_back(group)
            if copy is None:
                copy = Block(group.kind, group.size, pager.device.alignment)
                copy.owner = group.owner
                if isinstance(group.tier, HostTier):
                    copy.tier = _ReplicaSourceTier(group, group.tier)
                else:
                    # Shared and never written: a copy never changes, and no unit reads the copy of an updated group.
                    copy.host = group.host
                with self._lock:
                    self._copies[group, pager] = copy
            return copy

    def _stand_ins(self, names: Sequence[str], chosen: dict[TensorBlock, Block]) -> dict[str, Tensor]:
        stand_ins: dict[str, Tensor] = {}
        for group, block in chosen.items():
            if block is group:
                # Only tensors that get gradients. A view of the block would share its version counter with all other views,
                # and a graph that has saved a buffer would refuse the buffer once another buffer is overwritten.
                trained_tensors = (tensor for tensor in group.tensors if tensor.requires_grad)
                stand_ins |= {
                    self._state.name_of(tensor): tensor.detach().requires_grad_() for tensor in trained_tensors
                }
                continue
            assert block.data is not None, "leased blocks are on the device"
            for tensor, view in zip(group.tensors, group.views(block.data), strict=True):
                name = self._state.name_of(tensor)
                if name in names:
                    stand_ins[name] = view.detach().requires_grad_(tensor.requires_grad)
        return stand_ins
