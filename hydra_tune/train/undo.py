"""Undoing a unit that has run out of memory in the middle, so that it can be run once more and gives the same bits.

Note: what a unit has changed by then. A unit that runs a shard's graph keeps what it was given until it has all its results:
parameters, the batch and values of other shards are only read, sums of gradients are made in memory of their own. What it does
change at once is put back here:

* the trial's random stream, which stands where it stood before the unit;
* buffers that it overwrites (BatchNorm's statistics), from what a forward unit saves for the recompute anyway, or else from a
  copy made for this; a recompute overwrites copies. Autograd's version of a buffer goes back with its bytes: another batch may
  have kept a graph that has saved it (BatchNorm's kernels overwrite their statistics without a new version, and do not read the
  saved ones in a backward), and would refuse the buffer that was written to once more;
* the `.grad` of parameters, where autograd had got so far; between units they have none;
* values that it has put, which go again, and what they were put in place of, which is still there;
* what its forward unit has kept, which a backward uses up: it goes, and the backward that is run again recomputes. The plan was
  checked to give the same bits either way. A forward unit that kept its activations does without when it is run again, and so
  do later steps: what the pilot has found of it was too little.

When all results are there the earlier batches' sums are added to in place, values are dropped, gradients unscaled: from then on
nothing can be undone. Nor can the user's own code be, which may change anything of its own, nor an optimizer's step, of which
nobody but the optimizer knows how far it has got. Before these have begun, while blocks are loaded, nothing has changed.
"""

from contextlib import AbstractContextManager
from types import TracebackType

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from hydra_tune.memory.pressure import NotRepeatableError, is_out_of_memory
from hydra_tune.shard.chain import Chain
from hydra_tune.shard.split import ShardGraph
from hydra_tune.train.store import BlockStore
from hydra_tune.train.streams import RandomStreams

OWN_CODE = "it runs the model's own code, which may have changed anything of its own"
_ENDING = "its results were being put away, and what it had been given was gone"


class Undo:
    """Around a unit that runs a shard's graph, inside its lease and outside of all that its random numbers need.

    Args:
        graph: what it runs.
        index: of the shard.
        chain, store, streams: the batch's.
        is_first: whether the shard is run for the first time, so that its draws and buffers count.
        is_own_code: whether it runs the user's own code.

    Raises:
        NotRepeatableError: on leaving, if memory has run out and the unit cannot be undone. Any other error is as it was.
    """

    def __init__(
        self,
        graph: ShardGraph,
        index: int,
        chain: Chain,
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
        self._versions: AbstractContextManager[None] | None = (
            None  # gives the buffers the versions they had before the unit
        )

    def __enter__(self) -> None:
        if self._is_own_code:
            return
        graph = self._graph
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
        for tensor, before in zip(tensors, self._chain.buffers_before(self._index), strict=True):
            if before is not None:
                tensor.copy_(before)
