"""`PythonStateGuard`: the Python values that a step may read besides its batch, its parameters and its buffers.

A capture runs the step's Python once, so a graph repeats for ever what the Python has read: a weight in a closure, a
global, an attribute of the model or of a loss object. The guard finds such values by a walk from the step's functions
and from the model through everything that their code can name (`reachable_values.py`). `change` later names the first
value that differs; a plan that was made before the change serves no more. `restore` puts values back after a step that
was only tried.

`shard/partition/trial_step.py` sets a guard around each capture, and `verify` (`shard/verify/plan_check.py`) around each
comparison of a plan bit for bit. `train/loop/plan_cache.py` and `fusion/group/member.py` ask a guard before a plan serves
again, and `shard/partition/plan_cache.py` asks for its `numbers`. The `digest` of a guard is part of a plan's key
(`shard/partition/plan_request.py`). `shard/capture/step_capture.py` puts traced numbers in the place of numbers that a graph
takes as inputs (`replaced`).

`PythonStateUndo` undoes forecasts (`pool/pool.py`), timings (`fusion/matching/group_timing.py`), steps of the user's own that
run again (`train/loop/direct.py`), steps of stand-ins (`shard/cost/update_pilot.py`) and builds (`fusion/group/member.py`).
`TaskStateGuard` lets a trial begin again (`train/trial.py`, `pool/checkpointing/writer.py`),
`train/checkpoint/python_changes.py` compares the `digests` of such a guard with those of a checkpoint, and
`shard/cost/update_pilot.py` asks `tasks_of`. The functions at the end judge steps: `train/loop/plan_cache.py` and
`pool/fusion/group_matcher.py` call `check_kept` and `check_gradients`, `shard/partition/trial_step.py` calls `check_own_copy`,
and `fusion/group/member.py` calls `reached`. `Trial` (`train/trial.py`) calls `names_parameters`, and
`shard/verify/process_state.py` calls `shares_state`.

Note: a walk reaches no contents of files. A capture notes the files that the step reads (`opened_files.py`), and `watch` adds
their holders.

Note: other trials. `PythonStateGuard.restore` puts back all values, so the caller keeps other trials away meanwhile: by
`GATE.exclusive`, or by `undisturbed` (`shard/verify/process_state.py`), which keeps other trials away only where they reach
the same values. `PythonStateUndo.undo` and `TaskStateGuard.restore` run beside other trials, and leave objects that other
trials reach. `TaskStateGuard` finds the other trials in a set of all such guards, under a lock that no walk holds.

Note: what no guard sees. Code can read clocks and variables of installed packages. Of an object of an extension module,
only its bytes or its pickled form count. The check of a new plan runs the step twice, and refuses a step that gives other
numbers the second time.
"""

import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import ClassVar, Self

import torch
from torch import nn
from torch.optim import Optimizer

from hydra_tune.errors import CaptureError, TaskError
from hydra_tune.shard.python_state.code_names import is_installed, mentioned_names, reads_value
from hydra_tune.shard.python_state.model_snapshot import ModelSnapshot
from hydra_tune.shard.python_state.opened_files import FileHolder
from hydra_tune.shard.python_state.reachable_values import walked
from hydra_tune.shard.python_state.value_holder import Undo, ValueHolder, write_environment
from hydra_tune.task import TrainTask

_LOGGER = logging.getLogger(__name__)
_NOT_PUT_BACK = (
    "%s has changed while the pool tried code of a trial, and is not put back, because the value is large or closed, or "
    "others may have changed the value; numbers that depend on the value may be others than a plain loop's. "
    "Give each trial small objects of its own"
)
_GRADIENT_FUNCTIONS = frozenset({"clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"})
_OPTIMIZERS = frozenset(
    name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "Optimizer"
)
_MAX_SNAPSHOTS = 8  # of a model, taken by a guard
_OF_THE_PROCESS = ("the global ", "the environment")  # labels of values that functions of all trials may name


