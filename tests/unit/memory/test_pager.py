"""The pager: what a unit needs is there, what is not needed goes in order, and every byte is counted once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.device import DeviceCopyRoute
from hydra_tune.devices.hardware.libraries import LedgerAllowance
from hydra_tune.errors import BudgetError
from hydra_tune.memory.block import Block, BlockKind
from hydra_tune.memory.block_release import bring_home, drop
from hydra_tune.memory.pager import Pager
from hydra_tune.observe.trace.turns import WorkerTurn, in_turn

SIZE = 640
PATIENCE_SECONDS = 60


@pytest.fixture
def pagers():
    devices = [CpuDevice(index, 2 * SIZE + 128) for index in range(2)]
    yield [Pager(device) for device in devices]
    for device in devices:
        device.close()


@pytest.fixture
def pager(pagers):
    return pagers[0]


def block(value=0, size=SIZE):
    made = Block(BlockKind.INPUTS, size, 64)
    made.host = torch.full((size,), value, dtype=torch.uint8)
    return made


def holds(made, value):
    data = made.data if made.data is not None else made.host
    return bool((data == value).all())


def balanced(pager):
    return pager.ledger.used_bytes == pager.resident_bytes


def test_a_lease_brings_blocks_and_room_and_keeps_the_blocks_for_the_next(pager):
    made = block(3)
    with pager.lease([made, made], 100):
        assert holds(made, 3)
        assert made.home is pager
        assert made.pinned_for is pager
        assert pager.ledger.used_bytes == SIZE + 100
    assert made.pinned_for is None
    assert pager.ledger.used_bytes == pager.resident_bytes == SIZE
    with pager.lease([made], 0):
        pass
    assert pager.bytes_in == {BlockKind.INPUTS: SIZE}, "it was still there"


def test_an_exchange_that_runs_out_of_memory_keeps_no_room(pager, monkeypatch):
    old, new = block(1), block(2, size=SIZE // 2)

    def no_memory(size):
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError), pager.lease([old], 100) as lease:  # noqa: PT012 - within a lease
        monkeypatch.setattr(pager.device, "empty", no_memory)
        lease.exchange(old, new)
    assert pager.ledger.used_bytes == pager.resident_bytes == 0
    assert new.pinned_for is None
    assert new.host is None


def test_the_block_not_used_for_longest_goes_first(pager):
    a, b, c = (block(value) for value in range(3))
    for made in (a, b, a):
        with pager.lease([made], 0):
            pass
    with pager.lease([c], 0):
        assert (a.home, b.home, c.home) == (pager, None, pager)
    with pager.lease([b], 0):
        assert (a.home, b.home, c.home) == (None, pager, pager)


def of(owner, kind, value=0):
    made = Block(kind, SIZE, 64)
    made.host, made.owner = torch.full((SIZE,), value, dtype=torch.uint8), owner
    return made


def test_what_is_needed_last_goes_first():
    """Others' blocks before its own; optimizer state before the rest, the last used first, and of the rest the first."""
    device = CpuDevice(0, 8 * SIZE)
    pager = Pager(device)
    state, parameters = BlockKind.OPTIMIZER, BlockKind.PARAMETERS
    blocks = {
        name: of(owner, kind)
        for name, owner, kind in (
            ("other a", 1, parameters),
            ("own a", 2, parameters),
            ("other state a", 1, state),
            ("own state a", 2, state),
            ("other state b", 1, state),
            ("own state b", 2, state),
            ("other b", 1, parameters),
            ("own b", 2, parameters),
        )
    }
    for made in blocks.values():
        with pager.lease([made], 0):
            pass
    names = {id(made): name for name, made in blocks.items()}
    order = [
        "other state b", "other state a", "other a", "other b",
        "own state b", "own state a", "own a", "own b",
    ]  # fmt: skip
    assert [names[id(made)] for made in pager.victims()] == order
    for number, gone in enumerate(order[:-1]):
        with pager.lease([blocks["own b"]], (number + 1) * SIZE):
            assert blocks[gone].home is None
            assert all(blocks[name].home is pager for name in order[number + 1 :])
    device.close()


