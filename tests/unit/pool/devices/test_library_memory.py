"""A device whose libraries take more, or less, than was left to them: its ledger follows, and the numbers stay."""

import logging

import pytest

from hydra_tune.devices.hardware.libraries import LedgerAllowance
from hydra_tune.pool.runtime import settings
from tests.support.stand_in_gpu import StandInGpu
from tests.unit.pool.tasks import PATIENCE_SECONDS, Held, against_plain, running, task, until

BUDGET = 48 << 10


class Told(StandInGpu):
    """Says that there is room for so much, once a unit is over."""

    def __init__(self, limit, gain=0):
        super().__init__(0, BUDGET)
        self.told, self.counted = LedgerAllowance(limit_bytes=limit, gain_bytes=gain), []

    def unit_memory(self):
        return self

    def room(self, counted_bytes):
        self.counted.append(counted_bytes)
        return self.told


@pytest.fixture
def held():
    return Held()


@pytest.fixture
def pool_of(monkeypatch, held):
    def opened(device):
        monkeypatch.setattr(settings, "open_devices", lambda *_: [device])
        return running(num_shards=3, max_concurrent=3, instrument=held)

    return opened


def ledger_after(pool, held, num_tasks=2):
    """The ledger of the one device after some trials, which have the plain loop's numbers, and its figures.

    None of them begins before all are prepared: else one might be over by then.
    """
    tasks = [task(seed=seed) for seed in range(num_tasks)]
    jobs = [pool.submit(one) for one in tasks]
    until(lambda: not any(job.state in ("queued", "preparing") for job in jobs))
    held.go()
    for described, job in zip(tasks, jobs, strict=True):
        assert against_plain(described, job.result(PATIENCE_SECONDS)) == []
    (pager,), (stats,) = pool._pool._pagers.values(), pool.stats().devices.values()
    return pager.ledger, stats


def test_where_they_take_more_the_pool_holds_less_and_plans_stay(pool_of, held, caplog):
    with pool_of(Told(BUDGET // 3)) as pool, caplog.at_level(logging.INFO, "hydra_tune.pool.devices.library_memory"):
        ledger, stats = ledger_after(pool, held)
    assert (ledger.limit_bytes, ledger.budget_bytes) == (BUDGET // 3, BUDGET)
    assert stats.bytes_out > 0
    assert [one.getMessage() for one in caplog.records] == [
        "device cpu:0 holds at most 16.0 KiB from now on, 48.0 KiB before: units were seen to take that much beside the ledger"
    ]


def test_where_they_take_less_more_is_held_and_the_budget_that_is_told_is_that(pool_of, held):
    with pool_of(Told(3 * BUDGET, BUDGET)) as pool:
        ledger, stats = ledger_after(pool, held, 3)
    assert (ledger.limit_bytes, ledger.budget_bytes) == (2 * BUDGET, BUDGET)
    assert stats.budget_bytes == 2 * BUDGET
    assert BUDGET < stats.peak_bytes <= 2 * BUDGET


def test_each_kind_of_unit_is_looked_at_once_beside_what_the_ledger_has_counted_for_it(pool_of, held):
    device = Told(BUDGET)
    with pool_of(device) as pool:
        _, stats = ledger_after(pool, held, 1)
    assert len(device.counted) == 2 + 3 + 3, "forwards, backwards, updates of three shards"
    assert stats.units > len(device.counted)
    assert all(0 < counted <= stats.peak_bytes for counted in device.counted)
