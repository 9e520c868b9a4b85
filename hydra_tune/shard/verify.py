"""Every new plan is checked once against the eager step it was captured from, bit for bit, before it is used.

Export bakes Python in: a counter, a branch on a random number, a custom autograd function or code that asks whether
gradients are on would give wrong numbers without an error. So the first batch is run twice on the host from one state, once
eagerly and once as the plan's units; losses, gradients, buffers and the generator must agree, and the eager run must not
have moved anything a graph cannot move (plain attributes, the `random` and numpy generators). The run of the units also
gives their first times.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_tune.devices.cpu import DefaultCpuGenerator, drawing_from
from hydra_tune.devices.device import RandomGenerator
from hydra_tune.errors import CaptureError, TaskError
from hydra_tune.shard import batch as batches
from hydra_tune.shard.capture import describe, named_state
from hydra_tune.shard.chain import Chain, parameter_gradient_key
from hydra_tune.shard.guards import Guard, Recorder
from hydra_tune.shard.plan import Plan, Shard
from hydra_tune.shard.precision import eager_autocast
from hydra_tune.shard.steps import step_module
from hydra_tune.task import TrainTask

_NO_ARITHMETIC = {
    f"aten::{name}"
    for name in [
        "_to_copy",
        "clone",
        "copy_",
        "detach",
        "lift",
        "lift_fresh",
        "lift_fresh_copy",
        "alias",
        "empty",
        "empty_like",
        "empty_strided",
        "zeros",
        "zeros_like",
        "ones",
        "ones_like",
        "full",
        "full_like",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty_strided",
        "fill_",
        "zero_",
        "arange",
        "scalar_tensor",
        "_local_scalar_dense",
        "_unsafe_view",
        "_reshape_copy",
        "item",
        "set_",
        "is_same_size",
        "tril",  # of a mask: models give attention a mask or `is_causal` as they are captured or not, and torch makes the mask
    ]
}


_TOLERANCE, _LOW_TOLERANCE = 1e-3, 0.05  # of a compiled plan, relative to a tensor's largest value

_MODULE_INTERNALS = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSeconds:
    """Seconds of each shard's units as first run, on the host: a first guess, a little high for small operators."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    results: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    random_state: Tensor
    operators: frozenset[str]


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that compute something, by name: views, copies and fills are left out."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._count = 0
        self._numbers: dict[str, set[int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name  # noqa: SLF001
        self._count += 1
        if not func.is_view and name not in _NO_ARITHMETIC:
            self._numbers.setdefault(name, set()).add(self._count)
        result = func(*args, **(kwargs or {}))
        if self._recorder is not None:
            self._recorder.note(func, args, kwargs or {}, result)
        return result

    def seen(self, without: frozenset[int] = frozenset()) -> frozenset[str]:
        """The operators that have run, but for the calls of these numbers."""
        return frozenset(name for name, numbers in self._numbers.items() if numbers - without)


class HostStore:
    """A chain's store with everything in host memory."""

    def __init__(self, state: dict[str, Tensor], constants: dict[str, Tensor], inputs: Sequence[Tensor]) -> None:
        self._state, self._constants, self._inputs = state, constants, inputs
        self.values: dict[str, Tensor] = {}

    def state(self, names: Sequence[str]) -> list[Tensor]:
        """Parameters and buffers by name."""
        return [self._state[name] for name in names]

    def constants(self, names: Sequence[str]) -> list[Tensor]:
        """Constants by name."""
        return [self._constants[name] for name in names]

    def inputs(self, indices: Sequence[int]) -> list[Tensor]:
        """Batch tensors by index."""
        return [self._inputs[index] for index in indices]

    def get(self, key: str) -> Tensor | None:
        """A value put earlier, or None."""
        return self.values.get(key)

    def put(self, key: str, tensor: Tensor) -> None:
        """Keep a value."""
        self.values[key] = tensor

    def drop(self, key: str) -> None:
        """Forget a value."""
        self.values.pop(key, None)

    def changed(self, key: str) -> None:
        """Nothing to do: there is one copy."""


def verify(task: TrainTask, twin: nn.Module, plan: Plan, batch: Any, guards: list[Guard] | None = None) -> UnitSeconds:
    """Compare a plan with the eager step, on the host, and time its units.

    Args:
        task: describes the step.
        twin: a copy of the trial's model; left in an undefined state.
        plan: the plan to check.
        batch: a batch of the trial's data; not changed.
        guards: takes what the step's Python has asked of the batch, if anything, even where the plan is refused: what is
            found holds for batches that give the same answers.

    Raises:
        CaptureError: the plan's numbers are not the eager ones; the message names what differs.
    """
    buffers = {name: tensor.detach().clone() for name, tensor in twin.named_buffers()}
    random_state = torch.get_rng_state()

    def rewind() -> None:
        _restore(twin, buffers)
        torch.set_rng_state(random_state)

    try:
        eager = _watched(
            twin, lambda: _run_eager(task, twin, plan.mode, _copy(batch), [] if guards is None else guards)
        )
        rewind()
        again = _run_eager(task, twin, plan.mode, _copy(batch))
        rewind()
        ours, seconds = _run_plan(twin, plan, batches.flatten(_copy(batch)).tensors)
    finally:
        torch.set_rng_state(random_state)
    _same_outcome("the eager step gives other {what} when it is run again from the same state", eager, again)
    _same_outcome("the captured graph gives other {what} than the eager step", eager, ours)
    missing = sorted(eager.operators - ours.operators)
    if missing:
        # Their results may agree on one batch and differ on the next.
        raise CaptureError(f"the eager step runs operators that the captured graph does not: {', '.join(missing[:3])}")
    return seconds


def verify_close(task: TrainTask, twin: nn.Module, plan: Plan, batch: Any) -> UnitSeconds:
    """Compare a compiled plan with the eager step, up to rounding, and time its units once they are compiled.

    Args:
        task: describes the step.
        twin: a copy of the trial's model; left in an undefined state.
        plan: the plan to check.
        batch: a batch of the trial's data; not changed.

    Raises:
        TaskError: the compiler fails, or its numbers are far from the eager ones.
    """
    buffers = {name: tensor.detach().clone() for name, tensor in twin.named_buffers()}
    random_state = torch.get_rng_state()
    outcomes = []
    seconds = UnitSeconds(forward=(), backward=())
    try:
        expected = _run_eager(task, twin, plan.mode, _copy(batch))
        for _ in range(2):  # the first run compiles
            _restore(twin, buffers)
            torch.set_rng_state(random_state)
            found, seconds = _run_plan(twin, plan, batches.flatten(_copy(batch)).tensors, watched=False)
            outcomes.append(found)
    except Exception as error:
        raise TaskError(f"compile={task.compile!r} fails on this model: {describe(error)}") from error
    finally:
        torch.set_rng_state(random_state)
    tolerance = _TOLERANCE if task.precision == "float32" else _LOW_TOLERANCE
    for what in ("results", "gradients", "buffers"):
        for name, value in getattr(expected, what).items():
            other = getattr(outcomes[-1], what).get(name)
            if other is None or not _close(value, other, tolerance):
                raise TaskError(
                    f"compile={task.compile!r} gives other {what} than the eager step: {name!r} differs by more than "
                    f"{tolerance:g} of its largest value; train this model without a compiler"
                )
    return seconds


def _close(expected: Tensor, found: Tensor, tolerance: float) -> bool:
    if not expected.is_floating_point():
        return torch.equal(expected, found)
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(expected, found, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _same_outcome(message: str, expected: "_Outcome", found: "_Outcome") -> None:
    for what in ("results", "gradients", "buffers"):
        _compare(message.format(what=what), getattr(expected, what), getattr(found, what))
    if not torch.equal(expected.random_state, found.random_state):
        raise CaptureError(message.format(what="random numbers"))


def _copy(batch: Any) -> Any:
    leaves = batches.flatten(batch)
    return leaves.rebuild(tuple(tensor.clone() for tensor in leaves.tensors))


def _watched(twin: nn.Module, run: Callable[[], _Outcome]) -> _Outcome:
    """Run the eager step and refuse a model that moves state which no graph can move."""
    attributes, python_state, numpy_state = plain_attributes(twin), random.getstate(), _numpy_state()
    outcome = run()
    if random.getstate() != python_state:
        random.setstate(python_state)
        raise CaptureError(
            "the model draws from Python's `random` in its forward; a graph would repeat one draw for ever"
        )
    if numpy_state is not None and _numpy_state() != numpy_state:
        raise CaptureError("the model draws from numpy.random in its forward; a graph would repeat one draw for ever")
    for name, value in plain_attributes(twin).items():
        if name not in attributes or attributes[name] != value:
            raise CaptureError(f"the model's forward changes its attribute {name!r}, which a graph would not")
    return outcome


def plain_attributes(twin: nn.Module) -> dict[str, Any]:
    """Attributes of all submodules as far as they are plain values, and containers of such: what a graph would bake in."""
    return {
        f"{path}.{name}".lstrip("."): _plain(value)
        for path, module in twin.named_modules()
        for name, value in vars(module).items()
        if name not in _MODULE_INTERNALS
    }


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value.hex()  # NaN is NaN
    if isinstance(value, int | str | None):
        return value
    if isinstance(value, dict):
        return tuple((key, _plain(item)) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(_plain(item) for item in value)
    return value.getstate() if isinstance(value, random.Random) else None


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")  # a model that never imported numpy cannot have drawn from it
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return (name, keys.tobytes(), *rest)


def _restore(twin: nn.Module, buffers: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in twin.named_buffers():
            tensor.copy_(buffers[name])


def _run_eager(task: TrainTask, twin: nn.Module, mode: str, batch: Any, guards: list[Guard] | None = None) -> _Outcome:
    wrapper = step_module(task, twin, mode)
    recorder = Recorder(batches.flatten(batch).tensors)
    operators = _Operators(recorder)
    with torch.set_grad_enabled(mode == "train"), operators:
        with eager_autocast(task.precision):
            results = wrapper(batch)
        if mode == "train":
            results["loss"].backward()
    guard, only_asked = recorder.finish()
    if guards is not None and guard is not None:
        guards.append(guard)
    gradients = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    _refuse_sparse(gradients)
    twin.zero_grad(set_to_none=True)
    return _Outcome(
        results={name: value.detach() for name, value in results.items()},
        gradients=gradients,
        buffers={name: tensor.detach().clone() for name, tensor in twin.named_buffers()},
        random_state=torch.get_rng_state(),
        operators=operators.seen(without=only_asked),
    )


def _refuse_sparse(gradients: dict[str, Tensor]) -> None:
    for name, gradient in gradients.items():
        if gradient.layout is not torch.strided:
            raise TaskError(
                f"the gradient of {name!r} is sparse, which cannot be spilled; build its layer with sparse=False"
            )


def _run_plan(
    twin: nn.Module, plan: Plan, inputs: Sequence[Tensor], *, watched: bool = True
) -> tuple[_Outcome, UnitSeconds]:
    """Run a plan's units; compilers refuse to work while operators are watched."""
    store = HostStore(dict(named_state(twin)), plan.constants, inputs)
    chain, generator = Chain(plan, store), DefaultCpuGenerator()
    count = len(plan.shards)
    forward, backward = [0.0] * count, [0.0] * count
    stream = torch.Generator()
    stream.set_state(torch.get_rng_state())

    def timed(index: int, unit: Callable[[int, RandomGenerator], None]) -> float:
        with _drawing(plan.shards[index], stream):
            start = time.perf_counter()
            unit(index, generator)
            return time.perf_counter() - start

    operators = _Operators()
    with operators if watched else nullcontext():
        for index in range(count):
            if chain.has_forward(index):
                forward[index] = timed(index, chain.forward)
        final_state = stream.get_state()
        for index in reversed(range(count)):
            if plan.mode == "train" and plan.shards[index].has_backward:
                backward[index] = timed(index, chain.backward)
                if index == count - 1:
                    final_state = stream.get_state()
    prefix = parameter_gradient_key("")
    outcome = _Outcome(
        results={name: store.values[key] for name, key in zip(plan.names, plan.outputs, strict=True)},
        gradients={key.removeprefix(prefix): t for key, t in store.values.items() if key.startswith(prefix)},
        buffers={name: tensor.detach().clone() for name, tensor in twin.named_buffers()},
        random_state=final_state,
        operators=operators.seen(),
    )
    return outcome, UnitSeconds(forward=tuple(forward), backward=tuple(backward))


@contextmanager
def _drawing(shard: Shard, stream: torch.Generator) -> Iterator[None]:
    """Let a shard draw from the stream the way it will in training."""
    if shard.graph.own_draws:
        with drawing_from(stream):
            yield
        return
    torch.set_rng_state(stream.get_state())
    yield
    stream.set_state(torch.get_rng_state())


def _compare(message: str, expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    if expected.keys() != found.keys():
        odd = sorted(expected.keys() ^ found.keys())
        raise CaptureError(f"{message}: {', '.join(odd[:3])}")
    for name, tensor in expected.items():
        if not same_bits(tensor, found[name]):
            raise CaptureError(f"{message}: {name!r} differs")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the last bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    left, right = a.detach().contiguous(), b.detach().contiguous()
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