def test_the_room_of_what_a_unit_gives_up_is_its_own_until_it_ends(pager):
    own, other = block(1), block(2)
    with pager.lease([other], 0):
        pass
    with pager.lease([own], 64) as lease:
        lease.absorb(own)
        assert own.data is own.host is None
        assert pager.resident_bytes == SIZE
        assert pager.ledger.used_bytes == 2 * SIZE + 64, "the unit may make as much again"
        assert lease.would_fit(pager.ledger.budget_bytes)
        made = lease.block_of(BlockKind.GRADIENTS, torch.zeros(SIZE + 64, dtype=torch.uint8))
        assert made.nbytes == SIZE + 64
        assert pager.ledger.used_bytes == 2 * SIZE + 64
        lease.absorb(other)
        assert other.data is other.host is None
        assert pager.ledger.used_bytes == SIZE + 64, "not the unit's"
    assert balanced(pager)
    drop(made)
    assert pager.ledger.used_bytes == 0


def test_what_another_thread_gives_up_for_the_unit_is_noted_with_the_unit(pager):
    """On a GPU autograd frees what the backward needs no longer on a thread of its own."""
    made, turn = block(), WorkerTurn("job", "cpu:0", {})
    with in_turn(turn), pager.lease([made], SIZE) as lease, ThreadPoolExecutor(1) as autograd:
        autograd.submit(lease.absorb, made).result()
        autograd.submit(lease.grow, 64).result()
    assert [action.what for action in turn.actions if action.what in ("drop", "grow")] == ["drop", "grow"]


def test_a_clean_block_is_dropped_and_a_dirty_one_written_back(pager):
    clean, dirty = block(1), block(2)
    with pager.lease([clean, dirty], 0):
        dirty.data.fill_(9)
        dirty.dirty = True
    with pager.lease([block(), block()], 0):
        assert (clean.home, dirty.home) == (None, None)
    assert pager.bytes_out == {BlockKind.INPUTS: SIZE}
    assert holds(clean, 1)
    assert holds(dirty, 9)
    assert not dirty.dirty


def test_a_pinned_block_stays(pager):
    pinned, other = block(1), block(2)
    with pager.lease([other], 0):
        pass
    with pager.lease([pinned], 0), pager.lease([block()], 0):
        assert pinned.home is pager
        assert other.home is None


def test_a_unit_that_cannot_fit_is_refused_and_leaves_no_trace(pager):
    made = block()
    with pytest.raises(BudgetError, match="at once, but device cpu:0 has a budget of"), pager.lease([made], 2 * SIZE):
        pass
    assert made.pinned_for is None
    assert pager.ledger.used_bytes == pager.resident_bytes == 0


def test_a_unit_of_exactly_the_budget_fits(pager):
    made = block()
    with pager.lease([made], SIZE + 128):
        assert pager.ledger.used_bytes == pager.device.budget_bytes
    with pager.lease([made], SIZE + 128):
        assert pager.ledger.used_bytes == pager.device.budget_bytes


def test_what_a_unit_makes_is_adopted_from_its_workspace(pager):
    with pager.lease([], 1000) as lease:
        tensor = torch.full((100,), 5, dtype=torch.uint8)
        made = lease.block_of(BlockKind.ACTIVATIONS, tensor[10:20])
        assert lease.block_of(BlockKind.ACTIVATIONS, tensor) is made, "one storage, one block"
        assert made.nbytes == 128
        assert made.dirty
        assert made.pinned_for is pager
        assert pager.ledger.used_bytes == 1000
        assert lease.owns(tensor, (BlockKind.ACTIVATIONS,))
        assert not lease.owns(tensor, (BlockKind.PARAMETERS,))
        assert not lease.owns(torch.zeros(1), (BlockKind.ACTIVATIONS,))
    assert pager.ledger.used_bytes == pager.resident_bytes == 128
    assert made.pinned_for is None
    with pager.lease([block(), block()], 64):
        assert made.home is None
    assert holds(made, 5)
    assert pager.bytes_out == {BlockKind.ACTIVATIONS: 100}


def test_a_tensor_of_a_leased_block_is_that_block(pager):
    made = block()
    with pager.lease([made], 0) as lease:
        assert lease.block_of(BlockKind.ACTIVATIONS, made.data[5:9]) is made
    assert pager.ledger.used_bytes == SIZE


