"""What is sent ahead: it is there in time or waited for, costs nobody his room, and changes no byte."""

import random
import threading
import weakref

import pytest
import torch

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.device import DeviceCopyRoute
from hydra_tune.memory.block import Block, BlockKind
from hydra_tune.memory.block_release import bring_home, drop
from hydra_tune.memory.device_loss import dirty_owners, give_up
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.prefetch import BlockPrefetcher, UnitMemoryNeeds
from tests.support.gated import PATIENCE_SECONDS, GatedDevice

SIZE = 640


@pytest.fixture
def pagers():
    devices = [GatedDevice(index, 3 * SIZE + 128) for index in range(2)]
    made = [Pager(device) for device in devices]
    yield made
    for pager in made:
        pager.device.gate.set()
        pager.device.close()


@pytest.fixture
def pager(pagers):
    return pagers[0]


@pytest.fixture
def prefetch(pager):
    return BlockPrefetcher(pager)


def block(value=0, size=SIZE):
    made = Block(BlockKind.INPUTS, size, 64)
    made.host = torch.full((size,), value, dtype=torch.uint8)
    return made


def holds(made, value):
    data = made.data if made.data is not None else made.host
    return data.unique().tolist() == [value]


def visit(pager, *blocks, write=None):
    """A unit that uses blocks, and perhaps overwrites the first."""
    with pager.lease(blocks, 0):
        if write is not None:
            blocks[0].data.fill_(write)
            blocks[0].dirty = True


def test_a_block_comes_while_a_unit_computes_and_the_next_unit_has_it(pager, prefetch):
    running, later = block(1), block(2)
    with pager.lease([running], 0):
        prefetch.send([UnitMemoryNeeds([later])])
        assert pager.ledger.used_bytes == pager.resident_bytes == 2 * SIZE, "its room is taken from the start"
        assert later.home is None, "nobody is told of bytes that are not there"
    with pager.lease([later], 0):
        assert later.home is pager
        assert later.coming is None
        assert holds(later, 2)
    assert pager.bytes_in == {BlockKind.INPUTS: 2 * SIZE}, "and it was loaded once"
    assert (pager.bytes_ahead, pager.bytes_in_vain) == (SIZE, 0)


def test_the_memory_of_what_comes_is_allocated_by_the_worker(pager, prefetch, monkeypatch):
    threads = []
    empty = pager.device.empty
    monkeypatch.setattr(pager.device, "empty", lambda size: (threads.append(threading.get_ident()), empty(size))[1])
    prefetch.send([UnitMemoryNeeds([block(1), block(2)])])
    assert threads == [threading.get_ident()] * 2


def test_nobody_is_asked_as_long_as_everything_fits(pager, prefetch):
    asked = []
    prefetch.asks = lambda: asked.append(True) or []
    a, b, c, d = (block(value) for value in range(4))
    visit(pager, a, b, c)
    visit(pager, a)
    assert not asked
    visit(pager, d)
    assert asked == [True], "room had to be made"
    for _ in range(100):
        visit(pager, d)
    assert len(asked) < 100, "and after a while everything fits again"


def test_a_clean_block_makes_room_at_once_and_the_one_not_used_for_longest_goes(pager, prefetch):
    old, new, running, later = (block(value) for value in range(4))
    for made in (old, new):
        visit(pager, made)
    with pager.lease([running], 0):
        prefetch.send([UnitMemoryNeeds([later])])
        assert (old.home, new.home) == (None, pager)
    assert pager.bytes_out == {}
    assert pager.ledger.used_bytes == pager.resident_bytes == 3 * SIZE


def test_what_comes_next_and_what_is_in_use_is_no_victim(pager, prefetch):
    wanted, running, later, other = (block(value) for value in range(4))
    visit(pager, wanted, other)
    with pager.lease([running], 0):
        prefetch.send([UnitMemoryNeeds([wanted, later])])
        assert (running.home, wanted.home, other.home) == (pager, pager, None)
        prefetch.send([UnitMemoryNeeds([wanted, later, block()])])
        assert pager.ledger.used_bytes == 3 * SIZE, "only what will fit is sent"


