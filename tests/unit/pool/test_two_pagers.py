"""Two devices whose units want what the other one holds must both get it."""

import threading

import pytest
import torch

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.memory.block import Block, BlockKind
from hydra_tune.memory.pager import Pager
from tests.unit.pool.tasks import PATIENCE_SECONDS

KIB = 1024


@pytest.fixture
def pagers():
    devices = [CpuDevice(index, 100 * KIB) for index in range(2)]
    yield [Pager(device) for device in devices]
    for device in devices:
        device.close()


def resident_block(pager):
    block = Block(BlockKind.ACTIVATIONS, 60 * KIB, 64)
    block.host = torch.zeros(60 * KIB, dtype=torch.uint8)
    with pager.lease([block], 0):
        pass
    assert block.home is pager
    return block


def test_units_that_want_each_others_blocks_both_run(pagers):
    """Each device is full of what the other one's unit has pinned; whoever waits must not hold on to it."""
    mine = [resident_block(pager) for pager in pagers]
    pinned = threading.Barrier(2)
    done = []

    def unit(index):
        wanted = mine[1 - index]
        with wanted.lock:
            wanted.pinned_for = pagers[index]  # as if this unit had got so far before the other one looked for room
        pinned.wait(PATIENCE_SECONDS)
        with pagers[index].lease([wanted], 40 * KIB):
            done.append(wanted.home is pagers[index])

    threads = [threading.Thread(target=unit, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS / 2)
    assert done == [True, True]
    assert [pager.ledger.used_bytes for pager in pagers] == [60 * KIB, 60 * KIB]
