"""The states of a block: what may follow what, and what is said of what may not."""

import itertools

import pytest
import torch

from hydra_tune.errors import BlockStateError, HydraTuneError
from hydra_tune.memory.block import Block, BlockKind
from hydra_tune.memory.block_release import drop
from hydra_tune.memory.block_states import FOLLOWING, NUM_KEPT, BlockState
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.prefetch import BlockPrefetcher, UnitMemoryNeeds
from tests.support.gated import PATIENCE_SECONDS, GatedDevice

SIZE = 640


def block(state=BlockState.HOST):
    made = Block(BlockKind.PARAMETERS, SIZE, 64, state)
    made.host = torch.zeros(SIZE, dtype=torch.uint8)
    return made


@pytest.fixture
def pager():
    device = GatedDevice(0, 2 * SIZE)
    yield Pager(device)
    device.gate.set()
    device.close()


@pytest.mark.parametrize(("before", "after"), list(itertools.product(BlockState, BlockState)))
def test_what_may_follow_follows_and_nothing_else(before, after):
    made = block(before)
    if after in FOLLOWING[before]:
        made.enter(after)
        assert made.state is after
        assert list(made.past) == [before]
        return
    with pytest.raises(BlockStateError, match=f"cannot become {after}, because it is {before}"):
        made.enter(after)
    assert made.state is before, "it stays what it is"
    assert not made.past


def test_every_state_can_be_left_for_dropped_in_the_end_and_nothing_follows_that():
    assert set(FOLLOWING) == set(BlockState)
    assert not FOLLOWING[BlockState.DROPPED]
    for state in set(BlockState) - {BlockState.DROPPED}:
        reached = {state}
        for _ in BlockState:
            reached |= {after for before in reached for after in FOLLOWING[before]}
        assert BlockState.DROPPED in reached


def test_the_error_tells_which_block_whose_and_its_story():
    made = block()
    made.owner = 7
    for state in (BlockState.LOADING, BlockState.RESIDENT, BlockState.COMPUTING):
        made.enter(state)
    with pytest.raises(HydraTuneError) as error:
        made.enter(BlockState.LOADING)
    story = f"block {made.number} (parameters of trial 7) cannot become loading, because it is computing"
    assert story in str(error.value)
    assert "states so far: on host > loading > resident > computing)." in str(error.value)
    assert "allowed next: dropped, resident; " in str(error.value)
    with pytest.raises(BlockStateError, match=r"\(parameters of no trial\).*allowed next: nothing;"):
        block(BlockState.DROPPED).enter(BlockState.HOST)


def test_only_the_last_states_are_kept():
    made = block()
    for _ in range(3 * NUM_KEPT):
        made.enter(BlockState.LOADING)
        made.enter(BlockState.HOST)
    assert len(made.past) == NUM_KEPT


def test_a_block_goes_through_its_states(pager):
    made, other = block(), block()
    pager.device.gate.clear()
    BlockPrefetcher(pager).send([UnitMemoryNeeds([made])])
    assert made.state is BlockState.LOADING
    pager.device.gate.set()
    with pager.lease([made], 0):
        assert made.state is BlockState.COMPUTING
        made.dirty = True
    assert made.state is BlockState.RESIDENT
    with pager.lease([other], 0):
        pager.device.gate.clear()
        pager.device.begun.clear()
        BlockPrefetcher(pager).send([UnitMemoryNeeds([], SIZE)])
        assert made.state is BlockState.SPILLING
        assert pager.device.begun.wait(PATIENCE_SECONDS)
        pager.device.gate.set()
    with pager.lease([other], SIZE):
        assert made.state is BlockState.HOST
    drop(made)
    assert made.state is BlockState.DROPPED
    story = ("on host", "loading", "resident", "computing", "resident", "spilling", "resident", "on host")
    assert tuple(made.past) == story


def test_a_unit_is_told_of_a_block_that_is_in_no_state_to_be_used(pager):
    made = block()
    drop(made)
    made.host = torch.zeros(SIZE, dtype=torch.uint8)  # somebody has kept the memory
    with pytest.raises(BlockStateError, match="cannot become resident, because it is dropped"), pager.lease([made], 0):
        pass


def test_a_load_that_fails_leaves_the_block_on_the_host(pager, monkeypatch):
    made = block()

    def refuse(size):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(pager.device, "empty", refuse)
    with pytest.raises(torch.OutOfMemoryError), pager.lease([made], 0):
        pass
    assert made.state is BlockState.HOST
    assert made.home is None
    drop(made)
