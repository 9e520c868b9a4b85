"""What a trial's own code has begun to read stays until it has ended, wherever its tensors are moved meanwhile."""

import threading

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.memory.block import BlockKind, TensorBlock
from hydra_tune.memory.block_release import bring_home, drop
from hydra_tune.memory.deferred_free import TrialTensorReaders
from hydra_tune.memory.host.disk import SpillDisk
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.memory.host.spill_dir import SpillFolder
from hydra_tune.memory.pager import Pager
from tests.support.gated import settle

SIZE = 640
PATIENCE_SECONDS = 60


@pytest.fixture
def host(tmp_path):
    device = CpuDevice(0, 4 * SIZE)
    tier = HostTier(SIZE, SpillDisk(SpillFolder(tmp_path)), device)
    yield tier
    tier.close()
    device.close()


@pytest.fixture
def pager(host):
    return Pager(host._device, host)


@pytest.fixture
def readers():
    return TrialTensorReaders()


@pytest.fixture
def group(pager, readers):
    pager.host.take(SIZE)
    made = TensorBlock(BlockKind.PARAMETERS, [torch.arange(SIZE // 4).float()], pager.device, readers)
    pager.host.enter(made)
    yield made
    drop(made)


def to_disk(pager, group):
    bring_home(group)
    pager.host.take(SIZE)
    pager.host.ledger.give_back(SIZE)
    settle(pager.host)  # the disk's thread lets go of what it has written a moment after that is told
    assert group.host is None


def to_device(pager, group):
    with pager.lease([group], 0):
        assert group.data is not None


def home(pager, group):
    bring_home(group)
    assert group.data is None
    assert group.host is not None


@pytest.mark.parametrize(
    ("before", "move"), [(home, to_disk), (to_disk, home), (to_device, home), (to_device, to_disk)]
)
def test_a_read_that_has_begun_goes_on_with_the_same_bytes_while_another_thread_moves_them(
    before, move, pager, group, readers
):
    expected = torch.arange(SIZE // 4).float()
    (tensor,) = group.tensors
    before(pager, group)
    with readers.reading():
        begun = StorageWeakRef(tensor.untyped_storage())  # as an operator under way knows it
        mover = threading.Thread(target=move, args=(pager, group))
        mover.start()
        mover.join(PATIENCE_SECONDS)
        assert not mover.is_alive(), "whoever needs the room does not wait for readers"
        assert StorageWeakRef(tensor.untyped_storage()).cdata != begun.cdata
        assert not begun.expired()
        with readers.reading():
            assert tensor.equal(expected)
        assert not begun.expired(), "the outer reader is still there"
    assert begun.expired()
    assert tensor.equal(expected)


def test_where_nobody_reads_what_tensors_leave_goes_at_once(pager, group, readers):
    with readers.reading():
        pass
    left = StorageWeakRef(group.tensors[0].untyped_storage())
    to_disk(pager, group)
    assert left.expired()
