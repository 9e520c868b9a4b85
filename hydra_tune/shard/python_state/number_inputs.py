"""Makes numbers that a step reads from its Python state inputs of the captured graph.

A graph bakes numbers in: an annealed weight that changes at each step would need a capture at each step. Once such a
number has changed, `TrialPlanCache` (`train/loop/plan_cache.py`), or for a group `GroupTrial`
(`fusion/group/group_trial.py`), names its place, and the next capture (`shard/capture/step_capture.py`) puts a
`TracedNumber` there. The step's Python computes with the traced number as with the number itself. Where the result
meets a tensor, the result becomes an input of the graph; each later step computes the inputs anew, in Python, from the
numbers of that moment (`NumberInputs`). `PlanLibrary` (`shard/partition/plan_cache.py`), `TrialPlanCache` and
`GroupPlanCache` (`fusion/compile/group_plan_cache.py`) ask `NumberInputs` whether a known plan serves the present numbers.

Example: for `kl * min(1.0, state["step"] / 100)` the place is `state["step"]`, the graph's input is the quotient, and
the plan serves as long as the quotient stays below 1.

Note: what Python learns about a number. A comparison, an index, a text or a function of an extension module takes the number
itself. Its answer is noted, or that it is an error, and the plan serves only numbers that give the same answer. Only sums,
differences, products and quotients of a number and a tensor in float32 or float64 become operators, because only there the bits
cannot depend on whether a number or a tensor of one element is given. Quotients by a number do so only where
`NumberInputTracer.divides`.

Note: threads. The capture runs inside `GATE.exclusive`, because `traced_numbers` replaces functions of `math` for the process.
"""

import functools
import math
import operator
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hydra_tune.errors import CaptureError

Number = int | float
Numbers = Sequence[Number]

_NUM_SPARE = 6  # inputs of a graph beyond one for each place: a step may use several results of a number
_MOST_EXACT = 2**53  # larger whole numbers have no exact float64
_ARITHMETIC = {
    f"__{name}__": getattr(operator, f"__{name}__")
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
}
_ONE_SIDED = {f"__{name}__": getattr(operator, f"__{name}__") for name in ("neg", "pos", "abs")}
_ASKING = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
_TAKING = [
    f"__{name}__"
    for name in (
        *("bool", "int", "float", "complex", "index", "hash", "str", "repr", "format"),
        *("round", "trunc", "floor", "ceil", "divmod", "rdivmod"),
    )
]
_WITH_TENSOR = {
    name
    for operation in ("add", "sub", "mul", "div", "truediv", "rsub", "radd", "rmul", "rdiv", "rtruediv")
    for name in (operation, f"{operation}_", f"__{operation}__", f"__i{operation}__")
} | {"subtract", "multiply", "divide", "true_divide", "subtract_", "multiply_", "divide_", "true_divide_"}
_DIVIDING = {"div", "div_", "__div__", "__idiv__", "__truediv__", "__itruediv__", "divide", "divide_"} | {
    "true_divide",
    "true_divide_",
    "truediv",
}
_DTYPES = (torch.float32, torch.float64)  # of others, operators round a number otherwise than a tensor


class NumberInputError(CaptureError):
    """Some numbers cannot be inputs of a step's graph: each value needs a capture.

    Attributes:
        mode: "train" or "evaluate", of the step.
        places: the numbers' places, in words.
    """

    def __init__(self, mode: str, places: Iterable[str], reason: object) -> None:
        self.mode, self.places = mode, frozenset(places)
        super().__init__(f"{', '.join(sorted(self.places))} cannot be an input of the graph: {reason}")


@dataclass(slots=True)
class NumberInputs:
    """The inputs of a graph that Python computes from numbers, and the numbers for which the graph is right.

    Attributes:
        places: the numbers' places, in words.
        numbers: the numbers of the capture.
        inputs: compute the inputs, in the order of the graph's.
        forms: the computations and the inputs, in order; equal for equal computations.
        answers: what Python has asked about the numbers, and the answers.
        is_confirmed: whether the plan was compared with the eager step for other numbers than those of the capture.
        is_refused: whether that comparison has failed.
    """

    places: tuple[str, ...]
    numbers: Numbers
    inputs: list[Callable[[Numbers], Number]] = field(default_factory=list)
    forms: list[object] = field(default_factory=list)
    answers: list[tuple[Callable[[Numbers], object], str]] = field(default_factory=list)
    is_confirmed: bool = False
    is_refused: bool = False

    def hold(self, numbers: Numbers) -> bool:
        """Whether the graph is right for these numbers."""
        return all(_answer(ask, numbers) == answer for ask, answer in self.answers)

    def serve(self, numbers: Numbers) -> bool:
        """Whether `hold` is true of the numbers, and the numbers are the capture's or the graph is confirmed."""
        return self.hold(numbers) and (self.is_confirmed or tuple(numbers) == tuple(self.numbers))

    def computed(self, numbers: Numbers) -> list[float]:
        """Return the inputs for these numbers, as many as the graph has room for."""
        values = [float(compute(numbers)) for compute in self.inputs]
        return values + [0.0] * (num_inputs(self.places) - len(values))

    def fill(self, tensors: Sequence[Tensor], numbers: Numbers) -> None:
        """Write the inputs for these numbers into tensors of one element."""
        for tensor, value in zip(tensors, self.computed(numbers), strict=True):
            tensor.fill_(value)


