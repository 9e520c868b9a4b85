"""Handles calls of `torch.autograd.Function` while a step is captured; an export alone would lose their backwards.

A call of the user's own Function becomes an `OpaqueCall`, a node that no cut divides. A reentrant checkpoint, which is a
Function of torch, is left out: its region is captured like other code, as units compute their forward again anyway. Other
Functions of torch's own are traced as usual. `capture` (`step_capture.py`) exports each step within `own_functions`, and
calls `put_calls` there. `opaque_calls` lists a graph's calls for the splitter (`shard/partition/subgraph.py`), `PlanLibrary`
(`shard/partition/plan_cache.py`), the pilot (`shard/cost/pilot.py`) and the checks (`shard/verify/step_outcome.py`).

Note: locks. `_CALLS` and the replaced `apply` belong to the whole process, so a capture holds the capture gate alone. On
threads other than the capture's, `apply` works as ever.

Note: reentrant checkpoints. Their backward sums the gradients of each input over the region before the sum leaves the
region. The captured region has one `alias` per input, at which autograd sums likewise. The backward also adds its sum to
the gradient of a parameter at once. A parameter that is used elsewhere as well would get its summands in another order,
possibly only from the second batch of an accumulation on, so such a step is refused. A step is also refused if a region
reads a tensor with gradients that is not among its inputs.

Note: Python state. A node's Function reads its state each time that the graph runs, and a graph has no code that sets
state. A step that sets such state for a call and puts the state back is refused.

Note: calls without gradients. Under `no_grad`, or of tensors without gradients, a Function is its forward, and an export
traces the operators of the forward.
"""

import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import Function, _SingleLevelFunction
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from hydra_tune.errors import CaptureError
from hydra_tune.shard.capture.graph_device import bodies
from hydra_tune.shard.capture.opaque_call import NotOpaqueError, OpaqueCall, opaque_call
from hydra_tune.shard.python_state.reachable_values import walked
from hydra_tune.shard.python_state.value_holder import MISSING, ValueHolder

_CALLS: dict[int, OpaqueCall] = {}
"""Calls of the capture under way, by the number in their nodes; captures hold the gate alone."""

