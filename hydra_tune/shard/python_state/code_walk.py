"""`CodeWalk`: the part of a walk that follows functions, classes and attributes by the names in their code.

`ReachableValues` (`reachable_values.py`) derives from `CodeWalk`, and adds the values of all other kinds. The walk follows no
code of an installed package. Of a function that a factory or decorator of a package returns, the walk follows the wrapped
function, and the user's values in the variables of the wrapper; without a wrapped function, the walk notes all variables and
the defaults. Of an object of the user's, the walk notes the attributes that the walked code names; of an object of an installed
package, all attributes, unless `_NOT_FOLLOWED` has the package. An object of the user's whose class is derived from a package's
counts likewise where the package may read attributes (`_reads_attributes`). Where code reads attributes by any name
(`takes_all`), all attributes and slots of an object count, and all plain variables of the user's modules that such code names
or imports. A walk must not call the functions that the walk follows, or change a value.
"""

import abc
import builtins
import collections
import contextlib
import functools
import itertools
import logging
import os
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hydra_tune.errors import CaptureError
from hydra_tune.shard.python_state.code_names import (
    OF_THE_ENVIRONMENT,
    global_names,
    imported_names,
    is_installed,
    is_package_code,
    loaded_names,
    looks_up_modules,
    makes_up_names,
    mentioned_names,
    stands_in_its_module,
    stored_names,
    texts,
    whole_spaces,
)
from hydra_tune.shard.python_state.value_holder import (
    MISSING,
    PLAIN,
    ValueHolder,
    Values,
    content_of,
    write_class,
    write_function,
    write_names,
    write_slots,
)

ALL_MISSING = itertools.repeat(MISSING)
_NOT_FOLLOWED = frozenset({"types", "argparse", "builtins", "logging", "threading", "optuna", "ray", "hydra_tune"})
"""Packages whose objects count by the attributes that the walked code names; of others' objects, all attributes count."""
_WITHOUT_ATTRIBUTES = frozenset({"builtins", "abc", "typing", "collections", "contextlib", "enum"})
"""Packages whose classes, without those of `_WITH_CONTENTS`, are taken to read no attributes of derived objects."""
_WITH_CONTENTS = (collections.UserDict, collections.UserList, collections.UserString, collections.ChainMap)
"""Classes of these packages that keep contents in attributes."""
_BARE = (dict, list, tuple)
"""Classes whose objects have no attributes of their own; a data set may have thousands of such objects."""
_OF_SETTINGS = frozenset({"omegaconf", "ml_collections", "yacs", "addict", "box", "easydict", "munch"})
"""Packages of nested settings, of which any number of objects in a row counts as a single object."""
INTERNALS = frozenset(vars(nn.Module()))
"""Attributes of each module of torch's: its parameters, buffers, submodules and hooks."""


