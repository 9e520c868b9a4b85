"""The batches of a group's members as one, with the members in front."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hydra_tune.fusion.member import Wanted
from hydra_tune.shard.batch import Leaves
from hydra_tune.train.gathering import Picks, Source

_MOST = 16  # batches whose indices are stacked at once, for they take memory


class StackedBatches:
    """What members of a group want computed, of one kind: one batch of each after the other.

    Those that members pick from the same data are one gather, and only where all do there may be several.

    A smaller batch is padded with copies of its own first sample, which are as finite as that is; one more tensor says then how
    many samples of each member count.

    Args:
        wanted: by member.
        like: the largest kind of batch that there may be, where there are others; None: all are alike.
    """

    def __init__(self, wanted: Sequence[Wanted], like: Wanted | None = None) -> None:
        self._like = (wanted[0] if like is None else like).leaves
        self._samples = None if like is None else like.num_samples
        self._wanted = wanted
        self._source: Source | None = None
        self._length = 1
        picks = [one.drawn for one in wanted if isinstance(one.drawn, Picks)]
        if len(picks) == len(wanted) and all(one.source.is_of(picks[0].source) for one in picks):
            self._source = picks[0].source
            self._length = min(_MOST, *(len(one) for one in picks))
            self._indices = torch.stack(
                [self._padded(one.indices[: self._length], 1) for one in picks], dim=1
            )  # (batches, members, samples)

    def __len__(self) -> int:
        return self._length

    def leaves(self, number: int = 0) -> Leaves:
        """One of them, stacked."""
        tensors = self._tensors(number)
        if self._samples is not None:
            tensors = (*tensors, torch.tensor([one.num_samples for one in self._wanted], device="cpu"))
        return replace(self._like, tensors=tensors, copies=())

    def _padded(self, tensor: Tensor, dim: int) -> Tensor:
        """With as many copies of its first sample as are missing."""
        missing = 0 if self._samples is None else self._samples - tensor.size(dim)
        if not missing:
            return tensor
        first = tensor.narrow(dim, 0, 1)
        return torch.cat([tensor, first.expand(*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :])], dim)

    def _own(self, wanted: Wanted) -> Iterator[Tensor]:
        for tensor in wanted.tensors:
            has_samples = tensor.dim() > 0 and tensor.size(0) == wanted.num_samples
            yield self._padded(tensor, 0) if has_samples else tensor

    def _tensors(self, number: int) -> tuple[Tensor, ...]:
        if self._source is None:
            every = zip(*([*self._own(one)] for one in self._wanted), strict=True)
            return tuple(torch.stack(same) for same in every)
        indices = self._indices[number]
        made = self._source.gather(indices.reshape(-1))
        return tuple(tensor.view(*indices.shape, *tensor.shape[1:]) for tensor in made)
