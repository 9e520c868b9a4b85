"""`train_plain`: the meaning of a `TrainTask`, as the loop anyone would write.

The pool's numbers are compared with this reference, so the module shares with the engine only how model and optimizer
are built, how batches are drawn, cut, weighed and moved, how operators are cut, how a GPU's recurrent dropout is
seeded, how results and errors are told, the handle of a loop (`train/own_loop/handle.py`), and the gate that keeps
computations out while a pool captures. Forward, backward, clipping, update and averages must stay written out here. The
loop runs one task at a time, on the CPU or a given device, with torch's present number of intra-op threads; the pool uses a
single thread. People import `train_plain` from `hydra_tune` to check the pool's numbers, and so do benchmarks, such as
`benchmarks/arms.py`; no module of the package calls `train_plain`.
"""

import importlib.util
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hydra_tune.errors import BadLossError, MetricError, TaskError
from hydra_tune.loop_task import LoopTask
from hydra_tune.shapes_only import refuse_shapes_only
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.operators.operator_splitting import split_operators
from hydra_tune.task import (
    Batch,
    TrainTask,
    backward_called,
    check_reported,
    finished,
    not_a_metric,
    not_collectable,
    not_metrics,
    number_of,
    reported_names,
    returned,
    weighed,
)
from hydra_tune.train.building import build_model, build_optimizer, warn_of_unclipped
from hydra_tune.train.data.handles import in_windows, moved, no_batch, num_samples, refuse_empty
from hydra_tune.train.data.loader_copies import TrialLoaderCopies
from hydra_tune.train.explain import explained
from hydra_tune.train.loop.microbatches import check_pieces, pieces
from hydra_tune.train.own_loop.plain import PlainLoop
from hydra_tune.train.rng.recurrent_dropout import drops_between_layers, seed_anew
from hydra_tune.train.trained import TrainingOutcome

Report = Callable[[int, dict[str, float]], bool | None]
"""Called at each report with the step and the metrics; a result of False prunes the run there."""


@dataclass(slots=True, kw_only=True)
class PlainResult(TrainingOutcome):
    """The outcome of a plain run, read like a pool's `Result`; a pruned run keeps its weights, too.

    `status` is `"pruned"` if a report was answered with False, or a bad loss met `on_bad_loss="prune"`. `error` is
    None: `train_plain` raises errors.

    Attributes:
        losses: the training loss of every batch in order; for a split batch, the mean over its samples; empty for a `LoopTask`.
    """

    losses: list[float] = field(default_factory=list)


def train_plain(task: TrainTask, report: Report | None = None, device: str | torch.device = "cpu") -> PlainResult:
    """Train a task to its end with a plain PyTorch loop.

    The loop draws from the process's own random generators, as any plain loop does. Beside a working pool the loop
    waits while the pool captures a model, because computations of all threads take other kernels meanwhile. Like the
    pool, the loop draws from copies of loaders, samplers and generators, so the same task can be trained again, here
    or in a pool.

    Args:
        task: task to train; the function of a `LoopTask` is called as it is.
        report: called with `(step, metrics)` after each report; returning False prunes. The step is the epoch, from 0,
            or with `report_every=n` the number of optimizer steps done.
        device: device of the module once built, and of each batch once drawn; `"cuda"` gives the
            reference for a pool's numbers on a GPU. The returned module stays there.

    Returns:
        The metrics, the history, every loss, and the module and optimizer's state, as in a pool's `Result`.

    Raises:
        ConfigError: the task's data is `ShapesOnly`.
        TaskError: data without batches, a batch without samples, data that cannot be copied, a loss that is not a
            scalar, or `split_batches="auto"`.
        BadLossError: a training loss that is NaN or infinite, with `on_bad_loss="fail"`.
        MetricError: an evaluation returns values other than scalars, or a metric is not reported.
    """
    try:
        return _train(task, report, torch.device(device))
    except Exception as error:
        explained_error = explained(error)
        if explained_error is error or explained_error is None:
            raise
        raise explained_error from error


def _train(task: TrainTask, report: Report | None, device: torch.device) -> PlainResult:
    refuse_shapes_only(task)
    if isinstance(task, LoopTask):
        return _call(task, report, device)
    if task.split_batches == "auto":
        raise TaskError(
            "only a pool chooses split_batches='auto', by the memory of its devices; give the plain loop the number that a "
            "pool has chosen (Result.split_batches, or hydra-tune plan)"
        )
    # Before the model is built: its initial weights are drawn from the seed as well.
    _seed(task.seed)
    # As in the pool: the factories' code, and optimizers, ask `torch.compiler.is_compiling()`, which captures change.
    with GATE.shared():
        module = build_model(task)
        if device.type != "cpu":
            module = module.to(device)
        groups = list(module.parameters()) if task.param_groups is None else task.param_groups(module)
        # Operators are split as in the pool, because another split rounds differently.
        operators, groups = split_operators(module, groups, task.split_operators)
        optimizer = build_optimizer(task, groups)
        warn_of_unclipped(task, module, optimizer)
        scheduler = None if task.scheduler is None else task.scheduler(optimizer)
        operators.check(optimizer)
    run = _PlainRun(
        task=task,
        module=module,
        optimizer=optimizer,
        scheduler=scheduler,
        report=report,
        device=device,
        scaler=torch.amp.GradScaler(device.type, enabled=task.precision == "float16"),
        drops_between_layers=device.type == "cuda" and drops_between_layers(module),
    )
    try:
        finished = all(run.epoch(epoch) for epoch in range(task.epochs)) or run.is_stopped
    except BadLossError:
        if task.on_bad_loss == "fail":
            raise
        finished = False
    # The user gets whole operators back, as the factory built them.
    operators.restore(optimizer)
    result = PlainResult(
        status="completed" if finished else "pruned", metrics=run.metrics, history=run.history, losses=run.losses
    )
    result.keep(module, optimizer)
    return result


