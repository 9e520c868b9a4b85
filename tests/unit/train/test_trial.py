"""What a trial computes is what the plain loop computes, or it is refused: nothing in between.

Each case here has a trait that an engine can get wrong without an error.
"""

import gc
from collections import UserDict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import autograd, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

from hydra_tune import HydraExecutor, TrainTask
from hydra_tune.errors import HydraTuneError, MetricError, TaskError
from hydra_tune.pool.runtime import settings
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.train.loop import plan_cache as plans_module
from hydra_tune.train.state.model_state import ModelState
from tests.support.stand_in_gpu import StandInGpu
from tests.unit.pool.tasks import PATIENCE_SECONDS, SAMPLES, X, Y, against_plain, mlp, running, short, task, train


class Normalized(nn.Module):
    """BatchNorm, dropout, a layer that is never used and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.frozen(self.drop(self.norm(self.first(x)).relu())))


class Tied(nn.Module):
    """One weight in two layers, both used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.head(self.two(self.one(self.two(self.one(x)).relu()).relu()))


class AveragedCodes(nn.Module):
    """A buffer that follows the activations, updated without gradients as vector quantizers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("code", torch.zeros(8))

    def forward(self, x):
        hidden = self.first(x)
        if self.training:
            with torch.no_grad():
                self.code.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return self.head(hidden - self.code.clone())


class Encoder(nn.Module):
    """Torch has a kernel of its own for this in evaluation, which rounds differently."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layers(x.view(-1, 1, 8).repeat(1, 3, 1)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells, self.head = kind(4, 8, 2, batch_first=True, dropout=0.2), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.cells(x.view(-1, 2, 4))[0][:, -1])


class FollowsValues(Normalized):
    """No graph can be captured, so the model runs whole."""

    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


class CountsPasses(Normalized):
    """Its outputs grow with the calls of `train`, which a plain loop makes where a pass begins or an evaluation ends."""

    passes = 0

    def train(self, mode=True):
        self.passes += 1
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) * self.passes


class Merges(nn.Module):
    """A low-rank adapter that is added to its weight for evaluation, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.down, self.up = nn.Linear(8, 4), nn.Linear(8, 2), nn.Linear(2, 4)
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode is self.merged:
            with torch.no_grad():
                self.layer.weight.add_(self.up.weight @ self.down.weight, alpha=-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x):
        x = x if x.sum() > 0 else -x
        return self.layer(x) if self.merged else self.layer(x) + self.up(self.down(x))


class Stream(IterableDataset[Any]):
    """Unknown length, and drawn from the trial's own random stream."""

    def __iter__(self):
        return ((X[i] + torch.rand(()), Y[i]) for i in range(21))


class LeakyMomentum(torch.optim.Optimizer):
    """Makes new state tensors at every step, as simple optimizers do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(p)) + p.grad
                    p.sub_(group["lr"] * state["momentum"])


class HandsStateOn(torch.optim.Optimizer):
    """Keeps the last three gradients, and hands each tensor on to the next key; the third key comes later."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "older" in state:
                state["oldest"] = state["older"]
            state["older"] = state.get("last", torch.zeros_like(p))
            state["last"] = p.grad.clone()
            p.sub_(state["last"] + 0.5 * state["older"] + state.get("oldest", 0), alpha=self.param_groups[0]["lr"])


class GrowingState(torch.optim.Optimizer):
    """Keeps up to three gradients in one tensor, and then begins anew; also a momentum, in place."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            momentum = state.setdefault("momentum", torch.zeros_like(p))
            momentum.mul_(0.9).add_(p.grad)
            earlier = state.get("gradients", p.grad[None][:0])
            state["gradients"] = torch.cat([earlier if len(earlier) < 3 else earlier[:0], p.grad[None]])
            p.sub_(momentum + state["gradients"].mean(0), alpha=self.param_groups[0]["lr"])


class CountsSteps(torch.optim.SGD):
    """Keeps a count in its group: stepping it once a shard counts too often."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= 0.9
        return super().step(closure)


