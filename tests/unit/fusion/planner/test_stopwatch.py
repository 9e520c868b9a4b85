"""How long graphs take: by the thread that computes, or by events on a GPU's stream, which are read when somebody asks."""

from types import SimpleNamespace

import pytest
import torch

from hydra_tune.fusion.planner import stopwatch
from hydra_tune.fusion.planner.stopwatch import CudaStopwatch, HostStopwatch, stopwatch_for

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


def test_the_hosts_waiting_for_copies_counts():
    copies = SimpleNamespace(waited_seconds=1.0)
    watch = HostStopwatch(copies)
    with watch.running():
        copies.waited_seconds = 8.0
    assert 7.0 <= watch.seconds < 8.0


def test_it_is_that_of_the_device():
    copies = SimpleNamespace(waited_seconds=0.0)
    assert isinstance(stopwatch_for(torch.device("cpu"), copies), HostStopwatch)
    assert isinstance(stopwatch_for(GPU, copies), CudaStopwatch)
