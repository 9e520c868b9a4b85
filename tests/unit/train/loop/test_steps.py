"""Accumulation, clipping, mixed precision and bad losses: what the plain loop gives, to the last bit, however it is cut."""

import math
from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune import HydraExecutor, TrainTask, train_plain
from hydra_tune.errors import BadLossError, TaskError
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from tests.unit.pool.tasks import SAMPLES, X, Y, against_plain, mlp, running, task, train

pytestmark = pytest.mark.usefixtures("captured_once")


class Shared(nn.Module):
    """One linear layer used three times, far apart."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.between = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.between:
            x = layer(self.shared(x).tanh()).tanh()
        return self.head(self.shared(x))


class Optional(nn.Module):
    """Its side branch is used by some batches only."""

    def __init__(self):
        super().__init__()
        self.trunk, self.side, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, with_side):
        x = self.trunk(x).relu()
        if with_side:
            x = x + self.side(x)
        return self.head(x)


def _alternating(first):
    return lambda: [(X[i : i + 6], Y[i : i + 6], first == (i % 12 == 0)) for i in range(0, 24, 6)]


def _optional_step(module, batch):
    return functional.cross_entropy(module(batch[0], batch[2]), batch[1])


def _branch(factor):
    """Code that looks at a value: it runs whole."""

    def step(model, batch):
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        return loss * factor if loss > 0 else loss

    return step


def _two_groups(module):
    parameters = list(module.parameters())
    return [{"params": parameters[1::2]}, {"params": parameters[::2], "lr": 0.1}]


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4).double()

    def forward(self, x):
        return self.two(self.one(x).relu().double())


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CASES: dict[str, TrainTask] = {
    "accumulate": task(accumulate=3),
    "accumulate, left over": task(accumulate=2),
    "accumulate more than there is": task(accumulate=50),
    "accumulate, ragged batch": task(batch_size=7, accumulate=2, report_every=1),
    "accumulate, shared layer": task(model=Shared, accumulate=2),
    "accumulate, branch in the first batch": task(
        model=Optional, train=_alternating(True), step=_optional_step, loss=None, accumulate=2
    ),
    "accumulate, branch in the last batch": task(
        model=Optional, train=_alternating(False), step=_optional_step, loss=None, accumulate=2
    ),
    "clip": task(max_grad_norm=0.1),
    "clip nothing": task(max_grad_norm=1e9),
    "clip, groups in another order": task(max_grad_norm=0.1, param_groups=_two_groups, optimizer=SGD),
    "clip, in the order of groups": task(
        max_grad_norm=0.1, clip_order="groups", param_groups=_two_groups, optimizer=SGD
    ),
    "clip, two types": task(
        model=Mixed,
        max_grad_norm=0.1,
        step=lambda m, b: functional.cross_entropy(m(b[0]), b[1]),
        loss=None,
    ),
    "clip, left over, branch": task(
        model=Optional,
        train=_alternating(True),
        step=_optional_step,
        loss=None,
        accumulate=3,
        max_grad_norm=0.1,
    ),
    "bfloat16": task(precision="bfloat16", validate=SAMPLES),
    "bfloat16, shared layer": task(model=Shared, precision="bfloat16", validate=SAMPLES),
    "float16": task(precision="float16", validate=SAMPLES),
    "float16, all": task(precision="float16", model=Shared, accumulate=2, max_grad_norm=0.1),
    "float16, fused": task(precision="float16", optimizer=partial(torch.optim.AdamW, lr=1e-2, fused=True)),
    "float16, overflow": task(
        precision="float16", loss=lambda o, y: functional.cross_entropy(o, y) * 3000, epochs=4, optimizer=SGD
    ),
    "float16, overflow, left over": task(
        precision="float16",
        loss=lambda o, y: functional.cross_entropy(o, y) * 3000,
        epochs=4,
        optimizer=SGD,
        accumulate=2,
        max_grad_norm=1.0,
    ),
    "whole": task(step=_branch(2.0), loss=None, accumulate=2, max_grad_norm=0.1, precision="bfloat16"),
    "whole, float16": task(step=_branch(3000.0), loss=None, accumulate=2, precision="float16", optimizer=SGD),
}


# Whole, every fourth in every run: with one shard there is less to get wrong.
@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("name", "cut"),
    [
        pytest.param(name, cut, marks=[pytest.mark.slow] * (cut == 1 and number % 4 > 0))
        for number, name in enumerate(CASES)
        for cut in (1, 3)
    ],
)
def test_equals_the_plain_loop(name, cut):
    result = train(CASES[name], num_shards=cut, devices="cpu:2")
    assert against_plain(CASES[name], result) == []
    assert result.num_shards == (1 if name.startswith("whole") else cut)


def test_the_plain_loop_accumulates_as_one_larger_batch_would():
    """The mean of two halves' means is the mean of the whole."""
    whole = train_plain(task(train=lambda: [(X[:8], Y[:8])], optimizer=partial(torch.optim.SGD, lr=0.1)))
    halves = train_plain(
        task(
            train=lambda: [(X[:4], Y[:4]), (X[4:8], Y[4:8])],
            optimizer=partial(torch.optim.SGD, lr=0.1),
            accumulate=2,
        )
    )
    assert len(halves.losses) == 2 * len(whole.losses)
    for one, other in zip(whole.module().parameters(), halves.module().parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_steps_are_counted_as_optimizer_steps():
    result = train(task(batch_size=7, accumulate=3, report_every=1))
    # 24 samples in batches of 7 are 4 batches: a step of 3 and a step of 1, in each of 2 epochs.
    assert [(entry["step"], entry["epoch"]) for entry in result.history] == [(1, 0), (2, 0), (3, 1), (4, 1)]


def test_overflow_skips_whole_steps_and_then_trains():
    """The first scale is too large for this loss; no part of such a step may be taken."""
    plain = train_plain(CASES["float16, overflow"])
    untrained = dict(_built(CASES["float16, overflow"]).named_parameters())
    moved = [not torch.equal(untrained[name], value) for name, value in plain.module().named_parameters()]
    assert all(moved)
    first = train_plain(task(**_fields(CASES["float16, overflow"], epochs=1, train=lambda: [(X, Y)])))
    assert all(torch.equal(untrained[name], value) for name, value in first.module().named_parameters())


def _built(described):
    torch.manual_seed(described.seed)
    return described.model()


def _fields(described, **changes):
    kept = ("precision", "loss", "optimizer", "model", "seed")
    return {name: getattr(described, name) for name in kept} | changes


def _explode(at):
    """Batches of 6, one of which is not made of numbers."""
    inputs = X.clone()
    inputs[6 * at : 6 * at + 6] = math.nan
    return DataLoader(TensorDataset(inputs, Y), batch_size=6)


@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_bad_loss_fails_its_trial_alone_and_takes_no_step(cut, accumulate):
    bad = task(train=_explode(2), accumulate=accumulate, epochs=3)
    with running(devices="cpu:2", num_shards=cut) as pool:
        failed, fine = pool.run([bad, task()], on_error="return")
    assert failed.status == "failed"
    assert isinstance(failed.error, BadLossError)
    step = 3 if accumulate == 1 else 1
    assert f"the training loss is nan in step {step} (epoch 0)" in str(failed.error)
    assert against_plain(task(), fine) == []
    with pytest.raises(BadLossError, match=f"nan in step {step}"):
        train_plain(bad)


@pytest.mark.parametrize("cut", [1, 3])
def test_a_bad_loss_may_prune(cut):
    bad = task(train=_explode(2), on_bad_loss="prune", report_every=1)
    result = train(bad, num_shards=cut)
    plain = train_plain(bad)
    assert (result.status, result.error) == ("pruned", None)
    assert plain.status == "pruned"
    assert [entry["train_loss"] for entry in result.history] == plain.losses[:2]
    assert result.metrics == plain.metrics
    assert result.units_saved > 0


def test_an_infinite_loss_is_bad_too():
    result = train(task(loss=lambda output, target: functional.cross_entropy(output, target) * math.inf))
    assert isinstance(result.error, BadLossError)
    assert "the training loss is inf in step 1" in str(result.error)


def test_an_infinite_metric_is_an_ordinary_value():
    result = train(task(validate=SAMPLES, evaluate=lambda m, b: {"loss": torch.tensor(math.inf)}))
    assert result.status == "completed"
    assert result.metrics["val_loss"] == math.inf


def test_half_precision_parameters_are_refused_with_loss_scaling():
    half = task(
        model=lambda: mlp().half(),
        precision="float16",
        step=lambda m, b: functional.cross_entropy(m(b[0].half()).float(), b[1]),
        loss=None,
    )
    result = train(half)
    assert isinstance(result.error, TaskError)
    assert "leave the model's parameters in float32" in str(result.error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulate": 0}, "accumulate must be a whole number of at least 1, not 0"),
        ({"accumulate": 1.5}, "accumulate must be a whole number of at least 1, not 1.5"),
        ({"max_grad_norm": 0}, "max_grad_norm must be a number above 0"),
        ({"max_grad_norm": math.nan}, "max_grad_norm must be a number above 0"),
        ({"clip_order": "groups"}, "clip_order is the order of max_grad_norm, which is not given"),
        ({"precision": "fp16"}, "precision must be one of 'float32', 'bfloat16', 'float16', not 'fp16'"),
        ({"on_bad_loss": "ignore"}, "on_bad_loss must be one of 'fail', 'prune', not 'ignore'"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, message):
    with pytest.raises(TaskError, match=message.replace("(", r"\(")):
        task(**changes)


@pytest.mark.parametrize("run", [train, train_plain])
def test_clipping_that_leaves_out_a_trainable_parameter_is_named_once(run, caplog):
    # A name of its own for each run, because a warning names a parameter once.
    name = f"left_out_of_{run.__name__}"

    def warnings(*, frozen, norm):
        def model():
            layers = {name: nn.Linear(8, 8).requires_grad_(not frozen), "head": nn.Linear(8, 4)}
            return nn.Sequential(OrderedDict(layers))

        run(task(model=model, param_groups=lambda module: list(module.head.parameters()), max_grad_norm=norm))
        return [record.getMessage() for record in caplog.records if f"{name}.weight" in record.getMessage()]

    assert not warnings(frozen=True, norm=0.1)
    assert not warnings(frozen=False, norm=None)
    for _ in range(2):
        (warning,) = warnings(frozen=False, norm=0.1)
    assert f"max_grad_norm= leaves out the gradient of the parameter '{name}.weight'" in warning


def test_memory_of_waiting_gradients_is_counted():
    """Under a budget that is just enough, with spilling: a ledger that missed them would raise."""
    described = task(model=Shared, accumulate=2, max_grad_norm=0.1, precision="float16")
    with HydraExecutor(devices="cpu:1", num_shards=4) as pool:
        pool.run([described])
        peak = pool.stats().devices["cpu:0"].peak_bytes
    budget = peak * 3 // 4
    with running(devices="cpu:1", device_memory=budget, buffer_fraction=0.0, max_concurrent=3) as pool:
        results = pool.run([described] * 3)
        assert pool.stats().devices["cpu:0"].peak_bytes <= budget
    for result in results:
        assert against_plain(described, result) == []


def _lengths(count):
    """Every batch of another length, the longest first."""
    inputs = torch.randn(8, count + 1, 8, generator=torch.Generator().manual_seed(2))
    return lambda: [(inputs[:, : n + 1], Y[:8]) for n in reversed(range(count))]


class OverTime(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(8, 32), *(nn.Linear(32, 32) for _ in range(6))]
        self.inner = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.inner(x).mean(1))


@pytest.mark.cases(1 / 3)
def test_batches_of_ever_new_length_are_not_captured_for_ever(monkeypatch):
    captured = []
    capture = PlanLibrary._capture

    def noting(self, request):
        captured.append(request.leaves.signature)
        return capture(self, request)

    monkeypatch.setattr(PlanLibrary, "_capture", noting)
    described = task(model=OverTime, train=_lengths(14), epochs=2)
    assert against_plain(described, train(described)) == []
    assert len(captured) == 8


@pytest.mark.cases(1 / 3)
def test_a_model_that_has_to_be_cut_trains_with_every_length(caplog):
    described = task(model=OverTime, train=_lengths(9), epochs=2)
    with HydraExecutor(devices="cpu:1") as pool:
        pool.run([described])
        whole = pool.stats().devices["cpu:0"].peak_bytes
    result = train(described, device_memory=whole // 2, buffer_fraction=0.0)
    assert against_plain(described, result) == []
    assert result.num_shards > 1
    warnings = [record.getMessage() for record in caplog.records if "shape of its batches" in record.getMessage()]
    assert len(warnings) == 1, "one warning, and none before the captures are many"
    assert "the step (train) is captured for the 9th shape" in warnings[0]


class EndsOtherwise(nn.Module):
    """Has another graph, with fewer operators, for a shorter last batch."""

    def __init__(self):
        super().__init__()
        self.first, self.last = mlp(), nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        found = self.first(x)
        return self.last(found) if len(x) == BATCH_OF_STEPS else found


BATCH_OF_STEPS = 4


@pytest.mark.parametrize("accumulate", [2, 3])
def test_the_batches_of_a_step_may_be_cut_into_different_numbers_of_shards(accumulate):
    described = task(
        model=EndsOtherwise,
        train=TensorDataset(X[:10], Y[:10]),
        batch_size=BATCH_OF_STEPS,
        accumulate=accumulate,
        epochs=2,
    )
    with HydraExecutor("cpu:1", num_shards="layer") as pool:
        (result,) = pool.run([described])
    assert against_plain(described, result) == []


def test_a_step_that_thaws_what_it_has_frozen_fails_by_name_where_the_model_is_cut():
    """The step runs as it is, in a model whose state is cut, and the optimizer's step leaves out what was frozen before."""

    def step(module, batch):
        x, y, number = batch
        module[0].requires_grad_(number % 2 == 0)
        return functional.cross_entropy(module(x), y)

    described = task(
        step=step, train=lambda: [(X[:8], Y[:8], number) for number in range(4)], batch_size=None, loss=None
    )
    with HydraExecutor("cpu:1") as pool:
        assert against_plain(described, pool.run([described])[0]) == []
    with HydraExecutor("cpu:1", num_shards=2) as pool:
        (result,) = pool.run([described], on_error="return")
    assert "the step sets requires_grad of '0.weight'" in str(result.error)


class Tempered(nn.Module):
    """Divides by a temperature that is no buffer."""

    def __init__(self, temperature):
        super().__init__()
        self.net, self.temperature = mlp(), temperature

    def forward(self, x):
        return self.net(x) / (self.temperature["all"] if isinstance(self.temperature, dict) else self.temperature)


class Cooling:
    """A schedule of the model's temperature; tensors are changed in place."""

    def __init__(self, module):
        self.module = module

    def step(self):
        if isinstance(self.module.temperature, dict):
            self.module.temperature["all"] *= 0.5
        else:
            self.module.temperature *= 0.5

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert not state


@pytest.mark.cases(1)
@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize(
    "temperature",
    [lambda: 1.0, lambda: torch.ones(1), lambda: {"all": torch.ones(1)}],
    ids=["number", "tensor", "tensor in a dict"],
)
def test_a_schedule_of_an_attribute_is_followed(temperature, cut):
    def described():
        built = []

        def model():
            built.append(Tempered(temperature()))
            return built[-1]

        return task(model=model, scheduler=lambda _: Cooling(built[-1]), epochs=3, validate=SAMPLES)

    result = train(described(), num_shards=cut)
    assert against_plain(described(), result) == []
    assert result.num_shards == cut
