"""Where host copies may go to disk and copies are made in the background: what each has of the other's bytes and room."""

import itertools
import random
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.errors import SpillError
from hydra_tune.memory.block import BlockKind, TensorBlock
from hydra_tune.memory.block_release import bring_home, drop
from hydra_tune.memory.host.disk import SpillDisk
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.memory.host.spill_dir import SpillFolder
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.prefetch import BlockPrefetcher, UnitMemoryNeeds
from hydra_tune.memory.reuse_distance import AHEAD, BlockUseHistory
from hydra_tune.memory.trial_context import TrialMemoryContext
from tests.support.gated import PATIENCE_SECONDS, GatedDevice, settle

SIZE = 640


@pytest.fixture
def pager(tmp_path):
    device = GatedDevice(0, 2 * SIZE)
    host = HostTier(2 * SIZE, SpillDisk(SpillFolder(tmp_path)), device)
    yield Pager(device, host)
    device.gate.set()
    host.close()
    device.close()


@pytest.fixture
def prefetch(pager):
    return BlockPrefetcher(pager)


def group(pager, value=0, tenant=None, size=SIZE):
    pager.host.take(size)
    made = TensorBlock(BlockKind.PARAMETERS, [torch.full((size // 4,), float(value))], pager.device)
    made.tenant = tenant
    pager.host.enter(made)
    return made


def on_disk(made):
    return made.host is None and made.data is None and made.coming is None


def holds(made, value):
    return made.tensors[0].unique().tolist() == [float(value)]


def send_at_the_gate(pager, *blocks):
    pager.device.gate.clear()
    BlockPrefetcher(pager).send([UnitMemoryNeeds(blocks)])
    assert pager.device.begun.wait(PATIENCE_SECONDS)
    settle(pager.host)


def changed_on_the_device_alone(pager, value):
    """A block that has been on disk, whose bytes there are out of date, and that the host has not."""
    made = group(pager, 1)
    pager.host.take(2 * SIZE)
    assert on_disk(made)
    pager.host.ledger.give_back(2 * SIZE)
    with pager.lease([made], 0):
        made.tensors[0].fill_(float(value))
        made.dirty = True
    pager.host.take(2 * SIZE)
    settle(pager.host)
    pager.host.ledger.give_back(2 * SIZE)
    assert made.host is None
    assert made.dirty
    return made


def test_what_is_on_its_way_keeps_its_host_copy_and_another_goes(pager):
    sent, other = group(pager, 1), group(pager, 2)
    send_at_the_gate(pager, sent)
    pager.host.take(SIZE)
    assert on_disk(other)
    assert sent.host is not None
    assert pager.host.ledger.used_bytes == 2 * SIZE
    pager.device.gate.set()
    with pager.lease([sent], 0):
        assert holds(sent, 1)


def test_where_all_are_on_their_way_one_is_waited_for_and_the_device_alone_has_it(pager):
    blocks = [group(pager, value) for value in (1, 2)]
    send_at_the_gate(pager, *blocks)
    threading.Timer(0.05, pager.device.gate.set).start()
    pager.host.take(SIZE)
    (gone,) = (made for made in blocks if made.host is None)
    assert gone.home is pager
    assert gone.dirty, "only the device has it"
    assert pager.host.disk.bytes_written == 0
    assert pager.host.ledger.used_bytes == 2 * SIZE
    pager.host.ledger.give_back(SIZE)
    for made, value in zip(blocks, (1, 2), strict=True):
        bring_home(made)
        assert holds(made, value)


def test_a_copy_that_has_come_goes_for_nothing_and_the_unit_that_comes_for_it_finds_it(pager, prefetch):
    sent, other = group(pager, 1), group(pager, 2)
    prefetch.send([UnitMemoryNeeds([sent])])
    sent.coming.copy.wait()
    settle(pager.host)  # the disk's thread may have it in hand at this moment, and the other would go
    pager.host.take(SIZE)
    assert sent.host is None
    assert other.host is not None
    assert pager.host.disk.bytes_written == 0
    with pager.lease([sent], 0):
        assert holds(sent, 1)
    assert pager.bytes_in == {BlockKind.PARAMETERS: SIZE}, "and it was loaded once"
    assert pager.bytes_in_vain == 0


def test_a_copy_that_has_failed_leaves_the_block_to_the_disk(pager, prefetch):
    blocks = [group(pager, value) for value in (1, 2)]
    pager.device.error = RuntimeError("the link is down")
    prefetch.send([UnitMemoryNeeds(blocks)])
    for made in blocks:
        made.coming.copy.wait_quietly()
    pager.host.take(2 * SIZE)
    assert all(on_disk(made) for made in blocks)
    assert pager.ledger.used_bytes == pager.resident_bytes == 0
    assert holds(blocks[0], 1)
    assert holds(blocks[1], 2)


def test_what_a_failed_trial_has_on_its_way_is_room_when_its_copy_is_over(pager):
    failed = TrialMemoryContext(lambda error: None)
    sent, other = group(pager, 1, failed), group(pager, 2)
    failed.fail(SpillError("gone", path="", errno=5))
    send_at_the_gate(pager, sent)
    threading.Timer(0.05, pager.device.gate.set).start()
    pager.host.take(SIZE)
    assert pager.device.gate.is_set(), "its memory was still being read"
    assert sent.host is None
    assert other.host is not None
    drop(sent)
    assert pager.ledger.used_bytes == pager.resident_bytes == 0


def test_a_write_back_in_the_background_has_its_room_from_the_tier(pager, prefetch):
    changed, running = changed_on_the_device_alone(pager, 7), group(pager)
    with pager.lease([running], 0):
        prefetch.send([UnitMemoryNeeds([], SIZE)])
        assert changed.leaving is not None
        settle(pager.host)
        assert pager.host.ledger.used_bytes == sum(SIZE for made in (changed, running) if made.host is not None)
        assert changed.host is not None
        changed.leaving.wait()
    bring_home(changed)
    assert holds(changed, 7)
    pager.host.take(2 * SIZE)
    assert on_disk(changed)
    assert holds(changed, 7), "and not what the file had before"


def test_without_room_on_the_host_a_write_back_waits_until_the_disks_thread_has_made_some(pager, prefetch):
    changed, running = changed_on_the_device_alone(pager, 7), group(pager)
    with pager.lease([running], 0):
        settle(pager.host)  # or it would make room only once there is none any more
        idle = [group(pager, value) for value in (4, 5)]
        written = pager.host.disk.bytes_written
        prefetch.send([UnitMemoryNeeds([], SIZE)])
        assert changed.leaving is None
        assert changed.host is None
        assert pager.host.disk.bytes_written == written, "nobody has waited for the disk"
        for _ in range(2 * AHEAD):
            pager.host.used([])
        settle(pager.host)
        prefetch.send([UnitMemoryNeeds([], SIZE)])
        assert changed.leaving is not None
    bring_home(changed)
    assert holds(changed, 7)
    assert [holds(made, value) for made, value in zip(idle, (4, 5), strict=True)] == [True, True]


def test_nobody_waits_for_what_is_sent_from_one_device_to_another_to_have_the_room_of_its_host_copy(pager):
    other = Pager(CpuDevice(1, 2 * SIZE), pager.host)
    made, wanted = group(pager, 5), group(pager, 6)
    with other.lease([made], 0):
        pass
    send_at_the_gate(pager, made)
    bring_home(wanted)
    assert not pager.host.offer(TensorBlock(BlockKind.PARAMETERS, [torch.zeros(SIZE // 4)], pager.device), pager.device)
    assert made.coming is not None
    pager.device.gate.set()
    with pager.lease([made], 0):
        assert holds(made, 5)
    assert other.ledger.used_bytes == 0
    other.device.close()


def test_what_is_to_be_sent_may_go_to_the_disk_while_room_is_made_for_it(tmp_path, monkeypatch):
    """Other devices' units go by meanwhile, so that what the disk has as well gives its room on the host to a write-back."""
    device = CpuDevice(0, 1280)
    host = HostTier(1536, SpillDisk(SpillFolder(tmp_path)), device)
    pager, offer = Pager(device, host), host.offer
    changed, clean, sent = group(pager, 1, size=256), group(pager, 2, size=640), group(pager, 3, size=896)
    with pager.lease([changed], 0):
        changed.tensors[0].fill_(7.0)
        changed.dirty = True
    host.take(host.ledger.budget_bytes)  # the device alone has what was changed, the disk the others
    host.ledger.give_back(host.ledger.budget_bytes)
    with pager.lease([clean], 0):
        bring_home(sent)
    settle(host)

    def later(block, device):
        whoever = threading.Thread(target=bring_home, args=(clean,))  # which makes room on the device
        whoever.start()
        whoever.join(PATIENCE_SECONDS)
        for _ in range(2 * AHEAD):
            host.used([clean])
        return offer(block, device)

    monkeypatch.setattr(host, "offer", later)
    BlockPrefetcher(pager).send([UnitMemoryNeeds([sent])])
    assert on_disk(sent)
    bring_home(changed)
    assert [holds(made, value) for made, value in ((changed, 7), (clean, 2), (sent, 3))] == [True] * 3
    for made in (changed, clean, sent):
        drop(made)
    assert pager.ledger.used_bytes == host.ledger.used_bytes == 0


def test_what_is_being_written_back_is_given_up_last_and_keeps_its_bytes(pager):
    changed = changed_on_the_device_alone(pager, 7)
    with pager.lease([group(pager)], 0):
        pager.device.gate.clear()
        BlockPrefetcher(pager).send([UnitMemoryNeeds([], SIZE)])
        assert pager.device.begun.wait(PATIENCE_SECONDS)
        threading.Timer(0.05, pager.device.gate.set).start()
        pager.host.take(2 * SIZE)  # whatever there is
        assert pager.device.gate.is_set(), "it was waited for"
        assert changed.leaving is None
        assert changed.host is None
        assert changed.dirty
        pager.host.ledger.give_back(2 * SIZE)
    bring_home(changed)
    assert holds(changed, 7), "and not what the file has"


def test_what_the_next_unit_needs_is_read_from_disk_and_then_sent(pager, prefetch):
    first, *others = [group(pager, value) for value in (1, 2, 3)]
    assert on_disk(first)
    for _ in range(AHEAD + 1):
        pager.host.used([])
    prefetch.send([UnitMemoryNeeds([first])])
    settle(pager.host)
    assert first.host is not None
    prefetch.send([UnitMemoryNeeds([first])])
    assert first.coming is not None
    with pager.lease([first], 0):
        assert holds(first, 1)
    assert [holds(made, value) for made, value in zip(others, (2, 3), strict=True)] == [True, True]


def test_what_the_next_unit_needs_is_not_what_goes(pager):
    needed, used = group(pager, 1), group(pager, 2)
    pager.host.used([needed])
    for _ in range(2 * AHEAD):
        pager.host.used([used])
    pager.host.expect([needed])
    pager.host.take(SIZE)
    assert on_disk(needed) == (used.host is not None)


def test_who_says_when_a_block_is_needed_is_believed_for_a_while():
    uses = BlockUseHistory(0)
    for time_used in (10, 20, 30):
        uses.add(time_used)
    assert uses.distance(32) == 8
    uses.expect(33)
    assert uses.distance(32) == 1
    assert uses.is_soon(32)
    assert uses.distance(33 + AHEAD) == AHEAD
    assert uses.distance(34 + AHEAD) == 40 - (34 + AHEAD), "it has not come true"
    uses.expect(50)
    uses.add(40)
    assert uses.distance(41) == 9, "it has come true, or was not meant"


def test_a_distance_is_asked_for_while_another_thread_notes_uses():
    uses, asked = BlockUseHistory(0), threading.Event()

    def use():
        for now in itertools.count(1):
            uses.add(now)
            if asked.is_set():
                return

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change places within a question
    using = threading.Thread(target=use)
    using.start()
    try:
        for _ in range(2000):
            uses.distance(0)
            uses.is_soon(0)
    finally:
        asked.set()
        using.join()
        sys.setswitchinterval(before)


class SlowDevice(CpuDevice):
    """Copies in the background take their time."""

    def _send(self, pairs, *, is_waited_for):
        if not is_waited_for:
            time.sleep(random.random() * 1e-3)
        super()._send(pairs, is_waited_for=is_waited_for)


class Trial:
    """Blocks of which one thread at a time uses any."""

    def __init__(self, pager, sizes):
        self.lock = threading.Lock()
        self.values = {group(pager, 0, size=size): 0 for size in sizes}

    def check(self):
        for made, value in self.values.items():
            bring_home(made)
            assert holds(made, value)


def run_units(pager, trials, drawn, count):
    """Units of any trial, with any blocks sent ahead."""
    everything = [made for trial in trials for made in trial.values]
    prefetch = BlockPrefetcher(pager)
    for _ in range(count):
        trial = drawn.choice(trials)
        if not trial.lock.acquire(blocking=False):
            continue
        try:
            blocks = drawn.sample(list(trial.values), 2)
            with pager.lease(blocks, drawn.choice([0, 128])):
                prefetch.send([UnitMemoryNeeds(drawn.sample(everything, 3), drawn.choice([0, 256]))])
                for made in blocks:
                    assert holds(made, trial.values[made])
                trial.values[blocks[0]] += 1
                blocks[0].tensors[0].fill_(float(trial.values[blocks[0]]))
                blocks[0].dirty = True
        finally:
            trial.lock.release()


def visit_trials(host, trials, drawn, is_over):
    """Trials are wanted on the host meanwhile, one by one or beyond the budget."""
    while not is_over.is_set():
        trial = drawn.choice(trials)
        with trial.lock, host.whole(list(trial.values)):
            trial.check()
        time.sleep(2e-3)


@pytest.mark.parametrize("seed", range(3))
def test_two_devices_the_disk_and_whoever_wants_a_trial_whole_never_wait_for_each_other(tmp_path, seed):
    """Random units on two small devices with a smaller host, all of them sending ahead whatever they like."""
    devices = [SlowDevice(index, 1024) for index in range(2)]
    host = HostTier(768, SpillDisk(SpillFolder(tmp_path)), devices[0])
    pagers = [Pager(device, host) for device in devices]
    trials = [Trial(pagers[0], (64, 128, 256, 256)) for _ in range(3)]
    errors, is_over = [], threading.Event()

    def guarded(function, *arguments):
        def run():
            try:
                function(*arguments)
            except BaseException as error:  # noqa: BLE001 - for the test to see
                errors.append(error)

        return threading.Thread(target=run, daemon=True)

    units = [guarded(run_units, pager, trials, random.Random(10 * seed + i), 150) for i, pager in enumerate(pagers)]
    visitor = guarded(visit_trials, host, trials, random.Random(seed), is_over)
    for thread in (*units, visitor):
        thread.start()
    for thread in units:
        thread.join(2 * PATIENCE_SECONDS)
    is_over.set()
    visitor.join(PATIENCE_SECONDS)
    assert not any(thread.is_alive() for thread in (*units, visitor)), "they wait for each other"
    assert not errors
    assert sum(pager.bytes_ahead for pager in pagers) > 0
    assert sum(pager.bytes_out.total() for pager in pagers) > 0
    for trial in trials:
        trial.check()
        for made in trial.values:
            drop(made)
    assert host.ledger.used_bytes == host.disk.stored_bytes == 0
    for pager in pagers:
        assert pager.ledger.used_bytes == pager.resident_bytes == 0
    host.close()
    with suppress(RuntimeError):
        for device in devices:
            device.close()