def test_a_dirty_block_is_written_back_in_the_background_and_gives_its_room_the_next_time(pager, prefetch):
    changed, running, other, later = (block(value) for value in range(4))
    visit(pager, changed, write=9)
    visit(pager, other)
    with pager.lease([running, other], 0):
        prefetch.send([UnitMemoryNeeds([later])])
        assert later.coming is None, "there is no room yet"
        changed.leaving.wait()
        assert changed.home is pager
        assert changed.dirty
        prefetch.send([UnitMemoryNeeds([later])])
        assert changed.home is None
    visit(pager, later)
    assert holds(changed, 9)
    assert pager.bytes_out == {BlockKind.INPUTS: SIZE}


def test_a_unit_of_many_steps_has_sent_between_two_of_them_what_has_waited_for_a_write_back(pager, prefetch):
    changed, running, other, later = (block(value) for value in range(4))
    visit(pager, changed, write=9)
    pager.device.gate.clear()
    with pager.lease([running, other], 0) as lease:
        prefetch.send([UnitMemoryNeeds([later])])
        lease.pause()
        assert (changed.home, later.coming) == (pager, None), "its write-back is under way"
        pager.device.gate.set()
        changed.leaving.wait()
        lease.pause()
        assert (changed.home, later.coming is None) == (None, False)
        assert pager.ledger.used_bytes == 3 * SIZE
        sent = later.coming
        lease.pause()
        assert later.coming is sent, "once"
    visit(pager, later)
    assert holds(changed, 9)
    assert (pager.bytes_ahead, pager.bytes_in_vain) == (SIZE, 0)


def test_what_has_waited_beside_one_unit_is_not_sent_beside_the_next(pager, prefetch):
    changed, running, other, later = (block(value) for value in range(4))
    visit(pager, changed, write=9)
    with pager.lease([running, other], 0):
        prefetch.send([UnitMemoryNeeds([later])])
        changed.leaving.wait()
    with pager.lease([running], 0) as lease:
        lease.pause()
    assert later.coming is None


def test_when_a_unit_has_ended_nothing_is_held_of_what_waited_beside_it(pager, prefetch):
    changed, running, other, later = (block(value) for value in range(4))
    visit(pager, changed, write=9)
    with pager.lease([running, other], 0):
        prefetch.send([UnitMemoryNeeds([later])])
    prefetch.end()
    seen = weakref.ref(later.host)
    del later
    assert seen() is None


def test_what_will_have_to_go_for_the_next_units_work_is_written_back_and_stays_for_now(pager, prefetch):
    first, second, running = block(1), block(2), block(3)
    visit(pager, first, write=8)
    visit(pager, second, write=9)
    with pager.lease([running], 0):
        prefetch.send([UnitMemoryNeeds([], SIZE)])
        first.leaving.wait()
        assert second.leaving is None, "one is enough"
        assert first.home is pager
    with pager.lease([running], SIZE):
        assert first.home is None
        assert pager.device.begun.is_set()
    assert holds(first, 8)
    assert pager.bytes_out == {BlockKind.INPUTS: SIZE}


def test_a_block_that_is_moved_at_this_moment_is_passed_over_and_the_next_one_written_back(pager, prefetch):
    moved, changed, running = block(1), block(2), block(3)
    visit(pager, moved, write=8)
    visit(pager, changed, write=9)
    holding, over = threading.Event(), threading.Event()

    def hold():
        with moved.lock:
            holding.set()
            assert over.wait(PATIENCE_SECONDS)

    thread = threading.Thread(target=hold, daemon=True)
    with pager.lease([running], 0):
        thread.start()
        assert holding.wait(PATIENCE_SECONDS)
        prefetch.send([UnitMemoryNeeds([], SIZE)])
        over.set()
        thread.join(PATIENCE_SECONDS)
        assert moved.leaving is None
        changed.leaving.wait()
    bring_home(changed)
    assert holds(changed, 9)


def test_what_was_chosen_when_there_was_time_goes_first(pager, prefetch):
    chosen, idle, running = block(1), block(2), block(3)
    visit(pager, idle)
    visit(pager, chosen, write=9)
    chosen.kind = BlockKind.OPTIMIZER  # so that it comes before what was not used for longest
    with pager.lease([running], 0):
        prefetch.send([UnitMemoryNeeds([], SIZE)])
    chosen.kind = BlockKind.INPUTS
    assert pager.victims() == [chosen, idle, running]


