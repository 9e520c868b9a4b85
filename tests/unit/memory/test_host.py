"""The host tier: which copy goes, what that frees, and who is refused."""

import time

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.errors import BudgetError
from hydra_tune.memory.block import Group, Kind
from hydra_tune.memory.disk import Disk
from hydra_tune.memory.host import HostTier
from hydra_tune.memory.pager import Pager, bring_home, drop
from hydra_tune.memory.spill_dir import SpillFolder

SIZE = 640
PATIENCE_SECONDS = 10


@pytest.fixture
def pager(tmp_path):
    device = CpuDevice(0, 100 * SIZE)
    host = HostTier(2 * SIZE, Disk(SpillFolder(tmp_path)), device)
    yield Pager(device, host)
    host.close()
    device.close()


def group(pager, value=0):
    pager.host.take(SIZE)
    made = Group(Kind.PARAMETERS, [torch.full((SIZE // 4,), float(value))], pager.device)
    pager.host.enter(made)
    return made


def on_disk(made):
    return made.host is None and made.data is None


def test_memory_of_a_copy_that_goes_is_free_and_its_tensors_are_views_of_the_file(pager):
    first, _ = group(pager, 1), group(pager)
    storage = StorageWeakRef(first.host.untyped_storage())
    group(pager)
    assert on_disk(first)
    assert storage.expired(), "nothing keeps the memory"
    assert first.tensors[0].unique().tolist() == [1]
    assert pager.host.ledger.used_bytes == 2 * SIZE
    assert pager.host.disk.bytes_written == SIZE


def test_a_copy_of_what_a_device_has_goes_first_and_costs_no_write(pager):
    old, loaded = group(pager, 1), group(pager, 2)
    with pager.lease([loaded], 0):
        pass
    group(pager)
    assert loaded.host is None
    assert old.host is not None
    assert loaded.dirty, "only the device has it"
    assert pager.host.disk.bytes_written == 0
    bring_home(loaded)
    assert loaded.tensors[0].unique().tolist() == [2]


def test_what_is_in_its_file_already_is_not_written_again(pager):
    first, _, _ = group(pager, 1), group(pager, 2), group(pager, 3)
    bring_home(first)
    written = pager.host.disk.bytes_written
    for made in (group(pager, 4), group(pager, 5)):
        assert made.host is not None
    assert on_disk(first)
    assert first.tensors[0].unique().tolist() == [1]
    assert pager.host.disk.bytes_written == written + SIZE, "of the copies that went one was there already"


def test_the_copy_needed_last_goes(pager):
    often, seldom = group(pager), group(pager)
    for _ in range(8):
        for one in (often, often, seldom):
            pager.host.used([one])
    pager.host.used([])  # between the two uses of the one, and long before the other
    pager.host.used([often])
    pager.host.used([seldom])
    group(pager)
    assert on_disk(seldom)
    assert often.host is not None


def test_a_copy_larger_than_host_memory_is_refused(pager):
    with pytest.raises(BudgetError, match=r"one shard needs 1\.9 KiB of host memory at once, more than the 1\.2 KiB"):
        pager.host.take(3 * SIZE)


def test_what_is_wanted_whole_may_overdraw_and_goes_again_after(pager):
    groups = [group(pager, value) for value in range(4)]
    with pager.host.whole(groups):
        for made in groups:
            bring_home(made)
        assert all(made.host is not None for made in groups)
        assert pager.host.ledger.used_bytes == 4 * SIZE
    assert pager.host.ledger.used_bytes == 2 * SIZE
    assert [made.tensors[0].unique().tolist() for made in groups] == [[0], [1], [2], [3]]


def test_what_is_dropped_leaves_nothing(pager):
    groups = [group(pager, value) for value in range(4)]
    for made in groups:
        drop(made)
    assert pager.host.ledger.used_bytes == pager.host.disk.stored_bytes == 0
    assert list(pager.host.disk.folder.path.glob("block-*")) == []


def test_what_is_needed_soon_is_read_ahead(pager):
    soon, first, second = groups = [group(pager, value) for value in range(3)]
    for _ in range(4):
        for used in ([soon], [], [], [], [], [], [first], [second], [], [], [], []):
            pager.host.used(used)
    bring_home(first)
    bring_home(second)  # host memory is full
    pager.host.used([])
    deadline = time.monotonic() + PATIENCE_SECONDS
    while soon.host is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert soon.host is not None
    assert [made.tensors[0].unique().tolist() for made in groups] == [[0], [1], [2]]
