"""Dropping blocks, and bringing blocks home to the host from any place.

`HostUpdateQueue` (`train/state/host_optimizer.py`) makes a `HostBlockPin` before each update on the host; a device in
need of such a block waits for the end of the work. `BlockStore` (`train/state/block_store.py`) drops a value's block
after the value's last use, unless a running unit absorbs the block or another store has taken the block over, and brings
values and batches home. `TensorGroups` (`train/state/tensor_groups.py`) brings a trial's groups home at the end of the trial,
and whenever code on the host needs the whole state, and drops the groups. `BatchUnits` (`train/loop/batch_units.py`) brings
the kept values of a forward unit home to spill them. `Lease` (`lease.py`) pins the blocks of a unit, and drops absorbed
blocks. The batches of a step (`train/loop/training_batch.py`, `train/parallel/parallel_step.py`), copies of parameters
(`train/state/replicas.py`) and shared copies (`shared/shared_block.py`) drop their blocks here, and the copies of parameters
also wait (`await_home`).

Note: locks. `drop` and `bring_home` take the block's lock. `pin` and `await_home` wait, so a caller must hold no block's
lock. The module must not know models or steps.
"""

import threading
from collections.abc import Sequence

from hydra_tune.memory.block import Block
from hydra_tune.memory.block_states import BlockState
from hydra_tune.observe.trace.turns import note


def drop(block: Block) -> None:
    """Free all of a block's bytes, on the host and on every device; the tensors of a loose block keep their memory."""
    with block.lock:
        note("drop", [block])
        # Before the release: `moved` would otherwise point the tensors at empty memory.
        if block.is_loose:
            block.part()
        if block.coming is not None:
            block.coming.home.discard(block)
        # Copies end first: DROPPED may not follow LOADING or SPILLING, and a running copy still uses the memory.
        if block.home is not None and block.leaving is not None:
            block.home.finish_leaving(block)
        if block.state is not BlockState.DROPPED:
            block.enter(BlockState.DROPPED)
        if block.home is not None:
            block.home.release(block)
        if block.tier is not None:
            block.tier.forget(block)
        block.host = None
        block.part()


class HostBlockPin:
    """Blocks in use by work on the host: a device in need of a block waits until the work is done."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._over = threading.Event()
        self._blocks: list[Block] = []
        try:
            for block in blocks:
                pin(block, self)
                # Before `bring_home`, which may fail: `leave` must unpin this block too.
                self._blocks.append(block)
                bring_home(block)
        except BaseException:
            self.leave()
            raise

    def wait(self) -> None:
        """Wait until the blocks may leave the host."""
        self._over.wait()

    def leave(self) -> None:
        """Unpin the blocks, after the work is done or given up."""
        for block in self._blocks:
            with block.lock:
                block.pinned_for = None
        self._over.set()


def await_home(block: Block) -> None:
    """Wait for the end of work on the host that uses a block. Call without the block's lock."""
    work = block.pinned_for
    if isinstance(work, HostBlockPin):
        work.wait()


def pin(block: Block, holder: object) -> None:
    """Pin a block for a pager that runs a unit or for work on the host, after waiting for other work on the host on the block.

    The wait ends, because work on the host never waits for a block in turn. Call without any block's lock.
    """
    while True:
        with block.lock:
            worker = block.pinned_for
            if not isinstance(worker, HostBlockPin):
                assert worker in (None, holder), "two units of one trial at once"
                block.pinned_for = holder
                return
        # Outside the lock: `HostBlockPin.leave` needs the lock to unpin.
        worker.wait()


def bring_home(block: Block) -> None:
    """Move a block to the host from any place."""
    with block.lock:
        note("home", [block])
        if block.coming is not None:
            block.coming.home.discard(block)
        if block.home is not None:
            home = block.home
            home.write_back(block)
            home.release(block)
        if block.tier is not None:
            block.tier.recall(block)