def test_a_block_that_is_changed_again_while_it_is_written_back_loses_nothing(pager, prefetch):
    changed, running, other = block(1), block(2), block(3)
    visit(pager, changed, write=9)
    with pager.lease([running, other], 0):
        pager.device.gate.clear()
        prefetch.send([UnitMemoryNeeds([block(4)])])
        assert pager.device.begun.wait(PATIENCE_SECONDS)
        threading.Timer(0.02, pager.device.gate.set).start()
    with pager.lease([changed], 0):
        assert changed.leaving is None, "the unit has waited: what is copied must not change under the copy"
        assert holds(changed, 9)
        changed.data.fill_(11)
        changed.dirty = True
    bring_home(changed)
    assert holds(changed, 11)


def test_a_write_back_that_has_not_begun_is_given_up_when_the_block_is_used_again(pager, prefetch):
    one, other, running = block(1), block(2), block(3)
    visit(pager, one, write=8)
    visit(pager, other, write=9)
    with pager.lease([running], 0):
        pager.device.gate.clear()
        prefetch.send([UnitMemoryNeeds([block(4), block(5)])])
        assert pager.device.begun.wait(PATIENCE_SECONDS)
        assert one.leaving is not None
        assert other.leaving is not None
    with pager.lease([other], 0):
        assert other.dirty, "the gate is shut still: it was not waited for"
    pager.device.gate.set()
    for made, value in ((one, 8), (other, 9)):
        bring_home(made)
        assert holds(made, value)


def test_a_write_back_that_has_not_begun_is_given_up_when_another_device_takes_the_block_over(pagers, prefetch):
    pager, other = pagers
    one, later, running = block(1), block(2), block(3)
    visit(pager, one, write=8)
    visit(pager, later, write=9)
    with pager.lease([running], 0):
        pager.device.gate.clear()
        prefetch.send([UnitMemoryNeeds([block(4), block(5)])])
        assert pager.device.begun.wait(PATIENCE_SECONDS)
        assert later.leaving is not None
    visit(other, later)
    assert later.leaving is None
    assert later.dirty, "the gate is shut still"
    assert holds(later, 9)
    assert (pager.bytes_out, other.bytes_in, other.bytes_across) == ({}, {}, {BlockKind.INPUTS: SIZE})
    pager.device.gate.set()


def test_a_write_back_that_is_under_way_is_over_before_another_device_has_the_block(pagers, prefetch):
    pager, other = pagers
    changed, running, kept = block(1), block(2), block(3)
    visit(pager, changed, write=9)
    with pager.lease([running, kept], 0):
        pager.device.gate.clear()
        prefetch.send([UnitMemoryNeeds([block(4)])])
        assert pager.device.begun.wait(PATIENCE_SECONDS)
        threading.Timer(0.02, pager.device.gate.set).start()
    with other.lease([changed], 0):
        assert changed.leaving is None, "what is copied must not change under the copy"
        assert holds(changed, 9)
        changed.data.fill_(11)
        changed.dirty = True
    assert (pager.bytes_out, other.bytes_in) == ({BlockKind.INPUTS: SIZE}, {BlockKind.INPUTS: SIZE}), (
        "the host had it by then"
    )
    bring_home(changed)
    assert holds(changed, 11)
    assert pager.ledger.used_bytes == pager.resident_bytes


def test_a_unit_waits_for_its_own_block_and_for_no_other(pager, prefetch):
    first, second = block(1), block(2)
    pager.device.gate.clear()
    prefetch.send([UnitMemoryNeeds([first, second])])
    assert pager.device.begun.wait(PATIENCE_SECONDS)
    with pager.lease([second], 0):
        assert holds(second, 2), "though the one before it in line is not over"
        assert first.coming is not None
    threading.Timer(0.02, pager.device.gate.set).start()
    with pager.lease([first], 0):
        assert holds(first, 1)
    assert pager.waiting_ns > 0


