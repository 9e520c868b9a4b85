"""Groups that a device has no room for run planned steps: in its memory, with the bits of the same group on a large device."""

import functools
import logging
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune import HydraExecutor, TrainTask, train_plain
from hydra_tune.errors import ConfigError
from hydra_tune.fusion.runtime import planned_size_search
from hydra_tune.fusion.runtime.planned_unit import GroupStepRunner, PlannedStepCache
from hydra_tune.fusion.runtime.step_planner import StepPlanner
from hydra_tune.pool.job import OVER, Reported
from hydra_tune.train.state.model_state import ModelState
from tests.support.kernels import has_lstm_in
from tests.unit.pool.tasks import PATIENCE_SECONDS, running

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("captured_once")]

_GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(20, 3, 8, 8, generator=_GENERATOR), torch.randint(4, (20,), generator=_GENERATOR)
MEMORY = "390KiB"  # of 700 that four of them would need


class CNN(nn.Module):
    """Activations that are large beside its parameters, with running statistics and dropout."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1, bias=False) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = functional.relu(norm(conv(x)))
        return self.head(functional.dropout(x.mean((2, 3)), 0.2, self.training))


def task(seed, **changes):
    """Two epochs of two batches of 8 samples and one of 4."""
    arguments = {
        "model": CNN,
        "optimizer": partial(torch.optim.AdamW, lr=1e-3 * (seed + 1)),
        "train": TensorDataset(X, Y),
        "validate": TensorDataset(X[:8], Y[:8]),
        "batch_size": 8,
        "loss": functional.cross_entropy,
        "epochs": 2,
        "seed": seed,
    }
    return TrainTask(**(arguments | changes))


@pytest.fixture
def steps(monkeypatch):
    """Members that planned steps were made for, by step."""
    found = []
    backward = GroupStepRunner.backward

    def counted(self):
        found.append(len(self._state.optimizer.active))
        backward(self)

    monkeypatch.setattr(GroupStepRunner, "backward", counted)
    return found


def bits(result):
    """What a trial comes to, without what the clock says."""
    history = [{name: value for name, value in one.items() if name != "seconds"} for one in result.history]
    optimizer = [
        entry
        for state in result.optimizer_state_dict()["state"].values()
        for entry in state.values()
        if isinstance(entry, torch.Tensor)
    ]
    return history, [tensor.tolist() for tensor in [*result.state_dict().values(), *optimizer]]


def ended_after(monkeypatch):
    """The ends of planned steps, and of states that planned steps were made for, in order."""
    ends, states = [], []
    close, drop, begin = GroupStepRunner.close, ModelState.drop, GroupStepRunner.__init__

    def begun(self, planned, state):
        states.append(state._state)
        begin(self, planned, state)

    def closed(self):
        ends.append("steps")
        close(self)

    def dropped(self):
        if any(self is state for state in states):
            ends.append("state")
        drop(self)

    monkeypatch.setattr(GroupStepRunner, "__init__", begun)
    monkeypatch.setattr(GroupStepRunner, "close", closed)
    monkeypatch.setattr(ModelState, "drop", dropped)
    return ends


@functools.cache
def roomy(optimizer=None, count=4):
    """The same group where everything is kept."""
    with running(fusion="on", fusion_planner="off") as pool:
        results = pool.run([task(seed, **_with(optimizer, seed)) for seed in range(count)])
    assert {result.group_size for result in results} == {count}
    return [bits(result) for result in results]


def _with(optimizer, seed):
    return {} if optimizer is None else {"optimizer": partial(*optimizer, lr=1e-2 / (seed + 1))}


SGD = (torch.optim.SGD,)


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("optimizer", [None, pytest.param(SGD, marks=pytest.mark.slow)])
def test_a_group_that_does_not_fit_has_the_bits_of_one_that_does_in_the_memory_there_is(
    steps, optimizer, caplog, monkeypatch
):
    """Also, no planned step is left whose state has been released."""
    ends = ended_after(monkeypatch)
    caplog.set_level(logging.INFO, "hydra_tune.fusion")
    with running(fusion="on", fusion_size=4, fusion_planner="on", device_memory=MEMORY) as pool:
        results = pool.run([task(seed, **_with(optimizer, seed)) for seed in range(4)])
        device = pool.stats().devices["cpu:0"]
    assert [result.error for result in results] == [None] * 4
    assert {result.group_size for result in results} == {4}
    assert steps == [4] * 4  # the last batches of epochs fit as they are
    assert [bits(result) for result in results] == roomy(optimizer)
    assert 0.5 * device.budget_bytes < device.peak_bytes <= device.budget_bytes
    assert "predicted: one group (4, " in caplog.text
    assert ends.index("state") == len(ends) - 1 > 0


class Unnormed(CNN):
    """Without batch norm, whose statistics in low precision are of another dtype than traced ones on CPU devices."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.Identity() for _ in self.convs)