class CountsInAnAttribute(torch.optim.SGD):
    """Shrinks the parameters at every tenth step, by a count of its own."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        loss = super().step(closure)
        if self.count % 10 == 0:
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.mul_(0.5)
        return loss


class CountsInPlace(torch.optim.SGD):
    """Slows down, by a count in an object that a shallow copy of the optimizer shares."""

    def __init__(self, params, lr, *, as_tensor):
        super().__init__(params, lr=lr)
        self.counts = [torch.zeros(())] if as_tensor else {"steps": 0}
        self.as_tensor = as_tensor

    def step(self, closure=None):
        if self.as_tensor:
            self.counts[0] += 1
        else:
            self.counts["steps"] += 1
        count = float(self.counts[0] if self.as_tensor else self.counts["steps"])
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / count)


class KeepsViews(torch.optim.SGD):
    """Keeps two moments as views of one tensor."""

    def step(self, closure=None):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["both"] = torch.zeros(2, *p.shape)
                        state["first"], state["second"] = state["both"]
                    state["both"].mul_(0.9)
                    state["first"].add_(p.grad, alpha=0.1)
                    state["second"].addcmul_(p.grad, p.grad, value=0.1)
                    p.addcdiv_(state["first"], state["second"].sqrt() + 1e-3, value=-0.1)


class KeepsItsStart(torch.optim.SGD):
    """Pulls each parameter to an alias of the parameter."""

    def step(self, closure=None):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    start = self.state[p].setdefault("start", p.data)
                    p.sub_(p.grad + 0.5 * (p - start), alpha=0.1)


class DrawsFromItsGenerator(torch.optim.SGD):
    """Adds noise from a generator of its own."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.generator = torch.Generator().manual_seed(3)

    def step(self, closure=None):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.add_(torch.randn(p.shape, generator=self.generator), alpha=0.01)
        return super().step(closure)


