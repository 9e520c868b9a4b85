"""Checks a new captured plan against the eager step before the first use: bit for bit, and a compiled plan up to rounding.

An export bakes Python in: a counter, a branch on a random number, a custom autograd function, or code that asks whether
gradients are on would give wrong numbers without an error. So a batch, or a part of the batch, runs on the host from the same
state, twice eagerly and once as the units of each plan to check. Losses, gradients, buffers and the generator must agree. A
`ValueNumbering` (`value_numbering.py`) may stand in for the arithmetic. The first eager run must not change anything outside
the reach of a graph (plain attributes, the `random` and numpy generators). The run of the units also gives their first times.

`PlanLibrary` (`shard/partition/plan_cache.py`) calls `verify` before handing out a new captured plan; only planning without
training leaves out the check, if a step is too large or its model has no bytes. `PlanLibrary.check_again` calls `verify` for a
later batch, and `PlanLibrary` calls `verify_close` for a plan with a compiler, whose numbers may differ by rounding.
`shard/partition/trial_step.py` raises `changed_state`, and `train/checkpoint/trial_checkpoint.py` saves `tensor_attributes`.
The module must not change a plan.

Note: `verify` runs inside `undisturbed` (`process_state.py`), and `verify_close` inside `GATE.exclusive`. Both run on a copy
of the model, whose buffers are rewound before each later run. `verify` puts back the thread's torch stream and the contents
of tensors, and after a refusal or with a numbering all values that the step has changed; the caller puts back the other
streams.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hydra_tune.errors import CaptureError, TaskError
from hydra_tune.shard.capture import batch as batches
from hydra_tune.shard.capture.guards import BatchValueGuard
from hydra_tune.shard.capture.step_capture import describe
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.shard.python_state.state_guard import PythonStateGuard
from hydra_tune.shard.verify.step_outcome import StepEffects, StepOutcome, UnitSeconds, run_eager, run_plan
from hydra_tune.shard.verify.value_numbering import ValueNumbering
from hydra_tune.task import TrainTask

_TOLERANCE, _LOW_TOLERANCE = 1e-3, 0.05  # for a compiled plan, relative to a tensor's largest value

_Running = Callable[[], AbstractContextManager[object]]
_Comparison = Callable[[Tensor, Tensor], bool]

_MODULE_INTERNALS = frozenset(vars(nn.Module()))


def verify(
    task: TrainTask,
    twin: nn.Module,
    plan: ShardPlan,
    batch: Any,
    guards: list[BatchValueGuard] | None = None,
    kept: ShardPlan | None = None,
    effects: StepEffects | None = None,
    numbering: ValueNumbering | None = None,
    *,
    needs_both: bool = True,
) -> tuple[UnitSeconds | None, UnitSeconds | None]:
    """Compare a plan with the eager step, on the host, and time its units.

    Args:
        task: describes the step.
        twin: a copy of the trial's model; left in an undefined state.
        plan: the plan to check.
        batch: a batch of the trial's data; not changed.
        guards: receives the questions of the step's Python about the batch, if any, even if the plan is refused: a
            refusal holds for batches with the same answers.
        kept: the same plan with activations kept, to be checked as well.
        effects: receives what the eager step does and the plan does not.
        numbering: compares numbers instead of values; the times then mean nothing, and `twin` needs no bytes.
        needs_both: whether `plan` is to be checked although `kept` is right; a step of a large model takes long.

    Returns:
        Seconds of the units of `plan`, or None if `plan` was not run; and of `kept`, or None if there is no `kept`, or
        `kept` failed the check.

    Raises:
        CaptureError: the plan's numbers differ from the eager step, or the eager step changes Python state; the message names
            the difference.
        TaskError: a gradient is sparse, or as of `PythonStateGuard`.
        ValuesNeededError: `numbering` cannot compare this step.
    """
    buffers = {name: tensor.detach().clone() for name, tensor in twin.named_buffers()}
    random_state = torch.get_rng_state()
    state = PythonStateGuard(task, twin, plan.mode, keeps_tensors=True)
    running: _Running = nullcontext if numbering is None else partial(numbering.run, twin)
    is_same = batches.same_bits if numbering is None else numbering.is_same
    guards = [] if guards is None else guards

    def rewind() -> None:
        _restore(twin, buffers)
        torch.set_rng_state(random_state)

    try:
        eager = _watched(task, twin, plan.mode, batch, state, guards, effects, running)
        rewind()
        # A step with hidden state may agree with the graph once by luck; the second run shows the state, and whether the
        # step has left modules in a mode that changes the numbers of the next step.
        second_batch = batches.copied(batch)
        with running():
            second_eager = run_eager(task, twin, plan.mode, second_batch, begins=False)

        def checked(other: ShardPlan) -> UnitSeconds:
            rewind()
            tensors = batches.flatten(batches.copied(batch)).tensors
            with running():
                planned, seconds = run_plan(twin, other, tensors)
            _check(eager, second_eager, planned, guards, is_same)
            return seconds

        found = _either(checked, plan, kept, needs_both=needs_both)
    except Exception:
        # The step runs whole then, and has yet to count, and to draw the numbers that a function with a cache has drawn here.
        # The backward may have changed values too, which a capture does not run.
        state.restore()
        raise
    else:
        return found
    finally:
        torch.set_rng_state(random_state)
        # A step that passes has changed the contents of tensors at most: a capture runs in-place operators on stand-ins.
        # Tensors without values, which a step may have left in an object, must not stay there.
        state.restore(only_tensors=numbering is None)


def _either(
    checked: Callable[[ShardPlan], UnitSeconds], plan: ShardPlan, kept: ShardPlan | None, *, needs_both: bool
) -> tuple[UnitSeconds | None, UnitSeconds | None]:
    """Check a plan, or the plan that keeps activations, or both; arguments and result as of `verify`."""
    seconds = checked(plan) if kept is None or needs_both else None
    if kept is not None:
        # Whatever the error of a plan that keeps activations, recomputing is always right.
        with suppress(Exception):
            return seconds, checked(kept)
    return checked(plan) if seconds is None else seconds, None


def _differ(before: tuple[str, list[Any]], after: tuple[str, list[Any]]) -> bool:
    return before[0] != after[0] or any(a is not b for a, b in zip(before[1], after[1], strict=True))


def _check(
    eager: StepOutcome,
    again: StepOutcome,
    ours: StepOutcome,
    guards: list[BatchValueGuard],
    is_same: _Comparison,
) -> None:
    # First the eager step against itself: hidden state would show as a difference to the graph as well, and be
    # misnamed.
    _same_outcome("the eager step gives other {what} when it is run again from the same state", eager, again, is_same)
    _same_outcome("the captured graph gives other {what} than the eager step", eager, ours, is_same)
    if eager.reads == ours.reads:
        guards.clear()  # the graph's operators read the same values as the step's (`one_hot`): Python asked nothing
    traced = sorted(function.__name__ for function in eager.functions - ours.functions)
    if traced:
        # The gradients may agree with the gradients of the forward on a batch and differ on the next batch.
        raise CaptureError(f"its backward runs a torch.autograd.Function of its own: {traced[0]}")
    missing = sorted(eager.operators - ours.operators)
    if missing:
        # The results may agree on a batch and differ on the next batch.
        raise CaptureError(f"the eager step runs operators that the captured graph does not: {', '.join(missing[:3])}")


def verify_close(task: TrainTask, twin: nn.Module, plan: ShardPlan, batch: Any) -> UnitSeconds:
    """Compare a compiled plan with the eager step, up to rounding, and time its units; arguments as of `verify`.

    Raises:
        TaskError: the compiler fails, or the numbers are far from the eager step.
    """
    buffers = {name: tensor.detach().clone() for name, tensor in twin.named_buffers()}
    random_state = torch.get_rng_state()
    outcomes = []
    seconds = UnitSeconds(forward=(), backward=())
    try:
        expected = run_eager(task, twin, plan.mode, batches.copied(batch))
        for _ in range(2):  # the first run compiles
            _restore(twin, buffers)
            torch.set_rng_state(random_state)
            planned, seconds = run_plan(twin, plan, batches.flatten(batches.copied(batch)).tensors, watched=False)
            outcomes.append(planned)
    except Exception as error:
        raise TaskError(f"compile={task.compile!r} fails on this model: {describe(error)}") from error
    finally:
        torch.set_rng_state(random_state)
    tolerance = _TOLERANCE if task.precision == "float32" else _LOW_TOLERANCE
    for what in ("results", "gradients", "buffers"):
        for name, value in getattr(expected, what).items():
            planned_value = getattr(outcomes[-1], what).get(name)
            if planned_value is None or not _close(value, planned_value, tolerance):
                raise TaskError(
                    f"compile={task.compile!r} gives other {what} than the eager step: {name!r} differs by more than "
                    f"{tolerance:g} of its largest value; train this model without a compiler"
                )
    return seconds


def _close(expected: Tensor, found: Tensor, tolerance: float) -> bool:
    if not expected.is_floating_point():
        return torch.equal(expected, found)
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    # Against the largest value: an element near 0 may be a difference of large numbers, and rounds like them.
    return torch.allclose(expected, found, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _same_outcome(message: str, expected: StepOutcome, found: StepOutcome, is_same: _Comparison) -> None:
    for what in ("results", "gradients", "buffers"):
        _compare(message.format(what=what), getattr(expected, what), getattr(found, what), is_same)
    if not torch.equal(expected.random_state, found.random_state):
        raise CaptureError(message.format(what="random numbers"))


def _watched(
    task: TrainTask,
    twin: nn.Module,
    mode: str,
    batch: Any,
    state: PythonStateGuard,
    guards: list[BatchValueGuard],
    effects: StepEffects | None,
    running: _Running,
) -> StepOutcome:
    """Run the eager step, note its effects, and refuse a step that changes state outside the reach of a graph."""
    batch = batches.copied(batch)
    structure = batches.structure(batch)
    with running():
        python_state, numpy_state = random.getstate(), _numpy_state()
        outcome = run_eager(task, twin, mode, batch, guards)
        if random.getstate() != python_state:
            random.setstate(python_state)
            raise CaptureError(
                "the model draws from Python's `random` in its forward; a graph would repeat one draw for ever"
            )
        if numpy_state is not None and _numpy_state() != numpy_state:
            raise CaptureError(
                "the model draws from numpy.random in its forward; a graph would repeat one draw for ever"
            )
        if (changed := state.change(by_step=True)) is not None:
            raise changed_state(changed)
    if effects is not None:
        effects.kept_names |= state.kept()
        effects.changes_batch |= _differ(structure, batches.structure(batch))
    return outcome


def changed_state(name: str) -> CaptureError:
    """Return the error for a step that changes a value."""
    return CaptureError(f"the step changes {name}, which a graph would not")


def tensor_attributes(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of all submodules in plain attributes, and in containers there: a graph has the used ones as constants."""
    return {
        f"{path}.{name}{key}".lstrip("."): tensor
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _MODULE_INTERNALS
        for key, tensor in _tensors(value)
    }


def _tensors(value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_cpu and value.layout is torch.strided and not value.is_nested:
            yield "", value
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from ((f"[{key!r}]{inner_key}", tensor) for inner_key, tensor in _tensors(item))


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")  # a model that never imported numpy cannot have drawn from it
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    # As bytes, because a comparison of arrays gives an array.
    return (name, keys.tobytes(), *rest)


def _restore(twin: nn.Module, buffers: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in twin.named_buffers():
            tensor.copy_(buffers[name])


def _compare(message: str, expected: dict[str, Tensor], found: dict[str, Tensor], is_same: _Comparison) -> None:
    if expected.keys() != found.keys():
        unequal_names = sorted(expected.keys() ^ found.keys())
        raise CaptureError(f"{message}: {', '.join(unequal_names[:3])}")
    for name, tensor in expected.items():
        if not is_same(tensor, found[name]):
            raise CaptureError(f"{message}: {name!r} differs")
