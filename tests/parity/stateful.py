"""Programs that change their own Python state while they train, each as a function that makes the program anew.

All of a program's state is made, or set back, by that function, so that a plain loop and a pool can each have one. A program
gives its task, and where the state shows elsewhere than in weights and reports, also a function that reads it at the end.
"""

import contextlib
import copy
import functools
import itertools
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from hydra_tune import TrainTask

_STREAM = torch.Generator().manual_seed(7)
X = torch.randn(24, 8, generator=_STREAM)
Y = torch.randint(4, (24,), generator=_STREAM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A task, and what else of it can be seen when it has been trained."""

    task: TrainTask
    seen: Callable[[], Any] = field(default=lambda: None)


PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(make: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[make.__name__] = make
    return make


def net(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4))


def task(**changes: Any) -> TrainTask:
    """A classifier of 24 samples: 3 epochs of 4 steps."""
    arguments: dict[str, Any] = {
        "model": net,
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "train": TensorDataset(X, Y),
        "validate": TensorDataset(X[:10], Y[:10]),
        "batch_size": 6,
        "epochs": 3,
        "seed": 5,
    }
    if "step" not in changes:
        arguments["loss"] = functional.cross_entropy
    else:
        arguments["evaluate"] = accuracy
    arguments |= changes
    if not any(isinstance(arguments[name], Dataset) for name in ("train", "validate")):
        arguments["batch_size"] = None
    return TrainTask(**arguments)


def accuracy(module: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"accuracy": (module(batch[0]).argmax(1) == batch[1]).float().mean(), "loss": error(module, batch)}


def error(module: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(module(batch[0]), batch[1])


def batches(size: int = 6) -> list[tuple[Tensor, Tensor]]:
    return [(X[at : at + size].clone(), Y[at : at + size].clone()) for at in range(0, len(X), size)]


class Held:
    """Gives what it has made to whoever holds it, as a script's variables do."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make
        self.it: Any = None

    def __call__(self, *arguments: Any) -> Any:
        self.it = self.make(*arguments)
        return self.it


class Reads(nn.Module):
    """A small model whose forward a program gives: `(self, inputs) -> outputs`."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **state: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.given = forward
        for name, value in state.items():
            setattr(self, name, value)

    def base(self, inputs: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(inputs)))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.given(self, inputs)


# State outside of the module, changed between epochs or steps


@program
def weight_in_a_closure_annealed_by_the_scheduler() -> Program:
    weight = 0.0

    def rate(epoch: int) -> float:
        nonlocal weight
        weight = 0.5 * epoch
        return 0.9**epoch

    def step(module: nn.Module, batch: Any) -> Tensor:
        return error(module, batch) + weight * module(batch[0]).square().mean()

    return Program(task=task(step=step, scheduler=lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, rate)))


_EPOCH = 0


@program
def a_global_epoch_counter_read_in_step() -> Program:
    global _EPOCH  # noqa: PLW0603 - as scripts do
    _EPOCH = 0

    def train() -> list[Any]:
        global _EPOCH  # noqa: PLW0603
        _EPOCH += 1
        return batches()

    def step(module: nn.Module, batch: Any) -> Tensor:
        return error(module, batch) / _EPOCH

    return Program(task=task(train=train, step=step))


@program
def a_loss_module_that_counts_its_calls() -> Program:
    class Growing(nn.Module):
        calls = 0

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.calls += 1
            return functional.cross_entropy(outputs, targets) * (1 + 0.1 * self.calls)

    loss = Growing()
    return Program(task=task(loss=loss), seen=lambda: loss.calls)


@program
def a_moving_average_in_a_closure() -> Program:
    mean = torch.zeros(4)

    def step(module: nn.Module, batch: Any) -> Tensor:
        nonlocal mean
        outputs = module(batch[0])
        mean = 0.9 * mean + 0.1 * outputs.detach().mean(0)
        return functional.cross_entropy(outputs - mean, batch[1])

    return Program(task=task(step=step), seen=lambda: mean)


@program
def a_moving_average_changed_in_place_in_a_closure() -> Program:
    mean = torch.zeros(4)

    def step(module: nn.Module, batch: Any) -> Tensor:
        outputs = module(batch[0])
        mean.mul_(0.9).add_(outputs.detach().mean(0), alpha=0.1)
        return functional.cross_entropy(outputs - mean.clone(), batch[1])

    return Program(task=task(step=step), seen=lambda: mean)


@program
def a_list_appended_in_evaluate() -> Program:
    seen: list[Tensor] = []

    def evaluate(module: nn.Module, batch: Any) -> dict[str, Any]:
        seen.append(module(batch[0]).argmax(1))
        return {"loss": error(module, batch)}

    return Program(task=task(evaluate=evaluate), seen=lambda: seen)


@program
def a_score_of_all_batches_so_far_in_evaluate() -> Program:
    outputs: list[Tensor] = []
    targets: list[Tensor] = []

    def train() -> list[Any]:
        outputs.clear()
        targets.clear()
        return batches()

    def evaluate(module: nn.Module, batch: Any) -> dict[str, Any]:
        outputs.append(module(batch[0]).softmax(1)[:, 0])
        targets.append(batch[1] == 0)
        scores, wanted = torch.cat(outputs).numpy(), torch.cat(targets).numpy()
        pairs = [(a > b) for a in scores[wanted] for b in scores[~wanted]]
        return {"loss": float(np.mean(pairs)) if pairs else 0.5}

    return Program(task=task(train=train, evaluate=evaluate))


@program
def a_curriculum_by_the_number_of_steps() -> Program:
    steps = 0

    def step(module: nn.Module, batch: Any) -> Tensor:
        nonlocal steps
        steps += 1
        size = min(len(batch[0]), 1 + steps // 2)
        return error(module, (batch[0][:size], batch[1][:size]))

    return Program(task=task(step=step), seen=lambda: steps)


@program
def an_infinite_iterator_of_coefficients() -> Program:
    coefficients = itertools.cycle([1.0, 0.5, 0.25, 0.125, 2.0])

    def step(module: nn.Module, batch: Any) -> Tensor:
        return error(module, batch) * next(coefficients)

    return Program(task=task(step=step))


@program
def a_generator_that_is_sent_losses() -> Program:
    def schedule() -> Iterator[float]:
        scale, last = 1.0, float("inf")
        while True:
            loss = yield scale
            scale = scale * 1.1 if loss < last else scale * 0.8
            last = loss

    running = schedule()
    scale = next(running)

    def step(module: nn.Module, batch: Any) -> Tensor:
        nonlocal scale
        loss = error(module, batch)
        current, scale = scale, running.send(loss.item())
        return loss * current

    return Program(task=task(step=step), seen=lambda: scale)


@program
def an_environment_variable_set_in_each_pass() -> Program:
    os.environ["STATEFUL_SMOOTHING"] = "0"

    def train() -> list[Any]:
        os.environ["STATEFUL_SMOOTHING"] = str(float(os.environ["STATEFUL_SMOOTHING"]) + 0.1)
        return batches()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        smoothing = float(os.environ["STATEFUL_SMOOTHING"])
        return functional.cross_entropy(outputs, targets, label_smoothing=smoothing)

    return Program(task=task(train=train, loss=loss))


@program
def a_counter_local_to_a_thread() -> Program:
    local = threading.local()

    def step(module: nn.Module, batch: Any) -> Tensor:
        local.count = getattr(local, "count", 0) + 1
        return error(module, batch) * (1 + local.count % 3)

    return Program(task=task(step=step, validate=None, evaluate=None))


@program
def a_counter_behind_a_lock() -> Program:
    lock, count = threading.Lock(), itertools.count()

    def step(module: nn.Module, batch: Any) -> Tensor:
        with lock:
            return error(module, batch) * (1 + next(count) % 3)

    return Program(task=task(step=step))


@program
def an_attribute_of_a_class() -> Program:
    class Config:
        power = 1.0

    class Powered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = net()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layers(inputs) * Config.power

    def rate(epoch: int) -> float:
        Config.power = 1.0 + 0.25 * epoch
        return 1.0

    return Program(task=task(model=Powered, scheduler=lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, rate)))


@program
def a_replay_buffer() -> Program:
    kept: deque[tuple[Tensor, Tensor]] = deque(maxlen=3)

    def step(module: nn.Module, batch: Any) -> Tensor:
        loss = error(module, batch)
        if len(kept) == 3:
            loss = loss + 0.5 * error(module, random.choice(kept))
        kept.append((batch[0].clone(), batch[1].clone()))
        return loss

    return Program(task=task(step=step), seen=lambda: list(kept))


@program
def outputs_of_the_last_step_are_kept() -> Program:
    last: dict[str, Tensor] = {}

    def step(module: nn.Module, batch: Any) -> Tensor:
        outputs = module(batch[0])
        loss = functional.cross_entropy(outputs, batch[1])
        if "outputs" in last:
            loss = loss + 0.1 * (outputs - last["outputs"]).square().mean()
        last["outputs"] = outputs.detach()
        return loss

    return Program(task=task(step=step), seen=lambda: last["outputs"])


@program
def hard_samples_are_chosen_by_their_loss() -> Program:
    def step(module: nn.Module, batch: Any) -> Tensor:
        losses = functional.cross_entropy(module(batch[0]), batch[1], reduction="none")
        hard = [number for number, value in enumerate(losses.tolist()) if value > 1.2]
        return losses[hard].mean() if hard else losses.mean()

    return Program(task=task(step=step))


@program
def a_loop_until_the_loss_is_small() -> Program:
    rounds: list[int] = []

    def step(module: nn.Module, batch: Any) -> Tensor:
        inputs, count = batch[0], 0
        loss = error(module, (inputs, batch[1]))
        while loss.item() > 1.0 and count < 4:
            inputs, count = inputs * 1.1, count + 1
            loss = error(module, (inputs, batch[1]))
        rounds.append(count)
        return loss

    return Program(task=task(step=step), seen=lambda: rounds)


@program
def an_exception_that_is_caught() -> Program:
    class TooLargeError(Exception):
        pass

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.caught = net(), 0

        def forward(self, inputs: Tensor) -> Tensor:
            outputs = self.layers(inputs)
            try:
                if outputs.abs().max() > 0.9:
                    raise TooLargeError  # noqa: TRY301
            except TooLargeError:
                self.caught += 1
                outputs = outputs * (0.9 / (1 + self.caught))
            return outputs

    model = Held(Careful)
    return Program(task=task(model=model), seen=lambda: model.it.caught)


@program
def a_temperature_fitted_in_evaluate_and_used_in_step() -> Program:
    state = {"temperature": 1.0}

    def evaluate(module: nn.Module, batch: Any) -> dict[str, Any]:
        outputs = module(batch[0])
        losses = {t: functional.cross_entropy(outputs / t, batch[1]).item() for t in (0.5, 0.8, 1.0, 1.5)}
        state["temperature"] = min(losses, key=lambda t: losses[t])
        return {"loss": losses[state["temperature"]], "temperature": state["temperature"]}

    def step(module: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(module(batch[0]) / state["temperature"], batch[1])

    return Program(task=task(step=step, evaluate=evaluate))


# State in the module's attributes


@program
def an_attribute_set_in_each_pass() -> Program:
    model = Held(lambda: Reads(lambda self, inputs: self.base(inputs) / self.tau, tau=2.0))

    def train() -> list[Any]:
        model.it.tau *= 0.7
        return batches()

    return Program(task=task(model=model, train=train), seen=lambda: model.it.tau)


@program
def dropout_annealed_by_the_scheduler() -> Program:
    model = Held(lambda: net(0.5))

    def rate(epoch: int) -> float:
        model.it[2].p = 0.5 / (1 + epoch)
        return 1.0

    return Program(task=task(model=model, scheduler=lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, rate)))


@program
def a_counter_in_forward() -> Program:
    def forward(self: Any, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.base(inputs) * (1 + self.calls % 5)

    model = Held(lambda: Reads(forward, calls=0))
    return Program(task=task(model=model), seen=lambda: model.it.calls)


@program
def a_schedule_in_a_property() -> Program:
    class Scheduled(Reads):
        seen = 0

        @property
        def gain(self) -> float:
            self.seen += 1
            return 1.0 + self.seen % 4

    model = Held(lambda: Scheduled(lambda self, inputs: self.base(inputs) * self.gain))
    return Program(task=task(model=model), seen=lambda: model.it.seen)


@program
def a_buffer_replaced_by_another_tensor() -> Program:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = net()
            self.register_buffer("centre", torch.zeros(4))

        def forward(self, inputs: Tensor) -> Tensor:
            outputs = self.layers(inputs)
            if self.training:
                self.centre = 0.9 * self.centre + 0.1 * outputs.detach().mean(0)
            return outputs - self.centre

    return Program(task=task(model=Centred))


@program
def a_buffer_that_grows() -> Program:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = net()
            self.register_buffer("norms", torch.zeros(0))

        def forward(self, inputs: Tensor) -> Tensor:
            outputs = self.layers(inputs)
            if self.training:
                self.norms = torch.cat([self.norms, outputs.detach().norm().reshape(1)])
            return outputs / (1 + self.norms.mean())

    return Program(task=task(model=Growing))


@program
def a_memory_bank_in_a_buffer() -> Program:
    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = net()
            self.register_buffer("bank", functional.normalize(torch.randn(8, 4), dim=1))
            self.register_buffer("at", torch.zeros((), dtype=torch.int64))

        def forward(self, inputs: Tensor) -> Tensor:
            outputs = self.layers(inputs)
            if self.training:
                at, rows = int(self.at), functional.normalize(outputs.detach(), dim=1)[:2]
                self.bank[at : at + 2] = rows
                self.at.fill_((at + 2) % 8)
            return outputs + 0.1 * (outputs @ self.bank.clone().T).softmax(1) @ self.bank.clone()

    return Program(task=task(model=Bank))


@program
def a_memory_bank_in_a_plain_attribute() -> Program:
    def forward(self: Any, inputs: Tensor) -> Tensor:
        outputs = self.base(inputs)
        similar = 0.0 if self.bank is None else (outputs @ self.bank.T).softmax(1) @ self.bank
        if self.training:
            rows = outputs.detach()[:2]
            self.bank = rows if self.bank is None else torch.cat([self.bank, rows])[-6:]
        return outputs + 0.1 * similar

    model = Held(lambda: Reads(forward, bank=None))
    return Program(task=task(model=model), seen=lambda: model.it.bank)


@program
def statistics_collected_in_a_list() -> Program:
    def forward(self: Any, inputs: Tensor) -> Tensor:
        outputs = self.base(inputs)
        self.norms.append(float(outputs.detach().norm()))
        return outputs / (1 + sum(self.norms[-3:]))

    model = Held(lambda: Reads(forward, norms=[]))
    return Program(task=task(model=model), seen=lambda: model.it.norms)


@program
def a_tensor_attribute_changed_in_place() -> Program:
    def forward(self: Any, inputs: Tensor) -> Tensor:
        outputs = self.base(inputs)
        if self.training:
            self.scale.mul_(1.05)
        return outputs * self.scale.clone()

    model = Held(lambda: Reads(forward, scale=torch.ones(4)))
    return Program(task=task(model=model), seen=lambda: model.it.scale)


@program
def a_hidden_state_carried_from_batch_to_batch() -> Program:
    class Carried(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(8, 12), nn.Linear(12, 4)
            self.hidden: Tensor | None = None

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = None if self.hidden is None or len(self.hidden) != len(inputs) else self.hidden
            hidden = self.cell(inputs, hidden)
            self.hidden = hidden.detach() if self.training else None
            return self.head(hidden)

    return Program(task=task(model=Carried))


@program
def layer_drop_by_pythons_stream() -> Program:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
            self.head = nn.Linear(8, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            for layer in self.layers:
                if not self.training or random.random() > 0.4:
                    inputs = inputs + torch.tanh(layer(inputs))
            return self.head(inputs)

    return Program(task=task(model=Dropped))


@program
def stochastic_depth_that_grows() -> Program:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
            self.head, self.drop = nn.Linear(8, 4), 0.0

        def forward(self, inputs: Tensor) -> Tensor:
            for layer in self.layers:
                if self.training:
                    self.drop = min(0.6, self.drop + 0.01)
                    if torch.rand(()).item() < self.drop:
                        continue
                inputs = inputs + torch.tanh(layer(inputs))
            return self.head(inputs)

    return Program(task=task(model=Deep))


@program
def noise_of_numpy_in_forward() -> Program:
    def forward(self: Any, inputs: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.standard_normal(inputs.shape)).float()  # noqa: NPY002
        return self.base(inputs + 0.1 * noise) if self.training else self.base(inputs)

    return Program(task=task(model=lambda: Reads(forward)))


@program
def mixup_by_numpys_stream() -> Program:
    def step(module: nn.Module, batch: Any) -> Tensor:
        share = float(np.random.beta(0.4, 0.4))  # noqa: NPY002
        order = torch.randperm(len(batch[0]))
        outputs = module(share * batch[0] + (1 - share) * batch[0][order])
        losses = functional.cross_entropy(outputs, batch[1]), functional.cross_entropy(outputs, batch[1][order])
        return share * losses[0] + (1 - share) * losses[1]

    return Program(task=task(step=step))


@program
def gaussians_of_numpy_and_python_that_are_kept_for_the_next_call() -> Program:
    """Both draw two numbers at once and keep the second."""

    def step(module: nn.Module, batch: Any) -> Tensor:
        scale = 1 + 0.1 * np.random.normal() + 0.1 * random.gauss(0, 1)  # noqa: NPY002
        return error(module, batch) * float(abs(scale))

    return Program(task=task(step=step))


@program
def a_generator_of_its_own_in_the_module() -> Program:
    def forward(self: Any, inputs: Tensor) -> Tensor:
        return self.base(inputs + 0.1 * torch.randn(inputs.shape, generator=self.stream))

    return Program(task=task(model=lambda: Reads(forward, stream=torch.Generator().manual_seed(3))))


@program
def a_function_with_state_in_its_context() -> Program:
    class Clipped(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx: Any, inputs: Tensor) -> Tensor:
            Clipped.calls += 1
            ctx.scale = 1.0 + Clipped.calls % 3
            return inputs.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * ctx.scale

    forward = Clipped.apply
    model = lambda: Reads(lambda self, inputs: forward(self.base(inputs)))  # noqa: E731
    return Program(task=task(model=model), seen=lambda: Clipped.calls)


# The module itself is changed


@program
def layers_unfrozen_after_an_epoch() -> Program:
    def model() -> nn.Module:
        module = net()
        module[0].requires_grad_(False)
        return module

    held, passes = Held(model), itertools.count()

    def train() -> list[Any]:
        if next(passes) == 1:
            held.it[0].requires_grad_(True)
        return batches()

    return Program(task=task(model=held, train=train))


@program
def a_layer_frozen_within_an_epoch() -> Program:
    steps = itertools.count()

    def step(module: nn.Module, batch: Any) -> Tensor:
        if next(steps) == 6:
            module[0].requires_grad_(False)
        return error(module, batch)

    return Program(task=task(step=step))


@program
def a_forward_hook_registered_late() -> Program:
    calls: list[int] = []
    steps = itertools.count()

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        calls.append(1)
        return output * (1 + 0.01 * len(calls))

    def step(module: nn.Module, batch: Any) -> Tensor:
        if next(steps) == 5:
            module[0].register_forward_hook(hook)
        return error(module, batch)

    return Program(task=task(step=step), seen=lambda: len(calls))


@program
def a_hook_that_removes_itself() -> Program:
    steps = itertools.count()

    def step(module: nn.Module, batch: Any) -> Tensor:
        if next(steps) % 4 == 2:

            def once(*arguments: Any) -> Tensor:
                handle.remove()
                return arguments[-1] * 0.5

            handle = module[3].register_forward_hook(once)
        return error(module, batch)

    return Program(task=task(step=step))


@program
def a_forward_patched_later() -> Program:
    steps = itertools.count()

    def patched(self: nn.Linear, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, self.weight.clamp(-0.2, 0.2), self.bias)

    def step(module: nn.Module, batch: Any) -> Tensor:
        if next(steps) == 5:
            module[0].forward = MethodType(patched, module[0])
        return error(module, batch)

    return Program(task=task(step=step))


@program
def an_activation_swapped_later() -> Program:
    steps = itertools.count()

    def step(module: nn.Module, batch: Any) -> Tensor:
        if next(steps) == 5:
            module[1] = nn.SiLU()
        return error(module, batch)

    return Program(task=task(step=step))


@program
def a_layer_exchanged_for_a_copy() -> Program:
    """The optimizer keeps the old one, which is then trained no more: the copy gets gradients that nobody uses."""
    model, passes = Held(net), itertools.count()

    def train() -> list[Any]:
        if next(passes) == 1:
            model.it[3] = copy.deepcopy(model.it[3])
        return batches()

    return Program(task=task(model=model, train=train))


@program
def weights_pruned_later() -> Program:
    model, passes = Held(net), itertools.count()

    def train() -> list[Any]:
        if next(passes) == 1:
            prune.l1_unstructured(model.it[0], "weight", amount=0.4)
        return batches()

    return Program(task=task(model=model, train=train))


@program
def weights_tied_later() -> Program:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
            self.head = nn.Linear(8, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            for layer in self.layers:
                inputs = torch.tanh(layer(inputs))
            return self.head(inputs)

    steps = itertools.count()

    def step(module: Any, batch: Any) -> Tensor:
        if next(steps) == 5:
            module.layers[1].weight = module.layers[0].weight
        return error(module, batch)

    return Program(task=task(model=Pair, step=step))


@program
def weights_clamped_in_step() -> Program:
    def step(module: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.clamp_(-0.3, 0.3)
        return error(module, batch)

    return Program(task=task(step=step))


@program
def weights_set_through_data() -> Program:
    steps = itertools.count()

    def step(module: nn.Module, batch: Any) -> Tensor:
        if next(steps) % 3 == 2:
            module[3].weight.data = module[3].weight.data * 0.9
        return error(module, batch)

    return Program(task=task(step=step))


@program
def a_teacher_averaged_within_the_model() -> Program:
    class Taught(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = net()
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                        slow.lerp_(fast, 0.1)
            return self.student(inputs) + 0.5 * self.teacher(inputs)

    return Program(task=task(model=Taught))


@program
def a_teacher_copied_in_the_middle_of_training() -> Program:
    teachers: list[nn.Module] = []
    steps = itertools.count()

    def step(module: nn.Module, batch: Any) -> Tensor:
        if next(steps) % 4 == 0:
            teachers.append(copy.deepcopy(module).requires_grad_(False))
        outputs = module(batch[0])
        distance = (outputs - teachers[-1](batch[0])).square().mean()
        return functional.cross_entropy(outputs, batch[1]) + 0.3 * distance

    return Program(task=task(step=step), seen=lambda: [dict(teacher.state_dict()) for teacher in teachers])


@program
def an_averaged_model_beside_the_module() -> Program:
    averaged: list[Any] = []

    def step(module: nn.Module, batch: Any) -> Tensor:
        if not averaged:
            averaged.append(torch.optim.swa_utils.AveragedModel(module))
        averaged[0].update_parameters(module)
        with torch.no_grad():
            target = averaged[0](batch[0])
        outputs = module(batch[0])
        return functional.cross_entropy(outputs, batch[1]) + 0.1 * (outputs - target).square().mean()

    return Program(task=task(step=step), seen=lambda: dict(averaged[0].state_dict()))


@program
def a_parameter_made_in_the_first_forward() -> Program:
    """As lazy modules do; the optimizer has a placeholder that is filled in."""

    def model() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(4))

    return Program(task=task(model=model))


@program
def training_mode_changed_in_step() -> Program:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4))

    steps = itertools.count()

    def step(module: nn.Module, batch: Any) -> Tensor:
        if next(steps) >= 4:
            module[1].eval()  # train() at the next epoch's beginning undoes it
        return error(module, batch)

    return Program(task=task(model=model, step=step))


# Gradients and optimizers


@program
def gradient_hooks_that_change_state() -> Program:
    norms: list[float] = []

    def model() -> nn.Module:
        module = net()

        def hook(gradient: Tensor) -> Tensor:
            norms.append(float(gradient.norm()))
            return gradient / (1 + sum(norms[-2:]))

        module[0].weight.register_hook(hook)
        return module

    return Program(task=task(model=model), seen=lambda: norms)


@program
def a_hook_after_gradients_are_accumulated() -> Program:
    counts = {"calls": 0}

    def model() -> nn.Module:
        module = net()

        def hook(parameter: Tensor) -> None:
            counts["calls"] += 1
            assert parameter.grad is not None
            parameter.grad.mul_(1 / (1 + counts["calls"] % 3))

        module[3].weight.register_post_accumulate_grad_hook(hook)
        return module

    return Program(task=task(model=model), seen=lambda: counts["calls"])


@program
def a_backward_hook_of_a_module() -> Program:
    seen: list[float] = []

    def model() -> nn.Module:
        module = net()

        def hook(_module: nn.Module, inputs: Any, outputs: Any) -> tuple[Tensor, ...]:
            seen.append(float(outputs[0].norm()))
            return (inputs[0] * (0.5 + min(1.0, seen[-1])),)

        module[3].register_full_backward_hook(hook)
        return module

    return Program(task=task(model=model), seen=lambda: seen)


@program
def gradients_of_the_last_step_read_in_step() -> Program:
    norms: list[float] = []
    steps = itertools.count()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.1)
        made.register_step_pre_hook(lambda opt, *_: norms.append(float(opt.param_groups[0]["params"][0].grad.norm())))
        return made

    def step(module: nn.Module, batch: Any) -> Tensor:
        return error(module, batch) / (1 + (norms[-1] if next(steps) else 0.0))

    return Program(task=task(step=step, optimizer=optimizer), seen=lambda: norms)


@program
def the_rate_set_within_step() -> Program:
    optimizer = Held(lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    steps = itertools.count(1)

    def step(module: nn.Module, batch: Any) -> Tensor:
        optimizer.it.param_groups[0]["lr"] = 0.05 / next(steps)
        return error(module, batch)

    return Program(task=task(step=step, optimizer=optimizer))


@program
def an_optimizer_with_python_state() -> Program:
    class Sleepy(torch.optim.SGD):
        count = 0

        def step(self, closure: Any = None) -> Any:
            self.count += 1
            if self.count % 3 == 0:
                return None
            return super().step(closure)

    optimizer = Held(lambda parameters: Sleepy(parameters, lr=0.1, momentum=0.5))
    return Program(task=task(optimizer=optimizer), seen=lambda: optimizer.it.count)


@program
def an_optimizer_that_steps_by_turns() -> Program:
    class ByTurns(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})
            self.turn = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            for number, parameter in enumerate(parameters):
                if parameter.grad is not None and number % 2 == self.turn % 2:
                    parameter.sub_(parameter.grad, alpha=0.1)
            self.turn += 1

    return Program(task=task(optimizer=ByTurns))


@program
def a_group_added_to_the_optimizer_later() -> Program:
    optimizer = Held(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    model, passes = Held(net), itertools.count()

    def train() -> list[Any]:
        if next(passes) == 1:
            optimizer.it.add_param_group({"params": list(model.it[0].parameters()), "lr": 0.02})
        return batches()

    groups = lambda module: list(module[3].parameters())  # noqa: E731
    return Program(task=task(model=model, optimizer=optimizer, train=train, param_groups=groups))


@program
def a_scheduler_with_python_state() -> Program:
    class Bouncing(torch.optim.lr_scheduler.LRScheduler):
        bounces = 0

        def get_lr(self) -> list[float]:
            self.bounces += 1
            return [base * (0.5 if self.bounces % 2 else 1.5) for base in self.base_lrs]

    return Program(task=task(scheduler=Bouncing, scheduler_interval="step"))


@program
def weights_looked_ahead_and_taken_back() -> Program:
    """As in Lookahead: slow weights kept outside are moved, and copied back, every third step."""
    slow: list[Tensor] = []
    steps = itertools.count()

    def step(module: nn.Module, batch: Any) -> Tensor:
        if not slow:
            slow.extend(parameter.detach().clone() for parameter in module.parameters())
        elif next(steps) % 3 == 2:
            with torch.no_grad():
                for kept, parameter in zip(slow, module.parameters(), strict=True):
                    kept.lerp_(parameter, 0.5)
                    parameter.copy_(kept)
        return error(module, batch)

    return Program(task=task(step=step), seen=lambda: slow)


# Data


class Ordered(Sampler[int]):
    """An order by the epoch that it is told."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return 24


@program
def a_sampler_told_the_epoch() -> Program:
    sampler, passes = Ordered(), itertools.count()
    loader = DataLoader(TensorDataset(X, Y), 6, sampler=sampler)

    def train() -> Iterator[Any]:
        sampler.set_epoch(next(passes))
        yield from loader

    return Program(task=task(train=train))


@program
def an_iterable_dataset_that_counts() -> Program:
    class Stream(IterableDataset[Any]):
        seen = 0

        def __iter__(self) -> Iterator[Any]:
            for row in range(24):
                self.seen += 1
                yield X[row] * (1 + 0.01 * self.seen), Y[row]

    return Program(task=task(train=Stream()))


@program
def a_dataset_that_augments_more_and_more() -> Program:
    class Stronger(Dataset[Any]):
        def __init__(self) -> None:
            self.strength = 0.0

        def __getitem__(self, index: int) -> Any:
            self.strength += 0.01
            return X[index] + self.strength * torch.rand(8), Y[index]

        def __len__(self) -> int:
            return 24

    data = Stronger()
    return Program(task=task(train=lambda: DataLoader(data, 6, shuffle=True)), seen=lambda: data.strength)


@program
def a_dataset_that_keeps_what_it_has_drawn() -> Program:
    class Cached(Dataset[Any]):
        def __init__(self) -> None:
            self.cache: dict[int, Tensor] = {}

        def __getitem__(self, index: int) -> Any:
            if index not in self.cache:
                self.cache[index] = X[index] + torch.rand(8)
            return self.cache[index], Y[index]

        def __len__(self) -> int:
            return 24

    return Program(task=task(train=Cached()))


@program
def a_collate_function_with_state() -> Program:
    class Longer:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, samples: list[Any]) -> Any:
            self.calls += 1
            inputs, targets = zip(*samples, strict=True)
            return torch.stack(inputs) * (1 + 0.05 * self.calls), torch.stack(targets)

    collate = Longer()
    return Program(
        task=task(train=DataLoader(TensorDataset(X, Y), 6, shuffle=True, collate_fn=collate)),
        seen=lambda: collate.calls,
    )


