"""A result is handed over beside the next units of its device, and whoever waits for the trial waits for that."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune.errors import HydraTuneError
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.train.claims import TrialClaim
from hydra_tune.train.state.model_state import ModelState
from tests.unit.pool.tasks import PATIENCE_SECONDS, against_plain, running, short, task, until

pytestmark = pytest.mark.timeout(280)


class Hold:
    """Holds the first hand-over of a result until `go` is called."""

    def __init__(self):
        self.begun, self._may_begin = threading.Event(), threading.Event()

    def go(self):
        self._may_begin.set()

    def wait(self):
        if not self.begun.is_set():
            self.begun.set()
            assert self._may_begin.wait(PATIENCE_SECONDS)


@pytest.fixture
def held(monkeypatch):
    hold, hand_over = Hold(), ModelState.hand_over

    def handed_over(state, **how):
        hold.wait()
        hand_over(state, **how)

    monkeypatch.setattr(ModelState, "hand_over", handed_over)
    yield hold
    hold.go()


def in_thread(call):
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"num_shards": 4, "device_memory": "12KiB"}, {"link_bandwidth": "100MB/s"}])
def test_units_go_on_while_a_result_is_handed_over(held, options):
    with running(max_concurrent=1, **options) as pool:
        first = pool.submit(short())
        assert held.begun.wait(PATIENCE_SECONDS)
        second = pool.submit(task(epochs=3))
        until(lambda: second.progress.step == 9)
        if "num_shards" in options:
            until(lambda: not pool.stats().devices["cpu:0"].resident_bytes)  # both are home before they are handed over
        for job in (first, second):
            with pytest.raises(TimeoutError):
                job.result(0.1)
        ending = in_thread(pool.shutdown)
        ending.join(0.1)
        assert ending.is_alive(), "the shutdown waits for the hand-over"
        held.go()
        ending.join(PATIENCE_SECONDS)
        assert not ending.is_alive()
    for job in (first, second):
        assert against_plain(job.task, job.result()) == []


def test_a_pruned_trial_waits_for_no_hand_over(held):
    with running() as pool:
        first, stream = pool.submit(short()), pool.events()
        assert held.begun.wait(PATIENCE_SECONDS)
        second = pool.submit(task(), events=stream)
        assert stream.get(PATIENCE_SECONDS).job is second
        second.prune()
        assert second.result(PATIENCE_SECONDS).status == "pruned"
        assert first.state == "running"
        held.go()


def test_a_removed_device_waits_for_the_hand_over(held):
    with running(devices="cpu:2") as pool:
        job = pool.submit(short())
        assert held.begun.wait(PATIENCE_SECONDS)
        name = next(name for name, stats in pool.stats().devices.items() if stats.units)
        removing = in_thread(lambda: pool.remove_device(name))
        removing.join(0.1)
        assert removing.is_alive()
        held.go()
        removing.join(PATIENCE_SECONDS)
        assert not removing.is_alive()
        assert job.state == "completed"


def test_a_breakdown_waits_for_no_hand_over_but_the_shutdown_does(held):
    with running() as pool:
        job = pool.submit(short())
        assert held.begun.wait(PATIENCE_SECONDS)
        pool._pool._core.break_down(HydraTuneError("broken"))
        assert job.result(PATIENCE_SECONDS).status == "failed"
        ending = in_thread(pool.shutdown)
        ending.join(0.1)
        assert ending.is_alive()
        held.go()


def test_an_error_of_the_hand_over_is_the_trials(monkeypatch):
    """As a call that would wait for the thread that hands over, which is refused."""
    with running() as pool:
        monkeypatch.setattr(ModelState, "hand_over", lambda state, **how: pool._pool.shutdown())
        result = pool.submit(short()).result(PATIENCE_SECONDS)
        assert result.status == "failed"
        assert "on a thread of the pool" in str(result.error)
        monkeypatch.undo()
        assert pool.submit(short()).result(PATIENCE_SECONDS).status == "completed"


def test_bytes_that_do_not_come_home_fail_the_trial(monkeypatch):
    def fail(state):
        raise OSError("no way home")

    monkeypatch.setattr(ModelState, "settle", fail)  # what a hand-over begins with
    with running() as pool:
        result = pool.submit(short()).result(PATIENCE_SECONDS)
    assert result.status == "failed"
    assert "no way home" in str(result.error)


def test_a_next_trial_of_the_same_model_waits_for_the_hand_over(held, monkeypatch):
    """And meanwhile captures go on: the hand-over may wait for one."""
    waits, entered = threading.Event(), TrialClaim._entered

    def entered_or_waits(claim, module):
        found = entered(claim, module)
        if found is not None:
            waits.set()
        return found

    def capture():
        with GATE.exclusive():
            pass

    monkeypatch.setattr(TrialClaim, "_entered", entered_or_waits)
    module = nn.Linear(8, 4)
    one = task(model=lambda: module, train=lambda: [(torch.ones(2, 8), torch.ones(2, 4))], loss=functional.mse_loss)
    with running(max_concurrent=1) as pool:
        first = pool.submit(one)
        assert held.begun.wait(PATIENCE_SECONDS)
        second, other = pool.submit(one), pool.submit(short())
        with pytest.raises(TimeoutError):
            second.result(0.1)
        assert second.progress.step == 0
        assert waits.wait(PATIENCE_SECONDS)
        capturing = in_thread(capture)
        capturing.join(PATIENCE_SECONDS)
        assert not capturing.is_alive()
        held.go()
        assert [job.result(PATIENCE_SECONDS).status for job in (first, second, other)] == ["completed"] * 3