class CodeWalk(abc.ABC):
    """Follows functions, classes, and the attributes of objects.

    Args:
        names: attributes that the code may read, from an earlier walk.
        stored: attributes that the code may set, from an earlier walk.
        tensors: parameters and buffers of the step's model.
        takes_all: whether the code may read attributes by any name, from an earlier walk.
        is_lenient: whether to pass over what cannot be followed, instead of raising.

    Attributes:
        self_references: places outside of the model that hold the model or a part of the model, and variables of functions
            that hold one of the model's tensors, in words.
        names, stored, makes_up_names: the arguments `names`, `stored` and `takes_all`, with what this walk adds.
        loaded: attributes that the code reads.
        asks_types: whether the code may ask for the class of a value by `type(value)`.
        has_environment: whether the code may read or set variables of the environment.
    """

    def __init__(
        self,
        names: frozenset[str],
        stored: frozenset[str],
        tensors: Iterable[Tensor],
        *,
        takes_all: bool,
        is_lenient: bool,
    ) -> None:
        self.holders: list[ValueHolder] = []
        self.self_references: list[str] = []
        self.names, self.stored = names, stored
        self.loaded: frozenset[str] = frozenset()
        self.asks_types = False
        self.makes_up_names = self._takes_all = takes_all
        self._is_lenient = is_lenient
        self._classes: set[tuple[type, bool]] = set()
        self._searched_modules: set[str] = set()
        self._own = {id(tensor) for tensor in tensors}
        self._is_in_model = self.has_environment = False

    @abc.abstractmethod
    def visit(self, value: Any, label: str, depth: int = 0, library: int = 0) -> None:
        """Follow a value; arguments as of `ReachableValues.visit`."""

    def _hold(
        self,
        labels: Sequence[str],
        read: Callable[[], Values],
        write: Callable[[Values], None] | None = None,
        **kinds: Any,
    ) -> ValueHolder:
        """Add a holder; arguments as of `ValueHolder`."""
        holder = ValueHolder(labels, read, write, **kinds)
        self.holders.append(holder)
        return holder

    def _named(
        self,
        mapping: Any,
        names: Sequence[str],
        label: str,
        depth: int,
        library: int,
        write: Any = None,
    ) -> None:
        """Hold some values of a namespace, and follow them."""
        if not names:
            return
        holder = self._hold(
            [f"{label}.{name}" for name in names],
            lambda: list(map(mapping.get, names, ALL_MISSING)),
            (lambda values: write_names(mapping, names, values)) if write is None else write,
        )
        for name, value in zip(names, holder.noted, strict=True):
            self.visit(value, f"{label}.{name}", depth, library)

    def _known(self, attributes: Iterable[str], kind: type | None = None) -> list[str]:
        """Attributes that the walked code may read, or may set although they are not there yet.

        Args:
            attributes: names of the present attributes.
            kind: class of the object, whose members an attribute of the object would hide.
        """
        present = [name for name in attributes if name in self.names or self._takes_all]
        bases = () if kind is None else [base for base in kind.__mro__ if not is_installed(base.__module__)]
        members = [name for base in bases for name in vars(base) if name in self.names and not name.startswith("__")]
        names = dict.fromkeys([*present, *members, *sorted(self.stored)])
        return [name for name in names if name not in INTERNALS]

    def _may_run(self, name: str, kind: type, *, is_called: bool) -> bool:
        """Whether walked code, or the code of an installed base, may call a method by this name.

        `is_called`: whether walked code names the class, and so may make objects.
        """
        if name in ("__init__", "__new__", "__post_init__"):
            return is_called
        is_known = name in self.names or (name.startswith("__") and name.endswith("__"))
        return is_known or any(hasattr(base, name) for base in kind.__mro__ if is_installed(base.__module__))

    def _named_class(self, kind: type, label: str, depth: int, library: int) -> None:
        """A class that walked code names."""
        self._class(kind, label, depth, library, is_called=True)

    def _class(self, kind: type, label: str, depth: int, library: int, *, is_called: bool = False) -> None:
        del label  # a class is named by itself
        if not is_installed(type(kind).__module__):
            self._class(type(kind), type(kind).__name__, depth, library)
        for base in kind.__mro__:
            if (base, is_called) in self._classes or is_installed(base.__module__):
                continue
            self._classes.add((base, is_called))
            functions = [(name, member) for name, member in vars(base).items() if _is_code(member)]
            run = [(name, member) for name, member in functions if self._may_run(name, kind, is_called=is_called)]
            for name, member in run:
                for part in _parts_of_code(member):
                    self.visit(part, f"{base.__name__}.{name}", depth, library)
            # Also names that the class gets later, and that hide those of its bases from then on.
            # Also methods that only a library's code calls, as of `autograd.Function`: a program may replace them.
            known = dict.fromkeys([*self._known(vars(base), base), *(name for name, _ in run)])
            names = [name for name in known if not name.startswith("__")]
            self._named(vars(base), names, base.__name__, depth, library, functools.partial(write_class, base, names))
            if issubclass(base, torch.autograd.Function):
                # `type(ctx)`, which torch makes for each Function.
                node: Any = base._backward_cls  # noqa: SLF001
                names = self._known(vars(node))
                self._named(
                    vars(node), names, node.__name__, depth, library, functools.partial(write_class, node, names)
                )

    def _function(self, function: types.FunctionType, label: str, depth: int, library: int) -> None:
        if is_package_code(function):
            self._package_function(function, label, depth, library)
            return
        code = function.__code__
        self.names |= mentioned_names(code)
        self.stored |= stored_names(code)
        self.loaded |= loaded_names(code)
        self.makes_up_names = self.makes_up_names or makes_up_names(code)
        # The methods that frozen dataclasses are given ask for the class of the object itself.
        is_of_dataclass = code.co_name in ("__setattr__", "__delattr__")
        self.asks_types = self.asks_types or ("type" in global_names(code) and not is_of_dataclass)
        cells = function.__closure__ or ()
        space = function.__globals__
        unknown = whole_spaces(code)
        if unknown and not self._is_lenient:
            raise CaptureError(f"{label} uses {min(unknown)}, and so may read values that cannot be followed")
        names = [name for name in global_names(code) if not hasattr(builtins, name) or name in space]
        holder = self._hold(
            [
                *(f"the variable {name!r} of {label}" for name in code.co_freevars),
                *(f"the global {name!r}" for name in names),
                f"the code of {label}",
            ],
            lambda: [
                *map(content_of, cells),
                *map(space.get, names, ALL_MISSING),
                function.__code__,
                function.__defaults__,
                function.__kwdefaults__,
            ],
            lambda values: write_function(cells, space, names, values),
        )
        # A copy of the model shares its functions, and all that they hold, with the model.
        was_in_model, self._is_in_model = self._is_in_model, False
        for name, value in zip(holder.labels, holder.noted, strict=False):
            if id(value) in self._own:
                self.self_references.append(name)
            self.visit(value, name, depth, library)
        for name in imported_names(code):
            self.visit(sys.modules.get(name), name, depth, library)
        if looks_up_modules(code):
            self._looked_up(code, space, label, depth, library)
        if makes_up_names(code):
            for value in (*holder.noted, *map(sys.modules.get, imported_names(code))):
                if isinstance(value, types.ModuleType) and not is_installed(value.__name__):
                    self._plain_variables(value, depth)
        defaults = (function.__defaults__ or (), function.__kwdefaults__ or {})
        self.visit(defaults, f"the defaults of {label}", depth, library)
        self.visit(vars(function), label, depth, library)
        self._is_in_model = was_in_model

    def _package_function(self, function: types.FunctionType, label: str, depth: int, library: int) -> None:
        """A function with the code of an installed package: only values given to the package count."""
        if is_installed(function.__module__) and stands_in_its_module(function):
            return
        inner = vars(function).get("__wrapped__")
        if inner is None:
            self._given_values(function, label, depth, library + 1)
            return
        # A wrapper, as of `torch.no_grad()` or `torch.compile`, around a function that counts by itself.
        self.visit(inner, label, depth, library)
        registry = vars(function).get("registry")
        if isinstance(registry, types.MappingProxyType):  # of `singledispatch`; a function may be registered later
            self._hold([f"the functions of {label}"], lambda: [len(registry)])
            for registered in registry.values():
                self.visit(registered, label, depth, library)
        # The wrapper may call further code of the user's, such as a context manager.
        for name, content in zip(
            function.__code__.co_freevars, map(content_of, function.__closure__ or ()), strict=True
        ):
            is_torch = function.__globals__.get("__name__", "").startswith("torch.")
            for given in () if content is inner else _given_to_wrapper(content, is_torch=is_torch):
                self.visit(given, f"the variable {name!r} of {label}", depth, library)

    def _given_values(self, function: types.FunctionType, label: str, depth: int, library: int) -> None:
        """Hold and follow the variables around a package's function, and its defaults.

        A part of the model among them is no self reference: an object of a package may make the function anew in its copy, as
        a metric of torchmetrics does.
        """
        cells = function.__closure__ or ()
        defaults = (function.__defaults__ or (), function.__kwdefaults__ or {})
        holder = self._hold(
            [
                *(f"the variable {name!r} of {label}" for name in function.__code__.co_freevars),
                f"the defaults of {label}",
            ],
            lambda: [*map(content_of, cells), function.__defaults__, function.__kwdefaults__],
            lambda values: write_function(cells, {}, (), values),
        )
        for name, value in zip(holder.labels, (*holder.noted[: len(cells)], defaults), strict=True):
            self.visit(value, name, depth, library)

    def _looked_up(self, code: types.CodeType, space: dict[str, Any], label: str, depth: int, library: int) -> None:
        """Follow the modules that code looks up by names, as `sys.modules["settings"]` does."""
        names = {*texts(code), *([space.get("__name__", "")] if "__name__" in global_names(code) else [])}
        modules = {name: sys.modules[name] for name in sorted(names) if name in sys.modules}
        if not modules and not self._is_lenient:
            raise CaptureError(
                f"{label} looks up a module whose name is not in the code, and so may read values that cannot be followed"
            )
        for name, module in modules.items():
            self.visit(module, name, depth, library)

    def _python_module(self, module: types.ModuleType, label: str, depth: int, library: int) -> None:
        """A module named by code: the user's own settings, or the environment."""
        del label, library
        if module is os and not self.names.isdisjoint(OF_THE_ENVIRONMENT):
            self._environment()
        if not is_installed(module.__name__):
            content = vars(module)
            names = [name for name in self.names if name in content]
            self._named(content, sorted(names), module.__name__, depth, 0)

    def _plain_variables(self, module: types.ModuleType, depth: int) -> None:
        """Hold the variables of a module of the user's by any name, but only values without parts, to bound the walk."""
        if module.__name__ not in self._searched_modules:
            self._searched_modules.add(module.__name__)
            content = vars(module)
            names = [name for name in content if isinstance(content[name], PLAIN) and not name.startswith("__")]
            self._named(content, sorted(names), module.__name__, depth, 0)

    def _environment(self) -> None:
        if not self.has_environment:
            self.has_environment = True
            # Not written: other trials may have changed the environment meanwhile. `PythonStateUndo` has a holder
            # with a writer.
            self._hold(["the environment"], lambda: [hash(frozenset(os.environ.items()))])

    def _method(self, method: types.MethodType, label: str, depth: int, library: int) -> None:
        self.visit(method.__func__, label, depth, library)
        self.visit(method.__self__, label, depth, library)

    def _getter(self, getter: Any, label: str, depth: int, library: int) -> None:
        """An `attrgetter` or a `methodcaller`: its names may be read; its further arguments are values."""
        _, arguments = getter.__reduce__()[:2]
        names = {part for argument in arguments if isinstance(argument, str) for part in argument.split(".")}
        self.names |= names
        self.loaded |= names
        self.visit(arguments, label, depth, library)

    def _partial(self, partial: functools.partial[Any], label: str, depth: int, library: int) -> None:
        for part in (partial.func, partial.args, partial.keywords):
            self.visit(part, label, depth, library)

    def _named_attributes(self, value: Any, label: str, depth: int, library: int) -> None:
        """Hold and follow the attributes that the walked code names, of an object that counts by its contents otherwise."""
        kind, attributes = type(value), getattr(value, "__dict__", None)
        if not is_installed(kind.__module__):
            self._class(kind, kind.__name__, depth, library)
        if isinstance(attributes, dict):
            # Where code makes names up, only values without parts: a loader keeps its iterator in an attribute, for example.
            known = self._known(attributes, kind)
            names = [name for name in known if name in self.names or isinstance(attributes.get(name), PLAIN)]
            self._named(attributes, names, label, depth, library)

    def _attributes(self, value: Any, label: str, depth: int, library: int) -> None:
        """Hold and follow the attributes of an object."""
        kind = type(value)
        if kind in _BARE:
            return
        if not is_installed(kind.__module__):
            self._class(kind, kind.__name__, depth, library)
            library = 0
        elif (package := kind.__module__.partition(".")[0]) not in _NOT_FOLLOWED:
            library = max(library, 1) if package in _OF_SETTINGS else library + 1
        # The code of an installed base reads attributes that no walked code names.
        takes_all = library > 0 or any(_reads_attributes(base) for base in kind.__mro__)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            names = list(dict.fromkeys([*(attributes if takes_all else ()), *self._known(attributes, kind)]))
            if kind is logging.Manager:
                names = [name for name in names if name != "loggerDict"]  # all loggers of the process, by thousands
            holder = self._hold(
                [*(f"{label}.{name}" for name in names), f"the class of {label}"],
                lambda: [*map(value.__dict__.get, names, ALL_MISSING), type(value)],
                lambda values: write_names(value.__dict__, names, values[:-1]),
                owner=id(value),
                is_filled_by_step=self._is_in_model and library > 1,  # of a module of a library
            )
            for name, item in zip(names, holder.noted, strict=False):
                self.visit(item, f"{label}.{name}", depth, library)
        slots = [
            name for base in kind.__mro__ for name in _slots(base) if takes_all or self._takes_all or name in self.names
        ]
        if slots:
            holder = self._hold(
                [f"{label}.{name}" for name in slots],
                lambda: [getattr(value, name, MISSING) for name in slots],
                lambda values: write_slots(value, slots, values),
                owner=id(value),
            )
            for name, item in zip(slots, holder.noted, strict=True):
                self.visit(item, f"{label}.{name}", depth, library)


