"""Equal keys where the graphs would be equal, other keys wherever a capture would bake in something else."""

import copy
import ctypes
import dataclasses
import decimal
import enum
import functools
import inspect
import io
import logging
import types
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import and_masks
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hydra_tune.shard.capture.fingerprint import architecture_key, optimizer_key
from tests.parity.models import MODELS, build
from tests.unit.shard.bench import task_of, vectors

SCALE = 2.0
STEP_SCALE = 2.0
SETTINGS = {"scale": 2.0}
WEIGHTS = torch.ones(8)


class Config:
    scale = 2.0


settings = types.SimpleNamespace(scale=2.0)


class Net(nn.Module):
    factor = 1.0

    def __init__(self, width=8, scale=1.0):
        super().__init__()
        self.linear = nn.Linear(8, width)
        self.scale = scale

    def forward(self, x):
        return helper(self.linear(x)) * self.scale * self.factor


def helper(x):
    return x * SCALE


def key(model, **changes):
    return architecture_key(task_of(model, **changes), model)


def weighted(weight):
    return nn.CrossEntropyLoss(weight=torch.tensor(weight))


def distilled(seed):
    """A step whose teacher is frozen: its weights are constants of the graph."""
    torch.manual_seed(seed)
    teacher = nn.Linear(8, 8).requires_grad_(False)

    def step(module, batch):
        return functional.mse_loss(module(batch[0]), teacher(batch[0]))

    return step


@pytest.mark.parametrize("name", MODELS)
def test_two_trials_of_one_architecture_have_one_key(name):
    one, other = build(name, seed=1), build(name, seed=2)
    first, second = architecture_key(one, one.model()), architecture_key(other, other.model())
    assert first is not None
    assert first == second
    assert hash(first) == hash(second)


def test_values_of_parameters_and_buffers_are_not_in_the_key():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    before = key(model)
    model(vectors()[0])
    with torch.no_grad():
        model[0].weight.add_(1)
    assert key(model) == before
    assert key(model.eval()) == before, "the mode is kept apart by the caller"


def frozen():
    model = Net()
    model.linear.requires_grad_(False)
    return model


def tied():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model


def replaced():
    model = Net()
    model.forward = types.MethodType(lambda self, x: self.linear(x), model)
    return model


def hooked():
    model = Net()
    model.linear.register_forward_hook(lambda module, args, output: output * 2)
    return model


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Net(), Net(width=16)),
        (Net(), Net(scale=2.0)),
        (Net(scale=1.0), Net(scale=1)),
        (Net(scale=1), Net(scale=True)),
        (Net(), Net().double()),
        (Net(), frozen()),
        (Net(), replaced()),
        (Net(), hooked()),
        (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), tied()),
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.GELU())),
        (nn.Dropout(0.1), nn.Dropout(0.2)),
        (nn.ReLU(), nn.ReLU(inplace=True)),
        (nn.ParameterList([torch.ones(2, 3)]), nn.ParameterList([torch.ones(3, 2).t()])),
    ],
)
def test_other_models_have_other_keys(one, other):
    assert key(one) is not None
    assert key(one) != key(other)
    assert key(one) == key(copy.deepcopy(one)) or "hook" in str(vars(one))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"loss": functional.mse_loss}, {"loss": functional.l1_loss}),
        ({"loss": functools.partial(functional.mse_loss, reduction="mean")},
         {"loss": functools.partial(functional.mse_loss, reduction="sum")}),
        ({"loss": nn.MSELoss()}, {"loss": nn.MSELoss(reduction="sum")}),
        ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.2)}),
        ({"loss": weighted([1.0, 2.0])}, {"loss": weighted([1.0, 3.0])}),
        ({"loss": lambda output, target: output.mean()}, {"loss": lambda output, target: output.sum()}),
        ({"step": lambda module, batch, c=1.0: module(batch[0]).mean() * c},
         {"step": lambda module, batch, c=2.0: module(batch[0]).mean() * c}),
        ({"step": distilled(1)}, {"step": distilled(2)}),
    ],
    ids=["function", "partial", "module", "option", "weight", "code", "default", "teacher"],
)  # fmt: skip
def test_other_steps_have_other_keys(one, other):
    """Or no key, so that the step is captured afresh."""
    model = Net()
    first = key(model, **one)
    assert first is None or first != key(model, **other)


def test_equal_losses_have_equal_keys():
    model = Net()
    for loss in (functional.mse_loss, nn.MSELoss(), functools.partial(functional.mse_loss, reduction="sum")):
        assert key(model, loss=loss) is not None
        assert key(model, loss=loss) == key(model, loss=copy.deepcopy(loss))


def closure(constant):
    def step(module, batch):
        return module(batch[0]).mean() * constant

    return step