@program
def batches_changed_in_place_and_used_again() -> Program:
    kept = batches()

    def step(module: nn.Module, batch: Any) -> Tensor:
        loss = error(module, (batch[0].clone(), batch[1]))
        batch[0].mul_(0.9)
        return loss

    return Program(task=task(train=lambda: kept, step=step), seen=lambda: kept)


@program
def targets_corrected_by_the_model() -> Program:
    kept = batches()

    def step(module: nn.Module, batch: Any) -> Tensor:
        outputs = module(batch[0])
        loss = functional.cross_entropy(outputs, batch[1].clone())
        sure = outputs.detach().softmax(1).max(1)
        batch[1][sure.values > 0.5] = sure.indices[sure.values > 0.5]
        return loss

    return Program(task=task(train=lambda: kept, step=step), seen=lambda: kept)


@program
def data_made_by_the_model_in_training() -> Program:
    model = Held(net)

    def train() -> Iterator[Any]:
        for inputs, targets in batches():
            guess = inputs.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(functional.cross_entropy(model.it(guess), targets), guess)
            yield (guess + 0.1 * gradient.sign()).detach(), targets

    return Program(task=task(model=model, train=train))


@program
def batch_sizes_that_follow_the_loss() -> Program:
    state = {"size": 3}

    def train() -> Iterator[Any]:
        at = 0
        while at < 24:
            size = state["size"]
            yield X[at : at + size], Y[at : at + size]
            at += size

    def step(module: nn.Module, batch: Any) -> Tensor:
        loss = error(module, batch)
        state["size"] = 2 + int(loss.item() * 10) % 5
        return loss

    return Program(task=task(train=train, step=step))


