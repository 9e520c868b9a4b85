"""The training loss of a `Trainer`, as a step of a task.

`TrainerStep` computes a loss from a batch as `Trainer.training_step` and `Trainer.compute_loss` do. A step holds the few
settings needed for the loss, and not the `Trainer`: a trial cut into shards compares everything read by the step before each
step, and trials with equal steps may be fused. `task.py` makes the step, and takes the `ItemCount` of `installed.py`. The
pool and `hydra_tune.train_plain` call the step for the batches of a training, and `evaluation.py` evaluates with the same
step. Bits: operations and types are those of the installed `Trainer`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from hydra_tune.errors import TaskError
from hydra_tune_transformers.own_loss import OwnLoss
from hydra_tune_transformers.shared import check

IGNORED_LABEL = -100


@dataclass(frozen=True, kw_only=True)
class TrainerStep:
    """Computes the loss of a batch.

    Args:
        gives_count: whether the model's forward takes the number of labels of all batches of the optimizer step.
        count_dtype: dtype of this number in the installed `Trainer`; None: the `Trainer` counts no labels.
        divisor: divisor of the loss of each batch in training.
        refuses_labels: whether the forward takes this number, and no batch is expected to have `labels`.
        label_smoother: computes the loss from the outputs and the labels; None: the model computes the loss.
        shifts_labels: whether `label_smoother` compares each position with the next label.
        smooths_by_count: whether `label_smoother` is given the number as well.
        loss_function: `compute_loss_func` of the `Trainer`.
        own_loss: an overridden `compute_loss`, in place of all of the above; None: the library's own.
    """

    gives_count: bool
    count_dtype: torch.dtype | None
    divisor: int
    refuses_labels: bool
    label_smoother: LabelSmoother | None
    shifts_labels: bool
    smooths_by_count: bool
    loss_function: Callable[..., Any] | None
    own_loss: OwnLoss | None

    def __call__(self, module: nn.Module, batch: Mapping[str, Any], total: Tensor | None = None) -> Tensor:
        """Return the loss of a batch.

        Args:
            module: the model.
            batch: the arguments of its forward.
            total: the number of labels of all batches of the optimizer step, float32, where labels are counted.
        """
        self._check_labels(batch)
        total = self._as_counted(total)
        own = self.own_loss
        loss = self._loss_and_outputs(module, batch, total)[0] if own is None else own(module, batch, total)
        return loss if self.divisor == 1 else loss / self.divisor

    def loss_and_outputs(
        self, module: nn.Module, batch: Mapping[str, Any], total: Tensor | None
    ) -> tuple[Tensor, Any, dict[str, Any]]:
        """Return the loss of a batch, the model's outputs, and the metrics that an own loss has collected."""
        self._check_labels(batch)
        total = self._as_counted(total)
        if self.own_loss is not None:
            return self.own_loss.loss_and_outputs(module, batch, total)
        return *self._loss_and_outputs(module, batch, total), {}

    def _loss_and_outputs(
        self, module: nn.Module, batch: Mapping[str, Any], total: Tensor | None
    ) -> tuple[Tensor, Any]:
        # A copy, because the labels leave `inputs` below, and an evaluation reads them from the batch afterwards.
        inputs, labels = dict(batch), None
        if (self.label_smoother is not None or self.loss_function is not None) and "labels" in inputs:
            labels = inputs.pop("labels")
        if self.gives_count and total is not None:
            inputs["num_items_in_batch"] = total
        outputs = module(**inputs)
        if self.loss_function is not None:
            check(self.loss_function)
            loss = self.loss_function(outputs, labels, num_items_in_batch=total)
            check(self.loss_function)
            return loss, outputs
        if self.label_smoother is not None and labels is not None:
            options: dict[str, Any] = {"shift_labels": True} if self.shifts_labels else {}
            options |= {"num_items_in_batch": total} if self.smooths_by_count else {}
            return self.label_smoother(outputs, labels, **options), outputs
        if isinstance(outputs, dict) and "loss" not in outputs:
            raise TaskError(
                f"the model returns no loss for batches of {', '.join(batch)}, only {', '.join(outputs)}; give the labels in "
                "the data, or a compute_loss_func"
            )
        return outputs["loss"] if isinstance(outputs, dict) else outputs[0], outputs

    def _as_counted(self, total: Tensor | None) -> Tensor | None:
        return None if total is None or self.count_dtype is None else total.to(self.count_dtype)

    def _check_labels(self, batch: Mapping[str, Any]) -> None:
        if self.refuses_labels and "labels" in batch:
            raise TaskError(
                "a batch has 'labels', whose number Trainer gives the model, and label_names= lacks 'labels'; add the name"
            )


def draw_together(batch: object) -> float:
    """Stand in for an `ItemCount`: the pool draws all batches of a step before the first trains, as `Trainer` does."""
    del batch
    return 1.0


@dataclass(frozen=True, kw_only=True)
class ItemCount:
    """Counts the labels of a batch that enter its loss, as `Trainer` does for `num_items_in_batch`.

    Args:
        is_shifted: whether the first label does not count, because the model compares each position with the next label.
        reads_shifted: whether `shift_labels` of a batch count in place of its labels.
    """

    is_shifted: bool
    reads_shifted: bool

    def __call__(self, batch: Mapping[str, Any]) -> float:
        """Return the number of labels.

        Raises:
            TaskError: the batch has no labels that can be counted.
        """
        return float(self.tensor(batch).item())

    def tensor(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the number of labels as a float32 tensor without dimensions, where the labels are."""
        labels = batch.get("labels")
        if not isinstance(labels, Tensor):
            raise TaskError(
                f"a batch of {', '.join(batch)} has no tensor 'labels', whose number the model is given; let the data or the "
                "collator give labels, or name the labels in label_names="
            )
        # Collators without padding shift the labels themselves, and `Trainer` then counts the shifted labels.
        if self.reads_shifted and isinstance(batch.get("shift_labels"), Tensor):
            labels = batch["shift_labels"]
        elif self.is_shifted:
            labels = labels[..., 1:]
        return labels.ne(IGNORED_LABEL).sum().to(torch.float32)
