"""Blocks given up, and brought home to the host, from wherever they are."""

from collections.abc import Iterator
from contextlib import contextmanager

from hydra_tune.memory.block import Block
from hydra_tune.memory.states import State
from hydra_tune.observe.turns import note


def drop(block: Block) -> None:
    """Give up all of a block's bytes, on the host and on whichever device."""
    with block.lock:
        note("drop", [block])
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


_HOST = object()
"""What blocks are pinned for that must not leave the host."""


@contextmanager
def staying_home(block: Block) -> Iterator[None]:
    """A block is on the host meanwhile, and no device loads it."""
    with block.lock:
        assert block.pinned_for is None, "a unit of the trial runs"
        bring_home(block)
        block.pinned_for = _HOST
    try:
        yield
    finally:
        with block.lock:
            block.pinned_for = None


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