def _own_step(parameters):
    """An optimizer whose `step` is replaced on the object, to clip all gradients together."""
    parameters = list(parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    step = optimizer.step

    def clipping(closure=None):
        nn.utils.clip_grad_norm_(parameters, 0.01)
        return step(closure)

    optimizer.step = clipping
    return optimizer


class ZerosGradients(torch.optim.SGD):
    """Zeros instead of None, so a parameter without a gradient in a step decays all the same."""

    def zero_grad(self, set_to_none=False):
        super().zero_grad(set_to_none=set_to_none)


class Wraps(torch.optim.Optimizer):
    """Leaves all work to other optimizers, as wrappers and chains of optimizers do."""

    def __init__(self, *inner):
        self.inner = list(inner)
        super().__init__([group for each in inner for group in each.param_groups], {})

    def step(self, closure=None):
        for each in self.inner:
            each.step()


class Stepwise(torch.optim.Optimizer):
    """Plain steps, before which a derived class may do something with all gradients."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def before(self, parameters):
        pass

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.before(parameters)
        for p in parameters:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


def _norm(parameters):
    return torch.stack([p.grad.norm() for p in parameters]).norm()


class ClipsLargeGradients(Stepwise):
    """Clips the norm of all gradients where it is above a bound."""

    def before(self, parameters):
        if (norm := _norm(parameters)) > 30:
            for p in parameters:
                p.grad.mul_(30 / norm)


class LeavesOutLargeGradients(Stepwise):
    """Takes no step of a norm between the largest of a parameter and that of all."""

    def before(self, parameters):
        if _norm(parameters) > 12:
            parameters.clear()


class NormalizesLater(Stepwise):
    """Divides by the norm of all gradients from the fourth step of a parameter on."""

    def before(self, parameters):
        norm = _norm(parameters)
        for p in parameters:
            self.state[p]["step"] = self.state[p].get("step", 0) + 1
            if self.state[p]["step"] > 3:
                p.grad.div_(norm)


class LooksAhead(Stepwise):
    """Averages weights every fifth step, by a count that lies beside the state of the parameters."""

    def before(self, parameters):
        self.state["steps"] = self.state.get("steps", 0) + 1
        for p in parameters:
            slow = self.state[p].setdefault("slow", p.clone())
            if self.state["steps"] % 5 == 0:
                p.copy_(slow.lerp_(p, 0.5))


class WarmsUp(torch.optim.SGD):
    """Warms up by a count in an object of its own."""

    def __init__(self, params, lr, count=None):
        super().__init__(params, lr=lr)
        self.count = count or SimpleNamespace(steps=0)

    def step(self, closure=None):
        self.count.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 * min(1, self.count.steps / 10)
        return super().step(closure)


class CoolsDown(torch.optim.SGD):
    """Lowers its rate where gradients are zeroed."""

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            group["lr"] *= 0.9


class CoolsByGradients(torch.optim.SGD):
    """Lowers its rate by the gradients where they are zeroed."""

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            group["lr"] /= 1 + sum(float(p.grad.norm()) for p in group["params"] if p.grad is not None)
        super().zero_grad(set_to_none)


class ClampsDecorated(torch.optim.SGD):
    """Bounds the weights where gradients are zeroed, in a function that a decorator hides."""

    @torch.no_grad()
    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for p in group["params"]:
                p.clamp_(-0.2, 0.2)


class HasNoRate(torch.optim.Optimizer):
    """Takes its rate from the step of each parameter where none is given."""

    def __init__(self, params, lr=None) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    entries = self.state[p]
                    entries["step"] = entries.get("step", 0) + 1
                    p.add_(p.grad, alpha=-(group["lr"] or 0.1 / entries["step"]))


class KeepsColumns(torch.optim.SGD):
    """Keeps two averages in one tensor, as columns that have no byte in common."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    entries = self.state[p]
                    if not entries:
                        both = p.new_zeros(*p.shape, 2)
                        entries["fast"], entries["slow"] = both[..., 0], both[..., 1]
                    entries["fast"].lerp_(p.grad, 0.5)
                    entries["slow"].lerp_(p.grad, 0.1)
                    p.sub_(0.1 * (entries["fast"] + entries["slow"]))


def _tells_its_count():
    """A task whose optimizer and whose `after_step` reach one count."""
    count, seen = SimpleNamespace(steps=0), []
    optimizer = lambda parameters: WarmsUp(parameters, lr=0.1, count=count)  # noqa: E731
    return task(optimizer=optimizer, after_step=lambda *_: seen.append(count.steps))


def _steps_beside():
    """A task whose `after_step` trains the scale by an optimizer of its own."""
    others = []

    def after_step(module, optimizer, step):
        if not others:
            others.append(torch.optim.SGD([module.scale], lr=0.1))
        others[0].step()
        others[0].zero_grad()

    return task(model=Scaled, param_groups=_without_scale, after_step=after_step)


def _penalty(module, batch):
    x = batch[0].clone().requires_grad_()
    logits = module(x)
    (slope,) = autograd.grad(logits.sum(), x, create_graph=module.training)
    return functional.cross_entropy(logits, batch[1]) + 0.01 * slope.square().mean()


class ClampsAfterSteps(torch.optim.SGD):
    """Bounds the weights where gradients are zeroed."""

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.2, 0.2)


