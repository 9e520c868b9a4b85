"""Mixed precision of stacked operators: each computes in the precision in which autocast runs the member's operator.

Autocast acts by operator, and a stacked form may be another operator: `torch.vmap` turns a distance into products, and
lets autocast see the products. So the operands of a member's operator are cast first, and the stacked form runs without
autocast. Autocast itself tells what is cast: a probe runs the operator on tensors without bytes, of a single member, and
`_FOUND` keeps the answer for each kind of operands in a process. An operator that autocast does not know, but that torch
composes of operators which autocast may know, runs under autocast; so does an operator with results that no casts of the
operands explain. In low precision, `StackedGraph` (`batched_graph.py`) prepares the operands of each node, except those of
recorded primitives, and asks whether recurrent layers have a kernel. In any precision, `StackedGraph` asks for the dtypes of a
member's results where stacking could change the dtypes. The module must not know trials, groups or pools. `_FOUND` has no
lock: threads that probe the same operator at once find the same answer.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hydra_tune.shard.capture.precision import autocast
from hydra_tune.task import Precision

aten: Any = torch.ops.aten
_RECURRENT_KERNELS = frozenset(
    [aten.mkldnn_rnn_layer.default, aten._cudnn_rnn.default, aten.miopen_rnn.default]  # noqa: SLF001
)
_Dtypes = tuple[torch.dtype | None, ...]
_FOUND: dict[Any, _Dtypes | None] = {}  # casts of operators, by operator, precision, kind of device and dtypes


def prepared(
    target: Any, arguments: Sequence[Any], keywords: dict[str, Any], are_stacked: Sequence[bool], precision: Precision
) -> tuple[Sequence[Any], dict[str, Any], AbstractContextManager[object]]:
    """Return the arguments and keywords of a stacked operator, and the context to run the operator in.

    Args:
        target: the function that the node calls for a member.
        arguments: its positional arguments; stacked tensors have the members in front.
        keywords: its keyword arguments, likewise.
        are_stacked: for every tensor among the arguments, whether the tensor is stacked.
        precision: precision of the step.
    """
    leaves, spec = pytree.tree_flatten((arguments, keywords))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if precision == "float32" or not tensors:
        return arguments, keywords, nullcontext()
    device_type = tensors[0].device.type
    if not isinstance(target, OpOverload) or not _has_kernel(target, f"Autocast{device_type.upper()}"):
        is_composed = not isinstance(target, OpOverload) or _has_kernel(target, "CompositeImplicitAutograd")
        return arguments, keywords, autocast(precision, device_type) if is_composed else nullcontext()
    # Operators such as `sum` also take a dtype.
    dtypes_given = tuple(leaf.dtype if isinstance(leaf, Tensor) else leaf for leaf in leaves if _is_typed(leaf))
    key = (target, precision, device_type, dtypes_given)
    if key not in _FOUND:
        _FOUND[key] = _OperatorProbe(target, arguments, keywords, are_stacked).casts(precision)
    casts = _FOUND[key]
    if casts is None:
        return arguments, keywords, autocast(precision, device_type)
    dtypes = iter(casts)
    cast_leaves = [_cast(leaf, next(dtypes)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    cast_arguments, cast_keywords = pytree.tree_unflatten(cast_leaves, spec)
    return cast_arguments, cast_keywords, nullcontext()


def member_dtypes(
    target: Any, arguments: Sequence[Any], keywords: dict[str, Any], are_stacked: Sequence[bool]
) -> list[torch.dtype]:
    """Return the dtypes of a member's results, in the context of the caller; arguments as of `prepared`."""
    return _OperatorProbe(target, arguments, keywords, are_stacked).run()[1]


def has_recurrent_kernel(
    target: Any, arguments: Sequence[Any], keywords: dict[str, Any], are_stacked: Sequence[bool]
) -> bool:
    """Return whether a member's recurrent layers are a kernel of their own, and not made of cells."""
    probe = _OperatorProbe(target, arguments, keywords, are_stacked)
    probe.run()
    return not probe.called.isdisjoint(_RECURRENT_KERNELS)


def dtypes_of(result: Any) -> list[torch.dtype]:
    """Return the dtypes of the tensors of a result."""
    return [leaf.dtype for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _has_kernel(target: OpOverload[..., Any], key: str) -> bool:
    name = target.name()  # type: ignore[no-untyped-call]
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))  # noqa: SLF001


def _is_typed(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | torch.dtype)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)


class _OperatorProbe:
    """Runs an operator on a member's tensors without bytes; arguments as of `prepared`."""

    def __init__(
        self, target: Any, arguments: Sequence[Any], keywords: dict[str, Any], are_stacked: Sequence[bool]
    ) -> None:
        self._target = target
        self._leaves, self._spec = pytree.tree_flatten((arguments, keywords))
        self._are_stacked = are_stacked
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.called: set[Any] = set()  # operators that the last run consisted of

    def casts(self, precision: Precision) -> _Dtypes | None:
        """Return the dtype to which autocast casts each operand, None where autocast leaves the operand.

        Return None altogether if no casts of operands give the dtypes of the results.
        """
        with autocast(precision, self.tensors[0].device.type):
            seen, wanted = self.run()
        own, _ = self.run()
        # A kernel may cast an operand itself, with autocast and without.
        found = tuple(cast if cast != without else None for cast, without in zip(seen, own, strict=True))
        # On GPUs autocast gives some operators, as softmax, a dtype of the result instead of operands in that dtype.
        low = getattr(torch, precision)
        wide = tuple(torch.float32 if tensor.dtype == low else None for tensor in self.tensors)
        return next((casts for casts in (found, wide) if self.run(casts)[1] == wanted), None)

    def run(self, casts: _Dtypes | None = None) -> tuple[_Dtypes, list[torch.dtype]]:
        """Return the dtypes to which the operator casts its operands, and those of its results.

        With `casts`, the operands have other dtypes than their own; no results if the operator takes no such operands.
        """
        flags, dtypes = iter(self._are_stacked), iter(casts or (None,) * len(self.tensors))
        with _disable_current_modes(), FakeTensorMode(), torch.no_grad():
            fakes = [
                _fake(leaf, next(flags), next(dtypes)) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves
            ]
            arguments, keywords = pytree.tree_unflatten(fakes, self._spec)
            recorder = _CastRecorder([fake for fake in fakes if isinstance(fake, Tensor)])
            result = None
            with suppress(RuntimeError, TypeError), recorder:
                result = self._target(*arguments, **keywords)
        self.called = recorder.called
        return tuple(recorder.dtypes), dtypes_of(result)


def _fake(tensor: Tensor, is_stacked: bool, dtype: torch.dtype | None) -> Tensor:
    first = 1 if is_stacked else 0
    return torch.empty_strided(
        tensor.shape[first:], tensor.stride()[first:], dtype=dtype or tensor.dtype, device=tensor.device
    )


class _CastRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the dtype to which each of some tensors is cast first.

    Attributes:
        dtypes: for each tensor, that dtype; None where the tensor is not cast.
        called: the operators that ran.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = {id(tensor): place for place, tensor in enumerate(tensors)}
        self.dtypes: list[torch.dtype | None] = [None] * len(tensors)
        self.called: set[Any] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.called.add(func)
        result = func(*args, **(kwargs or {}))
        place = self._places.get(id(args[0])) if func is aten._to_copy.default else None  # noqa: SLF001
        if place is not None and self.dtypes[place] is None:
            self.dtypes[place] = result.dtype
        return result
