"""The event log of real pools: it says what `pool.stats()` says, it survives its process, and no result depends on it."""

import json
import random
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from hydra_tune import HydraExecutor, Reported
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.hardware import discovery
from hydra_tune.errors import ConfigError
from hydra_tune.observe.event_log.reader import read_log
from hydra_tune.observe.event_log.run_figures import computing, run_figures
from hydra_tune.observe.trace.chrome_trace import trace_events
from tests.integration.test_disk import DEVICE_BYTES, HOST_BYTES
from tests.integration.test_disk import task as large_task
from tests.integration.test_whole import Branches
from tests.integration.test_whole import task as whole_task
from tests.support.cli_project import Project
from tests.support.forked import Forked, run_code
from tests.unit.pool.tasks import PATIENCE_SECONDS, SAMPLES, against_plain, running, task

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("captured_once")]
TIGHT = {"devices": "cpu:2", "num_shards": 3, "device_memory": "8KiB", "max_concurrent": 3, "link_bandwidth": "20MB/s"}
EXACT = 1e-9  # relative: sums of nanoseconds, as floats


def logged(path, jobs, *, prune=None, **options):
    """Run jobs, of which the one of that name is pruned at its first report; returns the log and the pool's figures."""
    with running(**options, event_log=path) as pool:
        stream = pool.events()
        left = len([pool.submit(job, name=f"trial {number}", events=stream) for number, job in enumerate(jobs)])
        while left:
            event = stream.get(PATIENCE_SECONDS)
            assert event is not None
            if not isinstance(event, Reported):
                left -= 1
            elif event.job.name == prune:
                event.job.prune()
            else:
                event.job.proceed()
    return read_log(path), pool.stats()


def without_zeros(counts):
    return {kind: count for kind, count in counts.items() if count}


def check_against_stats(log, stats):
    figures = run_figures(log)
    assert figures.is_whole
    assert (figures.units_run, figures.units_saved) == (stats.units_run, stats.units_saved)
    assert 0 < figures.makespan_seconds <= stats.elapsed_seconds
    assert [device.name for device in figures.devices] == list(stats.devices)
    for device in figures.devices:
        known = stats.devices[device.name]
        assert (device.units, device.budget_bytes) == (known.units, known.budget_bytes)
        assert device.busy_seconds == pytest.approx(known.busy_seconds, rel=EXACT)
        assert device.copying_seconds == pytest.approx(known.copying_seconds, rel=EXACT)
        assert device.waiting_seconds == pytest.approx(known.waiting_seconds, rel=EXACT)
        for way in ("in", "out", "across"):
            name = f"bytes_{way}_by_kind"
            assert without_zeros(getattr(device, name)) == without_zeros(getattr(known, name))
        assert (device.bytes_ahead, device.bytes_in_vain) == (known.bytes_ahead, known.bytes_in_vain)
        assert 0 < device.computing_seconds <= device.busy_seconds
        assert 0 <= device.under_compute_seconds <= device.copying_seconds
    return figures


@pytest.mark.parametrize("options", [{}, {"policy": "round_robin", "device_memory": "4MiB"}], ids=["tight", "across"])
def test_the_log_of_a_run_says_what_its_pool_says(tmp_path, options):
    tasks = [task(epochs=epochs, validate=SAMPLES, seed=epochs) for epochs in (2, 4, 3)]
    log, stats = logged(tmp_path / "run.jsonl", tasks, prune="trial 1", **(TIGHT | options))
    figures = check_against_stats(log, stats)
    assert figures.trials == {"completed": 2, "pruned": 1}
    assert figures.units_saved > 3 * 9, "three of its four epochs, of more than nine units each"
    if options:
        assert sum(device.bytes_across for device in stats.devices.values()) > 0
    else:
        assert figures.overlap > 0
        assert all(device.bytes_ahead > 0 for device in figures.devices)
    assert [event.more["waits"] for event in log.jobs if event.what == "report"] == [True] * 6, (
        "one was pruned at its first"
    )
    assert all(copy.job is not None for copy in log.copies)
    assert {copy.kind for copy in log.copies} >= {"parameters", "optimizer"}


def test_activations_that_whole_models_have_on_the_host_are_counted_too(tmp_path):
    log, stats = logged(tmp_path / "run.jsonl", [whole_task(Branches)], devices="cpu:1", device_memory="400KiB")
    (device,) = check_against_stats(log, stats).devices
    assert device.bytes_out_by_kind["activations"] > device.budget_bytes


@pytest.mark.cases(1 / 3)
def test_the_disk_is_in_the_log(tmp_path):
    (tmp_path / "spill").mkdir()
    options = {"devices": "cpu:2", "device_memory": DEVICE_BYTES, "host_memory": HOST_BYTES, "num_shards": "layer"}
    tasks = [large_task(seed, epochs=1) for seed in range(2)]
    log, stats = logged(tmp_path / "run.jsonl", tasks, **options, spill_dir=tmp_path / "spill")
    figures = check_against_stats(log, stats)
    assert figures.disk_read_bytes == stats.disk.bytes_read > 0
    assert figures.disk_written_bytes == stats.disk.bytes_written > 0
    assert figures.disk_seconds == pytest.approx(stats.disk.busy_seconds, rel=EXACT)
    assert {e["args"]["name"] for e in trace_events(log) if e["name"] == "thread_name"} >= {
        "read from disk",
        "write to disk",
    }


