"""Whole pools on GPUs that are not here: the bits are the plain loop's, and nothing is touched before its turn.

`tests/support/streams.py` says what is asked of the order of copies and computing, and how early and late they run.
"""

import pytest

from hydra_tune.devices.cuda import CudaDevice
from hydra_tune.pool.runtime import settings
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


@pytest.mark.parametrize("gpus", SEEDS, indirect=True)
def test_shards_that_are_spilled_and_come_back(pool_of):
    tasks = [task(epochs=1, **changes) for changes in ({"accumulate": 2}, {"max_grad_norm": 0.1}, {})]
    with pool_of([40 << 10], num_shards=3, max_concurrent=3) as pool:
        (device,) = run(pool, tasks)
    assert device.bytes_out > 0
