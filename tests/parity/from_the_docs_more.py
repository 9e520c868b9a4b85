"""More programs of `from_the_docs`: data with epochs, callbacks that change weights, objects of several kinds."""

import dataclasses
import functools
import math
import operator
import os
import random
import types
import weakref
from collections import ChainMap
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, log_softmax, nll_loss
from torch.nn.utils import prune
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from tests.parity.from_the_docs import BATCH, BATCHES, PROGRAMS, Parts, data, each_epoch, net, parts, penalised, program

__all__ = ["PROGRAMS"]


class Stream(IterableDataset):
    def __init__(self) -> None:
        self.epoch = 0
        self.samples = list(data())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng(self.epoch).permutation(len(self.samples))
        return iter([self.samples[number] for number in order])


@program
def stream_with_set_epoch(lr: float) -> Parts:
    stream, epochs = Stream(), [0]
    loader = DataLoader(stream, BATCH)

    def train() -> DataLoader:
        epochs[0] += 1
        stream.set_epoch(epochs[0])
        return loader

    return parts(lr, train=train, loss=cross_entropy)


@program
def sampler_with_set_epoch(lr: float) -> Parts:
    samples, epochs = data(), [0]
    sampler = DistributedSampler(samples, num_replicas=1, rank=0, seed=5)
    loader = DataLoader(samples, BATCH, sampler=sampler)

    def train() -> DataLoader:
        epochs[0] += 1
        sampler.set_epoch(epochs[0])
        return loader

    return parts(lr, train=train, loss=cross_entropy)


@program
def sampler_that_counts_its_epochs(lr: float) -> Parts:
    class Rotating(Sampler):
        def __init__(self) -> None:
            self.epoch = 0

        def __len__(self) -> int:
            return BATCH * BATCHES

        def __iter__(self) -> Iterator[int]:
            self.epoch += 1
            return iter([(number * 7 + self.epoch) % len(self) for number in range(len(self))])

    return parts(lr, train=DataLoader(data(), BATCH, sampler=Rotating()), loss=cross_entropy)


@program
def set_epoch_by_the_scheduler(lr: float) -> Parts:
    samples = data()
    sampler = DistributedSampler(samples, num_replicas=1, rank=0, seed=5)
    loader = DataLoader(samples, BATCH, sampler=sampler)
    return parts(lr, train=loader, loss=cross_entropy, scheduler=each_epoch(sampler.set_epoch))


@program
def pruned_later(lr: float) -> Parts:
    def after_step(module: torch.nn.Module, optimizer: Any, steps: int) -> None:
        if steps == 8:
            prune.l1_unstructured(module[2], "weight", 0.5)

    return parts(lr, loss=cross_entropy, after_step=after_step)


@program
def gradual_unfreezing(lr: float) -> Parts:
    def model() -> torch.nn.Module:
        module = net()
        module[0].requires_grad_(False)
        module[2].requires_grad_(False)
        return module

    def after_step(module: torch.nn.Module, optimizer: Any, steps: int) -> None:
        if steps in (6, 12):
            module[2 if steps == 6 else 0].requires_grad_(True)

    return parts(lr, model=model, loss=cross_entropy, after_step=after_step)


