"""Results that are ordinary, and failures that are seen."""

import logging
import pickle
import re
import signal
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hydra_tune import HydraExecutor, Result, ShapesOnly, TrialsFailed, train_plain
from hydra_tune.errors import ConfigError, HydraTuneError
from hydra_tune.memory.block import TensorBlock
from tests.parity.uses import assert_ordinary
from tests.unit.pool.tasks import SAMPLES, mlp, running, short, task, until

pytestmark = pytest.mark.timeout(120)


def fail():
    raise RuntimeError("no such model")


def other_failure():
    raise OSError("no such file")


def test_groups_are_freed_one_after_the_other_as_a_result_is_handed_over(monkeypatch):
    flats = []
    let_go = TensorBlock.let_go

    def watched(self):
        assert all(flat.expired() for flat in flats)
        flats.append(StorageWeakRef(self.host.untyped_storage()))
        let_go(self)

    monkeypatch.setattr(TensorBlock, "let_go", watched)
    with running(num_shards=4) as pool:
        result = pool.run(task())
    assert len(flats) == 8, "parameters and optimizer state of each shard"
    assert all(flat.expired() for flat in flats)
    assert_ordinary(result.module())


def test_what_went_to_disk_comes_back_as_memory_of_its_own(tmp_path):
    options = {"device_memory": "12KiB", "host_memory": "8KiB", "spill_dir": tmp_path, "num_shards": 4}
    with HydraExecutor(devices="cpu:1", **options) as pool:
        results = pool.run([task(), task(seed=4)])
        assert pool.stats().disk.bytes_written > 0
    for result in results:
        assert_ordinary(result.module())
        torch.save(result.state_dict(), tmp_path / "state.pt")
    assert list(tmp_path.glob("hydra-tune-*")) == []


def test_a_plain_result_is_read_as_a_pools_is(tmp_path):
    plain = train_plain(task())
    with running() as pool:
        result = pool.run(task())
    assert plain.error is None
    assert (plain.status, plain.metrics) == (result.status, result.metrics)
    assert torch.equal(next(plain.module().parameters()), next(result.module().parameters()))
    assert plain.state_dict().keys() == result.state_dict().keys()
    assert plain.optimizer_state_dict().keys() == result.optimizer_state_dict().keys()
    plain.save(tmp_path / "plain.safetensors")
    assert (tmp_path / "plain.safetensors").stat().st_size > 0


def test_a_pruned_plain_run_keeps_its_weights():
    pruned = train_plain(task(), report=lambda step, metrics: False)
    assert pruned.status == "pruned"
    assert isinstance(pruned.module(), nn.Sequential)


def test_one_task_gives_one_result():
    with running() as pool:
        result = pool.run(task())
        assert isinstance(result, Result)
        assert isinstance(pool.run(iter([task()]))[0], Result)
        with pytest.raises(TrialsFailed, match="1 of 1 trials failed"):
            pool.run(short(model=fail))
        assert pool.run(short(model=fail), on_error="return").status == "failed"


def test_all_end_before_a_failure_is_raised_with_every_result():
    with running() as pool, pytest.raises(TrialsFailed) as raised:
        pool.run([task(), short(model=fail), task(seed=4), short(model=other_failure), short(model=fail)])
    error = raised.value
    assert [result.status for result in error.results] == ["completed", "failed", "completed", "failed", "failed"]
    assert error.results[2].state_dict()
    assert str(error).startswith(
        "3 of 5 trials failed (tasks 1, 4: RuntimeError: no such model; task 3: OSError: no such file). "
    )
    assert error.__cause__ is error.results[1].error
    assert isinstance(error, HydraTuneError)
    again = pickle.loads(pickle.dumps(TrialsFailed([Result(status="failed", error=ValueError("no"))])))
    assert str(again).startswith("1 of 1 trials failed (task 0: ValueError: no)")


def test_with_many_causes_the_first_are_named():
    failed = [Result(status="failed", error=ValueError(str(number))) for number in range(5)]
    failed += [Result(status="failed", error=ValueError("0")) for _ in range(10)]
    assert str(TrialsFailed(failed)).startswith(
        "15 of 15 trials failed (tasks 0, 5, 6, 7, 8, 9, 10, 11, ...: ValueError: 0; task 1: ValueError: 1; "
        "task 2: ValueError: 2; and 2 other causes)."
    )
    assert "task 2: ValueError: 2; and 1 other cause)." in str(TrialsFailed(failed[:4]))


@pytest.mark.parametrize("fusion", ["off", "on"])
def test_each_failure_is_logged_once_with_its_traceback(caplog, fusion):
    with running(fusion=fusion) as pool:
        pool.run([task(), short(model=fail), task(seed=4)], on_error="return")
    (record,) = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert record.getMessage() == "trial 'job 1' failed"
    assert "in fail" in caplog.text
    assert "RuntimeError: no such model" in caplog.text


def test_a_driver_that_is_told_of_failures_logs_them_itself(caplog):
    with running() as pool:
        events = pool.events()
        pool.submit(short(model=fail), events=events)
        assert events.get(60).result.error.args == ("no such model",)
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("ask", [Result.module, Result.state_dict, Result.optimizer_state_dict])
def test_who_asks_for_the_weights_of_a_failed_trial_is_told_why_there_are_none(ask):
    with running() as pool:
        result = pool.run(short(model=fail), on_error="return")
    with pytest.raises(
        HydraTuneError, match=r"a failed job keeps no weights, .*: RuntimeError: no such model"
    ) as raised:
        ask(result)
    assert raised.value.__cause__ is result.error


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (mlp(), "run takes TrainTasks, and item 0 is Linear; nothing was trained"),
        (7, "run takes a TrainTask, or an iterable of them, not int"),
        ([short(), mlp], "run takes TrainTasks, and item 1 is function; nothing was trained"),
    ],
)
def test_what_is_no_task_is_refused_before_anything_is_trained(given, message):
    with running() as pool:
        with pytest.raises(ConfigError, match=re.escape(message)):
            pool.run(given)
        assert pool.stats().units_run == 0


def test_a_plan_takes_tasks_as_a_run_does():
    with running() as pool:
        assert pool.plan(short()).trials[0].num_shards == pool.plan([short()]).trials[0].num_shards
        for ask in (pool.plan, pool.profile):
            what = ask.__name__
            with pytest.raises(ConfigError, match=f"{what} takes TrainTasks, and item 0 is str"):
                ask({"a": short()})


def test_another_way_with_errors_is_refused():
    with (
        HydraExecutor() as pool,
        pytest.raises(ConfigError, match="on_error must be 'raise' or 'return', not 'ignore'"),
    ):
        pool.run([short()], on_error="ignore")


@pytest.mark.parametrize("error", [ConfigError, KeyboardInterrupt])
def test_a_run_that_ends_while_it_submits_leaves_no_task_behind(monkeypatch, error):
    tasks = [task(epochs=100_000), replace(task(), train=ShapesOnly(SAMPLES[0], 24))]
    with running() as pool:
        if error is KeyboardInterrupt:
            submit = pool._started().submit

            def submit_and_press(*arguments, **options):
                job = submit(*arguments, **options)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                return job

            monkeypatch.setattr(pool._started(), "submit", submit_and_press)
        with pytest.raises(error):
            pool.run(tasks)
        until(lambda: not pool._started().jobs())
