"""The evaluation of a `Trainer`: a loss and predictions for each batch, and metrics over all of them.

`TrainerEvaluation` takes the place of `Trainer.prediction_step` for a batch, and `TrainerMetrics` the place of
`Trainer.evaluation_loop` after the last batch. The pool concatenates the values of all batches in between, so a tensor of
predictions or labels goes to the pool flat, beside its sizes: `logits.0` and `logits.0:0`, `logits.0:1`, ... `EarlyStop`
ends a training. `task.py` makes all three, as `evaluate`, `finish` and `stop` of the task, which the pool and
`hydra_tune.train_plain` call; `search.py` names the metrics of a search by `OBJECTIVE`. The module must not know shards or
devices.

Note: bits. On a CPU, the loss and the metrics equal those of `Trainer` to the last bit, so the order of the operations counts.

Note: `compute_metrics` of all trials runs under one lock of the process (`_ONE_AT_A_TIME`); code within must not wait for
another trial.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import nested_concat, nested_numpify
from transformers.trainer_utils import EvalPrediction, denumpify_detensorize

from hydra_tune.errors import MetricError, TaskError
from hydra_tune_transformers.loss import IGNORED_LABEL, ItemCount, TrainerStep
from hydra_tune_transformers.shared import check

OBJECTIVE = "objective"
_LOSS, _LOGITS, _LABELS = "loss", "logits", "labels"
_METRIC = "metric:"
_PREFIX = "eval_"
_ONE_AT_A_TIME = threading.Lock()
"""Trials share a metric of the `evaluate` library, which collects predictions in the metric's own attributes."""