@pytest.mark.slow
def test_a_group_in_bfloat16_that_does_not_fit_has_the_bits_of_one_that_does(steps):
    tasks = [task(seed, model=Unnormed, precision="bfloat16") for seed in range(4)]
    with running(fusion="on", fusion_size=4, fusion_planner="on", device_memory="210KiB") as pool:
        results = pool.run(tasks)
    with running(fusion="on", fusion_size=4, fusion_planner="off") as pool:
        kept = pool.run(tasks)
    assert {result.group_size for result in [*results, *kept]} == {4}
    assert steps == [4] * 4
    assert [bits(result) for result in results] == [bits(result) for result in kept]


@pytest.mark.cases(1 / 3)
def test_batch_norm_in_low_precision_is_not_planned_and_the_log_says_why(steps, caplog):
    caplog.set_level(logging.INFO, "hydra_tune.fusion")
    with running(fusion="on", fusion_size=4, fusion_planner="on", device_memory="300KiB") as pool:
        results = pool.run([task(seed, epochs=1, precision="bfloat16") for seed in range(4)])
    assert [result.error for result in results] == [None] * 4
    assert max(result.group_size for result in results) == 3
    assert steps == []
    assert "native_batch_norm.default gives tensors of other sizes on cpu" in caplog.text


class Rows(nn.Module):
    """Reads an image row by row."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(24, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layer(x.permute(0, 2, 1, 3).flatten(2))[0][:, -1])


@pytest.mark.skipif(not has_lstm_in("bfloat16"), reason="plain PyTorch fails too")
def test_a_recurrent_kernel_in_low_precision_is_not_planned_and_the_log_says_why(steps, caplog):
    caplog.set_level(logging.INFO, "hydra_tune.fusion")
    with running(fusion="on", fusion_size=4, fusion_planner="on", device_memory="160KiB") as pool:
        results = pool.run([task(seed, model=Rows, epochs=1, precision="bfloat16") for seed in range(4)])
    assert [result.error for result in results] == [None] * 4
    assert steps == []
    assert "its kernel aten.mkldnn_rnn_layer.default keeps what its backward needs" in caplog.text
    assert "it runs unplanned" in caplog.text


def pool_of(**options):
    return running(**({"fusion": "on", "fusion_size": 4, "fusion_planner": "on", "device_memory": MEMORY} | options))


@pytest.mark.slow
def test_a_pruned_member_and_one_that_takes_its_place_change_nobody_elses_bits(steps):
    def search(**options):
        tasks = [task(seed, epochs=20 if seed < 4 else 2) for seed in range(5)]
        with pool_of(**options) as pool:
            events = pool.events()
            jobs = [pool.submit(one, None, events) for one in tasks[:4]]
            while not all(job.state in OVER for job in jobs):
                event = events.get(PATIENCE_SECONDS)
                if isinstance(event, Reported) and event.job is jobs[1] and event.step == 1:
                    event.job.prune()
                    jobs.append(pool.submit(tasks[4], None, events))
                elif isinstance(event, Reported):
                    event.job.proceed()
            return [job.result() for job in jobs]

    found = search()
    assert [result.status for result in found] == ["completed", "pruned", "completed", "completed", "completed"]
    assert set(steps) == {4}
    assert found[4].group_size == 4
    expected = search(device_memory=None)
    assert [bits(found[index]) for index in (0, 2, 3)] == [bits(expected[index]) for index in (0, 2, 3)]
    plain = train_plain(task(4))
    assert [one["val_loss"] for one in found[4].history] == pytest.approx(
        [one["val_loss"] for one in plain.history], rel=1e-3
    )


class Dropping(CNN):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        return super().forward(functional.dropout(x, self.p, self.training))


@pytest.mark.cases(1 / 3)
def test_steps_planned_for_dropout_of_earlier_members_are_dropped(monkeypatch):
    plans, counts, made = set(), set(), PlannedStepCache.steps

    def counted(self, prepared, *given, **named):
        found = made(self, prepared, *given, **named)
        if found is not None:
            plans.add(prepared)
            counts.add(len(self._known))
        return found

    monkeypatch.setattr(PlannedStepCache, "steps", counted)
    tasks = [task(seed, model=partial(Dropping, 0.5 if seed == 1 else 0.1), epochs=20 - 2 * seed) for seed in range(5)]
    with pool_of() as pool:
        events = pool.events()
        jobs = [pool.submit(one, None, events) for one in tasks[:4]]
        while not all(job.state in OVER for job in jobs):
            event = events.get(PATIENCE_SECONDS)
            if isinstance(event, Reported) and event.job is jobs[1] and event.step == 1:
                event.job.prune()
                jobs.append(pool.submit(tasks[4], None, events))
            elif isinstance(event, Reported):
                event.job.proceed()
        assert jobs[4].result().group_size == 4
    assert len(plans) > 1
    assert counts == {1}


@pytest.mark.slow
def test_a_member_whose_loss_is_not_finite_fails_alone(steps):
    """Each parameter is updated as soon as it may be, so what such a member has is put back."""
    with pool_of() as pool:
        results = pool.run(
            [*(task(seed) for seed in range(3)), task(3, optimizer=partial(torch.optim.AdamW, lr=1e30))],
            on_error="return",
        )
    assert [result.status for result in results] == ["completed"] * 3 + ["failed"]
    assert set(steps) == {4}
    assert [bits(result) for result in results[:3]] == roomy()[:3]


@pytest.mark.slow
def test_a_planned_group_goes_on_from_checkpoints(tmp_path, steps):
    tasks = [task(seed) for seed in range(4)]
    with pool_of(checkpoint_dir=tmp_path) as pool:
        events = pool.events()
        jobs = [pool.submit(one, f"trial {number}", events) for number, one in enumerate(tasks)]
        waiting = [events.get(PATIENCE_SECONDS) for _ in jobs]
        assert all(isinstance(event, Reported) for event in waiting)
        pool.suspend(jobs)
    assert steps == [4] * 2
    with pool_of(checkpoint_dir=tmp_path) as pool:
        paths = [pool.find_checkpoint(f"trial {number}").path for number in range(4)]
        again = [pool.submit(one, f"trial {n}", resume_from=paths[n]) for n, one in enumerate(tasks)]
        results = [job.result(PATIENCE_SECONDS) for job in again]
    assert steps == [4] * 4
    assert [bits(result) for result in results] == roomy()


def test_what_cannot_be_planned_is_computed_in_smaller_groups_and_the_log_says_why(steps, caplog):
    with pool_of() as pool, caplog.at_level(logging.INFO, "hydra_tune.fusion"):
        results = pool.run([task(seed, model=Noisy) for seed in range(4)])
    assert [result.error for result in results] == [None] * 4
    assert {result.group_size for result in results} == {2}
    assert steps == []
    assert "other than those of dropout" in caplog.text


class Asks(CNN):
    """Python that asks for values of the batch."""

    def forward(self, x):
        return super().forward(x * 2 if x.mean() > 0.01 else x)


NOT_PLANNED = {
    "several batches": ({"accumulate": 2}, {}, r"of several batches \(accumulate=2\)"),
    "several shards": ({}, {"num_shards": 2}, "its step is cut into 2 shards"),
    "loss scales": ({"precision": "float16"}, {"device_memory": "340KiB"}, r"it has precision='float16'"),
    "values of the batch": ({"model": Asks}, {}, "asks for values of the batch"),
}


def double(model):
    return model().double()


class MomentumLater:
    """A scheduler that gives SGD a momentum from its third step on."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["momentum"] = 0.9 if self.steps > 2 else 0.0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class MomentumRests(MomentumLater):
    """A scheduler that gives one trial's SGD no momentum in its fourth step."""

    def __init__(self, rests, optimizer):
        super().__init__(optimizer)
        self.rests = rests

    def step(self):
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["momentum"] = 0.0 if self.rests and self.steps == 3 else 0.9