def _answer(ask: Callable[[Numbers], object], numbers: Numbers) -> str:
    """Return an answer about numbers, in words; also of a question that is an error, which the user's code may catch."""
    try:
        return repr(ask(numbers))
    except Exception as error:  # noqa: BLE001 - as the user's code pleases
        return f"raises {type(error).__name__}"


def num_inputs(places: Sequence[str]) -> int:
    """Return the number of inputs that a graph gets for the numbers of some places."""
    return len(places) + _NUM_SPARE


class _Computed:
    """A place of a number, or the result of an operation on others."""

    __slots__ = ("operands", "operation")

    def __init__(self, operation: Callable[..., Any] | int, operands: Sequence[Any] = ()) -> None:
        self.operation, self.operands = operation, operands

    def __call__(self, numbers: Numbers) -> Any:
        """Compute the result from the numbers of all places."""
        return self.value(numbers, {})

    def value(self, numbers: Numbers, known: dict[int, Any]) -> Any:
        """Compute the result; `known` holds results of other operations on the same numbers."""
        if isinstance(self.operation, int):
            return numbers[self.operation]
        if id(self) not in known:  # a result that is used several times is computed once
            parts = [each.value(numbers, known) if type(each) is _Computed else each for each in self.operands]
            known[id(self)] = self.operation(*parts)
        return known[id(self)]


class NumberInputTracer:
    """Notes what a step's Python does with its numbers while the step is captured.

    Args:
        inputs: receives what is found.
        tensors: the graph's inputs, of one element each.

    Attributes:
        divides: whether a quotient of a tensor and a number has the bits of a quotient of two tensors.
        is_open: whether the capture is under way.
    """

    def __init__(self, inputs: NumberInputs, tensors: Sequence[Tensor], *, divides: bool) -> None:
        self._inputs, self._tensors = inputs, tensors
        self._by_form: dict[int, Tensor] = {}
        self._forms: dict[object, int] = {}
        self.divides = divides
        self.is_open = True

    def traced(self, index: int) -> "TracedNumber":
        """Return the traced number of a place."""
        form = self.form_of(self._inputs.places[index])
        return TracedNumber(self, self._inputs.numbers[index], _Computed(index), form)

    def form_of(self, computation: Hashable) -> int:
        """Return the number of a computation; equal for equal computations."""
        if computation not in self._forms:
            self._inputs.forms.append(computation)
        return self._forms.setdefault(computation, len(self._forms))

    def ask(self, ask: Callable[[Numbers], object]) -> Any:
        """Return an answer about the numbers, for which alone the graph will be right.

        Raises:
            CaptureError: the capture is over, and code has kept a number of the capture.
        """
        self._check_open()
        self._inputs.answers.append((ask, _answer(ask, self._inputs.numbers)))
        return ask(self._inputs.numbers)

    def take(self, number: "TracedNumber") -> Number:
        """Return a number itself, for which alone the graph will be right."""
        value: Number = self.ask(number.compute)
        return value

    def input_of(self, number: "TracedNumber", dtype: torch.dtype) -> Tensor | Number:
        """Return a number as an input of the graph; the number itself if there is no room for another input.

        Raises:
            CaptureError: as of `ask`.
        """
        self._check_open()
        tensor = self._by_form.get(number.form)
        if tensor is None:
            if len(self._by_form) == len(self._tensors) or not self.ask(
                lambda numbers: _is_exact(number.compute(numbers))
            ):
                return self.take(number)
            tensor = self._by_form[number.form] = self._tensors[len(self._by_form)]
            self._inputs.inputs.append(number.compute)
            self._inputs.forms.append(number.form)
        return tensor.to(dtype)

    def _check_open(self) -> None:
        if not self.is_open:
            raise CaptureError("code uses a number that it has kept from the capture of a step")


