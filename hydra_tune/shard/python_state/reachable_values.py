"""`ReachableValues`: walks from functions and from a model through the Python values that their code may read.

The walk follows the user's functions, classes and modules, and no code of an installed package. Of an object of the
user's, the walk notes the attributes that the walked code names; of an `nn.Module`, and of most objects of installed
packages, all attributes. After four objects of installed packages in a row, except of packages of nested settings, only
attributes that the walked code names count. Of sets, partials, threads, loaders, files, generators of numbers and arrays, the
walk notes only attributes that the walked code names. Of other objects, all attributes count where code makes up names. Each
place that can hold another value later becomes a `ValueHolder`. `CodeWalk` (`code_walk.py`) follows code and
attributes, and this module values by their kind. `walked` repeats the walk until no further names come in. All guards
and checks of `state_guard.py` use the result, and so do `shard/capture/own_functions.py` and
`integrations/hydra_tune_transformers/own_loss.py`. The module must not know tasks, and a walk must not change a value.

Note: objects may do anything where code looks at the objects, and other threads may change objects meanwhile. Where a look
raises, a strict walk refuses the step (`CaptureError`), except below an object of an installed package. There, and
everywhere in a lenient walk, the walk passes over the value.

Example: for `lambda module, batch: loss(module(batch)) * settings.weight`, the holders are the function's variable
`settings`, the attribute `weight` of the object there, and each part of the model.
"""

import collections
import contextvars
import enum
import functools
import gc
import io
import itertools
import multiprocessing.connection
import operator
import os
import random
import socket
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hydra_tune.errors import CaptureError, TaskError
from hydra_tune.shard.python_state.cached_results import NotedCache, results_of
from hydra_tune.shard.python_state.code_names import is_extension, is_installed
from hydra_tune.shard.python_state.code_walk import ALL_MISSING, INTERNALS, CodeWalk
from hydra_tune.shard.python_state.tensor_contents import (
    MAX_DATA_BYTES,
    facts_of,
    is_mapped,
    memory_of,
    sampled,
    sampled_bytes,
    writers_of,
)
from hydra_tune.shard.python_state.torch_operators import OPERATORS, definition_of
from hydra_tune.shard.python_state.value_holder import (
    EXACT,
    MAX_LABELS,
    PLAIN,
    ItemLabels,
    Values,
    buffer_facts,
    bytes_of,
    pickled,
    undo_by_element,
    write_bytes,
    write_mapping,
    write_names,
    write_sequence,
    write_set,
)

