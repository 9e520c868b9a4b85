"""Functions that build models may set torch's default dtype for a while, and no step on another thread sees the change."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import hydra_tune_optuna as optuna
from hydra_tune import HydraExecutor
from hydra_tune.errors import TaskError
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.train.building import own_build
from hydra_tune.train.default_dtype import own_default_dtype
from tests.unit.pool.tasks import mlp, task

PATIENCE_SECONDS = 60


@pytest.fixture(autouse=True)
def _dtype_stays_as_before():
    yield
    assert torch.get_default_dtype() == torch.float32
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("is_inside", [False, True])
def test_no_step_sees_the_dtype_of_a_build(is_inside):
    """Whether the builder is a thread of the pool, or the user's."""

    def step():
        is_waiting.set()
        with GATE.shared():
            return torch.get_default_dtype()

    def build():
        with own_build():
            torch.set_default_dtype(torch.float64)
            other = threads.submit(step)
            assert is_waiting.wait(PATIENCE_SECONDS)
            assert not other.done()
            torch.set_default_dtype(torch.bfloat16)
            made = nn.Linear(2, 2).weight.dtype
            torch.set_default_dtype(torch.float32)
            assert other.result(PATIENCE_SECONDS) == torch.float32
        return made

    is_waiting = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        if is_inside:
            with GATE.shared():
                assert build() == torch.bfloat16
        else:
            assert build() == torch.bfloat16


def test_a_thread_that_has_changed_the_dtype_waits_for_no_other_build():
    """The wait would let steps in while the dtype is another."""

    def build():
        with own_build():
            is_building.set()
            assert is_over.wait(PATIENCE_SECONDS)

    is_building, is_over = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as threads, own_default_dtype():
        other = threads.submit(build)
        assert is_building.wait(PATIENCE_SECONDS)
        torch.set_default_dtype(torch.bfloat16)
        with own_build():
            assert not other.done()
        torch.set_default_dtype(torch.float32)
        is_over.set()
        other.result(PATIENCE_SECONDS)


def test_a_build_that_sets_the_present_dtype_keeps_nobody_waiting():
    def step():
        with GATE.shared():
            return True

    with ThreadPoolExecutor(1) as threads, own_build():
        torch.set_default_dtype(torch.float32)
        assert threads.submit(step).result(PATIENCE_SECONDS)


def test_an_error_in_a_build_puts_the_dtype_back():
    def failing():
        with own_build():
            torch.set_default_dtype(torch.float64)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    with GATE.exclusive():
        pass


def test_a_build_that_leaves_another_dtype_is_refused():
    def wide():
        torch.set_default_dtype(torch.float64)
        return mlp()

    with HydraExecutor("cpu:1") as pool:
        result = pool.submit(task(model=wide)).result()
        assert pool.submit(task()).result().status == "completed"
    assert isinstance(result.error, TaskError)
    assert "has left torch's default dtype at torch.float64" in str(result.error)
    assert "which was torch.float32" in str(result.error)


def test_an_objective_that_leaves_another_dtype_fails_its_trial():
    def objective(trial):
        if trial.number == 0:
            torch.set_default_dtype(torch.float64)
        return task()

    with HydraExecutor("cpu:1") as pool:
        study = optuna.create_study(executor=pool)
        study.optimize(objective, n_trials=2, catch=TaskError)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]


def test_a_thread_that_builds_nothing_sets_the_dtype_as_before():
    with own_default_dtype():
        pass
    torch.set_default_dtype(torch.float64)
    with GATE.exclusive():
        assert torch.get_default_dtype() == torch.float64
    torch.set_default_dtype(torch.float32)
