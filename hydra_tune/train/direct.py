"""Steps of a trial that fits its device whole: the user's own module and step, as a plain loop runs them.

Nothing is captured, so nothing about the user's code is frozen. Knows nothing of bursts, of other trials or of the schedule.

Note: memory. A step's activations are known only once the step has run. So the first step of each kind is *followed*: a mode
sees each operator of the step, and takes room on the device's ledger for what the operator makes (`room.py`). Where the room
is used up, what autograd has saved so far goes to the host, and what autograd saves from then on goes there at once: the step
completes and counts, and the trial is cut from its next step on. Later steps of the kind get the room that the first has
needed, and nobody follows them. A kind is known by the shapes of its batch: one that is no larger in any dimension needs no
more.

Note: undone. Where not even that helps, a single operator needs more than there is. Before the optimizer has stepped, nothing
but buffers, gradients and random streams has changed of what is the trial's: these are put back (`undo`), and the batches of
the step run once more, cut. Only there does the user's step run twice, and only in place of a trial that fails. A module
that changes its own Python state cannot be captured, so that trial fails then.
"""

import datetime as dt
import enum
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hydra_tune.devices.device import Device
from hydra_tune.errors import TaskError
from hydra_tune.memory.block import Kind
from hydra_tune.memory.lease import Lease
from hydra_tune.memory.saved import SheddingTensors
from hydra_tune.shard.capture import named_state
from hydra_tune.shard.pilot import aligned
from hydra_tune.shard.precision import eager_autocast
from hydra_tune.shard.steps import evaluation_metrics, training_loss
from hydra_tune.task import Batch, TrainTask, backward_called, returned
from hydra_tune.train.data import moved, tensors_of
from hydra_tune.train.gradients import Gradients
from hydra_tune.train.room import RoomTracker
from hydra_tune.train.state import optimizer_tensors
from hydra_tune.train.streams import RandomStreams

_MOST_SEEN = 1024
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: of classes that Python code has made


class _OpaqueError(Exception):
    """A batch has parts whose size nobody can tell."""


