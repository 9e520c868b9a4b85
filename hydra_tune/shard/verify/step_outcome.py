"""Outcome of a step, run eagerly or as a plan's units, on the host.

Besides losses, gradients, buffers and the generator's state, an outcome lists the computing operators: two runs may
agree on a batch by luck, and differ on the next batch. `plan_check.py` takes the outcomes when a plan is checked, and
compares them. `shard/capture/value_replay.py` runs a step under `StepOperatorRecorder`, `shard/cost/eager_pilot.py` calls
`refuse_sparse`, and cost models (`shard/cost/activation_policy.py`, `train/timing/shared_times.py` and others) share
`UnitSeconds`. `train/loop/plan_cache.py`, `pool/fusion/group_matcher.py` and `fusion/compile/batched_plan_cache.py` read
`StepEffects`. The module must not change a plan.

Note: the eager step draws from the thread's torch stream, and a plan from a stream of its own with the same state. Both
leave the buffers of the copy changed.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from hydra_tune.devices.cpu import DefaultCpuGenerator
from hydra_tune.devices.device import RandomGenerator
from hydra_tune.devices.own_generator import drawing_from
from hydra_tune.errors import TaskError
from hydra_tune.shard.capture import batch as batches
from hydra_tune.shard.capture.guards import READS, BatchGuardRecorder, BatchValueGuard
from hydra_tune.shard.capture.own_functions import opaque_calls
from hydra_tune.shard.capture.precision import eager_autocast
from hydra_tune.shard.capture.step_capture import named_state
from hydra_tune.shard.capture.step_module import step_module
from hydra_tune.shard.execute.chain import ShardChain, parameter_gradient_key
from hydra_tune.shard.execute.compute import backward_nodes
from hydra_tune.shard.partition.plan import ShardPlan
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
        # of a mask: eager and captured code may pass attention a mask or `is_causal`, and torch builds the mask
        "tril",
    ]
}


@dataclass(slots=True, kw_only=True)
class StepEffects:
    """Effects of the eager step that its plan does not have.

    Attributes:
        kept_names: attributes of the model in which the step keeps tensors.
        changes_batch: whether the step changes containers of its batch: takes an item out of a dictionary, for example.
    """

    kept_names: set[str] = field(default_factory=set)
    changes_batch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSeconds:
    """Seconds of each shard's units: estimated, measured once on the host (high for small operators), or measured in trials."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """Outcome of a step.

    Attributes:
        results: the loss, or the metrics.
        random_state: state of the generator after the step; for a plan, before the first recompute.
        reads: values read by Python, in order; for a plan, only of the first run of each shard.
        functions: the user's own `torch.autograd.Function`s in the backward; for a plan, those that its graphs call.
    """

    results: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    random_state: Tensor
    operators: frozenset[str]
    functions: frozenset[type] = frozenset()
    reads: tuple[str, ...] = ()


class StepOperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the computing operators by name.

    Views, operators without arithmetic (`_NO_ARITHMETIC`) and a profiler's marks are left out.
    """

    def __init__(self, recorder: BatchGuardRecorder | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._count = 0
        self._numbers: dict[str, set[int]] = {}
        self.reads: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name  # noqa: SLF001
        self._count += 1
        if not func.is_view and name not in _NO_ARITHMETIC and func.namespace != "profiler":
            form = _form_of_attention(func, args, kwargs or {}) if "attention" in name else ""
            # By call, because some calls of an operator may serve only questions, and `seen` leaves these out.
            self._numbers.setdefault(name + form, set()).add(self._count)
        result = func(*args, **(kwargs or {}))
        if name in READS:
            self.reads.append(repr(result))
        if self._recorder is not None:
            self._recorder.note(func, args, kwargs or {}, result)
        return result

    def seen(self, without: frozenset[int] = frozenset()) -> frozenset[str]:
        """Names of the operators run so far, without the calls with the given numbers."""
        return frozenset(name for name, numbers in self._numbers.items() if numbers - without)


def _form_of_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Suffix for causal attention: attention kernels add in another order for `is_causal` than for a mask."""
    named_arguments = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}  # noqa: SLF001
    return " (causal)" if named_arguments.get("is_causal") else ""


class HostChainStore:
    """A chain's store with all tensors in host memory."""

    def __init__(self, state: dict[str, Tensor], constants: dict[str, Tensor], inputs: Sequence[Tensor]) -> None:
        self._state, self._constants, self._inputs = state, constants, inputs
        self.values: dict[str, Tensor] = {}

    def state(self, names: Sequence[str]) -> list[Tensor]:
        """Return parameters and buffers by name."""
        return [self._state[name] for name in names]

    def constants(self, names: Sequence[str]) -> list[Tensor]:
        """Return constants by name."""
        return [self._constants[name] for name in names]

    def inputs(self, indices: Sequence[int]) -> list[Tensor]:
        """Return batch tensors by index."""
        return [self._inputs[index] for index in indices]

    def get(self, key: str) -> Tensor | None:
        """Return a value put earlier, or None."""
        return self.values.get(key)

    def put(self, key: str, tensor: Tensor) -> None:
        """Keep a value."""
        self.values[key] = tensor

    def drop(self, key: str) -> None:
        """Forget a value."""
        self.values.pop(key, None)

    def changed(self, key: str) -> None:
        """Do nothing: there is only a single copy."""

    def settle(self) -> None:
        """Do nothing: no unit is undone here."""


def run_eager(
    task: TrainTask,
    twin: nn.Module,
    mode: str,
    batch: Any,
    guards: list[BatchValueGuard] | None = None,
    *,
    begins: bool = True,
) -> StepOutcome:
    """Run the user's own code once.

    Args:
        task: describes the step.
        twin: a copy of the trial's model; its buffers keep the changes of the step.
        mode: "train" or "evaluate".
        batch: the step may change the batch.
        guards: as of `verify`.
        begins: whether the step is the first of its pass; a later step goes on in the modes that the earlier one has left.

    Raises:
        TaskError: a gradient is sparse.
    """
    wrapper = step_module(task, twin, mode, sets_mode=begins)
    recorder = BatchGuardRecorder(batches.flatten(batch).tensors)
    operators = StepOperatorRecorder(recorder)
    with torch.set_grad_enabled(mode == "train"), operators:
        with eager_autocast(task.precision):
            results = wrapper(batch)
        functions = _own_functions(results["loss"]) if mode == "train" else frozenset()
        if mode == "train":
            results["loss"].backward()
    # A graph has the answers baked in, so operators that only lead to questions are missing there rightly.
    guard, only_asked = recorder.finish()
    if guards is not None and guard is not None:
        guards.append(guard)
    gradients = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    refuse_sparse(gradients)
    # The twin runs again, and `.grad` would accumulate.
    twin.zero_grad(set_to_none=True)
    return StepOutcome(
        results={name: value.detach() for name, value in results.items()},
        gradients=gradients,
        buffers={name: tensor.detach().clone() for name, tensor in twin.named_buffers()},
        random_state=torch.get_rng_state(),
        operators=operators.seen(without=only_asked),
        functions=functions,
        reads=tuple(operators.reads),
    )


def _own_functions(loss: Tensor) -> frozenset[type]:
    """Functions in a loss's autograd graph with a backward in Python.

    Without reentrant checkpoints, which a capture resolves, and backwards that custom operators register, which come with
    the operators.
    """
    functions: set[type] = {
        node._forward_cls  # type: ignore[attr-defined]  # noqa: SLF001
        for node in backward_nodes(loss.grad_fn)
        if isinstance(node, torch.autograd.function.BackwardCFunction)
    }
    own = functions - {CheckpointFunction}
    return frozenset(function for function in own if function.__module__ != "torch._library.autograd")


def refuse_sparse(gradients: dict[str, Tensor]) -> None:
    """Raise `TaskError` for a sparse gradient, by the parameter's name."""
    for name, gradient in gradients.items():
        if gradient.layout is not torch.strided:
            raise TaskError(
                f"the gradient of {name!r} is sparse, which cannot be spilled; build its layer with sparse=False"
            )


def run_plan(
    twin: nn.Module, plan: ShardPlan, inputs: Sequence[Tensor], *, watched: bool = True
) -> tuple[StepOutcome, UnitSeconds]:
    """Run a plan's units; without `watched` for compiled plans, because compilers refuse to work under a dispatch mode."""
    store = HostChainStore(dict(named_state(twin)), plan.constants, inputs)
    chain, generator = ShardChain(plan, store), DefaultCpuGenerator()
    count = len(plan.shards)
    forward, backward = [0.0] * count, [0.0] * count
    # A generator of its own, as in the pool, whose workers never draw from the default generator.
    stream = torch.Generator()
    stream.set_state(torch.get_rng_state())

    def timed(index: int, unit: Callable[[int, RandomGenerator], None]) -> float:
        with drawing_from(stream):
            start = time.perf_counter()
            unit(index, generator)
            return time.perf_counter() - start

    operators = StepOperatorRecorder()
    with operators if watched else nullcontext():
        for index in range(count):
            if chain.has_forward(index):
                forward[index] = timed(index, chain.forward)
        final_state = stream.get_state()
        reads = tuple(operators.reads)
        for index in reversed(range(count)):
            if plan.mode == "train" and plan.shards[index].has_backward:
                backward[index] = timed(index, chain.backward)
                # The last shard has no forward unit, so the last shard draws and reads here. The other shards may run
                # a second time from here on, from saved states.
                if index == count - 1:
                    final_state = stream.get_state()
                    reads = tuple(operators.reads)
    prefix = parameter_gradient_key("")
    outcome = StepOutcome(
        results={name: store.values[key] for name, key in zip(plan.names, plan.outputs, strict=True)},
        gradients={key.removeprefix(prefix): t for key, t in store.values.items() if key.startswith(prefix)},
        buffers={name: tensor.detach().clone() for name, tensor in twin.named_buffers()},
        random_state=final_state,
        operators=operators.seen(),
        functions=frozenset(
            call.function
            for shard in plan.shards
            if shard.graph.code is not None
            for call in opaque_calls(shard.graph.code)
        ),
        reads=reads,
    )
    return outcome, UnitSeconds(forward=tuple(forward), backward=tuple(backward))
