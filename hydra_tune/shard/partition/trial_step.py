"""Runs a request's step on copies of the trial's model: captures the step, and asks for answers to its Python's questions.

`PlanLibrary` (`plan_cache.py`) makes a plan of what is captured. A copy is run, because the trial's own steps are still to
come; the trial's model is only read, and what the step changes in Python is put back. `PlanLibrary` also takes the copies for
its checks here (`twin_of`, `hollow_twin_of`), and plans a step that runs whole inside `restored`.

Note: order. `GATE.exclusive` is entered first, then the guard of the Python state, so that nobody else changes the state
before the guard has put the state back.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hydra_tune.errors import CaptureError
from hydra_tune.memory.shared.shared_file import shown_again
from hydra_tune.shard.capture import batch as batches
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.capture.meta_models import bodiless_twin, export_mode, is_unbuilt, solid, without_bytes
from hydra_tune.shard.capture.precision import autocast, merge_regions, share_casts
from hydra_tune.shard.capture.step_capture import (
    CapturedStepGraph,
    capture,
    copied_model,
    describe,
    named_state,
    state_specs,
)
from hydra_tune.shard.capture.step_module import set_mode
from hydra_tune.shard.capture.value_replay import Answer, answering, ask
from hydra_tune.shard.partition.plan_request import ShardPlanRequest
from hydra_tune.shard.python_state.state_guard import PythonStateGuard, check_own_copy
from hydra_tune.shard.verify.plan_check import changed_state
from hydra_tune.shard.verify.process_state import preserved_streams
from hydra_tune.shard.verify.value_numbering import ValuesNeededError


def twin_of(model: nn.Module, mode: str | None = None, *, has_values: bool = True) -> nn.Module:
    """Return a copy of a model, in the mode of a step if given; without `has_values`, trained parameters get no values.

    Frozen parameters in a shared file are not copied either: the copy shows the file once more.

    Raises:
        CaptureError: the model cannot be copied.
    """
    # Tensors that code has computed, as the weight of `torch.nn.utils.weight_norm`, have no copy in torch.
    computed = [value for part in model.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    known = {id(tensor): tensor.detach().clone() for tensor in computed if not tensor.is_leaf}
    known |= shown_again(model.parameters())
    if not has_values:
        trained = [
            parameter for parameter in model.parameters() if type(parameter) is nn.Parameter and parameter.requires_grad
        ]
        known |= {id(parameter): nn.Parameter(torch.empty_like(parameter)) for parameter in trained}
    try:
        twin = copied_model(model, known)
    except Exception as error:
        raise CaptureError(f"{type(model).__name__} cannot be copied: {describe(error)}") from error
    if mode is not None:
        set_mode(twin, mode)
    return twin


def hollow_twin_of(model: nn.Module, mode: str) -> nn.Module:
    """Return a copy of a model for a check without values: its parameters and buffers have memory that nobody touches.

    Raises:
        ValuesNeededError: a parameter or buffer is of a class of its own.
    """
    if any(type(tensor) not in (Tensor, nn.Parameter) for _, tensor in named_state(model)):
        raise ValuesNeededError("a parameter or buffer is of a class of its own, which may compute otherwise")
    twin = bodiless_twin(model)[0]
    set_mode(twin, mode)
    return twin


def captured_graph(request: ShardPlanRequest, batch: Any, answers: list[Answer], *, divides: bool) -> CapturedStepGraph:
    """Capture the step for a batch as a graph; arguments as of `capture`."""
    if is_unbuilt(request.model):
        return _captured_unbuilt(request, batch)
    # Copied outside the gate, so that computations wait for the capture alone.
    check_own_copy(request.task, request.model, request.mode)
    # An export replaces parameters, and refuses a trained one that it meets elsewhere, so none of their values is read.
    twin = twin_of(request.model, request.mode, has_values=False)
    # The check then starts from the streams before the capture: a step that seeds them would agree with the graph by luck.
    with GATE.exclusive(), autocast(request.task.precision), _unchanged(request, twin), preserved_streams():
        captured = capture(request.task, twin, batch, request.mode, answering(answers), divides=divides)
    captured = merge_regions(captured)
    share_casts(captured, state_specs(request.model), captured.precision)
    return captured


def _captured_unbuilt(request: ShardPlanRequest, batch: Any) -> CapturedStepGraph:
    """Capture the step of a model without bytes."""
    mode = export_mode()
    with mode:
        twin = bodiless_twin(request.model)[0]
    set_mode(twin, request.mode)
    fakes = without_bytes(mode, batches.plain_mappings(batch))
    with GATE.exclusive(), autocast(request.task.precision), _unchanged(request, twin):
        captured = capture(request.task, twin, fakes, request.mode)
    captured = merge_regions(captured)
    share_casts(captured, state_specs(request.model), captured.precision)
    return replace(captured, constants={name: solid(tensor) for name, tensor in captured.constants.items()})


def answers_to(request: ShardPlanRequest) -> list[Answer]:
    """Answers to the questions of the step's Python about this batch; empty if answers do not help."""
    twin = twin_of(request.model, request.mode)
    # Exclusive, so that nothing else changes what is put back. An error in the user's code appears again when the model
    # runs whole.
    with suppress(Exception), GATE.exclusive(), _unchanged(request, twin), preserved_streams():
        return ask(request.task, twin, request.mode, batches.copied(request.batch))
    return []


@contextmanager
def _unchanged(request: ShardPlanRequest, twin: nn.Module) -> Iterator[None]:
    """Refuse a step that changes its Python state, and put the state back: the trial's own steps are still to come.

    Entered inside `GATE.exclusive`, so that nobody else changes the state meanwhile.

    Raises:
        CaptureError: the step inside the context has changed a value.
    """
    state = PythonStateGuard(request.task, twin, request.mode, keeps_tensors=True)
    try:
        yield
        changed = state.change(by_step=True)
    finally:
        state.restore()
    if changed is not None:
        raise changed_state(changed)


@contextmanager
def restored(request: ShardPlanRequest, twin: nn.Module) -> Iterator[None]:
    """Put the step's Python state back afterwards, as far as the state can be followed; inside `GATE.exclusive`."""
    try:
        state = PythonStateGuard(request.task, twin, request.mode, keeps_tensors=True)
    except CaptureError:
        state = PythonStateGuard(request.task, twin, request.mode, keeps_tensors=True, is_lenient=True)
    try:
        yield
    finally:
        state.restore()