# Aliases: other names for the memory of parameters, kept across steps


@program
def a_view_of_numpy_of_a_parameter() -> Program:
    views: list[Any] = []

    def step(module: nn.Module, batch: Any) -> Tensor:
        if not views:
            views.append(module[0].weight.detach().numpy())
        return error(module, batch) * (1 + float(np.abs(views[0]).mean()))

    return Program(task=task(step=step))


@program
def a_parameter_changed_through_a_view_of_numpy() -> Program:
    views: list[Any] = []

    def step(module: nn.Module, batch: Any) -> Tensor:
        if not views:
            views.append(module[0].weight.detach().numpy())
        views[0][:] *= 0.98
        return error(module, batch)

    return Program(task=task(step=step))


@program
def detached_parameters_kept_in_a_list() -> Program:
    """They share the parameter's memory, so that each of them is the present weight."""
    kept: list[Tensor] = []

    def step(module: nn.Module, batch: Any) -> Tensor:
        kept.append(module[3].weight.detach())
        return error(module, batch) + 0.1 * kept[0].norm()

    return Program(task=task(step=step))


@program
def one_flat_view_of_all_parameters() -> Program:
    """As libraries of gradient methods have it: parameters are views of one tensor that the program keeps."""
    kept: list[Tensor] = []

    def model() -> nn.Module:
        module = net()
        flat = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
        at = 0
        for parameter in module.parameters():
            parameter.data = flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        kept.append(flat)
        return module

    def step(module: nn.Module, batch: Any) -> Tensor:
        return error(module, batch) * (1 + float(kept[0].norm()) / 10)

    return Program(task=task(model=model, step=step))


