"""A model and the use of a batch, as a single module.

A capture of both together makes the loss itself (or the metrics) the graph's output, so models that compute their own
loss, and batches of any structure, need no special treatment.

`capture` (`step_capture.py`) exports the module. `shard/verify/step_outcome.py` runs the module eagerly when a plan is
checked, `value_replay.py` when answers are noted, and `shard/cost/eager_pilot.py` when a step that cannot be captured
is measured; `shard/execute/eager_plan.py` runs the module in each unit of such a step. A trial that runs the user's own
code (`train/loop/direct.py`) needs `training_loss` and `evaluation_metrics` alone, and `train/loop/microbatches.py`
takes `training_loss` alone. `train/loop/gradient_rules.py` and `shard/partition/gradient_rules.py` make the `objective`
of a backward, `fusion/compile/batched_plan.py` that of stacked members, and `shard/partition/trial_step.py` sets a model's
mode. Units copy values for `finish=` by `on_host` (`train/loop/batch_units.py`, `fusion/group/group_step.py`). The module must
not know budgets or cuts.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hydra_tune.errors import CaptureError, TaskError
from hydra_tune.shard.capture.batch import unnumbered
from hydra_tune.shard.capture.gpu_code import as_on_gpu
from hydra_tune.task import TrainTask, backward_called, not_a_metric, not_collectable, not_metrics, number_of, returned

MODEL_PREFIX = "model."

Objective = Callable[[Tensor], Tensor]
"""Turns the training loss into the value that the backward starts from."""


def loss_itself(loss: Tensor) -> Tensor:
    """Return the loss unchanged: the objective without accumulation or scaling."""
    return loss


def objective(divisor: int, scale: Tensor | None, share: float = 1.0) -> Objective:
    """Return an objective: the loss times the share of a batch, over a divisor, times the loss scale."""

    def from_loss(loss: Tensor) -> Tensor:
        # No multiplication by 1 and no division by 1: a plain loop has neither of the two operators.
        part = loss if share == 1.0 else loss * share
        mean = part if divisor == 1 else part / divisor
        return mean if scale is None else mean * scale.to(loss.device, copy=True)

    return from_loss


def training_loss(task: TrainTask) -> Callable[[nn.Module, Any], Any]:
    """Return the task's training step as `(module, batch) -> loss`, whether given as `loss` or as `step`.

    With `loss_weight`, a batch is a pair (batch, total), from `weighed`.
    """
    given = task.step
    if given is not None:
        return given if task.loss_weight is None else lambda module, pair: given(module, *pair)
    loss = task.loss
    assert loss is not None, "TrainTask holds exactly one of loss and step"

    def step(module: nn.Module, batch: Any) -> Any:
        if not isinstance(batch, tuple | list) or len(batch) != 2:  # noqa: PLR2004 - a pair
            batch_type = "Tensor" if isinstance(batch, Tensor) else type(batch).__name__
            raise TaskError(f"loss= needs batches (input, target), got {batch_type}; give step= instead")
        return loss(module(batch[0]), batch[1])

    return step


def settle_buffers(before: list[tuple[nn.Module, str, Tensor]]) -> tuple[str, ...]:
    """Copy the values of buffers replaced by a forward (`self.scale = ...`) into the original tensors.

    A graph knows a buffer by its tensor. A buffer replaced by a tensor of another kind stays replaced, and is found
    where the user's own code is checked. `before` comes from `buffers_of`.

    Returns:
        The names, in their modules, of the buffers that the forward has replaced.

    Raises:
        TaskError: a buffer has two names, and the forward has replaced the buffer under only one of the names.
    """
    replaced = [
        (owner, name, old, new)
        for owner, name, old in before
        if (new := owner._buffers.get(name)) is not old and new is not None and _is_like(old, new)  # noqa: SLF001
    ]
    others: dict[int, tuple[str, Tensor | None]] = {}
    for owner, name, old in before if replaced else ():
        new = owner._buffers.get(name)  # noqa: SLF001
        other_name, other_new = others.setdefault(id(old), (name, new))
        if new is not other_new:
            raise TaskError(
                f"the step replaces a buffer that the model has under two names, {other_name!r} and {name!r}, under only "
                "one of the names, and a model that is cut, fused or runs whole keeps the names together; write the values "
                "in place (copy_), or register a tensor for each name"
            )
    # All copies come first, because buffers may have changed places.
    values = [new.detach().clone() for _, _, _, new in replaced]
    for (owner, name, old, _), value in zip(replaced, values, strict=True):
        old.copy_(value)
        owner._buffers[name] = old  # noqa: SLF001 - an assignment would be seen by export
    return tuple(name for _, name, _, _ in replaced)


def buffers_of(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Each buffer with its owning module and its name there."""
    return [
        (owner, name, tensor)
        for owner in model.modules()
        for name, tensor in owner._buffers.items()  # noqa: SLF001 - tied buffers under each of their names
        if tensor is not None
    ]


