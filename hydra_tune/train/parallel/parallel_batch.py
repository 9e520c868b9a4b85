"""Batches of an optimizer step, drawn before earlier batches have run.

`PredrawnBatch` is the common part, and `ParallelBatch` a batch beside others. `OptimizerStep`
(`train/loop/optimizer_step.py`) makes either for each batch drawn ahead, and runs the batches together once enough are
drawn: batches of one device shard by shard (`batch_grouping.py`), and each `ParallelBatch` as a lane of a `ParallelStep`
(`parallel_step.py`, `pipeline_parallel.py`, `grouped_data_parallel.py`).

Note: order. The lanes run on several threads, but gradients are added strictly in the order of the batches, as in a plain
loop. Each batch has its own copy of the data and its own streams, and takes no lock, because at most one of its units runs
at a time. `check_draws` refuses a batch that has drawn another number of random numbers than expected.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hydra_tune.devices.device import Device
from hydra_tune.errors import HydraTuneError
from hydra_tune.memory.block import Block, BlockTensorView, TensorGeometry, whole_storage
from hydra_tune.memory.lease import Lease
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.pressure import not_repeatable
from hydra_tune.shard.capture.batch import BatchLeaves
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.execute.chain import earlier_gradient_key, parameter_gradient_key
from hydra_tune.train.loop.batch_units import PendingUnit
from hydra_tune.train.loop.gradient_rules import GradientProcessor
from hydra_tune.train.loop.training_batch import BatchPart, ShardUpdate, TrainingBatch
from hydra_tune.train.rng.rng_streams import RandomStreams
from hydra_tune.train.state.model_state import ModelState
from hydra_tune.train.state.replicas import ParameterReplicas


class PredrawnBatch(TrainingBatch):
    """A batch with a private copy of the data and a private random stream.

    Args:
        part: the batch; copied, because a loader may draw the next batch into the same memory.
        streams: the trial's streams at the position where the batch's draws begin.
        end: position of the units' stream after the batch's draws; None for a plan that draws nothing.
    """

    def __init__(
        self,
        part: BatchPart,
        state: ModelState,
        streams: RandomStreams,
        end: Tensor | None,
        device: Device,
        gradients: GradientProcessor,
    ) -> None:
        super().__init__(replace(part, leaves=_copied(part.leaves)), state, streams, device, gradients)
        self._end, self._device = end, device

    def check_draws(self) -> None:
        """Refuse a batch whose draws did not end where the draws of later batches began."""
        # Later batches may have drawn from positions beyond `end`, so a mismatch cannot be repaired.
        if self._end is not None and not torch.equal(self._streams.position(self._device), self._end):
            raise HydraTuneError(
                "a batch drew another number of random numbers than the batches before it, so batches drawn ahead would "
                "not be exact; please report this with the model"
            )


class ParallelBatch(PredrawnBatch):
    """A batch beside others: reads parameters on any device, and adds gradients to earlier sums in turn."""

    def __init__(
        self,
        part: BatchPart,
        state: ModelState,
        streams: RandomStreams,
        end: Tensor | None,
        device: Device,
        gradients: GradientProcessor,
        replicas: ParameterReplicas,
    ) -> None:
        super().__init__(part, state, streams, end, device, gradients)
        self._replicas = replicas
        # Whether the lane reads copies and leaves the trial's own parameters where they are.
        self.takes_copies = False

    def sums(self, earlier: Mapping[str, BlockTensorView]) -> Iterator[PendingUnit]:
        """Yield units to add the batch's gradients to the sums of all earlier batches, shard by shard."""
        # All sums first: `give_away` later hands them all on, also those of parameters that this batch does not use.
        self.take_in(dict(earlier))
        for update in self.updates():
            if any(name in earlier for name in update.names):
                yield self._sum_unit(update)

    def _sum_unit(self, update: ShardUpdate) -> PendingUnit:
        return self._unit("sum", update.index, partial(self._run_sum, update.names), shard=update.shard)

    def _run_sum(self, names: tuple[str, ...], device: Device, pager: Pager) -> float:
        del device
        keys = [key(name) for name in names for key in (parameter_gradient_key, earlier_gradient_key)]
        start = time.perf_counter()
        with (
            pager.lease(self._store.blocks(keys, (), ()), 0) as lease,
            GATE.shared(),
            not_repeatable("gradients were being summed in place"),
        ):
            waited_seconds = time.perf_counter() - start
            self._leased(lease, partial(self._add_earlier, names))
        return waited_seconds

    def _add_earlier(self, names: tuple[str, ...]) -> None:
        for name in names:
            self._chain.add_earlier(name)

    @contextmanager
    def _lease(self, pager: Pager, names: tuple[str, ...], blocks: list[Block], workspace: int) -> Iterator[Lease]:
        replica_lease = self._replicas.lease(pager, names, blocks, workspace, copies=self.takes_copies)
        with replica_lease as (lease, stand_ins):
            self._store.stand_ins = stand_ins
            try:
                yield lease
            finally:
                self._store.stand_ins = {}


def _copied(leaves: BatchLeaves) -> BatchLeaves:
    return replace(leaves, tensors=tuple(_copy(tensor) for tensor in leaves.tensors), copies=())


def _copy(tensor: Tensor) -> Tensor:
    """Return the tensor on a storage of its own, with the same layout."""
    flat = whole_storage(tensor.detach()).clone()
    return TensorGeometry.of(tensor).view(flat.untyped_storage(), flat.device)