class PythonStateGuard:
    """Notes the values that a step may read.

    Args:
        module: the trial's model, or the copy on which the step will run.
        keeps_tensors: whether `restore` puts the contents of tensors back as well, which are copied for that.
        is_lenient: whether to pass over what cannot be followed, instead of raising.
        inputs: numbers, in words, that may change because the graph takes them as inputs; unknown ones are left out.

    Attributes:
        asks_types: whether the step's code may ask for the class of a value by `type(it)`.

    Raises:
        CaptureError: the step may read more values than can be followed, or a value that cannot be compared.
        TaskError: the step may draw from an iterator, which can be neither compared nor put back, reads a value of a thread,
            or holds another name for the memory of a parameter.
    """

    __slots__ = (
        "_caches",
        "_holders",
        "_inputs",
        "_mode_of_model",
        "_module",
        "_num_snapshots",
        "_outside",
        "_snapshot",
        "asks_types",
    )

    def __init__(
        self,
        task: TrainTask,
        module: nn.Module,
        mode: str,
        *,
        keeps_tensors: bool = False,
        is_lenient: bool = False,
        inputs: Iterable[str] = (),
    ) -> None:
        walk = walked(step_functions(task, mode), module, keeps_tensors=keeps_tensors, is_lenient=is_lenient)
        if walk.aliases:
            raise TaskError(
                f"{walk.aliases[0]} shares the memory of a parameter or buffer of the model, which moves as a model that is "
                "cut or fused trains; read the parameter from the module in each step instead"
            )
        self._holders, self._caches, self.asks_types = walk.holders, walk.caches, walk.asks_types
        # Dicts and lists in a module's attributes have holders with an owner.
        self._outside = [holder for holder in walk.holders if holder.owner or not holder.is_of_model]
        self._module = module
        self._snapshot: ModelSnapshot | None = None
        self._num_snapshots = 0
        is_training = mode == "train"
        # A model in the other mode is switched before its step, and then all its parts have the mode.
        self._mode_of_model = None if module.training == is_training else is_training
        # A function that is found twice, or two functions with one global, have the same place in two holders.
        self._inputs: dict[str, list[tuple[ValueHolder, int]]] = {name: [] for name in inputs}
        for holder in walk.holders if self._inputs else ():
            for index, label in enumerate(holder.labels):
                if label in self._inputs and holder.may_be_input(index):
                    self._inputs[label].append((holder, index))
                    holder.inputs.add(index)
        self._inputs = {name: places for name, places in self._inputs.items() if places}

    def watch(self, files: Iterable[FileHolder]) -> None:
        """Add the files that the captured step has read."""
        added = [file for file in files if file not in self._holders]
        self._holders += added
        self._outside += added

    @property
    def inputs(self) -> tuple[str, ...]:
        """Numbers, in words, that may change because the graph takes them as inputs."""
        return tuple(self._inputs)

    def numbers(self) -> tuple[int | float, ...] | None:
        """Return the present values of the inputs; None if a name stands for places with different values."""
        numbers = []
        for places in self._inputs.values():
            first, *others = (holder.read()[index] for holder, index in places)
            if any(repr(other) != repr(first) for other in others):
                return None
            numbers.append(first)
        return tuple(numbers)

    def changed_numbers(self) -> set[str]:
        """Return the numbers, in words, that have changed; none if anything else has changed as well."""
        changed: set[str] = set()
        for holder in self._holders:
            numbers = holder.changed_numbers()
            if numbers is None:
                return set()
            changed |= numbers
        return changed

    @contextmanager
    def replaced(self, name: str, stand_in: object) -> Iterator[None]:
        """Context in which another value stands in the place of an input.

        Raises:
            CaptureError: code in the context has set the value.
        """
        places = self._inputs[name]
        before = [(holder, index, holder.read()[index]) for holder, index in places]
        is_set = False
        try:
            for holder, index in places:
                _write_at(holder, index, stand_in)
            yield
            is_set = any(holder.read()[index] is not stand_in for holder, index in places)
        finally:
            for holder, index, value in before:
                _write_at(holder, index, value)
        if is_set:
            raise CaptureError(f"the step changes {name}, which a graph would not")

    @property
    def digest(self) -> str:
        """Digest of the plain values noted and of the contents of tensors; equal for steps of trials that read the same."""
        parts = [([*holder.labels], holder.plain_parts(self._mode_of_model)) for holder in self._holders]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def change(self, *, by_step: bool = False, beside_model: bool = False) -> str | None:
        """Name the first value that has changed since the guard was made, or None.

        Args:
            beside_model: leave out attributes of the model's modules, though not the contents of dicts and lists in them,
                which others may hold as well.
            by_step: whether the step alone has run since. A tensor, or None, in the place of another tensor is then no change
                of an attribute of the model, and results that cached functions have kept are none.
        """
        looks_at_model = not (by_step or beside_model)
        is_known = looks_at_model and self._snapshot is not None and self._snapshot.holds()
        # Taken before the look: the next look sees any later change. Of a model whose numbers change, no snapshot holds.
        taken = None
        if looks_at_model and not is_known and self._num_snapshots < _MAX_SNAPSHOTS:
            taken, self._num_snapshots = ModelSnapshot(self._module), self._num_snapshots + 1
        for holder in self._outside if beside_model or is_known else self._holders:
            if (name := holder.change(by_step=by_step)) is not None:
                return name
        self._snapshot = taken or self._snapshot
        return None

    def kept(self) -> set[str]:
        """Return the names of the model's attributes in which the step that has run since keeps other tensors."""
        return set().union(*(holder.kept() for holder in self._holders))

    def restore(self, *, only_tensors: bool = False) -> None:
        """Put the noted values back where values have changed and can be written, and forget results computed since.

        With `only_tensors`, only the contents of tensors are put back, and results stay.
        """
        holders = [holder for holder in self._holders if holder.is_tensor or not only_tensors]
        changed = [(holder, label) for holder in holders if (label := holder.change()) is not None]
        for holder, label in changed:
            if holder.write is not None:
                try:
                    holder.write(holder.noted)
                except Exception:  # noqa: BLE001 - a file that the step has closed; the other values are put back all the same
                    _LOGGER.warning(_NOT_PUT_BACK, label)
        if not only_tensors:
            self.restore_caches()

    def restore_caches(self) -> None:
        """Forget results of functions with a cache: a result may depend on values put back, or stand in for tensors."""
        for cache in self._caches:
            cache.restore()


