"""What an optimizer's update needs, piloted on stand-ins, is what the real one makes."""

import gc
import itertools
from functools import partial

import pytest
import torch
from torch import nn

from hydra_tune import HydraExecutor
from hydra_tune.shard.capture.step_capture import state_specs
from hydra_tune.shard.cost import update_pilot
from hydra_tune.shard.cost.optimizer_placement import update_seconds
from hydra_tune.shard.cost.update_pilot import optimizer_pilot, trying, zeroes_more_than_gradients
from hydra_tune.shard.python_state.state_guard import TaskStateGuard
from tests.support.tracker import Account, Mode, StorageTracker
from tests.unit.pool.tasks import task

NAMES = ["0.weight", "0.bias", "1.weight"]


class ReadyMade(torch.optim.Optimizer):
    """A user's optimizer whose constructor makes its state, as Adagrad's did up to torch 2.11."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"step": torch.tensor(0.0), "sum": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] += 1
                    state["sum"].addcmul_(parameter.grad, parameter.grad)
                    parameter.addcdiv_(parameter.grad, state["sum"].sqrt().add_(1e-10), value=-group["lr"])


class CountsInItsClass(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        CountsInItsClass.steps += 1
        return super().step(closure)


class ClearsByHand(torch.optim.SGD):
    """Zeros gradients as optimizers did in older scripts."""

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.detach_()
                    p.grad.zero_()


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.1),
    "adamw_amsgrad": partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
    "adamw_foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.1, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "adadelta": partial(torch.optim.Adadelta, lr=0.1),
    "radam": partial(torch.optim.RAdam, lr=0.1),
    "ready_made": ReadyMade,
}


class Reader(torch.optim.SGD):
    """A user's optimizer that reads a value, which no fake tensor has."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and float(parameter.grad.abs().max()) >= 0:
                    self.state[parameter]["copy"] = parameter.clone()


def model():
    return nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10))


def pilot(optimizer, module, names, alignment=1, **options):
    specs = state_specs(module)
    return optimizer_pilot(optimizer, dict(module.named_parameters()), specs, alignment=alignment, **options)(names)


def measured(optimizer, module, names):
    """State, the most workspace of later updates, workspace of the first, of real updates."""
    parameters = [module.get_parameter(name) for name in names]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    account = Account()
    account.follow([*parameters, *(p.grad for p in parameters)])
    base = account.current_bytes
    gc.collect()
    gc.disable()
    try:
        with Mode(account):
            optimizer.step()
        first, kept = account.peak_bytes - base, account.current_bytes
        later = Account()
        later.follow([*parameters, *(p.grad for p in parameters)])
        later.follow([v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)])
        before = later.current_bytes
        with Mode(later):
            for _ in range(8):  # some do more after a few
                optimizer.step()
    finally:
        gc.enable()
    return kept - base, later.peak_bytes - before, first


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_needs_what_its_pilot_says(name):
    module = model()
    optimizer = OPTIMIZERS[name](list(module.parameters()))
    piloted = pilot(optimizer, module, NAMES)
    real = measured(optimizer, module, NAMES)
    assert piloted[0] == real[0], "state, to the byte"
    for said, needed in zip(piloted[1:], real[1:], strict=True):
        assert needed <= said <= needed * 1.2 + 16, "temporaries: never less"


class Normed(torch.optim.SGD):
    """A user's optimizer that divides by the norm of each gradient, in Python."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(min(1.0, 0.1 / float(parameter.grad.norm())))
        return super().step(closure)


def test_an_optimizer_that_divides_by_a_norm_of_gradients_is_measured():
    module = model()
    optimizer = Normed(module.parameters(), lr=0.1, momentum=0.9)
    assert pilot(optimizer, module, NAMES)[0] == sum(module.get_parameter(name).nbytes for name in NAMES)
    assert update_seconds(optimizer, list(module.parameters())) >= 0


class OwnAdam(torch.optim.Adam):
    """A user's optimizer that steps as torch's does."""


class Around(torch.optim.Optimizer):
    """A user's optimizer that wraps another, whose groups it shares."""

    def __init__(self, params, inner):
        self.inner = inner(params)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