def _given_to_wrapper(content: Any, *, is_torch: bool) -> tuple[Any, ...]:
    """The user's values in a variable of a package's wrapper; the package's own objects change at each call.

    Args:
        content: of the variable.
        is_torch: whether torch made the wrapper, whose containers hold torch's own values.
    """
    if isinstance(content, contextlib._GeneratorContextManager):  # noqa: SLF001 - its other attributes change at each call
        return content.func, content.args, content.kwds
    if isinstance(content, types.FunctionType):
        return () if is_package_code(content) else (content,)
    if isinstance(content, types.MethodType):
        return _given_to_wrapper(content.__func__, is_torch=is_torch) + _given_to_wrapper(
            content.__self__, is_torch=is_torch
        )
    if isinstance(content, list | tuple | dict | set | functools.partial):
        return () if is_torch else (content,)
    return () if is_installed(type(content).__module__) else (content,)


def _is_code(member: object) -> bool:
    return isinstance(
        member,
        types.FunctionType
        | staticmethod
        | classmethod
        | property
        | functools.cached_property
        | functools.singledispatchmethod
        | type,
    )


def _parts_of_code(member: Any) -> Iterable[Any]:
    if isinstance(member, property):
        return member.fget, member.fset
    if isinstance(member, functools.singledispatchmethod):
        return (member.dispatcher,)
    if isinstance(member, functools.cached_property):
        return (member.func,)
    return (getattr(member, "__func__", member),)


def _slots(base: type) -> tuple[str, ...]:
    slots = vars(base).get("__slots__", ())
    names = [
        name for name in ((slots,) if isinstance(slots, str) else slots) if name not in ("__dict__", "__weakref__")
    ]
    hidden = f"_{base.__name__.lstrip('_')}"  # as the compiler names private attributes
    return tuple(f"{hidden}{name}" if name.startswith("__") and not name.endswith("__") else name for name in names)


def _reads_attributes(base: type) -> bool:
    """Whether a class of an installed package may read attributes of its objects."""
    top = base.__module__.partition(".")[0]
    return is_installed(top) and top not in _NOT_FOLLOWED and (top not in _WITHOUT_ATTRIBUTES or base in _WITH_CONTENTS)
