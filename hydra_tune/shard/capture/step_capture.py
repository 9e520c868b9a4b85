"""Captures model and step as a flat graph of aten operators, by `torch.export(strict=False)`.

The graph takes state, constants and batch tensors as inputs and holds no tensor of any trial, so a capture serves every
trial of the same architecture. `captured_graph` (`shard/partition/trial_step.py`) calls `capture`; the analysis
(`shard/analysis/graph_analysis.py`), the pilot (`shard/cost/pilot.py`), the splitter (`shard/partition/subgraph.py`) and the
makers of plans (`shard/partition/`) then read the `CapturedStepGraph`. The modules of `train/` and `fusion/` list a model's
tensors by `named_state`, in the same order and under the same names. The names must not change, because saved checkpoints have
the tensors under these names. Modules that copy a model, such as `shard/partition/trial_step.py` and `train/own_copy.py`,
call `copied_model`. Modules that refuse a step word the reason by `describe`, and `train/explain.py` finds the
user's line by `user_line`.

Note: `capture` changes flags of torch, `Function.apply`, filters of warnings and `sys.stderr` for the whole process, so the
caller holds the gate (`capture_lock.py`) alone.
"""

import copy
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import wraps
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from hydra_tune.errors import CaptureError, HydraTuneError
from hydra_tune.older_torch import mend_lstm_shapes
from hydra_tune.shard.capture import batch as batches
from hydra_tune.shard.capture.export_output import quiet_export
from hydra_tune.shard.capture.own_functions import OwnFunctions, own_functions, put_calls
from hydra_tune.shard.capture.step_module import MODEL_PREFIX, step_module
from hydra_tune.shard.python_state.code_names import is_installed
from hydra_tune.shard.python_state.copied_functions import functions_copied
from hydra_tune.shard.python_state.number_inputs import NumberInputs, NumberInputTracer, traced_numbers
from hydra_tune.shard.python_state.opened_files import FileHolder, noting_files
from hydra_tune.shard.python_state.state_guard import PythonStateGuard
from hydra_tune.task import Precision, TrainTask

