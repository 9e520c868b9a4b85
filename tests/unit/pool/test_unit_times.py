"""Units take what their device says, and not the host: for the scheduler, in the event log and in the pool's figures."""

import time
from contextlib import contextmanager

import pytest

from hydra_tune.observe.event_log.writer import EventLog
from hydra_tune.pool.runtime import settings, worker
from hydra_tune.schedule import UnitFinished
from hydra_tune.train.loop.batch_units import BatchUnits
from tests.support.stand_in_gpu import StandInGpu
from tests.unit.pool.tasks import PATIENCE_SECONDS, running, short

UNIT_SECONDS = 1000.0


class Watch:
    """Of a device with a time of its own: each piece of work takes a thousand seconds, and is over before the host can look."""

    def __init__(self):
        self.seconds, self.ended_ns = 0.0, 0

    @contextmanager
    def running(self):
        self.ended_ns = time.perf_counter_ns()
        yield
        self.seconds += UNIT_SECONDS


class OtherTime(StandInGpu):
    def stopwatch(self):
        return Watch()


@pytest.fixture
def pool(monkeypatch, tmp_path):
    monkeypatch.setattr(settings, "open_devices", lambda *_: [OtherTime(0, 64 << 20)])
    with running(num_shards=3, event_log=tmp_path / "log") as made:
        yield made


def trained(pool, **changes):
    job = pool.submit(short(epochs=3, **changes))
    result = job.result(PATIENCE_SECONDS)
    if result.error is not None:
        raise result.error


def test_the_scheduler_hears_the_devices_seconds(pool, monkeypatch):
    told = []
    monkeypatch.setattr(worker, "UnitFinished", lambda **of: told.append(of["seconds"]) or UnitFinished(**of))
    trained(pool)
    units = [seconds for seconds in told if seconds]  # the rest is a trial that goes on after a report
    assert len(units) > 3
    assert all(seconds % UNIT_SECONDS > UNIT_SECONDS - PATIENCE_SECONDS for seconds in units), (
        "less what they have waited"
    )


def test_in_the_log_and_in_the_figures_a_unit_ends_when_its_device_has_ended_it(pool, monkeypatch):
    """Here that is before all that it needs is there, so it ends at that moment, and computes for no time."""
    seen = []
    monkeypatch.setattr(EventLog, "unit", lambda _, *of, **__: seen.append(of[4:7]))
    trained(pool)
    assert len(seen) > 3
    assert all(start_ns < ready_ns == end_ns for start_ns, ready_ns, end_ns in seen)
    (device,) = pool.stats().devices.values()
    assert device.busy_seconds == pytest.approx(sum(end - start for start, _, end in seen) / 1e9)


def test_what_a_unit_waits_for_a_spill_is_the_devices_seconds_as_well(pool, monkeypatch):
    """By the host's clock it would begin before the unit has computed."""
    waited, spill = [], BatchUnits._spill
    monkeypatch.setattr(BatchUnits, "_spill", lambda *of: waited.append(spill(*of)) or waited[-1])
    trained(pool, activations="spill")
    assert set(waited) == {UNIT_SECONDS}
