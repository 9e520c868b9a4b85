"""`OpaqueCall`: a call of the user's own `torch.autograd.Function` as one node of a captured graph.

A trace of the forward would lose the backward that the user has written. The node therefore calls the Function itself,
each time that the graph runs: a shard unit on real tensors, and the pilot on tensors without bytes. `own_functions.py`
makes the nodes while a step is captured. `shard/partition/subgraph.py` reads `reads_state` of a shard's calls,
`shard/cost/pilot.py` reads `keeps_tensors`, and `shard/partition/shard_equivalence.py` compares calls as operators.
Several workers run one `OpaqueCall` at the same time, so a run must not change the object.

`opaque_call` first runs forward and backward on tensors without values, and refuses a Function that does more than
compute results from its arguments. A refused Function makes its model run whole.
"""

import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction, Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hydra_tune.errors import CaptureError
from hydra_tune.shard.analysis.random_ops import draws_with, hides_draws

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_LITERALS = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy"})
_TENSOR = object()


class NotOpaqueError(Exception):
    """A Function does more than compute results from its arguments."""


class OpaqueCall:
    """Calls a Function with plain arguments that do not change, and with tensors that do.

    Args:
        arguments: arguments of `apply`, with `_TENSOR` in the place of tensors.

    Attributes:
        is_single: whether the Function returns a tensor, and no tuple.
        is_tensor: for each result of the Function, whether the result is a tensor, and not None.
        reads_state: whether the Function reads Python state, which may have changed before a batch that waits is run.
        keeps_tensors: whether the Function may keep tensors beside those of `save_for_backward`. Nobody could move such
            tensors between a forward unit and its backward unit, so the backward unit computes the forward again.
        may_draw: whether the Function calls operators that `hides_draws` (`shard/analysis/random_ops.py`) names.
    """

    def __init__(self, function: type[Function], arguments: Sequence[object]) -> None:
        self.function = function
        self.is_single = self.reads_state = self.keeps_tensors = self.may_draw = False
        self.is_tensor: tuple[bool, ...] = ()
        self._arguments = tuple(arguments)
        # Code made of a graph calls the object by this name.
        self.__name__ = function.__name__
        self._key: Hashable = (function, tuple(map(_described, self._arguments)))

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors that the Function returns for its tensors, in the order of the arguments.

        Raises:
            CaptureError: the Function keeps tensors in its context and has not done so in its trial, or returns None where
                its trial returned a tensor, or the other way round.
        """
        results = _results(self.apply(*tensors))
        if tuple(isinstance(result, Tensor) for result in results) != self.is_tensor:
            raise CaptureError(f"{self} returns None in place of a tensor only on some devices or for some values")
        outputs = [result for result in results if result is not None]
        if not self.keeps_tensors and any(keeps_tensors(o.grad_fn) for o in outputs if o.requires_grad):
            # Between two units the tensor would stay where it is, and its memory may be given to others.
            raise CaptureError(
                f"{self} keeps a tensor in its context only on some devices or for some values; give it to save_for_backward"
            )
        return outputs

    def arranged(self, outputs: Sequence[Tensor]) -> Any:
        """Return the tensors of a call as the Function's own `apply` returns the tensors."""
        tensors = iter(outputs)
        results = tuple(next(tensors) if is_tensor else None for is_tensor in self.is_tensor)
        return results[0] if self.is_single else results

    def apply(self, *tensors: Tensor) -> Any:
        """Return what the Function's own `apply` returns."""
        given = iter(tensors)
        arguments = [next(given) if argument is _TENSOR else _fresh(argument) for argument in self._arguments]
        # Past an `apply` of the user's own, which has run in the capture.
        return Function.apply.__func__(self.function, *arguments)  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpaqueCall) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}.apply"