def test_a_closure_is_keyed_by_what_it_closes_over():
    model = Net()
    assert key(model, step=closure(1.0)) == key(model, step=closure(1.0))
    assert key(model, step=closure(1.0)) != key(model, step=closure(2.0))
    assert key(model, step=closure(torch.ones(3))) == key(model, step=closure(torch.ones(3)))
    assert key(model, step=closure(torch.ones(3))) != key(model, step=closure(torch.zeros(3)))


def wrapping(constant):
    @functools.wraps(functional.gelu)
    def scaled(x):
        return functional.gelu(x) * constant

    return scaled


@pytest.mark.parametrize("make", [get_ema_multi_avg_fn, wrapping, lambda constant: and_masks(closure(constant))])
def test_what_a_function_of_a_package_was_given_is_in_the_key(make):
    """Also where a function of the user's has the name of a package's function, or is held by such a function."""
    one, same, other = (Net() for _ in range(3))
    for model, constant in ((one, 0.5), (same, 0.5), (other, 0.9)):
        model.act = make(constant)
    assert key(one) == key(same) is not None
    assert key(one) != key(other)


def test_a_compiled_function_of_a_package_is_keyed_by_the_function():
    one, same, other = (Net() for _ in range(3))
    for model, function in ((one, functional.gelu), (same, functional.gelu), (other, functional.silu)):
        model.act = torch.compile(function, backend="eager")
    assert key(one) == key(same) is not None
    assert key(one) != key(other)


def test_metrics_of_a_package_have_equal_keys():
    """Each holds functions that hold the metric."""
    metrics = pytest.importorskip("torchmetrics")
    models = [Net() for _ in range(2)]
    for model in models:
        model.metric = metrics.MeanSquaredError()
    assert key(models[0]) == key(models[1]) is not None


def by_number(module, batch):
    return module(batch[0]).mean() * STEP_SCALE


def by_dict(module, batch):
    return module(batch[0]).mean() * SETTINGS["scale"]


def by_class(module, batch):
    return module(batch[0]).mean() * Config.scale


def by_object(module, batch):
    return module(batch[0]).mean() * settings.scale


def by_tensor(module, batch):
    return (module(batch[0]) * WEIGHTS).mean()


def by_inner_function(module, batch):
    return sum(module(batch[0]).mean() * STEP_SCALE for _ in range(2))


def other_helper(x):
    return x * SCALE * 1.5


@pytest.mark.parametrize(
    ("step", "change"),
    [
        (by_number, lambda patch: patch.setitem(globals(), "STEP_SCALE", 3.0)),
        (by_dict, lambda patch: patch.setitem(SETTINGS, "scale", 3.0)),
        (by_class, lambda patch: patch.setattr(Config, "scale", 3.0)),
        (by_object, lambda patch: patch.setattr(settings, "scale", 3.0)),
        (by_tensor, lambda patch: patch.setitem(globals(), "WEIGHTS", torch.zeros(8))),
        (by_inner_function, lambda patch: patch.setitem(globals(), "STEP_SCALE", 3.0)),
        (lambda module, batch: module(batch[0]).mean(), lambda patch: patch.setitem(globals(), "SCALE", 3.0)),
        (lambda module, batch: module(batch[0]).mean(), lambda patch: patch.setitem(globals(), "helper", other_helper)),
        (lambda module, batch: module(batch[0]).mean(), lambda patch: patch.setattr(Net, "factor", 3.0)),
    ],
    ids=[
        "number",
        "dict",
        "class",
        "object",
        "tensor",
        "inner",
        "methods_helper",
        "replaced_helper",
        "class_attribute",
    ],
)
def test_what_the_code_reads_from_outside_is_in_the_key(monkeypatch, step, change):
    """Or there is no key, and the step is captured afresh."""
    model = Net()
    before = key(model, step=step)
    assert key(model, step=step) == before
    change(monkeypatch)
    after = key(model, step=step)
    assert after is None or after != before


def test_what_cannot_be_keyed_has_no_key():
    model = Net()
    model.scale = torch.Generator()
    assert key(model) is None
    deep = []
    for _ in range(30):
        deep = [deep]
    model.scale = deep
    assert key(model) is None
    model.scale = torch.zeros(1 << 20)
    assert key(model) is None
    model.scale = iter([1])
    assert key(model) is None


class Price(decimal.Decimal):
    pass


class Span(timedelta):
    pass


class Level(enum.IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    "value",
    [Price("0.1"), Span(seconds=1), io.BytesIO(b"1"), np.frompyfunc(abs, 1, 1), ValueError(0.1)],
    ids=lambda value: type(value).__name__,
)
def test_objects_that_keep_their_value_outside_of_python_have_no_key(value):
    assert key(Net(), step=lambda module, batch: (module(batch), value)) is None


