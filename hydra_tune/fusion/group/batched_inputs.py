"""`StackedBatches`: the batches of a group's members as a single batch, with the members in front.

`GroupExecutor` (`group_executor.py`) stacks the members' next batches before each step, round or evaluated batch, and
during a round whenever the stacked batches are used up. Rounds (`multi_step_unit.py`, `fusion/runtime/planned_unit.py`) take
the stacked batches one by one. The module must not know plans or devices: the tensors are on the host.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hydra_tune.fusion.group.member import MemberBatchRequest
from hydra_tune.shard.capture.batch import BatchLeaves
from hydra_tune.train.data.index_gather import GatherSource, UngatheredBatches

_MOST = 16  # limit on batches stacked at once, since their indices take memory


class StackedBatches:
    """Batches of the same kind for all members: successive stacked batches, each with a batch of every member.

    If all members pick from the same data, a stacked batch is a single gather, and up to `_MOST` batches follow each
    other. Otherwise there is a single stacked batch.

    A smaller batch is padded with copies of its own first sample, so the padding is as finite as the real samples. An
    additional tensor then holds the number of samples that count for every member.

    Args:
        like: the largest kind of batch, if sizes differ; None: all batches have the same size.
        inputs: by slot, the inputs that Python computes from the members' numbers; empty if there are none.
    """

    def __init__(
        self,
        wanted: Sequence[MemberBatchRequest],
        like: MemberBatchRequest | None = None,
        inputs: Sequence[Sequence[float]] = (),
    ) -> None:
        # One storage each: a tensor goes to a device with all of its storage.
        self._inputs = [torch.tensor(values, dtype=torch.float64, device="cpu") for values in zip(*inputs, strict=True)]
        self._like = (wanted[0] if like is None else like).leaves
        self._samples = None if like is None else like.num_samples
        self._wanted = wanted
        self._source: GatherSource | None = None
        self._length = 1
        picks = [one.drawn for one in wanted if isinstance(one.drawn, UngatheredBatches)]
        if len(picks) == len(wanted) and all(one.source.is_of(picks[0].source) for one in picks):
            self._source = picks[0].source
            self._length = min(_MOST, *(len(one) for one in picks))
            # Shaped (batches, members, samples): an entry for each stacked batch.
            self._indices = torch.stack([self._padded(one.indices[: self._length], 1) for one in picks], dim=1)

    def __len__(self) -> int:
        return self._length

    def leaves(self, number: int = 0) -> BatchLeaves:
        """Return a stacked batch by its number."""
        tensors = (*self._tensors(number), *self._inputs)
        if self._samples is not None:
            tensors = (*tensors, torch.tensor([request.num_samples for request in self._wanted], device="cpu"))
        return replace(self._like, tensors=tensors, copies=())

    def _padded(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the tensor padded with copies of its first sample to the full number of samples."""
        num_missing = 0 if self._samples is None else self._samples - tensor.size(dim)
        if not num_missing:
            return tensor
        first_sample = tensor.narrow(dim, 0, 1)
        return torch.cat([tensor, first_sample.expand(*tensor.shape[:dim], num_missing, *tensor.shape[dim + 1 :])], dim)

    def _own(self, wanted: MemberBatchRequest) -> Iterator[Tensor]:
        for tensor in replace(wanted, places=()).tensors:
            # A batch may also hold tensors without samples, such as class weights, which must not be padded.
            has_samples = tensor.dim() > 0 and tensor.size(0) == wanted.num_samples
            yield self._padded(tensor, 0) if has_samples else tensor

    def _tensors(self, number: int) -> tuple[Tensor, ...]:
        if self._source is None:
            every = zip(*([*self._own(request)] for request in self._wanted), strict=True)
            return tuple(torch.stack(parts) for parts in every)
        indices = self._indices[number]
        # A single gather over all members writes the samples straight
        # into their slot, without a copy per member.
        tensors = self._source.gather(indices.reshape(-1))
        return tuple(tensor.view(*indices.shape, *tensor.shape[1:]) for tensor in tensors)