def _is_like(old: Tensor, new: Tensor) -> bool:
    return new.shape == old.shape and new.dtype == old.dtype and new.device == old.device and not new.requires_grad


class TrainStep(nn.Module):
    """`forward(batch)` returns `{"loss": the training loss}`.

    Attributes:
        replaced: names of the buffers that the last forward has replaced, and whose tensors a backward may read no more.
    """

    def __init__(self, model: nn.Module, task: TrainTask) -> None:
        super().__init__()
        self.model = model
        self._step = training_loss(task)
        self._argument = "loss" if task.step is None else "step"
        self.replaced: tuple[str, ...] = ()

    @property
    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.model.parameters())

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return the loss of a batch.

        Raises:
            TaskError: the step returned no scalar tensor, or made gradients itself.
        """
        buffers = buffers_of(self.model)
        has_gradients = self._has_gradients
        with as_on_gpu():
            loss = self._step(self.model, unnumbered(batch))
        # Only a `backward()` inside the step itself can have made gradients.
        if self._has_gradients and not has_gradients:
            raise backward_called()
        self.replaced = settle_buffers(buffers)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TaskError(f"{self._argument}= must return a scalar tensor, not {returned(loss)}")
        return {"loss": loss}


class EvaluateStep(nn.Module):
    """`forward(batch)` returns the metrics of a batch, each a scalar tensor; with `finish=`, tensors of any shape."""

    def __init__(self, model: nn.Module, task: TrainTask) -> None:
        super().__init__()
        self.model = model
        loss = training_loss(task)
        self._evaluate = task.evaluate or (lambda module, batch: {"loss": loss(module, batch)})
        self._collects = task.finish is not None

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return the metrics of a batch by name.

        Raises:
            MetricError: the result is not a mapping of names to scalars.
            CaptureError: during a capture, a metric is a plain number, which a graph does not know.
        """
        buffers = buffers_of(self.model)
        with as_on_gpu():
            metrics = self._evaluate(self.model, unnumbered(batch))
        settle_buffers(buffers)
        if not isinstance(metrics, Mapping):
            raise not_metrics(metrics)
        if self._collects:
            # Copied, because a value may be a batch's own tensor, which is no result of an operator.
            return {str(name): _collected(name, value).clone() for name, value in metrics.items()}
        return {str(name): _scalar(name, value) for name, value in metrics.items()}


def evaluation_metrics(task: TrainTask, model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return the metrics of a batch by name, from the user's own code without changes; with `finish=`, tensors on the host.

    Raises:
        MetricError: the result is not a mapping of names to scalars.
    """
    if task.evaluate is None:
        metrics: Any = {"loss": training_loss(task)(model, batch)}
    else:
        metrics = task.evaluate(model, batch)
    if not isinstance(metrics, Mapping):
        raise not_metrics(metrics)
    if task.finish is not None:
        return {str(name): on_host(_collected(name, value)) for name, value in metrics.items()}
    return {str(name): float(_scalar(name, value).item()) for name, value in metrics.items()}


def on_host(value: Tensor) -> Tensor:
    """Return a copy of a value for `finish=`."""
    return value.detach().to("cpu", copy=True)


def _scalar(name: str, value: object) -> Tensor:
    tensor = _tensor(name, value)
    if tensor is None or tensor.numel() != 1:
        raise not_a_metric(name, value)
    return tensor


def _collected(name: str, value: object) -> Tensor:
    tensor = _tensor(name, value)
    if tensor is None:
        raise not_collectable(name, value)
    return tensor


def _tensor(name: str, value: object) -> Tensor | None:
    if isinstance(value, torch.SymFloat | torch.SymInt | torch.SymBool):  # while the step is captured
        raise CaptureError(f"evaluate= returns {name!r} as a plain number, which a graph does not know")
    if isinstance(value, Tensor):
        return value
    number = number_of(value)
    # As exact as the Python float of the user's code.
    return None if number is None else torch.tensor(number, dtype=torch.float64)


def step_module(task: TrainTask, model: nn.Module, mode: str, *, sets_mode: bool = True) -> TrainStep | EvaluateStep:
    """Return the module of a step in a mode ("train" or "evaluate"), to capture or to run.

    Without `sets_mode`, as for a later step of a pass, the model keeps the modes that earlier steps have left.
    """
    wrapper: TrainStep | EvaluateStep = TrainStep(model, task) if mode == "train" else EvaluateStep(model, task)
    if sets_mode:
        set_mode(model, mode)
    return wrapper


def set_mode(model: nn.Module, mode: str) -> None:
    """Switch a model to the mode of a step; a model in that mode keeps the modes that code has given its parts since."""
    if model.training != (mode == "train"):
        model.train(mode == "train")
