"""Clocks of units and of planned steps on a GPU that is not here (`tests/support/streams.py`): none is read too early."""

import time

import pytest
import torch

from hydra_tune.devices.cuda import CudaDevice
from hydra_tune.devices.stopwatch import CudaStopwatch
from hydra_tune.planner.profile import profiler
from hydra_tune.train.loop.batch_units import PendingUnit, run_unit
from hydra_tune.train.timing.unit_times import UnitTimes
from tests.support.streams import HASTES, Gpus, Stream

GPU = torch.device("cuda", 0)


@pytest.fixture(params=HASTES)
def gpus(request, monkeypatch):
    made = Gpus(request.param)
    made.stand_in(monkeypatch, profiler)
    with made.computing_on(Stream(made, GPU)):
        yield made


def test_a_step_is_timed_from_its_first_operator_to_its_last(gpus):
    watch, data = CudaStopwatch(GPU), gpus.empty(8, device=GPU)
    for steps in range(1, 3):
        with watch.running():
            data.fill_(steps)
        assert watch.seconds == steps / 1000


def test_a_node_is_timed_when_it_is_over(gpus):
    clock, data = profiler.CudaClock(GPU), gpus.empty(8, device=GPU)
    assert clock.timed("node", lambda: data.fill_(1)) is data
    assert clock.seconds() == {"node": 1 / 1000}


def test_a_unit_takes_what_its_gpu_takes_and_not_what_its_host_does(gpus, monkeypatch):
    """Read once its one wait is over: the stand-in's events are a millisecond apart, and say so only then."""
    device, waits = CudaDevice(0, 1 << 20), []
    with gpus.computing_on(device._compute):
        data = device.empty(8)

        def run(_device, _pager):
            time.sleep(0.02)
            data.fill_(1)
            return 0.0

        monkeypatch.setattr(
            Stream, "synchronize", lambda stream: waits.append(stream) or stream.run_to(len(stream.queue))
        )
        unit = PendingUnit(kind="forward", shard=0, seconds=0.0, run=run, times=UnitTimes({}), key=("forward", 0))
        assert run_unit(unit, device, None, None) == 1 / 1000
    assert waits == [device._compute]
    device.close()