@program
def memory_bank(lr: float) -> Parts:
    bank: list[torch.Tensor] = []

    def step(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        out = module(batch[0])
        loss = cross_entropy(out, batch[1])
        if bank:
            loss = loss + 0.1 * (out.mean(0) - torch.stack(bank[-3:]).mean(0)).square().mean()
        bank.append(out.detach().mean(0))
        return loss

    return parts(lr, step=step)


class Patience:
    def __init__(self) -> None:
        self.best, self.bad, self.weight = math.inf, 0, 1.0

    def __call__(self, history: list[dict[str, float]]) -> bool:
        self.weight /= 2
        self.bad = 0 if history[-1]["val_loss"] < self.best - 0.01 else self.bad + 1
        self.best = min(self.best, history[-1]["val_loss"])
        return self.bad >= 2


@program
def patience_that_lowers_a_weight(lr: float) -> Parts:
    patience = Patience()
    return parts(lr, step=penalised(lambda: patience.weight), stop=patience, epochs=8)


@program
def weights_of_batches(lr: float) -> Parts:
    state = types.SimpleNamespace(ignored=-1)

    def counted(batch: Any) -> int:
        return int((batch[1] != state.ignored).sum())

    def step(module: torch.nn.Module, batch: Any, total: torch.Tensor) -> torch.Tensor:
        return cross_entropy(module(batch[0]), batch[1], ignore_index=state.ignored, reduction="sum") / total

    change = each_epoch(lambda epoch: setattr(state, "ignored", [-1, 0, 1, 2][epoch % 4]))
    return parts(lr, step=step, loss_weight=counted, accumulate=2, scheduler=change)


@program
def environment_variable(lr: float) -> Parts:
    name = f"PENALTY_{random.getrandbits(60)}"
    os.environ[name] = "0.1"
    loader = DataLoader(data(), BATCH, shuffle=True)

    def train() -> DataLoader:
        os.environ[name] = str(float(os.environ[name]) * 2)
        return loader

    return parts(lr, train=train, step=penalised(lambda: float(os.environ[name])))


_PENALTIES: dict[int, float] = {}


@program
def dictionary_of_all_trials(lr: float) -> Parts:
    name = random.getrandbits(60)
    _PENALTIES[name] = 0.1
    loader = DataLoader(data(), BATCH, shuffle=True)

    def train() -> DataLoader:
        _PENALTIES[name] *= 2
        return loader

    return parts(lr, train=train, step=penalised(lambda: _PENALTIES[name]))


@program
def noise_of_a_generator(lr: float) -> Parts:
    source = torch.Generator().manual_seed(11)

    def step(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        noise = torch.randn(batch[0].shape, generator=source, dtype=torch.float64)
        return cross_entropy(module(batch[0] + 0.1 * noise), batch[1])

    return parts(lr, step=step)


@program
def penalty_by_the_learning_rate(lr: float) -> Parts:
    kept: list[torch.optim.Optimizer] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        kept.append(torch.optim.SGD(parameters, lr=lr))
        return kept[-1]

    return parts(
        lr,
        optimizer=optimizer,
        step=penalised(lambda: kept[-1].param_groups[0]["lr"]),
        scheduler=each_epoch(lambda epoch: None),
    )


@program
def criterion_module(lr: float) -> Parts:
    criterion = torch.nn.CrossEntropyLoss(weight=torch.ones(3, dtype=torch.float64)).double()

    def change(epoch: int) -> None:
        criterion.label_smoothing = 0.05 * epoch
        criterion.weight = torch.tensor([1.0, 1.0 + epoch, 2.0], dtype=torch.float64)

    return parts(lr, loss=criterion, scheduler=each_epoch(change))


@program
def criterion_whose_buffer_is_written(lr: float) -> Parts:
    criterion = torch.nn.NLLLoss(weight=torch.ones(3, dtype=torch.float64))

    def step(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        return criterion(log_softmax(module(batch[0]), 1), batch[1])

    return parts(lr, step=step, scheduler=each_epoch(lambda epoch: criterion.weight[0].add_(0.2)))


@program
def schedule_of_numpy(lr: float) -> Parts:
    values, epoch = np.linspace(0, 1, 8), -1
    loader = DataLoader(data(), BATCH, shuffle=True)

    def train() -> DataLoader:
        nonlocal epoch
        epoch += 1
        return loader

    return parts(lr, train=train, step=penalised(lambda: values[epoch]))


@program
def layered_config(lr: float) -> Parts:
    overrides: dict[str, float] = {}
    config = types.MappingProxyType(ChainMap(overrides, {"weight": 0.1}))

    def stop(history: list[dict[str, float]]) -> bool:
        overrides["weight"] = history[-1]["val_loss"]
        return False

    return parts(lr, step=penalised(lambda: config["weight"]), stop=stop)


@program
def trainer_by_a_weak_reference(lr: float) -> Parts:
    class Trainer:
        def __init__(self) -> None:
            self.epoch = 0
            self.loader = DataLoader(data(), BATCH, shuffle=True)

        def train(self) -> DataLoader:
            self.epoch += 1
            return self.loader

    class Regulariser:
        def __init__(self, trainer: Trainer) -> None:
            self.trainer = weakref.proxy(trainer)

        def weight(self) -> float:
            return 0.1 * self.trainer.epoch

    trainer = Trainer()
    return parts(lr, train=trainer.train, step=penalised(Regulariser(trainer).weight))


@dataclasses.dataclass(frozen=True)
class Settings:
    weight: float = 0.1
    power: int = 2


@program
def settings_replaced_whole(lr: float) -> Parts:
    holder, pick, loader = [Settings()], operator.itemgetter(0), DataLoader(data(), BATCH, shuffle=True)

    def train() -> DataLoader:
        holder[0] = dataclasses.replace(holder[0], weight=holder[0].weight + 0.1, power=2 + holder[0].power % 4)
        return loader

    def step(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        out = module(batch[0])
        return cross_entropy(out, batch[1]) + pick(holder).weight * (torch.tanh(out) ** pick(holder).power).mean()

    return parts(lr, train=train, step=step)


@program
def dropout_written_after_each_step(lr: float) -> Parts:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.Dropout(0.0), torch.nn.Tanh(), torch.nn.Linear(16, 3)
        ).double()

    def after_step(module: torch.nn.Module, optimizer: Any, steps: int) -> None:
        module[1].p = min(0.5, 0.05 * (steps // 3))

    return parts(lr, model=model, loss=cross_entropy, after_step=after_step)


@program
def dropout_by_the_scheduler(lr: float) -> Parts:
    made: list[torch.nn.Sequential] = []

    def model() -> torch.nn.Module:
        layers = [torch.nn.Linear(6, 16), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(16, 3)]
        made.append(torch.nn.Sequential(*layers).double())
        return made[-1]

    change = each_epoch(lambda epoch: setattr(made[-1][1], "p", 0.1 + 0.1 * epoch))
    return parts(lr, model=model, loss=cross_entropy, scheduler=change)


@program
def cached_schedule(lr: float) -> Parts:
    class Schedule:
        epoch = 0

        @functools.cached_property
        def weight(self) -> float:
            return 0.1 * 2**self.epoch

    schedule = Schedule()

    def advance(epoch: int) -> None:
        schedule.epoch = epoch
        schedule.__dict__.pop("weight", None)

    return parts(lr, step=penalised(lambda: schedule.weight), scheduler=each_epoch(advance))


@program
def weights_of_an_iterator(lr: float) -> Parts:
    values, loader, now = iter([0.1, 0.4, 0.2, 0.3, 0.7]), DataLoader(data(), BATCH, shuffle=True), [0.0]

    def train() -> DataLoader:
        now[0] = next(values)
        return loader

    return parts(lr, train=train, step=penalised(lambda: now[0]))


@program
def best_kept_by_the_evaluation(lr: float) -> Parts:
    state = {"best": 1.0}

    def evaluate(module: torch.nn.Module, batch: Any) -> dict[str, Any]:
        loss = cross_entropy(module(batch[0]), batch[1])
        state["best"] = min(state["best"], loss.item())
        return {"loss": loss}

    return parts(lr, step=penalised(lambda: state["best"]), evaluate=evaluate)


@program
def loss_scaled_by_its_own_average(lr: float) -> Parts:
    state = {"mean": 1.0}

    def step(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = nll_loss(log_softmax(module(batch[0]), 1), batch[1])
        state["mean"] = 0.9 * state["mean"] + 0.1 * loss.item()
        return loss / state["mean"]

    return parts(lr, step=step)


@program
def weights_of_losses_in_the_model(lr: float) -> Parts:
    class Weighted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.weights = {"class": 1.0, "size": 0.0}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    def step(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        out = module(batch[0])
        return module.weights["class"] * cross_entropy(out, batch[1]) + module.weights["size"] * out.square().mean()

    def after_step(module: torch.nn.Module, optimizer: Any, steps: int) -> None:
        module.weights["size"] += 0.05
        module.weights["class"] *= 0.98

    return parts(lr, model=Weighted, step=step, after_step=after_step)


@program
def alpha_of_an_own_scheduler(lr: float) -> Parts:
    class Annealed(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.alpha = 1.0
            super().__init__(optimizer)

        def get_lr(self) -> list[float]:
            self.alpha *= 0.7
            return [group["lr"] * 0.9 for group in self.optimizer.param_groups]

    kept: list[Annealed] = []

    def scheduler(optimizer: torch.optim.Optimizer) -> Annealed:
        kept.append(Annealed(optimizer))
        return kept[-1]

    return parts(lr, scheduler=scheduler, step=penalised(lambda: kept[-1].alpha))