_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_MAX_DEPTH = 40
_MAX_ITEMS = 4096  # of a container with objects that have to be followed
_MAX_HOLDERS = 20_000
_MAX_LIBRARY_DEPTH = 3  # below an object of an installed package
_MAX_ARRAY_BYTES = 4 << 20
_MAX_COMPARED_BYTES = 1 << 20  # of all tensors whose contents are compared; of others, version and address count
_MAX_PICKLED_BYTES = 64 << 10
_SCHEDULE_METHODS = frozenset({"step", "get_lr", "state_dict", "load_state_dict"})
"""Methods of a scheduler that read more of its attributes, or set them."""
_OF_PROCESS = random.random.__self__  # type: ignore[attr-defined]
"""The object behind the functions of `random`; for a trial's thread, the trial's stream (`train/rng/own_python.py`).

`shard/verify/plan_check.py` refuses a step that draws from the object.
"""
_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class ReachableValues(CodeWalk):
    """Walks through the values and makes their holders.

    Args:
        model: the step's model, whose parameters and buffers are no Python state.
        keeps_tensors: whether holders keep copies of tensors.
        skips_large: whether to note only a change of large tensors and arrays, which are samples and no counters.

    Attributes:
        caches: functions with a cache whose results so far are plain values or tensors.
        iterators: values that a lenient walk has passed over, and that nobody can put back, in words: iterators,
            connections, files without a position, and objects of extension modules.
        aliases: tensors and arrays outside of the model that share the memory of its parameters or buffers, in words.
        seen: the values found, by identity; kept alive, because identities of freed objects are given again.

    The other arguments and attributes are those of `CodeWalk`.
    """

    def __init__(
        self,
        model: nn.Module | None,
        names: frozenset[str],
        stored: frozenset[str],
        *,
        takes_all: bool,
        keeps_tensors: bool,
        is_lenient: bool,
        skips_large: bool,
    ) -> None:
        own = [] if model is None else [*model.parameters(), *model.buffers()]
        super().__init__(names, stored, own, takes_all=takes_all, is_lenient=is_lenient)
        self.caches: list[NotedCache] = []
        self.iterators: list[str] = []
        self.aliases: list[str] = []
        self.seen: dict[int, object] = {}
        self._deep: dict[int, object] = {}
        self._model, self._keeps_tensors = model, keeps_tensors
        self._skips_large = skips_large
        parts = () if model is None else tuple(model.modules())
        self._parts = {id(part) for part in parts}
        self._memory = [memory_of(tensor) for tensor in own]
        self._bytes_compared = 0

    def visit_model(self) -> None:
        """Follow the model, if there is one."""
        if self._model is None:
            return
        self._is_in_model = True
        self.visit(self._model, "module")
        self._is_in_model = False
        registries = list(map(vars(torch.nn.modules.module).__getitem__, _GLOBAL_HOOKS))
        self._hold(
            ["the default dtype", "whether algorithms are deterministic"],
            lambda: [torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()],
        )
        self._hold(
            ["the hooks of all modules"],
            lambda: [*itertools.chain.from_iterable(map(dict.values, registries))],
        )
        if not self._is_lenient and any(registries):
            raise CaptureError(
                "a hook of all modules (register_module_forward_hook) would see more than the trial's modules"
            )

    def visit(self, value: Any, label: str, depth: int = 0, library: int = 0) -> None:
        """Follow a value.

        Args:
            value: any value.
            label: the value in words.
            depth: number of values on the way here.
            library: number of objects of installed packages on the way here, in a row.

        Raises:
            CaptureError: a strict walk cannot follow or compare a value.
            TaskError: a strict walk meets an iterator, or a value of a thread.
        """
        if id(value) in self._parts and not self._is_in_model:
            self.self_references.append(label)
        if type(value) in EXACT or id(value) in self.seen or id(value) in self._own:
            return
        if library and len(self.holders) > _MAX_HOLDERS:
            return
        if depth > _MAX_DEPTH or len(self.holders) > _MAX_HOLDERS:
            if self._is_lenient:
                return
            raise CaptureError(f"its Python holds more values than can be followed, from {label} on")
        if library > _MAX_LIBRARY_DEPTH:
            # So far down, only what the user's code names. Another way to the value may be shorter, so not yet `seen`.
            if id(value) not in self._deep:
                self._deep[id(value)] = value
                with suppress(Exception):
                    self._named_attributes(value, label, depth + 1, library)
            return
        self.seen[id(value)] = value
        if value is os.environ or value is os.environb or value is os.getenv or value is os.getenvb:
            self._environment()
            return
        if (follow_code := _BY_CODE.get(type(value))) is not None:
            follow_code(self, value, label, depth + 1, library)
        else:
            self._look_at(value, label, depth, library)

    def _look_at(self, value: Any, label: str, depth: int, library: int) -> None:
        """Follow an object, which may do anything where it is looked at."""
        try:
            follow = _BY_EXACT_TYPE.get(type(value)) or next(
                (follow for kinds, follow in _BY_TYPE if isinstance(value, kinds)), ReachableValues._object
            )
            follow(self, value, label, depth + 1, library)
            if follow in _BY_CONTENTS:
                self._named_attributes(value, label, depth + 1, library)
        except (CaptureError, TaskError):
            raise
        except Exception as error:
            if self._is_lenient or library:
                return
            # Unseen, the object could change without a word.
            raise CaptureError(f"{label} cannot be looked at ({type(error).__name__}: {error})") from error

    def _module(self, module: nn.Module, label: str, depth: int, library: int) -> None:
        attributes = vars(module)
        kind = type(module)
        foreign = [base for base in kind.__mro__ if is_installed(base.__module__)]
        # A user's class made of a library's, as of `PreTrainedModel`, has attributes that the library's code reads.
        is_of_library = is_installed(kind.__module__) or any(
            base.__module__.partition(".")[0] not in ("torch", "builtins", "abc", "typing") for base in foreign
        )
        # All attributes, because code may make up their names: `getattr(self, f"scale{i}")`.
        present = [name for name in attributes if name not in INTERNALS]
        names = list(dict.fromkeys([*present, *self._known(attributes, kind), "forward"]))
        parameters, buffers, parts = module._parameters, module._buffers, module._modules  # noqa: SLF001
        hooks = [getattr(module, name) for name in _HOOKS]
        trained = [parameter for parameter in parameters.values() if parameter is not None]
        is_of_model = id(module) in self._parts
        was_in_model, self._is_in_model = self._is_in_model, self._is_in_model or is_of_model
        registries = [(registry, dict(registry)) for registry in (parameters, buffers, parts, *hooks)]
        mode = module.training

        def write(values: Values) -> None:
            write_names(attributes, names, values[: len(names)])
            if not is_of_model:  # a copy of the model is thrown away
                attributes["training"] = mode
                for registry, content in registries:
                    registry.clear()
                    registry.update(content)

        holder = self._hold(
            [
                *(f"{label}.{name}" for name in names),
                f"the mode of {label}",
                f"the forward of {label}",
                f"a submodule, parameter or hook of {label}",
            ],
            lambda: [
                *map(attributes.get, names, ALL_MISSING),
                module.training,
                getattr(type(module), "forward", None),  # a ScriptModule's class has none
                *parts.values(),
                *buffers.values(),
                *parameters.values(),
                *map(_REQUIRES_GRAD, trained),
                *itertools.chain.from_iterable(map(dict.values, hooks)),
            ],
            write,
            is_of_model=is_of_model,
        )
        for name, value in zip(names, holder.noted, strict=False):
            self.visit(value, f"{label}.{name}", depth, library + is_of_library)
        for name, tensor in (*parameters.items(), *buffers.items()):
            self.visit(tensor, f"{label}.{name}", depth, 0)
            if tensor is not None and id(tensor) in self._own:
                self._attributes_of_own(tensor, f"{label}.{name}", depth)
        for name, child in module._modules.items():  # noqa: SLF001
            self.visit(child, f"{label}.{name}", depth, 0)
        for hook in [hook for registry in hooks for hook in registry.values()]:
            self.visit(hook, f"a hook of {label}", depth, 0)
        self._class(kind, kind.__name__, depth, 0)
        self._is_in_model = was_in_model

    def _attributes_of_own(self, tensor: Tensor, label: str, depth: int) -> None:
        """The attributes that the code names of a parameter or buffer; libraries leave marks of theirs on parameters, too."""
        attributes = vars(tensor)
        names = [name for name in attributes if name in self.names or self._takes_all]
        self._named(attributes, names, label, depth, 0)

    def _of_thread(self, value: Any, label: str, depth: int, library: int) -> None:
        """A `threading.local` or a `ContextVar`."""
        del depth
        if not self._is_lenient and not library:
            raise TaskError(
                f"{label} is a {type(value).__name__}, which holds a value for each thread: a model that is cut or "
                "fused is prepared by one thread and computed by another; use a plain attribute"
            )

    def _proxy(self, proxy: Any, label: str, depth: int, library: int) -> None:
        del proxy, depth, library
        if not self._is_lenient:
            raise CaptureError(f"{label} is a weakref.proxy, whose object cannot be followed")

    def _tensor(self, tensor: Tensor, label: str, depth: int, library: int) -> None:
        if is_lazy(tensor) or tensor.is_inference() or tensor.is_meta or isinstance(tensor, FakeTensor):
            return
        if tensor.layout is not torch.strided:
            self._hold([f"the tensor {label}"], lambda: [tensor._version])  # noqa: SLF001 - the contents have no one order
            return
        if self._skips_large and tensor.nbytes > MAX_DATA_BYTES:
            self._hold([f"the tensor {label}"], lambda: [tensor._version, tensor.data_ptr()])  # noqa: SLF001
            return
        self._note_alias(memory_of(tensor), f"the tensor {label}")
        write, undo = writers_of(tensor) if self._keeps_tensors else (None, None)
        by_contents = tensor.is_cpu and self._bytes_compared + tensor.nbytes <= _MAX_COMPARED_BYTES
        self._bytes_compared += tensor.nbytes if by_contents else 0
        # The first value is left out of keys.
        self._hold(
            [f"the tensor {label}"],
            lambda: [tensor.data_ptr(), *facts_of(tensor, by_contents=by_contents)],
            write,
            is_tensor=True,
            owner=id(tensor),
            undo=undo,
        )
        if attributes := vars(tensor):
            self._named(attributes, list(attributes), label, depth, library)

    def _iterator(self, iterator: Iterator[Any], label: str, depth: int, library: int) -> None:
        if self._is_lenient:
            self.iterators.append(label)
            return
        if not is_installed(type(iterator).__module__):
            self._object(iterator, label, depth, library)
            return
        raise TaskError(
            f"{label} is an iterator: a model that is cut or fused has its step tried before the first real step, which would "
            "draw from the iterator; give the values with the batches, or keep a position in a variable and read from a list"
        )

    def _file(self, file: Any, label: str, depth: int, library: int) -> None:
        del depth, library
        if file.closed or not (file.readable() or file.seekable()):
            return
        try:
            self._hold([label], lambda: [file.tell()], lambda values: file.seek(values[0]))
        except OSError as error:  # a pipe, or a text file in the middle of a loop over its lines
            if not self._is_lenient:
                raise CaptureError(f"the position of the file {label} cannot be compared") from error
            self.iterators.append(label)

    def _loader(self, loader: DataLoader[Any], label: str, depth: int, library: int) -> None:
        for name in ("dataset", "sampler", "batch_sampler", "collate_fn"):
            self.visit(getattr(loader, name), f"{label}.{name}", depth, library)

    def _mapping(self, mapping: Mapping[Any, Any], label: str, depth: int, library: int) -> None:
        write = (lambda values: write_mapping(mapping, values)) if isinstance(mapping, dict) else None
        read = lambda: [*mapping.keys(), *mapping.values()]  # noqa: E731
        names = [_name_of_key(key, place) for place, key in enumerate(mapping)] if len(mapping) <= MAX_LABELS else []
        labels = ItemLabels(label, names, num_keys=len(names))
        self._hold(labels, read, write, is_of_model=self._is_in_model, is_mapping=True, owner=id(mapping))
        if self._may_follow(mapping, mapping.values(), label):
            for place, (key, value) in enumerate(list(mapping.items())):
                if type(value) not in EXACT:  # as in `_sequence`
                    self.visit(value, f"{label}[{_name_of_key(key, place)}]"[:200], depth, library)
                # An object of the user's, whose attributes may change.
                if type(key) not in EXACT and not is_installed(type(key).__module__):
                    self.visit(key, f"the key {_name_of_key(key, place)} of {label}"[:200], depth, library)
        if isinstance(mapping, collections.defaultdict):
            self.visit(mapping.default_factory, f"the default of {label}", depth, library)
        self._attributes(mapping, label, depth, library)

    def _sequence(self, sequence: Any, label: str, depth: int, library: int) -> None:
        if not isinstance(sequence, tuple):
            write = lambda values: write_sequence(sequence, values)  # noqa: E731
            labels = ItemLabels(label, range(len(sequence)) if len(sequence) <= MAX_LABELS else ())
            self._hold(labels, lambda: list(sequence), write, is_of_model=self._is_in_model, owner=id(sequence))
        if self._may_follow(sequence, sequence, label):
            for number, value in enumerate(list(sequence)):
                if type(value) not in EXACT:  # `visit` would return at once; a data set may have thousands of numbers
                    self.visit(value, f"{label}[{number}]", depth, library)
        self._attributes(sequence, label, depth, library)

    def _set(self, members: Any, label: str, depth: int, library: int) -> None:
        write = (lambda values: write_set(members, values)) if isinstance(members, set) else None
        self._hold([label], lambda: [frozenset(members)], write, owner=id(members))
        if self._may_follow(members, members, label):
            for value in list(members):
                self.visit(value, label, depth, library)

    def _may_follow(self, container: Any, values: Iterable[Any], label: str) -> bool:
        """Whether to visit the values of a container; large containers of plain values need no visit."""
        if len(container) <= _MAX_ITEMS:
            return True
        if self._is_lenient or all(isinstance(value, PLAIN) for value in values):
            return False
        raise CaptureError(f"{label} holds {len(container)} objects, more than can be followed")

    def _random(self, generator: random.Random, label: str, depth: int, library: int) -> None:
        del depth, library
        if generator is _OF_PROCESS:
            return
        self._hold(
            [label], lambda: [generator.getstate()], lambda values: generator.setstate(values[0]), owner=id(generator)
        )

    def _generator(self, generator: torch.Generator, label: str, depth: int, library: int) -> None:
        del depth, library
        before = generator.get_state()

        def write(_: Values) -> None:
            generator.set_state(before)

        self._hold([label], lambda: [generator.get_state().numpy().tobytes()], write, owner=id(generator))

    def _schedule(self, schedule: LRScheduler, label: str, depth: int, library: int) -> None:
        """A scheduler of torch's: its rates and the attributes that the code names, where nothing else of it is called."""
        attributes = vars(schedule)
        rates: Any = attributes.get("_last_lr")
        is_read = _is_schedule_of_torch(schedule) and isinstance(rates, list)
        if self._skips_large or self._takes_all or not is_read or not self.names.isdisjoint(_SCHEDULE_METHODS):
            self._attributes(schedule, label, depth, library)
            return
        self._named(attributes, [name for name in attributes if name in self.names], label, depth, library + 1)
        if "get_last_lr" in self.names:
            # By the scheduler: each step of the scheduler makes another list.
            holder = self._hold(
                [f"{label}.get_last_lr()[{place}]" for place in range(len(rates))],
                lambda: list(schedule._last_lr),  # noqa: SLF001
                lambda values: setattr(schedule, "_last_lr", list(values)),
            )
            self.visit(tuple(holder.noted), f"{label}.get_last_lr()", depth, library + 1)

    def _reference(self, reference: weakref.ref[Any], label: str, depth: int, library: int) -> None:
        self.visit(reference(), label, depth, library)

    def _wrapped(self, wrapper: Any, label: str, depth: int, library: int) -> None:
        # The results that it keeps, which may be objects with state.
        label = f"a result of {label}"
        holder = self._hold([label], lambda: results_of(wrapper), is_filled_by_step=True)
        if all(isinstance(result, (*PLAIN, Tensor)) for result in holder.noted):
            self.caches.append(NotedCache(wrapper))
        for result in holder.noted:
            self.visit(result, label, depth, library)
        self.visit(wrapper.__wrapped__, label, depth, library)

    def _builtin(self, function: Any, label: str, depth: int, library: int) -> None:
        """A function written in C, which may be a method of an object."""
        self.visit(getattr(function, "__self__", None), label, depth, library)

    def _operator(self, operator: Any, label: str, depth: int, library: int) -> None:
        """An operator of torch: the Python functions that a user has given."""
        definition = definition_of(operator)
        for name, content in () if definition is None else vars(definition).items():
            for function in content.values() if isinstance(content, dict) else (content,):
                if isinstance(function, types.FunctionType):
                    self.visit(function, f"{label}.{name}", depth, library)

    def _plain(self, value: Any, label: str, depth: int, library: int) -> None:
        """A member of an enum, or a number or text of a class of its own."""
        if isinstance(value, enum.Enum):
            self.visit(value.value, label, depth, library)
        if type(value) not in EXACT:
            self._attributes(value, label, depth, library)

    def _thread(self, thread: threading.Thread, label: str, depth: int, library: int) -> None:
        """The values without parts that the walked code names: what the thread itself works on changes at any time."""
        attributes = vars(thread)
        known = self._known(attributes, type(thread))
        names = [name for name in known if name not in attributes or isinstance(attributes[name], PLAIN)]
        self._named(attributes, names, label, depth, library)

    def _object(self, value: Any, label: str, depth: int, library: int) -> None:
        numpy, kind = sys.modules.get("numpy"), type(value)
        if numpy is not None and isinstance(value, numpy.ndarray):
            self._array(value, label)
            self._named_attributes(value, label, depth, library)
        elif numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState):
            if value is numpy.random.mtrand._rand:  # noqa: SLF001 - numpy's stream of the process; its functions may be replaced
                return
            bits = value.bit_generator if isinstance(value, numpy.random.Generator) else value._bit_generator  # noqa: SLF001
            before = bits.state
            self._hold([label], lambda: [repr(bits.state)], lambda _: setattr(bits, "state", before), owner=id(bits))
        elif is_extension(kind):
            self._opaque(value, label, library)
        else:
            self._attributes(value, label, depth, library)

    def _opaque(self, value: Any, label: str, library: int) -> None:
        """An object of an extension module: its bytes where it shows them, else its pickled form."""
        if hasattr(value, "_get_value"):  # a semaphore of multiprocessing
            self._hold([label], lambda: [value._get_value()])  # noqa: SLF001
            return
        if (facts := buffer_facts(value)) is not None:
            size, is_readonly = facts
            if size > _MAX_ARRAY_BYTES:
                if not (self._is_lenient or self._skips_large):
                    raise CaptureError(f"{label} is too large to be compared at each step; use a tensor")
                # A memory map is left out, because a look would read all over its file.
                if not (is_readonly or is_mapped(value)):
                    self._hold([label], lambda: [sampled_bytes(value)], owner=id(value))
                return
            before = bytes_of(value)
            self._hold([label], lambda: [bytes_of(value)], lambda _: write_bytes(value, before))
            return
        content = pickled(value)
        if content is not None and len(content) <= _MAX_PICKLED_BYTES:
            self._hold([label], lambda: [pickled(value)])
        elif self._is_lenient:
            self.iterators.append(label)
        elif not library:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise CaptureError(
                f"{label} is a {kind}, an object of an extension module, whose contents cannot be compared"
            )

    def _view(self, view: Any, label: str, depth: int, library: int) -> None:
        """A view of a dictionary."""
        for mapping in gc.get_referents(view):
            self.visit(mapping, label, depth, library)

    def _synchronized(self, value: Any, label: str, depth: int, library: int) -> None:
        """An event or a semaphore: its state, and nothing of the threads that wait."""
        del depth, library
        attributes = vars(value)
        names = [name for name, item in attributes.items() if isinstance(item, PLAIN)]
        self._hold(
            [label],
            lambda: list(map(attributes.get, names)),
            lambda values: write_names(attributes, names, values),
            is_of_threads=True,
        )

    def _array(self, array: Any, label: str) -> None:
        if array.nbytes > _MAX_ARRAY_BYTES:
            if not (self._is_lenient or self._skips_large):
                raise CaptureError(f"{label} is an array too large to be compared at each step; use a tensor")
            # A memory map is left out, because a look would read all over its file.
            if array.flags.writeable and not is_mapped(array):
                self._hold([label], lambda: [sampled(array)], owner=id(array))
            return
        address = array.__array_interface__["data"][0]
        self._note_alias((address, address + array.nbytes), f"the array {label}")
        read = lambda: [(array.shape, array.dtype.str, zlib.crc32(array.tobytes()))]  # noqa: E731
        if self._skips_large and array.nbytes > MAX_DATA_BYTES:
            self._hold([label], read, owner=id(array))
            return
        before = array.copy()

        def write(_: Values) -> None:
            array[...] = before

        undo = None if array.dtype.hasobject else undo_by_element(array, before, write)
        self._hold([label], read, write, owner=id(array), undo=undo)

    def _note_alias(self, memory: tuple[int, int], label: str) -> None:
        """Note a tensor or an array outside of the model that shares memory with the model's tensors."""
        begin, end = memory
        if not self._is_in_model and any(begin < other_end and other < end for other, other_end in self._memory):
            self.aliases.append(label)