@program
def parameters_that_share_one_storage() -> Program:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            memory = torch.randn(12, 8) * 0.3
            self.first, self.second = nn.Parameter(memory[:8]), nn.Parameter(memory[8:])
            self.whole = [memory]

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.tanh(inputs @ self.first) @ self.second.T / (1 + float(self.whole[0].norm()))

    return Program(task=task(model=Sharing))


@program
def parameters_reached_through_the_optimizer() -> Program:
    optimizer = Held(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))

    def step(module: nn.Module, batch: Any) -> Tensor:
        momenta = [state["momentum_buffer"].norm() for state in optimizer.it.state.values()]
        return error(module, batch) * (1 + 0.1 * float(sum(momenta)))

    return Program(task=task(step=step, optimizer=optimizer))


@program
def weights_kept_and_restored() -> Program:
    """Back to the best weights where the loss has grown."""
    best: dict[str, Any] = {"loss": float("inf")}

    def evaluate(module: nn.Module, batch: Any) -> dict[str, Any]:
        loss = error(module, batch).item()
        if loss < best["loss"]:
            best.update(loss=loss, state=copy.deepcopy(module.state_dict()))
        elif "state" in best:
            module.load_state_dict(best["state"])
        return {"loss": loss}

    return Program(task=task(evaluate=evaluate), seen=lambda: best)


