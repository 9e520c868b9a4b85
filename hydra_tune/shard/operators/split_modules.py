"""`nn.Linear` and `nn.Embedding` with their weights in pieces, each piece a separate parameter.

The classes replace an operator that is too large for a device: the captured graph may be cut between two pieces. A module
changes its class and its parameters but stays the same object, so references to the module stay valid. `split_operators`
(`operator_splitting.py`) cuts the weights before the optimizer is built, and refuses unsuitable modules;
`SplitOperators.restore` in the same file gives a module its own class back. `operator_tree.py` chooses a `TensorCut`,
`shard/verify/elementwise_optimizers.py` joins optimizer state by a `TensorCut`, and messages of
`shard/partition/partitioner.py` name the classes.

Note: exactness. An element of a weight meets the same numbers as in the whole weight, so in exact arithmetic the gradients and
the outputs are the same. An embedding in columns only looks up and adds, and keeps the bits. A matrix product rounds
according to its kernel, which depends on the shape. The gradient of a Linear's input is a sum over the pieces and rounds
differently from a single product. See docs/explanation/exactness.md.

Source: Harmony (Li et al., 2021), section 3, whose Task Decomposer splits operations for several devices. Differs: the
pieces are fixed by the task, so that the trained parameters do not depend on the devices.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from hydra_tune.errors import TaskError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCut:
    """Cut of a tensor: dimension, and sizes of the pieces."""

    dim: int
    sizes: tuple[int, ...]


def piece_name(name: str, index: int) -> str:
    """Name of a piece of a parameter within its module."""
    return f"{name}_{index}"


class _SplitModule(nn.Module):
    """Base of the split classes below.

    Attributes:
        split_path: name of the module in the model.
        split_sizes: rows or columns of each piece of the weight.
    """

    split_path: str
    split_sizes: tuple[int, ...]

    def pieces(self, name: str) -> list[Tensor]:
        """Pieces of a parameter, in order."""
        return [getattr(self, piece_name(name, index)) for index in range(len(self.split_sizes))]

    def _refuse(self, name: str) -> NoReturn:
        raise TaskError(
            f"the step reads {name!r} of {self.split_path or 'the model'!r}, which split_operators has cut into "
            f"{len(self.split_sizes)} pieces, so the whole parameter does not exist during training; call the module instead, "
            "or remove the module from split_operators"
        )


class SplitLinear(_SplitModule, nn.Linear):
    """`nn.Linear` in pieces by output features."""

    # A property of the class hides the whole module's parameter of the same name.
    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Refuse to return a whole weight.

        Raises:
            TaskError: always.
        """
        self._refuse("weight")

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """None for a module without bias; otherwise refuse to return a whole bias.

        Raises:
            TaskError: the module has a bias.
        """
        return self._refuse("bias") if self.has_bias else None

    @property
    def has_bias(self) -> bool:
        """Whether the module has a bias."""
        return piece_name("bias", 0) in self._parameters

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear calls it, for callers by name
        """Concatenate the outputs of the pieces."""
        biases = self.pieces("bias") if self.has_bias else [None] * len(self.split_sizes)
        return torch.cat(
            [functional.linear(input, w, b) for w, b in zip(self.pieces("weight"), biases, strict=True)], dim=-1
        )

    def extra_repr(self) -> str:
        """As of `nn.Linear`, with the number of pieces."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}, "
            f"pieces={len(self.split_sizes)}"
        )


class _SplitEmbedding(_SplitModule, nn.Embedding):
    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Refuse to return a whole weight.

        Raises:
            TaskError: always.
        """
        self._refuse("weight")

    def extra_repr(self) -> str:
        """As of `nn.Embedding`, with the number of pieces."""
        return f"{super().extra_repr()}, pieces={len(self.split_sizes)}"


class ColumnSplitEmbedding(_SplitEmbedding):
    """`nn.Embedding` in pieces by columns: each index is looked up in every piece."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Concatenate the columns of the pieces."""
        columns = [
            functional.embedding(input, weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
            for weight in self.pieces("weight")
        ]
        return torch.cat(columns, dim=-1)


class RowSplitEmbedding(_SplitEmbedding):
    """`nn.Embedding` in pieces by rows, to match a tied Linear: each index lies in exactly one piece."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Look each index up in its piece.

        Indices below the range go to the first piece and indices above the range to the last piece, which raise the
        error of a whole embedding.
        """
        starts = list(accumulate(self.split_sizes, initial=0))
        first_weight, *later_weights = self.pieces("weight")
        result = self._found(input, first_weight, input < starts[1], 0)
        for index, weight in enumerate(later_weights, start=1):
            begun = input >= starts[index]
            is_here = begun if index == len(later_weights) else begun & (input < starts[index + 1])
            # Takes all indices from the piece's start on; the next pieces overwrite the indices behind the piece in
            # turn.
            result = torch.where(begun.unsqueeze(-1), self._found(input, weight, is_here, starts[index]), result)
        return result

    def _found(self, indices: Tensor, weight: Tensor, is_here: Tensor, start: int) -> Tensor:
        """Rows of a piece; for indices of other pieces the first row, which the caller discards."""
        padding = self.padding_idx
        if padding is not None:
            padding = padding - start if start <= padding < start + len(weight) else None
        return functional.embedding((indices - start).masked_fill(~is_here, 0), weight, padding)