def test_a_failed_unit_and_a_failed_trial_are_in_the_log(tmp_path):
    def data():
        yield from [(SAMPLES.tensors[0][:8], SAMPLES.tensors[1][:8])] * 2
        raise RuntimeError("the data has ended badly")

    log, stats = logged(tmp_path / "run.jsonl", [task(train=data), task()], **(TIGHT | {"devices": "cpu:1"}))
    figures = check_against_stats(log, stats)
    assert figures.trials == {"completed": 1, "failed": 1}
    (failed,) = [event for event in log.jobs if event.what == "over" and event.more["status"] == "failed"]
    assert failed.more["error"] == "RuntimeError: the data has ended badly"


class Slow(CpuDevice):
    """Makes each copy in the background late."""

    delays = random.Random(0)

    def _send(self, pairs, *, is_waited_for):
        if not is_waited_for:
            time.sleep(self.delays.choice([0.004, 0.006]))
        super()._send(pairs, is_waited_for=is_waited_for)

    def _take(self, source, pairs, *, is_waited_for):
        if not is_waited_for:
            time.sleep(self.delays.choice([0.004, 0.006]))
        super()._take(source, pairs, is_waited_for=is_waited_for)


def test_late_copies_are_late_in_the_log_and_change_no_bit(tmp_path, monkeypatch):
    tasks = [task(epochs=2, seed=seed) for seed in range(3)]

    def run(name):
        with running(**(TIGHT | {"link_bandwidth": None}), event_log=tmp_path / name) as pool:
            results = [job.result(PATIENCE_SECONDS) for job in [pool.submit(one) for one in tasks]]
        log = read_log(tmp_path / name)
        check_against_stats(log, pool.stats())
        return results, [copy.end_ns - copy.start_ns for copy in log.copies if copy.is_in_background]

    _, prompt = run("prompt.jsonl")
    monkeypatch.setattr(discovery, "CpuDevice", Slow)
    results, late = run("late.jsonl")
    assert min(late) >= 4_000_000 > min(prompt)
    for described, result in zip(tasks, results, strict=True):
        assert against_plain(described, result) == []


def test_units_of_a_device_follow_each_other_and_copies_lie_within_the_run(tmp_path):
    log, _ = logged(tmp_path / "run.jsonl", [task(seed=seed) for seed in range(3)], **TIGHT)
    for device in log.budgets:
        units = [unit for unit in log.units if unit.device == device]
        assert all(one.end_ns <= other.start_ns for one, other in pairwise(units))
        assert all(unit.start_ns <= unit.ready_ns <= unit.end_ns for unit in units)
        assert all(one[1] <= other[0] for one, other in pairwise(computing(log, device)))
    assert all(0 <= copy.start_ns <= copy.end_ns <= log.end_ns for copy in log.copies)


KILLED = """
import sys
from hydra_tune import HydraExecutor
from tests.unit.pool.tasks import task

pool = HydraExecutor(devices="cpu:2", num_shards=3, device_memory="8KiB", event_log=sys.argv[1])
for job in [pool.submit(task(epochs=100_000, seed=seed), name=f"trial {seed}") for seed in range(3)]:
    job.result()
"""


def test_the_log_of_a_run_that_was_killed_is_readable(tmp_path):
    path = tmp_path / "run.jsonl"
    with Forked(run_code, KILLED, path) as process:
        end = time.monotonic() + PATIENCE_SECONDS
        while not (path.exists() and path.read_bytes().count(b'"unit"') > 200):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    path.write_bytes(path.read_bytes()[:-7])  # as if the system had gone down as well
    log = read_log(path)
    figures = run_figures(log)
    assert (log.is_cut, figures.is_whole) == (True, False)
    assert figures.units_run > 190
    assert figures.trials == {"unknown": 3}
    assert figures.utilisation > 0
    assert sum(1 for event in trace_events(log) if event["ph"] == "X") >= figures.units_run


def test_a_log_that_cannot_be_written_hurts_no_trial(caplog):
    if not Path("/dev/full").exists():
        pytest.skip("no full device")
    with running(**TIGHT, event_log="/dev/full") as pool:
        result = pool.submit(task()).result(PATIENCE_SECONDS)
    assert against_plain(task(), result) == []
    assert [record.getMessage().split(",")[0] for record in caplog.records if "event log" in record.getMessage()] == [
        "the event log /dev/full ends here"
    ]


def test_a_place_that_cannot_be_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"event_log .* is a folder; give a file in it"):
        HydraExecutor(event_log=tmp_path)


def test_a_sweep_writes_a_log_of_its_own_unless_it_is_told_otherwise(tmp_path):
    project = Project(tmp_path)
    done = project.call("--run-cap", "3", "--json")
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "runs").iterdir()
    data = json.loads(done.stdout)
    assert data["event_log"] == str(path.relative_to(tmp_path))
    figures = run_figures(read_log(path))
    assert figures.units_run == data["units_run"]
    assert figures.trials == {"completed": 3}
    assert {event.job.partition(":")[2] for event in read_log(path).jobs} == {"trial 0", "trial 1", "trial 2"}