TOGETHER_ON_GPUS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, weight_decay=0.1),
    "adamw": torch.optim.AdamW,
    "adamw_maximize": partial(torch.optim.AdamW, maximize=True, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, centered=True),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
    "own class": OwnAdam,
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("small_bytes", [0, 1 << 20])
@pytest.mark.parametrize("name", TOGETHER_ON_GPUS)
def test_an_update_on_a_gpu_needs_what_a_step_of_all_parameters_at_once_needs(name, small_bytes, monkeypatch):
    """By the choice that torch makes there for optimizers without a choice of their own."""
    monkeypatch.setattr("hydra_tune.shard.cost.update_pilot._SMALL_BYTES", small_bytes)
    module = model()
    optimizer = TOGETHER_ON_GPUS[name](module.parameters())
    on_gpu = pilot(optimizer, module, NAMES, uses_foreach=True)
    real = measured(TOGETHER_ON_GPUS[name](module.parameters(), foreach=True), module, NAMES)
    assert on_gpu[0] == real[0], "state, to the byte"
    for said, needed in zip(on_gpu[1:], real[1:], strict=True):
        assert needed <= said <= needed * 1.2 + 16, "temporaries: never less"
    assert all(group["foreach"] is None for group in optimizer.param_groups), "the optimizer is only read"


def test_an_optimizer_around_another_needs_what_the_other_needs_on_a_gpu():
    module = model()
    around = pilot(Around(module.parameters(), torch.optim.AdamW), module, NAMES, uses_foreach=True)
    assert around[1] == pilot(torch.optim.AdamW(module.parameters()), module, NAMES, uses_foreach=True)[1]


@pytest.mark.parametrize(
    "kind",
    [
        partial(torch.optim.AdamW, foreach=False),
        partial(torch.optim.AdamW, fused=True),
        partial(torch.optim.AdamW, lr=torch.tensor(1e-3)),
        torch.optim.Adafactor,
        ReadyMade,
    ],
    ids=["no foreach", "fused", "rate in a tensor", "adafactor", "own step"],
)
def test_an_optimizer_that_steps_parameter_by_parameter_on_gpus_is_measured_so(kind):
    module = model()
    optimizer = kind(list(module.parameters()))
    assert pilot(optimizer, module, NAMES, uses_foreach=True) == pilot(optimizer, module, NAMES)


def test_each_group_steps_by_itself_on_a_gpu():
    """The temporaries of a group are gone when the next group steps."""
    module = model()
    groups = [{"params": [module[0].weight, module[0].bias]}, {"params": [module[1].weight], "foreach": False}]
    _, grouped, _ = pilot(torch.optim.AdamW(groups), module, NAMES, uses_foreach=True)
    _, alone, _ = pilot(torch.optim.AdamW(groups[0]["params"]), module, NAMES, uses_foreach=True)
    assert grouped == alone


def test_an_optimizer_that_reads_values_is_measured_for_real():
    module = model()
    state, _, first = pilot(Reader(list(module.parameters()), lr=0.1), module, ["0.weight"])
    assert state == 30 * 20 * 4
    assert first >= state


@pytest.mark.parametrize(
    "scheduler",
    [
        partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=9),
        torch.optim.lr_scheduler.ReduceLROnPlateau,
    ],
    ids=["step", "one_cycle", "plateau"],
)
def test_a_scheduler_does_not_hide_what_the_optimizer_needs(scheduler):
    """Schedulers put a `step` of their own on the optimizer object, bound to that very object."""
    module = model()
    optimizer = torch.optim.Adam(module.parameters())
    expected = pilot(optimizer, module, NAMES)
    assert expected[0] > 2 * 4 * (30 * 20 + 20 + 20 * 10)
    attached = scheduler(optimizer)
    assert pilot(optimizer, module, NAMES) == expected
    assert attached.optimizer is optimizer


