"""Any sequence of units on two devices with a small host: both ledgers are what is there, and no byte is lost on the way."""

import tempfile
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.memory.block import Block, BlockKind, TensorBlock
from hydra_tune.memory.block_release import bring_home, drop
from hydra_tune.memory.block_states import BlockState
from hydra_tune.memory.host.disk import SpillDisk
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.memory.host.spill_dir import SpillFolder
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.prefetch import BlockPrefetcher, UnitMemoryNeeds
from tests.support.gated import settle, state_of

DEVICE_BYTES = 10 * 64
HOST_BYTES = 6 * 64
SIZES = (64, 64, 128, 128, 192, 256)  # whole multiples of the alignment, so that a block has no padding


class SmallHost(RuleBasedStateMachine):
    """A model of the tiers: what each block should hold, by value."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.devices = [CpuDevice(index, DEVICE_BYTES) for index in range(2)]
        self.host = HostTier(HOST_BYTES, SpillDisk(SpillFolder(Path(self.folder.name))), self.devices[0])
        self.pagers = [Pager(device, self.host) for device in self.devices]
        self.blocks: dict[Block, int] = {}
        self.tensors: dict[Block, torch.Tensor] = {}
        for value, size in enumerate(SIZES):
            self.host.take(-(-size // 64) * 64)
            tensor = torch.full((size,), value, dtype=torch.uint8)
            group = TensorBlock(BlockKind.PARAMETERS, [tensor], self.devices[0])
            self.host.enter(group)
            self.blocks[group], self.tensors[group] = value, tensor

    def teardown(self):
        settle(self.host)
        for block in self.blocks:
            drop(block)
        assert self.host.ledger.used_bytes == self.host.disk.stored_bytes == 0
        assert all(pager.ledger.used_bytes == 0 for pager in self.pagers)
        self.host.close()
        for device in self.devices:
            device.close()
        assert list(Path(self.folder.name).iterdir()) == []
        self.folder.cleanup()

    def pick(self, numbers):
        known = list(self.blocks)
        return list(dict.fromkeys(known[number % len(known)] for number in numbers)) if known else []

    @rule(
        where=st.integers(0, 1),
        numbers=st.lists(st.integers(0, 20), max_size=3),
        write=st.booleans(),
        ahead=st.lists(st.integers(0, 20), max_size=4),
    )
    def unit(self, where, numbers, write, ahead):
        """A unit reads its blocks, perhaps writes the first; others are sent ahead, or read, while it does."""
        pager, wanted = self.pagers[where], self.pick(numbers)
        if sum(block.nbytes for block in wanted) > DEVICE_BYTES:
            return
        with pager.lease(wanted, 0):
            BlockPrefetcher(pager).send([UnitMemoryNeeds(self.pick(ahead))])
            for block in wanted:
                assert block.data.unique().tolist() == [self.blocks[block]]
                assert block.state is BlockState.COMPUTING
            if write and wanted:
                self.blocks[wanted[0]] = (self.blocks[wanted[0]] + 1) % 256
                wanted[0].data.fill_(self.blocks[wanted[0]])
                wanted[0].dirty = True

    @rule(where=st.integers(0, 1), size=st.integers(1, 300), value=st.integers(0, 255))
    def unit_that_makes(self, where, size, value):
        with self.pagers[where].lease([], -(-size // 64) * 64) as lease:
            made = lease.block_of(BlockKind.ACTIVATIONS, torch.full((size,), value, dtype=torch.uint8))
        self.blocks[made] = value

    @rule(number=st.integers(0, 20))
    def forget(self, number):
        for block in self.pick([number]):
            drop(block)
            assert block.state is BlockState.DROPPED
            del self.blocks[block]
            self.tensors.pop(block, None)

    @rule(number=st.integers(0, 20))
    def home(self, number):
        for block in self.pick([number]):
            bring_home(block)
            assert block.place is None
            assert block.host.unique().tolist() == [self.blocks[block]]

    @rule()
    def whole(self):
        blocks = list(self.tensors)
        with self.host.whole(blocks):
            for block in blocks:
                bring_home(block)
            assert all(block.host is not None for block in blocks)

    @invariant()
    def the_ledger_is_what_is_there(self):
        settle(self.host)
        there = sum(block.nbytes for block in self.blocks if block.host is not None)
        assert self.host.ledger.used_bytes == there <= HOST_BYTES
        for pager in self.pagers:
            here = sum(block.nbytes for block in self.blocks if pager.has(block))
            assert pager.ledger.used_bytes == pager.resident_bytes == here
        stored = sum(path.stat().st_size for path in Path(self.folder.name).glob("hydra-tune-*/block-*.bin"))
        assert self.host.disk.stored_bytes == stored

    @invariant()
    def states_are_what_is_there(self):
        settle(self.host)
        for block in self.blocks:
            assert block.state is state_of(block)
            assert (block.leaving is None) or block.dirty
            assert (block.data is None) == (block.home is None)

    @invariant()
    def no_byte_is_lost(self):
        settle(self.host)  # or the disk's thread would take memory from under a tensor that is being read here
        for block, value in self.blocks.items():
            if block in self.tensors:
                assert self.tensors[block].unique().tolist() == [value], "wherever it is, the tensor is right"
            if block.data is not None and block.host is not None and not block.dirty:
                assert block.host.equal(block.data), "clean means that the host has it too"
            if block.coming is not None:
                source = block.host if block.home is None else block.data
                assert block.home is not block.coming.home
                assert source.unique().tolist() == [value], "what is on its way stays where it comes from"


TestSmallHost = SmallHost.TestCase
TestSmallHost.settings = settings(max_examples=25, stateful_step_count=30, deadline=None, derandomize=True)
