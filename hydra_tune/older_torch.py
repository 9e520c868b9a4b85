"""Workarounds for bugs in the older supported versions of torch; each is removed with its last affected version.

`pyproject.toml` gives the supported versions, and `make compat` runs the tests with the oldest.

`CpuDevice` (`devices/cpu.py`) calls `keep_cuda_guard` when a CPU device opens, and `shard/capture/step_capture.py` calls
`mend_lstm_shapes` before a capture. `fusion/ragged/sample_rules.py`, `fusion/batching/batching_rules.py` and
`shard/analysis/mutating_ops.py` call `is_pointwise` to classify an operator.
"""

import _thread
import functools
from typing import Any

import torch
from torch import Tensor

_UNTAGGED = frozenset(
    # Pointwise operators that lack the tag up to torch 2.11.
    [
        *("aten::_conj_physical", "aten::celu_", "aten::elu_", "aten::hardsigmoid_", "aten::hardtanh_"),
        *("aten::leaky_relu", "aten::leaky_relu_", "aten::selu_"),
    ]
)


def is_pointwise(operator: Any) -> bool:
    """Whether an operator computes each element independently."""
    return torch.Tag.pointwise in operator.tags or operator.name() in _UNTAGGED


@functools.cache
def keep_cuda_guard() -> None:
    """Keep torch's placeholder for the CUDA device guard alive; call before any thread of a pool starts.

    Where torch sees no GPU, the first thread to enter a `FakeTensorMode`, as each capture does, registers a placeholder for
    the CUDA guard in a global table of torch. Up to torch 2.11 the thread owns the placeholder and frees it when the thread
    ends, while the table still points there: the next thread to enter such a mode reads freed memory, and the process dies.
    Here a thread that never ends owns the placeholder. A machine with a GPU has no placeholder and needs no owner.
    """
    # torch.__version__ compares as a version, not as a text.
    if torch.__version__ >= "2.12" or torch.cuda.is_available():
        return
    is_set, never = _thread.allocate_lock(), _thread.allocate_lock()
    is_set.acquire()
    never.acquire()

    # A raw thread rather than threading.Thread: the interpreter does not wait for raw threads at exit.
    def hold_guard() -> None:
        torch._C._ensureCUDADeviceGuardSet()  # noqa: SLF001 - as FakeTensorMode does
        is_set.release()
        # Held for ever by the caller, so this thread, and with it the placeholder, lasts as long as the process.
        never.acquire()

    _thread.start_new_thread(hold_guard, ())
    # Until the placeholder is registered, no other thread may enter a mode.
    is_set.acquire()


@functools.cache
def mend_lstm_shapes() -> None:
    """Make LSTMs on tensors without bytes return final states of the real shape; call before a capture.

    Up to torch 2.12 the final states have one dimension more, as of `(1, 1, batch, hidden)`, and code that uses the
    states fails.
    """
    if torch.__version__ >= "2.13":
        return
    from torch._decomp import decompositions  # noqa: PLC0415 - takes long to import, and most versions do without

    module: Any = decompositions
    layer = module.one_layer_lstm

    def reshaping_layer(inputs: Tensor, hidden: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        outputs, states = layer(inputs, hidden, *args, **kwargs)
        hx, cx = (state.reshape(before.shape) for state, before in zip(states, hidden, strict=True))
        return outputs, (hx, cx)

    # torch's decomposition looks the function up in its module at every call.
    module.one_layer_lstm = reshaping_layer