_BY_CODE: dict[type, Callable[..., None]] = {
    types.FunctionType: ReachableValues._function,  # noqa: SLF001
    types.MethodType: ReachableValues._method,  # noqa: SLF001
}
_BY_TYPE: tuple[tuple[Any, Callable[..., None]], ...] = (
    (weakref.ProxyTypes, ReachableValues._proxy),  # noqa: SLF001 - asked for its class, a proxy answers for another object
    (nn.Module, ReachableValues._module),  # noqa: SLF001
    (OPERATORS, ReachableValues._operator),  # noqa: SLF001
    (Tensor, ReachableValues._tensor),  # noqa: SLF001
    (functools.partial, ReachableValues._partial),  # noqa: SLF001
    ((operator.attrgetter, operator.methodcaller), ReachableValues._getter),  # noqa: SLF001
    (type, ReachableValues._named_class),  # noqa: SLF001
    (PLAIN, ReachableValues._plain),  # noqa: SLF001
    (types.ModuleType, ReachableValues._python_module),  # noqa: SLF001
    (DataLoader, ReachableValues._loader),  # noqa: SLF001
    ((contextvars.ContextVar, threading.local), ReachableValues._of_thread),  # noqa: SLF001
    (dict, ReachableValues._mapping),  # noqa: SLF001
    ((*map(type, ({}.keys(), {}.values(), {}.items())), types.MappingProxyType), ReachableValues._view),  # noqa: SLF001
    ((list, tuple, collections.deque), ReachableValues._sequence),  # noqa: SLF001
    ((set, frozenset), ReachableValues._set),  # noqa: SLF001
    (random.Random, ReachableValues._random),  # noqa: SLF001
    (LRScheduler, ReachableValues._schedule),  # noqa: SLF001
    (torch.Generator, ReachableValues._generator),  # noqa: SLF001
    (weakref.ref, ReachableValues._reference),  # noqa: SLF001
    (type(functools.lru_cache(int)), ReachableValues._wrapped),  # noqa: SLF001
    ((types.BuiltinFunctionType, types.MethodWrapperType), ReachableValues._builtin),  # noqa: SLF001
    (threading.Thread, ReachableValues._thread),  # noqa: SLF001
    ((multiprocessing.connection.Connection, socket.socket), ReachableValues._iterator),  # noqa: SLF001
    ((threading.Event, threading.Semaphore, threading.Condition), ReachableValues._synchronized),  # noqa: SLF001
    (io.IOBase, ReachableValues._file),  # noqa: SLF001
    (Iterator, ReachableValues._iterator),  # noqa: SLF001
)