class Scaled(nn.Module):
    """A scale that code of the user's may train."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = mlp(), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.net(x) * self.scale


class FollowsItsGradient(Scaled):
    """Reads the gradient that earlier batches have left."""

    def forward(self, x):
        return super().forward(x) * (1.0 if self.scale.grad is None else 1.5)


def _without_scale(module):
    return list(module.net.parameters())


def _train_scale(module, optimizer, step):
    with torch.no_grad():
        if module.scale.grad is not None:
            module.scale -= 0.1 * module.scale.grad


class TwoNames(nn.Module):
    """A buffer with two names, replaced under the first."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("centre", self.mean)

    def forward(self, x):
        y = self.net(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.centre


class BothNames(TwoNames):
    def forward(self, x):
        y = self.net(x)
        self.mean = self.centre = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.centre


class TwoHeads(nn.Module):
    """One head for each kind of batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x, head):
        return self.heads[head](self.body(x).relu())


class ClipsInside(torch.optim.SGD):
    """Couples all gradients."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


def _decay(module):
    return [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.5},
        {"params": [p for p in module.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def _by_turns():
    return [(X[i : i + 6], Y[i : i + 6], number % 2) for number, i in enumerate(range(0, 24, 6))]


def _head_step(module, batch):
    return functional.cross_entropy(module(batch[0], batch[2]), batch[1])


def _heads(**changes):
    return task(model=TwoHeads, train=_by_turns, step=_head_step, loss=None, **changes)


_zeros = partial(ZerosGradients, lr=0.1, momentum=0.9, weight_decay=0.1)


def _slices():
    """Batches that are views of one tensor, at odd offsets."""
    flat = X.flatten()[5 : 5 + 160].view(20, 8)
    return [(flat[i : i + 5], Y[i : i + 5]) for i in range(0, 20, 5)]


def _strided():
    return [(X.t().contiguous().t(), Y), (X.flip(0)[::2], Y[::2]), (X[:1].expand(6, 8), Y[:6])]


def _nested():
    return [{"in": (X[i : i + 7], 3), "y": Y[i : i + 7], "scale": 0.5} for i in range(0, 24, 7)]


class Encoding(UserDict):
    """Items are attributes too, as in a tokenizer's result."""

    def __getattr__(self, name):
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


class Items(dict):
    """The same in short; no attribute is looked up without a KeyError."""

    __getattr__ = dict.__getitem__

    def __deepcopy__(self, memo):
        return Items({key: value.clone() for key, value in self.items()})


def _attribute_step(module, batch):
    return functional.cross_entropy(module(batch.inputs), batch.labels)


def _encoded(kind):
    return [kind(inputs=X[i : i + 6], labels=Y[i : i + 6]) for i in range(0, 24, 6)]


def _nested_step(module, batch):
    return functional.cross_entropy(module(batch["in"][0]), batch["y"]) * batch["scale"]


def _with_numpy(module, batch):
    output = module(batch[0])
    return {"loss": functional.cross_entropy(output, batch[1]).item(), "mean": float(output.numpy().mean())}


def _named_twice(module, batch):
    loss = functional.cross_entropy(module(batch[0]), batch[1])
    return {"loss": loss, "ce": loss}


def _leaves_evaluation_mode(module, batch):
    loss = functional.cross_entropy(module(batch[0]), batch[1])
    module.eval()
    return loss


O = torch.optim  # noqa: E741
CASES: dict[str, TrainTask] = {
    "weight decay by group": task(param_groups=_decay),
    "one cycle": task(
        optimizer=partial(O.SGD, lr=0.1, momentum=0.9),
        scheduler=partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=6),
        scheduler_interval="step",
    ),
    "plateau": task(scheduler=partial(lr_scheduler.ReduceLROnPlateau, patience=0), validate=SAMPLES, epochs=3),
    "amsgrad": task(optimizer=partial(O.Adam, lr=0.01, amsgrad=True)),
    "foreach": task(optimizer=partial(O.AdamW, foreach=True)),
    "fused": task(optimizer=partial(O.AdamW, fused=True)),
    "adagrad": task(optimizer=O.Adagrad),
    "tensor rate": task(optimizer=partial(O.Adam, lr=torch.tensor(0.01))),
    "new state every step": task(optimizer=partial(LeakyMomentum, lr=0.01)),
    "batch norm, dropout, frozen, unused": task(model=Normalized, validate=SAMPLES),
    "tied": task(model=Tied),
    "buffer written without gradients": task(model=AveragedCodes, validate=SAMPLES),
    "spectral norm": task(
        model=lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 4))
    ),
    "a chain of optimizers": task(
        optimizer=lambda parameters: Wraps(O.SGD(parameters[:3], lr=0.1, momentum=0.9), O.AdamW(parameters[3:]))
    ),
    "zeros for gradients": task(optimizer=_zeros),
    "zeros for gradients, heads in one step": _heads(optimizer=_zeros, accumulate=2),
    "transformer encoder": task(model=Encoder, validate=SAMPLES),
    "gru": task(model=partial(Recurrent, nn.GRU), validate=SAMPLES),
    "lstm": task(model=partial(Recurrent, nn.LSTM), validate=SAMPLES),
    "float64": task(model=lambda: mlp().double(), train=lambda: [(X.double(), Y)]),
    "slices": task(train=_slices),
    "strided": task(train=_strided),
    "nested": task(train=_nested, step=_nested_step, loss=None),
    "attributes of a mapping": task(train=partial(_encoded, Encoding), step=_attribute_step, loss=None),
    "attributes of a mapping, whole": task(
        model=FollowsValues, train=partial(_encoded, Encoding), step=_attribute_step, loss=None
    ),
    "attributes of a dict, split": task(
        train=partial(_encoded, Items), step=_attribute_step, loss=None, split_batches=2
    ),
    "iterable": task(train=Stream(), batch_size=4, report_every=3, validate=SAMPLES),
    "shuffled loader": task(train=DataLoader(SAMPLES, 5, shuffle=True)),
    "left in evaluation mode": task(
        model=Normalized, step=_leaves_evaluation_mode, loss=None, validate=SAMPLES, report_every=2
    ),
    "left in evaluation mode, whole": task(
        model=FollowsValues, step=_leaves_evaluation_mode, loss=None, validate=SAMPLES
    ),
    "train() counts": task(model=CountsPasses, validate=SAMPLES, report_every=2),
    "train() writes weights": task(model=Merges, validate=SAMPLES, report_every=2),
    "evaluation with numpy": task(validate=SAMPLES, evaluate=_with_numpy),
    "one value under two names": task(validate=SAMPLES, evaluate=_named_twice),
    "state from key to key": task(optimizer=partial(HandsStateOn, lr=0.1)),
    "state of changing shape": task(optimizer=partial(GrowingState, lr=0.1), epochs=3),
}