def opaque_call(function: type[Function], arguments: Sequence[object], keywords: Mapping[str, object]) -> OpaqueCall:
    """Return the node's function for a call of a Function, after a trial of the call on tensors without values.

    Of tensors among the arguments, only the geometry, the device and the need of gradients count.

    Raises:
        NotOpaqueError: the call must not be a node; the message says why.
    """
    if not _is_importable(function):
        # Its variables may be those of the copy on which the step is captured.
        raise NotOpaqueError("its class is made inside a function")
    if keywords:
        raise NotOpaqueError("it is given arguments by name")
    for argument in arguments:
        if not isinstance(argument, Tensor) and not _is_plain(argument):
            raise NotOpaqueError(f"it is given a {type(argument).__name__}")
    call = OpaqueCall(function, [_TENSOR if isinstance(argument, Tensor) else argument for argument in arguments])
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    # The hooks of a checkpoint around the call would run its region again in the trial's backward.
    plainly = torch.autograd.graph.saved_tensors_hooks(_itself, _itself)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad(), plainly:
        leaves = [
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            for tensor in tensors
        ]
        for leaf, tensor in zip(leaves, tensors, strict=True):
            leaf.requires_grad_(tensor.requires_grad)
        watch = _ArgumentWatch(leaves)
        with watch:
            result = call.apply(*leaves)
        call.is_single = isinstance(result, Tensor)
        results = _results(result)
        if not all(output is None or isinstance(output, Tensor) for output in results):
            raise NotOpaqueError("it returns more than tensors and None")
        call.is_tensor = tuple(output is not None for output in results)
        outputs = [output for output in results if output is not None]
        starts = [output for output in outputs if output.requires_grad]
        call.keeps_tensors = any(keeps_tensors(start.grad_fn) for start in starts)
        gradients = [torch.empty_like(start) for start in starts]
        watch.know(*gradients)
        with watch:
            torch.autograd.grad(starts, [leaf for leaf in leaves if leaf.requires_grad], gradients, allow_unused=True)
    call.may_draw = watch.may_draw
    return call


class _ArgumentWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that no graph could repeat from the arguments alone."""

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, Any] = {}  # storages by identity; kept alive, because identities are given again
        self.may_draw = False
        self.know(*arguments)
        self._given = frozenset(self._known)

    def know(self, *tensors: Tensor) -> None:
        """Allow operators on these tensors."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = storage  # noqa: SLF001 - the storage's identity

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name  # noqa: SLF001
        if hides_draws(func):
            self.may_draw = True
        elif draws_with(func, args, kwargs):
            raise NotOpaqueError(f"it draws random numbers ({name})")
        for position, argument in enumerate(func._schema.arguments):  # noqa: SLF001
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            storages = [_identity(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            if name not in _LITERALS and any(storage not in self._known for storage in storages):
                raise NotOpaqueError(f"it reads a tensor that is none of its arguments ({name})")
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and not self._given.isdisjoint(storages):
                raise NotOpaqueError(f"it overwrites an argument ({name})")
        result = func(*args, **kwargs)
        self.know(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)))
        return result


def _results(returned: Any) -> list[Any]:
    """Return the results of a Function, of which a tuple holds several."""
    return [returned] if isinstance(returned, Tensor) else list(returned)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _identity(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the storage's identity


def keeps_tensors(node: object) -> bool:
    """Whether an attribute of a Function's context may hold a tensor."""
    return not isinstance(node, BackwardCFunction) or not all(_is_plain(value) for value in vars(node).values())


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) in (tuple, list, torch.Size) and all(map(_is_plain, value)))  # type: ignore[call-overload]


def _is_importable(function: type) -> bool:
    """Whether a class is found by its name in its module."""
    found: object = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _fresh(value: object) -> object:
    """A list is copied for each call, because the Function may change its own."""
    return [_fresh(item) for item in value] if isinstance(value, list) else value


def _described(value: object) -> Hashable:
    # With the class, because 1, 1.0 and True are equal.
    return "tensor" if value is _TENSOR else (type(value).__name__, repr(value))