@dataclass(frozen=True, kw_only=True)
class TrainerEvaluation:
    """Evaluates a batch.

    Args:
        step: computes the loss.
        item_count: counts labels, where the loss of an evaluation is given their number.
        label_names: the arguments of the model's forward that are labels.
        can_return_loss: whether the model returns a loss without labels.
        ignored_outputs: names of outputs that are no predictions.
        with_predictions: whether predictions and labels are returned beside the loss.
        preprocess: `preprocess_logits_for_metrics` of the `Trainer`.
        is_low_precision: whether the forward runs under autocast, whose results are returned in float32.
    """

    step: TrainerStep
    item_count: ItemCount | None
    label_names: tuple[str, ...]
    can_return_loss: bool
    ignored_outputs: tuple[str, ...]
    with_predictions: bool
    preprocess: Callable[[Any, Any], Any] | None
    is_low_precision: bool

    def __call__(self, module: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the loss and, where wanted, predictions and labels, each with its sizes.

        Raises:
            TaskError: the batch lacks the labels, an own prediction_step returns no loss, a prediction or label is not a
                tensor, or a tuple of such is empty.
        """
        own = self.step.own_loss
        if own is not None and own.has_prediction_step:
            loss, logits, labels, metrics = own.predict(
                module, batch, loss_alone=not self.with_predictions, ignored=self.ignored_outputs
            )
            if not isinstance(loss, Tensor):
                raise TaskError(
                    f"prediction_step of {type(own.method.__self__).__name__} returned {type(loss).__name__} in place of the "
                    "loss, and a trial reports the loss of its evaluation: return the loss, a tensor"
                )
            predictions = self._preprocessed(logits, labels) if self.with_predictions else None
        else:
            loss, predictions, labels, metrics = self._stock(module, batch)
        values: dict[str, Any] = {_LOSS: self._widened(loss.detach().mean())}
        values |= {_METRIC + name: value for name, value in metrics.items()}
        if self.with_predictions:
            for kind, value in ((_LOGITS, predictions), (_LABELS, labels)):
                for name, tensor in _leaves(kind, value):
                    values |= _flat(name, tensor)
        return values

    def _stock(self, module: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Any, Any, dict[str, Any]]:
        """Return loss, predictions, labels and metrics as `Trainer.prediction_step`."""
        has_labels = bool(self.label_names) and all(batch.get(name) is not None for name in self.label_names)
        if not has_labels and (self.label_names or not self.can_return_loss):
            wanted = ", ".join(self.label_names) or "none known"
            raise TaskError(
                f"a batch of {', '.join(batch)} of eval_dataset lacks the labels ({wanted}), so there is nothing to report; "
                "give the labels, or label_names="
            )
        # As in `Trainer.prediction_step`: the count of this batch, not of the batches of an optimizer step.
        total = None if self.item_count is None else self.item_count.tensor(batch)
        loss, outputs, metrics = self.step.loss_and_outputs(module, batch, total)
        labels = tuple(batch[name] for name in self.label_names)
        given = labels[0] if len(labels) == 1 else labels
        return loss, self._predictions(outputs, given) if self.with_predictions else None, given, metrics

    def _predictions(self, outputs: Any, labels: Any) -> Any:
        if isinstance(outputs, dict):
            logits = tuple(value for name, value in outputs.items() if name not in (*self.ignored_outputs, "loss"))
        else:
            logits = outputs[1:]
        return self._preprocessed(logits[0] if len(logits) == 1 else logits, labels)

    def _preprocessed(self, logits: Any, labels: Any) -> Any:
        predictions = self._widened(logits)
        if self.preprocess is None:
            return predictions
        check(self.preprocess)
        processed = self.preprocess(predictions, labels)
        check(self.preprocess)
        return processed

    def _widened(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(self._widened, value))
        is_low = self.is_low_precision and isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if is_low else value


@dataclass(frozen=True, kw_only=True)
class TrainerMetrics:
    """Computes the metrics of an evaluation from the values of all batches.

    Args:
        compute_metrics: as of the `Trainer`.
        batch_size: how often the loss of each batch counts, whatever the samples of the batch.
        last_kept: samples that accelerate keeps of the last batch, and how often the loss counts at most; None: all.
        drops_bad_losses: whether losses that are NaN or infinite are left out of the mean, where others are finite.
        compute_objective: `{metric: value} -> value` of a search; reported as `objective`.
        log: adds to the metrics what a `Trainer` has collected itself, `(metrics, {name: values}) -> None`.
    """

    compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None
    batch_size: int
    last_kept: int | None
    drops_bad_losses: bool
    compute_objective: Callable[[dict[str, float]], Any] | None = None
    log: Callable[[dict[str, Any], dict[str, list[float]]], None] | None = None

    def __call__(self, collected: dict[str, Tensor]) -> dict[str, float]:
        """Return the metrics of a pass, without the prefix `eval_`.

        Raises:
            MetricError: `compute_metrics` returned a value that is not a number.
        """
        metrics: dict[str, Any] = {}
        if self.compute_metrics is not None:
            predictions = self._joined(collected, _LOGITS)
            labels = self._joined(collected, _LABELS)
            with _ONE_AT_A_TIME:
                check(self.compute_metrics)
                metrics = dict(self.compute_metrics(EvalPrediction(predictions, labels)))
                check(self.compute_metrics)
        metrics = denumpify_detensorize(metrics)
        metrics[_PREFIX + _LOSS] = self._mean_loss(collected[_LOSS])
        for name in list(metrics):
            if not name.startswith(_PREFIX):
                metrics[_PREFIX + name] = metrics.pop(name)
        if self.log is not None:
            values = {name: value.tolist() for name, value in collected.items() if name.startswith(_METRIC)}
            self.log(metrics, {name.removeprefix(_METRIC): value for name, value in values.items()})
        for name, value in metrics.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise MetricError(
                    f"compute_metrics returned {name.removeprefix(_PREFIX)!r} as {type(value).__name__}, and a report holds "
                    "numbers; return {name: number}"
                )
        reported = {name.removeprefix(_PREFIX): float(value) for name, value in metrics.items()}
        if self.compute_objective is None:
            return reported
        return reported | dict(_named(self.compute_objective(dict(metrics))))

    def _mean_loss(self, of_batches: Tensor) -> float:
        # Each loss once for each sample, and in float32: the mean of numpy is then that of `Trainer`, to the last bit.
        losses = of_batches.repeat_interleave(self.batch_size)
        # Of the losses of the last batch, `gather_for_metrics` of accelerate keeps one for each sample kept.
        if self.last_kept is not None and self.last_kept < self.batch_size:
            losses = losses[: self.last_kept - self.batch_size]
        numbers = nested_numpify(losses)  # widens bfloat16, which numpy lacks
        finite = np.isfinite(numbers)
        if self.drops_bad_losses and finite.any():
            numbers = numbers[finite]
        return float(numbers.mean().item())

    def _joined(self, collected: dict[str, Tensor], kind: str) -> Any:
        """Return the predictions or labels of all samples as arrays, padded to the longest."""
        num_batches = len(collected[_LOSS])
        joined = None
        # Accelerate cuts none of the tensors of a batch where one is without dimensions.
        tensors = (name for name in collected if name.partition(".")[0] == kind and ":" not in name)
        last_kept = self.last_kept if all(f"{name}:0" in collected for name in tensors) else None
        for number in range(num_batches):
            values = self._of_batch(collected, kind, number, last_kept if number == num_batches - 1 else None)
            joined = values if joined is None else nested_concat(joined, values, padding_index=IGNORED_LABEL)
        return nested_numpify(joined)

    def _of_batch(self, collected: dict[str, Tensor], path: str, number: int, first: int | None) -> Any:
        if path in collected:
            of_dimensions = list(_in_turn(collected, f"{path}:"))
            if not of_dimensions:
                return collected[path][number]
            sizes = torch.stack(of_dimensions).long()
            begin = int(sizes[:, :number].prod(dim=0).sum())
            of_batch = sizes[:, number].tolist()
            return collected[path][begin : begin + int(np.prod(of_batch))].view(of_batch)[:first]
        parts: list[Any] = []
        while any(name == (part := f"{path}.{len(parts)}") or name.startswith(f"{part}.") for name in collected):
            parts.append(self._of_batch(collected, f"{path}.{len(parts)}", number, first))
        return tuple(parts)


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """Ends a training as `EarlyStoppingCallback` does.

    Args:
        metric: reported metric.
        is_greater_better: whether larger values are better.
        patience: reports without an improvement after which the training ends.
        threshold: difference that an improvement exceeds.
    """

    metric: str
    is_greater_better: bool
    patience: int
    threshold: float

    def __call__(self, history: Sequence[Mapping[str, float]]) -> bool:
        """Whether the training ends after the last report of its history."""
        # Not the first value, which may be NaN: `Trainer` never has NaN as its best.
        best, num_without = -math.inf if self.is_greater_better else math.inf, 0
        for number, entry in enumerate(history):
            value = entry[self.metric]
            is_better = value > best if self.is_greater_better else value < best
            improves = number == 0 or (is_better and abs(value - best) > self.threshold)
            num_without = 0 if improves else num_without + 1
            # Apart from `improves`: `Trainer` moves its best value also by less than the threshold of the callback.
            best = value if is_better else best
        return num_without >= self.patience


def _named(value: Any) -> Iterator[tuple[str, float]]:
    """Name the value of a search's objective, or each of several values."""
    if isinstance(value, tuple | list):
        yield from ((f"{OBJECTIVE}_{number}", float(each)) for number, each in enumerate(value))
    else:
        yield OBJECTIVE, float(value)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value.detach()
        return
    if not isinstance(value, tuple | list):
        raise TaskError(
            f"the model's predictions have a {type(value).__name__}, and compute_metrics is given tensors and tuples of these; "
            "pick the tensors in preprocess_logits_for_metrics="
        )
    if not value:
        # Nothing would stand for an empty tuple among the collected values, and its followers would be lost.
        raise TaskError(
            f"the {path.partition('.')[0]} of a batch hold an empty {type(value).__name__}; pick the tensors in "
            "preprocess_logits_for_metrics="
        )
    for number, item in enumerate(value):
        yield from _leaves(f"{path}.{number}", item)


def _flat(name: str, tensor: Tensor) -> dict[str, Any]:
    sizes = {f"{name}:{dimension}": size for dimension, size in enumerate(tensor.shape)}
    return {name: tensor.reshape(-1), **sizes}


def _in_turn(collected: dict[str, Tensor], prefix: str) -> Iterator[Tensor]:
    number = 0
    while (sizes := collected.get(f"{prefix}{number}")) is not None:
        yield sizes
        number += 1
