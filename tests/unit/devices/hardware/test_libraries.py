"""What libraries take on a GPU that is not here, by figures that its allocator might give."""

from types import SimpleNamespace

import pytest
import torch

from hydra_tune.devices.cuda import CudaDevice
from hydra_tune.devices.hardware import caps, libraries
from hydra_tune.devices.hardware.libraries import LIBRARY_BYTES, CudaUnitMemory, LedgerAllowance
from tests.support.streams import LATE, Gpus

GIB = 1 << 30
GPU = torch.device("cuda", 0)
BUDGET = 70 * GIB


class Figures:
    """Of a GPU of 80 GiB, of which the allocator may have 78; 2 GiB of it were in tensors before there was a pool."""

    def __init__(self):
        self.peak, self.reserved, self.free = 2 * GIB, 2 * GIB, 77 * GIB
        self.is_reset = False
        self.cuda = SimpleNamespace(
            memory_allocated=lambda _device: 2 * GIB,
            max_memory_allocated=lambda _device: self.peak,
            memory_reserved=lambda _device: self.reserved,
            mem_get_info=lambda _device: (self.free, 80 * GIB),
            get_per_process_memory_fraction=lambda _device: 78 / 80,
            reset_peak_memory_stats=lambda _device: setattr(self, "is_reset", True),
        )
        self.device = torch.device

    def after(self, counted, beside, outside=0):
        """A unit for which the ledger has counted some bytes; libraries took others from the allocator, and beside it."""
        self.peak = 2 * GIB + counted + beside
        self.reserved = self.peak
        self.free = 79 * GIB - self.reserved - outside
        return counted


@pytest.fixture
def gpu(monkeypatch):
    made = Figures()
    monkeypatch.setattr(libraries, "torch", made)
    return made


def test_what_libraries_take_beyond_their_reserve_is_taken_from_the_pool(gpu):
    found = CudaUnitMemory(GPU, BUDGET, gives_back=True)
    assert found.room(gpu.after(30 * GIB, 9 * GIB)) == LedgerAllowance(limit_bytes=67 * GIB, gain_bytes=0)


def test_memory_that_is_gone_beside_the_allocator_counts_as_well(gpu):
    """Of 79 GiB that there were, 2 are others' tensors, 1 is a workspace, and 12 are not free any more."""
    found = CudaUnitMemory(GPU, BUDGET, gives_back=True)
    assert found.room(gpu.after(30 * GIB, GIB, outside=12 * GIB)).limit_bytes == 64 * GIB


def test_half_of_what_the_reserve_has_too_much_comes_back(gpu):
    found = CudaUnitMemory(GPU, BUDGET, gives_back=True).room(gpu.after(30 * GIB, 2 * GIB))
    assert found == LedgerAllowance(limit_bytes=74 * GIB, gain_bytes=GIB)
    small = CudaUnitMemory(GPU, BUDGET, gives_back=True).room(gpu.after(30 * GIB, 0))
    assert small.gain_bytes == (6 * GIB - LIBRARY_BYTES) // 2


def test_a_budget_that_the_user_has_chosen_does_not_grow(gpu):
    found = CudaUnitMemory(GPU, BUDGET, gives_back=False)
    assert found.room(gpu.after(30 * GIB, 2 * GIB)).gain_bytes == 0


def test_the_largest_workspaces_so_far_count_and_no_unit_that_took_less_than_its_pilot_said(gpu):
    found = CudaUnitMemory(GPU, BUDGET, gives_back=True)
    assert found.room(gpu.after(30 * GIB, -GIB)).limit_bytes == 76 * GIB
    assert found.room(gpu.after(30 * GIB, 3 * GIB)).limit_bytes == 73 * GIB
    assert found.room(gpu.after(30 * GIB, GIB)).limit_bytes == 73 * GIB


def test_a_device_alone_on_its_gpu_looks_anew_at_each_unit(monkeypatch):
    """Two have one allocator, whose figures are of both."""
    gpus = Gpus(LATE)
    gpus.stand_in(monkeypatch, libraries)
    resets = []
    gpus.cuda.reset_peak_memory_stats = resets.append
    device = CudaDevice(0, 1 << 20, gives_back=True)
    monkeypatch.setattr(caps, "_HELD", {0: [0.5]})
    assert device.unit_memory() is not None
    assert resets == [device.torch_device]
    monkeypatch.setattr(caps, "_HELD", {0: [0.5, 0.5]})
    assert device.unit_memory() is None
    device.close()
