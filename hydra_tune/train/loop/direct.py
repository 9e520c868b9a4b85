"""Steps of a trial that fits its device whole: the user's own module and step, run as in a plain loop.

Nothing is captured, so nothing about the user's code is frozen. `OwnCodeTrial` (`train/own_code_trial.py`) calls
`WholeModelRunner` for each batch and each optimizer step, inside `held`, the trial's streams and the capture gate, all entered
by a burst (`burst.py`). The module takes no lock, and must not know other trials or the schedule.

Note: memory. The activations of a step are known only once the step has run, so the first step of each kind is
*followed*: a mode sees each operator (in mixed precision, autograd's hooks see saved tensors) and takes room on the device's
ledger for the results (`workspace_tracker.py`). Where the room is used up, tensors saved by autograd so far go to the host,
and tensors saved later go there at once: the step completes and counts, and the trial is cut from its next step on, or,
where no cut is possible, spills in every step (`always_sheds`), each of which is followed. Other later steps of the kind get
the room of the first step. A kind is a structure of batches: a batch that is no larger in any dimension needs no more room.

Note: undo. Where spilling activations does not help, a single operator needs more than the device has. Until the optimizer
steps, only buffers, gradients, random streams and Python state of the trial have changed: `undo` restores all four, and the
batches of the step run once more, cut. The same holds for a validation batch.

Note: notes of Python state. A note walks through all Python values that the step may read, so only followed steps take
one. Where all steps are followed, the first alone does, and later steps are undone only if no noted step changed a value.
"""

import datetime as dt
import enum
import math
import types
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hydra_tune.devices.device import Device
from hydra_tune.errors import BadLossError, TaskError
from hydra_tune.memory.activation_offload import LazySavedTensorSpiller
from hydra_tune.memory.block import BlockKind
from hydra_tune.memory.lease import Lease
from hydra_tune.shard.capture.batch import refuse_nested
from hydra_tune.shard.capture.precision import eager_autocast, regions_in_turn
from hydra_tune.shard.capture.step_capture import named_state
from hydra_tune.shard.capture.step_module import evaluation_metrics, training_loss
from hydra_tune.shard.cost.pilot import aligned
from hydra_tune.shard.execute.compute import rounds_otherwise_under_modes
from hydra_tune.shard.python_state.state_guard import PythonStateUndo, step_functions
from hydra_tune.task import Batch, TrainTask, backward_called, returned
from hydra_tune.train.data.handles import moved, tensors_of
from hydra_tune.train.loop.gradient_rules import GradientProcessor
from hydra_tune.train.loop.workspace_tracker import WorkspaceTracker
from hydra_tune.train.rng.recurrent_dropout import drops_between_layers, seed_anew
from hydra_tune.train.rng.rng_streams import RandomStreams
from hydra_tune.train.state.model_state import optimizer_tensors

_MOST_SEEN = 1024
# Py_TPFLAGS_HEAPTYPE: set for classes created by Python code.
_HEAP_TYPE = 1 << 9


class _OpaqueError(Exception):
    """Raised when a batch has parts of unknown size."""