def _write_at(holder: ValueHolder, index: int, value: object) -> None:
    assert holder.write is not None, holder.labels
    values = list(holder.read())
    values[index] = value
    holder.write(values)


class PythonStateUndo:
    """Notes what functions and data keep in Python, so that the changes by a trial run of them can be undone.

    Such state is a counter of a dataset, sampler or collate function, or a variable of a callable. The items of large
    containers are not followed, and of large tensors and arrays only a change is noted.

    Args:
        handles: functions and data, by the names of their arguments.
        module: a model whose attributes count as well, but not its tensors.

    Attributes:
        runs_own_code: whether the walk has met a Python function, which may be the user's.
        iterators: iterators that cannot be put back, in words.
        has_changes: whether `note_changes` has found changes that can be undone.
        stays: a value, in words, that has changed and is not put back; None: there is none.
    """

    __slots__ = ("_caches", "_changes", "_holders", "_tasks", "has_changes", "iterators", "runs_own_code", "stays")

    def __init__(self, handles: Mapping[str, object], *tasks: TrainTask, module: nn.Module | None = None) -> None:
        walk = walked(handles, module, keeps_tensors=True, is_lenient=True, skips_large=True)
        self.iterators = walk.iterators
        self._tasks, self._holders, self._caches = tasks, walk.holders, walk.caches
        if walk.has_environment:
            read = lambda: [*os.environ.keys(), *os.environ.values()]  # noqa: E731
            self._holders.append(ValueHolder(["the environment"], read, write_environment, is_mapping=True))
        self.runs_own_code = any(isinstance(value, FunctionType) for value in walk.seen.values())
        self._changes: list[tuple[str, Undo]] = []
        self.has_changes = False
        self.stays: str | None = None

    @classmethod
    def of_tasks(cls, *tasks: TrainTask) -> Self:
        """Note what all functions and data of tasks keep."""
        handles: dict[str, object] = {}
        for number, task in enumerate(tasks):
            functions = step_functions(task, "train") | step_functions(task, "evaluate") | functions_between_steps(task)
            functions |= {"model=": task.model, "optimizer=": task.optimizer, "param_groups=": task.param_groups}
            handles |= {name if number == 0 else f"{name} of task {number}": value for name, value in functions.items()}
        return cls(handles, *tasks)

    def note_changes(self, *, is_alone: bool, shared: tuple[str, ...] = (), keeps_results: bool = False) -> None:
        """Note the values that differ by now, for `undo_changes`; may be called once.

        Args:
            is_alone: whether no other trial's code has run since; if not, values that others may have changed stay.
            shared: first words of the labels of values that others may have changed without reaching them by a function.
            keeps_results: whether others may have computed the results that functions with a cache have kept since.
        """
        owners = set() if is_alone else TaskStateGuard.owners_of_others(*self._tasks)
        for holder in self._holders:
            if holder.is_filled_by_step or holder.is_of_threads or (label := holder.change()) is None:
                continue
            is_own = is_alone or not (holder.owner in owners or label.startswith((*_OF_THE_PROCESS, *shared)))
            undo = None
            with suppress(Exception):  # a closed file, an array of another shape
                undo = holder.undo() if is_own else None
            if undo is None:
                self.stays = label
            else:
                self._changes.append((label, undo))
        # A first call may have drawn numbers that the trial has yet to draw.
        undos = [(cache.label, undo) for cache in self._caches if (undo := cache.undo()) is not None]
        if undos and keeps_results and not is_alone:
            self.stays = undos[0][0]
        else:
            self._changes += undos
        self.has_changes = bool(self._changes)
        self._holders, self._caches = [], []

    def undo_changes(self) -> None:
        """Put back the values that `note_changes` has found, and nothing that others have changed since."""
        for label, undo in self._changes:
            is_undone = False
            with suppress(Exception):
                is_undone = undo()
            if not is_undone:
                self.stays = label
        if self.stays is not None:
            _LOGGER.warning(_NOT_PUT_BACK, self.stays)

    def undo(self, shared: tuple[str, ...] = (), *, keeps_results: bool = False) -> None:
        """Put back the values that differ by now, beside other trials; arguments as of `note_changes`."""
        is_alone = not TaskStateGuard.has_others(*self._tasks)
        self.note_changes(is_alone=is_alone, shared=shared, keeps_results=keeps_results)
        self.undo_changes()

    @property
    def differs(self) -> bool:
        """Whether a value differs by now; results that cached functions have kept are none."""
        return any(holder.change(by_step=True) is not None for holder in self._holders)

    @contextmanager
    def undone(self, shared: tuple[str, ...] = (), *, keeps_results: bool = False) -> Iterator[None]:
        """Context for a trial run beside other trials, whose changes are undone at the end; arguments as of `undo`."""
        try:
            yield
        finally:
            self.undo(shared, keeps_results=keeps_results)


