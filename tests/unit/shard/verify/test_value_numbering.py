"""A plan is checked without arithmetic: right plans pass, wrong ones do not, and what no number tells is told by values."""

import copy
import resource
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune.errors import CaptureError
from hydra_tune.shard.capture.meta_models import bodiless_twin
from hydra_tune.shard.cost.activation_policy import ActivationBudget, keeping
from hydra_tune.shard.partition import plan_cache as library_module
from hydra_tune.shard.partition.plan_cache import PlanLibrary, ShardPlanConstraints
from hydra_tune.shard.verify.plan_check import verify
from hydra_tune.shard.verify.value_numbering import ValueNumbering, ValuesNeededError
from tests.parity.models import MODELS, build
from tests.unit.shard.bench import analysed, bench, first_batch, parity_bench, task_of, vectors
from tests.unit.shard.verify.test_plan_check import TRAPS, Base, patch

EVERYTHING = ActivationBudget(capacity_bytes=1 << 40, budget_bytes=1 << 40)


def check(made, plan, kept=None, model=None):
    """By numbers; no parameter has a value."""
    twin = bodiless_twin(made.model if model is None else model)[0]
    return verify(made.task, twin, plan, made.batch, [], kept, numbering=ValueNumbering())


@pytest.fixture
def checks(monkeypatch):
    """How the plans of a library were checked."""
    found = []
    real = library_module.verify

    def noted(*arguments, **options):
        found.append("values" if arguments[-1] is None else "numbers")
        return real(*arguments, **options)

    monkeypatch.setattr(library_module, "verify", noted)
    return found


def prepare(task, batch=None, mode="train", num_shards=3, *, checks_sample=True, only_plans=False):
    budget = ShardPlanConstraints(
        budget_bytes=1 << 34, buffer_fraction=0.15, alignment=64, num_shards=num_shards, checks_sample=checks_sample
    )
    model = task.model()
    batch = first_batch(task) if batch is None else batch
    library = PlanLibrary(budget)
    library = library.for_plans(1 << 34) if only_plans else library
    return library.prepare(task, model, task.optimizer(list(model.parameters())), batch, mode)


@pytest.mark.cases(1)
@pytest.mark.parametrize("num_shards", [1, 2, 6])
@pytest.mark.parametrize("name", MODELS)
def test_a_right_plan_passes(name, num_shards):
    made = parity_bench(name)
    plan = made.plan(*made.spread(num_shards))
    state = torch.get_rng_state()
    assert check(made, plan, keeping(plan, made.pilot, "keep", EVERYTHING))[1] is not None
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("trap", TRAPS)
def test_a_model_that_a_graph_cannot_follow_does_not_pass(trap):
    model = trap()

    def capture_and_check():
        """Each on a copy of its own, as the library does it."""
        made = bench(task_of(copy.deepcopy(model)))
        check(made, made.plan(), model=model)

    with pytest.raises((CaptureError, ValuesNeededError)):
        capture_and_check()


@pytest.mark.parametrize(
    ("name", "operator", "argument", "value"),
    [
        ("vit", "aten.layer_norm.default", 4, 1e-3),
        ("mlp", "aten.dropout.default", 1, 0.25),
        ("mlp", "aten.dropout.default", 2, False),
        ("cnn", "aten.batch_norm.default", 6, 0.2),
    ],
)
def test_a_graph_with_one_wrong_constant_does_not_pass(name, operator, argument, value):
    made = bench(build(name))
    with pytest.raises(CaptureError):
        check(made, patch(made, operator, argument, value))


def test_a_graph_that_draws_too_much_does_not_pass():
    made = bench(task_of(nn.Linear(8, 8)))
    graph = made.captured.module.graph
    with graph.inserting_before(made.captured.nodes[1]):
        graph.call_function(torch.ops.aten.rand.default, ([1],))
    made = analysed(made.task, made.model, made.batch, made.captured)
    with pytest.raises(CaptureError, match="other random numbers"):
        check(made, made.plan())


def test_for_a_cpu_a_long_step_is_checked_by_numbers_and_a_short_one_by_values(checks, monkeypatch):
    prepare(build("mlp"), checks_sample=False)
    assert checks == ["values"]
    monkeypatch.setattr(library_module, "_LONG_STEP_SECONDS", 0.0)
    long = prepare(build("mlp"), checks_sample=False)
    assert checks == ["values", "numbers"]
    assert all(seconds > 0 for seconds in long.seconds.backward)


def test_a_plan_that_is_not_trained_is_timed_however_long_its_step(checks, monkeypatch):
    monkeypatch.setattr(library_module, "_LONG_STEP_SECONDS", 0.0)
    prepare(build("mlp"), checks_sample=False, only_plans=True)
    assert checks == ["values"]


class Way(Base):
    def __init__(self, way):
        super().__init__()
        self.way = [way]
        self.register_buffer("scale", torch.ones(8))

    def middle(self, x):
        return self.way[0](x, self.scale)


def capturing_or(x, otherwise):
    """What the capture sees, and the eager step does not."""
    with suppress(Exception):
        return otherwise(x)
    return x


