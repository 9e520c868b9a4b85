"""Models whose code does more than compute: what it does is as in the plain loop, or refused by name with a remedy."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune import Reported
from hydra_tune.errors import TaskError
from hydra_tune.train.hooks import refuse_gradient_hooks
from tests.support.tracker import StorageTracker
from tests.unit.pool.tasks import PATIENCE_SECONDS, SAMPLES, X, Y, against_plain, mlp, running, short, task, train


class Tied(nn.Module):
    """One layer used twice, so that two shards hold parts of its gradient; the first gradient hook is wrong there."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.twice(self.twice(x).relu()).relu())


def _clamped(module):
    module.twice.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def _in_place(parameter):
    parameter.grad.mul_(0.5)


def _post(module):
    module.head.bias.register_post_accumulate_grad_hook(_in_place)


def _backward(module):
    module.twice.register_full_backward_hook(lambda module, inputs, outputs: None)


def _old_backward(module):
    module.twice.register_backward_hook(lambda module, inputs, outputs: None)


def _pre_backward(module):
    module.register_full_backward_pre_hook(lambda module, outputs: None)


HOOKS = {
    r"parameter 'twice\.weight' has a gradient hook \(register_hook\)": _clamped,
    r"parameter 'head\.bias' has a gradient hook \(register_post_accumulate_grad_hook\)": _post,
    r"module 'twice' has a backward hook \(register_full_backward_hook\)": _backward,
    r"module 'twice' has a backward hook": _old_backward,
    r"module 'Tied' has a backward hook \(register_full_backward_pre_hook\)": _pre_backward,
}


def _raised(result):
    assert result.status == "failed"
    assert isinstance(result.error, TaskError)
    return str(result.error)


@pytest.mark.parametrize("message", HOOKS)
def test_hooks_on_gradients_are_refused_before_training(message):
    def model():
        module = Tied()
        HOOKS[message](module)
        return module

    result = train(short(model=model))
    with pytest.raises(TaskError, match=message + ".*change gradients inside the forward"):
        raise result.error
    assert result.units_run == 0


def test_hooks_that_the_optimizers_factory_registers_are_refused():
    def optimizer(parameters):
        parameters[0].register_post_accumulate_grad_hook(_in_place)
        return torch.optim.SGD(parameters, lr=0.1)

    assert "'0.weight' has a gradient hook" in _raised(train(short(optimizer=optimizer)))


def test_a_hook_for_all_modules_is_refused():
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, inputs, outputs: None)
    try:
        with pytest.raises(TaskError, match="for all modules"):
            refuse_gradient_hooks(mlp())
    finally:
        handle.remove()
    refuse_gradient_hooks(mlp())


def test_other_hooks_are_welcome():
    def model():
        module = mlp()
        module[0].register_forward_hook(lambda module, inputs, output: output * 0.5)
        module[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
        module[2].weight.register_hook(lambda gradient: gradient).remove()
        return module

    assert against_plain(short(model=model), train(short(model=model), num_shards=3)) == []


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.change(self.layer(x))


class AddsParameter(Base):
    def change(self, y):
        self.scale = nn.Parameter(torch.ones(4))
        return y * self.scale


class AddsParameterLater(Base):
    def change(self, y):
        if self.calls == 3:
            self.scale = nn.Parameter(torch.ones(4))
        return y * self.scale if self.calls >= 3 else y


class AddsModule(Base):
    def change(self, y):
        if not hasattr(self, "more"):
            self.more = nn.Linear(4, 4)
        return self.more(y)


class AddsModuleInEvaluation(Base):
    def change(self, y):
        if not self.training:
            self.more = nn.Linear(4, 4)
        return y


class AddsBuffer(Base):
    def change(self, y):
        self.register_buffer("seen", y.detach().mean(0))
        return y - self.seen


class RemovesParameter(Base):
    def change(self, y):
        if self.calls == 2:
            self.layer.bias = None
        return y


class ReplacesParameter(Base):
    def change(self, y):
        if self.calls == 2:
            self.layer.weight = nn.Parameter(self.layer.weight.detach() / 2)
        return y


class Averages(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def change(self, y):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


class ResizesBuffer(Averages):
    def change(self, y):
        self.mean = y.detach()
        return y


class KeepsGraphInBuffer(Averages):
    def change(self, y):
        self.mean = y.mean(0)
        return y


class RetypesBuffer(Averages):
    def change(self, y):
        self.mean = self.mean.double()
        return y


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (AddsParameter, "adds its parameter 'scale', .*; make it in __init__, or run one batch"),
        (AddsParameterLater, "adds its parameter 'scale'"),
        (AddsModule, "adds its parameter 'more.bias'"),
        (AddsModuleInEvaluation, "adds its parameter 'more.bias'"),
        (AddsBuffer, "adds its buffer 'seen'"),
        (RemovesParameter, "removes its parameter 'layer.bias'"),
        (ReplacesParameter, r"replaces its parameter 'layer.weight' by another tensor; .* in place, e\.g\. by copy_"),
        (ResizesBuffer, r"replaces its buffer 'mean' by another tensor of shape \(8, 4\) instead of \(4,\)"),
        (KeepsGraphInBuffer, "replaces its buffer 'mean' by another tensor that requires gradients"),
        (RetypesBuffer, r"replaces its buffer 'mean' by another tensor of torch\.float64 instead of torch\.float32"),
    ],
)
def test_a_forward_that_changes_what_the_state_is_is_refused(model, message):
    result = train(task(model=model, validate=SAMPLES), num_shards=2)
    with pytest.raises(TaskError, match=message):
        raise result.error