class TaskStateGuard:
    """Notes what a task's functions and data keep in Python, so that its trial can begin again from this moment.

    Of large tensors and arrays only a change is noted, of arrays over 4 MiB by a sample of their elements. Values that cannot
    be followed, and large arrays in mapped files, are passed over.

    Args:
        module: the trial's model, whose tensors are no Python state.
    """

    __slots__ = ("__weakref__", "_caches", "_holders", "_iterators", "_module", "_task")
    _all: ClassVar[weakref.WeakSet["TaskStateGuard"]] = weakref.WeakSet()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, task: TrainTask, module: nn.Module) -> None:
        functions = step_functions(task, "train") | step_functions(task, "evaluate") | functions_between_steps(task)
        walk = walked(functions, module, keeps_tensors=True, is_lenient=True, skips_large=True)
        self._task, self._module = task, weakref.ref(module)
        self._holders, self._caches, self._iterators = walk.holders, walk.caches, walk.iterators
        with self._lock:  # last, as others read the holders of all guards
            self._all.add(self)

    def digests(self) -> dict[str, str]:
        """Return digests of the plain values noted, by name; without the model's attributes, which a checkpoint has."""
        parts: dict[str, list[object]] = {}
        for holder in self._holders:
            is_saved = holder.is_of_model or holder.labels[0].startswith("the tensor module")
            if not (is_saved or holder.is_of_threads or holder.is_filled_by_step):
                for name, part in holder.named_parts():
                    parts.setdefault(name, []).append(part)
        return {name: hashlib.sha256(repr(found).encode()).hexdigest()[:16] for name, found in parts.items()}

    @classmethod
    def owners_of_others(cls, *tasks: TrainTask) -> set[int]:
        """Return the identities of the objects, containers, arrays and tensors that trials of other tasks reach."""
        return {
            holder.owner
            for guard in cls._of_others(*tasks)
            for holder in guard._holders  # noqa: SLF001 - of the same class
            if holder.owner and len(holder.noted) > 0
        }

    @classmethod
    def tasks_of(cls, optimizer: Optimizer) -> list[TrainTask]:
        """Return the tasks of the trials under way that have the optimizer's first parameter."""
        parameter = next((p for group in optimizer.param_groups for p in group["params"]), None)
        return [
            guard._task  # noqa: SLF001 - of the same class
            for guard in cls._of_others()
            if (module := guard._module()) is not None  # noqa: SLF001
            and any(own is parameter for own in module.parameters())
        ]

    @classmethod
    def has_others(cls, *tasks: TrainTask) -> bool:
        """Whether trials of other tasks are under way."""
        return bool(cls._of_others(*tasks))

    @classmethod
    def _of_others(cls, *tasks: TrainTask) -> "list[TaskStateGuard]":
        with cls._lock:  # a trial that begins adds its guard
            guards = list(cls._all)
        return [guard for guard in guards if all(guard._task is not task for task in tasks)]  # noqa: SLF001

    def restore(self) -> str | None:
        """Put the noted values back; name a value that may have changed and could not be put back, or None.

        An object or container that other trials reach as well stays as it is: nothing tells whose change is whose.
        """
        shared = self.owners_of_others(self._task)
        for holder in self._holders:
            if holder.owner not in shared:
                holder.rewind()
        for cache in self._caches:  # results may depend on values that were put back
            cache.restore()
        stubborn = (holder for holder in self._holders if not (holder.is_of_model or holder.is_of_threads))
        changes = (holder.change(by_step=True) for holder in stubborn)
        return next((name for name in (*changes, *self._iterators) if name is not None), None)