@pytest.mark.cases(1 / 3)
def test_a_member_whose_momentum_is_0_for_a_step_keeps_its_buffer(steps, caplog):
    """torch leaves the buffer alone in such a step, which no traced operator does; an unplanned group does."""
    caplog.set_level(logging.INFO, "hydra_tune.fusion")
    tasks = [
        task(
            seed,
            model=partial(double, CNN),
            train=TensorDataset(X.double(), Y),
            validate=None,
            optimizer=partial(torch.optim.SGD, lr=1e-2 * (seed + 1), momentum=0.9),
            scheduler=partial(MomentumRests, seed == 1),
            scheduler_interval="step",
        )
        for seed in range(4)
    ]
    with running(devices="cpu:1", device_memory="780KiB", fusion="on", fusion_planner="on") as pool:
        results = pool.run(tasks)
    assert steps[0] == 4, "a planned step was made"
    for result, one in zip(results, tasks, strict=True):
        assert result.error is None
        expected = train_plain(one).state_dict()
        for name, tensor in result.state_dict().items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-9)
    assert "the momentum of one of its trials is 0" in caplog.text


@pytest.mark.cases(1 / 3)
def test_members_whose_optimizers_begin_to_compute_otherwise_go_on_in_groups_planned_anew(steps, caplog):
    caplog.set_level(logging.INFO, "hydra_tune.fusion")
    tasks = [
        task(
            seed,
            model=partial(double, CNN),
            train=TensorDataset(X.double(), Y),
            validate=None,
            optimizer=partial(torch.optim.SGD, lr=1e-2 * (seed + 1)),
            scheduler=MomentumLater,
            scheduler_interval="step",
        )
        for seed in range(4)
    ]
    with running(devices="cpu:1", device_memory="780KiB", fusion="on", fusion_planner="on") as pool:
        results = pool.run(tasks)
    assert steps[0] == 4, "a planned step was made"
    assert "momentum_buffer" in caplog.text
    for result, one in zip(results, tasks, strict=True):
        assert result.error is None
        expected = train_plain(one).state_dict()
        for name, tensor in result.state_dict().items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize(
    "kind", ["several batches", *(pytest.param(k, marks=pytest.mark.slow) for k in [*NOT_PLANNED][1:])]
)
def test_the_log_and_a_probe_say_why_steps_are_not_planned(steps, caplog, kind):
    changes, options, why = NOT_PLANNED[kind]
    tasks = [task(seed, epochs=1, **changes) for seed in range(4)]
    with pool_of(**options) as pool, caplog.at_level(logging.INFO, "hydra_tune.fusion"):
        results = pool.run(tasks)
        (probed,) = pool.plan(tasks[:1], probe=True).trials
    assert [result.error for result in results] == [None] * 4
    assert max(result.group_size for result in results) < 4
    assert steps == []
    (line,) = {line for line in caplog.messages if line.startswith("no more than ")}
    assert re.search(rf"^no more than \d trials like job \d are computed together: .*{why}", line)
    assert re.search(why, probed.fusion.why_not_planned)