class Direct:
    """Runs the steps of one trial, while a lease on all of its state is held.

    Args:
        task: describes the step.
        module, optimizer: the trial's own.
        gradients: its rules for gradients.
        streams: its random streams.
        always_sheds: as of the attribute.

    Attributes:
        workspace_bytes: room beside the state that the steps so far have needed at the most.
        has_shed: whether a step had room for its activations only because these went to the host, or the next has none.
        always_sheds: whether activations go to the host in every step, for the model can be cut no finer.
    """

    def __init__(
        self,
        task: TrainTask,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        gradients: Gradients,
        streams: RandomStreams,
        *,
        always_sheds: bool = False,
    ) -> None:
        self.workspace_bytes = 0
        self.has_shed = False
        self.always_sheds = always_sheds
        self._task = task
        self._module = module
        self._optimizer = optimizer
        self._gradients = gradients
        self._streams = streams
        self._loss = training_loss(task)
        self._argument = "loss" if task.step is None else "step"
        self._known: dict[Hashable, list[tuple[int, ...]]] = {}
        self._seen: set[Hashable] = set()  # kinds that are known, in a form that is found soon
        self._following: _Following | None = None
        self._fresh: list[tuple[Hashable, tuple[int, ...]]] = []  # kinds of the step that is followed
        self._has_followed = False
        self._before: _Before | None = None  # of the step that is followed, if its first batch was
        self._lease: Lease | None = None
        self._device: Device | None = None
        self._is_plain = task.precision == "float32" and gradients.is_plain
        self._state_entries = 0  # of the optimizer
        self._is_first = True  # whether no batch has been trained on yet

    @contextmanager
    def held(self, lease: Lease, device: Device) -> Iterator[None]:
        """Around steps: the lease that they run under, and where."""
        self._lease, self._device = lease, device
        try:
            yield
        finally:
            self._lease = self._device = None

    def train(self, batch: Batch, share: float) -> tuple[float, Callable[[], None]]:
        """The forward of one batch, or of a piece of one.

        Args:
            batch: as the user's data has given it.
            share: the part of the batch's samples that it has.

        Returns:
            The training loss, and what runs the backward.

        Raises:
            TaskError: the loss is not a scalar tensor, or the first batch's step has made gradients itself.
            BudgetError: the step does not fit the device, even with its activations on the host.
        """
        batch = self._placed("train", batch)
        is_checked, self._is_first = self._is_first and not self._has_gradients, False
        if self._following is None and self._task.precision == "float32":
            loss = self._loss(self._module, batch)
        else:
            with self._surroundings():
                loss = self._loss(self._module, batch)
        if is_checked and self._has_gradients:
            raise backward_called()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TaskError(f"{self._argument}= must return a scalar tensor, not {returned(loss)}")
        return float(loss.item()), partial(self._backward, loss, share)

    def _backward(self, loss: Tensor, share: float) -> None:
        following = self._following
        with nullcontext() if following is None else following.differentiating(self._trained_parameters()):
            self._gradients.objective(share)(loss).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """The optimizer's step, once all of its batches have run."""
        following, self._before = self._following, None
        with nullcontext() if following is None else following.updating(self._trained_parameters()):
            if self._is_plain:
                self._gradients.clip_plainly(self._optimizer)
                self._optimizer.step()
            else:
                self._scaled_step()
            self._optimizer.zero_grad()
        made = sum(map(len, self._optimizer.state.values()))
        if following is not None:
            self._followed(following)
        elif made != self._state_entries:
            self._made_state_late()
        self._state_entries = made

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """The metrics of one validation batch. The module is in evaluation mode, and nothing records gradients.

        Raises:
            MetricError: they are not scalars.
            BudgetError: the batch does not fit the device.
        """
        batch = self._placed("evaluate", batch)
        with self._surroundings():
            values = evaluation_metrics(self._task, self._module, batch)
        following = self._following
        if following is not None:
            self._followed(following)
        return values

    def has_followed(self) -> bool:
        """Whether a step was followed since this was asked last."""
        found, self._has_followed = self._has_followed, False
        return found

    def close(self) -> None:
        """Let go of a step that has not ended."""
        self._following = self._before = None
        self._fresh.clear()

    def undo(self) -> bool:
        """Put back what the batches of a step have changed that does not fit; False: that is not known any more."""
        before, self._before = self._before, None
        if before is None:
            return False
        before.restore()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        return True

    def _trained_parameters(self) -> list[Tensor]:
        """All that may have a gradient."""
        own = list(self._module.parameters())
        others = [p for group in self._optimizer.param_groups for p in group["params"]]
        return [p for p in dict.fromkeys([*own, *others]) if p.requires_grad and p.is_leaf]

    @property
    def _has_begun(self) -> bool:
        """Whether a batch of the step has left gradients."""
        return any(p.grad is not None for group in self._optimizer.param_groups for p in group["params"])

    @property
    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._module.parameters())

    def _placed(self, mode: str, batch: Batch) -> Batch:
        """The batch where the step computes, with its step followed if there was none of its kind."""
        assert self._device is not None
        if not self._device.is_host:
            batch = moved(batch, self._device.torch_device)
        if mode == "train" and self._task.accumulate > 1 and self._before is None and not self._has_begun:
            self._before = _Before(self._module, self._streams, self._device)  # a later batch may be of a new kind
        quick = _quick_key(mode, batch)
        if quick in self._seen:
            return batch
        kind, found = _kind_of(mode, batch)
        known = None if self.always_sheds or kind is None else self._known.get(kind)
        if known is None or not any(_covers(other, found) for other in known):
            if kind is not None:
                self._fresh.append((kind, found))
            if self._following is None:
                self._following = self._follow()
                if mode == "train" and self._before is None and not self._has_begun:
                    self._before = _Before(self._module, self._streams, self._device)
            self._following.add(batch)
        elif quick is not None and len(self._seen) < _MOST_SEEN:
            self._seen.add(quick)
        return batch

    def _follow(self) -> "_Following":
        assert self._lease is not None
        assert self._device is not None
        device = self._device
        named = dict(named_state(self._module))
        state = [*named.values(), *optimizer_tensors(self._optimizer, device)]
        gradients = [p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        following = _Following(self._lease, device, self.workspace_bytes, state, gradients, self._task.precision)
        following.optimizer_bytes = self._optimizer_bytes()
        if self.always_sheds:
            following.shed()
        return following

    def _optimizer_bytes(self) -> int:
        """Room for the optimizer's state, of which nobody follows the making in mixed precision."""
        assert self._device is not None
        found = optimizer_tensors(self._optimizer, self._device)
        return sum(aligned(t.numel() * t.element_size(), self._device.alignment) for t in found)

    def _surroundings(self) -> ExitStack:
        stack = ExitStack()
        if self._following is not None:
            stack.enter_context(self._following.saving())
        if self._task.precision != "float32":
            assert self._device is not None
            stack.enter_context(eager_autocast(self._task.precision, self._device.torch_device.type))
        return stack

    def _followed(self, following: "_Following") -> None:
        """A step that was followed is over."""
        self._following, self._has_followed = None, True
        self.workspace_bytes = max(self.workspace_bytes, following.workspace_bytes)
        assert self._lease is not None
        following.kept_bytes = max(following.kept_bytes, self._optimizer_bytes() - following.optimizer_bytes)
        # The first step makes the optimizer's state last, which the next one has beside its activations.
        fits = self._lease.would_fit(self.workspace_bytes + following.kept_bytes)
        self.has_shed = self.has_shed or following.has_shed or not fits
        for kind, sizes in self._fresh:
            known = self._known.setdefault(kind, [])
            known[:] = [other for other in known if not _covers(sizes, other)]
            known.append(sizes)
        self._fresh.clear()

    def _made_state_late(self) -> None:
        """The optimizer has made state, or let go of some, in a step that nobody has followed."""
        self._has_followed = True  # it is taken into account like that of a step that was
        assert self._lease is not None
        assert self._device is not None
        tensors = optimizer_tensors(self._optimizer, self._device)
        new = [tensor for tensor in tensors if not self._lease.owns(tensor, (Kind.OPTIMIZER,))]
        nbytes = sum(aligned(t.untyped_storage().nbytes(), self._device.alignment) for t in new)
        self.has_shed = self.has_shed or not self._lease.would_fit(self.workspace_bytes + nbytes)

    def _scaled_step(self) -> None:
        named = {name: p for name, p in self._module.named_parameters() if p.grad is not None}
        order = {id(p): None for group in self._optimizer.param_groups for p in group["params"]}
        names = {id(p): name for name, p in named.items()}
        wanted = [names[key] for key in order if key in names]
        gradients = self._gradients
        gradients.complete({name: named[name].grad for name in wanted})  # type: ignore[misc]  # those with gradients
        if not gradients.skips_update:
            if wanted:
                gradients.clip([named[name] for name in wanted], wanted)
            self._optimizer.step()
        gradients.next_step()


class _Before:
    """A trial before a step: what the step's batches may change of it. On the host, for the device may have no room for it.

    Args:
        module: whose buffers they may overwrite.
        streams: that they may draw from.
        device: where the buffers are.
    """

    def __init__(self, module: nn.Module, streams: RandomStreams, device: Device) -> None:
        self._device = device
        self._buffers = [
            (each, name, buffer)
            for each in module.modules()
            for name, buffer in each.named_buffers(recurse=False)
            if not is_lazy(buffer)
        ]
        self._copies: list[Tensor] = []
        if self._buffers:
            self._copies = device.on_host(lambda: [torch.empty_like(b, device="cpu") for _, _, b in self._buffers])
            device.spill(list(zip(self._present(), self._copies, strict=True)))
        self._streams, self._position = streams, streams.state()

    def restore(self) -> None:
        """Have all of it be as it was."""
        for module, name, buffer in self._buffers:
            setattr(module, name, buffer)  # the forward may have put another there
        if self._buffers:
            self._device.load(list(zip(self._copies, self._present(), strict=True)))
        self._streams.restore(self._position)

    def _present(self) -> list[Tensor]:
        """The buffers where they are now; who kept these would keep their memory from being moved."""
        return [buffer.detach() for _, _, buffer in self._buffers]


class _Following:
    """One step that is followed.

    Attributes:
        kept_bytes: what the step has made that stays, as the optimizer's state does.
        optimizer_bytes: of that state before the step.

    Args:
        lease: gives room.
        device: where the step runs.
        granted_bytes: room that the step has to begin with.
        state: tensors that the lease has room for anyway.
        gradients: what earlier batches of the step have left.
        precision: of the step.
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
        storages = {tensor.untyped_storage()._cdata for tensor in state}  # noqa: SLF001 - the storage's identity
        # What nobody follows, in mixed precision or in compiled code, is known from when autograd saves it.
        self._saved = SheddingTensors(
            device,
            lambda t: t.untyped_storage()._cdata in storages,  # noqa: SLF001
            lambda t: self._tracker.follow(t.detach()),
        )
        self._tracker = RoomTracker(lease, granted_bytes, device.alignment, self._saved.shed)
        self._tracker.know(*state)
        self._tracker.follow(*gradients)
        # Under autocast, kernels that call others inside (the fused transformer layer) round differently where a mode follows.
        self._is_tracked = precision == "float32"
        self._alignment = device.alignment
        self._lease = lease
        self._before_update = 0
        self.kept_bytes = self.optimizer_bytes = 0

    @property
    def has_shed(self) -> bool:
        """Whether activations went to the host."""
        return self._saved.is_shedding

    def shed(self) -> None:
        """Send activations to the host from here on."""
        self._saved.shed()

    @property
    def workspace_bytes(self) -> int:
        """Room beside the state that another such step needs."""
        tracker = self._tracker
        return max(self._before_update, tracker.given_bytes + tracker.peak_bytes - self.kept_bytes)

    def add(self, batch: Batch) -> None:
        """One more batch of the step, which lies on the device."""
        tensors = list(tensors_of(batch))  # of a slice of a data set only the slice counts
        self._tracker.know(*tensors)
        self._tracker.given_bytes += sum(aligned(t.numel() * t.element_size(), self._alignment) for t in tensors)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a forward or a backward."""
        with self._tracked(), self._saved.hooks():
            yield

    @contextmanager
    def differentiating(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Around a backward, which makes gradients of these parameters."""
        with ExitStack() as stack:
            for parameter in parameters:
                hook = parameter.register_post_accumulate_grad_hook(self._made_gradient)  # type: ignore[no-untyped-call]
                stack.callback(hook.remove)
            with self.saving():
                yield

    def _made_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._tracker.follow(parameter.grad)

    @contextmanager
    def updating(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Around the optimizer's step, which may make state that stays; followed in mixed precision, too."""
        tracker = self._tracker
        tracker.follow(*(p.grad for p in parameters if p.grad is not None))
        self._before_update = tracker.peak_bytes + tracker.given_bytes
        tracker.forget_peak()
        with tracker:
            yield
        self.kept_bytes = tracker.current_bytes
        if self.has_shed:
            self._lease.count(self._saved)

    def _tracked(self) -> Any:
        return self._tracker if self._is_tracked else nullcontext()


def _quick_key(mode: str, batch: Any) -> Hashable:
    """The same for batches of one kind and the same sizes, where they are plain pairs or lists of tensors; else None."""
    if type(batch) not in (tuple, list):
        return None
    key: list[Hashable] = [mode]
    for item in batch:
        if type(item) is not Tensor:
            return None
        key += (item.dtype, item.shape)
    return tuple(key)


_PLAIN = (type(None), int, float, complex, enum.Enum, torch.dtype, torch.device, torch.Generator, dt.date)
_WITHOUT_DATA = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, weakref.ref, dt.timedelta)
_SIZED = (str, bytes, bytearray, range, set, frozenset)


def _structure(value: Any, sizes: list[int], inside: tuple[int, ...] = ()) -> Hashable:  # noqa: PLR0911 - a case each
    """What a batch is made of; the sizes of its tensors, arrays and texts are added to a list.

    Raises:
        _OpaqueError: a part of it cannot be looked into.
    """
    if isinstance(value, Tensor):
        sizes.extend(value.shape)
        return value.dtype, value.dim()
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, _PLAIN + _WITHOUT_DATA):
        return kind
    if isinstance(value, _SIZED):
        sizes.append(len(value))
        return kind
    if isinstance(getattr(value, "shape", None), tuple) and hasattr(
        value, "dtype"
    ):  # an array of numpy's, or one like it
        sizes.extend(value.shape)
        return kind, str(value.dtype), len(value.shape)
    if id(value) in inside:
        return kind, inside.index(id(value))
    inside = (*inside, id(value))
    if isinstance(value, list | tuple | deque):
        return kind, tuple(_structure(item, sizes, inside) for item in value)
    parts = value if isinstance(value, Mapping) else _attributes(value)
    return kind, tuple((key, _structure(part, sizes, inside)) for key, part in parts.items())


def _attributes(value: Any) -> dict[str, Any]:
    """All that an object of a class written in Python keeps; of others there may be more than can be seen."""
    kinds = [kind for kind in type(value).__mro__ if kind is not object]
    if isinstance(value, nn.Module) or not all(kind.__flags__ & _HEAP_TYPE for kind in kinds):
        raise _OpaqueError
    slots = [name for kind in kinds for name in _names(vars(kind).get("__slots__", ())) if hasattr(value, name)]
    return {name: getattr(value, name) for name in slots if not name.startswith("__")} | getattr(value, "__dict__", {})


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _kind_of(mode: str, batch: Any) -> tuple[Hashable | None, tuple[int, ...]]:
    """What is the same for batches of one kind, if that can be told, and the sizes in which they differ."""
    sizes: list[int] = []
    try:
        kind = (mode, _structure(batch, sizes))
        hash(kind)
    except (_OpaqueError, TypeError, RecursionError):
        return None, ()
    return kind, tuple(sizes)


def _covers(known: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    return len(known) == len(sizes) and all(a >= b for a, b in zip(known, sizes, strict=True))
