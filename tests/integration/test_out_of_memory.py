"""Memory that really runs out under a unit: the unit is repeated with the same bits, or its trial fails by name and alone."""

import logging
import re
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune import train_plain
from hydra_tune.errors import OutOfMemoryError
from tests.parity.exact import differences
from tests.support.parallel import PARALLEL
from tests.support.shortage import Shortage
from tests.unit.pool.tasks import PATIENCE_SECONDS, against_plain, one_batch, running, short, task

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("captured_once")]

NUM_SHARDS = 4
UNITS_BEFORE = 2 * (2 * NUM_SHARDS - 1) + NUM_SHARDS
"""Of the first step of two batches: forwards, backwards, updates. The second has as many."""


class Awkward(nn.Module):
    """All that a unit changes by the way: random numbers, statistics, a buffer that is read too, a parameter used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(4))
        self.drop = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        x = early = self.drop(self.norms[0](self.twice(x)))
        self.seen.copy_(0.9 * self.seen + 0.1 * x.detach().mean(0))
        x = functional.relu(self.norms[1](self.once(x)) + self.seen)
        x = self.drop(self.norms[2](self.twice(x))) + early
        return self.head(self.norms[3](x + self.seen))


def awkward(**changes):
    """Two steps of two batches each, so that gradients are summed over batches."""
    return task(**({"model": Awkward, "epochs": 2, "accumulate": 2, "train": lambda: one_batch() * 2} | changes))


def where_it_differs(expected, result):
    """From the plain loop's weights and optimizer state."""
    found = {"state": dict(result.state_dict()), "optimizer": result.optimizer_state_dict()}
    return list(differences(expected, found))


def plain(described):
    """What the plain loop makes of it."""
    trained = train_plain(described)
    return {"state": dict(trained.state_dict()), "optimizer": trained.optimizer_state_dict()}


def used_bytes(pool):
    """On the ledger of each device."""
    return [worker._pager.ledger.used_bytes for worker in pool._pool._workers.values()]


def told_of_repeats(caplog):
    """The warnings; that a trial has failed is told as an error."""
    return [record for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("activations", "every"),
    [
        pytest.param("recompute", 41, marks=pytest.mark.slow),
        pytest.param("keep", 41, marks=pytest.mark.slow),
        *(
            pytest.param(kind, 5, marks=[pytest.mark.slow, pytest.mark.timeout(900)])
            for kind in ("recompute", "keep", "spill")
        ),
    ],
)
def test_wherever_memory_runs_out_the_numbers_are_the_same_or_the_trial_fails_by_name(activations, every, caplog):
    """Before operations of each unit of the second step; its batches may run one by one or shard by shard."""
    described = awkward(activations=activations)
    expected, shortage = plain(described), Shortage()
    repeated, failed = Counter(), Counter()
    with running(num_shards=NUM_SHARDS, instrument=shortage) as pool:
        assert where_it_differs(expected, pool.submit(described).result(PATIENCE_SECONDS)) == []
        for unit in range(UNITS_BEFORE, 2 * UNITS_BEFORE):
            for operation in range(unit % 7, 10_000, every):
                shortage.arm(unit, operation)
                result = pool.submit(described, name="it").result(PATIENCE_SECONDS)
                assert used_bytes(pool) == [0]
                if not shortage.num_raised:
                    break
                if result.status == "completed":
                    assert where_it_differs(expected, result) == [], f"unit {unit}, operation {operation}"
                    if (
                        len(warnings := told_of_repeats(caplog)) > repeated.total()
                    ):  # else it was what is sent ahead that was not
                        repeated[warnings[-1].args[1]] += 1
                else:
                    assert isinstance(result.error, OutOfMemoryError)
                    found = re.search("in the (.*) unit of shard . of trial 'it', and it cannot be", str(result.error))
                    assert found
                    failed[found[1]] += 1
        assert pool.stats().devices["cpu:0"].units_repeated == repeated.total() == len(told_of_repeats(caplog))
    assert failed["forward"] == 0, "a forward unit changes nothing that is not put back"
    assert repeated["forward"] > 3
    assert repeated["backward"] > failed["backward"], "of backward units only the ends cannot be repeated"
    assert repeated["update"] > 0, "while what an update needs is loaded"
    assert failed["update"] > 0, "the optimizer's step"


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize(
    "operation", [pytest.param(4, marks=pytest.mark.slow), 8, pytest.param(12, marks=pytest.mark.slow)]
)
def test_a_batch_that_is_undone_leaves_what_the_others_have_kept_as_it_was(operation):
    """Batches go through a shard together, so the first has kept a graph, statistics among it, when the second runs out."""
    described = awkward(activations="keep")
    expected, shortage = plain(described), Shortage()
    with running(num_shards=NUM_SHARDS, instrument=shortage) as pool:
        shortage.arm(UNITS_BEFORE + 1, operation)
        result = pool.submit(described).result(PATIENCE_SECONDS)
        assert pool.stats().devices["cpu:0"].units_repeated == 1
    assert where_it_differs(expected, result) == []


