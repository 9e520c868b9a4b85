"""The board turns what a tuner tells into plain values, and sees when a sweep is hopeless."""

from functools import partial

import pytest
import torch

from hydra_tune import TrainTask
from hydra_tune.cli.display.board import SweepProgressTracker
from hydra_tune.cli.sweep_file.request import TrialRecord
from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.cli.sweep_file.sweep_model import HydraSection
from hydra_tune.errors import BudgetError
from hydra_tune.observe.live.summary import to_json
from hydra_tune.pool.devices.utilization import UtilizationMeter
from hydra_tune.pool.stats import DeviceStats, PoolStats
from hydra_tune.schedule import POLICIES

TASK = TrainTask(
    model=partial(torch.nn.Linear, 1, 1),
    optimizer=torch.optim.SGD,
    loss=torch.nn.functional.mse_loss,
    train=list,
    epochs=3,
)


def stats(elapsed=0.0, busy=0.0, **more):
    device = DeviceStats(
        budget_bytes=100,
        peak_bytes=90,
        resident_bytes=50,
        busy_seconds=busy,
        bytes_in_by_kind={"parameters": 7},
        bytes_out_by_kind={},
        units=3,
    )
    figures = {"units_run": 3, "units_saved": 0, "scheduler_seconds": 0.0, **more}
    return PoolStats(devices={"cpu:0": device}, elapsed_seconds=elapsed, **figures)


@pytest.fixture
def log():
    return []


@pytest.fixture
def board(log):
    board = SweepProgressTracker(SweepSpec(file="space.yaml", task="train:build", metric="train_loss"), log.append)
    board.opened("study", (), 20)
    return board


def test_a_trial_that_violates_constraints_is_not_the_best(board):
    records = [TrialRecord(number=n, state="completed", value=float(n), params={}, is_feasible=n > 1) for n in range(4)]
    board.opened("study", (records[0], records[2]), 4)
    for record in (records[1], records[3]):
        board.asked(record.number)
        board.finished(record)
    view = board.snapshot(stats())
    assert [trial.number for trial in view.ranked] == [2, 3, 0, 1]
    assert view.best.number == 2


def ended(board, number, state, value=None, error=None):
    board.asked(number)
    if error is not None:
        board.broke(number, error)
    return board.finished(TrialRecord(number=number, state=state, value=value, params={"lr": 0.1}))


def test_a_trial_goes_from_asked_to_ended(board, log):
    board.asked(0)
    assert board.snapshot(stats()).trials[0].state == "preparing"
    board.built(0, {"lr": 0.1}, TASK)
    (trial,) = board.snapshot(stats()).trials
    assert (trial.state, trial.params, trial.epoch, trial.epochs) == ("queued", {"lr": 0.1}, 0, 3)
    assert board.finished(TrialRecord(number=0, state="completed", value=0.5, params={"lr": 0.1})) is False
    assert log == ["trial 0  completed  train_loss 0.5  epoch 0/3  lr=0.1"]
    assert board.snapshot(stats()).best.value == 0.5


def test_a_trial_that_is_left_is_shown_so_and_counted(board, log):
    board.asked(0)
    board.built(0, {"lr": 0.1}, TASK)
    board.left(0)
    board.end(interrupted=True)
    view = board.snapshot(stats())
    assert (view.trials[0].state, view.status, view.best) == ("interrupted", "interrupted", None)
    assert to_json(view)["counts"]["interrupted"] == 1
    assert log == ["trial 0  interrupted  epoch 0/3  lr=0.1"]


def test_earlier_trials_are_there_and_do_not_count_as_failures():
    board = SweepProgressTracker(SweepSpec(file="space.yaml", task="train:build", metric="train_loss"), print)
    earlier = tuple(TrialRecord(number=n, state="failed", value=None, params={}) for n in range(9))
    board.opened("study", earlier, 12)
    assert all(trial.earlier for trial in board.snapshot(stats()).trials)
    assert ended(board, 9, "failed", error=ValueError("x")) is False


def test_when_the_first_five_fail_the_sweep_is_hopeless(board):
    assert [ended(board, n, "failed", error=ValueError("x")) for n in range(5)] == [False] * 4 + [True]
    board.end()
    view = board.snapshot(stats())
    assert (view.status, view.error) == ("failed", "the first 5 trials have all failed")


@pytest.mark.parametrize("state", ["completed", "pruned"])
def test_one_that_did_not_fail_gives_hope(board, state):
    ended(board, 0, state, value=1.0)
    assert not any(ended(board, n, "failed", error=ValueError("x")) for n in range(1, 12))
    board.end()
    assert board.snapshot(stats()).status == "completed"


def test_errors_are_one_line_with_the_place_unless_they_are_ours(board):
    def fail():
        raise ValueError("first\nsecond")

    with pytest.raises(ValueError, match="first") as caught:
        fail()
    ended(board, 0, "failed", error=caught.value)
    ended(board, 1, "failed", error=BudgetError("needs 3 MiB"))
    ended(board, 2, "failed", error=ValueError())
    first, second, third = (trial.error for trial in board.snapshot(stats()).trials)
    assert first.startswith("ValueError: first (test_board.py:")
    assert second == "BudgetError: needs 3 MiB"
    assert third == "ValueError"


def test_a_trial_that_ctrl_c_caught_before_it_had_a_job_is_cancelled(board):
    board.asked(0)
    board.stop()
    assert board.snapshot(stats()).status == "stopping"
    board.finished(TrialRecord(number=0, state="failed", value=None, params={}))
    board.end(interrupted=True)
    view = board.snapshot(stats())
    assert (view.status, view.trials[0].state) == ("interrupted", "cancelled")


def test_what_ended_the_sweep_is_kept(board):
    error = OSError("disk full")
    board.end(error=error)
    assert board.snapshot(stats()).error == "OSError: disk full"
    assert board.last_error is error


def test_busy_is_of_the_last_seconds_while_running_and_of_all_afterwards():
    meter = UtilizationMeter()
    assert meter.lately(stats(elapsed=10.0, busy=10.0))[0].busy_share == 1.0
    assert meter.lately(stats(elapsed=12.0, busy=10.0))[0].busy_share == 0.0
    assert meter.lately(stats(elapsed=18.0, busy=13.0))[0].busy_share == pytest.approx(0.5)
    assert meter.overall(stats(elapsed=20.0, busy=13.0))[0].busy_share == pytest.approx(0.65)


def test_a_warning_is_told_at_once_and_kept_for_the_summary():
    lines = []
    board = SweepProgressTracker(SweepSpec(file="space.yaml", task="train:build", metric="val_loss"), lines.append)
    board.warned("the pruner can prune nothing")
    assert lines == ["warning: the pruner can prune nothing"]
    view = board.snapshot(stats())
    assert to_json(view)["warnings"] == ["the pruner can prune nothing"]


def test_the_sweep_file_knows_every_policy():
    assert [HydraSection(policy=name).policy for name in POLICIES] == list(POLICIES)