def shares_state(task: TrainTask, mode: str) -> bool:
    """Whether the step reaches an object, container, array or tensor that another trial under way reaches, too."""
    walk = walked(step_functions(task, mode), None, keeps_tensors=False, is_lenient=True)
    own = {holder.owner for holder in walk.holders if holder.owner}
    return not own.isdisjoint(TaskStateGuard.owners_of_others(task))


def names_parameters(scheduler: object) -> bool:
    """Whether code of the user's that a scheduler runs names parameters or their state, and so may write them."""
    # The method as well, because nothing in the walked code calls the `step` of a class of the user's own.
    functions = {"scheduler=": scheduler, "step of scheduler=": getattr(scheduler, "step", None)}
    walk = walked(functions, None, keeps_tensors=False, is_lenient=True)
    return not walk.names.isdisjoint({"params", "state"})


def check_own_copy(task: TrainTask, module: nn.Module, mode: str) -> None:
    """Refuse a step that reaches the model by other ways than its argument: a step on a copy would use the original.

    Raises:
        TaskError: a function of the step, or of the model, holds the model or a part of it; or as of `PythonStateGuard`.
    """
    walk = walked(step_functions(task, mode), module, keeps_tensors=False)
    if walk.self_references:
        raise TaskError(
            f"{walk.self_references[0]} is the model or a part of it: a model that is cut or fused has its step tried on a "
            "copy, which this function would not use; let the function read the module that it receives, or bind it as a "
            "method (types.MethodType)"
        )


