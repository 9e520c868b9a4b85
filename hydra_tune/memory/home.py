"""Blocks given up, and brought home to the host, from wherever they are."""

import threading
from collections.abc import Sequence

from hydra_tune.memory.block import Block
from hydra_tune.memory.states import State
from hydra_tune.observe.turns import note


def drop(block: Block) -> None:
    """Give up all of a block's bytes, on the host and on whichever device; tensors of a loose block keep theirs."""
    with block.lock:
        note("drop", [block])
        if block.is_loose:
            block.part()
        if block.coming is not None:
            block.coming.home.discard(block)
        if block.home is not None and block.leaving is not None:
            block.home.finish_leaving(block)
        if block.state is not State.DROPPED:
            block.enter(State.DROPPED)
        if block.home is not None:
            block.home.release(block)
        if block.tier is not None:
            block.tier.forget(block)
        block.host = None
        block.part()


class AtHome:
    """Blocks that somebody works on, on the host: whoever wants one of them on a device waits until he has done.

    Args:
        blocks: which; brought home here, and pinned for this.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._over = threading.Event()
        self._blocks: list[Block] = []
        try:
            for block in blocks:
                pin(block, self)
                self._blocks.append(block)
                bring_home(block)
        except BaseException:
            self.leave()
            raise

    def wait(self) -> None:
        """Until the blocks may go where they are wanted."""
        self._over.wait()

    def leave(self) -> None:
        """The work is done, or given up."""
        for block in self._blocks:
            with block.lock:
                block.pinned_for = None
        self._over.set()


def await_home(block: Block) -> None:
    """Have work on a block over that is done on the host. To be called without its lock."""
    work = block.pinned_for
    if isinstance(work, AtHome):
        work.wait()


def pin(block: Block, holder: object) -> None:
    """Have a block stay with a pager that runs a unit, or at home; waits for work that is done on it at home.

    Nobody who works at home waits for a block in turn, so that this ends. To be called without a block's lock.
    """
    while True:
        with block.lock:
            worker = block.pinned_for
            if not isinstance(worker, AtHome):
                assert worker in (None, holder), "two units of one trial at once"
                block.pinned_for = holder
                return
        worker.wait()


def bring_home(block: Block) -> None:
    """Move a block to the host, wherever it is."""
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
