"""A model and what is done with a batch, as one module.

Capturing the two together makes the graph's output the loss itself (or the metrics), so that models that compute their own
loss, and batches of any structure, need nothing special.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hydra_tune.errors import CaptureError, TaskError
from hydra_tune.task import TrainTask, backward_called, not_a_metric, not_metrics, number_of, returned

MODEL_PREFIX = "model."

Objective = Callable[[Tensor], Tensor]
"""The training loss -> what its backward starts from."""


def loss_itself(loss: Tensor) -> Tensor:
    """The objective where nothing is accumulated or scaled."""
    return loss


def objective(accumulate: int, scale: Tensor | None, share: float = 1.0) -> Objective:
    """The loss times the part of a batch it is for, over the number of batches that make a step, times the loss scale.

    As in a plain loop, in that order.
    """

    def from_loss(loss: Tensor) -> Tensor:
        part = loss if share == 1.0 else loss * share
        mean = part if accumulate == 1 else part / accumulate
        return mean if scale is None else mean * scale.to(loss.device, copy=True)

    return from_loss


def training_loss(task: TrainTask) -> Callable[[nn.Module, Any], Any]:
    """The task's training step as `(module, batch) -> loss`, whether it was given as `loss` or as `step`."""
    if task.step is not None:
        return task.step
    loss = task.loss
    assert loss is not None, "TrainTask holds exactly one of loss and step"

    def step(module: nn.Module, batch: Any) -> Any:
        if not isinstance(batch, tuple | list) or len(batch) != 2:  # noqa: PLR2004 - a pair
            got = "Tensor" if isinstance(batch, Tensor) else type(batch).__name__
            raise TaskError(f"loss= needs batches (input, target), got {got}; give step= instead")
        return loss(module(batch[0]), batch[1])

    return step


def settle_buffers(before: list[tuple[nn.Module, str, Tensor]]) -> None:
    """Let buffers that a forward replaced (`self.scale = ...`) be the tensors they were, with the new values.

    A graph knows a buffer by its tensor. One that is replaced by a tensor of another kind stays replaced, and is found where
    the user's own code is watched.

    Args:
        before: the model's buffers before the forward, from `buffers_of`.
    """
    replaced = [
        (owner, name, old, new)
        for owner, name, old in before
        if (new := owner._buffers.get(name)) is not old and new is not None and _is_like(old, new)  # noqa: SLF001
    ]
    values = [new.detach().clone() for _, _, _, new in replaced]  # first, for buffers may have changed places
    for (owner, name, old, _), value in zip(replaced, values, strict=True):
        old.copy_(value)
        owner._buffers[name] = old  # noqa: SLF001 - an assignment would be seen by export


def buffers_of(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Each buffer with the module that holds it and its name there."""
    return [
        (owner, name, tensor)
        for owner in model.modules()
        for name, tensor in owner._buffers.items()  # noqa: SLF001 - tied buffers under each of their names
        if tensor is not None
    ]


def _is_like(old: Tensor, new: Tensor) -> bool:
    return new.shape == old.shape and new.dtype == old.dtype and new.device == old.device and not new.requires_grad


class TrainStep(nn.Module):
    """`forward(batch)` is `{"loss": the training loss}`."""

    def __init__(self, model: nn.Module, task: TrainTask) -> None:
        super().__init__()
        self.model = model
        self._step = training_loss(task)
        self._argument = "loss" if task.step is None else "step"

    @property
    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.model.parameters())

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """The loss of a batch.

        Raises:
            TaskError: what the step returned is not a scalar tensor, or it has made gradients itself.
        """
        buffers = buffers_of(self.model)
        has_gradients = self._has_gradients
        loss = self._step(self.model, batch)
        if self._has_gradients and not has_gradients:
            raise backward_called()
        settle_buffers(buffers)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TaskError(f"{self._argument}= must return a scalar tensor, not {returned(loss)}")
        return {"loss": loss}


class EvaluateStep(nn.Module):
    """`forward(batch)` is the metrics of a batch, each a scalar tensor."""

    def __init__(self, model: nn.Module, task: TrainTask) -> None:
        super().__init__()
        self.model = model
        loss = training_loss(task)
        self._evaluate = task.evaluate or (lambda module, batch: {"loss": loss(module, batch)})

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """The metrics of a batch by name.

        Raises:
            MetricError: not a mapping of names to scalars.
        """
        buffers = buffers_of(self.model)
        metrics = self._evaluate(self.model, batch)
        settle_buffers(buffers)
        if not isinstance(metrics, Mapping):
            raise not_metrics(metrics)
        return {str(name): _scalar(name, value) for name, value in metrics.items()}


def evaluation_metrics(task: TrainTask, model: nn.Module, batch: Any) -> dict[str, float]:
    """The metrics of a batch by name, from the user's own code as it stands.

    Raises:
        MetricError: not a mapping of names to scalars.
    """
    if task.evaluate is None:
        metrics: Any = {"loss": training_loss(task)(model, batch)}
    else:
        metrics = task.evaluate(model, batch)
    if not isinstance(metrics, Mapping):
        raise not_metrics(metrics)
    return {str(name): float(_scalar(name, value).item()) for name, value in metrics.items()}


def _scalar(name: str, value: object) -> Tensor:
    if isinstance(value, torch.SymFloat | torch.SymInt | torch.SymBool):  # while the step is captured
        raise CaptureError(f"evaluate= returns {name!r} as a plain number, which a graph does not know")
    number = number_of(value)
    if number is not None:
        return torch.tensor(number, dtype=torch.float64)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise not_a_metric(name, value)
    return value


def step_module(task: TrainTask, model: nn.Module, mode: str) -> TrainStep | EvaluateStep:
    """The module to capture for `mode` ("train" or "evaluate"), with the model switched to that mode."""
    wrapper: TrainStep | EvaluateStep = TrainStep(model, task) if mode == "train" else EvaluateStep(model, task)
    model.train(mode == "train")
    return wrapper