def _call(task: LoopTask, report: Report | None, device: torch.device) -> PlainResult:
    _seed(task.seed)
    loop = PlainLoop(report, device)
    status = loop.run(task)
    result = PlainResult(status=status, metrics=_last_metrics(loop.history), history=loop.history)
    result.keep(loop.module, loop.optimizer)
    return result


def _last_metrics(history: list[dict[str, float]]) -> dict[str, float]:
    return {name: value for name, value in (history or [{}])[-1].items() if name not in ("step", "epoch", "seconds")}


@dataclass(slots=True)
class _SampleWeightedMean:
    """A weighted mean in float64."""

    total: float = 0.0
    weight: int = 0

    def add(self, value: float, weight: int) -> None:
        self.total += value * weight
        self.weight += weight

    def value(self) -> float:
        return self.total / self.weight


@dataclass(slots=True, kw_only=True)
class _PlainRun:
    task: TrainTask
    module: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    report: Report | None
    device: torch.device
    scaler: torch.amp.GradScaler
    # Whether cuDNN draws masks of the module.
    drops_between_layers: bool
    # Copies of loaders, samplers and generators.
    own: TrialLoaderCopies = field(default_factory=TrialLoaderCopies)
    steps: int = 0
    pending: int = 0
    divisor: int = 1
    metrics: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    interval: _SampleWeightedMean = field(default_factory=_SampleWeightedMean)
    started: float = field(default_factory=time.perf_counter)
    is_stopped: bool = False

    def epoch(self, epoch: int) -> bool:
        """Train on every batch once; return False if a report pruned the run, or if `stop` ended the run."""
        self.module.train()
        num_earlier = len(self.losses)
        for batch in self._drawn():
            refuse_empty(batch, "train", len(self.losses) - num_earlier, epoch)
            with GATE.shared():
                if self.task.num_pieces > 1 and not self.losses:
                    check_pieces(self.task, self.module, batch, self.task.num_pieces)
                self._backward(batch)
            if self.pending == self.task.accumulate and not self._step(epoch):
                return False
        if len(self.losses) == num_earlier:
            raise no_batch("train", self.task.train, epoch)
        # The last step of a pass may have fewer batches: no step spans two passes.
        if self.pending and not self._step(epoch):
            return False
        if self.task.report_every == "epoch" and not self._report(epoch, epoch):
            return False
        # After the report, whose metric a ReduceLROnPlateau reads.
        if self.task.scheduler_interval == "epoch":
            self._step_scheduler()
        return True

    def _drawn(self) -> Iterator[Batch]:
        """Draw the batches of an epoch, each when it is due, or all of a step at once; set the divisor of their losses."""
        task, self.divisor = self.task, self.task.loss_divisor
        batches = self.own.batches(task.train, task.batch_size, shuffle=True)
        if not task.draws_whole_steps:
            yield from batches
            return
        for window in in_windows(batches, task.accumulate):
            if task.divides_by_rest:
                self.divisor = len(window)
            yield from window if task.loss_weight is None else self._weighed(window)

    def _weighed(self, window: list[Batch]) -> list[tuple[Batch, Tensor]]:
        with GATE.shared():
            return weighed(self.task, window)

    def _backward(self, batch: Batch) -> None:
        mean = _SampleWeightedMean()
        for piece in pieces(batch, self.task.num_pieces):
            if self.drops_between_layers:
                seed_anew(self.device)
            with _autocast(self.task, self.device):
                loss = _loss(self.task, self.module, self._placed(piece.batch))
            # Before the first backward of the run, only the user's own step can have left a gradient.
            if (
                not self.losses
                and not self.interval.weight
                and any(p.grad is not None for p in self.module.parameters())
            ):
                raise backward_called()
            value = loss.item()
            mean.add(value, piece.samples)
            if not math.isfinite(value):
                self.losses.append(value)
                raise BadLossError(f"the training loss is {value} in step {self.steps + 1}")
            # Weighted by samples, the gradients of the pieces add up to the gradient of the whole batch's mean loss.
            self.scaler.scale(loss * piece.share / self.divisor).backward()  # type: ignore[no-untyped-call]  # untyped
            if self.task.loss_weight is None:
                self.interval.add(value, piece.samples)
            else:
                self.interval.total += value  # the losses of a step add up, and each step counts once
        self.losses.append(mean.value())
        self.pending += 1

    def _placed(self, batch: Batch) -> Batch:
        return batch if self.device.type == "cpu" else moved(batch, self.device)

    def _step(self, epoch: int) -> bool:
        """Take one optimizer step; return False if a report after the step ended the run."""
        task = self.task
        with GATE.shared():
            # Before clipping: the norm is the norm of the true gradients.
            self.scaler.unscale_(self.optimizer)
            if task.max_grad_norm is not None:
                parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
                if task.clip_order == "module":
                    trained = set(parameters)
                    parameters = [p for p in self.module.parameters() if p in trained]
                nn.utils.clip_grad_norm_(parameters, task.max_grad_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.steps += 1
            if task.after_step is not None:
                task.after_step(self.module, self.optimizer, self.steps)
        self.pending = 0
        if task.loss_weight is not None:
            self.interval.weight += 1
        if task.scheduler_interval == "step":
            self._step_scheduler()
        return task.report_every == "epoch" or self.steps % task.report_every != 0 or self._report(self.steps, epoch)

    def _step_scheduler(self) -> None:
        if self.scheduler is None:
            return
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
            return
        name = self.task.metrics[0]
        if name not in self.metrics:
            raise MetricError(
                f"ReduceLROnPlateau needs {name!r} after step {self.steps}, but nothing has been reported yet; "
                "step it per epoch (scheduler_interval='epoch') and report at least as often"
            )
        self.scheduler.step(self.metrics[name])

    def _report(self, step: int, epoch: int) -> bool:
        self.metrics = {"train_loss": self.interval.value(), **self._evaluate()}
        self.interval = _SampleWeightedMean()
        check_reported(self.task.metrics, self.metrics)
        seconds = time.perf_counter() - self.started
        self.history.append({"step": step, "epoch": epoch, "seconds": seconds, **self.metrics})
        if self.report is not None and self.report(step, dict(self.metrics)) is False:
            return False
        with GATE.shared():
            self.is_stopped = self.task.stop is not None and bool(self.task.stop([dict(each) for each in self.history]))
        return not self.is_stopped

    def _evaluate(self) -> dict[str, float]:
        """Return the metrics of a validation pass by reported name; empty without validation data."""
        if self.task.validate is None:
            return {}
        means: dict[str, _SampleWeightedMean] = {}
        collected: dict[str, list[Tensor]] = {}
        batches = 0
        self.module.eval()
        with torch.no_grad():
            for batch in self.own.batches(self.task.validate, self.task.batch_size, shuffle=False):
                refuse_empty(batch, "validate", batches)
                batches += 1
                if self.task.loss_weight is not None and self.task.evaluate is None:
                    (batch,) = self._weighed([batch])  # noqa: PLW2901 - the loss of a batch by itself
                with GATE.shared(), _autocast(self.task, self.device):
                    values = dict(_metrics(self.task, self.module, self._placed(batch)))
                for name, value in values.items():
                    if isinstance(value, Tensor):
                        collected.setdefault(name, []).append(value)
                        continue
                    means.setdefault(name, _SampleWeightedMean()).add(value, num_samples(batch))
        self.module.train()
        if not batches:
            raise no_batch("validate", self.task.validate)
        if self.task.finish is not None:
            with GATE.shared():
                return reported_names(finished(self.task, collected))
        return reported_names({name: mean.value() for name, mean in means.items()})


def _autocast(task: TrainTask, device: torch.device) -> AbstractContextManager[object]:
    if task.precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, task.precision))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    # The package does not depend on numpy; a user's code may.
    if importlib.util.find_spec("numpy") is not None:
        numpy = importlib.import_module("numpy")
        numpy.random.seed(seed)


