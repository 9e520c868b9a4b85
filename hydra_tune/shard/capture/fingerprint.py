"""Decides whether two trials have the same architecture: a key of the built model and of the code that uses the model.

Equal keys must mean equal graphs. The key therefore holds the values that a capture could bake in: classes and code by
identity and value (an edited class is another class), plain attributes, closures and referenced globals, shapes, and
names with a common tensor. A function that stands in a module of an installed package counts by its name and code
alone, without its closure, and an attribute that is a Python module by its name alone. `key_of`
(`shard/partition/plan_request.py`) and `MemberTrial` (`fusion/group/member.py`) therefore add the digest of a
`PythonStateGuard`, which follows more of the user's values. A model with an object that has no key is captured afresh.

`key_of` makes the key of a request for a plan, `fusion/matching/fusion_key.py` once a trial that may join a group is
built, and `pool/dry_run/report.py` for each trial of a forecast. `MemberTrial` makes a key of a member's model, too.
`shard/cost/update_pilot.py` keeps its measurements by `optimizer_key`, and the keys of plans contain the result.

A key lives as long as a plan, and must not hold a tensor.
"""

import collections
import enum
import functools
import hashlib
import inspect
import logging
import os
import types
import weakref
from collections.abc import Callable, Hashable, Mapping
from pathlib import PurePath
from typing import Any, Generic

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from hydra_tune.shard.python_state.code_names import (
    IS_IMMUTABLE_TYPE,
    OF_THE_ENVIRONMENT,
    global_names,
    is_installed,
    is_package_code,
    makes_up_names,
    mentioned_names,
    stands_in_its_module,
)
from hydra_tune.shard.python_state.torch_operators import OPERATORS, definition_of
from hydra_tune.shard.python_state.value_holder import PLAIN, buffer_facts
from hydra_tune.task import TrainTask

_FIELDS = (types.MemberDescriptorType, type(vars(collections.namedtuple("_Single", "field"))["field"]))  # noqa: PYI024
"""Classes of the descriptors of slots, and of the fields of named tuples."""
_COMPILED = "_torchdynamo_orig_callable"
"""Attribute in which `torch.compile` keeps the function that its result computes."""
_MAX_DEPTH = 12
_MAX_TENSOR_BYTES = 1 << 20
_SKIPPED = {"_parameters", "_buffers", "_modules", "training", "_is_full_backward_hook", "_version"}
# Classes written in C whose objects keep their values in their `__dict__`, or results that follow from their arguments.
_WITHOUT_A_VALUE = (object, types.SimpleNamespace, Generic, type(functools.lru_cache(int)))
# Hooks for saving and loading weights, with numbers that count the hooks of the process.
_SKIPPED |= {f"_{kind}_{when}hooks" for kind in ("state_dict", "load_state_dict") for when in ("", "pre_", "post_")}


class UnkeyableError(Exception):
    """Some object of the model or of its step has no stable key."""


def architecture_key(task: TrainTask, model: nn.Module) -> Hashable | None:
    """Return the key of a model and its use by the task, or None if there is no key.

    The model's mode is not part of the key: the caller keeps captures for training and evaluation apart.
    """
    try:
        return (
            _module(model, {}, 0, contents=False),
            tuple(_value(part, {}, 0) for part in (task.loss, task.step, task.evaluate)),
            # Code that creates tensors without a dtype gets the default dtype, and the graph bakes the dtype in.
            str(torch.get_default_dtype()),
            task.precision,
            task.compile,
            task.loss_weight is None,  # with it, a batch is a pair
            task.finish is None,  # with it, an evaluation returns tensors instead of numbers
        )
    except Exception:  # noqa: BLE001 - besides `UnkeyableError`: objects may do anything where they are looked at
        return None


def optimizer_key(optimizer: torch.optim.Optimizer) -> Hashable:
    """Properties of an optimizer that decide its state and temporaries: class, group sizes and settings that change memory."""
    groups = tuple(
        tuple(sorted((key, type(value).__name__, _switch(value)) for key, value in group.items() if key != "params"))
        for group in optimizer.param_groups
    )
    return (type(optimizer), groups, tuple(len(group["params"]) for group in optimizer.param_groups))


def _switch(value: object) -> str:
    if isinstance(value, int | str) or value is None:  # an integer may be a size
        return str(value)
    if isinstance(value, Tensor):
        return "tensor"
    # A rate: only a rate of 0 changes the memory, as an SGD without momentum has no state.
    try:
        return str(bool(value))
    except Exception:  # noqa: BLE001 - such as an array, which has no truth; its class is in the key
        return ""