_LIBRARY: Any = torch.library.Library("hydra_tune", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("opaque_call(Tensor[] tensors, int number) -> Tensor[]")
# Composite, so that autograd and the fake tensors see what the Function does.
_LIBRARY.impl("opaque_call", lambda tensors, number: _CALLS[number](*tensors), "CompositeImplicitAutograd")
_APPLY: Any = _SingleLevelFunction
"""The class above `Function`, where `apply` is replaced, because code may hold `apply` itself: `quantize = Quantize.apply`."""
_CODE = (
    type,
    types.ModuleType,
    types.CodeType,
    types.FunctionType,
    types.BuiltinFunctionType,
    staticmethod,
    classmethod,
)


class OwnFunctions:
    """Takes the place of `apply` of all Functions, on the thread of a capture."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._is_inside = False  # whether a Function runs, which may call others
        self._refusal: CaptureError | None = None
        self._gradients = _RegionGradients()
        self._states: dict[type[Function], list[ValueHolder]] = {}  # what each Function may read, as at its first call

    def apply(self, function: type[Function], *arguments: Any, **keywords: Any) -> Any:
        """Call a Function."""
        plain: Callable[..., Any] = super(_SingleLevelFunction, function).apply  # type: ignore[misc]
        is_elsewhere = self._is_inside or threading.get_ident() != self._thread
        has_gradients = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments)
        if is_elsewhere or not has_gradients:
            return plain(*arguments, **keywords)
        try:
            if function is CheckpointFunction:
                return self._checkpoint(*arguments)
            if function.__module__.partition(".")[0] != "torch":
                return self._opaque(function, arguments, keywords)
        except CaptureError as error:
            self._refusal = error
            raise
        return plain(*arguments, **keywords)

    def _opaque(self, function: type[Function], arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        self._is_inside = True
        try:
            # Without modes of functions: they would write the Function's inside into the graph, and answer its questions.
            with torch._C.DisableTorchFunction():  # noqa: SLF001
                with _disable_current_modes():
                    if function not in self._states:
                        self._states[function] = _state_of(function)
                    self._check_states()
                    call = opaque_call(function, arguments, keywords)
                    call.reads_state = bool(self._states[function])
                number = len(_CALLS)
                _CALLS[number] = call
                outputs = torch.ops.hydra_tune.opaque_call(tensors, number)
        except Exception as error:
            name = f"torch.autograd.Function {function.__qualname__}"
            raise CaptureError(f"the step's {name} cannot be an operator of a graph: {error}") from error
        finally:
            self._is_inside = False
        return call.arranged(outputs)

    def _checkpoint(self, run: Callable[..., Any], preserves_random_state: bool, *arguments: Any) -> Any:
        """Run the region of a reentrant checkpoint."""
        del preserves_random_state  # the check of the first step sees whether a second draw differs
        has_gradient = [isinstance(argument, Tensor) and argument.requires_grad for argument in arguments]
        entries = [
            torch.ops.aten.alias.default(argument) if is_entry else argument
            for argument, is_entry in zip(arguments, has_gradient, strict=True)
        ]
        results = run(*entries)
        self._gradients.enclose(
            results, [entry.grad_fn for entry, is_entry in zip(entries, has_gradient, strict=True) if is_entry]
        )
        return results

    def check(self, results: object) -> None:
        """Check a step that has run.

        Raises:
            CaptureError: a call cannot be captured with the numbers of the eager step.
        """
        if self._refusal is not None:  # the step may have caught the error
            raise self._refusal
        try:
            with torch._C.DisableTorchFunction(), _disable_current_modes():  # noqa: SLF001
                self._check_states()
        except NotOpaqueError as error:
            raise CaptureError(str(error)) from error
        self._states.clear()  # export may run the step again
        self._gradients.enclose(results, [])

    def _check_states(self) -> None:
        for function, holders in self._states.items():
            for holder in holders:
                if (name := holder.change()) is not None:
                    raise NotOpaqueError(f"the step changes {name}, which {function.__qualname__} reads at each run")


def _state_of(function: type[Function]) -> list[ValueHolder]:
    """Return the places of Python state that a Function may read, without places of mere code."""
    holders = walked({function.__qualname__: function}, None, keeps_tensors=False, is_lenient=True).holders
    return [
        holder
        for holder in holders
        # Without defaults, which have no labels.
        if not all(v is MISSING or isinstance(v, _CODE) for _, v in zip(holder.labels, holder.noted, strict=False))
    ]


class _RegionGradients:
    """Follows the autograd graph of a step into the regions of its reentrant checkpoints."""

    def __init__(self) -> None:
        self._regions: dict[Any, int] = {}  # region by node
        self._entries: list[list[Any]] = []  # first nodes of each region
        self._users: dict[Any, int] = {}  # the only region of each parameter, by the node that adds its gradients

    def enclose(self, results: object, entries: list[Any]) -> None:
        """Make a region of all nodes between results and entries, without the nodes of regions within.

        Args:
            results: results of the region.
            entries: first nodes of the region; none for the whole step.

        Raises:
            CaptureError: the region is entered elsewhere, or a parameter is used here and in another region.
        """
        number = len(self._entries)
        self._entries.append(entries)
        # Numbers count the nodes of a thread.
        first = min((entry._sequence_nr() for entry in entries), default=0)  # noqa: SLF001
        visited: set[Any] = {None, *entries}
        unvisited: list[Any] = [leaf.grad_fn for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        while unvisited:
            node = unvisited.pop()
            if node in visited:
                continue
            visited.add(node)
            if hasattr(node, "variable"):
                if self._users.setdefault(node, number) != number:
                    raise CaptureError("a reentrant checkpoint and other code use the same parameter")
                continue
            if node._sequence_nr() < first:  # noqa: SLF001
                raise CaptureError("a reentrant checkpoint reads a tensor with gradients that is none of its inputs")
            inner = self._regions.get(node)
            nodes: list[Any] = [node] if inner is None else self._entries[inner]
            unvisited += [following for one in nodes for following, _ in one.next_functions]
        for node in visited - {None}:
            self._regions.setdefault(node, number)


@contextmanager
def own_functions() -> Iterator[OwnFunctions]:
    """Context of a capture; `put_calls` runs inside, because the end of the context forgets the calls."""
    functions = OwnFunctions()
    _APPLY.apply = classmethod(functions.apply)
    try:
        yield functions
    finally:
        del _APPLY.apply
        _CALLS.clear()


def put_calls(module: fx.GraphModule) -> None:
    """Make each node of a Function in a captured graph call its `OpaqueCall`."""
    for body in bodies(module):
        for node in body.graph.nodes:
            if node.target is torch.ops.hydra_tune.opaque_call.default:
                tensors, number = node.args
                node.target, node.args = _CALLS[number], tuple(tensors)
        body.recompile()


def opaque_calls(module: fx.GraphModule) -> list[OpaqueCall]:
    """Return the calls of the user's own Functions in a graph."""
    return [node.target for body in bodies(module) for node in body.graph.nodes if isinstance(node.target, OpaqueCall)]
