"""Treat stacked tensors that are contiguous in memory as a single tensor: few large operators replace many small ones.

The parameters of a shard lie in a common buffer (`memory/block.py`). The tensors of its optimizer state lie likewise.
Contiguity is read off the addresses at every step, because blocks move. Operators compute on the gaps too, and values
in the gaps mean nothing. `BatchedOptimizer` (`batched_optimizer.py`) forms such tensors when a group steps, and
`update_kernels.py` computes on such tensors. `joint_graph.py` lays the gradients of a traced step out in the same way,
and `planner/trace/optimizer_graph.py` traces updates of such tensors. The module must not know groups, trials or plans.

Note: two allocations may be neighbours by chance, so a flat tensor must never reach beyond a single storage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_ELEMENTS = 1 << 20
"""Most elements of a flat tensor without its gaps, except for larger single tensors: a step makes temporaries of its size."""

_torch: Any = torch  # torch types its list functions for some kinds of lists only

Numbers = float | Sequence[Tensor]
"""Operand for a `FlatTensor`: a number, or a tensor for each part that broadcasts to the part."""

_ALIGNMENT_BYTES = {"cpu": 64, "cuda": 512}
"""Multiples at which a block's tensors lie (`Device.alignment`): a smaller gap is padding, any other gap may hold a tensor."""


