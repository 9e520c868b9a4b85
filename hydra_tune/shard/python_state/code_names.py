"""Names that a function's code can read or write, and whether code belongs to an installed package.

`shard/capture/fingerprint.py`, `code_walk.py` and `copied_functions.py` follow the user's code from function to function by
these names; `state_guard.py` and `train/state/model_state.py` ask for the names that a function mentions.
`reachable_values.py` asks for installed and for extension classes, and `shard/capture/step_capture.py` for installed modules.
Of the integrations, `integrations/hydra_tune_transformers/own_loss.py` asks for globals, and
`integrations/hydra_tune_lightning/validation_end.py` for installed modules. The answer of `is_extension` is kept as long as
the class. Most other answers are kept in caches of the process, by code object or by name of a package, so a kept answer must
not depend on anything that changes. The code of a user is only read, never run.
"""

import dis
import functools
import site
import sys
import sysconfig
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
OF_THE_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb"})
"""Names of `os` that read or set variables of the environment."""
_WHOLE_SPACES = frozenset({"globals", "eval", "exec"})
_VARIABLES_OF_FRAMES = frozenset({"f_globals", "f_locals", "__globals__"})
_WHOLE_NAMESPACES = frozenset({"vars", "__dict__", "attrgetter", "asdict", "astuple"})
# Also where a package lies in a working folder, as with PYTHONPATH.
_ALWAYS = frozenset(
    {"torch", "numpy", "transformers", "lightning", "torchmetrics"}
    | {"hydra_tune", "hydra_tune_lightning", "hydra_tune_optuna", "hydra_tune_ray", "hydra_tune_transformers"}
)
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_STANDARD = frozenset(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


def is_installed(module: str | None) -> bool:
    """Whether a module belongs to an installed package, whose code does not change during a study."""
    return module is not None and _is_top_installed(module.partition(".")[0])


def is_package_code(function: FunctionType) -> bool:
    """Whether an installed package has the code of a function.

    `functools.wraps` gives a function the module's name of another one, so the module of the code counts.
    """
    return is_installed(function.__globals__.get("__name__", function.__module__))


def stands_in_its_module(function: FunctionType) -> bool:
    """Whether a module has a function under the function's own name, so that all trials use this one function.

    A function that a factory or a decorator returns is not there, and may hold other values in each trial.
    """
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        content = getattr(found, "__dict__", {})
        found = content.get(name)
    return getattr(found, "__func__", found) is function


@functools.lru_cache(maxsize=4096)
def _is_top_installed(top: str) -> bool:
    if top in _ALWAYS:
        return True
    module = sys.modules.get(top)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    # A module of the user's may have the name of a module of the standard library, such as `profile`.
    if top in sys.stdlib_module_names and (file is None or not _STANDARD.isdisjoint(Path(file).parents)):
        return True
    # Also folders of another environment that a `.pth` file or PYTHONPATH adds, which Python does not list.
    return file is not None and (
        any(folder in Path(file).parents for folder in _folders()) or not _INSTALLED.isdisjoint(Path(file).parts)
    )


@functools.cache
def _folders() -> frozenset[Path]:
    """Folders of installed packages."""
    paths = sysconfig.get_paths()
    return frozenset(
        map(Path, (paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages()))
    )


IS_IMMUTABLE_TYPE = 1 << 8  # a flag of classes that no Python code has made
_WITHOUT_STATE = frozenset(
    {
        "builtins",
        "_thread",
        "torch",
        "numpy",
        "types",
        "functools",
        "collections",
        "operator",
        "weakref",
        "re",
        "datetime",
    }
    | {"decimal", "typing", "_abc", "abc", "enum", "pathlib", "itertools"}
)
"""Modules whose classes written in C keep nothing that a step reads as a number, or are followed by their kind."""


# Weak: a class made inside a function of a trial's keeps all that its methods close over, such as the trial's data.
_ARE_EXTENSIONS: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def is_extension(kind: type) -> bool:
    """Whether objects of a class may keep state where Python code cannot look: in an extension module.

    Locks, and objects of torch and numpy, keep nothing that a step reads as a number.
    """
    known = _ARE_EXTENSIONS.get(kind)
    if known is None:
        known = _ARE_EXTENSIONS[kind] = _is_extension(kind)
    return known


def _is_extension(kind: type) -> bool:
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in _WITHOUT_STATE]
    return issubclass(kind, bytearray | memoryview) or any(
        base.__flags__ & IS_IMMUTABLE_TYPE or _is_extension_module(base.__module__) for base in bases
    )