def test_what_was_sent_in_vain_is_room_like_any_other(pager, prefetch):
    prefetch.send([UnitMemoryNeeds([block(1), block(2)])])
    made = [block(value) for value in (3, 4, 5)]
    with pager.lease(made, 128):
        assert pager.ledger.used_bytes == pager.device.budget_bytes
    assert pager.ledger.used_bytes == pager.resident_bytes == 3 * SIZE
    cancelled = 2 * SIZE - pager.bytes_ahead
    assert pager.bytes_in_vain == pager.bytes_ahead
    assert pager.bytes_in == {BlockKind.INPUTS: 5 * SIZE - cancelled}


def test_what_has_just_been_sent_is_kept_for_the_next_units_and_not_for_ever(pager, prefetch):
    used, sent = block(1), block(2)
    with pager.lease([used], 0):
        prefetch.send([UnitMemoryNeeds([sent])])
        assert pager.victims() == [used, sent], "though it may be another trial's, or optimizer state"
    sent.owner = 5
    for _ in range(3):
        visit(pager, used)
    assert pager.victims() == [sent, used], "nobody has come for it"


@pytest.mark.parametrize("give_up", [drop, bring_home])
def test_a_block_that_is_given_up_on_its_way_gives_its_room_back_when_the_copy_is_over(pager, prefetch, give_up):
    made = block(1)
    pager.device.gate.clear()
    prefetch.send([UnitMemoryNeeds([made])])
    assert pager.device.begun.wait(PATIENCE_SECONDS)
    thread = threading.Thread(target=give_up, args=[made], daemon=True)
    thread.start()
    thread.join(0.05)
    assert pager.ledger.used_bytes == SIZE, "its memory is still being written to"
    pager.device.gate.set()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert pager.ledger.used_bytes == pager.resident_bytes == 0
    assert made.coming is None
    assert (made.host is None) == (give_up is drop)


def test_another_device_may_take_a_block_on_its_way_and_what_it_makes_of_it_counts(pagers):
    one, other = pagers
    made = block(1)
    BlockPrefetcher(one).send([UnitMemoryNeeds([made])])
    visit(other, made, write=7)
    assert made.coming is None
    assert one.ledger.used_bytes == one.resident_bytes == 0
    bring_home(made)
    BlockPrefetcher(one).send([UnitMemoryNeeds([made])])
    with one.lease([made], 0):
        assert holds(made, 7), "not what was sent at first"


def test_a_block_that_is_in_use_elsewhere_or_moved_at_this_moment_is_not_sent(pagers):
    one, other = pagers
    there, wanted, locked = block(1), block(2), block(3)
    visit(other, there)
    there.pinned_for = wanted.pinned_for = other
    holding, over = threading.Event(), threading.Event()

    def hold():
        with locked.lock:
            holding.set()
            assert over.wait(PATIENCE_SECONDS)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert holding.wait(PATIENCE_SECONDS)
    BlockPrefetcher(one).send([UnitMemoryNeeds([there, wanted, locked])])
    over.set()
    thread.join(PATIENCE_SECONDS)
    assert one.ledger.used_bytes == 0
    there.pinned_for = wanted.pinned_for = None


def test_a_block_of_another_device_comes_while_a_unit_computes_and_stays_there_until_it_is_used(pagers, monkeypatch):
    one, other = pagers
    running, changed = block(1), block(2)
    visit(other, changed, write=9)
    monkeypatch.setattr(one.device, "take_over", None)  # no unit is to wait for that
    with one.lease([running], 0):
        BlockPrefetcher(one).send([UnitMemoryNeeds([changed])])
        changed.coming.copy.wait()
        assert changed.home is other
        assert (one.loads_under_way, other.loads_under_way) == (0, 0)
        BlockPrefetcher(one).send([UnitMemoryNeeds([changed])])
        BlockPrefetcher(other).send([UnitMemoryNeeds([changed])])
        assert [pager.ledger.used_bytes for pager in pagers] == [2 * SIZE, SIZE], "once, and with room on both"
    with one.lease([changed], 0):
        assert (changed.home, changed.dirty, changed.coming) == (one, True, None)
        assert holds(changed, 9)
    assert [pager.ledger.used_bytes for pager in pagers] == [pager.resident_bytes for pager in pagers] == [2 * SIZE, 0]
    assert one.bytes_across == {BlockKind.INPUTS: SIZE}, "counted once"
    assert (one.bytes_ahead, one.bytes_in_vain) == (SIZE, 0)
    assert other.bytes_out == {}, "nothing has passed the host"


