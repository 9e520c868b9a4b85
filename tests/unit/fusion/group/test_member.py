"""A look at a member's first batches, or a discarded construction, leaves all Python state as if there had been none."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune import TrainTask
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.fusion.group.member import MemberTrial
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.partition.budget import ShardPlanConstraints
from hydra_tune.shard.partition.plan_cache import PlanLibrary

DATA = TensorDataset(torch.ones(8, 4), torch.ones(8, 1))
PASSES = {"own": 0, "others": 0}


@pytest.fixture
def member_of():
    device, members = CpuDevice(0, 1 << 30), []
    library = PlanLibrary(ShardPlanConstraints(budget_bytes=1 << 30, buffer_fraction=0.0, alignment=64))

    def made(**changes):
        arguments = {
            "model": partial(torch.nn.Linear, 4, 1),
            "optimizer": partial(torch.optim.SGD, lr=0.1),
            "train": lambda: [DATA.tensors],
            "loss": torch.nn.functional.mse_loss,
        }
        members.append(MemberTrial(TrainTask(**arguments | changes), library, device))
        return members[-1]

    yield made
    for member in members:
        member.close(keep=False)
    device.close()


def test_a_look_keeps_what_other_trials_count_in_the_same_dictionary(member_of, monkeypatch):
    monkeypatch.setitem(PASSES, "own", 0)
    monkeypatch.setitem(PASSES, "others", 0)

    def train():
        PASSES["own"] += 1
        return [DATA.tensors]

    member = member_of(train=train)
    member.built()
    with member.peek():
        assert PASSES["own"] == 1
        PASSES["others"] += 1
    assert PASSES == {"own": 0, "others": 1}


def test_no_other_trial_runs_its_code_while_a_look_draws_a_batch(member_of, monkeypatch):
    """Or the look would take the other trial's changes for its own."""
    monkeypatch.setitem(PASSES, "own", 0)
    monkeypatch.setitem(PASSES, "others", 0)
    others = []

    def of_another_trial():
        with GATE.shared():
            PASSES["others"] += 1

    def train():
        others.append(threading.Thread(target=of_another_trial))
        others[0].start()
        others[0].join(0.05)
        PASSES["own"] += 1
        return [DATA.tensors]

    member = member_of(train=train)
    member.built()
    with member.peek():
        others[0].join()
    assert PASSES == {"own": 0, "others": 1}


class Waiting(TensorDataset):
    """Has its samples once a file is there."""

    def __init__(self, path):
        super().__init__(*DATA.tensors)
        self.path = path

    def __getitem__(self, index):
        while not self.path.exists():
            time.sleep(0.01)
        return super().__getitem__(index)


def test_a_look_that_waits_for_workers_keeps_no_capture_out(member_of, tmp_path):
    path = tmp_path / "there"
    member = member_of(train=DataLoader(Waiting(path), batch_size=4, num_workers=1))
    member.built()

    def look():
        with member.peek() as requests:
            return requests["train"]

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(look)
        while member.clock.seconds == 0.0 or member.clock.is_in_process:
            time.sleep(0.01)
        with GATE.exclusive():
            assert not found.done()
        path.touch()
        assert found.result(60) is not None


def test_a_look_beside_other_trials_leaves_what_they_may_have_changed_and_names_it(member_of, monkeypatch, caplog):
    monkeypatch.setitem(PASSES, "own", 0)
    monkeypatch.setitem(PASSES, "others", 0)

    def train():
        with GATE.left():  # as a thread does that has kept others out for too long
            PASSES["others"] += 1
        PASSES["own"] += 1
        return [DATA.tensors]

    member = member_of(train=train)
    member.built()
    with member.peek():
        pass
    assert PASSES == {"own": 1, "others": 1}
    assert "the global 'PASSES'['own'] has changed while the pool tried code of a trial, and is not put" in caplog.text


@pytest.mark.parametrize("large", [torch.zeros(20_000), np.zeros(20_000)], ids=["tensor", "array"])
def test_a_large_value_that_a_look_has_changed_is_named(member_of, caplog, large):
    def train():
        large[0] += 1
        return [DATA.tensors]

    member = member_of(train=train)
    member.built()
    with member.peek():
        pass
    assert "'large' of train= has changed while the pool tried code of a trial, and is not put back" in caplog.text


def test_a_trial_that_is_discarded_and_built_anew_has_counted_once(member_of):
    optimizers, rates = [], []

    def optimizer(parameters):
        optimizers.append(torch.optim.SGD(parameters, lr=0.1))
        return optimizers[-1]

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: rates.append(epoch) or 1.0)

    parts = {"optimizer": optimizer, "scheduler": scheduler}
    for _ in range(2):
        member = member_of(**parts)
        member.begin_to_build()
        assert (len(optimizers), rates) == (1, [0])
        optimizers.append("another trial's")
        member.discard()
        assert (optimizers, rates) == (["another trial's"], [])
        optimizers.clear()
