"""Contents of tensors and arrays as small values, and writers that put contents back.

`ReachableValues` (`reachable_values.py`) makes the holders of tensors and arrays from these functions, and `cached_results.py`
reads `MAX_DATA_BYTES`. The functions take no lock: the callers of `state_guard.py` keep other trials away, or put back only
what no other trial reaches.
"""

import mmap
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from hydra_tune.shard.python_state.value_holder import Undo, Values, undo_by_element

MAX_DATA_BYTES = 64 << 10  # of a tensor or array of data: larger ones are samples, and no counters
_MAX_SAMPLED = 1024  # elements of a larger array, about, that are looked at
_MAX_KEPT_BYTES = 64 << 20  # of a tensor whose contents are put back


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's storage, from the first byte to behind the last; (0, 0) if there is none."""
    if tensor.layout is not torch.strided or tensor.is_meta or isinstance(tensor, FakeTensor) or is_lazy(tensor):
        return (0, 0)
    storage = tensor.untyped_storage()
    return (storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def writers_of(tensor: Tensor) -> tuple[Callable[[Values], None], Callable[[], Undo] | None]:
    """Return what puts the present contents and gradient back, as `write` and `undo` of a `ValueHolder`.

    Of a tensor above `_MAX_KEPT_BYTES`, `write` puts back no contents, only which tensor is the gradient, and there is no
    `undo`.
    """
    gradient = tensor.grad if tensor.requires_grad and tensor.is_leaf else None
    is_small = tensor.nbytes <= _MAX_KEPT_BYTES
    alias = tensor.detach()
    before = alias.clone() if is_small else None
    gradient_before = gradient.detach().clone() if is_small and gradient is not None else None

    def write(_: Values) -> None:
        # Under a capture, `tensor.data = ...` leaves the tensor on the memory of a fake tensor, which has no bytes.
        if tensor.is_meta:
            tensor.data = alias
        if before is not None:
            with torch.no_grad():
                tensor.copy_(before)
        if tensor.grad is not gradient:
            tensor.grad = gradient
        if gradient is not None and gradient_before is not None:
            gradient.detach().copy_(gradient_before)

    return write, None if before is None else undo_by_element(tensor.detach(), before, write)


def facts_of(tensor: Tensor, *, by_contents: bool) -> list[Any]:
    """Return the contents of a tensor and of its gradient, as small values, and the facts that code may ask for."""
    gradient = tensor.grad if tensor.requires_grad and tensor.is_leaf else None
    return [
        _digest_of(tensor, by_contents=by_contents),
        None if gradient is None else _digest_of(gradient, by_contents=by_contents),
        (*tensor.shape, *tensor.stride(), tensor.requires_grad),
        tensor.dtype,
    ]


def _digest_of(tensor: Tensor, *, by_contents: bool) -> int | tuple[int, int]:
    """Return a checksum of the contents, or the version and the address."""
    if not by_contents:
        return tensor._version, tensor.data_ptr()  # noqa: SLF001 - the address shows an assignment to `.data`
    # By contents: numpy and `.data` change a tensor without a new version.
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return zlib.crc32(plain.flatten().view(torch.uint8).numpy().data)


def is_mapped(array: Any) -> bool:
    """Whether an array is, or is a view of, a file mapped into memory."""
    while array is not None:
        if isinstance(array, mmap.mmap):
            return True
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)
    return False


def sampled(array: Any) -> tuple[Any, ...]:
    """Return the facts of a large array, and a checksum of some elements, in which a change of the whole array shows."""
    places = range(0, array.size, max(array.size // _MAX_SAMPLED, 1))
    return array.shape, array.dtype.str, zlib.crc32(array.flat[list(places)].tobytes())


def sampled_bytes(value: Any) -> tuple[int, int]:
    """Return the size of an object's large buffer, and a checksum of some bytes, in which a change of the whole shows."""
    try:
        with memoryview(value) as view, view.cast("B") as content:
            return content.nbytes, zlib.crc32(content[:: max(content.nbytes // _MAX_SAMPLED, 1)].tobytes())
    except (TypeError, ValueError):  # a slice with a step, or a format of ctypes
        whole = memoryview(value).tobytes()
        return len(whole), zlib.crc32(whole)
