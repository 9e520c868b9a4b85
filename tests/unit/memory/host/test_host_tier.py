"""The host tier: which copy goes, what that frees, and who is refused."""

import gc
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.errors import BudgetError, HydraTuneError, SpillError
from hydra_tune.memory.block import BlockKind, TensorBlock
from hydra_tune.memory.block_release import bring_home, drop
from hydra_tune.memory.host.disk import SpillDisk
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.memory.host.spill_dir import SpillFolder
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.shared.shared_file import SharedFile
from hydra_tune.memory.trial_context import TrialMemoryContext
from tests.support.gated import settle

SIZE = 640
PATIENCE_SECONDS = 60


@pytest.fixture
def pager(tmp_path):
    device = CpuDevice(0, 100 * SIZE)
    host = HostTier(2 * SIZE, SpillDisk(SpillFolder(tmp_path)), device)
    yield Pager(device, host)
    host.close()
    device.close()


def group(pager, value=0, tenant=None):
    pager.host.take(SIZE)
    made = TensorBlock(BlockKind.PARAMETERS, [torch.full((SIZE // 4,), float(value))], pager.device)
    made.tenant = tenant
    pager.host.enter(made)
    return made


def refuse(pager, made):
    """Let the disk take this block no more: a folder lies where its file should."""
    path = pager.host.disk.folder.path / f"block-{made.number}.bin"
    path.unlink(missing_ok=True)
    path.mkdir()


def on_disk(made):
    return made.host is None and made.data is None


def test_memory_of_a_copy_that_goes_is_free_and_its_tensors_are_views_of_the_file(pager):
    first, _ = group(pager, 1), group(pager)
    storage = StorageWeakRef(first.host.untyped_storage())
    group(pager)
    assert on_disk(first)
    settle(pager.host)  # the disk's thread lets go of what it has written a moment after that is told
    assert storage.expired(), "nothing keeps the memory"
    assert first.tensors[0].unique().tolist() == [1]
    assert pager.host.ledger.used_bytes == 2 * SIZE
    assert pager.host.disk.bytes_written == SIZE


def test_a_copy_of_what_a_device_has_goes_first_and_costs_no_write(pager):
    old, loaded = group(pager, 1), group(pager, 2)
    with pager.lease([loaded], 0):
        pass
    settle(pager.host)  # the disk's thread may have it in hand at this moment, and the other would go
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
    settle(pager.host)
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
    settle(pager.host)
    assert soon.host is not None
    assert [made.tensors[0].unique().tolist() for made in groups] == [[0], [1], [2]]


def test_a_file_that_cannot_be_read_leaves_the_block_as_it_was(pager):
    made, _, _ = group(pager, 7), group(pager), group(pager)
    path = pager.host.disk.folder.path / f"block-{made.number}.bin"
    path.rename(path.with_name("aside"))
    for _ in range(2):  # the first must not leave memory that the second takes for the bytes
        with pytest.raises(SpillError, match=r"cannot read .*\[Errno 2\]"):
            bring_home(made)
        assert on_disk(made)
        assert pager.host.ledger.used_bytes == sum(SIZE for entry in pager.host._entries.values() if entry.on_host)
    path.with_name("aside").rename(path)
    bring_home(made)
    assert made.tensors[0].unique().tolist() == [7]


def test_a_file_that_is_gone_is_written_again_while_the_host_has_its_bytes(pager):
    first, second = group(pager, 1), group(pager, 2)
    group(pager, 3)
    bring_home(first)  # its file has it, too
    (pager.host.disk.folder.path / f"block-{first.number}.bin").unlink()
    pager.host.take(2 * SIZE)  # all that is there has to go
    assert on_disk(first)
    assert on_disk(second)
    pager.host.ledger.give_back(2 * SIZE)
    assert first.tensors[0].unique().tolist() == [1]
    bring_home(first)
    assert first.tensors[0].unique().tolist() == [1]
    bring_home(second)
    assert second.tensors[0].unique().tolist() == [2]


def test_a_copy_that_the_disk_does_not_take_stays_and_another_goes(pager):
    blamed = []
    refused, other = group(pager, 1, TrialMemoryContext(blamed.append)), group(pager, 2)
    refuse(pager, refused)
    group(pager, 3)
    assert refused.host is not None
    assert on_disk(other)
    assert not blamed


def test_where_nothing_else_can_go_the_trial_whose_copy_it_is_loses_it(pager):
    blamed, own = [], []
    owner, asker = TrialMemoryContext(blamed.append), TrialMemoryContext(own.append)
    groups = [group(pager, value, owner) for value in range(2)]
    for made in groups:
        refuse(pager, made)
    with asker.at_work():
        mine = [group(pager, value, asker) for value in range(2)]
    (error,) = blamed
    assert isinstance(error, SpillError)
    assert (error.errno, error.path) == (21, str(pager.host.disk.folder.path / f"block-{groups[0].number}.bin"))
    assert not own
    assert [made.tensors[0].unique().tolist() for made in mine] == [[0], [1]]
    assert [made.tensors[0].numel() for made in groups] == [0, 0], "nobody wants these any more"
    assert pager.host.ledger.used_bytes == 2 * SIZE
    with pytest.raises(SpillError, match="cannot write"):
        bring_home(groups[0])
    with owner.at_work(), pytest.raises(SpillError, match="cannot write"):
        group(pager, 0, owner)


def test_nobody_is_blamed_while_another_copy_is_being_made(pager):
    blamed = []
    refused = group(pager, 1, TrialMemoryContext(blamed.append))
    refuse(pager, refused)
    pager.host.take(SIZE)  # of a copy that is not there yet
    thread = threading.Thread(target=pager.host.take, args=(SIZE,))
    thread.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not pager.host._entries[refused.number].is_refused and time.monotonic() < deadline:
        time.sleep(0.01)
    pager.host.ledger.give_back(SIZE)
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert not blamed
    assert refused.tensors[0].unique().tolist() == [1]
    pager.host.ledger.give_back(SIZE)


def test_a_trial_whose_own_copies_are_refused_is_told_where_it_asks(pager):
    blamed = []
    owner = TrialMemoryContext(blamed.append)
    with owner.at_work():
        for made in [group(pager, value, owner) for value in range(2)]:
            refuse(pager, made)
        with pytest.raises(SpillError, match=r"cannot write 640 B to .*\[Errno 21\]"):
            group(pager, 2, owner)
    assert not blamed
    assert pager.host.ledger.used_bytes == 2 * SIZE


def test_what_waits_for_room_is_told_when_its_trial_is_stopped(pager):
    others, waiting = TrialMemoryContext(print), TrialMemoryContext(print)
    assert pager.host.admit(others, SIZE, SIZE)
    pager.host.reserve(others)
    raised = []

    def wait():
        with waiting.at_work(), pytest.raises(HydraTuneError, match="stopped") as error:
            pager.host.take(2 * SIZE)
        raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.stop()
    thread.join(PATIENCE_SECONDS)
    assert raised
    pager.host.leave(others)
    assert pager.host.ledger.used_bytes == 0


def test_what_cannot_go_to_disk_leaves_room_for_the_largest_block_of_all(pager):
    first, second = TrialMemoryContext(print), TrialMemoryContext(print)
    assert not pager.host.admit(first, SIZE, SIZE + 1)
    assert pager.host.admit(first, SIZE // 2, SIZE)
    assert not pager.host.admit(second, 0, 2 * SIZE)
    assert not pager.host.admit(second, SIZE, SIZE // 2)
    assert pager.host.admit(second, SIZE // 2, SIZE // 2)
    assert not pager.host.admit(first, SIZE // 2, SIZE + 1), "a further kind of batch"
    pager.host.leave(second)
    assert pager.host.admit(first, SIZE // 2, SIZE + 1)


def handles():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.cases(1 / 3)
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts handles in /proc")
def test_blocks_on_disk_keep_no_handles(pager):
    group(pager)
    gc.collect()  # what others have left open is closed before
    before = handles()
    groups = [group(pager, value) for value in range(40)]
    assert sum(on_disk(made) for made in groups) == 38
    assert handles() <= before
    assert [made.tensors[0].unique().tolist() for made in groups] == [[value] for value in range(40)]


def test_a_file_shared_by_trials_counts_once_and_goes_with_the_last(pager):
    first, second = (TrialMemoryContext(lambda _: None) for _ in range(2))
    file = SharedFile({"weight": torch.zeros(1)})
    shared = {file: SIZE}
    assert not pager.host.admit(first, SIZE // 2, SIZE, shared), "the file, fixed bytes and a block do not fit together"
    assert pager.host.admit(first, 0, SIZE, shared)
    pager.host.reserve(first)
    assert pager.host.ledger.used_bytes == SIZE
    assert pager.host.admit(second, 0, SIZE, shared)
    pager.host.reserve(second)
    assert pager.host.ledger.used_bytes == SIZE
    assert not pager.host.admit(second, SIZE // 2, SIZE), "a further kind of batch"
    pager.host.leave(first)
    assert pager.host.ledger.used_bytes == SIZE
    pager.host.leave(second)
    assert pager.host.ledger.used_bytes == 0