def test_a_block_larger_than_the_workspace_takes_the_rest_from_the_budget(pager):
    with pager.lease([], 64) as lease:
        lease.block_of(BlockKind.ACTIVATIONS, torch.zeros(256, dtype=torch.uint8))
        assert pager.ledger.used_bytes == 256
    assert pager.ledger.used_bytes == pager.resident_bytes == 256


def test_a_block_larger_than_the_workspace_has_others_make_room(pager):
    other = block(1)
    with pager.lease([other], 0):
        pass
    with pager.lease([], 64) as lease:
        lease.block_of(BlockKind.ACTIVATIONS, torch.zeros(pager.device.budget_bytes - 64, dtype=torch.uint8))
        assert other.home is None
    assert holds(other, 1)


def test_all_that_is_not_pinned_leaves_a_device_in_need(pager):
    clean, dirty, pinned = block(1), block(2), block(3)
    with pager.lease([clean, dirty], 0):
        dirty.data.fill_(9)
        dirty.dirty = True
    with pager.lease([pinned], 0):
        pager.relieve()
        assert (clean.home, dirty.home, pinned.home) == (None, None, pager)
    assert holds(clean, 1)
    assert holds(dirty, 9)
    assert pager.ledger.used_bytes == SIZE


def test_what_cannot_be_written_back_stays_on_a_device_in_need(pager, monkeypatch):
    clean, dirty = block(1), block(2)
    with pager.lease([dirty, clean], 0):
        dirty.data.fill_(9)
        dirty.dirty = True
    with monkeypatch.context() as patch:
        patch.setattr(pager.device, "spill", lambda pairs: torch.empty(2**60, dtype=torch.uint8))
        pager.relieve()
    assert (clean.home, dirty.home) == (None, pager)
    assert dirty.dirty
    assert holds(dirty, 9)


def test_a_device_that_has_shrunk_holds_less_and_still_gives_a_unit_all_of_its_budget(pager):
    first, second = block(1), block(2)
    with pager.lease([first], 0):
        pass
    pager.shrink(SIZE + 128)
    assert SIZE <= pager.ledger.limit_bytes < SIZE + 128
    with pager.lease([second], 0):
        assert first.home is None, "there would be room in the budget"
    with pager.lease([first, second], 64):
        assert pager.ledger.used_bytes == 2 * SIZE + 64
    pager.shrink(10 * SIZE)
    assert pager.ledger.limit_bytes < SIZE + 128, "it never grows"


def test_room_that_a_device_proves_to_have_is_room_until_some_proves_too_much(pager):
    ledger, budget = pager.ledger, 2 * SIZE + 128
    pager.fit(LedgerAllowance(limit_bytes=4 * SIZE, gain_bytes=SIZE))
    assert (ledger.limit_bytes, ledger.most_bytes) == (budget + SIZE, budget + SIZE)
    with pager.lease([block(), block()], 0):
        pass
    with pager.lease([block()], 0):
        assert ledger.used_bytes == 3 * SIZE
    with pytest.raises(BudgetError), pager.lease([block() for _ in range(3)], 0):
        pytest.fail("one unit has more than another device may have")
    pager.fit(LedgerAllowance(limit_bytes=4 * SIZE, gain_bytes=0))
    assert ledger.limit_bytes == budget + SIZE, "another unit's workspaces are no proof"
    pager.fit(LedgerAllowance(limit_bytes=2 * SIZE, gain_bytes=0))
    pager.fit(LedgerAllowance(limit_bytes=4 * SIZE, gain_bytes=SIZE))
    assert (ledger.limit_bytes, ledger.most_bytes) == (2 * SIZE, budget)


def test_a_block_beyond_the_budget_is_refused_and_not_kept(pager):
    with (
        pytest.raises(BudgetError, match=r"the trial needs 4\.0 KiB at once, but device cpu:0 has"),
        pager.lease([], 64) as lease,
    ):
        lease.block_of(BlockKind.ACTIVATIONS, torch.zeros(4096, dtype=torch.uint8))
    assert pager.resident_bytes == 0
    assert pager.ledger.used_bytes == 0