def _is_extension_module(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return name in sys.builtin_module_names or (file is not None and file.endswith(tuple(EXTENSION_SUFFIXES)))


@functools.lru_cache(maxsize=4096)
def global_names(code: CodeType) -> tuple[str, ...]:
    """Globals read, set or deleted by code; `co_names` would mix globals with attributes."""
    direct = (i.argval for i in dis.get_instructions(code) if i.opname in _GLOBALS)
    return tuple(sorted(set(direct).union(*map(global_names, _nested(code)))))


@functools.lru_cache(maxsize=4096)
def mentioned_names(code: CodeType) -> frozenset[str]:
    """Globals, attributes and modules named in code, and its strings that may be names, as `getattr` takes them."""
    return frozenset(code.co_names).union(_words(code), *map(mentioned_names, _nested(code)))


@functools.lru_cache(maxsize=4096)
def stored_names(code: CodeType) -> frozenset[str]:
    """Attributes that code sets or deletes, and attributes that code may ask for although they need not exist."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_ATTR", "DELETE_ATTR")}
    if not {"getattr", "hasattr", "setattr"}.isdisjoint(code.co_names):
        names |= _words(code)
    return frozenset(names).union(*map(stored_names, _nested(code)))


@functools.lru_cache(maxsize=4096)
def loaded_names(code: CodeType) -> frozenset[str]:
    """Attributes that code reads, also by `getattr`."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    if "getattr" in code.co_names:
        names |= _words(code)
    return frozenset(names).union(*map(loaded_names, _nested(code)))


def reads_value(code: CodeType, name: str, variables: Mapping[str, object]) -> bool:
    """Whether code reads an attribute that it does not call: `p.grad`, and not `torch.autograd.grad(...)`.

    `variables` are the function's global variables, by which an attribute of a module is known.
    """
    steps = list(dis.get_instructions(code))
    imported = {
        after.argval
        for step, after in pairwise(steps)
        if step.opname in ("IMPORT_NAME", "IMPORT_FROM") and after.argval
    }
    # From Python 3.12 on, the instruction that loads a method has the same name, and pushes a NULL as well.
    is_read = any(
        step.opname == "LOAD_ATTR"
        and step.argval == name
        and "NULL" not in step.argrepr
        and not _is_of_module(steps[:place], imported, variables)
        for place, step in enumerate(steps)
    )
    is_read = is_read or ("getattr" in code.co_names and name in _words(code))
    return is_read or any(reads_value(nested, name, variables) for nested in _nested(code))


def _is_of_module(before: list[dis.Instruction], imported: set[object], variables: Mapping[str, object]) -> bool:
    """Whether the last instructions load a module, such as `torch.autograd`."""
    path: list[str] = []
    while before and before[-1].opname == "LOAD_ATTR":
        path.insert(0, before.pop().argval)
    if not before or not before[-1].opname.startswith("LOAD_"):
        return False
    first = before[-1].argval
    if before[-1].opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
        return first in imported
    value = variables.get(first)
    for name in path:
        value = vars(value).get(name) if isinstance(value, ModuleType) else None
    return isinstance(value, ModuleType)


@functools.lru_cache(maxsize=4096)
def imported_names(code: CodeType) -> frozenset[str]:
    """Modules that code imports as it runs."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"}
    return frozenset(names).union(*map(imported_names, _nested(code)))


@functools.lru_cache(maxsize=4096)
def looks_up_modules(code: CodeType) -> bool:
    """Whether code finds modules by names: `sys.modules[...]`, `import_module(...)`, `__import__(...)`."""
    if not {"import_module", "__import__"}.isdisjoint(code.co_names):
        return True
    steps = dis.get_instructions(code)
    is_direct = any(step.argval == "sys" and after.argval == "modules" for step, after in pairwise(steps))
    return is_direct or any(map(looks_up_modules, _nested(code)))


@functools.lru_cache(maxsize=4096)
def whole_spaces(code: CodeType) -> frozenset[str]:
    """Names by which code may read any variable: `globals()`, `eval(...)`, `frame.f_globals`."""
    names = _WHOLE_SPACES.intersection(global_names(code))
    return names.union(_VARIABLES_OF_FRAMES.intersection(loaded_names(code)))


@functools.lru_cache(maxsize=4096)
def texts(code: CodeType) -> frozenset[str]:
    """All strings in code, also in its tuples and sets."""
    parts = (part for constant in code.co_consts for part in _flat(constant) if isinstance(part, str))
    return frozenset(parts).union(*map(texts, _nested(code)))


@functools.lru_cache(maxsize=4096)
def makes_up_names(code: CodeType) -> bool:
    """Whether code may read attributes whose names do not stand in the code: `vars(it)`, `getattr(it, name)`."""
    if not _WHOLE_NAMESPACES.isdisjoint(code.co_names):
        return True
    instructions = list(dis.get_instructions(code))
    loads = [
        number for number, one in enumerate(instructions) if one.opname.startswith("LOAD") and one.argval == "getattr"
    ]
    if any(not _has_written_name(instructions[number + 1 :]) for number in loads):
        return True
    return any(map(makes_up_names, _nested(code)))


def _has_written_name(instructions: list[dis.Instruction]) -> bool:
    """Whether `getattr` is called next, with a text that stands in the code as its second argument.

    Where the instructions branch, the answer is no.
    """
    depth, second = 0, None  # values on the stack above `getattr`, and the instruction that has left the second
    for instruction in instructions:
        if instruction.opname in ("PRECALL", "CALL") and instruction.arg == depth:
            return depth > 1 and second is not None and second.opname == "LOAD_CONST" and isinstance(second.argval, str)
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            return False
        depth += dis.stack_effect(instruction.opcode, instruction.arg)
        if depth < 0:
            return False
        if depth == 2:  # noqa: PLR2004
            second = instruction
    return False


def _nested(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _words(code: CodeType) -> set[str]:
    """Strings in code that may be names, also in its tuples and sets."""
    parts = (part for constant in code.co_consts for part in _flat(constant))
    return {part for part in parts if isinstance(part, str) and part.isidentifier()}


def _flat(constant: object) -> tuple[object, ...]:
    return tuple(constant) if isinstance(constant, tuple | frozenset) else (constant,)