def check_kept(task: TrainTask, module: nn.Module, kept_names: Mapping[str, set[str]]) -> None:
    """Refuse a step that keeps tensors in attributes of the model which code outside of the step reads.

    `kept_names`: mode -> attributes in which the steps of captured plans of that mode would keep tensors.

    Raises:
        TaskError: the user's code between steps (data, scheduler and other arguments), or a step of the other mode, reads such
            an attribute.
    """
    for mode, names in kept_names.items():
        if not names:
            continue
        other = "evaluate" if mode == "train" else "train"
        read = walked(functions_between_steps(task), None, keeps_tensors=False, is_lenient=True).loaded & names
        if other in kept_names:  # a step that keeps the tensor, too, reads its own
            step = walked(step_functions(task, other), module, keeps_tensors=False, is_lenient=True)
            read |= (step.loaded & names) - kept_names[other]
        if read:
            raise TaskError(
                f"a step ({mode}) keeps a tensor in the model's attribute {min(read)!r}, which other code reads; a model that "
                "is cut or fused does not keep such a tensor. Write the tensor into a buffer (register_buffer), or compute it "
                "where it is read"
            )


def _reads_gradients(function: FunctionType, gradient_names: frozenset[str]) -> bool:
    names = mentioned_names(function.__code__)
    return not names.isdisjoint(gradient_names) or reads_value(function.__code__, "grad", function.__globals__)


def check_gradients(task: TrainTask, module: nn.Module, optimizer: Optimizer) -> None:
    """Refuse code that reads gradients which units do not leave on the parameters: of earlier batches, or of no update.

    Raises:
        TaskError: as said.
    """
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    outside = next((name for name, p in module.named_parameters() if p.requires_grad and id(p) not in updated), None)
    functions = step_functions(task, "train")
    if outside is not None:
        functions |= step_functions(task, "evaluate") | functions_between_steps(task)
        why = f"parameter {outside!r} has a gradient and is not in the optimizer: a plain loop adds up this gradient"
    elif task.accumulate > 1 or task.num_pieces > 1:
        why = "a step takes several batches: a plain loop adds up their gradients on the parameters"
    else:
        return
    walk = walked(functions, module, keeps_tensors=False, is_lenient=True)
    values = walk.seen.values()
    functions_of_user = (f for f in values if isinstance(f, FunctionType) and not is_installed(f.__module__))
    readers = [f.__qualname__ for f in functions_of_user if _reads_gradients(f, _GRADIENT_FUNCTIONS)]
    if outside is not None:
        # Without the model, whose own methods may make the trial's optimizer.
        between = walked(functions_between_steps(task), None, keeps_tensors=False, is_lenient=True).seen.values()
        named = (f for f in between if isinstance(f, FunctionType) and not is_installed(f.__module__))
        readers += [f.__qualname__ for f in named if _reads_gradients(f, _OPTIMIZERS)]
        readers += [type(other).__name__ for other in values if isinstance(other, Optimizer) and other is not optimizer]
    if readers:
        raise TaskError(
            f"{readers[0]} reads .grad, and {why}, which a trial that is cut, fused or runs whole does not; compute "
            "the gradient where it is read (torch.autograd.grad), or raise device_memory until the trial runs as it is"
        )


def step_functions(task: TrainTask, mode: str) -> dict[str, object]:
    """Return the user's functions that a step calls, by the task's argument."""
    if mode == "evaluate" and task.evaluate is not None:
        return {"evaluate=": task.evaluate}
    return {"loss=": task.loss, "step=": task.step}


def functions_between_steps(task: TrainTask) -> dict[str, object]:
    """Return the user's functions and data that run outside of the steps, by the task's argument."""
    # `fn` is of loops alone.
    names = ("train", "validate", "loss_weight", "after_step", "scheduler", "finish", "stop", "fn")
    return {f"{name}=": getattr(task, name, None) for name in names}


def reached(functions: Mapping[str, object], targets: Iterable[object]) -> str | None:
    """Name a function from which the walk comes to one of some objects, or None.

    Identity of the targets counts.
    """
    wanted = {id(target) for target in targets}
    for name, function in functions.items():
        walk = walked({name: function}, None, keeps_tensors=False, is_lenient=True)
        if not wanted.isdisjoint(walk.seen):
            return name
    return None
