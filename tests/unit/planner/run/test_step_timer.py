"""How long graphs take: by the thread that computes, or by events on a GPU's stream."""

import time
from types import SimpleNamespace

import torch

from hydra_tune.devices.stopwatch import CudaStopwatch
from hydra_tune.planner.run.step_timer import HostStopwatch, stopwatch_for

GPU = torch.device("cuda", 0)


def test_the_hosts_waiting_for_copies_counts():
    copies = SimpleNamespace(waited_seconds=1.0)
    watch = HostStopwatch(copies)
    began = time.perf_counter()
    with watch.running():
        copies.waited_seconds = 8.0
    assert 7.0 <= watch.seconds <= 7.0 + time.perf_counter() - began


def test_it_is_that_of_the_device():
    copies = SimpleNamespace(waited_seconds=0.0)
    assert isinstance(stopwatch_for(torch.device("cpu"), copies), HostStopwatch)
    assert isinstance(stopwatch_for(GPU, copies), CudaStopwatch)