def _loss(task: TrainTask, module: nn.Module, batch: Batch) -> Tensor:
    if task.step is not None:
        name, loss = "step", task.step(module, *(batch if task.loss_weight is not None else (batch,)))
    else:
        assert task.loss is not None
        if not isinstance(batch, tuple | list) or len(batch) != 2:  # noqa: PLR2004 - a pair
            raise TaskError(f"loss= needs batches (input, target), got {type(batch).__name__}; give step= instead")
        name, loss = "loss", task.loss(module(batch[0]), batch[1])
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TaskError(f"{name}= must return a scalar tensor, not {returned(loss)}")
    return loss


def _metrics(task: TrainTask, module: nn.Module, batch: Batch) -> Iterator[tuple[str, float | Tensor]]:
    values: object = {"loss": _loss(task, module, batch)} if task.evaluate is None else task.evaluate(module, batch)
    if not isinstance(values, Mapping):
        raise not_metrics(values)
    for name, value in values.items():
        if task.finish is not None:
            yield name, value.detach().cpu().clone() if isinstance(value, Tensor) else _one_element(name, value)
            continue
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else number_of(value)
        if number is None:
            raise not_a_metric(name, value)
        yield name, float(number)


def _one_element(name: str, value: object) -> Tensor:
    number = number_of(value)
    if number is None:
        raise not_collectable(name, value)
    return torch.tensor(number, dtype=torch.float64)
