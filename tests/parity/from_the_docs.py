"""Training programs as users write them from the documentation, whose Python state changes while they train.

Each function returns the arguments of a `TrainTask`, with state of its own. `plain_loop` takes the same arguments, is written
by hand, and uses nothing of hydra_tune.
"""

import contextvars
import dataclasses
import enum
import functools
import math
import random
import threading
import types
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import cross_entropy, log_softmax, mse_loss, one_hot, softmax
from torch.utils.data import DataLoader, TensorDataset

Parts = dict[str, Any]
PROGRAMS: dict[str, Callable[[float], Parts]] = {}
BATCH = 8
BATCHES = 5
EPOCHS = 4


def program(make: Callable[[float], Parts]) -> Callable[[float], Parts]:
    PROGRAMS[make.__name__] = make
    return make


def plain_loop(
    model: Callable[[], torch.nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    train: Any,
    validate: Any,
    evaluate: Callable[..., dict[str, Any]],
    epochs: int,
    step: Callable[..., torch.Tensor] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    after_step: Callable[..., None] | None = None,
    finish: Callable[..., dict[str, float]] | None = None,
    stop: Callable[[list[dict[str, float]]], bool] | None = None,
    loss_weight: Callable[[Any], int] | None = None,
    accumulate: int = 1,
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train as a user's own script would. The validation set is one batch."""
    torch.manual_seed(0)
    random.seed(0)
    module = model()
    stepper = optimizer(list(module.parameters()))
    rates = None if scheduler is None else scheduler(stepper)
    history: list[dict[str, float]] = []
    steps = 0
    for _ in range(epochs):
        module.train()
        losses, steps_before = [], steps
        batches = iter(train() if callable(train) else train)
        while group := [batch for _, batch in zip(range(accumulate), batches, strict=False)]:
            total = None if loss_weight is None else torch.tensor(sum(loss_weight(batch) for batch in group))
            for batch in group:
                if total is not None:
                    value = step(module, batch, total)
                elif step is not None:
                    value = step(module, batch) / accumulate
                else:
                    value = loss(module(batch[0]), batch[1]) / accumulate
                value.backward()
                losses.append(value.item())
            stepper.step()
            stepper.zero_grad()
            steps += 1
            if after_step is not None:
                after_step(module, stepper, steps)
        module.eval()
        with torch.no_grad():
            (batch,) = validate() if callable(validate) else validate
            metrics = evaluate(module, batch)
        if finish is not None:
            metrics = finish(metrics)
        report = {"train_loss": sum(losses) / (steps - steps_before)}
        history.append(report | {f"val_{name}": float(value) for name, value in metrics.items()})
        if rates is not None:
            rates.step()
        if stop is not None and stop(history):
            break
    return history, module.state_dict()


def data() -> TensorDataset:
    x = torch.randn(BATCH * BATCHES, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return TensorDataset(x, x[:, :3].argmax(1))


def net() -> torch.nn.Module:
    layers = [torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)]
    return torch.nn.Sequential(*layers).double()


def val_loss(module: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    return {"loss": cross_entropy(module(batch[0]), batch[1])}


def parts(lr: float, **others: Any) -> Parts:
    defaults = {
        "model": net,
        "optimizer": functools.partial(torch.optim.SGD, lr=lr, momentum=0.9),
        "train": DataLoader(data(), BATCH, shuffle=True),
        "validate": DataLoader(data(), BATCH * BATCHES),
        "evaluate": val_loss,
        "epochs": EPOCHS,
    }
    return defaults | others


def each_epoch(change: Callable[[int], object]) -> Callable[[torch.optim.Optimizer], Any]:
    """A scheduler whose function of the epoch also changes something else, as many scripts have."""

    def rate(epoch: int) -> float:
        change(epoch)
        return 0.95**epoch

    return functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=rate)


def penalised(weight: Callable[[], Any]) -> Callable[..., torch.Tensor]:
    """A step with an L2 penalty on the outputs, of a weight that changes."""

    def step(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        out = module(batch[0])
        return cross_entropy(out, batch[1]) + weight() * out.square().mean()

    return step


class Curriculum:
    level = 0

    def easiest(self, losses: torch.Tensor) -> torch.Tensor:
        return losses.topk(2 + 2 * self.level, largest=False).values.mean()


@program
def curriculum_object(lr: float) -> Parts:
    curriculum, loader = Curriculum(), DataLoader(data(), BATCH, shuffle=True)

    def train() -> DataLoader:
        curriculum.level = min(curriculum.level + 1, 3)
        return loader

    def step(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        return curriculum.easiest(cross_entropy(module(batch[0]), batch[1], reduction="none"))

    return parts(lr, train=train, step=step)


@dataclasses.dataclass(slots=True)
class Smoothing:
    epoch: int = 0

    @property
    def smoothing(self) -> float:
        return max(0.0, 0.3 - 0.1 * self.epoch)


@program
def smoothing_by_a_dataclass(lr: float) -> Parts:
    settings = Smoothing()

    def step(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(module(batch[0]), batch[1], label_smoothing=settings.smoothing)

    return parts(lr, step=step, scheduler=each_epoch(lambda epoch: setattr(settings, "epoch", epoch)))


@program
def weights_from_a_confusion_matrix(lr: float) -> Parts:
    state = {"confusion": np.ones((3, 3))}

    def step(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        recall = np.diag(state["confusion"]) / state["confusion"].sum(1)
        return cross_entropy(module(batch[0]), batch[1], weight=torch.tensor(1.5 - recall))

    def evaluate(module: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"scores": module(batch[0]), "labels": batch[1]}

    def finish(collected: dict[str, torch.Tensor]) -> dict[str, float]:
        for label, guess in zip(collected["labels"].tolist(), collected["scores"].argmax(1).tolist(), strict=True):
            state["confusion"][label, guess] += 1
        return {"loss": cross_entropy(collected["scores"], collected["labels"]).item()}

    return parts(lr, step=step, evaluate=evaluate, finish=finish)


@program
def teacher_by_moving_average(lr: float) -> Parts:
    torch.manual_seed(3)
    teacher = net().requires_grad_(False)

    def step(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        out = module(batch[0])
        with torch.no_grad():
            wanted = softmax(teacher(batch[0]), 1)
        return cross_entropy(out, batch[1]) + mse_loss(softmax(out, 1), wanted)

    def after_step(module: torch.nn.Module, optimizer: Any, steps: int) -> None:
        with torch.no_grad():
            for mean, new in zip(teacher.parameters(), module.parameters(), strict=True):
                mean.lerp_(new, 0.1)

    return parts(lr, step=step, after_step=after_step)


@program
def focal_gamma_in_a_config(lr: float) -> Parts:
    config = {"loss": {"focal": {"gamma": 0.0}}, "lr": lr}
    loader = DataLoader(data(), BATCH, shuffle=True)

    def train() -> DataLoader:
        config["loss"]["focal"]["gamma"] += 0.5
        return loader

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logs = log_softmax(out, 1).gather(1, target[:, None])
        return -((1 - logs.exp()) ** config["loss"]["focal"]["gamma"] * logs).mean()

    return parts(lr, train=train, loss=loss)


class Mix(enum.Enum):
    OFF = 0.0
    WEAK = 0.2
    STRONG = 1.0


@program
def mixup_by_an_enum(lr: float) -> Parts:
    state = types.SimpleNamespace(mix=Mix.OFF)

    def step(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch[0], one_hot(batch[1], 3).double()
        if state.mix is not Mix.OFF:
            alpha = torch.tensor(state.mix.value, dtype=torch.float64)
            share = torch.distributions.Beta(alpha, alpha).sample()
            order = torch.randperm(len(x))
            x, y = torch.lerp(x[order], x, share), torch.lerp(y[order], y, share)
        return cross_entropy(module(x), y)

    mixes = [Mix.OFF, Mix.WEAK, Mix.STRONG, Mix.OFF]
    return parts(lr, step=step, scheduler=each_epoch(lambda epoch: setattr(state, "mix", mixes[epoch % 4])))


@program
def ramp_by_a_partial(lr: float) -> Parts:
    def ramp(counter: list[int], start: float, end: float) -> float:
        return start + (end - start) * counter[0] / EPOCHS

    counter = [0]

    def stop(history: list[dict[str, float]]) -> bool:
        counter[0] = len(history)
        return False

    return parts(lr, step=penalised(functools.partial(ramp, counter, start=0.0, end=0.5)), stop=stop)


@program
def weights_in_a_deque(lr: float) -> Parts:
    waiting, loader = deque([0.0, 1.0, 0.5, 0.2, 0.1]), DataLoader(data(), BATCH, shuffle=True)

    def train() -> DataLoader:
        waiting.popleft()
        return loader

    return parts(lr, train=train, step=penalised(lambda: waiting[0]))


class Schedule:
    done = 0

    @property
    def temperature(self) -> float:
        return 0.5 + math.exp(-self.done / 7)


@program
def temperature_counted_by_the_collation(lr: float) -> Parts:
    schedule = Schedule()

    def collate(samples: list[Any]) -> Any:
        schedule.done += 1
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])

    def step(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(module(batch[0]) / schedule.temperature, batch[1])

    return parts(lr, train=DataLoader(data(), BATCH, shuffle=True, collate_fn=collate), step=step)


@program
def context_variable(lr: float) -> Parts:
    weight = contextvars.ContextVar("weight", default=0.1)
    loader = DataLoader(data(), BATCH, shuffle=True)

    def train() -> DataLoader:
        weight.set(weight.get() + 0.1)
        return loader

    return parts(lr, train=train, step=penalised(weight.get))


@program
def thread_local(lr: float) -> Parts:
    local, loader = threading.local(), DataLoader(data(), BATCH, shuffle=True)

    def train() -> DataLoader:
        local.weight = getattr(local, "weight", 0.1) + 0.1
        return loader

    return parts(lr, train=train, step=penalised(lambda: local.weight))


@program
def registry_of_losses(lr: float) -> Parts:
    class Losses:
        active = "cross_entropy"
        table: ClassVar[dict[str, Callable[..., torch.Tensor]]] = {}

        @classmethod
        def register(cls, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            cls.table[function.__name__] = function
            return function

        @classmethod
        def compute(cls, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return cls.table[cls.active](out, target)

    Losses.register(cross_entropy)

    @Losses.register
    def brier(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse_loss(softmax(out, 1), one_hot(target, 3).double())

    def switch(epoch: int) -> None:
        Losses.active = "brier" if epoch >= 2 else "cross_entropy"

    return parts(lr, loss=Losses.compute, scheduler=each_epoch(switch))


@program
def scale_by_a_forward_pre_hook(lr: float) -> Parts:
    def count(module: Any, inputs: Any) -> None:
        module.scale = module.scale * 0.97

    def model() -> torch.nn.Module:
        module = Scaled()
        module.register_forward_pre_hook(count)
        return module

    return parts(lr, model=model, loss=cross_entropy)


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.scale


class Residual(torch.nn.Module):
    drop = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 6).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.drop == 0:
            return x + torch.tanh(self.layer(x))
        kept = torch.empty(len(x), 1, dtype=x.dtype).bernoulli_(1 - self.drop) / (1 - self.drop)
        return x + kept * torch.tanh(self.layer(x))


@program
def stochastic_depth(lr: float) -> Parts:
    class Rates:
        epoch = 0

    class Dropped(Residual):
        @property
        def drop(self) -> float:
            return 0.15 * Rates.epoch

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(Dropped(), Dropped(), net())

    return parts(
        lr, model=model, loss=cross_entropy, scheduler=each_epoch(lambda epoch: setattr(Rates, "epoch", epoch))
    )


@program
def depth_written_after_each_step(lr: float) -> Parts:
    def after_step(module: torch.nn.Module, optimizer: Any, steps: int) -> None:
        for block in (module[0], module[1]):
            block.drop = 0.1 * (steps // 4)

    return parts(
        lr, model=lambda: torch.nn.Sequential(Residual(), Residual(), net()), loss=cross_entropy, after_step=after_step
    )


@program
def gradient_penalty(lr: float) -> Parts:
    state = {"weight": 0.0}

    def step(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        out = module(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return cross_entropy(out, batch[1]) + state["weight"] * slope.square().mean()

    return parts(lr, step=step, scheduler=each_epoch(lambda epoch: state.update(weight=0.1 * epoch)))


class Tempered(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("temperature", torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.temperature.mul_(0.95)
        return self.net(x) / self.temperature


@program
def temperature_in_a_buffer(lr: float) -> Parts:
    return parts(lr, model=Tempered, loss=cross_entropy)