def test_what_the_host_has_as_well_is_sent_from_there_and_stays_until_it_is_used(pagers):
    one, other = pagers
    made = block(2)
    visit(other, made)
    BlockPrefetcher(one).send([UnitMemoryNeeds([made])])
    assert made.home is other
    assert (one.bytes_in, one.bytes_across) == ({BlockKind.INPUTS: SIZE}, {})
    with one.lease([made], 0):
        assert (made.home, made.dirty) == (one, False)
        assert holds(made, 2)
    assert other.ledger.used_bytes == 0


@pytest.mark.parametrize("changes", [False, True])
def test_a_unit_where_the_block_is_has_it_first_and_what_it_makes_of_it_counts(pagers, changes):
    one, other = pagers
    made = block(1)
    visit(other, made, write=8 if changes else None)
    one.device.gate.clear()
    BlockPrefetcher(one).send([UnitMemoryNeeds([made])])
    assert one.device.begun.wait(PATIENCE_SECONDS)
    threading.Timer(0.02, one.device.gate.set).start()
    visit(other, made, write=9)
    assert (made.home, made.coming) == (other, None), (
        "the unit has waited: what is copied must not change under the copy"
    )
    assert one.ledger.used_bytes == one.resident_bytes == 0
    assert one.bytes_in_vain == SIZE
    visit(one, made)
    assert holds(made, 9)


def test_a_copy_that_has_not_begun_is_called_off_by_the_unit_that_has_the_block(pagers):
    one, other = pagers
    first, second = block(1), block(2)
    visit(other, first, write=8)
    visit(other, second, write=9)
    one.device.gate.clear()
    BlockPrefetcher(one).send([UnitMemoryNeeds([first, second])])
    assert one.device.begun.wait(PATIENCE_SECONDS)
    visit(other, second)
    assert (second.home, second.coming) == (other, None), "the gate is shut still"
    assert one.bytes_across == {BlockKind.INPUTS: SIZE}
    one.device.gate.set()
    visit(one, first)
    assert holds(first, 8)
    assert (one.bytes_ahead, one.bytes_in_vain) == (SIZE, 0)


def test_what_is_on_its_way_gives_its_room_first_and_is_there_then(pagers):
    one, other = pagers
    idle, sent = block(1), block(2)
    visit(other, idle)
    visit(other, sent, write=9)
    BlockPrefetcher(one).send([UnitMemoryNeeds([sent])])
    assert other.victims() == [sent, idle]
    sent.coming.copy.wait()
    visit(other, block(3), block(4))
    assert (sent.home, sent.coming, idle.home) == (one, None, other)
    assert other.bytes_out == {}
    assert holds(sent, 9)
    assert (
        [pager.ledger.used_bytes for pager in pagers] == [pager.resident_bytes for pager in pagers] == [SIZE, 3 * SIZE]
    )


def test_what_has_not_begun_to_leave_for_another_device_is_spilled_for_room(pagers):
    one, other = pagers
    first, second = block(1), block(2)
    one.device.gate.clear()
    visit(other, second, write=9)
    BlockPrefetcher(one).send([UnitMemoryNeeds([first, second])])
    assert one.device.begun.wait(PATIENCE_SECONDS)
    visit(other, block(3), block(4), block(5))
    assert (second.home, second.coming) == (None, None), "the gate is shut still"
    assert holds(second, 9)
    assert other.bytes_out == {BlockKind.INPUTS: SIZE}
    assert (one.bytes_ahead, one.bytes_in_vain, one.ledger.used_bytes) == (SIZE, 0, SIZE), (
        "nobody has waited for the line"
    )


def test_what_a_device_sends_ahead_has_room_of_what_has_left_for_another(pagers):
    """Without waiting: once the copy is over."""
    one, other = pagers
    sent, later, running = block(1), block(2), block(3)
    visit(other, sent, write=9)
    BlockPrefetcher(one).send([UnitMemoryNeeds([sent])])
    sent.coming.copy.wait()
    with other.lease([running, block()], 0):
        BlockPrefetcher(other).send([UnitMemoryNeeds([later])])
        assert (sent.home, later.coming is None) == (one, False)
    assert other.bytes_out == {}
    assert holds(sent, 9)