def test_the_optimizer_is_only_read():
    module = model()
    optimizer = torch.optim.Adam(module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    pilot(optimizer, module, NAMES)
    assert not optimizer.state
    assert calls == [], "a user's hook belongs to the real step"
    assert all(tensor.equal(before[name]) for name, tensor in module.state_dict().items())
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


def test_only_the_optimizers_own_parameters_are_updated():
    module = model()
    optimizer = torch.optim.Adam([module[0].weight])
    assert pilot(optimizer, module, ["0.bias", "1.weight"]) == (0, 0, 0)
    assert pilot(optimizer, module, NAMES) == pilot(optimizer, module, ["0.weight"])


def test_each_parameter_keeps_its_groups_options():
    module = model()
    optimizer = torch.optim.SGD(
        [{"params": [module[0].weight], "momentum": 0.9}, {"params": [module[1].weight], "momentum": 0.0}], lr=0.1
    )
    assert pilot(optimizer, module, ["0.weight", "1.weight"])[0] == 30 * 20 * 4


def test_alignment_counts_for_each_state_tensor():
    module = model()
    optimizer = torch.optim.Adam(module.parameters())
    state, _, _ = pilot(optimizer, module, ["0.bias"], alignment=512)
    assert state == 3 * 512, "two moments and a step counter"


def test_an_optimizer_that_does_more_after_some_steps_is_measured_then():
    """RAdam adapts from its sixth step on, and needs more room for that."""
    described = task(optimizer=partial(torch.optim.RAdam, lr=1e-3), epochs=4)
    tracker = StorageTracker()
    with HydraExecutor(devices="cpu:1", num_shards=3, instrument=tracker) as pool:
        (result,) = pool.run([described])
        ledger = pool.stats().devices["cpu:0"].peak_bytes
    assert result.error is None
    assert max(tracker.peak_bytes) <= ledger


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_operators_that_only_overwrite_need_not_be_run(name, monkeypatch):
    monkeypatch.setattr("hydra_tune.shard.cost.update_pilot._SMALL_BYTES", 0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8, bias=False))
    measured = []
    for _ in range(2):
        optimizer = OPTIMIZERS[name](model.parameters())
        measure = optimizer_pilot(optimizer, dict(model.named_parameters()), state_specs(model), alignment=64)
        measured.append(measure(NAMES))
        monkeypatch.setattr("hydra_tune.shard.cost.update_pilot.overwritten", lambda func, args: None)
        monkeypatch.setattr("hydra_tune.shard.fake.fake_world.overwritten", lambda func, args: None)
    assert measured[0] == measured[1]


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"weight_decay": 0.1},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "foreach": True},
        {"lr": torch.tensor(0.1), "foreach": False},
    ],
)
def test_what_one_optimizer_needs_is_not_taken_for_another_s(monkeypatch, options):
    """Measured before, in the same process, is one without these options."""
    model = nn.Linear(40, 30)
    specs, parameters = state_specs(model), dict(model.named_parameters())

    def needs(optimizer):
        return optimizer_pilot(optimizer, parameters, specs, alignment=64)(list(parameters))

    monkeypatch.setattr(update_pilot, "_KNOWN", {})
    alone = needs(torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options}))
    monkeypatch.setattr(update_pilot, "_KNOWN", {})
    needs(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0, weight_decay=0.0))
    assert needs(torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})) == alone


def test_trials_that_differ_in_numbers_are_measured_once(monkeypatch):
    model = nn.Linear(40, 30)
    specs, parameters = state_specs(model), dict(model.named_parameters())
    monkeypatch.setattr(update_pilot, "_KNOWN", {})
    for rate in (0.1, 0.01):
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(1 - rate, 0.99))
        optimizer_pilot(optimizer, parameters, specs, alignment=64)(list(parameters))
    assert len(update_pilot._KNOWN) == 1


class Twin(torch.optim.AdamW):
    """A user's class, which may do less after some steps."""


@pytest.mark.parametrize(("kind", "num_steps"), [(torch.optim.AdamW, 2), (Twin, 3)])
def test_torchs_own_optimizers_take_no_early_step(monkeypatch, kind, num_steps):
    steps = itertools.count()  # an iterator, because the pilot puts back what a list or a number would count
    monkeypatch.setattr(kind, "step", lambda self, step=kind.step: (next(steps), step(self)))
    monkeypatch.setattr(update_pilot, "_KNOWN", {})
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    measure = optimizer_pilot(kind(model.parameters()), dict(model.named_parameters()), state_specs(model), alignment=1)
    assert measure(NAMES)[0] > 0
    assert next(steps) == num_steps


def test_a_class_that_others_may_change_meanwhile_stays_and_is_named(monkeypatch, caplog):
    """Nothing tells another trial's count in the class from the count of a try."""
    monkeypatch.setattr(CountsInItsClass, "steps", 0)
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = CountsInItsClass(module.parameters(), lr=0.1)
    own = TaskStateGuard(task(), module)
    with trying(optimizer):
        optimizer.step()
    assert (CountsInItsClass.steps, caplog.messages) == (0, [])
    another = TaskStateGuard(task(), other)
    with trying(optimizer):
        CountsInItsClass(other.parameters(), lr=0.1).step()
    assert CountsInItsClass.steps == 1
    assert "CountsInItsClass.steps has changed while the pool tried code" in caplog.text
    del own, another


def test_a_zero_grad_that_only_zeroes_is_as_good_as_torchs():
    module = nn.Linear(2, 2)
    assert not zeroes_more_than_gradients(ClearsByHand(module.parameters(), lr=0.1))