# A step of several parts


@program
def a_discriminator_trained_within_step() -> Program:
    """It has an optimizer of its own that the task knows nothing of."""
    others: dict[str, Any] = {}

    def step(module: nn.Module, batch: Any) -> Tensor:
        if not others:
            others["judge"] = nn.Linear(4, 1)
            others["optimizer"] = torch.optim.Adam(others["judge"].parameters(), lr=0.05)
        outputs = module(batch[0])
        judged = others["judge"](outputs.detach()).mean() - others["judge"](torch.zeros(1, 4)).mean()
        others["optimizer"].zero_grad()
        judged.backward()
        others["optimizer"].step()
        return functional.cross_entropy(outputs, batch[1]) - 0.1 * others["judge"](outputs).mean()

    return Program(task=task(step=step), seen=lambda: dict(others["judge"].state_dict()))


@program
def adversarial_inputs_made_in_step() -> Program:
    def step(module: nn.Module, batch: Any) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(error(module, (inputs, batch[1])), inputs)
        return error(module, ((inputs + 0.1 * gradient.sign()).detach(), batch[1]))

    return Program(task=task(step=step))


@program
def a_penalty_on_the_gradient() -> Program:
    def step(module: nn.Module, batch: Any) -> Tensor:
        loss = error(module, batch)
        gradients = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
        return loss + 0.01 * torch.stack([gradient.square().sum() for gradient in gradients]).sum()

    return Program(task=task(step=step))