def test_dropped_blocks_give_every_byte_back(pager):
    made = block(1)
    with pager.lease([made], 100) as lease:
        own = lease.block_of(BlockKind.GRADIENTS, torch.zeros(64, dtype=torch.uint8))
        drop(own)
        assert pager.ledger.used_bytes == SIZE + 36, "what was adopted is free at once"
    drop(made)
    assert pager.ledger.used_bytes == pager.resident_bytes == 0
    assert made.host is made.data is made.home is None
    drop(made)
    assert pager.ledger.used_bytes == 0


def test_a_block_brought_home_is_whole(pager):
    made = block(1)
    with pager.lease([made], 0):
        made.data.fill_(7)
        made.dirty = True
    bring_home(made)
    assert made.data is None
    assert holds(made, 7)
    assert pager.ledger.used_bytes == 0
    bring_home(made)


@pytest.mark.parametrize("dirty", [False, True])
def test_a_block_moves_between_devices_with_its_present_bytes(pagers, dirty):
    one, other = pagers
    made = block(1)
    with one.lease([made], 0):
        if dirty:
            made.data.fill_(8)
            made.dirty = True
    with other.lease([made], 0):
        assert holds(made, 8 if dirty else 1)
        assert made.home is other
        assert made.place == "cpu:1"
    assert one.ledger.used_bytes == one.resident_bytes == 0
    assert other.ledger.used_bytes == other.resident_bytes == SIZE
    assert (one.bytes_out, other.bytes_out) == ({}, {})
    bytes_in = {BlockKind.INPUTS: SIZE}
    assert (one.bytes_in, other.bytes_in) == (bytes_in, {} if dirty else bytes_in)
    assert (one.bytes_across, other.bytes_across) == ({}, bytes_in if dirty else {})


def changed(pager, made, value):
    """A unit that changes a block."""
    with pager.lease([made], 0):
        made.data.fill_(value)
        made.dirty = True


def test_what_only_a_device_has_is_taken_over_and_the_host_copy_stays_as_it_was(pagers):
    one, other = pagers
    made = block(1)
    changed(one, made, 8)
    with other.lease([made], 0):
        assert holds(made, 8)
        assert made.dirty
        assert bool((made.host == 1).all()), "stale"
    with one.lease([made], 0):
        assert holds(made, 8)
    assert one.bytes_across == other.bytes_across == {BlockKind.INPUTS: SIZE}
    with one.lease([block(), block()], 0):
        assert made.home is None
    assert holds(made, 8), "written back at last"
    assert one.bytes_out == {BlockKind.INPUTS: SIZE}


def test_a_block_that_was_never_on_the_host_is_not_there_after_it_has_moved(pagers):
    one, other = pagers
    with one.lease([], SIZE) as lease:
        made = lease.block_of(BlockKind.ACTIVATIONS, torch.full((SIZE,), 4, dtype=torch.uint8))
    with other.lease([made], 0):
        assert made.host is None
        assert holds(made, 4)


def test_room_is_there_before_a_block_is_taken_over_and_given_back_when_it_is(pagers, monkeypatch):
    one, other = pagers
    made, victim = block(1), block(2, 2 * SIZE)
    changed(one, made, 8)
    changed(other, victim, 9)
    seen = []
    take_over = other.device.take_over

    def watching(source, pairs):
        seen.append((one.ledger.used_bytes, other.ledger.used_bytes, victim.home, made.place))
        take_over(source, pairs)
        seen.append((one.ledger.used_bytes, other.ledger.used_bytes))

    monkeypatch.setattr(other.device, "take_over", watching)
    with other.lease([made], 64):
        pass
    assert seen == [(SIZE, SIZE + 64, None, "cpu:0"), (SIZE, SIZE + 64)]
    assert (one.ledger.used_bytes, other.ledger.used_bytes) == (0, SIZE)
    assert other.bytes_out == {BlockKind.INPUTS: 2 * SIZE}, "the victim"


def test_a_block_that_could_not_be_taken_over_stays_where_it_was(pagers, monkeypatch):
    one, other = pagers
    made = block(1)
    changed(one, made, 8)

    def fail(source, pairs):
        raise RuntimeError("the copy failed")

    monkeypatch.setattr(other.device, "take_over", fail)
    with pytest.raises(RuntimeError, match="the copy failed"), other.lease([made], 0):
        pass
    assert (made.home, made.dirty, made.pinned_for) == (one, True, None)
    assert holds(made, 8)
    assert balanced(one)
    assert balanced(other)
    assert (one.resident_bytes, other.resident_bytes) == (SIZE, 0)


