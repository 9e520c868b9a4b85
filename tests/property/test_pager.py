"""Any sequence of units on two devices: the ledger is the sum of what is there, never above the budget, and no byte is lost."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.device import DeviceCopyRoute
from hydra_tune.errors import BudgetError
from hydra_tune.memory.block import Block, BlockKind
from hydra_tune.memory.block_release import bring_home, drop
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.prefetch import BlockPrefetcher, UnitMemoryNeeds
from tests.support.gated import state_of

BUDGET_BYTES = 10 * 64
SIZES = (1, 64, 100, 130, 200, 250)


class Near(CpuDevice):
    """Has other devices nearer than the host."""

    def reach(self, source):
        return DeviceCopyRoute.NEAR


class TwoDevices(RuleBasedStateMachine):
    """A model of the pagers: what each block should hold, by value."""

    def __init__(self):
        super().__init__()
        self.devices = [CpuDevice(0, BUDGET_BYTES), Near(1, BUDGET_BYTES)]
        self.pagers = [Pager(device) for device in self.devices]
        self.blocks: dict[Block, int] = {}
        for value, size in enumerate(SIZES):
            block = Block(BlockKind.INPUTS, size, 64)
            block.host = torch.full((size,), value, dtype=torch.uint8)
            self.blocks[block] = value

    def teardown(self):
        for block in self.blocks:
            drop(block)
        for pager in self.pagers:
            assert pager.ledger.used_bytes == pager.resident_bytes == 0
        for device in self.devices:
            device.close()

    def pick(self, numbers):
        known = list(self.blocks)
        return list(dict.fromkeys(known[number % len(known)] for number in numbers)) if known else []

    @rule(
        where=st.integers(0, 1),
        numbers=st.lists(st.integers(0, 20), max_size=4),
        workspace=st.integers(0, 500),
        write=st.booleans(),
        ahead=st.lists(st.integers(0, 20), max_size=4),
    )
    def unit(self, where, numbers, workspace, write, ahead):
        """A unit reads its blocks, perhaps writes the first; others are sent ahead while it does."""
        pager, wanted = self.pagers[where], self.pick(numbers)
        fits = sum(block.nbytes for block in wanted) + workspace <= BUDGET_BYTES
        try:
            with pager.lease(wanted, workspace):
                assert fits
                assert all(block.home is pager for block in wanted)
                assert pager.ledger.used_bytes == pager.resident_bytes + workspace
                BlockPrefetcher(pager).send([UnitMemoryNeeds(self.pick(ahead))])
                assert all(block.home is pager for block in wanted)
                assert all(block.state is state_of(block) for block in self.blocks)
                assert pager.ledger.used_bytes == pager.resident_bytes + workspace
                if write and wanted:
                    self.blocks[wanted[0]] = (self.blocks[wanted[0]] + 1) % 256
                    wanted[0].data.fill_(self.blocks[wanted[0]])
                    wanted[0].dirty = True
        except BudgetError:
            assert not fits

    @rule(where=st.integers(0, 1), size=st.integers(1, 300), value=st.integers(0, 255), spare=st.integers(0, 100))
    def unit_that_makes(self, where, size, value, spare):
        """A unit makes a block, from a workspace that is large enough."""
        pager = self.pagers[where]
        workspace = -(-size // 64) * 64 + spare
        with pager.lease([], workspace) as lease:
            made = lease.block_of(BlockKind.ACTIVATIONS, torch.full((size,), value, dtype=torch.uint8))
            assert pager.ledger.used_bytes == pager.resident_bytes + workspace - made.nbytes
        self.blocks[made] = value

    @rule(number=st.integers(0, 20))
    def forget(self, number):
        for block in self.pick([number]):
            drop(block)
            del self.blocks[block]

    @rule(number=st.integers(0, 20))
    def home(self, number):
        for block in self.pick([number]):
            bring_home(block)
            assert block.place is None

    @invariant()
    def the_ledger_is_what_is_there(self):
        for pager in self.pagers:
            there = sum(block.nbytes for block in self.blocks if pager.has(block))
            assert pager.ledger.used_bytes == pager.resident_bytes == there
            assert pager.ledger.peak_bytes <= BUDGET_BYTES

    @invariant()
    def states_are_what_is_there(self):
        for block in self.blocks:
            assert block.state is state_of(block)
            assert (block.leaving is None) or block.dirty
            assert (block.data is None) == (block.home is None)
            assert block.coming is None or block.coming.home is not block.home
            assert block.coming is None or block.coming.host is not None or block.home is not None

    @invariant()
    def no_byte_is_lost(self):
        for block, value in self.blocks.items():
            assert block.pinned_for is None
            present = block.data if block.home is not None else block.host
            assert present.unique().tolist() == [value]
            if block.data is not None and not block.dirty:
                assert block.host.equal(block.data), "clean means that the host has it too"


TestTwoDevices = TwoDevices.TestCase
TestTwoDevices.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
