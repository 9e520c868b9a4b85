"""`GatheredMetric`: a value that an overridden `compute_loss` collects as a metric.

A captured step has no values, so `item()` of a metric cannot hand a number to Python. `accelerator.gather_for_metrics` of
the stand-in in `own_loss.py` therefore returns a `GatheredMetric`, whose `item()` returns the metric itself, and arithmetic
on metrics makes metrics. `own_loss.py` reads the tensors of the collected metrics at the end of the call. A comparison that
Python asks for (`if count > 0`) asks the tensor, as any step may ask about its batch.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hydra_tune.errors import TaskError


class GatheredMetric:
    """A value from `accelerator.gather_for_metrics`, or made of such a value.

    Args:
        value: the value; None: unknown, and so is each value made of the value.
    """

    def __init__(self, value: Tensor | None) -> None:
        self.value = value

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        return cls._computed(function, *args, **(kwargs or {}))

    @classmethod
    def _computed(cls, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the metric that a function makes of metrics and other values."""
        # Also within lists, as of `torch.stack`.
        if any(isinstance(each, cls) and each.value is None for each in tree_leaves((args, kwargs))):
            return cls(None)
        values, named = tree_map(lambda each: each.value if isinstance(each, cls) else each, (args, kwargs))
        result = function(*values, **named)
        return cls(result) if isinstance(result, Tensor) else result

    def item(self) -> "GatheredMetric":
        """Return the metric itself in place of a number, which a captured step lacks."""
        return self

    tolist = item

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.value is None:
            return lambda *_, **__: self
        attribute = getattr(self.value, name)
        return functools.partial(self._computed, attribute) if callable(attribute) else attribute

    def __bool__(self) -> bool:
        if self.value is None:
            raise TaskError(
                "compute_loss asks for a count over the training, which a trial in the pool lacks: compute the loss from the "
                "batch, the model and settings"
            )
        return bool(self.value)


def _refuse_number(self: GatheredMetric, *_: object) -> NoReturn:
    del self
    raise TaskError(
        "compute_loss makes a Python number of a metric, by float(), int(), round() or a function of math, and a captured step "
        "has no numbers: collect the metric itself, metric.item(), or compute with functions of torch"
    )


def _operated(function: Callable[..., Any], *, is_reflected: bool = False) -> Callable[..., Any]:
    def method(self: GatheredMetric, *others: Any) -> Any:
        values = (*others, self) if is_reflected else (self, *others)
        return GatheredMetric._computed(function, *values)  # noqa: SLF001 - a method of the class

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(GatheredMetric, f"__{_name}__", _operated(getattr(operator, _name)))
    setattr(GatheredMetric, f"__r{_name}__", _operated(getattr(operator, _name), is_reflected=True))
for _name in ("neg", "abs", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(GatheredMetric, f"__{_name}__", _operated(getattr(operator, _name)))
for _name in ("float", "int", "index", "round", "trunc", "floor", "ceil", "complex"):
    setattr(GatheredMetric, f"__{_name}__", _refuse_number)
GatheredMetric.__hash__ = None  # type: ignore[assignment]  # as of a class with `__eq__`