def _module(module: nn.Module, seen: dict[int, int], depth: int, *, contents: bool) -> Hashable:
    """Return a module's key, including the values of its tensors if `contents` (constants of the graph)."""
    # Numbers in the order of the first visit make tied tensors, and shared modules with tensors, part of the key.
    number = seen.setdefault(id(module), len(seen))
    if number < len(seen) - 1:
        return ("seen", number)
    tensors = tuple(
        (name, _tensor(tensor, {}) if contents else _geometry(tensor), seen.setdefault(id(tensor), len(seen)))
        for registry in (module._parameters, module._buffers)  # noqa: SLF001 - tied names must show
        for name, tensor in registry.items()
        if tensor is not None
    )
    # Before the attributes, one of which may hold a method of a child, as PEFT's models do.
    children = tuple(
        (name, _module(child, seen, depth, contents=contents))
        for name, child in module._modules.items()  # noqa: SLF001
        if child is not None
    )
    # Sorted, because two builds of a model may set the same attributes in different orders.
    attributes = tuple(
        (name, _value(value, seen, depth + 1))
        for name, value in sorted(vars(module).items())
        if name not in _SKIPPED and not (isinstance(value, Mapping) and not value)
    )
    # The forward by identity, because a program may replace the forward of a library's class.
    code = (type(module).forward, _class_code(type(module), seen, depth + 1))
    return (_kind(module), code, tensors, attributes, _slots(module, seen, depth + 1), children)


def _kind(module: nn.Module) -> Hashable:
    """A module's class; for a module with parametrizations, torch's generated class is replaced by the original class."""
    kind: Any = type(module)
    if not is_parametrized(module):
        return (kind,)
    return ("parametrized", kind.__mro__[1], tuple(name for name in vars(kind) if not name.startswith("__")))


def _class(kind: type, seen: dict[int, int], depth: int) -> Hashable:
    """A class named by code: the class itself, and the constants and methods that code may read from the class."""
    if id(kind) in seen:
        return ("seen", seen[id(kind)])
    # Before the methods, which may name the class.
    seen[id(kind)] = len(seen)
    return (type(kind), kind, _class_code(kind, seen, depth + 1))


def _class_code(kind: type, seen: dict[int, int], depth: int) -> Hashable:
    """Methods and constants of a user's classes: the class's identity would miss an edited helper called by the methods."""
    # Special methods count, as code; special values such as `__doc__` and `__module__` do not.
    members = (
        (base, name, member)
        for base in kind.__mro__
        if not is_installed(base.__module__)
        for name, member in vars(base).items()
        if not (name.startswith("__") and not callable(member))
    )
    return tuple((base, name, _member(member, seen, depth)) for base, name, member in members)


def _member(member: Any, seen: dict[int, int], depth: int) -> Hashable:
    """Attribute of a class: code, or a constant that the code may read."""
    if isinstance(member, property):
        return tuple(_value(part, seen, depth) for part in (member.fget, member.fset))
    if isinstance(member, _FIELDS):
        return "slot"
    return _value(getattr(member, "__func__", member), seen, depth)


def _slots(value: Any, seen: dict[int, int], depth: int) -> tuple[Hashable, ...]:
    """Values of an object that classes made by Python code keep in slots; empty slots are left out."""
    return tuple(
        (base, name, _value(member.__get__(value), seen, depth))
        for base in type(value).__mro__
        if not base.__flags__ & IS_IMMUTABLE_TYPE
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType) and _is_set(member, value)
    )