class Noisy(CNN):
    """Random numbers that depend on values."""

    def forward(self, x):
        return super().forward(x + 0.01 * torch.bernoulli(x.sigmoid()))


@pytest.mark.slow
def test_planned_groups_are_what_is_predicted_to_be_faster(steps, monkeypatch, caplog):
    tasks = [task(seed, epochs=1) for seed in range(4)]
    with pool_of(fusion_planner="auto") as pool, caplog.at_level(logging.INFO, "hydra_tune.fusion"):
        assert {result.group_size for result in pool.run(tasks)} == {2}
    assert "too few to plan them" in caplog.text
    monkeypatch.setattr(planned_size_search, "COST_SHARE", float("inf"))
    for seconds, size in ((1e-9, 2), (10.0, 4)):
        monkeypatch.setattr(StepPlanner, "kept_seconds", lambda _self, _stack, seconds=seconds: seconds)
        with pool_of(fusion_planner="auto") as pool:
            assert {result.group_size for result in pool.run(tasks)} == {size}
        assert bool(steps) == (size == 4)


def test_no_step_is_planned_where_that_is_not_wanted(steps):
    with pool_of(fusion_planner="off") as pool:
        assert {result.group_size for result in pool.run([task(seed, epochs=1) for seed in range(4)])} == {2}
    assert steps == []
    with pytest.raises(ConfigError, match="fusion_planner must be 'off', 'on' or 'auto', not 'yes'"):
        HydraExecutor("cpu:1", fusion="on", fusion_planner="yes")