_BY_EXACT_TYPE: dict[type, Callable[..., None]] = {
    dict: ReachableValues._mapping,  # noqa: SLF001
    list: ReachableValues._sequence,  # noqa: SLF001
    tuple: ReachableValues._sequence,  # noqa: SLF001
}
"""For the frequent types: a data set may have thousands of such objects."""
_BY_CONTENTS = frozenset(
    {
        ReachableValues._partial,  # noqa: SLF001
        ReachableValues._loader,  # noqa: SLF001
        ReachableValues._set,  # noqa: SLF001
        ReachableValues._random,  # noqa: SLF001
        ReachableValues._generator,  # noqa: SLF001
        ReachableValues._wrapped,  # noqa: SLF001
        ReachableValues._synchronized,  # noqa: SLF001
        ReachableValues._file,  # noqa: SLF001
    }
)
"""Ways to follow an object that leave its attributes out."""


def _name_of_key(key: Any, place: int) -> str:
    """Return a name of a mapping's key, which runs no code of a user and prints no tensor."""
    return repr(key) if isinstance(key, str | int | float | bytes | None) else f"{type(key).__name__} {place}"


def _is_schedule_of_torch(schedule: LRScheduler) -> bool:
    """Whether no code of the user's, in a class of its own, may read more of a scheduler."""
    return type(schedule).__module__ == LRScheduler.__module__


def walked(
    roots: Mapping[str, object],
    module: nn.Module | None,
    *,
    keeps_tensors: bool,
    is_lenient: bool = False,
    skips_large: bool | None = None,
) -> ReachableValues:
    """Walk from some functions, and from a model, through all values that their code may read.

    Arguments are as of `ReachableValues`; `roots` are functions and data by name. Without a model, `skips_large` is true by
    default.
    """
    names: frozenset[str] = frozenset()
    stored: frozenset[str] = frozenset()
    takes_all = False
    while True:
        walk = ReachableValues(
            module,
            names,
            stored,
            takes_all=takes_all,
            keeps_tensors=keeps_tensors,
            is_lenient=is_lenient,
            skips_large=module is None if skips_large is None else skips_large,
        )
        for name, root in roots.items():
            walk.visit(root, name)
        walk.visit_model()
        # Attributes bring further code, which names further attributes.
        if walk.names <= names and walk.stored <= stored and walk.makes_up_names == takes_all:
            return walk
        names, stored, takes_all = names | walk.names, stored | walk.stored, walk.makes_up_names