def test_what_is_written_back_as_well_is_sent_and_neither_copy_is_lost(pagers):
    one, other = pagers
    changed, running = block(1), block(2)
    visit(other, changed, write=9)
    with other.lease([running, block()], 0):
        other.device.gate.clear()
        BlockPrefetcher(other).send([UnitMemoryNeeds([block(4)])])
        assert other.device.begun.wait(PATIENCE_SECONDS)
    BlockPrefetcher(one).send([UnitMemoryNeeds([changed])])
    assert changed.leaving is not None
    threading.Timer(0.02, other.device.gate.set).start()
    with one.lease([changed], 0):
        assert (changed.home, changed.leaving, changed.dirty) == (one, None, False)
        assert changed.host.unique().tolist() == [9]
        assert holds(changed, 9)


def test_a_copy_from_another_device_that_fails_leaves_the_block_there(pagers):
    one, other = pagers
    made = block(1)
    visit(other, made, write=9)
    one.device.error = RuntimeError("the link is down")
    BlockPrefetcher(one).send([UnitMemoryNeeds([made])])
    assert one.device.begun.wait(PATIENCE_SECONDS), "or the lease would copy by itself"
    with pytest.raises(RuntimeError, match="the link is down"), one.lease([made], 0):
        pass
    assert (made.home, made.coming, made.dirty, made.pinned_for) == (other, None, True, None)
    assert one.ledger.used_bytes == one.resident_bytes == 0
    visit(one, made)
    assert holds(made, 9)


def test_what_had_come_from_a_device_that_is_lost_is_not_lost(pagers):
    one, other = pagers
    come, failed = block(1), block(2)
    come.owner, failed.owner = 1, 2
    visit(other, come, write=8)
    visit(other, failed, write=9)
    BlockPrefetcher(one).send([UnitMemoryNeeds([come])])
    come.coming.copy.wait()
    one.device.error = RuntimeError("the other device is lost")
    BlockPrefetcher(one).send([UnitMemoryNeeds([failed])])
    assert dirty_owners(other) == {2}
    give_up(other)
    assert (come.home, failed.home, failed.coming) == (one, None, None)
    assert holds(come, 8)
    assert [pager.ledger.used_bytes for pager in pagers] == [pager.resident_bytes for pager in pagers] == [SIZE, 0]


def test_what_was_on_its_way_to_a_device_that_is_lost_is_where_it_was(pagers):
    one, other = pagers
    made = block(1)
    visit(other, made, write=9)
    BlockPrefetcher(one).send([UnitMemoryNeeds([made])])
    assert dirty_owners(one) == set()
    give_up(one)
    assert (made.home, made.coming) == (other, None)
    assert one.ledger.used_bytes == one.resident_bytes == 0
    visit(other, made)
    assert holds(made, 9)


def test_what_is_out_of_reach_is_written_back_there_and_sent_the_next_time(pagers, monkeypatch):
    one, other = pagers
    monkeypatch.setattr(one.device, "reach", lambda source: DeviceCopyRoute.NONE)
    made = block(1)
    visit(other, made, write=9)
    BlockPrefetcher(one).send([UnitMemoryNeeds([made])])
    assert made.coming is None
    assert one.ledger.used_bytes == 0
    made.leaving.wait()
    BlockPrefetcher(one).send([UnitMemoryNeeds([made])])
    with one.lease([made], 0):
        assert holds(made, 9)
    assert (other.bytes_out, one.bytes_in, one.bytes_ahead) == (
        {BlockKind.INPUTS: SIZE},
        {BlockKind.INPUTS: SIZE},
        SIZE,
    )
    assert other.ledger.used_bytes == 0


@pytest.mark.parametrize("link_bandwidth", [None, 1e9])
def test_where_all_fits_somebody_is_asked_as_long_as_blocks_come_over_a_link(link_bandwidth):
    devices = [CpuDevice(index, 8 * SIZE, link_bandwidth) for index in range(2)]
    one, other = (Pager(device) for device in devices)
    asked, prefetch = [], BlockPrefetcher(one)
    prefetch.asks = lambda: asked.append(True) or []
    made = block(1)
    visit(other, made, write=9)
    visit(one, made)
    assert bool(asked) == (link_bandwidth is not None)
    for _ in range(100):
        visit(one, made)
    assert len(asked) < 100, "and after a while nothing comes any more"
    for device in devices:
        device.close()