@pytest.mark.parametrize("dirty", [False, True])
@pytest.mark.parametrize("reach", DeviceCopyRoute)
def test_a_block_comes_the_way_that_is_in_reach(pagers, monkeypatch, reach, dirty):
    one, other = pagers
    monkeypatch.setattr(other.device, "reach", lambda source: reach)
    made = block(1)
    with one.lease([made], 0):
        made.dirty = dirty
    with other.lease([made], 0):
        assert holds(made, 1)
    is_taken_over = reach is DeviceCopyRoute.NEAR or (reach is DeviceCopyRoute.LINK and dirty)
    assert bool(other.bytes_across) == is_taken_over
    assert bool(other.bytes_in) == (not is_taken_over)
    assert bool(one.bytes_out) == (dirty and not is_taken_over)
    assert made.dirty == (dirty and is_taken_over)
    assert one.ledger.used_bytes == one.resident_bytes == 0


def test_a_block_made_on_one_device_is_used_on_the_other(pagers):
    one, other = pagers
    with one.lease([], SIZE) as lease:
        made = lease.block_of(BlockKind.ACTIVATIONS, torch.full((SIZE,), 4, dtype=torch.uint8))
    with other.lease([made], 0):
        assert holds(made, 4)
    assert balanced(one)
    assert balanced(other)


def test_a_failed_load_gives_its_room_back(pager, monkeypatch):
    good, lost = block(1), block(2)

    def fail(pairs):
        raise RuntimeError("the copy failed")

    with pager.lease([good], 0):
        pass
    monkeypatch.setattr(pager.device, "load", fail)
    with pytest.raises(RuntimeError, match="the copy failed"), pager.lease([good, lost], 64):
        pass
    assert good.pinned_for is lost.pinned_for is None
    assert balanced(pager)
    assert pager.resident_bytes == SIZE
    assert holds(lost, 2)


def test_two_units_that_want_what_is_on_each_others_device_both_get_it(pagers):
    """Each has pinned its block before either makes room: neither may wait for the other's pin."""
    one, other = pagers
    size = 2 * SIZE
    here, there = block(1, size), block(2, size)
    with one.lease([here], 0), other.lease([there], 0):
        pass
    here.pinned_for, there.pinned_for = other, one
    threads = [
        threading.Thread(target=pager.bring, args=([made], 128), daemon=True)
        for pager, made in ((one, there), (other, here))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS / 2)
    stuck = [thread.is_alive() for thread in threads]
    here.pinned_for = there.pinned_for = None  # lets stuck threads go
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert stuck == [False, False]
    assert (here.home, there.home) == (other, one)


def test_two_devices_that_fight_over_blocks_lose_nothing(pagers):
    """Each increments blocks that the other one also wants; more blocks than fit, so that all of them move all the time."""
    shared = [block(0) for _ in range(5)]
    users = [threading.Lock() for _ in shared]  # as the scheduler: one unit of a trial at a time
    barrier = threading.Barrier(2)

    def work(pager, order):
        barrier.wait(PATIENCE_SECONDS)
        for number in order:
            with users[number], pager.lease([shared[number]], 64) as lease:
                shared[number].data.add_(1)
                shared[number].dirty = True
                drop(lease.block_of(BlockKind.ACTIVATIONS, torch.zeros(64, dtype=torch.uint8)))
                assert pager.ledger.used_bytes <= pager.device.budget_bytes

    rounds = [[(7 * i) % 5 for i in range(100)], [(3 * i + 1) % 5 for i in range(100)]]
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(work, *pair) for pair in zip(pagers, rounds, strict=True)]
        for future in futures:
            future.result(PATIENCE_SECONDS)
    for number, made in enumerate(shared):
        bring_home(made)
        assert holds(made, sum(order.count(number) for order in rounds))
    for pager in pagers:
        assert pager.ledger.used_bytes == pager.resident_bytes == 0
        assert pager.ledger.peak_bytes <= pager.device.budget_bytes