@pytest.mark.parametrize(
    "value",
    [settings, Level.LOW, Config(), functools.cache(helper), ctypes.c_double(1.0)],
    ids=lambda value: type(value).__name__,
)
def test_other_objects_have_one(value):
    assert key(Net(), step=lambda module, batch: (module(batch), value)) is not None


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float


class BelowSlotted(Slotted):
    """Has both a `__dict__` and a slot."""


class Hidden:
    __slots__ = ("__scale", "unset")

    def __init__(self, scale):
        self.__scale = scale


class SlottedNet(Net):
    __slots__ = ("temperature",)

    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature


@pytest.mark.parametrize("kind", [Slotted, BelowSlotted, Hidden])
def test_objects_with_slots_are_keyed_by_their_values(kind):
    model = Net()
    one, same, other = (
        key(model, step=functools.partial(lambda module, batch, value: module(batch), value=kind(scale)))
        for scale in (1.0, 1.0, 2.0)
    )
    assert one is not None
    assert one == same != other


def test_models_with_slots_are_keyed_by_their_values():
    assert key(SlottedNet(1.0)) == key(SlottedNet(1.0)) is not None
    assert key(SlottedNet(1.0)) != key(SlottedNet(2.0))


def test_a_signature_is_keyed_by_its_parameters_and_defaults():
    """Metrics of torchmetrics keep that of their update."""
    functions = [lambda a, b=1: None, lambda c, d=1: None, lambda a, b=2: None, lambda a, *, b=1: None]
    models = [Net() for _ in functions]
    for model, function in zip(models, functions, strict=True):
        model.signature = inspect.signature(function)
    assert len({key(model) for model in models}) == 4
    models[1].signature = inspect.signature(lambda a, b=1: None)
    assert key(models[0]) == key(models[1]) is not None


def test_the_default_dtype_is_in_the_key():
    model = Net()
    before = key(model)
    torch.set_default_dtype(torch.float64)
    try:
        assert key(model) != before
    finally:
        torch.set_default_dtype(torch.float32)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


LOGGER = logging.getLogger(__name__)


def log_and_pair(module, batch):
    LOGGER.debug("a step of %s", module)
    pair = Pair(module(batch[0]), batch[1])
    return functional.mse_loss(pair.first, pair.second)


def test_a_step_that_logs_and_returns_named_tuples_has_a_key():
    first = key(Net(), step=log_and_pair)
    assert first is not None
    assert first == key(Net(), step=log_and_pair)


class HoldsAMethod(nn.Module):
    """Keeps a method of its child, as a PEFT model keeps a method of the model that it changes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(600, 600)  # more than the largest tensor whose contents are in a key
        self.earlier_forward = self.inner.forward

    def forward(self, x):
        return self.earlier_forward(x)


def test_a_model_that_keeps_a_method_of_its_child_has_a_key():
    first = key(HoldsAMethod())
    assert first is not None
    assert first == key(HoldsAMethod()), "the child's weights are no constants"


def test_a_deep_model_has_a_key():
    def nested():
        model = nn.Linear(2, 2)
        for _ in range(30):
            model = nn.Sequential(model)
        return model

    first = key(nested())
    assert first is not None
    assert first == key(nested())


class Ranked(torch.optim.SGD):
    def __init__(self, params, rank):
        super().__init__(params, lr=0.1)
        self.param_groups[0]["rank"] = rank


def optimizer(kind=torch.optim.AdamW, **options):
    return optimizer_key(kind(nn.Linear(8, 8).parameters(), **options))


def test_optimizers_are_keyed_by_what_decides_their_memory():
    assert optimizer(lr=0.1) == optimizer(lr=0.2, betas=(0.8, 0.9), weight_decay=0.3)
    assert optimizer() != optimizer(amsgrad=True)
    assert optimizer() != optimizer(torch.optim.Adam)
    assert optimizer() != optimizer(foreach=True)
    assert optimizer(torch.optim.SGD, lr=0.1) != optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    assert optimizer(torch.optim.SGD, lr=0.1, momentum=0.5) == optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    assert optimizer(lr=torch.tensor(0.1), foreach=False) != optimizer(lr=0.1, foreach=False)
    assert optimizer(Ranked, rank=4) != optimizer(Ranked, rank=8), "a whole number may be a size"


def test_a_long_range_has_a_key_of_its_ends():
    module = Net()
    module.ids = range(10**9)
    other = Net()
    other.ids = range(10**9)
    assert key(module) == key(other)
    other.ids = range(1, 10**9)
    assert key(module) != key(other)


def test_an_optimizer_may_have_an_array_among_its_options():
    module = Net()
    optimizer = torch.optim.SGD([{"params": module.parameters(), "mine": np.array([1, 2])}], lr=0.1)
    assert optimizer_key(optimizer) == optimizer_key(optimizer)
