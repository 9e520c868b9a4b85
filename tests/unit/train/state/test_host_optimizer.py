"""Updates on the host go on beside the device's units: in order, seen by nobody before they are over, and by no other step."""

import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.errors import OutOfMemoryError
from hydra_tune.memory.block import BlockKind, TensorBlock
from hydra_tune.memory.block_release import HostBlockPin
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.pressure import not_repeatable
from hydra_tune.observe.event_log.reader import read_log
from hydra_tune.observe.event_log.run_figures import run_figures
from hydra_tune.observe.trace.chrome_trace import trace_events
from hydra_tune.shard.execute import compute
from hydra_tune.train.loop.batch_units import run_unit
from hydra_tune.train.single_trial import SingleTrial
from hydra_tune.train.state import tensor_groups
from hydra_tune.train.state.host_optimizer import HostUpdateQueue
from hydra_tune.train.state.model_state import ModelState
from tests.support.checkpointed import library
from tests.unit.pool.tasks import against_plain, mlp, running, task

PATIENCE_SECONDS = 60.0


@pytest.fixture
def device():
    made = CpuDevice(0, 1 << 20)
    yield made
    made.close()


def told(*_):
    pass


def test_updates_run_in_order_on_a_thread_of_the_devices(device):
    other, updates, seen = CpuDevice(1, 1 << 20), HostUpdateQueue(), []
    gate = threading.Event()

    def first():
        assert gate.wait(PATIENCE_SECONDS)
        seen.append(("first", threading.current_thread().name, torch.get_num_threads()))

    updates.start(device, [], first, told)
    updates.start(other, [], lambda: seen.append(("second", threading.current_thread().name, 1)), told)
    assert seen == []
    gate.set()
    updates.wait()
    assert [name for name, _, _ in seen] == ["first", "second"]
    assert seen[0][1].startswith("hydra-host-cpu:0")
    assert seen[1][1].startswith("hydra-host-cpu:1")
    assert seen[0][2] == 1
    other.close()