@pytest.mark.parametrize("model", [AddsParameter, AddsModule, AddsBuffer])
def test_state_that_the_first_batch_adds_is_refused_before_training(model):
    with running() as pool:
        result = pool.submit(short(model=model)).result(PATIENCE_SECONDS)
        assert "make it in __init__" in _raised(result)
        assert pool.stats().units_run == 0


def test_a_lazy_module_that_has_seen_a_batch_trains():
    def model():
        module = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(4))
        module(X[:2])
        return module

    assert against_plain(task(model=model), train(task(model=model), num_shards=2)) == []


@pytest.mark.parametrize("cut", [1, 2])
def test_a_buffer_that_is_replaced_is_exact(cut):
    described = task(model=Averages, validate=SAMPLES)
    assert against_plain(described, train(described, num_shards=cut)) == []


@pytest.mark.cases(1 / 3)
def test_a_buffer_that_is_replaced_stays_on_the_ledger():
    class Large(Averages):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(10_000, 4))

        def change(self, y):
            return super().change(y.repeat(1250, 1))[:8]

    tracker = StorageTracker()
    with running(instrument=tracker) as pool:
        stream = pool.events()
        job = pool.submit(short(model=Large), events=stream)
        event = stream.get(PATIENCE_SECONDS)
        assert isinstance(event, Reported)
        gc.collect()
        assert 160_000 < tracker.current_bytes <= pool.stats().devices["cpu:0"].resident_bytes
        job.cancel()


class LossInTraining(nn.Module):
    """Other outputs in training and in evaluation, as models of some libraries have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x, y):
        output = self.layers(x)
        return {"loss": functional.cross_entropy(output, y), "logits": output} if self.training else output


def _accuracy(module, batch):
    return {"acc": (module(*batch).argmax(1) == batch[1]).float().mean()}


@pytest.mark.parametrize("cut", [1, 3])
def test_a_model_may_return_something_else_in_evaluation(cut):
    described = task(
        model=LossInTraining,
        step=lambda module, batch: module(*batch)["loss"],
        loss=None,
        validate=SAMPLES,
        evaluate=_accuracy,
        metric="val_acc",
    )
    assert against_plain(described, train(described, num_shards=cut)) == []


def _any_step(module, batch):
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch[:2]
    weight = None if isinstance(batch, dict) or len(batch) == 2 else batch[2]
    loss = functional.cross_entropy(module(x), y, reduction="none")
    return (loss if weight is None else loss * weight).mean()


@pytest.mark.cases(1)
@pytest.mark.parametrize("cut", [1, 3])
def test_batches_may_change_their_structure(cut):
    batches = [
        (X[:8], Y[:8]),
        {"x": X[8:16], "y": Y[8:16]},
        (X[:8], Y[:8], torch.linspace(0, 1, 8)),
        (X[:8], Y[:8], None),
        [X[8:16], Y[8:16]],
        (X[:5], Y[:5], 0.5),
        (X[:5], Y[:5], 0.25),
        {"y": Y[:8], "x": X[:8]},
    ]
    described = task(train=lambda: batches, step=_any_step, loss=None)
    assert against_plain(described, train(described, num_shards=cut)) == []


def test_a_batch_that_is_no_pair_any_more_is_named():
    result = train(short(train=lambda: [(X, Y), {"x": X, "y": Y}]))
    assert "needs batches (input, target), got dict; give step= instead" in _raised(result)
