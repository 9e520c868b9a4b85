"""Planned steps on devices that are not the host's, as GPUs are (`tests/support/stand_in_gpu.py`): when asked for, and how."""

import functools
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from hydra_tune.errors import DeviceLostError, HydraTuneError, UnfusableError
from hydra_tune.fusion.runtime.profiling_device import HOST
from hydra_tune.fusion.runtime.step_arguments import StepStateBinding
from hydra_tune.fusion.runtime.step_planner import StepPlanner
from hydra_tune.memory.pager import Pager
from hydra_tune.planner.ir.plan_state import ScheduleSegment
from hydra_tune.planner.run.interpreter import MergedGraphInterpreter
from hydra_tune.planner.run.runner import MergedGraphRunner
from hydra_tune.pool.devices import device_reservation
from hydra_tune.pool.devices.device_reservation import DeviceReservations, DeviceUseLock
from hydra_tune.pool.runtime import settings
from hydra_tune.shard.capture.capture_lock import CaptureGate
from tests.support.stand_in_gpu import Generator, StandInGpu
from tests.unit.pool.fusion.test_planned_steps import bits, task
from tests.unit.pool.tasks import PATIENCE_SECONDS, running

pytestmark = pytest.mark.timeout(120)

GROUP, PAIR = 480 << 10, 310 << 10  # each trial takes more than on a CPU device, by what allocations are rounded


@pytest.fixture
def gpus(monkeypatch):
    """Pools are of so many of them, of so many bytes; those that were opened."""
    opened = []

    def opening(count, nbytes):
        def devices(*_):
            opened[:] = [StandInGpu(index, nbytes) for index in range(count)]
            return list(opened)

        monkeypatch.setattr(settings, "open_devices", devices)
        return opened

    return opening


def pool_of(**options):
    return running(**({"fusion": "on", "fusion_size": 4, "fusion_planner": "on"} | options))


def tasks_of(epochs=1):
    return [task(seed, epochs=epochs) for seed in range(4)]


@pytest.fixture
def segments(monkeypatch):
    """Merged graphs that were run, by the number of the groups that they were planned for, and where."""
    found = []
    segment = MergedGraphRunner.segment

    def noted(self, which, take=None):
        found.append((len(self._ended), which))
        segment(self, which, take)

    monkeypatch.setattr(MergedGraphRunner, "segment", noted)
    return found


@functools.cache
def roomy(size, epochs=1):
    """The same groups where everything is kept, on such a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "open_devices", lambda *_: [StandInGpu(0, 64 << 20)])
        with running(fusion="on", fusion_size=size, fusion_planner="off") as pool:
            results = pool.run(tasks_of(epochs))
    assert {result.group_size for result in results} == {size}
    return [bits(result) for result in results]


@pytest.mark.cases(1 / 3)
def test_a_group_has_the_bits_of_one_for_which_there_is_room(gpus, segments, monkeypatch):
    """Its memory is as an allocator gives it, and its profile is made with nothing else on the device."""
    planned, steps = StepPlanner.planned, []

    def noted(self, *stacks):
        steps.append(planned(self, *stacks))
        return steps[-1]

    monkeypatch.setattr(StepPlanner, "planned", noted)
    opened = gpus(1, GROUP)
    with pool_of() as pool:
        results = pool.run(tasks_of())
        stats = pool.stats().devices["cpu:0"]
    assert [result.error for result in results] == [None] * 4
    assert {result.group_size for result in results} == {4}
    assert [bits(result) for result in results] == roomy(4)
    assert 0.5 * GROUP < stats.peak_bytes <= GROUP
    assert segments
    assert opened[0].num_reclaimed > 0
    sizes = [size for step in steps for array in step.part.schedule.arrays for size in array.sizes.values()]
    assert {size % 512 for size in sizes} == {0}


@pytest.fixture(autouse=True)
def turns_before_gates(monkeypatch):
    """Who holds the capture gate must not wait for a GPU's generator: whoever has that may wait for the gate."""
    own, shared, in_turn = threading.local(), CaptureGate.shared, Generator.in_turn
    wrong = []

    @contextmanager
    def noted(gate):
        with shared(gate):
            own.depth = getattr(own, "depth", 0) + 1
            try:
                yield
            finally:
                own.depth -= 1

    def asked(generator):
        if getattr(own, "depth", 0):
            wrong.append(threading.current_thread().name)
        return in_turn(generator)

    monkeypatch.setattr(CaptureGate, "shared", noted)
    monkeypatch.setattr(Generator, "in_turn", asked)
    yield
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_two_groups_in_turn_have_the_bits_of_each_alone(gpus, segments, count):
    gpus(count, PAIR)
    with pool_of() as pool:
        results = pool.run(tasks_of(2))
        peaks = [device.peak_bytes for device in pool.stats().devices.values()]
    assert [result.error for result in results] == [None] * 4
    assert {result.group_size for result in results} == {2}
    assert [bits(result) for result in results] == roomy(2, 2)
    assert max(peaks) <= PAIR
    assert (2, ScheduleSegment(0, 1)) in segments