def test_after_one_that_has_failed_none_is_made(device):
    updates, seen, times = HostUpdateQueue(), [], []
    updates.start(device, [], lambda: 1 // 0, told)
    updates.start(device, [], lambda: seen.append("made"), lambda began, ended: times.append(ended - began))
    with pytest.raises(ZeroDivisionError):
        updates.wait()
    assert seen == []
    assert times == [0]
    updates.wait()  # told once


def test_memory_that_runs_out_is_told_as_such(device):
    def step():
        with not_repeatable("the step had begun"):
            raise MemoryError("no more")

    updates = HostUpdateQueue()
    updates.start(device, [], step, told)
    with pytest.raises(OutOfMemoryError, match=r"the host ran out of memory.*the step had begun \(no more\)"):
        updates.wait()


def test_a_unit_waits_for_parameters_that_are_being_updated(device):
    tensor = torch.zeros(4)
    group = device.on_host(lambda: TensorBlock(BlockKind.PARAMETERS, [tensor], device))
    pager, updates, gate, seen = Pager(device), HostUpdateQueue(), threading.Event(), []

    def step():
        assert gate.wait(PATIENCE_SECONDS)
        tensor.add_(1)

    def unit():
        with pager.lease([group], 0):
            seen.append(tensor.tolist())

    updates.start(device, [group], step, told)
    assert isinstance(group.pinned_for, HostBlockPin)
    thread = threading.Thread(target=unit)
    thread.start()
    assert seen == []
    gate.set()
    thread.join(PATIENCE_SECONDS)
    updates.wait()
    assert seen == [[1.0] * 4]
    assert group.pinned_for is None


class Patient(torch.optim.SGD):
    """Does not begin before the unit that follows its update has begun."""

    def __init__(self, params, following, **options):
        super().__init__(params, **options)
        self.following = following

    def step(self, closure=None):
        self.following(self)
        return super().step(closure)


def test_the_next_unit_runs_while_an_update_does():
    """The first update of each step does not return before the next unit has begun, which it would wait for for ever."""
    begun, lock, met = [0], threading.Condition(), []
    units, first_update = 8, 4  # of a step: F0 F1 B2 U2 B1 U1 B0 U0

    @contextmanager
    def instrument():
        with lock:
            begun[0] += 1
            lock.notify_all()
        yield

    def following(optimizer):
        has_gradient = [p.grad is not None for group in optimizer.param_groups for p in group["params"]]
        if not threading.current_thread().name.startswith("hydra-host") or not has_gradient[-1]:
            return
        with lock:
            following = len(met) * units + first_update + 1
            met.append(lock.wait_for(lambda: begun[0] >= following, PATIENCE_SECONDS))

    described = task(optimizer=partial(Patient, following=following, lr=0.1))
    options = {"num_shards": 3, "optimizer_placement": "host", "instrument": instrument}
    with running(**options) as pool:
        result = pool.submit(described).result(60.0)
    assert result.error is None
    assert met == [True] * 6


def test_gradients_of_units_beside_an_update_are_not_the_parameters_own(monkeypatch):
    """The optimizer takes whatever parameter has one."""
    models, left = [], []

    def model():
        models.append(mlp())
        return models[-1]

    def run_backward(roots):
        first = max(0, len(updating) - 1)  # the last one that has begun may be under way
        before = {name for name, parameter in models[0].named_parameters() if parameter.grad is not None}
        run(roots)
        after = {name for name, parameter in models[0].named_parameters() if parameter.grad is not None}
        own = {name for name, parameter in models[0].named_parameters() if parameter.requires_grad}
        # What updates have begun to step for meanwhile has gradients by right, and they may be several.
        left.append((after - before) & own - {name for names in updating[first:] for name in names})

    updating: list[list[str]] = []

    def update_on_host(self, names, *rest):
        updating.append(list(names))
        real(self, names, *rest)

    run, real = compute._run_backward, ModelState.update_on_host
    described = task(model=model)
    with running(num_shards=3, optimizer_placement="host") as pool:
        assert pool.submit(task()).result(60.0).error is None  # its plan is checked before anybody looks
        monkeypatch.setattr(compute, "_run_backward", run_backward)
        monkeypatch.setattr(ModelState, "update_on_host", update_on_host)
        result = pool.submit(described).result(60.0)
    monkeypatch.undo()
    assert len(left) >= 18
    assert not any(left)
    assert against_plain(task(), result) == []


class Held(torch.optim.SGD):
    """Its updates on the host do not end before they may."""

    def __init__(self, params, may_end, ended, **options):
        super().__init__(params, **options)
        self.may_end, self.ended = may_end, ended

    def step(self, closure=None):
        if not threading.current_thread().name.startswith("hydra-host"):
            return super().step(closure)
        assert self.may_end.wait(PATIENCE_SECONDS)
        loss = super().step(closure)
        self.ended.append(True)
        return loss


def test_a_trial_that_is_given_up_keeps_its_state_until_its_updates_are_over(device, monkeypatch):
    """Its memory is free then, and another trial may train the module."""
    may_end, ended, seen = threading.Event(), [], []
    described = task(optimizer=partial(Held, may_end=may_end, ended=ended, lr=0.1))
    trial = SingleTrial(described, library(num_shards=3, optimizer_placement="host"), device)
    pager, dropped, wait = Pager(device), tensor_groups.drop, HostUpdateQueue.wait_quietly

    def drop(block):
        seen.append(bool(ended))
        dropped(block)

    with device.worker():
        while (unit := trial.advance()).kind != "update":
            trial.finished(unit, run_unit(unit, device, pager, None))
        run_unit(unit, device, pager, None)
        assert not ended
        # Not before somebody waits.
        monkeypatch.setattr(HostUpdateQueue, "wait_quietly", lambda updates: (may_end.set(), wait(updates))[1])
        monkeypatch.setattr(tensor_groups, "drop", drop)
        trial.close(keep=False)
        may_end.set()  # in any case, for the device is closed next
    assert seen
    assert all(seen)


def test_an_optimizer_that_fails_on_the_host_fails_its_trial_alone():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            if threading.current_thread().name.startswith("hydra-host"):
                raise ValueError("no step today")
            return super().step(closure)

    with running(num_shards=3, optimizer_placement="host") as pool:
        bad = pool.submit(task(optimizer=partial(Broken, lr=0.1)))
        good = pool.submit(task())
        assert against_plain(task(), good.result(60.0)) == []
        assert str(bad.result(60.0).error) == "no step today"


def test_the_log_has_them_and_the_trace_shows_them(tmp_path):
    path = tmp_path / "run.jsonl"
    with running(num_shards=3, optimizer_placement="host", event_log=path) as pool:
        result = pool.submit(task(), "one").result(60.0)
        (stats,) = pool.stats().devices.values()
    assert result.optimizer_placement == "host"
    log = read_log(path)
    assert [update.shard for update in log.host_updates] == [2, 1, 0] * 6
    assert {update.job for update in log.host_updates} == {log.units[0].job}
    (figures,) = run_figures(log).devices
    assert figures.host_update_seconds == pytest.approx(stats.host_update_seconds)
    assert 0 <= figures.host_update_overlap <= 1
    rows = [event for event in trace_events(log) if event.get("args", {}).get("name") == "updates on the host"]
    assert len(rows) == 1
