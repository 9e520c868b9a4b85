"""Mends what the older of the supported versions of torch do wrong; each part goes when its versions are supported no more.

`pyproject.toml` says which versions those are, and `make compat` runs the tests with the oldest.
"""

import _thread
import functools
from typing import Any

import torch
from torch import Tensor

_UNTAGGED = frozenset(
    # Up to torch 2.11 these lack the tag.
    [
        *("aten::_conj_physical", "aten::celu_", "aten::elu_", "aten::hardsigmoid_", "aten::hardtanh_"),
        *("aten::leaky_relu", "aten::leaky_relu_", "aten::selu_"),
    ]
)


def is_pointwise(operator: Any) -> bool:
    """Whether an operator computes each element by itself."""
    return torch.Tag.pointwise in operator.tags or operator.name() in _UNTAGGED


@functools.cache
def keep_cuda_guard() -> None:
    """Keep torch's stand-in for the guard of CUDA devices alive; to be called before any thread of a pool starts.

    Where torch sees no GPU, the first thread that enters a `FakeTensorMode`, as each capture does, puts a stand-in for that
    guard into torch's table. Up to torch 2.11 that thread owns the stand-in and frees it when the thread ends, and the table
    still points there: the next thread that enters such a mode reads freed memory, and the process dies. So a thread that
    never ends owns the stand-in here. A machine with a GPU has no stand-in, and nothing is done there.
    """
    if torch.__version__ >= "2.12" or torch.cuda.is_available():
        return
    is_set, never = _thread.allocate_lock(), _thread.allocate_lock()
    is_set.acquire()
    never.acquire()

    def own() -> None:
        torch._C._ensureCUDADeviceGuardSet()  # noqa: SLF001 - as FakeTensorMode does
        is_set.release()
        never.acquire()

    _thread.start_new_thread(own, ())
    is_set.acquire()


@functools.cache
def mend_lstm_shapes() -> None:
    """Have LSTMs on tensors without bytes give final states of the shape that real ones have; to be called before a capture.

    Up to torch 2.12 they have one dimension more, as of `(1, 1, batch, hidden)`, and code that uses them fails.
    """
    if torch.__version__ >= "2.13":
        return
    from torch._decomp import decompositions  # noqa: PLC0415 - takes long to import, and most versions do without

    module: Any = decompositions
    layer = module.one_layer_lstm

    def mended(inputs: Tensor, hidden: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        outputs, states = layer(inputs, hidden, *args, **kwargs)
        hx, cx = (state.reshape(before.shape) for state, before in zip(states, hidden, strict=True))
        return outputs, (hx, cx)

    module.one_layer_lstm = mended