@program
def a_context_that_changes_what_modules_do() -> Program:
    state = {"gain": 1.0}

    @contextlib.contextmanager
    def gain(value: float) -> Iterator[None]:
        before, state["gain"] = state["gain"], value
        try:
            yield
        finally:
            state["gain"] = before

    calls = itertools.count()
    model = lambda: Reads(lambda self, inputs: self.base(inputs) * state["gain"])  # noqa: E731

    def step(module: nn.Module, batch: Any) -> Tensor:
        with gain(1 + next(calls) % 3):
            return error(module, batch)

    return Program(task=task(model=model, step=step))


@program
def a_function_cached_by_its_arguments() -> Program:
    calls: list[int] = []

    @functools.lru_cache(maxsize=2)
    def scale(size: int) -> float:
        calls.append(size)
        return 1.0 + 0.1 * len(calls)

    def train() -> Iterator[Any]:
        yield from batches(6)
        yield from batches(5)
        yield from batches(7)

    def step(module: nn.Module, batch: Any) -> Tensor:
        return error(module, batch) * scale(len(batch[0]))

    return Program(task=task(train=train, step=step), seen=lambda: calls)


@program
def a_parameter_of_the_loss_trained_by_the_data() -> Program:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(()))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return torch.exp(-self.scale) * functional.cross_entropy(outputs, targets) + self.scale

    loss = Weighted()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.05)

    def train() -> list[Any]:
        if loss.scale.grad is not None:
            optimizer.step()
            optimizer.zero_grad()
        return batches()

    return Program(task=task(loss=loss, train=train), seen=lambda: (loss.scale.detach(), loss.scale.grad))


@program
def a_seed_set_in_the_step() -> Program:
    count = {"passes": 0}

    def train() -> list[Any]:
        count["passes"] += 1
        return batches()

    def step(module: nn.Module, batch: Any) -> Tensor:
        torch.manual_seed(7)
        inputs, targets = batch
        return functional.cross_entropy(module(inputs + 0.1 * torch.randn_like(inputs)), targets)

    return Program(task=task(step=step, train=train), seen=lambda: count)


@program
def a_batch_that_loses_an_item() -> Program:
    """The data give the same lists in each pass."""
    given = [[inputs, targets, [1.0, 2.0, 3.0]] for inputs, targets in batches()]

    def step(module: nn.Module, batch: Any) -> Tensor:
        inputs, targets, weights = batch
        return functional.cross_entropy(module(inputs), targets) * weights.pop()

    return Program(task=task(step=step, train=lambda: given), seen=lambda: [len(batch[2]) for batch in given])
