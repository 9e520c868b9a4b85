"""Models that are too large to build just for a look: their large tensors have sizes but no bytes.

Small tensors that come from no large ones are real, so that a factory can read values computed from small tensors:
rates per layer, masks, tables. `pool/dry_run/report.py` builds such a model when the real model is too large for a
forecast, and `captured_graph` (`shard/partition/trial_step.py`) captures the step of such a model on a copy without
bytes. `TrialRehearsal` (`train/timing/fake_trial.py`) rehearses every model on a copy without bytes, and
`hollow_twin_of` (`shard/partition/trial_step.py`) makes a copy in memory that nobody touches, for a plan check without
values.

Such a model is forecast and never trained. Trials and plan caches ask `is_unbuilt`, and must then neither run such a model
whole nor ask the model's code for answers, and a trial's plan cache sets no guard.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hydra_tune.shard.capture.step_capture import copied_model, named_state
from hydra_tune.shard.cost.pilot import StorageTracker

_SMALL_BYTES = 1 << 20  # largest tensor with real bytes

_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


class BuildLimitError(BaseException):
    """A factory makes more than allowed. Not an `Exception`: a factory that catches every `Exception` must not continue."""


class BuildLimitTracker(StorageTracker):  # type: ignore[no-untyped-call]
    """Stops the building of a model that takes too much memory.

    Args:
        most_bytes: limit for all tensors alive at once.

    Raises:
        BuildLimitError: raised from the operator that exceeds the limit; before the operator runs, where its size is known.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self._most_bytes = most_bytes
        self._shapes = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _tensors((args, kwargs)):
            # The operator creates tensors without inputs, so the size can be found before any allocation.
            trial_result = _tried(self._shapes, func, args, kwargs or {})
            if self.current_bytes + _nbytes(trial_result) > self._most_bytes:
                raise BuildLimitError
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.current_bytes > self._most_bytes:
            raise BuildLimitError
        return result


class LargeTensorFakeMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which large tensors are made without bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NO_KEYWORDS
    ) -> Any:
        if any(isinstance(tensor, FakeTensor) for tensor in _tensors((args, kwargs))):
            return func(*args, **kwargs)
        trial_result = _tried(self._mode, func, args, kwargs)
        return trial_result if _nbytes(trial_result) > _SMALL_BYTES else func(*args, **kwargs)


def is_unbuilt(model: nn.Module) -> bool:
    """Whether some tensors of a model have no bytes."""
    return any(isinstance(tensor, FakeTensor) for _, tensor in named_state(model))


def bodiless_twin(model: nn.Module) -> tuple[nn.Module, dict[int, Tensor]]:
    """Copy a model without the bytes of its parameters and buffers: none in an active fake mode, else untouched memory.

    Outside a mode, real tensors that are plain attributes of modules are copied with their bytes.

    Returns:
        The copy, and the copied tensor by the id of each original tensor.
    """
    doubles: dict[int, Tensor] = {}
    memo: dict[int, Any] = {}
    for _, tensor in named_state(model):
        double = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            double = nn.Parameter(double, requires_grad=tensor.requires_grad)
        doubles[id(tensor)] = double
    # `deepcopy` takes the copy of a tensor from the memo, so tied names share a copy, and no bytes are copied.
    memo |= doubles
    has_mode = detect_fake_mode() is not None
    for module in model.modules():
        # A copied fake tensor would belong to another mode, and in a mode a real tensor cannot be copied.
        for tensor in _tensors(list(vars(module).values())):
            if (has_mode or isinstance(tensor, FakeTensor)) and id(tensor) not in memo:
                memo[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copied_model(model, memo), doubles


def export_mode() -> FakeTensorMode:
    """Return a mode for capturing a model without bytes."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def solid(tensor: Tensor) -> Tensor:
    """Return the tensor, or a real tensor of the same geometry for a fake tensor, which no code will read or write."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def without_bytes(mode: FakeTensorMode, tree: Any) -> Any:
    """Return a tree with fake tensors in place of its tensors."""
    return tree_map_only(Tensor, lambda tensor: mode.from_tensor(tensor, static_shapes=True), tree)


def _tried(mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Result of an operator on fake tensors, or None if only a real run tells, as for an operator that reads a value."""
    with suppress(Exception), mode:
        return func(*args, **kwargs)
    return None


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _nbytes(tree: Any) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in _tensors(tree))