@pytest.mark.parametrize(
    "way",
    [
        lambda x, _: x.relu() if isinstance(x, torch._subclasses.FakeTensor) else x.tanh(),
        lambda x, _: x * 2 if isinstance(x, torch._subclasses.FakeTensor) else x * 3,
        lambda x, _: x.sum(0) - x if isinstance(x, torch._subclasses.FakeTensor) else x - x.sum(0),
        lambda x, _: capturing_or(x, lambda y: y * float(y.detach().numpy()[0, 0])),
        lambda x, _: capturing_or(x, lambda y: y if float(y.detach().numpy()[0, 0]) > 0 else y * 2),
    ],
    ids=["another operator", "another number", "another order", "an array", "a branch"],
)
def test_a_step_that_differs_from_its_capture_does_not_pass(way):
    made = bench(task_of(Way(way)))
    with pytest.raises(CaptureError):
        check(made, made.plan())


@pytest.mark.parametrize(
    "way",
    [
        lambda x, _: capturing_or(x, lambda y: y * float(y.sum())),
        lambda x, scale: capturing_or(x, lambda y: y * scale.sum().item()),
        lambda x, _: x[x > 0].sum() + x,
    ],
    ids=["of a value", "of a buffer", "of a size"],
)
def test_a_question_about_the_model_needs_values(way):
    made = bench(task_of(nn.Linear(8, 8)))
    with pytest.raises(ValuesNeededError):
        check(made, made.plan(), model=Way(way))


def test_in_place_operators_are_followed():
    def way(x, scale):
        scale.mul_(2)
        y = x * scale
        y[:, :4].add_(1).mul_(scale[:4])
        return y.relu_().t().contiguous().t()

    made = bench(task_of(Way(way)))
    check(made, made.plan())


@pytest.mark.cases(1 / 3)
def test_numbers_decide_for_a_library(checks):
    found = prepare(build("gpt2"))
    assert checks == ["numbers"]
    assert len(found.plan.shards) == 3
    assert found.is_checked
    assert all(seconds > 0 for seconds in (*found.seconds.forward[:-1], *found.seconds.backward))


@pytest.mark.parametrize("checks_sample", [True, False], ids=["for GPUs", "a long step"])
def test_values_decide_what_numbers_cannot(checks, monkeypatch, checks_sample):
    monkeypatch.setattr(library_module, "_LONG_STEP_SECONDS", 0.0)
    # In evaluation, layers of torch take a fast path that a capture does not take.
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    task = task_of(layer, step=lambda module, x: module(x).square().mean(), evaluate=lambda m, x: {"mean": m(x).mean()})
    assert prepare(task, torch.randn(4, 3, 8), "evaluate", checks_sample=checks_sample).plan.eager
    assert checks[:2] == ["numbers", "values"]


class Own(nn.Parameter):
    """A parameter that may compute otherwise."""


def test_parameters_of_a_class_of_their_own_need_values(checks):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight = Own(model[0].weight.detach())
    prepare(task_of(model))
    assert set(checks) == {"values"}


class Asks(nn.Module):
    """Asks whether its samples are padded."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        y = self.first(x).relu()
        y = self.second(y) if bool((x == 0).any()) else self.second(y).tanh()
        return self.third(y.relu())


def test_a_question_about_the_batch_becomes_a_guard(checks):
    batch = vectors(12)
    batch[0][-1] = 0
    found = prepare(task_of(Asks()), batch)
    assert checks == ["numbers"]
    assert found.serves(batch)
    assert not found.serves(vectors(12))


def test_no_tensor_without_values_stays_in_an_object():
    class Loss:
        last = torch.zeros(())

        def __call__(self, outputs, targets):
            self.last = functional.mse_loss(outputs, targets)
            return self.last

    loss = Loss()
    prepare(task_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), loss=loss))
    assert loss.last.item() == 0


def test_a_large_step_takes_no_memory():
    """Its activations would take 3 GiB, and its arithmetic minutes."""
    middle = [nn.Linear(4096, 4096) for _ in range(3)]
    batch = tuple(torch.zeros(1 << 16, 8) for _ in range(2))
    made = bench(task_of(nn.Sequential(nn.Linear(8, 4096), *middle, nn.Linear(4096, 8))), batch)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check(made, made.plan())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18


def test_an_operator_runs_on_stand_ins_once_for_operands_of_a_geometry(monkeypatch):
    calls = []
    fake_run = ValueNumbering._fake_run
    monkeypatch.setattr(
        ValueNumbering, "_fake_run", lambda *args, **kwargs: calls.append(args[1]) or fake_run(*args, **kwargs)
    )
    model, numbering = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), ValueNumbering()
    values = torch.ones(2, 8)
    for _ in range(2):
        with numbering.run(model), torch.no_grad():
            # Numbers of operands count, too: an operand twice is not two operands.
            hidden = model(values)
            assert numbering.is_same(hidden + hidden, hidden + hidden)
            assert not numbering.is_same(hidden + hidden, hidden + hidden.clone().relu())
    assert calls.count(torch.ops.aten.addmm.default) == 1
    assert calls.count(torch.ops.aten.add.Tensor) == 2
