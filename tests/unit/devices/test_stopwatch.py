"""How long work takes on a GPU: by events on its stream, which are read when somebody asks."""

import time
from types import SimpleNamespace

import pytest
import torch

from hydra_tune.devices import stopwatch
from hydra_tune.devices.stopwatch import CudaStopwatch

GPU = torch.device("cuda", 0)


class Gpu:
    """One whose clock is moved on by what it is asked for, and that does nothing before somebody waits for it."""

    def __init__(self):
        self.queue, self.now_ms, self.num_waits = [], 0.0, 0
        event = lambda enable_timing: Event(self, enable_timing)  # noqa: E731
        self.cuda = SimpleNamespace(Event=event, current_stream=lambda _device: self)
        self.device = torch.device

    def work(self, milliseconds):
        self.queue.append(milliseconds)

    def catch_up(self):
        for item in self.queue:
            if isinstance(item, Event):
                item.at_ms = self.now_ms
            else:
                self.now_ms += item
        self.queue.clear()


class Event:
    def __init__(self, gpu, enable_timing):
        assert enable_timing
        self.gpu, self.at_ms = gpu, None

    def record(self, stream):
        stream.queue.append(self)

    def synchronize(self):
        self.gpu.num_waits += 1
        self.gpu.catch_up()

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    monkeypatch.setattr(stopwatch, "torch", made)
    return made


def test_a_gpu_is_waited_for_when_somebody_asks_and_not_before(gpu):
    watch = CudaStopwatch(GPU)
    for milliseconds in (2.0, 3.0):
        gpu.work(100.0)  # between two graphs
        with watch.running():
            gpu.work(milliseconds)
    assert gpu.num_waits == 0
    assert watch.seconds == pytest.approx(0.005)
    assert gpu.num_waits == 2
    assert watch.seconds == pytest.approx(0.005)
    assert gpu.num_waits == 2


def test_a_graph_that_fails_does_not_count(gpu):
    watch = CudaStopwatch(GPU)
    gpu.work(7.0)
    gpu_fails = RuntimeError("lost")
    with pytest.raises(RuntimeError, match="lost"), watch.running():
        raise gpu_fails
    with watch.running():
        gpu.work(1.0)
    assert watch.seconds == pytest.approx(0.001)


def test_work_ends_when_the_gpu_has_done_it_and_not_when_the_host_hears_of_it(gpu):
    watch, before_ns = CudaStopwatch(GPU), time.perf_counter_ns()
    with watch.running():
        gpu.work(2.0)
    after_ns = time.perf_counter_ns()
    assert before_ns <= watch.ended_ns - 2_000_000 <= after_ns
    assert gpu.num_waits == 1
