"""Models that are too large to be built only to be looked at: their large tensors have sizes and no bytes.

Small tensors are real, so that a factory can read what it computes from them: rates per layer, masks, tables.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hydra_tune.shard.capture import named_state
from hydra_tune.shard.pilot import StorageTracker

_SMALL_BYTES = 1 << 20  # of a tensor that is made for real

_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


class TooLargeError(BaseException):
    """A factory makes more than it may. No `Exception`: a factory that catches those must not go on with half a model."""


class BuildLimit(StorageTracker):  # type: ignore[no-untyped-call]
    """Ends the building of a model that takes too much memory.

    Args:
        most_bytes: of all tensors that are alive at once.

    Raises:
        TooLargeError: out of the operator that would go beyond that.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self._most_bytes = most_bytes
        self._shapes = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _tensors((args, kwargs)):
            # It makes something out of nothing: how large that will be is known beforehand.
            made = _tried(self._shapes, func, args, kwargs or {})
            if self.current_bytes + _nbytes(made) > self._most_bytes:
                raise TooLargeError
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.current_bytes > self._most_bytes:
            raise TooLargeError
        return result


class Unbuilt(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, large tensors are made without bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NO_KEYWORDS
    ) -> Any:
        if any(isinstance(tensor, FakeTensor) for tensor in _tensors((args, kwargs))):
            return func(*args, **kwargs)
        made = _tried(self._mode, func, args, kwargs)
        return made if _nbytes(made) > _SMALL_BYTES else func(*args, **kwargs)


def is_unbuilt(model: nn.Module) -> bool:
    """Whether some of a model has no bytes."""
    return any(isinstance(tensor, FakeTensor) for _, tensor in named_state(model))


def bodiless_twin(model: nn.Module) -> tuple[nn.Module, dict[int, Tensor]]:
    """A copy of a model whose parameters and buffers have no bytes, made in the fake mode that is on.

    Returns:
        The copy; and by the identity of each of the model's tensors the one that stands for it.
    """
    doubles: dict[int, Tensor] = {}
    memo: dict[int, Any] = {}
    for _, tensor in named_state(model):
        double = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            double = nn.Parameter(double, requires_grad=tensor.requires_grad)
        doubles[id(tensor)] = double
    memo |= doubles
    for module in model.modules():
        for tensor in _tensors(list(vars(module).values())):  # a copy of a fake would have a mode of its own
            if isinstance(tensor, FakeTensor) and id(tensor) not in memo:
                memo[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.deepcopy(model, memo), doubles


def export_mode() -> FakeTensorMode:
    """A mode in which a model without bytes can be captured."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def solid(tensor: Tensor) -> Tensor:
    """The tensor, or in place of one without bytes some of its geometry, of which nobody will read or write any."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def without_bytes(mode: FakeTensorMode, tree: Any) -> Any:
    """A tree with its tensors without bytes."""
    return tree_map_only(Tensor, lambda tensor: mode.from_tensor(tensor, static_shapes=True), tree)


def _tried(mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator would make; nothing where only a run tells, as of one that reads a value."""
    with suppress(Exception), mode:
        return func(*args, **kwargs)
    return None


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _nbytes(tree: Any) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in _tensors(tree))