# Whole, every fourth in every run: with one shard there is less to get wrong.
@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("name", "cut"),
    [
        pytest.param(name, cut, marks=[pytest.mark.slow] * (cut == 1 and number % 4 > 0))
        for number, name in enumerate(CASES)
        for cut in (1, 3)
    ],
)
def test_equals_the_plain_loop(name, cut):
    assert against_plain(CASES[name], train(CASES[name], num_shards=cut, devices="cpu:2")) == []


class Averaging(nn.Module):
    """A loss that follows its values, and gives its buffer other memory each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, outputs, labels):
        loss = functional.cross_entropy(outputs, labels)
        self.average.data = 0.9 * self.average.data + 0.1 * loss.detach()
        return loss * (1 + self.average)


def test_a_loss_that_gives_its_buffer_other_memory_keeps_its_values_after_the_try():
    result = train(task(loss=Averaging()))
    assert against_plain(task(loss=Averaging()), result) == []


def test_state_of_changing_shape_takes_the_room_of_its_present_shape_alone(monkeypatch):
    """Each third step keeps one gradient again."""
    held, adopt = [], ModelState.adopt_optimizer_state

    def adopted(self, *arguments):
        adopt(self, *arguments)
        held.append(self.nbytes)

    monkeypatch.setattr(ModelState, "adopt_optimizer_state", adopted)
    grows = short(optimizer=partial(GrowingState, lr=0.1), epochs=9)
    with running() as pool:
        assert against_plain(grows, *pool.run([grows])) == []
        assert held[0] < held[1] < held[2]
        assert held == held[:3] * 3


def _aliased_parameters():
    module = Tied()
    module.two.weight = nn.Parameter(module.one.weight.data)
    return module


class Counts(nn.Module):
    """Hidden state that no attribute of a plain type shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 4), []

    def forward(self, x):
        self.calls.append(1)
        return self.layer(x) / len(self.calls)


def _scales_the_batch(module, batch):
    batch[0].mul_(0.9)
    return functional.cross_entropy(module(batch[0]), batch[1])


def _large_loss(module, batch):
    return 100 * functional.cross_entropy(module(batch[0]), batch[1])


def _larger_loss(module, batch):
    return 35 * functional.cross_entropy(module(batch[0]), batch[1])


def _few_parameters():
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))


def _own_batches():
    batches = [(X.clone(), Y.clone())]
    return lambda: batches