@pytest.mark.slow
@pytest.mark.parametrize(("nbytes", "size"), [(GROUP, 4), (PAIR, 2)])
def test_a_forward_that_runs_out_of_memory_is_repeated_with_the_numbers_it_had_drawn(gpus, nbytes, size, monkeypatch):
    """What the members have drawn is undone, which on such a device is with whoever has the generator's turn."""
    segment, failed = MergedGraphRunner.segment, []

    def fails(self, which, take=None):
        segment(self, which, take)
        if which.backward is None and not failed:
            failed.append(which)
            self._left = {}
            self._begun[which.forward] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(MergedGraphRunner, "segment", fails)
    gpus(1, nbytes)
    with pool_of() as pool:
        results = pool.run(tasks_of(2), on_error="return")
        assert pool.stats().devices["cpu:0"].units_repeated == 1
    assert [result.error for result in results] == [None] * 4
    assert failed
    assert [bits(result) for result in results] == roomy(size, 2)


@pytest.mark.slow
def test_what_has_failed_holds_nothing_on_the_device(gpus, monkeypatch):
    """Else what leaves the device for the repeat would not be free there."""
    states, run = [], StepStateBinding.begin
    held = []

    def begin(self, *arguments):
        states.append(self)
        run(self, *arguments)

    def relieve(self):
        held.extend(len(state.given) for state in states)
        relieved(self)

    def fails(self, given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    relieved = Pager.relieve
    monkeypatch.setattr(StepStateBinding, "begin", begin)
    monkeypatch.setattr(Pager, "relieve", relieve)
    monkeypatch.setattr(MergedGraphInterpreter, "run", fails)
    gpus(1, GROUP)
    with pool_of() as pool:
        results = pool.run(tasks_of(), on_error="return")
    assert states
    assert set(held) == {0}
    assert all(result.error is None or isinstance(result.error, HydraTuneError) for result in results)


def test_who_borrows_a_device_waits_for_its_unit_and_the_next_unit_waits_for_him():
    turn, order, has_begun, may_end = DeviceUseLock(), [], threading.Event(), threading.Event()

    def first():
        with turn.unit():
            has_begun.set()
            assert may_end.wait(PATIENCE_SECONDS)
            order.append("unit")

    def second():
        with turn.unit():
            order.append("next unit")

    def borrow():
        with turn.borrowed("cuda:0"):
            order.append("borrowed")

    running_one, borrower, later = (threading.Thread(target=run) for run in (first, borrow, second))
    running_one.start()
    assert has_begun.wait(PATIENCE_SECONDS)
    borrower.start()
    while not turn._asking:
        time.sleep(0.001)
    later.start()
    while later.is_alive() and len(turn._changed._waiters) < 2:
        time.sleep(0.001)
    may_end.set()
    for thread in (running_one, borrower, later):
        thread.join(PATIENCE_SECONDS)
    assert order == ["unit", "borrowed", "next unit"]


@pytest.mark.parametrize("held", [DeviceUseLock.unit, lambda turn: turn.borrowed("cuda:0")])
def test_a_unit_or_borrower_that_does_not_end_is_not_waited_for_without_end(held, monkeypatch):
    monkeypatch.setattr(device_reservation, "_PATIENCE_SECONDS", 0.0)
    turn = DeviceUseLock()
    busy = "^device cuda:0 has been busy for 0 s with units or a borrower that do not end$"
    with held(turn), pytest.raises(HydraTuneError, match=busy), turn.borrowed("cuda:0"):
        pass
    with turn.unit():
        pass


def test_a_borrower_that_is_interrupted_keeps_no_unit_waiting(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    turn = DeviceUseLock()
    with monkeypatch.context() as during:
        during.setattr(turn._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), turn.borrowed("cuda:0"):
            pass
    monkeypatch.setattr(turn._changed, "wait", lambda *_: pytest.fail("the next unit waits"))
    with turn.unit():
        pass


class OtherKind(StandInGpu):
    """Of another kind."""


def test_steps_are_profiled_on_one_device_of_each_kind_that_is_there_the_smallest_first():
    devices = {
        name: kind(index, nbytes)
        for index, (name, kind, nbytes) in enumerate(
            [
                ("a", StandInGpu, 9 << 20),
                ("b", OtherKind, 8 << 20),
                ("c", StandInGpu, 7 << 20),
                ("d", OtherKind, 6 << 20),
            ]
        )
    }
    away = {"d"}
    lending = DeviceReservations(devices, {}, lambda: away)
    asked = [stand.borrowed.args[0].budget_bytes >> 20 for stand in lending.stands]
    assert asked == [7, 8]
    assert {stand.rounding for stand in lending.stands} == {512}
    away |= {"a", "b", "c"}
    assert lending.stands == (HOST,)
    for device in devices.values():
        device.close()


def test_what_fails_on_a_device_that_is_lost_says_so_whatever_was_made_of_it(monkeypatch):
    """So that a step is profiled on another device the next time, and not held to be one that cannot be planned."""

    def lost():
        raise RuntimeError("CUDA error: unspecified launch failure")

    device = StandInGpu(0, 1 << 20)
    lending = DeviceReservations({"cuda:0": device}, {"cuda:0": Pager(device)}, tuple)
    device.name = "cuda:0"
    lending.turn("cuda:0")
    with pytest.raises(UnfusableError, match="as it is"), lending.borrowed(device):
        raise UnfusableError("as it is")
    monkeypatch.setattr(device, "synchronize", lost)
    with pytest.raises(DeviceLostError, match="device cuda:0 is lost"), lending.borrowed(device):
        raise UnfusableError("its operator fails")
    assert lending.turn("cuda:0")._is_borrowed is False
    device.close()


def test_parts_of_one_gpu_are_borrowed_together():
    """What one of them allocates and computes would be taken for what is profiled on the other."""
    parts = {f"cuda:0/{index}": StandInGpu(index, 1 << 20) for index in range(3)}
    for name, device in parts.items():
        device.name = name
    lending = DeviceReservations(parts, {name: Pager(device) for name, device in parts.items()}, lambda: {"cuda:0/2"})
    with lending.borrowed(parts["cuda:0/1"]):
        assert [lending.turn(name)._is_borrowed for name in parts] == [True, True, False]
    assert [lending.turn(name)._is_borrowed for name in parts] == [False] * 3
    assert [device.num_reclaimed for device in parts.values()] == [0, 1, 0]
    for device in parts.values():
        device.close()


def test_a_step_that_was_not_profiled_for_want_of_a_device_is_planned_the_next_time(monkeypatch):
    """Other failures are remembered, for planning takes long."""
    errors = [DeviceLostError("device cuda:0 is lost"), ValueError("a defect"), None]
    asked = []

    def plans(_self, stacks):
        asked.append(stacks)
        raise errors[len(asked) - 1]

    monkeypatch.setattr(StepPlanner, "_planned", plans)
    planner, stack = StepPlanner(1 << 20, 512), SimpleNamespace(prepared=Kept(), key="one")
    for why in ("its step was not profiled: device cuda:0 is lost", "a defect", "a defect"):
        with pytest.raises(UnfusableError, match=why):
            planner.planned(stack)
    assert len(asked) == 2


class Kept:
    """Stands for a plan, by which plans of steps are kept."""