class TracedNumber:
    """A number of a step's Python state while the step is captured.

    Attributes:
        compute: computes the number from the numbers of all places.
        form: the number of the computation; equal for equal computations.
    """

    __slots__ = ("_tracer", "compute", "form", "value")

    def __init__(self, tracer: NumberInputTracer, value: Number, compute: Callable[[Numbers], Any], form: int) -> None:
        self._tracer, self.value, self.compute, self.form = tracer, value, compute, form

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # code that asks for a float or an int shall find such a number
        return type(self.value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols of libraries, which a number does not have
            raise AttributeError(name)
        return getattr(self._tracer.take(self), name)

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        return sys.modules["numpy"].array(self._tracer.take(self), *arguments, **options)

    def __copy__(self) -> "TracedNumber":
        return self

    def __deepcopy__(self, memo: object) -> "TracedNumber":
        return self

    def derived(self, operation: Callable[..., Any], *operands: Any) -> Any:
        """Return the result of an operation on numbers."""
        tracer = self._tracer
        values = [each.value if _is_traced(each) else each for each in operands]
        compute = _Computed(operation, [each.compute if _is_traced(each) else each for each in operands])
        try:
            value = operation(*values)
        except Exception:
            tracer.ask(compute)  # noted, and raised again: the user's code may catch the error
            raise
        if type(value) not in (int, float):
            return tracer.ask(compute)
        if operation is operator.pow:  # a power of whole numbers may be a float, and one of floats may be complex
            tracer.ask(lambda numbers: type(compute(numbers)))
        form = (operation, *(each.form if _is_traced(each) else (type(each), repr(each)) for each in operands))
        return TracedNumber(tracer, value, compute, tracer.form_of(form))

    def as_tensor(self, dtype: torch.dtype | None = None, device: Any = None, *, requires_grad: bool = False) -> Tensor:
        """Return the number as `torch.tensor` does."""
        if type(self.value) is int or requires_grad or torch.device(device or "cpu").type != "cpu":
            return torch.tensor(self._tracer.take(self), dtype=dtype, device=device, requires_grad=requires_grad)
        dtype = dtype or torch.get_default_dtype()
        given = self._tracer.input_of(self, dtype) if dtype in _DTYPES else self._tracer.take(self)
        return given.clone() if isinstance(given, Tensor) else torch.tensor(given, dtype=dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on tensors and traced numbers; called by torch."""
        other = next((each for each in args if isinstance(each, Tensor)), None)
        name = getattr(func, "__name__", "")
        if (
            name in _WITH_TENSOR
            and len(args) == 2  # noqa: PLR2004 - two operands
            and not kwargs
            and other is not None
            and other.dtype in _DTYPES
        ):
            number = args[1] if args[0] is other else args[0]
            if name not in _DIVIDING or number._tracer.divides:  # noqa: SLF001 - of this class
                tensor = number._tracer.input_of(number, other.dtype)  # noqa: SLF001
                return func(*(tensor if each is number else each for each in args))
        return func(*map(_number_itself, args), **{key: _number_itself(each) for key, each in (kwargs or {}).items()})


def _is_traced(value: object) -> bool:
    return type(value) is TracedNumber


def _is_exact(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= _MOST_EXACT)


def _number_itself(value: Any) -> Any:
    """Return a value with the numbers themselves in place of traced numbers."""
    if _is_traced(value):
        return value._tracer.take(value)  # noqa: SLF001 - of this module
    if type(value) in (list, tuple):
        return type(value)(map(_number_itself, value))
    return value


def _operates(operation: Callable[..., Any], *, is_reflected: bool) -> Callable[..., Any]:
    def operate(self: TracedNumber, other: Any) -> Any:
        if not (_is_traced(other) or type(other) in (int, float, bool)):
            return NotImplemented
        return self.derived(operation, *((other, self) if is_reflected else (self, other)))

    return operate


def _asks(name: str) -> Callable[..., Any]:
    operation = getattr(operator, name)

    def ask(self: TracedNumber, other: Any) -> Any:
        return self.derived(operation, self, other) if isinstance(other, int | float) else NotImplemented

    return ask


def _takes(name: str) -> Callable[..., Any]:
    def take(self: TracedNumber, *others: Any) -> Any:
        value = self._tracer.take(self)
        return getattr(value, name)(*map(_number_itself, others))

    return take


for _name, _operation in _ARITHMETIC.items():
    setattr(TracedNumber, _name, _operates(_operation, is_reflected=False))
    setattr(TracedNumber, f"__r{_name[2:]}", _operates(_operation, is_reflected=True))
for _name, _operation in _ONE_SIDED.items():
    setattr(TracedNumber, _name, lambda self, _operation=_operation: self.derived(_operation, self))
for _name in _ASKING:
    setattr(TracedNumber, _name, _asks(_name))
for _name in _TAKING:
    setattr(TracedNumber, _name, _takes(_name))


class _WithoutTracedNumbers(TorchFunctionMode):
    """Hands numbers themselves to torch's functions, some of which want a number (`F.dropout(x, p)`).

    Functions of `_WITH_TENSOR` get the traced numbers, and `torch.tensor` and `torch.as_tensor` go to `as_tensor`.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.tensor, torch.as_tensor) and args and _is_traced(args[0]):
            return args[0].as_tensor(**(kwargs or {}))
        if getattr(func, "__name__", "") not in _WITH_TENSOR:
            args, kwargs = tuple(map(_number_itself, args)), {k: _number_itself(v) for k, v in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


@contextmanager
def traced_numbers() -> Iterator[None]:
    """Context in which the functions of `math` and of torch take traced numbers; inside `GATE.exclusive`.

    Other threads may call the functions meanwhile, and get what they would get otherwise.
    """
    functions = {name: each for name, each in vars(math).items() if isinstance(each, BuiltinFunctionType)}
    for name, function in functions.items():
        setattr(math, name, _traced(function))
    try:
        with _WithoutTracedNumbers():
            yield
    finally:
        for name, function in functions.items():
            setattr(math, name, function)


def _traced(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        number = next(filter(_is_traced, arguments), None)
        return function(*arguments, **options) if number is None or options else number.derived(function, *arguments)

    return run
