"""The batches of a group's members as one, with the members in front."""

from collections.abc import Sequence
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

    Args:
        wanted: by member.
    """

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self._like = wanted[0].leaves
        self._wanted = wanted
        self._source: Source | None = None
        self._length = 1
        picks = [one.drawn for one in wanted if isinstance(one.drawn, Picks)]
        if len(picks) == len(wanted) and all(one.source.is_of(picks[0].source) for one in picks):
            self._source = picks[0].source
            self._length = min(_MOST, *(len(one) for one in picks))
            self._indices = torch.stack(
                [one.indices[: self._length] for one in picks], dim=1
            )  # (batches, members, samples)

    def __len__(self) -> int:
        return self._length

    def leaves(self, number: int = 0) -> Leaves:
        """One of them, stacked."""
        return replace(self._like, tensors=self._tensors(number), copies=())

    def _tensors(self, number: int) -> tuple[Tensor, ...]:
        if self._source is None:
            return tuple(torch.stack(same) for same in zip(*(one.tensors for one in self._wanted), strict=True))
        indices = self._indices[number]
        made = self._source.gather(indices.reshape(-1))
        return tuple(tensor.view(*indices.shape, *tensor.shape[1:]) for tensor in made)