_Module = TypeVar("_Module", bound=nn.Module)
_STDLIB = sysconfig.get_paths()["stdlib"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """A parameter or buffer of a model, without its values."""

    name: str
    is_parameter: bool
    requires_grad: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStepGraph:
    """A captured step.

    Attributes:
        module: the graph; placeholders are state, constants and batch leaves, the output is a tuple of scalars, or with
            `finish=` of tensors.
        mode: "train" or "evaluate".
        state: placeholder name -> canonical name of the parameter or buffer (tied names share a canonical name).
        constants: placeholder name -> tensor created or closed over by the code.
        inputs: placeholder name -> index among the batch's tensors.
        outputs: names of the output nodes, in the order of `names`.
        names: names of the outputs: `("loss",)` or the metrics.
        precision: precision of the run; of the casts, only those of `share_casts` are part of the graph.
        numbers: inputs that Python computes from numbers; None if there are none.
        files: files that the step has read.
    """

    module: fx.GraphModule
    mode: str
    state: dict[str, str]
    constants: dict[str, Tensor]
    inputs: dict[str, int]
    outputs: tuple[str, ...]
    names: tuple[str, ...]
    precision: Precision = "float32"
    numbers: NumberInputs | None = None
    files: tuple[FileHolder, ...] = ()

    @property
    def nodes(self) -> list[fx.Node]:
        """The graph's computing nodes in order: everything but placeholders, attributes and the output."""
        return [node for node in self.module.graph.nodes if node.op in ("call_function", "call_module")]


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter and buffer object of a model once, under its first name; lazy tensors only with a shape."""
    yield from (named for named in model.named_parameters() if not is_lazy(named[1]))
    yield from (named for named in model.named_buffers() if not is_lazy(named[1]))


def copied_model(model: _Module, known: dict[int, Any] | None = None) -> _Module:
    """Copy a model with the Python attributes of its parameters, which `copy.deepcopy` leaves out.

    An attribute that cannot be copied stays away, and code that reads the attribute fails by its name. `known` has
    copies made before, by the id of the original.
    """
    with functions_copied(model, known or {}) as memo:
        twin = copy.deepcopy(model, memo)
        for _, tensor in named_state(model):
            copied = memo.get(id(tensor))
            # A fake tensor without a fake copy has attributes of torch's that a real tensor must not have.
            if (
                copied is None
                or copied is tensor
                or (isinstance(tensor, FakeTensor) and not isinstance(copied, FakeTensor))
            ):
                continue
            for name, value in vars(tensor).items():
                if name not in vars(copied):
                    with suppress(Exception):
                        vars(copied)[name] = copy.deepcopy(value, memo)
    return twin


def state_specs(model: nn.Module) -> dict[str, StateSpec]:
    """Specs of the model's state, by canonical name."""
    return {
        name: StateSpec(
            name=name,
            is_parameter=isinstance(tensor, nn.Parameter),
            requires_grad=tensor.requires_grad,
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=tensor.dtype,
        )
        for name, tensor in named_state(model)
    }


def capture(
    task: TrainTask,
    twin: nn.Module,
    batch: Any,
    mode: str,
    answering: AbstractContextManager[object] | None = None,
    *,
    divides: bool = True,
) -> CapturedStepGraph:
    """Capture a step of a model; for a precision other than float32, call inside `precision.autocast`.

    `twin` is a copy of the trial's model, which the capture may disturb; the inputs of a `NumberedBatch` are filled.
    `answering` is a context around the step's code. `divides`: whether the quotient of a tensor and a number has the
    bits of a quotient of two tensors.

    Raises:
        CaptureError: `torch.export` could not capture the step; the message gives the reason and the user's line.
        TaskError, MetricError: the step itself is wrong (not a scalar, ...).
    """
    mend_lstm_shapes()
    wrapper = step_module(task, twin, mode)
    found: list[NumberInputs] = []
    files: dict[str, FileHolder] = {}
    numbered = lambda batch: _number_inputs(task, twin, mode, batch, found, divides=divides)  # noqa: E731
    with torch.set_grad_enabled(mode == "train"):
        try:
            with quiet_export(), own_functions() as functions:
                with _as_eager(wrapper, answering or nullcontext(), numbered, functions, files):
                    program = torch.export.export(wrapper, (batches.plain_mappings(batch),), strict=False)
                put_calls(program.graph_module)
        except HydraTuneError:  # raised by the step's wrapper, with a message for the user
            raise
        except Exception as error:
            raise CaptureError(f"torch.export cannot capture this model: {describe(error)}") from error
    captured = replace(_read(program, twin, mode, task.precision), files=tuple(files.values()))
    if found:
        if any(inputs.forms != found[-1].forms for inputs in found):  # export may run the step several times
            raise CaptureError("the step computes with other numbers when it runs again")
        found[-1].fill(batch.inputs, found[-1].numbers)
        captured = replace(captured, numbers=found[-1])
    return captured


def describe(error: BaseException) -> str:
    """Return the first line of an error, with the innermost line of the user's code (`is_user_file`)."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    line = user_line(error)
    return f"{type(error).__name__}: {text}" + (f" (at {line})" if line else "")


def user_line(error: BaseException) -> str | None:
    """Return `file:line: code` of the innermost frame of the user's code (`is_user_file`), or None."""
    foreign = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    if not foreign:
        return None
    last = foreign[-1]
    return f"{last.filename}:{last.lineno}: {last.line}" if last.line else f"{last.filename}:{last.lineno}"


def is_user_file(path: str) -> bool:
    """Whether a frame of this file is neither of torch, nor of hydra_tune, nor of the standard library."""
    if "/torch/" in path or "/hydra_tune/" in path or path.startswith("<frozen"):
        return False
    # Installed packages may lie below the folder of the standard library, and count as the user's code.
    return not path.startswith(_STDLIB) or "site-packages" in path


@contextmanager
def _as_eager(
    wrapper: nn.Module,
    answering: AbstractContextManager[object],
    numbered: Callable[[Any], AbstractContextManager[object]],
    functions: OwnFunctions,
    files: dict[str, FileHolder],
) -> Iterator[None]:
    """Make the model's code believe in an eager run.

    Code that asks `torch.compiler.is_exporting()` wants a graph for other inputs too, and takes other operators. The
    captured graph serves only a single kind of batch, and must do the same as the eager step.
    """
    forward = wrapper.forward

    @wraps(forward)
    def run(*arguments: Any) -> Any:
        """Run the step with torch's flags of compiling and exporting off."""
        flags = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag  # noqa: SLF001
        # The flags belong to the process; captures hold the gate alone, so no computing thread sees the change.
        torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = False  # noqa: SLF001
        try:
            with answering, _StepMode() as mode, numbered(arguments[0]), noting_files(files):
                results = forward(*arguments)
                functions.check(results)
            return mode.with_checks(results)
        finally:
            torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = flags  # noqa: SLF001

    wrapper.forward = run
    try:
        yield
    finally:
        # The instance's attribute hid the method of the class, which shows again.
        del wrapper.forward


@contextmanager
def _number_inputs(
    task: TrainTask, twin: nn.Module, mode: str, batch: Any, found: list[NumberInputs], *, divides: bool
) -> Iterator[None]:
    """Context in which the numbers of a `NumberedBatch` are traced numbers; `found` receives what Python does with them.

    The capture enters the context where it runs the step.
    """
    places = batches.places_of(batch)
    if not places:
        yield
        return
    # Here, because export puts copies in the place of the model's containers; and on tensors with values.
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # noqa: SLF001
        state = PythonStateGuard(task, twin, mode, is_lenient=True, inputs=places)
    numbers = state.numbers()
    if state.inputs != places or numbers is None:
        raise CaptureError(f"{', '.join(places)} cannot be followed as a number")
    if state.asks_types:  # `type()` would show the stand-in of a number, and a branch may matter for later values only
        raise CaptureError("the step's code calls type(), which shows the class of a number itself")
    inputs = NumberInputs(places, numbers)
    found.append(inputs)
    tracer = NumberInputTracer(inputs, batch.inputs, divides=divides)
    try:
        with traced_numbers(), ExitStack() as stand_ins:
            for index, place in enumerate(places):
                stand_ins.enter_context(state.replaced(place, tracer.traced(index)))
            yield
    finally:
        tracer.is_open = False


class _TensorText(str):
    """The text of a traced tensor, which has no values: code may print the text, and must not read anything from the text."""

    __slots__ = ()


def _refusing(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def refuse(self: str, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)  # noqa: SLF001
        # The streams of notebooks and progress bars measure what they print.
        if is_installed(caller.f_globals.get("__name__")) or caller.f_code.co_name in ("write", "writelines"):
            return method(self, *args, **kwargs)
        raise CaptureError(
            "the step reads the text of a tensor, str(tensor) or repr(tensor), which a graph cannot follow"
        )

    return refuse


for _name in (
    *(
        "__contains__",
        "__eq__",
        "__ne__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__hash__",
        "__getitem__",
        "__iter__",
    ),
    *("__len__", "find", "index", "count", "startswith", "endswith", "split", "rsplit", "strip", "lstrip", "rstrip"),
    *("partition", "rpartition", "splitlines", "replace", "removeprefix", "removesuffix", "lower", "upper", "encode"),
):
    setattr(_TensorText, _name, _refusing(_name))


class _StepMode(TorchFunctionMode):
    """Changes what functions of torch do in a captured step.

    Hooks on activations are refused: a graph has no hooks, and a check on a single batch may not notice the difference. Texts
    of tensors become a `_TensorText`. A distribution of `torch.distributions` raises where its arguments are invalid, which no
    graph can do; `with_checks` makes the results of such a step NaN.
    """

    def __init__(self) -> None:
        super().__init__()
        self._checks: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.register_hook:
            raise CaptureError("the step registers a gradient hook on an activation, which a graph would not run")
        result = func(*args, **(kwargs or {}))
        if func is torch._is_all_true and _is_distribution(sys._getframe(1)):  # noqa: SLF001
            self._checks.append(result)
            return True
        return _TensorText(result) if func is Tensor.__repr__ else result

    def with_checks(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a step's results, with NaN for each real number where a distribution would have raised."""
        for check in self._checks:
            results = {
                name: torch.where(check, value, torch.nan) if value.is_floating_point() else value
                for name, value in results.items()
            }
        return results


def _is_distribution(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == torch.distributions.distribution.__name__


def _read(program: Any, twin: nn.Module, mode: str, precision: Precision) -> CapturedStepGraph:
    canonical = {id(tensor): name for name, tensor in named_state(twin)}
    state: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    inputs: dict[str, int] = {}
    for spec in program.graph_signature.input_specs:
        placeholder = spec.arg.name
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            # By identity, so that tied parameters share a name.
            state[placeholder] = canonical[id(_lookup(twin, spec.target))]
        elif spec.kind == InputKind.USER_INPUT:
            # Plain values of a batch are inputs as well, but are baked into the graph; the indices count tensors only.
            if isinstance(_value(program, placeholder), Tensor):
                inputs[placeholder] = len(inputs)
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            constants[placeholder] = _constant(program.constants[spec.target])
        else:
            raise CaptureError(f"torch.export lifted {spec.target!r} as {spec.kind.name}, which cannot be sharded")
    graph_output = next(node for node in program.graph.nodes if node.op == "output")
    outputs = tuple(_output_name(node) for node in graph_output.args[0])
    return CapturedStepGraph(
        module=program.graph_module,
        mode=mode,
        state=state,
        constants=constants,
        inputs=inputs,
        outputs=outputs,
        # The step returns a dict, and the context of a dict's spec is its keys.
        names=tuple(program.call_spec.out_spec.context),
        precision=precision,
    )


def _lookup(twin: nn.Module, target: str) -> Tensor:
    owner, _, leaf = target.removeprefix(MODEL_PREFIX).rpartition(".")
    tensor = getattr(twin.get_submodule(owner), leaf)
    assert isinstance(tensor, Tensor), target
    return tensor


def _value(program: Any, placeholder: str) -> Any:
    return next(n for n in program.graph.nodes if n.name == placeholder).meta.get("val")


def _constant(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        raise CaptureError(
            "the step uses a tensor that requires gradients and is not a parameter of the model; "
            "register it as a parameter of the module that model= builds"
        )
    # A copy: other trials use the plan, too, and the trial's own tensor may change.
    return tensor.detach().clone()


def _output_name(node: object) -> str:
    if not isinstance(node, fx.Node):
        raise CaptureError(f"the step's result does not depend on the batch or the model: it is always {node!r}")
    return node.name
