"""Shared tensors on devices: one copy a device, loaded once, always clean, gone with the last trial."""

import pytest
import torch

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.memory.block import BlockKind
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.prefetch import BlockPrefetcher, UnitMemoryNeeds
from hydra_tune.memory.shared import shared_block
from hydra_tune.memory.shared.shared_block import SharedBlockHandle
from hydra_tune.memory.shared.shared_file import SharedFile
from hydra_tune.observe.trace.turns import WorkerTurn, in_turn

SIZE = 640


@pytest.fixture
def pagers():
    devices = [CpuDevice(index, 2 * SIZE) for index in range(2)]
    yield [Pager(device) for device in devices]
    for device in devices:
        device.close()


@pytest.fixture
def sources():
    return list(SharedFile({str(i): torch.full((SIZE // 4,), float(i)) for i in range(3)}).tensors.values())


@pytest.fixture
def handle():
    made = []

    def make(source, owner, *, in_place=False):
        made.append(SharedBlockHandle(source, owner, 64, may_lie_in_place=in_place))
        return made[-1]

    yield make
    for each in made:
        each.leave()
    assert not shared_block._COPIES


def loaded_bytes(pager):
    return pager.bytes_in[BlockKind.PARAMETERS]


def test_trials_on_a_device_have_one_copy_loaded_once_and_counted_once(pagers, sources, handle):
    first, second = (handle(sources[1], owner) for owner in (0, 1))
    for each in (first, second):
        with pagers[0].lease([each], 0) as lease:
            assert torch.equal(lease.data[0].view(torch.float32), torch.ones(SIZE // 4))
            assert pagers[0].ledger.used_bytes == SIZE
    assert loaded_bytes(pagers[0]) == SIZE
    with pagers[1].lease([first], 0):
        assert loaded_bytes(pagers[1]) == SIZE
    assert first.at(pagers[0]) is second.at(pagers[0]) is not first.at(pagers[1])


def test_a_copy_makes_room_without_a_write_back(pagers, sources, handle):
    pager, handles = pagers[0], [handle(source, 0) for source in sources]
    for each in handles:
        with pager.lease([each], 0):
            pass
    assert handles[0].at(pager).data is None
    assert pager.bytes_out[BlockKind.PARAMETERS] == 0
    with pager.lease([handles[0]], 0) as lease:
        assert torch.equal(lease.data[0].view(torch.float32), torch.zeros(SIZE // 4))


def test_a_copy_goes_with_the_last_trial(pagers, sources, handle):
    first, second = (handle(sources[1], owner) for owner in (0, 1))
    for each in (first, second):
        with pagers[0].lease([each], 0):
            pass
    first.leave()
    assert pagers[0].ledger.used_bytes == SIZE
    assert first.at(pagers[0]) is first, "a prefetch may still ask for a trial that is over"
    second.leave()
    assert pagers[0].ledger.used_bytes == 0


def test_a_copy_in_place_takes_room_and_no_memory(pagers, sources, handle):
    whole, cut = handle(sources[1], 0, in_place=True), handle(sources[1], 1)
    for each in (whole, cut):
        with pagers[0].lease([each], 0) as lease:
            assert lease.data[0].data_ptr() == sources[1].flat.data_ptr()
            assert pagers[0].ledger.used_bytes == SIZE
    assert loaded_bytes(pagers[0]) == 0
    pagers[0].relieve()
    assert pagers[0].ledger.used_bytes == 0
    with pagers[0].lease([cut], 0) as lease:
        assert lease.data[0].data_ptr() != sources[1].flat.data_ptr()


def test_a_copy_is_sent_ahead_for_whichever_trial_comes_next(pagers, sources, handle):
    pager = pagers[0]
    first, second = (handle(sources[1], owner) for owner in (0, 1))
    prefetcher = BlockPrefetcher(pager)
    with in_turn(WorkerTurn("job", "cpu:0", {})):
        prefetcher.send([UnitMemoryNeeds([first])])
        assert first.at(pager).coming is not None
        with pager.lease([second], 0) as lease:
            assert torch.equal(lease.data[0].view(torch.float32), torch.ones(SIZE // 4))
    assert loaded_bytes(pager) == SIZE