def _is_set(slot: types.MemberDescriptorType, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def _geometry(tensor: Tensor) -> Hashable:
    return (type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)


def _value(value: Any, seen: dict[int, int], depth: int) -> Hashable:
    """Return a key for any value, by its type."""
    if depth > _MAX_DEPTH:
        raise UnkeyableError("nested too deeply")
    if value is None or isinstance(
        value, bool | int | float | complex | str | bytes | torch.dtype | torch.device | enum.Enum
    ):
        # With the class, because 1, 1.0 and True are equal; floats by their bits, because 0.0 and -0.0 are equal, and NaN
        # is not equal to itself.
        return (type(value), value.hex() if isinstance(value, float) else value)
    if isinstance(value, PurePath):
        return (type(value), str(value))
    for kinds, make in _BY_TYPE:
        if isinstance(value, kinds):
            return make(value, seen, depth + 1)
    return _object(value, seen, depth + 1)


def _tensor(value: Tensor, seen: dict[int, int], depth: int = 0) -> Hashable:
    """A tensor's geometry and contents."""
    del depth
    if id(value) in seen:  # for example, a parameter also kept in a plain list
        return ("seen", seen[id(value)])
    if value.numel() * value.element_size() > _MAX_TENSOR_BYTES:
        raise UnkeyableError("a large tensor outside the model's registers")
    # Hashed, because keys live as long as plans and must not hold the contents.
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return (_geometry(value), hashlib.sha256(raw).hexdigest())


def _sequence(value: Any, seen: dict[int, int], depth: int) -> Hashable:
    return (type(value), tuple(_value(item, seen, depth) for item in value))


def _set(value: Any, seen: dict[int, int], depth: int) -> Hashable:
    return (type(value), frozenset(_value(item, seen, depth) for item in value))


def _mapping(value: Any, seen: dict[int, int], depth: int) -> Hashable:
    # In the mapping's own order, because code may iterate over the mapping.
    return (type(value), tuple((_value(k, seen, depth), _value(v, seen, depth)) for k, v in value.items()))


def _partial(value: Any, seen: dict[int, int], depth: int) -> Hashable:
    return ("partial", *(_value(part, seen, depth) for part in (value.func, value.args, value.keywords)))


def _method(value: Any, seen: dict[int, int], depth: int) -> Hashable:
    return ("method", _value(value.__func__, seen, depth), _value(value.__self__, seen, depth))


def _signature(value: Any, seen: dict[int, int], depth: int) -> Hashable:
    """A signature kept by an object, as the metrics of torchmetrics keep that of their update."""
    parameters = value.parameters.values()
    return (type(value), tuple((str(each), each.kind, _value(each.default, seen, depth)) for each in parameters))


def _function(value: Any, seen: dict[int, int], depth: int) -> Hashable:
    """Code, defaults, attributes, closure, and the globals named by the code, nested functions included.

    Of an installed package's function, the globals and attributes do not count. If the function stands in its module, neither
    do its defaults and its closure, which are the same for all trials.
    """
    if depth > _MAX_DEPTH:
        raise UnkeyableError("nested too deeply")
    is_of_package = is_installed(value.__module__) and is_package_code(value)
    if is_of_package and stands_in_its_module(value):
        return ("function", value.__module__, value.__qualname__, value.__code__)
    if id(value) in seen:
        return ("seen", seen[id(value)])
    # Before the closure and the globals, which may lead back to the function.
    seen[id(value)] = len(seen)
    if is_of_package and (compiled := vars(value).get(_COMPILED)) is not None:
        # A compiler's wrapper closes over what has no key, and computes as the function does.
        return ("compiled", value.__code__, _value(compiled, seen, depth))
    cells = tuple(_value(cell.cell_contents, seen, depth) for cell in value.__closure__ or () if _filled(cell))
    defaults = _value((value.__defaults__ or (), value.__kwdefaults__ or {}), seen, depth)
    if is_of_package:
        return ("function", value.__module__, value.__qualname__, value.__code__, cells, defaults)
    named = ((name, value.__globals__[name]) for name in global_names(value.__code__) if name in value.__globals__)
    plain = tuple(
        (
            name,
            _python_module(referenced, value.__code__, seen, depth)
            if isinstance(referenced, types.ModuleType)
            else _value(referenced, seen, depth),
        )
        for name, referenced in named
    )
    attributes = tuple((name, _value(item, seen, depth)) for name, item in sorted(vars(value).items()))
    return ("function", value.__code__, value.__module__, cells, plain, defaults, attributes)


def _python_module(module: types.ModuleType, code: types.CodeType, seen: dict[int, int], depth: int) -> Hashable:
    """A module named by code: an installed module by its name, a user's own module with the values that the code names there.

    `os` counts with the environment where the code reads the environment.
    """
    names = mentioned_names(code)
    if module is os and not names.isdisjoint(OF_THE_ENVIRONMENT):
        return ("module", "os", frozenset(os.environ.items()))
    if is_installed(module.__name__):
        return ("module", module.__name__)
    content = vars(module)
    if makes_up_names(code):
        names |= {name for name, value in content.items() if isinstance(value, PLAIN) and name[:2] != "__"}
    named = tuple((name, _value(content[name], seen, depth)) for name in sorted(names) if name in content)
    return ("module", module.__name__, named)


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # raised for an empty cell: the variable has not been assigned yet
        return False
    return True


def _object(value: Any, seen: dict[int, int], depth: int) -> Hashable:
    """An object of a plain class: class, attributes and slots. Objects with state elsewhere have no key."""
    if id(value) in seen:
        return ("seen", seen[id(value)])
    if type(value).__module__ == "numpy" and getattr(value, "nbytes", _MAX_TENSOR_BYTES + 1) <= _MAX_TENSOR_BYTES:
        return _numpy(value)
    attributes = getattr(value, "__dict__", {} if hasattr(type(value), "__slots__") else None)
    if attributes is None or isinstance(value, types.ModuleType) or not _shows_its_value(value):
        raise UnkeyableError(f"no key for {type(value).__name__}")
    # Before the attributes, which may lead back to the object.
    seen[id(value)] = len(seen)
    return (
        type(value),
        _class_code(type(value), seen, depth + 1),
        tuple((name, _value(item, seen, depth)) for name, item in sorted(attributes.items())),
        _slots(value, seen, depth),
    )


def _shows_its_value(value: Any) -> bool:
    """Whether an object keeps all where a key or a guard sees it: in its `__dict__`, in slots or in a buffer.

    A base written in C may keep a part elsewhere, as `Decimal` does.
    """
    bases = type(value).__mro__
    is_plain = all(base in _WITHOUT_A_VALUE or not base.__flags__ & IS_IMMUTABLE_TYPE for base in bases)
    return is_plain or buffer_facts(value) is not None


def _numpy(value: Any) -> Hashable:
    """A number or an array of numpy."""
    if value.dtype.hasobject:
        raise UnkeyableError("an array of Python objects")
    return (type(value), value.shape, value.dtype.str, hashlib.sha256(value.tobytes()).hexdigest())


def _reference(value: Any, seen: dict[int, int], depth: int) -> Hashable:
    """A weak reference, as kept by recurrent layers to their weights."""
    return ("reference", _value(value(), seen, depth))


def _builtin(value: Any, seen: dict[int, int], depth: int) -> Hashable:
    """A function written in C, with the object whose method it is."""
    return ("builtin", getattr(value, "__module__", None), value.__qualname__, _value(_owner(value), seen, depth))


def _operator(value: Any, seen: dict[int, int], depth: int) -> Hashable:
    """An operator of torch; one defined anew under the same name is another operator."""
    del seen, depth
    return ("operator", type(value), str(value), definition_of(value))


def _owner(value: Any) -> Any:
    owner = getattr(value, "__self__", None)
    return None if isinstance(owner, types.ModuleType) else owner


def _constant_module(value: nn.Module, seen: dict[int, int], depth: int) -> Hashable:
    """A module outside the model, whose tensors would be constants of the graph."""
    return _module(value, seen, depth, contents=True)


def _logger(value: logging.Logger, seen: dict[int, int], depth: int) -> Hashable:
    """A logger, whose handlers and levels decide no number."""
    del seen, depth
    return (logging.Logger, value.name)


def _autocast(value: torch.autocast, seen: dict[int, int], depth: int) -> Hashable:
    """A region that decorates a function, without the modes that entering the region sets aside."""
    attributes = sorted((name, item) for name, item in vars(value).items() if not name.startswith("prev"))
    return (type(value), tuple((name, _value(item, seen, depth)) for name, item in attributes))


def _range(value: range, seen: dict[int, int], depth: int) -> Hashable:
    del seen, depth
    return (range, value.start, value.stop, value.step)


def _library(value: types.ModuleType, seen: dict[int, int], depth: int) -> Hashable:
    del seen, depth
    return ("module", value.__name__)


_BY_TYPE: tuple[tuple[Any, Callable[[Any, dict[int, int], int], Hashable]], ...] = (
    ((type,), _class),
    ((types.ModuleType,), _library),
    ((Tensor,), _tensor),
    ((nn.Module,), _constant_module),
    ((range,), _range),
    ((tuple, list, collections.deque), _sequence),
    ((set, frozenset), _set),
    ((weakref.ref,), _reference),
    ((Mapping,), _mapping),
    ((functools.partial,), _partial),
    ((types.MethodType,), _method),
    ((types.FunctionType,), _function),
    ((inspect.Signature,), _signature),
    ((types.BuiltinFunctionType, types.MethodDescriptorType), _builtin),
    (OPERATORS, _operator),
    ((logging.Logger,), _logger),
    ((torch.autocast,), _autocast),
)