@pytest.mark.cases(7)
@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: task(model=_aliased_parameters), id="two parameters on one storage"),
        pytest.param(lambda: task(model=Counts), id="a count in a list"),
        pytest.param(lambda: task(optimizer=partial(CountsSteps, lr=0.1)), id="an optimizer that counts its steps"),
        pytest.param(lambda: task(optimizer=partial(ClipsInside, lr=0.1)), id="an optimizer that clips"),
        pytest.param(
            lambda: task(optimizer=lambda parameters: Wraps(CountsInAnAttribute(parameters, lr=0.1)), epochs=3),
            id="a wrapped optimizer that counts",
        ),
        pytest.param(
            lambda: task(optimizer=lambda parameters: Wraps(ClipsInside(parameters, lr=0.1))),
            id="a wrapped optimizer that clips",
        ),
        pytest.param(
            lambda: _heads(optimizer=partial(ClipsInside, lr=0.1), accumulate=2),
            id="an optimizer that clips what several kinds of batches train",
        ),
        pytest.param(
            lambda: task(model=_few_parameters, optimizer=partial(CountsInAnAttribute, lr=0.1), epochs=3),
            id="an optimizer that counts in an attribute",
        ),
        pytest.param(
            lambda: task(optimizer=partial(CountsInPlace, lr=0.1, as_tensor=True)),
            id="an optimizer's tensor that counts",
        ),
        pytest.param(
            lambda: task(optimizer=partial(CountsInPlace, lr=0.1, as_tensor=False)),
            id="an optimizer's dict that counts",
        ),
        pytest.param(lambda: task(optimizer=partial(KeepsViews, lr=0.1)), id="an optimizer that keeps views"),
        pytest.param(lambda: task(optimizer=partial(KeepsItsStart, lr=0.1)), id="an optimizer that keeps an alias"),
        pytest.param(
            lambda: task(optimizer=partial(DrawsFromItsGenerator, lr=0.1)), id="an optimizer with its own generator"
        ),
        pytest.param(
            lambda: _heads(optimizer=_zeros),
            id="an optimizer that zeros gradients",
        ),
        pytest.param(
            lambda: task(optimizer=partial(ClipsLargeGradients, lr=1e-3), step=_large_loss, loss=None),
            id="an optimizer that clips large gradients",
        ),
        pytest.param(
            lambda: task(optimizer=partial(LeavesOutLargeGradients, lr=1e-3), step=_larger_loss, loss=None),
            id="an optimizer that leaves out large gradients",
        ),
        pytest.param(
            lambda: task(optimizer=NormalizesLater, epochs=3), id="an optimizer that couples parameters later"
        ),
        pytest.param(lambda: task(optimizer=LooksAhead, epochs=3), id="an optimizer that counts beside its state"),
        pytest.param(lambda: task(optimizer=partial(WarmsUp, lr=0.1)), id="an optimizer's object that counts"),
        pytest.param(lambda: task(optimizer=partial(CoolsDown, lr=0.1)), id="a zero_grad that counts"),
        pytest.param(lambda: task(optimizer=partial(ClampsAfterSteps, lr=0.1)), id="a zero_grad that writes weights"),
        pytest.param(lambda: task(optimizer=partial(ClampsDecorated, lr=0.1)), id="a decorated zero_grad"),
        pytest.param(lambda: task(optimizer=partial(CoolsByGradients, lr=0.1)), id="a zero_grad that reads gradients"),
        pytest.param(_tells_its_count, id="an optimizer's count that after_step reads"),
        pytest.param(_steps_beside, id="an optimizer of after_step"),
        pytest.param(
            lambda: task(model=Scaled, param_groups=_without_scale, after_step=_train_scale),
            id="an after_step that trains a parameter",
        ),
        pytest.param(
            lambda: task(model=FollowsItsGradient, accumulate=2), id="a forward that reads gradients of earlier batches"
        ),
        pytest.param(lambda: task(model=TwoNames), id="a buffer with two names that come apart"),
        pytest.param(lambda: task(optimizer=_own_step), id="an optimizer whose step is replaced"),
        pytest.param(
            lambda: task(train=_own_batches(), step=_scales_the_batch, loss=None), id="a batch that is changed"
        ),
    ],
)
def test_what_is_hard_is_exact_or_refused_with_a_reason(make, cut):
    try:
        result = train(make(), num_shards=cut)
        if result.error is not None:
            raise result.error
    except HydraTuneError:
        return
    described = make()
    # a task whose batches are changed in place is made anew for each run
    result = train(described, num_shards=cut)
    assert against_plain(make(), result) == []


class MovingDevice(StandInGpu):
    """Moves the state of a trial that runs as it is into memory of its own, as GPUs do."""

    keeps_tensors = False


