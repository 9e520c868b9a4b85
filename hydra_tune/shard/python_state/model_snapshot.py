"""`ModelSnapshot`: tells quickly that no module of a model has changed.

`PythonStateGuard` (`state_guard.py`) looks at a model before each step, and its holders compare the values of each module one
by one. Almost always nothing has changed, and all modules hold the same objects as before. A snapshot finds that out in a few
passes over all modules, without a line of Python for each. A snapshot that no longer holds decides nothing, because an equal
number may stand in another object: the holders look then.
"""

import itertools
import operator
from collections.abc import Iterator

from torch import nn

from hydra_tune.shard.python_state.code_walk import INTERNALS

_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_REGISTRIES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
"""Attributes of a module with its parameters, buffers, submodules and hooks."""
_INTERNALS = INTERNALS - {"training", "_is_full_backward_hook"}


class ModelSnapshot:
    """The objects in all modules, the modules' classes and `forward`, and whether each parameter is trained."""

    __slots__ = (
        "_empty",
        "_getters",
        "_kinds",
        "_modules",
        "_objects",
        "_parameters",
        "_registries",
        "_sizes",
        "_spaces",
    )

    def __init__(self, model: nn.Module) -> None:
        self._modules = tuple(model.modules())
        self._kinds = tuple(set(map(type, self._modules)))
        self._parameters = tuple(model.parameters())
        self._spaces = tuple(map(vars, self._modules))
        self._getters = tuple(map(_getter, self._spaces))
        # A module made by `torch.jit` keeps no dicts.
        registries = [
            space[name] for space in self._spaces for name in _REGISTRIES if isinstance(space.get(name), dict)
        ]
        self._registries = tuple(filter(None, registries))
        self._empty = tuple(registry for registry in registries if not registry)
        self._sizes = self._measure()
        self._objects = list(self._read())

    def _measure(self) -> list[int]:
        return [*map(len, self._spaces), *map(len, self._registries)]

    def _read(self) -> Iterator[object]:
        return itertools.chain(
            itertools.chain.from_iterable(map(operator.call, self._getters, self._spaces)),
            itertools.chain.from_iterable(map(dict.values, self._registries)),
            map(type, self._modules),
            map(getattr, self._kinds, itertools.repeat("forward"), itertools.repeat(None)),
            map(_REQUIRES_GRAD, self._parameters),
        )

    def holds(self) -> bool:
        """Whether all modules hold the same objects as when the snapshot was taken."""
        if any(self._empty) or self._measure() != self._sizes:
            return False
        try:
            return all(map(operator.is_, self._read(), self._objects))
        except (KeyError, RuntimeError):  # an attribute has another name now, or another thread adds an attribute
            return False


def _getter(space: dict[str, object]) -> "operator.itemgetter[str]":
    names = [name for name in space if name not in _INTERNALS]
    return operator.itemgetter(*names, *names[:1])  # of one name alone, it would give no tuple
