"""Blocks on GPUs that are not here: spilled, sent ahead, handed over and given up, and nothing is touched before its turn.

`tests/support/streams.py` says what is asked of the order of copies and computing, and how early and late they run.
"""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from hydra_tune.devices.cuda import CUDA_ALIGNMENT, CudaDevice
from hydra_tune.memory.block import Block, BlockKind
from hydra_tune.memory.block_release import bring_home, drop
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.prefetch import BlockPrefetcher, UnitMemoryNeeds
from tests.support.streams import HASTES, Gpus

PATIENCE_SECONDS = 60
SEEDS = [*HASTES, *range(1, 5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 100))]
BUDGET_BYTES = 10 * CUDA_ALIGNMENT
SIZES = (1, 512, 600, 1030, 1600, 2000)


@pytest.fixture
def gpus(request, monkeypatch):
    made = Gpus(request.param)
    made.stand_in(monkeypatch)
    yield made
    made.finish()
    assert not made.faults, made.faults[0]


class Worker:
    """A device, its pager, and the thread that works there."""

    def __init__(self, device):
        self.device, self.pager = device, Pager(device)
        self.prefetch = BlockPrefetcher(self.pager)
        self._current = device.worker()
        self._thread = ThreadPoolExecutor(1, initializer=self._current.__enter__)

    def run(self, function, *args):
        return self._thread.submit(function, *args).result(PATIENCE_SECONDS)

    def close(self):
        self.run(self._current.__exit__, None, None, None)
        self._thread.shutdown()
        self.device.close()


class Blocks:
    """Some, and what they should hold."""

    def __init__(self, workers, drawn):
        self.workers, self.drawn = workers, drawn
        self.values = {}
        for value, size in enumerate(SIZES):
            self.values[self._on_host(workers[0].device, size, value)] = value

    @staticmethod
    def _on_host(device, size, value):
        block = Block(BlockKind.INPUTS, size, CUDA_ALIGNMENT)
        block.host = device.on_host(lambda: device.host_empty(size).fill_(value))
        return block

    def some(self, most, nbytes=BUDGET_BYTES):
        """So many at the most, and not too large together."""
        found = []
        for block in self.drawn.sample(list(self.values), min(len(self.values), self.drawn.randint(0, most))):
            nbytes -= block.nbytes
            if nbytes >= 0:
                found.append(block)
        return found

    def unit(self, worker):
        """Reads and writes some, makes one, and has others sent ahead meanwhile."""
        wanted = self.some(3, BUDGET_BYTES - 2 * CUDA_ALIGNMENT)
        with worker.pager.lease(wanted, 2 * CUDA_ALIGNMENT) as lease:
            worker.prefetch.send([UnitMemoryNeeds(self.some(2)), UnitMemoryNeeds(self.some(2), CUDA_ALIGNMENT)])
            made = worker.device.empty(CUDA_ALIGNMENT).fill_(0)
            for block in wanted:
                made.add_(block.data[:1])
                if self.drawn.random() < 0.6:
                    block.data.add_(1)
                    block.dirty = True
                    self.values[block] += 1
            if self.drawn.random() < 0.3:
                self.values[lease.block_of(BlockKind.ACTIVATIONS, made.zero_().add_(9))] = 9
            del made
        if self.drawn.random() < 0.5:
            worker.device.synchronize()  # as at the end of a unit; else another may have its blocks before

    def step(self):
        worker = self.drawn.choice(self.workers)
        what = self.drawn.random()
        if what < 0.8:
            worker.run(self.unit, worker)
        elif what < 0.9:
            for block in self.some(1):
                drop(block)
                del self.values[block]
                fresh = self.drawn.randint(0, 100)
                self.values[self._on_host(worker.device, self.drawn.choice(SIZES), fresh)] = fresh
        else:
            for block in self.some(2):
                bring_home(block)

    def check(self):
        for block, value in self.values.items():
            bring_home(block)
            assert block.host.tolist() == [value] * block.size
            drop(block)


@pytest.mark.parametrize("gpus", SEEDS, indirect=True)
def test_what_is_sent_to_another_device_is_what_its_device_has_computed_and_is_given_up_behind_the_copy(gpus):
    workers = [Worker(CudaDevice(index, BUDGET_BYTES)) for index in range(2)]
    one, other = workers
    (made, idle) = (Blocks._on_host(other.device, 4 * CUDA_ALIGNMENT, value) for value in (1, 2))

    def change(worker, block):
        with worker.pager.lease([block], 0):
            block.data.add_(1)
            block.dirty = True

    def send():
        with one.pager.lease([idle], 0):
            one.prefetch.send([UnitMemoryNeeds([made])])
            idle.data.add_(1)
            idle.dirty = True

    for turn in range(3):
        other.run(change, other, made)  # nobody waits until it is computed
        one.run(send)
        assert made.coming is not None
        if turn:
            other.run(change, other, made)  # which has it first
            one.run(send)
        one.run(change, one, made)
        assert made.home is one.pager
        other.run(lambda: other.device.empty(4 * CUDA_ALIGNMENT).fill_(99))  # in the memory that it had there, maybe
    bring_home(made)
    assert made.host.unique().tolist() == [1 + 2 * 3 + 2]
    assert one.pager.bytes_across.total() == one.pager.bytes_ahead, "no unit had to fetch it"
    for block in (made, idle):
        drop(block)
    for worker in workers:
        assert worker.pager.ledger.used_bytes == 0
        worker.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("places", ["one GPU for each", "two on one"])
@pytest.mark.parametrize("gpus", SEEDS, indirect=True)
def test_blocks_keep_their_bits_wherever_they_go_and_are_sent_ahead(gpus, places):
    on_one = places == "two on one"
    devices = [CudaDevice(0 if on_one else index, BUDGET_BYTES, index if on_one else None) for index in range(2)]
    workers = [Worker(device) for device in devices]
    blocks = Blocks(workers, random.Random(str(gpus.haste)))
    for _ in range(40):
        blocks.step()
    blocks.check()
    # Of both: on a busy machine, what one of them has sent ahead may all come too late.
    assert sum(worker.pager.bytes_ahead for worker in workers) > 0
    assert sum(worker.pager.bytes_across.total() for worker in workers) > 0
    for worker in workers:
        assert worker.pager.ledger.used_bytes == 0
        worker.close()