@pytest.mark.parametrize(
    ("optimizer", "is_refused"), [(KeepsViews, True), (KeepsItsStart, True), (torch.optim.AdamW, False)]
)
def test_state_that_shares_memory_is_refused_where_a_whole_trial_moves(optimizer, is_refused, monkeypatch):
    monkeypatch.setattr(settings, "open_devices", lambda *_: [MovingDevice(0, 64 << 20)])
    with HydraExecutor("cpu:1") as pool:
        result = pool.submit(task(optimizer=partial(optimizer, lr=0.1))).result(PATIENCE_SECONDS)
    assert ("share memory with each other" in str(result.error)) == is_refused
    assert (result.error is None) != is_refused


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"optimizer": partial(CoolsDown, lr=0.1)}, id="a zero_grad that counts"),
        pytest.param({"optimizer": partial(ClampsAfterSteps, lr=0.1)}, id="a zero_grad that writes weights"),
        pytest.param({"model": FollowsItsGradient}, id="gradients read where a step has one batch"),
        pytest.param({"model": Scaled, "after_step": _train_scale}, id="gradients read where all are zeroed"),
        pytest.param({"model": BothNames}, id="a buffer replaced under both names"),
        pytest.param({"optimizer": HasNoRate}, id="no rate"),
        pytest.param({"optimizer": partial(KeepsColumns, lr=0.1)}, id="state in columns of one tensor"),
        pytest.param({"step": _penalty, "loss": None, "accumulate": 2}, id="a gradient of its own"),
    ],
)
def test_what_is_not_hard_is_not_refused(changes):
    assert against_plain(task(**changes), train(task(**changes), num_shards=3)) == []


def test_gradients_of_no_update_are_refused_by_name():
    described = task(model=Scaled, param_groups=_without_scale, after_step=_train_scale)
    with pytest.raises(TaskError, match=r"_train_scale reads \.grad, and parameter 'scale' has a gradient"):
        raise train(described, num_shards=3).error


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"optimizer": partial(CoolsDown, lr=0.1)}, id="a zero_grad that counts"),
        pytest.param({"model": FollowsItsGradient, "accumulate": 2}, id="gradients of earlier batches"),
        pytest.param({"model": TwoNames}, id="a buffer with two names"),
    ],
)
def test_what_a_group_would_leave_out_runs_as_it_is(changes):
    with running(fusion="on", num_shards=None) as pool:
        jobs = [pool.submit(task(**changes)) for _ in range(2)]
        for job in jobs:
            assert against_plain(task(**changes), job.result(PATIENCE_SECONDS)) == []


def test_the_weights_of_a_loss_module_are_the_trials_own():
    """Two tasks that differ only there must not share a captured graph."""
    tasks = [
        task(loss=nn.CrossEntropyLoss(weight=torch.tensor(weight))) for weight in ([1.0, 1, 1, 1], [9.0, 0.1, 1, 1])
    ]
    with running() as pool:
        for described in tasks:
            assert against_plain(described, pool.submit(described).result(PATIENCE_SECONDS)) == []


_WEIGHT = torch.ones(4)


def _globally_weighted(output, target):
    return functional.cross_entropy(output, target, weight=_WEIGHT)


def test_a_global_tensor_of_the_step_is_read_anew(monkeypatch):
    described = task(loss=_globally_weighted)
    with running() as pool:
        assert against_plain(described, pool.submit(described).result(PATIENCE_SECONDS)) == []
        monkeypatch.setitem(globals(), "_WEIGHT", torch.tensor([9.0, 1, 1, 1]))
        assert against_plain(described, pool.submit(described).result(PATIENCE_SECONDS)) == []