@dataclass(slots=True)
class FlatTensor:
    """Tensors that lie contiguously in memory.

    Attributes:
        whole: one-dimensional view of all tensors and the gaps between.
    """

    whole: Tensor
    parts: Sequence[Tensor]

    def mul_(self, numbers: Numbers) -> None:
        """Multiply by numbers."""
        if isinstance(numbers, float):
            if numbers != 1.0:
                self.whole.mul_(numbers)
        else:
            _torch._foreach_mul_(self.parts, numbers)

    def add_(self, numbers: Numbers) -> None:
        """Add numbers."""
        if isinstance(numbers, float):
            self.whole.add_(numbers)
        else:
            _torch._foreach_add_(self.parts, numbers)

    def product_(self, other: "FlatTensor", numbers: Numbers) -> None:
        """Overwrite with another's values, each multiplied by its number."""
        if isinstance(numbers, float):
            torch.mul(other.whole, numbers, out=self.whole)
            return
        for part, source, number in zip(self.parts, other.parts, numbers, strict=True):
            torch.mul(source, number, out=part)

    def add_product_(self, other: "FlatTensor", numbers: Numbers) -> None:
        """Add another's values, each multiplied by its number."""
        if isinstance(numbers, float):
            self.whole.add_(other.whole, alpha=numbers)
        else:
            _torch._foreach_addcmul_(self.parts, other.parts, numbers)

    def lerp_(self, other: "FlatTensor", numbers: Numbers) -> None:
        """Interpolate towards another's values by the given weights."""
        if isinstance(numbers, float):
            self.whole.lerp_(other.whole, numbers)
        else:
            _torch._foreach_lerp_(self.parts, other.parts, numbers)

    def average_square_(self, other: "FlatTensor", kept: Numbers, added: Numbers) -> None:
        """Scale by `kept`, and add another's squares scaled by `added`."""
        self.mul_(kept)
        if isinstance(added, float):
            self.whole.addcmul_(other.whole, other.whole, value=added)
            return
        # `addcmul` takes two factors; the squares and their numbers are three.
        squares = _torch._foreach_mul(other.parts, other.parts)  # noqa: SLF001
        _torch._foreach_addcmul_(self.parts, squares, added)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Memory layout of tensors of the same dtype, relative to the first tensor, in elements."""

    offsets: tuple[int, ...]
    size: int
    geometry: tuple[tuple[torch.Size, tuple[int, ...]], ...]

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Return views of a one-dimensional tensor in the layout."""
        start = whole.storage_offset()
        return [
            whole.as_strided(shape, stride, start + offset)
            for offset, (shape, stride) in zip(self.offsets, self.geometry, strict=True)
        ]

    def new(self, like: Tensor) -> FlatTensor:
        """Return zeros in the layout, on the device of `like`."""
        whole = like.new_zeros(self.size)
        return FlatTensor(whole, self.parts(whole))

    def room(self, like: Tensor) -> FlatTensor:
        """Return tensors in the layout to be overwritten; the gaps are zeros."""
        if like.device.type != "cpu":  # a GPU fills the whole faster than the host asks for each gap
            whole = like.new_zeros(self.size)
            return FlatTensor(whole, self.parts(whole))
        whole = like.new_empty(self.size)
        end = 0
        for offset, (shape, _) in zip(self.offsets, self.geometry, strict=True):
            if offset > end:
                # Operators compute on the gaps too, and leftover bytes may be NaN, infinite or denormal.
                whole[end:offset].zero_()
            end = offset + shape.numel()
        return FlatTensor(whole, self.parts(whole))

    def gathered(self, tensors: Sequence[Tensor]) -> FlatTensor:
        """Return the tensors themselves if they fill a buffer in the layout; otherwise return copies in the layout."""
        # The caller overwrites the result, gaps included, so tensors that share a buffer with others are copied.
        if self._is_whole(tensors):
            flat_tensor = self.found(tensors)
            if flat_tensor is not None:
                return flat_tensor
        copies = self.room(tensors[0])
        _torch._foreach_copy_(copies.parts, tensors)
        return copies

    def found(self, tensors: Sequence[Tensor]) -> FlatTensor | None:
        """Return tensors of matching shapes and strides as a single tensor; None if they do not lie in the layout."""
        first = tensors[0]
        size, start = first.element_size(), first.data_ptr()
        for tensor, offset in zip(tensors, self.offsets, strict=True):
            if tensor.data_ptr() != start + offset * size:
                return None
        if first.storage_offset() + self.size > first.untyped_storage().nbytes() // size:
            return None  # neighbours in memory by chance, in different buffers
        return FlatTensor(first.detach().as_strided((self.size,), (1,)), tensors)

    def _is_whole(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors fill a buffer of their own, so that the gaps belong to no other tensor."""
        first = tensors[0]
        is_own = first.untyped_storage().nbytes() == self.size * first.element_size() and not first.storage_offset()
        return is_own and self.fits(tensors)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors have the shapes and strides of the layout."""
        return all(
            (tensor.shape, tensor.stride()) == geometry for tensor, geometry in zip(tensors, self.geometry, strict=True)
        )


def runs(tensors: Sequence[tuple[Tensor, Any]]) -> list[tuple[FlatLayout, list[tuple[Tensor, Any]]]]:
    """Group dense tensors of one dtype, each with any data, that lie contiguously; return layout and entries of each group."""
    groups: list[list[tuple[Tensor, Any]]] = []
    end, size = 0, 0
    for entry in sorted(tensors, key=lambda pair: pair[0].data_ptr()):
        tensor = entry[0]
        gap = tensor.data_ptr() - end
        is_padding = 0 <= gap < _ALIGNMENT_BYTES.get(tensor.device.type, 1)
        follows = bool(groups) and is_padding and size + tensor.numel() <= MAX_ELEMENTS
        # Separate allocations can be neighbours by chance, so compare storages as well as addresses.
        if follows and groups[-1][0][0].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            groups[-1].append(entry)
            size += tensor.numel()
        else:
            groups.append([entry])
            size = tensor.numel()
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return [(_layout([tensor for tensor, _ in run]), run) for run in groups]


def _layout(tensors: Sequence[Tensor]) -> FlatLayout:
    start, size = tensors[0].data_ptr(), tensors[0].element_size()
    offsets = tuple((tensor.data_ptr() - start) // size for tensor in tensors)
    return FlatLayout(
        offsets=offsets,
        size=offsets[-1] + tensors[-1].numel(),
        geometry=tuple((tensor.shape, tensor.stride()) for tensor in tensors),
    )