@pytest.mark.parametrize("seed", range(4))
def test_two_devices_that_send_and_take_each_others_blocks_at_once_lose_nothing(seed):
    """Two workers, two pagers of which none has room for half of the blocks, and links on which copies take their time."""
    devices = [CpuDevice(index, 4 * SIZE, 2e6) for index in range(2)]
    pagers = [Pager(device) for device in devices]
    blocks = [block(value) for value in range(10)]
    values, in_use, errors = list(range(10)), [threading.Lock() for _ in blocks], []

    def work(pager):
        drawn, prefetch = random.Random(f"{seed} {pager.device.name}"), BlockPrefetcher(pager)
        for _ in range(60):
            number = drawn.randrange(len(blocks))
            if not in_use[number].acquire(blocking=False):
                continue  # one unit of a trial at a time
            try:
                with pager.lease([blocks[number]], drawn.choice([0, SIZE, 2 * SIZE])):
                    prefetch.send(
                        [UnitMemoryNeeds(drawn.sample(blocks, 2)), UnitMemoryNeeds(drawn.sample(blocks, 1), SIZE)]
                    )
                    assert holds(blocks[number], values[number])
                    values[number] = (values[number] + 1) % 256
                    blocks[number].data.fill_(values[number])
                    blocks[number].dirty = True
                    assert pager.ledger.used_bytes <= pager.device.budget_bytes
            finally:
                in_use[number].release()

    def watched(pager):
        try:
            work(pager)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=watched, args=[pager], daemon=True) for pager in pagers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    assert not errors
    for made, value in zip(blocks, values, strict=True):
        bring_home(made)
        assert holds(made, value)
    assert [pager.ledger.used_bytes for pager in pagers] == [pager.resident_bytes for pager in pagers] == [0, 0]
    assert all(pager.ledger.peak_bytes <= 4 * SIZE for pager in pagers)
    for device in devices:
        device.close()


def test_a_copy_that_fails_is_the_affair_of_the_unit_that_comes_for_its_block(pager, prefetch):
    lost, fine = block(1), block(2)
    pager.device.error = RuntimeError("the link is down")
    prefetch.send([UnitMemoryNeeds([lost])])
    assert pager.device.begun.wait(PATIENCE_SECONDS)
    lost.coming.copy.wait_quietly()
    pager.device.error = None
    visit(pager, fine)
    with pytest.raises(RuntimeError, match="the link is down"), pager.lease([lost, fine], 0):
        pass
    assert lost.coming is lost.home is lost.pinned_for is fine.pinned_for is None
    assert pager.ledger.used_bytes == pager.resident_bytes == SIZE
    visit(pager, lost)
    assert holds(lost, 1)


def test_a_write_back_that_fails_leaves_the_block_as_it_was(pager, prefetch):
    changed, running = block(1), block(2)
    visit(pager, changed, write=9)
    pager.device.error = OSError("no")
    with pager.lease([running, block()], 0):
        prefetch.send([UnitMemoryNeeds([block(4)])])
        changed.leaving.wait_quietly()
        pager.device.error = None
        prefetch.send([UnitMemoryNeeds([block(4)])])
        assert changed.home is pager
    drop(running)
    bring_home(changed)
    assert holds(changed, 9)


def test_an_error_in_the_question_leaves_no_unit_half_begun(pager, prefetch):
    def ask():
        raise ZeroDivisionError

    made = [block(value) for value in range(4)]
    visit(pager, *made[:3])
    prefetch.asks = ask
    with pytest.raises(ZeroDivisionError), pager.lease(made[3:], 128):
        pass
    assert made[3].pinned_for is None
    assert pager.ledger.used_bytes == pager.resident_bytes


def test_a_device_without_memory_in_one_piece_sends_nothing(pager, prefetch, monkeypatch):
    def refuse(size):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(pager.device, "empty", refuse)
    prefetch.send([UnitMemoryNeeds([block()])])
    assert pager.ledger.used_bytes == pager.resident_bytes == 0