def ragged(layout):
    return torch.nested.nested_tensor([torch.ones(size, 8) for size in (3, 2)], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": lambda: None}, TaskError, "model= must build a torch.nn.Module, but returned NoneType"),
        ({"model": lambda: nn.LazyLinear(4)}, TaskError, "parameter 'weight' is lazy"),
        ({"optimizer": lambda groups: None}, TaskError, "optimizer= must build a torch.optim.Optimizer"),
        ({"optimizer": O.LBFGS}, TaskError, "LBFGS"),
        (
            {"optimizer": lambda groups: O.SGD([*groups, nn.Parameter(torch.ones(7))], lr=0.1)},
            TaskError,
            r"a tensor of shape \(7,\) that is not a parameter",
        ),
        (
            {"loss": lambda output, target: output},
            TaskError,
            r"loss= must return a scalar tensor, not a tensor of shape \(8, 4\)",
        ),
        ({"train": lambda: [torch.randn(2, 8)]}, TaskError, r"needs batches \(input, target\), got Tensor"),
        ({"train": lambda: [{"x": X, "y": Y}]}, TaskError, r"needs batches \(input, target\), got dict"),
        ({"train": list}, TaskError, "train yielded no batch in epoch 0"),
        ({"validate": list}, TaskError, "validate yielded no batch"),
        (
            {"train": lambda: [(X, Y), (X[:0], Y[:0])]},
            TaskError,
            r"train .* 0 samples \(number 1 in epoch 0.*; leave such",
        ),
        (
            {"validate": lambda: [(X[:0], Y[:0])]},
            TaskError,
            r"validate .* 0 samples \(number 0 of the pass.*; leave such",
        ),
        ({"train": lambda: [(ragged(torch.jagged), Y)]}, TaskError, "dense tensors only, .* nested.* pad the tensor"),
        ({"train": lambda: [(ragged(torch.strided), Y)]}, TaskError, "dense tensors only, .* nested.* pad the tensor"),
        (
            {"train": lambda: [(X.to_sparse(), Y)]},
            TaskError,
            r"dense tensors only, .* torch.sparse_coo; give tensor.to_dense\(\)",
        ),
    ],
)
def test_what_cannot_work_is_named(changes, error, message):
    result = train(short(**changes))
    assert result.status == "failed"
    with pytest.raises(error, match=message):
        raise result.error


@pytest.mark.slow
def test_plans_do_not_pile_up_where_each_batch_gives_another_answer(monkeypatch):
    """The model does not fit whole, so that each batch is captured."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, x):
            return self.layers(x) * float(x[0, 0])

    monkeypatch.setattr(plans_module, "_MAX_PLANS", 2)
    found = []

    def batches():
        for row in range(14):
            yield X[row : row + 4].clone(), Y[row : row + 4].clone()
            found.append(sum(type(thing) is ShardPlan for thing in gc.get_objects()))

    tight = task(model=Scaled, train=batches, optimizer=partial(torch.optim.SGD, lr=0.1), epochs=1)
    result = train(tight, devices="cpu:1", device_memory="6KiB")
    assert result.num_shards > 1
    before, *_, after = found
    assert after - before < 10, found  # the library keeps eight
    assert against_plain(tight, result) == []


class Halves:
    """A schedule that is no torch scheduler, and has no state."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


@pytest.mark.parametrize("cut", [None, 2])
def test_a_schedule_without_a_state_trains_where_nothing_is_saved(cut, tmp_path):
    described = task(scheduler=Halves)
    assert against_plain(described, train(described, num_shards=cut)) == []
    refused = train(described, num_shards=cut, checkpoint_dir=tmp_path)
    assert "Halves has no state_dict()" in str(refused.error)


def _by_the_batch(names):
    """An `evaluate=` that cannot be captured, and whose metrics have other places, or names, from batch to batch."""

    def evaluate(module, batch):
        loss = functional.cross_entropy(module(batch[0]), batch[1])
        found = {"loss": loss, names[0]: loss.item(), names[1]: 2 * loss}
        return found if float(batch[0].sum()) > 0 else dict(reversed(found.items()))

    return evaluate


def test_metrics_keep_their_names_where_a_step_returns_them_in_another_order():
    described = task(validate=SAMPLES, evaluate=_by_the_batch(("one", "two")))
    result = train(described, num_shards=3)
    assert against_plain(described, result) == []


def test_metrics_of_other_names_for_another_batch_are_refused_where_a_step_runs_whole():
    def evaluate(module, batch):
        loss = functional.cross_entropy(module(batch[0]), batch[1])
        return {"loss": loss, "positive" if float(batch[0].sum()) > 0 else "negative": loss.item()}

    with pytest.raises(MetricError, match="return the same names for every batch"):
        raise train(task(validate=SAMPLES, evaluate=evaluate), num_shards=3).error
