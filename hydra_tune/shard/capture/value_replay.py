"""Answers the questions of a step's Python about values during a capture, which has no values.

A capture runs the step on tensors without values. `if mask.all():` is then an error, or code notices the capture and
takes another path. If all questions follow from the batch, an eager run gives the answers, in order, and the capture
receives the answers. The plan then holds for batches with the same answers, as its guard ensures. `PlanLibrary`
(`shard/partition/plan_cache.py`) asks when a step cannot be planned without answers (`answers_to` of
`shard/partition/trial_step.py`), and then captures the step anew within `answering`. Both run inside the gate
(`capture_lock.py`), alone: `answering` replaces functions of a library for the whole process.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hydra_tune.errors import CaptureError
from hydra_tune.shard.capture import batch as batches
from hydra_tune.shard.capture.guards import BatchGuardRecorder
from hydra_tune.shard.capture.precision import eager_autocast
from hydra_tune.shard.capture.step_module import step_module
from hydra_tune.shard.verify.step_outcome import StepOperatorRecorder
from hydra_tune.task import TrainTask

Answer = tuple[Callable[..., Any], bool | int | float]
"""The asking function, and the answer."""

_NOTICING = (("transformers.utils.import_utils", "is_fake_tensor"),)
"""Functions by which libraries detect tensors without values; during a capture these functions report values."""


_UNSEEN = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})
"""Functions that hand values to Python without an operator that could be followed."""


def ask(task: TrainTask, twin: nn.Module, mode: str, batch: Any) -> list[Answer]:
    """Run the forward of a step eagerly and note the questions of its Python about values.

    `twin` is a copy of the trial's model, left in an undefined state; the step may change `batch`.

    Returns:
        The answers in order; empty if nothing was asked, or if a question does not follow from the batch alone.
    """
    recorder = BatchGuardRecorder(batches.flatten(batch).tensors)
    noted = _AnswerRecordingMode(recorder)
    # `noted` sees calls of Python functions, and the recorder below sees the operators inside a call.
    with torch.set_grad_enabled(mode == "train"), StepOperatorRecorder(recorder), eager_autocast(task.precision), noted:
        step_module(task, twin, mode)(batch)
    return noted.answers if noted.is_complete and not recorder.asks_otherwise else []


class _AnswerRecordingMode(TorchFunctionMode):
    """Notes each call that reads a value and returns the value to Python."""

    def __init__(self, recorder: BatchGuardRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.answers: list[Answer] = []
        self.is_complete = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.is_complete = self.is_complete and func not in _UNSEEN
        before = self._recorder.num_reads
        result = func(*args, **(kwargs or {}))
        # An operator may read a value for itself, and then returns a tensor.
        if self._recorder.num_reads > before and not isinstance(result, torch.Tensor):
            self.is_complete = self.is_complete and isinstance(result, bool | int | float)
            self.answers.append((func, result))
        return result


class _AnswerReplayMode(TorchFunctionMode):
    """Gives the answers to the calls that asked, in the same order."""

    def __init__(self, answers: list[Answer]) -> None:
        super().__init__()
        self.left = list(answers)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.left and self.left[0][0] is func:
            return self.left.pop(0)[1]
        return func(*args, **(kwargs or {}))


@contextmanager
def answering(answers: list[Answer]) -> Iterator[None]:
    """Context that answers the questions of the code inside as before.

    Raises:
        CaptureError: the code has not asked all of the questions.
    """
    if not answers:
        yield
        return
    mode = _AnswerReplayMode(answers)
    with _unnoticed(), mode:
        yield
    if mode.left:
        raise CaptureError("the step asks for other values when it is captured than when it runs")


@contextmanager
def _unnoticed() -> Iterator[None]:
    # A library that is not imported cannot ask.
    loaded_functions = [(sys.modules[module], name) for module, name in _NOTICING if module in sys.modules]
    originals = [(module, name, getattr(module, name)) for module, name in loaded_functions if hasattr(module, name)]
    for module, name, _ in originals:
        setattr(module, name, lambda *_: False)
    try:
        yield
    finally:
        for module, name, function in originals:
            setattr(module, name, function)
