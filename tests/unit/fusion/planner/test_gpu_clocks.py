"""Clocks of planned steps on a GPU that is not here (`tests/support/streams.py`): no time is read before it is over."""

import pytest
import torch

from hydra_tune.fusion.planner import profiler, stopwatch
from tests.support.streams import HASTES, Gpus, Stream

GPU = torch.device("cuda", 0)


@pytest.fixture(params=HASTES)
def gpus(request, monkeypatch):
    made = Gpus(request.param)
    made.stand_in(monkeypatch, profiler, stopwatch)
    with made.computing_on(Stream(made, GPU)):
        yield made


def test_a_step_is_timed_from_its_first_operator_to_its_last(gpus):
    watch, data = stopwatch.CudaStopwatch(GPU), gpus.empty(8, device=GPU)
    for steps in range(1, 3):
        with watch.running():
            data.fill_(steps)
        assert watch.seconds == steps / 1000


def test_a_node_is_timed_when_it_is_over(gpus):
    clock, data = profiler.CudaClock(GPU), gpus.empty(8, device=GPU)
    assert clock.timed("node", lambda: data.fill_(1)) is data
    assert clock.seconds() == {"node": 1 / 1000}
