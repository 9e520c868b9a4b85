"""How fast copies have been."""

import pytest
import torch

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.hardware.link import LinkCostModel
from hydra_tune.memory.block import Block, BlockKind
from hydra_tune.memory.link_meter import CopyTimes, LinkMeter, bytes_per_second
from hydra_tune.memory.pager import Pager

MIB = 1 << 20


def test_the_pace_of_links_is_that_of_their_copies():
    first, second = LinkMeter(), LinkMeter()
    first.copied(6 * MIB, 1.0)
    second.copied(2 * MIB, 3.0)
    assert bytes_per_second([first, second]) == 2 * MIB


def test_small_copies_say_nothing_of_a_link():
    meter = LinkMeter()
    meter.copied(MIB, 1.0)
    for _ in range(1000):
        meter.copied(1000, 1.0)
    assert bytes_per_second([meter]) == MIB


def test_before_much_is_copied_a_pace_is_guessed():
    meter = LinkMeter()
    meter.copied(MIB - 1, 100.0)
    assert bytes_per_second([meter]) == bytes_per_second([]) > MIB


def test_what_a_pager_loads_and_spills_is_measured():
    slow = CpuDevice(0, 8 * MIB, link_bandwidth=100e6)
    try:
        pager = Pager(slow)
        block = Block(BlockKind.PARAMETERS, 2 * MIB, slow.alignment)
        block.host = torch.zeros(2 * MIB, dtype=torch.uint8)
        with pager.lease([block], 0):
            assert pager.link.nbytes == 2 * MIB
            block.dirty = True
        pager.write_back(block)
        assert pager.link.nbytes == 4 * MIB
        assert 0 < bytes_per_second([pager.link]) <= 100e6
    finally:
        slow.close()


def seen(*copies):
    times = CopyTimes()
    for nbytes, nanoseconds, how in copies:
        times.copied("cpu:0", "in", None, "parameters", 0, nbytes, how, 0, nanoseconds)
    return times.link(LinkCostModel(bytes_per_second=7.0, seconds_per_block=5.0))


def test_what_copies_took_is_the_median_of_those_that_were_waited_for():
    small = [(100, 1000, "waited"), (100, 3000, "waited"), (100, 2000, "waited")]
    large = [(MIB, 1_002_000, "waited"), (MIB, 2_002_000, "waited"), (MIB, 90_002_000, "waited")]
    behind = [(MIB, 1, "background"), (100, 1, "late")]
    link = seen(*small, *large, *behind)
    assert link.seconds_per_block == 2e-6
    assert link.bytes_per_second == pytest.approx(MIB / 2e-3)


def test_what_was_not_seen_is_guessed():
    assert seen() == LinkCostModel(bytes_per_second=7.0, seconds_per_block=5.0)
    assert seen((100, 1000, "waited")) == LinkCostModel(bytes_per_second=7.0, seconds_per_block=1e-6)