class WholeModelRunner:
    """Runs the steps of one trial while the caller holds a lease on all of the trial's state.

    Attributes:
        workspace_bytes: largest room beside the state needed by the steps so far.
        passes_gate: as of `BurstSteps`.
        has_followed: whether a step was followed, or has made state late; reset by `OwnCodeTrial`.
        has_shed: whether a step fit only because its activations went to the host, or the next step will not fit.
        always_sheds: whether activations go to the host in every step, because the model can be cut no finer.
    """

    passes_gate = True

    def __init__(
        self,
        task: TrainTask,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        gradients: GradientProcessor,
        streams: RandomStreams,
        *,
        always_sheds: bool = False,
    ) -> None:
        self.workspace_bytes = 0
        self.has_followed = self.has_shed = False
        self.always_sheds = always_sheds
        self._task = task
        self._module = module
        self._optimizer = optimizer
        self._gradients = gradients
        self._streams = streams
        self._loss = training_loss(task)
        self._argument = "loss" if task.step is None else "step"
        self._known: dict[Hashable, list[tuple[int, ...]]] = {}
        # Quick keys of known kinds, so that most batches skip the structural comparison.
        self._seen: set[Hashable] = set()
        self._following: _TrackedStep | None = None
        # Kinds of the batches in the followed step.
        self._fresh: list[tuple[Hashable, tuple[int, ...]]] = []
        # State before the followed step, if its first batch was followed.
        self._before: _StepBackup | None = None
        # Python state before the first followed batch of the step.
        self._python: PythonStateUndo | None = None
        # Whether batches of the step have run without a note of their Python state.
        self._has_unnoted = False
        # By mode: whether a step has changed Python state; no entry: no step has been noted.
        self._changes_python: dict[str, bool] = {}
        self._lease: Lease | None = None
        self._device: Device | None = None
        self._is_plain = task.precision == "float32" and gradients.is_plain
        # Number of entries in the optimizer's state after the last step.
        self._state_entries = 0
        # Batches of the present step that have left gradients.
        self._num_batches = 0
        # Whether no batch has been trained on yet.
        self._is_first = True
        self._drops_between_layers = drops_between_layers(module)

    @contextmanager
    def held(self, lease: Lease, device: Device) -> Iterator[None]:
        """Set the lease and the device under which the steps inside the context run."""
        self._lease, self._device = lease, device
        try:
            yield
        finally:
            self._lease = self._device = None

    def train(self, batch: Batch, share: float) -> float:
        """Run forward and backward of a batch, or of a piece with a share of the samples; return the training loss.

        Raises:
            TaskError: the loss is not a scalar tensor, or the first batch's step has computed gradients itself.
            BadLossError: the loss is not finite; no backward has run.
            BudgetError: the step does not fit the device, even with its activations on the host.
        """
        batch = self._placed("train", batch)
        assert self._device is not None
        if self._drops_between_layers and not self._device.is_host:
            seed_anew(self._device.torch_device)
        is_checked, self._is_first = self._is_first and not self._has_gradients, False
        with regions_in_turn:
            if self._following is None and self._task.precision == "float32":
                loss = self._loss(self._module, batch)
            else:
                with self._surroundings():
                    loss = self._loss(self._module, batch)
            # A `step=` that calls backward() itself would count its gradients twice.
            if is_checked and self._has_gradients:
                raise backward_called()
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise TaskError(f"{self._argument}= must return a scalar tensor, not {returned(loss)}")
            value = float(loss.item())
            if not math.isfinite(value):
                raise BadLossError(f"the training loss is {value}")
            root = self._gradients.objective(share)(loss)
            following = self._following
            with nullcontext() if following is None else following.differentiating(root, self._trained_parameters()):
                root.backward()  # type: ignore[no-untyped-call]
        self._num_batches += 1
        return value

    def step(self, number: int) -> None:
        """Take the optimizer's step of a number, from 1, once all batches of the step have run."""
        self._follow_on()
        tracked_step, self._before = self._following, None
        self._num_batches = 0
        self._unnote("train")
        with nullcontext() if tracked_step is None else tracked_step.updating(self._trained_parameters()):
            self._update()
            if self._task.after_step is not None:
                self._task.after_step(self._module, self._optimizer, number)
        # An optimizer may keep a number of its own among the dicts of the parameters.
        entries = self._optimizer.state.values()
        num_entries = sum(len(each) if isinstance(each, dict) else 1 for each in entries)
        if tracked_step is not None:
            self._followed(tracked_step)
        elif num_entries != self._state_entries:
            self._made_state_late()
        self._state_entries = num_entries

    def _update(self) -> None:
        if self._is_plain:
            self._gradients.clip_plainly(self._module, self._optimizer)
            self._optimizer.step()
        else:
            self._scaled_step()
        self._optimizer.zero_grad()

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """Return the metrics of one validation batch; the caller has switched off training mode and gradients.

        Raises:
            MetricError: a metric is not a scalar.
            BudgetError: the batch does not fit the device.
        """
        batch = self._placed("evaluate", batch)
        with self._surroundings():
            values = evaluation_metrics(self._task, self._module, batch)
        tracked_step, self._before = self._following, None
        self._unnote("evaluate")
        if tracked_step is not None:
            self._followed(tracked_step)
        return values

    def close(self) -> None:
        """Release an unfinished step."""
        self._following = self._before = self._python = None
        self._has_unnoted = False
        self._fresh.clear()

    def undo(self, mode: str) -> bool:
        """Restore the state before the batches of a step that does not fit; return False if the state is unknown."""
        backup, self._before = self._before, None
        self._num_batches = 0
        if backup is None or (self._has_unnoted and self._changes_python.get(mode, False)):
            return False
        if self._python is not None:
            self._python.undo()
        backup.restore()
        if mode == "evaluate":
            return True
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in backup.zeroed and parameter.grad is not None:
                    parameter.grad.zero_()
                else:
                    parameter.grad = None
        return True

    def _note(self, mode: str, *, is_always_followed: bool) -> None:
        if self._following is None or (is_always_followed and mode in self._changes_python):
            self._has_unnoted = self._has_unnoted or self._python is None
        elif self._python is None:
            functions = step_functions(self._task, mode)
            self._python = PythonStateUndo(functions, self._task, module=self._module)

    def _unnote(self, mode: str) -> None:
        if self._python is not None:
            self._changes_python[mode] = self._changes_python.get(mode, False) or self._python.differs
            self._python = None
        self._has_unnoted = False

    def _trained_parameters(self) -> list[Tensor]:
        module_parameters = list(self._module.parameters())
        optimizer_parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        return [p for p in dict.fromkeys([*module_parameters, *optimizer_parameters]) if p.requires_grad and p.is_leaf]

    @property
    def _has_begun(self) -> bool:
        """Whether a batch of the step has left gradients, which the `zero_grad` of an optimizer may leave as zeros."""
        gradients = (p.grad for group in self._optimizer.param_groups for p in group["params"])
        return self._num_batches > 0 or any(g is not None and (g.is_sparse or bool(g.any())) for g in gradients)

    @property
    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._module.parameters())

    def _placed(self, mode: str, batch: Batch) -> Batch:
        """Move the batch to the device of the step; follow the step unless the room for batches of its kind is known."""
        assert self._device is not None
        self._follow_on()
        if not self._device.is_host:
            batch = moved(batch, self._device.torch_device)
        # With accumulation, a later batch of the step may be of a new kind, and its undo has to cover the earlier batches.
        if mode == "train" and self._task.accumulate > 1 and self._before is None and not self._has_begun:
            self._before = _StepBackup(self._module, self._optimizer, self._streams, self._device)
        quick = _quick_key(mode, batch)
        if quick in self._seen:
            self._note(mode, is_always_followed=False)
            return batch
        kind, sizes = _kind_of(mode, batch)
        known_sizes = None if self.always_sheds or kind is None else self._known.get(kind)
        if known_sizes is None or not any(_covers(earlier_sizes, sizes) for earlier_sizes in known_sizes):
            if kind is not None:
                self._fresh.append((kind, sizes))
            if self._following is None:
                self._following = self._follow()
                if self._before is None and (mode == "evaluate" or not self._has_begun):
                    self._before = _StepBackup(self._module, self._optimizer, self._streams, self._device)
            self._following.add(batch)
        # Bounded, because data with ever-new shapes would grow the set for ever.
        elif quick is not None and len(self._seen) < _MOST_SEEN:
            self._seen.add(quick)
        self._note(mode, is_always_followed=self.always_sheds or kind is None)
        return batch

    def _follow_on(self) -> None:
        """Follow the rest of a step under the present lease: the trial may have left its device within the step."""
        if self._following is not None and self._following.lease is not self._lease:
            assert self._lease is not None
            assert self._device is not None
            self._following.go_on(self._lease, self._device, self.workspace_bytes, self._present_state())

    def _present_state(self) -> list[Tensor]:
        """Return the tensors that have room on the lease already."""
        assert self._device is not None
        return [*dict(named_state(self._module)).values(), *optimizer_tensors(self._optimizer, self._device)]

    def _follow(self) -> "_TrackedStep":
        assert self._lease is not None
        assert self._device is not None
        device = self._device
        state = self._present_state()
        gradients = [p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        tracked_step = _TrackedStep(self._lease, device, self.workspace_bytes, state, gradients, self._task.precision)
        tracked_step.optimizer_bytes = self._optimizer_bytes()
        if self.always_sheds:
            tracked_step.shed()
        return tracked_step

    def _optimizer_bytes(self) -> int:
        """Return the bytes of the optimizer's state; a step keeps at least the bytes by which the state grows."""
        assert self._device is not None
        tensors = optimizer_tensors(self._optimizer, self._device)
        return sum(aligned(t.numel() * t.element_size(), self._device.alignment) for t in tensors)

    def _surroundings(self) -> ExitStack:
        stack = ExitStack()
        if self._following is not None:
            stack.enter_context(self._following.saving())
        assert self._device is not None
        stack.enter_context(eager_autocast(self._task.precision, self._device.torch_device.type))
        return stack

    def _followed(self, following: "_TrackedStep") -> None:
        """Record the needs of a followed step at the end of the step."""
        self._following, self.has_followed = None, True
        self.workspace_bytes = max(self.workspace_bytes, following.workspace_bytes)
        assert self._lease is not None
        following.kept_bytes = max(following.kept_bytes, self._optimizer_bytes() - following.optimizer_bytes)
        # The first step creates the optimizer's state after its activations are gone; the next step has both at once.
        fits = self._lease.would_fit(self.workspace_bytes + following.kept_bytes)
        self.has_shed = self.has_shed or following.has_shed or not fits
        for kind, sizes in self._fresh:
            known_sizes = self._known.setdefault(kind, [])
            # A larger kind covers all smaller ones, so only maximal sizes are kept.
            known_sizes[:] = [earlier_sizes for earlier_sizes in known_sizes if not _covers(sizes, earlier_sizes)]
            known_sizes.append(sizes)
        self._fresh.clear()

    def _made_state_late(self) -> None:
        """Account for state created or released by the optimizer in a step that was not followed."""
        # The caller then refreshes the groups, as after a followed step.
        self.has_followed = True
        assert self._lease is not None
        assert self._device is not None
        tensors = optimizer_tensors(self._optimizer, self._device)
        new_tensors = [tensor for tensor in tensors if not self._lease.owns(tensor, (BlockKind.OPTIMIZER,))]
        nbytes = sum(aligned(t.untyped_storage().nbytes(), self._device.alignment) for t in new_tensors)
        self.has_shed = self.has_shed or not self._lease.would_fit(self.workspace_bytes + nbytes)

    def _scaled_step(self) -> None:
        named = {name: p for name, p in self._module.named_parameters() if p.grad is not None}
        gradients = self._gradients
        names: dict[Tensor, str] = {p: name for name, p in named.items()}
        ordered_names = [names[p] for p in gradients.in_order(named.values(), self._optimizer)]
        gradients.complete({name: named[name].grad for name in ordered_names})  # type: ignore[misc]  # those with gradients
        if not gradients.skips_update:
            if ordered_names:
                gradients.clip([named[name] for name in ordered_names], ordered_names)
            self._optimizer.step()
        gradients.next_step()


class _StepBackup:
    """Buffers and streams, which the batches of a step may change, saved on the host: the device may have no room.

    Attributes:
        zeroed: identities of the parameters whose gradients are zeros, and not None.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, streams: RandomStreams, device: Device
    ) -> None:
        self.zeroed = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        self._device = device
        self._buffers = [
            (submodule, name, buffer)
            for submodule in module.modules()
            for name, buffer in submodule.named_buffers(recurse=False)
            if not is_lazy(buffer)
        ]
        self._copies: list[Tensor] = []
        if self._buffers:
            self._copies = device.on_host(lambda: [torch.empty_like(b, device="cpu") for _, _, b in self._buffers])
            device.spill(list(zip(self._present(), self._copies, strict=True)))
        self._streams, self._position = streams, streams.state()

    def restore(self) -> None:
        """Restore buffers and streams."""
        for module, name, buffer in self._buffers:
            # The forward may have replaced the buffer by another tensor.
            setattr(module, name, buffer)
        if self._buffers:
            self._device.load(list(zip(self._copies, self._present(), strict=True)))
        self._streams.restore(self._position)

    def _present(self) -> list[Tensor]:
        """Return the buffers where they are now; a stored list would keep their memory alive after a move."""
        return [buffer.detach() for _, _, buffer in self._buffers]


class _TrackedStep:
    """A followed step.

    Args:
        lease: source of room; another one after `go_on`.
        device: device of the step's first batch.
        granted_bytes: initial room of the step.
        state: tensors with room on the lease already.
        gradients: gradients left by earlier batches of the step.

    Attributes:
        kept_bytes: lasting bytes created by the step, such as the optimizer's state.
        optimizer_bytes: bytes of the optimizer's state before the step.
    """

    def __init__(
        self,
        lease: Lease,
        device: Device,
        granted_bytes: int,
        state: Iterable[Tensor],
        gradients: Iterable[Tensor],
        precision: str,
    ) -> None:
        state = list(state)
        self._state_storages = {tensor.untyped_storage()._cdata for tensor in state}  # noqa: SLF001 - the storage's identity
        # In mixed precision and in compiled code, where no mode follows the operators, tensors become known when
        # autograd saves them.
        self._saved = LazySavedTensorSpiller(
            device,
            lambda t: t.untyped_storage()._cdata in self._state_storages,  # noqa: SLF001
            lambda t: self._tracker.follow(t.detach()),
        )
        self._tracker = WorkspaceTracker(lease, granted_bytes, device.alignment, self._saved.shed)
        self._tracker.know(*state)
        self._tracker.follow(*gradients)
        # Under autocast, kernels that call others inside (the fused transformer layer) round differently where a mode follows.
        self._is_tracked = precision == "float32"
        self._alignment = device.alignment
        self.lease = lease
        self._before_update = 0
        self.kept_bytes = self.optimizer_bytes = 0

    @property
    def has_shed(self) -> bool:
        """Whether activations went to the host."""
        return self._saved.is_shedding

    def shed(self) -> None:
        """Send activations to the host from now on."""
        self._saved.shed()

    def go_on(self, lease: Lease, device: Device, granted_bytes: int, state: Iterable[Tensor]) -> None:
        """Follow the rest of the step under another lease, perhaps on another device.

        Raises:
            BudgetError: the lease has no room for the step's present bytes.
        """
        state = list(state)
        self.lease = lease
        # The state may have moved away and back, to other memory.
        self._state_storages = {tensor.untyped_storage()._cdata for tensor in state}  # noqa: SLF001
        self._saved.use(device)
        self._tracker.use(lease, granted_bytes)
        self._tracker.know(*state)

    @property
    def workspace_bytes(self) -> int:
        """Room beside the state that another such step needs, in bytes."""
        tracker = self._tracker
        return max(self._before_update, tracker.given_bytes + tracker.peak_bytes - self.kept_bytes)

    def add(self, batch: Batch) -> None:
        """Count another batch of the step, on the device."""
        # Sizes and not storages: a slice of a data set counts only its own bytes.
        tensors = list(tensors_of(batch))
        self._tracker.know(*tensors)
        self._tracker.given_bytes += sum(aligned(t.numel() * t.element_size(), self._alignment) for t in tensors)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Follow a forward inside the context: of a training batch, or of a validation batch."""
        with self._tracked(), self._saved.hooks():
            yield

    @contextmanager
    def differentiating(self, root: Tensor, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Follow the backward of a root inside the context, and the gradients created for the given parameters."""
        with ExitStack() as stack:
            for parameter in parameters:
                hook = parameter.register_post_accumulate_grad_hook(self._made_gradient)  # type: ignore[no-untyped-call]
                stack.callback(hook.remove)
            stack.enter_context(nullcontext() if rounds_otherwise_under_modes(root) else self._tracked())
            with self._saved.hooks():
                yield

    def _made_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._tracker.follow(parameter.grad)

    @contextmanager
    def updating(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Follow the optimizer's step inside the context, in mixed precision too: the step may create state that stays."""
        tracker = self._tracker
        tracker.follow(*(p.grad for p in parameters if p.grad is not None))
        self._before_update = tracker.peak_bytes + tracker.given_bytes
        # The peak of forward and backward has been noted; from here on only lasting state counts.
        tracker.forget_peak()
        with tracker:
            yield
        self.kept_bytes = tracker.current_bytes
        if self.has_shed:
            self.lease.count(self._saved)

    def _tracked(self) -> Any:
        return self._tracker if self._is_tracked else nullcontext()


def _quick_key(mode: str, batch: Any) -> Hashable:
    """Return a cheap key of a batch's kind and sizes, for plain pairs or lists of tensors; None for other batches."""
    if type(batch) not in (tuple, list):
        return None
    key: list[Hashable] = [mode]
    for item in batch:
        if type(item) is not Tensor or item.is_nested:
            return None
        key += (item.dtype, item.shape)
    return tuple(key)


_PLAIN = (type(None), int, float, complex, enum.Enum, torch.dtype, torch.device, torch.Generator, dt.date)
_WITHOUT_DATA = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, weakref.ref, dt.timedelta)
_SIZED = (str, bytes, bytearray, range, set, frozenset)


def _structure(value: Any, sizes: list[int], inside: tuple[int, ...] = ()) -> Hashable:  # noqa: PLR0911 - a case each
    """Return the structure of a batch; append the sizes of its tensors, arrays and texts to a list.

    Raises:
        _OpaqueError: a part of the batch cannot be inspected.
        TaskError: a tensor of the batch is nested.
    """
    if isinstance(value, Tensor):
        refuse_nested(value)
        sizes.extend(value.shape)
        return value.dtype, value.dim()
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, _PLAIN + _WITHOUT_DATA):
        return kind
    if isinstance(value, _SIZED):
        sizes.append(len(value))
        return kind
    # An array of numpy's, or of a similar library. A dict whose `__getattr__` is `dict.__getitem__` raises a KeyError.
    if not isinstance(value, Mapping) and isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
        sizes.extend(value.shape)
        return kind, str(value.dtype), len(value.shape)
    # A reference to an enclosing container is named by its depth, so cyclic batches end.
    if id(value) in inside:
        return kind, inside.index(id(value))
    inside = (*inside, id(value))
    if isinstance(value, list | tuple | deque):
        return kind, tuple(_structure(item, sizes, inside) for item in value)
    parts = value if isinstance(value, Mapping) else _attributes(value)
    return kind, tuple((key, _structure(part, sizes, inside)) for key, part in parts.items())


def _attributes(value: Any) -> dict[str, Any]:
    """Return all attributes of an object whose class is written in Python; objects of other classes may hide more."""
    kinds = [kind for kind in type(value).__mro__ if kind is not object]
    if isinstance(value, nn.Module) or not all(kind.__flags__ & _HEAP_TYPE for kind in kinds):
        raise _OpaqueError
    slots = [name for kind in kinds for name in _names(vars(kind).get("__slots__", ())) if hasattr(value, name)]
    return {name: getattr(value, name) for name in slots if not name.startswith("__")} | getattr(value, "__dict__", {})


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _kind_of(mode: str, batch: Any) -> tuple[Hashable | None, tuple[int, ...]]:
    """Return the kind of a batch, None if unknown, and the sizes in which batches of the kind differ."""
    sizes: list[int] = []
    try:
        kind = (mode, _structure(batch, sizes))
        hash(kind)
    except (_OpaqueError, TypeError, RecursionError):
        return None, ()
    return kind, tuple(sizes)


def _covers(known: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    return len(known) == len(sizes) and all(a >= b for a, b in zip(known, sizes, strict=True))
