"""The batches of a group's members as one, with the members in front."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hydra_tune.fusion.member import Wanted
from hydra_tune.shard.batch import Leaves
from hydra_tune.train.gathering import Pick


def stacked(wanted: Sequence[Wanted]) -> Leaves:
    """Batches of one kind, stacked; those that members pick from the same data are one gather.

    Args:
        wanted: by member.
    """
    picks = [one.drawn for one in wanted if isinstance(one.drawn, Pick)]
    if len(picks) == len(wanted) and all(pick.source.is_of(picks[0].source) for pick in picks):
        tensors = _gathered(picks)
    else:
        tensors = tuple(torch.stack(same) for same in zip(*(one.tensors for one in wanted), strict=True))
    return replace(wanted[0].leaves, tensors=tensors, copies=())


def _gathered(picks: Sequence[Pick]) -> tuple[Tensor, ...]:
    indices = torch.cat([pick.indices for pick in picks])
    made = picks[0].source.gather(indices)
    return tuple(tensor.view(len(picks), picks[0].size, *tensor.shape[1:]) for tensor in made)
