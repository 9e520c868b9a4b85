"""Undo of a unit after an out-of-memory error halfway, so the unit can run again and give the same bits.

`BatchUnits` (`batch_units.py`) enters a `UnitRollback` around each run of a shard's graph, and `OutOfMemoryHandler`
(`pool/devices/oom_retry.py`) runs the unit again.

Note: scope of the undo. A unit that runs a shard's graph keeps its inputs until all results exist: parameters, the
batch and values of other shards are only read, and sums of gradients go to new memory. The undo reverts the changes
that happen at once:

* The trial's random stream returns to its position before the unit.
* Overwritten buffers (BatchNorm's statistics) are restored from the forward unit's copies for the recompute, or else
  from copies made for the undo; a recompute overwrites copies only. Autograd's version of a buffer is restored with its
  bytes: a kept graph of another batch may have saved the buffer, and would refuse a buffer with a newer version.
  Restoring the version is sound, because BatchNorm's kernels overwrite the statistics without a new version, and do not
  read saved statistics in a backward.
* The `.grad` of parameters is reset, if autograd has set any; between units parameters have no gradient.
* Values put by the unit are dropped, and the replaced values, which still exist, return.
* Kept activations of the forward unit, used up by a backward, are dropped, so the repeated backward recomputes. The
  plan was verified to give the same bits either way. A forward unit with kept activations runs again without keeping
  any, and so do later steps: the pilot's estimate was too low.

Once all results exist, the sums of earlier batches are added to in place, values are dropped and gradients unscaled:
from then on nothing can be undone. The user's own code cannot be undone either, because the code may change anything;
nor can an optimizer's step, because only the optimizer knows the progress. Before any of this begins, while blocks are
loaded, nothing has changed.
"""

from contextlib import AbstractContextManager
from types import TracebackType

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from hydra_tune.memory.pressure import NotRepeatableError, is_out_of_memory
from hydra_tune.shard.execute.chain import ShardChain
from hydra_tune.shard.partition.subgraph import ShardGraph
from hydra_tune.train.rng.rng_streams import RandomStreams
from hydra_tune.train.state.block_store import BlockStore

OWN_CODE = "it runs the model's own code, which may have changed anything of its own"
_ENDING = "its results were being put away, and what it had been given was gone"


class UnitRollback:
    """Context of a unit that runs a shard's graph: entered inside the unit's lease and outside its random-stream contexts.

    Args:
        chain, store, streams: the batch's.
        is_first: whether the shard runs for the first time with the batch, so that its draws and buffers count.

    Raises:
        NotRepeatableError: on leaving, if memory has run out and the unit cannot be undone. Any other error passes
            unchanged.
    """

    def __init__(
        self,
        graph: ShardGraph,
        index: int,
        chain: ShardChain,
        store: BlockStore,
        streams: RandomStreams,
        *,
        is_first: bool,
        is_own_code: bool,
    ) -> None:
        self._graph = graph
        self._index = index
        self._chain = chain
        self._store = store
        self._streams = streams
        self._is_first = is_first
        self._is_own_code = is_own_code
        self._mark: object | None = None
        # On leaving, resets the buffers' versions to their values before the unit.
        self._versions: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        if self._is_own_code:
            return
        graph = self._graph
        # A recompute draws from a saved position and leaves the stream where it is.
        if self._is_first and graph.stochastic:
            self._mark = self._streams.mark()
        if self._is_first and graph.written_state:
            self._versions = _unsafe_preserve_version_counter(tuple(self._store.state(graph.written_state)))
        self._store.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if is_out_of_memory(error):
            if self._is_own_code:
                raise NotRepeatableError(OWN_CODE) from error
            if self._store.is_settled:
                raise NotRepeatableError(_ENDING) from error
            self._undo()

    def _undo(self) -> None:
        graph, store = self._graph, self._store
        if self._versions is not None:
            # The version goes back with the bytes: a graph that another batch has kept would refuse a newer version.
            with torch.no_grad(), self._versions:
                self._put_buffers_back()
        self._chain.let_go(self._index)
        if self._is_first and self._chain.has_forward(self._index):
            self._chain.recompute_from_now_on(self._index)
        store.take_back()
        for tensor in store.state(graph.state):
            tensor.grad = None
        if self._mark is not None:
            self._streams.go_back(self._mark)

    def _put_buffers_back(self) -> None:
        tensors = self._store.state(self._graph.written_state)
        for tensor, buffer_before in zip(tensors, self._chain.buffers_before(self._index), strict=True):
            if buffer_before is not None:
                tensor.copy_(buffer_before)