def wide():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


@pytest.mark.cases(1)
@pytest.mark.parametrize("activations", ["keep", "spill"])
def test_a_forward_unit_that_runs_out_keeps_no_activations_from_then_on(activations):
    """What the pilot has found of them was too little; the other shards go on as planned."""
    described = awkward(activations=activations, epochs=4)
    shortage = Shortage()
    shortage.arm(UNITS_BEFORE, 4)
    with running(num_shards=NUM_SHARDS, instrument=shortage) as pool:
        result = pool.submit(described).result(PATIENCE_SECONDS)
    assert shortage.num_raised == 1
    assert where_it_differs(plain(described), result) == []
    assert result.activations == ("recompute", activations, activations)


@pytest.mark.slow
@pytest.mark.parametrize("operation", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 4))])
def test_memory_that_runs_out_while_shards_are_loaded_changes_nothing(operation, caplog):
    """Under a budget for one shard at a time, so that units begin by loading; what is sent ahead as well."""
    x, y = torch.randn(2, 64), torch.randint(4, (2,))
    described = short(
        model=wide,
        train=lambda: [(x, y)] * 4,
    )
    expected, shortage, exact = plain(described), Shortage(), 0
    with running(device_memory=120 * 1024, num_shards=3, instrument=shortage) as pool:
        for unit in range(8, 24, 3):
            shortage.arm(unit, operation)
            result = pool.submit(described, name="it").result(PATIENCE_SECONDS)
            assert shortage.num_raised == 1
            if result.error is None:
                assert where_it_differs(expected, result) == []
                exact += 1
            else:
                assert "the optimizer's step had begun" in str(result.error)
        # A unit that has found all there may have run out in what it sends ahead, which is then not sent.
        assert pool.stats().devices["cpu:0"].units_repeated == len(told_of_repeats(caplog))
        assert 1 < len(told_of_repeats(caplog)) <= exact
        assert pool.stats().devices["cpu:0"].bytes_in > 0
        assert used_bytes(pool) == [0]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param("cpu:1", marks=pytest.mark.slow), "cpu:2"])
def test_memory_that_runs_out_twice_fails_one_trial_by_name_and_no_other(devices):
    shortage = Shortage()
    named = {name: awkward(seed=seed) for seed, name in enumerate(("one", "other"))}
    expected = {name: plain(described) for name, described in named.items()}
    with running(devices=devices, num_shards=NUM_SHARDS, instrument=shortage, max_concurrent=2) as pool:
        for unit in range(0, 40, 7):
            shortage.arm(unit, 1, times=2)
            jobs = {name: pool.submit(described, name=name) for name, described in named.items()}
            results = {name: job.result(PATIENCE_SECONDS) for name, job in jobs.items()}
            failed = [name for name, result in results.items() if result.status == "failed"]
            for name in failed:
                message = str(results[name].error)
                assert isinstance(results[name].error, OutOfMemoryError)
                assert f"of trial {name!r}, and it" in message
                assert "KiB for the unit" in message or "B for the unit" in message
                assert "against a budget of" in message
                assert "lower device_memory to the memory that is really there" in message
            for name in results.keys() - failed:
                assert where_it_differs(expected[name], results[name]) == []
            if devices == "cpu:1":
                assert len(failed) == 1, "a repeat comes right after"
                assert shortage.num_raised == 2 or "cannot be repeated" in str(results[failed[0]].error)
            assert used_bytes(pool) == [0] * len(used_bytes(pool))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["data-parallel", pytest.param("pipelined", marks=pytest.mark.slow)])
