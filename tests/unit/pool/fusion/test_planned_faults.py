"""What befalls planned steps: memory that runs out within them, and devices that are lost there. Nothing hangs or is left."""

import functools
import re
import threading
import time

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from hydra_tune.errors import DeviceLostError
from hydra_tune.fusion.runtime.paired_unit import PairStepRunner
from hydra_tune.fusion.runtime.planned_unit import GroupStepRunner
from hydra_tune.pool.job import OVER, Reported
from tests.support.losable import losable
from tests.support.shortage import run_out
from tests.unit.pool.fusion.test_fused_pool import assert_as_plain
from tests.unit.pool.fusion.test_planned_steps import CNN, X, Y, task
from tests.unit.pool.tasks import PATIENCE_SECONDS, running

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow, pytest.mark.usefixtures("captured_once")]

MEMORY = {"pair": "560KiB", "group": "780KiB"}
PARTS = {
    "pair": (PairStepRunner, "run"),
    "forward": (GroupStepRunner, "forward"),
    "backward": (GroupStepRunner, "backward"),
}


class Fault(TorchDispatchMode):
    """At the third operation of some of the calls of what runs parts of planned steps.

    Args:
        first: the number of the first of these calls, from 0.
        times: how many they are.
        raise_it: what happens there; it raises.
    """

    def __init__(self, first, times, raise_it):
        super().__init__()
        self.calls, self.num_raised = 0, 0
        self._first, self._times, self._raise_it = first, times, raise_it
        self._operations = 0

    def around(self, monkeypatch, owner, name):
        run = getattr(owner, name)

        @functools.wraps(run)
        def faulty(*arguments):
            number, self.calls = self.calls, self.calls + 1
            if not self._first <= number < self._first + self._times:
                return run(*arguments)
            self._operations = 0
            with self:
                return run(*arguments)

        monkeypatch.setattr(owner, name, faulty)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._operations += 1
        if self._operations == 3:
            self.num_raised += 1
            self._raise_it()
        return func(*args, **(kwargs or {}))


def double():
    return CNN().double()


def tasks_of(epochs=3):
    data = TensorDataset(X.double(), Y)
    return [task(seed, model=double, train=data, validate=data, epochs=epochs) for seed in range(4)]


def trained(pool, tasks, **options):
    """Train to the end; the results, and what was reported of each."""
    events = pool.events()
    jobs = [pool.submit(one, f"trial {number}", events, **options) for number, one in enumerate(tasks)]
    reports = {job: [] for job in jobs}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(job.state not in OVER for job in jobs):
        assert time.monotonic() < deadline, [job.state for job in jobs]
        event = events.get(0.1)
        if isinstance(event, Reported):
            reports[event.job].append(event.step)
            event.job.proceed()
    return [job.result(PATIENCE_SECONDS) for job in jobs], list(reports.values())


def planned(kind, tmp_path, **options):
    """A pool with a disk, whose ledgers have nothing on them at the end; and no thread that copies is left."""
    given = {"fusion": "on", "fusion_size": 4, "fusion_planner": "on", "device_memory": MEMORY[kind]}
    return running(**(given | {"spill_dir": tmp_path, "host_memory": "64MiB"} | options))


def losing(monkeypatch):
    """What loses the device whose worker calls it."""
    opened = losable(monkeypatch)

    def lose():
        device = opened[int(threading.current_thread().name.removeprefix("hydra-cpu:"))]
        device.lose_at(0)
        device.synchronize()

    return lose


