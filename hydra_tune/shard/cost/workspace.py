"""Adds memory that fake tensors do not show.

The recurrent layers of oneDNN keep a workspace from forward to backward. Only oneDNN knows the size: on fake tensors
the workspace is empty, and the pilot would count several times too little. The size is therefore measured for each
geometry, by a run with zeros, and kept. The backward's gradients of the two biases are a single fake tensor, and count as
two. `StorageTracker` (`pilot.py`) calls `with_workspace` after each operator of a measured run.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

_RNN_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
_RNN_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default


def with_workspace(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Return an operator's result on fake tensors, with the workspace in its real size.

    Results of other operators, and results on real tensors, are returned unchanged.
    """
    if func not in (_RNN_LAYER, _RNN_BACKWARD) or not isinstance(result[3], FakeTensor):
        return result
    if func is _RNN_BACKWARD:  # the gradients of the two biases are a single fake tensor, but two real tensors
        with result[3].fake_mode:
            return (*result[:4], torch.empty_like(result[3]), *result[5:])
    # Geometry alone, hashable for the cache: the size does not depend on values.
    key = tuple((tuple(a.shape), a.dtype) if isinstance(a, Tensor) else _frozen(a) for a in args)
    with result[3].fake_mode:
        return (*result[:3], torch.empty(_workspace_bytes(key), dtype=torch.uint8))


def _frozen(argument: object) -> object:
    return tuple(argument) if isinstance(argument, list) else argument


@functools.lru_cache(maxsize=256)
def _workspace_bytes(key: tuple[Any, ...]) -> int:
    # A real run, outside the fake mode of the caller: only the kernel knows the size.
    with unset_fake_temporarily():
        args = [torch.zeros(part[0], dtype=part[1]) if _is_tensor(part) else part for part in key]
        args[8] = list(args[8])  # batch sizes
        workspace: Tensor | None = _RNN_LAYER(*args)[3]  # none in evaluation
    return 0 if workspace is None else workspace.numel() * workspace.element_size()


def _is_tensor(part: object) -> bool:
    return isinstance(part, tuple) and len(part) == 2 and isinstance(part[1], torch.dtype)  # noqa: PLR2004 - a pair