def test_memory_that_runs_out_beside_other_batches_of_the_step(way):
    described = awkward(accumulate=4, epochs=3, train=lambda: one_batch() * 4)
    if way == "data-parallel":
        described = short(accumulate=4, epochs=3, train=lambda: one_batch() * 4)
    described = replace(described, parallel=PARALLEL[way])
    expected, shortage, exact = plain(described), Shortage(), 0
    with running(devices="cpu:2", num_shards=NUM_SHARDS, instrument=shortage) as pool:
        for unit in range(28, 84, 9):
            shortage.arm(unit, 3)
            result = pool.submit(described, name="it").result(PATIENCE_SECONDS)
            if result.error is None:
                assert where_it_differs(expected, result) == []
                exact += shortage.num_raised
            else:
                assert "it cannot be repeated, because" in str(result.error)
            assert used_bytes(pool) == [0, 0]
        assert pool.stats().steps_by_way[way]
        assert exact > 1


class RunsOut(nn.Module):
    """Cannot be captured, for it counts; memory runs out in its own code."""

    def __init__(self, call) -> None:
        super().__init__()
        self.layer, self.calls, self.call = nn.Linear(8, 4), 0, call

    def forward(self, x):
        self.calls += 1
        if self.calls == self.call:
            x.new_empty(0).resize_(1 << 60)  # which nobody can tell before
        return self.layer(x)


def test_a_model_that_runs_whole_is_not_repeated_once_its_own_code_has_begun():
    with running(devices="cpu:1", max_concurrent=2) as pool:
        other = pool.submit(task(epochs=4))
        result = pool.submit(short(model=partial(RunsOut, 8), epochs=20), name="counts").result(PATIENCE_SECONDS)
        assert isinstance(result.error, OutOfMemoryError)
        assert "of trial 'counts', and it cannot be repeated, because it runs the model's own code" in str(result.error)
        assert against_plain(other.task, other.result(PATIENCE_SECONDS)) == []
        assert used_bytes(pool) == [0]


@pytest.mark.slow
def test_a_model_that_runs_whole_is_repeated_while_it_is_loaded():
    described, shortage = short(model=partial(RunsOut, 0), epochs=4), Shortage()
    with running(devices="cpu:1", instrument=shortage) as pool:
        for operation in range(3):
            shortage.arm(0, operation)
            result = pool.submit(described).result(PATIENCE_SECONDS)
            assert shortage.num_raised == 1
            assert against_plain(described, result) == []
        assert pool.stats().devices["cpu:0"].units_repeated == 3


@pytest.mark.slow
def test_an_evaluation_is_repeated():
    described, shortage = short(validate=one_batch, evaluate=None, epochs=3), Shortage()
    expected = train_plain(described)
    with running(devices="cpu:1", num_shards=NUM_SHARDS, instrument=shortage) as pool:
        for unit in range(11, 15):
            shortage.arm(unit, 2)
            result = pool.submit(described).result(PATIENCE_SECONDS)
            assert shortage.num_raised == 1
            assert [entry["val_loss"] for entry in result.history] == [e["val_loss"] for e in expected.history]
        assert pool.stats().devices["cpu:0"].units_repeated == 4


def test_less_is_held_on_a_device_that_has_run_out():
    shortage = Shortage()
    with running(devices="cpu:1", num_shards=NUM_SHARDS, instrument=shortage) as pool:
        pool.submit(short()).result(PATIENCE_SECONDS)
        ledger = pool._pool._workers["cpu:0"]._pager.ledger
        assert ledger.limit_bytes == ledger.budget_bytes
        shortage.arm(12, 3)
        pool.submit(short(epochs=4)).result(PATIENCE_SECONDS)
        first, shortage_raised = ledger.limit_bytes, shortage.num_raised
        assert shortage_raised == 1
        assert 0 < first < ledger.peak_bytes
        described = short(epochs=4, seed=7)
        assert against_plain(described, pool.submit(described).result(PATIENCE_SECONDS)) == []
