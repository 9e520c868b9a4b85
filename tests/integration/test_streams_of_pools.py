"""Whole pools on GPUs that are not here: the bits are the plain loop's, and nothing is touched before its turn.

`tests/support/streams.py` says what is asked of the order of copies and computing, and how early and late they run.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune import Reported, train_plain
from hydra_tune.devices.cuda import CudaDevice
from hydra_tune.pool.job import OVER
from hydra_tune.pool.runtime import settings
from hydra_tune.pool.runtime.worker import Worker
from tests.support.gathered import gather
from tests.support.streams import HASTES, LATE, Gpus
from tests.unit.pool.tasks import PATIENCE_SECONDS, against_plain, running, task

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("captured_once")]

SEEDS = [LATE, *(pytest.param(one, marks=pytest.mark.slow) for one in (*HASTES[1:], *range(1, 20)))]


@pytest.fixture
def gpus(request, monkeypatch):
    made = Gpus(request.param)
    made.stand_in(monkeypatch)
    yield made
    made.finish()
    assert not made.faults, made.faults[0]


@pytest.fixture
def pool_of(gpus, monkeypatch):
    """Pools of devices of so many bytes, each a GPU."""

    def opened(sizes, **options):
        devices = [CudaDevice(index, nbytes) for index, nbytes in enumerate(sizes)]
        monkeypatch.setattr(settings, "open_devices", lambda *_: devices)
        return running(**options)

    return opened


def run(pool, tasks):
    results = [job.result(PATIENCE_SECONDS) for job in [pool.submit(one) for one in tasks]]
    for described, result in zip(tasks, results, strict=True):
        assert against_plain(described, result) == []
    return pool.stats().devices.values()


@pytest.mark.parametrize("gpus", SEEDS, indirect=True)
def test_own_code_that_makes_room_for_other_own_code(pool_of):
    """Two trials fit one after the other: whole, with their state and what their steps make."""
    with pool_of([64 << 10], num_shards=None, max_concurrent=2) as pool:
        (device,) = run(pool, [task(seed=seed) for seed in range(2)])
    assert device.bytes_in > 0


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("gpus", SEEDS, indirect=True)
def test_shards_that_are_spilled_and_come_back(pool_of):
    tasks = [task(epochs=1, **changes) for changes in ({"accumulate": 2}, {"max_grad_norm": 0.1}, {})]
    with pool_of([40 << 10], num_shards=3, max_concurrent=3) as pool:
        (device,) = run(pool, tasks)
    assert device.bytes_out > 0


@pytest.mark.slow
@pytest.mark.parametrize("gpus", SEEDS, indirect=True)
def test_groups_that_make_room_for_each_other_step_several_times_in_a_unit(pool_of, monkeypatch):
    def members(width):
        def model():
            return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4)).double()

        data = TensorDataset(torch.randn(96, 8, dtype=torch.float64), torch.arange(96) % 4)
        return [
            task(model=model, train=data, batch_size=8, loss=functional.cross_entropy, epochs=3, seed=seed)
            for seed in range(2)
        ]

    tasks = [*members(40), *members(42), *members(43), *members(44)]
    turns, run_pending = [], Worker._run_pending
    monkeypatch.setattr(Worker, "_run_pending", lambda *given: turns.append(given) or run_pending(*given))
    gather(monkeypatch, lambda count: count >= len(tasks))
    with pool_of([180 << 10], num_shards=None, max_concurrent=8, fusion="on", fusion_size=2) as pool:
        events = pool.events()
        jobs = [pool.submit(one, None, events) for one in tasks]
        first = [events.get(PATIENCE_SECONDS) for _ in jobs]  # neither group is over before the other has begun
        for event in first:
            event.job.proceed()
        while not all(job.state in OVER for job in jobs):
            event = events.get(PATIENCE_SECONDS)
            if isinstance(event, Reported):
                event.job.proceed()
        results = [job.result() for job in jobs]
        (device,) = pool.stats().devices.values()
    for result, one in zip(results, tasks, strict=True):
        assert result.error is None
        assert result.group_size == 2
        for name, tensor in train_plain(one).state_dict().items():
            torch.testing.assert_close(result.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
    assert device.bytes_out > 0
    assert device.units == 4 * 2 * 2 * 36, "those of each trial"
    assert len(turns) < 4 * 2 * 36, "each step of the four groups would be two units"