def assert_nothing_is_left(pool):
    """Once what ran the last of them has ended, which is after its result is known."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(left := what_is_left(pool)):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def what_is_left(pool):
    """Bytes on the ledgers of devices and host, and threads that copy."""
    inner = pool._pool
    return (
        sum(worker._pager.ledger.used_bytes for worker in inner._workers.values()),
        inner._host.ledger.used_bytes,
        dict(inner._host._reserved),
        [thread.name for thread in threading.enumerate() if thread.name == "planned copies"],
    )


@pytest.mark.parametrize(
    ("kind", "part", "first"),
    [("pair", "pair", 0), ("pair", "pair", 3), ("group", "forward", 0), ("group", "forward", 1)],
)
def test_a_unit_that_runs_out_of_memory_in_a_first_forward_is_run_once_more(monkeypatch, tmp_path, kind, part, first):
    """And goes on with the step that failed. Of a pair the fourth part is within a step of the other group."""
    fault, tasks = Fault(first, 1, run_out), tasks_of()
    fault.around(monkeypatch, *PARTS[part])
    with planned(kind, tmp_path) as pool:
        results, reports = trained(pool, tasks)
        repeated = pool.stats().devices["cpu:0"].units_repeated
        assert_nothing_is_left(pool)
    assert fault.num_raised == 1
    assert repeated == (first == 0 or kind == "group")
    assert reports == [[0, 1, 2]] * 4
    for result, one in zip(results, tasks, strict=True):
        assert_as_plain(result, one)


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(
    ("kind", "part", "first", "times"),
    [
        ("pair", "pair", 0, 2),
        ("pair", "pair", 1, 1),
        ("pair", "pair", 4, 1),
        ("pair", "pair", 8, 2),
        ("group", "forward", 2, 2),
        ("group", "backward", 1, 1),
    ],
)
def test_members_of_planned_steps_that_have_no_memory_go_on_in_smaller_groups(
    monkeypatch, tmp_path, caplog, kind, part, first, times, saves
):
    fault, tasks = Fault(first, times, run_out), tasks_of()
    fault.around(monkeypatch, *PARTS[part])
    options = {"checkpoint_dir": tmp_path / "saved"} if saves else {}
    (tmp_path / "spill").mkdir()
    with planned(kind, tmp_path / "spill", **options) as pool:
        results, reports = trained(pool, tasks)
        assert_nothing_is_left(pool)
    assert fault.num_raised == times
    assert "a group of 4 trials ran out of memory, and its trials go on in groups of 2 at most" in caplog.text
    assert reports == [[0, 1, 2]] * 4
    for result, one in zip(results, tasks, strict=True):
        assert_as_plain(result, one)


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(
    ("kind", "part", "first"),
    [("pair", "pair", 0), ("pair", "pair", 6), ("pair", "pair", 9), ("group", "forward", 3), ("group", "backward", 2)],
)
def test_members_of_planned_steps_whose_device_is_lost_begin_again(monkeypatch, tmp_path, kind, part, first, saves):
    lose = losing(monkeypatch)
    fault, tasks = Fault(first, 1, lose), tasks_of()
    fault.around(monkeypatch, *PARTS[part])
    options = {"checkpoint_dir": tmp_path / "saved"} if saves else {}
    (tmp_path / "spill").mkdir()
    with planned(kind, tmp_path / "spill", devices="cpu:2", max_retries=1, **options) as pool:
        results, reports = trained(pool, tasks)
        assert_nothing_is_left(pool)
        assert len(pool.device_names) == 1
    assert fault.num_raised == 1
    assert reports == [[0, 1, 2]] * 4
    for result, one in zip(results, tasks, strict=True):
        assert result.retries == 1
        assert_as_plain(result, one)


def test_without_retries_both_groups_fail_by_the_devices_name(monkeypatch, tmp_path):
    lose = losing(monkeypatch)
    Fault(2, 1, lose).around(monkeypatch, *PARTS["pair"])
    with planned("pair", tmp_path, devices="cpu:2", max_retries=0) as pool:
        results, _ = trained(pool, tasks_of())
        assert_as_plain(pool.submit(tasks_of()[1]).result(PATIENCE_SECONDS), tasks_of()[1])
    assert all(isinstance(result.error, DeviceLostError) for result in results)
    assert all(re.search(r"device cpu:\d was lost", str(result.error)) for result in results)
