"""Work of a GPU recorded as a CUDA graph. Knows nothing of what it is that is recorded.

Note: stream order. What is recorded runs twice before, on a stream that nothing else runs on, so that libraries have chosen
their kernels and have the workspaces that they keep for this stream, which the graph uses from then on. That stream waits for
what the current one has been asked for, and the current one for it. It is taken from the streams of high priority, for torch
gives its few streams out again and again: another of the ordinary ones might be one that copies run on, and a copy that is
asked for while its stream is recorded becomes part of the graph. (The graph's kernels keep that priority.) A replay is
launched on the current stream, in line with what is before and after it there. Before a graph is given up that stream is
waited for, since a replay may be queued still.

Note: what is not allowed while a graph is recorded. The recording thread must not wait for the GPU, ask values of it, copy
from or to memory that is not pinned, or draw from a generator that the graph does not know: CUDA raises an error then, and
who records does without. Other threads go on (`thread_local`): copy threads wait for events of their own streams, and make
pinned memory. But nobody may empty the caching allocator meanwhile, or wait for the whole GPU (`exclusive_allocator`), nor
draw from its default generator, which counts what the graph draws as long as one is recorded; so it is the recording
thread's turn with that. A replay moves the generator on as well, and has its turn. Whoever records or replays within a unit
has taken that turn before the capture gate (`fusion/steps.py`), as whoever draws has.

Note: what fails. Torch ends a recording that has failed with an error before it has told anybody: the capture's stream stays
the current one, all allocations go on as if a graph were recorded, so that memory is never given back, and nobody can draw
from the default generator. So here a recording is ended step by step, and after a failure each of these is set right; the last
by another recording, of nothing that counts, for nothing else tells the generator that none is under way.

Note: memory. What is allocated while recording lies in a pool of the graph's own, which nobody else is given memory of until
the graph is gone.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from hydra_tune.devices.cuda import CudaGenerator, exclusive_allocator

_WARM_UPS = 2
_MODE = "thread_local"
_HIGH = -1  # priority of a stream

_STREAMS: dict[int, torch.cuda.Stream] = {}  # of each GPU, to record on
_MAKING = threading.Lock()
_FAILED: list[torch.cuda.CUDAGraph] = []  # the allocator's and the generator's notes of them point there for ever


class CudaRecording:
    """A graph, as of `fusion.captures.Recording`.

    Args:
        graph: recorded.
        stream: that it is replayed on.
        outputs: what it writes.
        nbytes: of its pool.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, outputs: Sequence[Tensor], nbytes: int
    ) -> None:
        self.outputs = outputs
        self.nbytes = nbytes
        self._graph = graph
        self._stream = stream

    def replay(self) -> None:
        """Launch it on the stream that was current when it was recorded; that has to be current still."""
        with CudaGenerator(self._stream.device).in_turn():  # which each replay moves on, if only by nothing
            self._graph.replay()

    def drop(self) -> None:
        """Give its memory back to the allocator."""
        self._stream.synchronize()
        self.outputs = ()
        self._graph.reset()


class CudaRecorder:
    """Records on the current GPU; one recording at a time in a process."""

    def record(self, run: Callable[[], Sequence[Tensor]]) -> CudaRecording:
        """Record what a function has the GPU do; it is run three times, of which the last is only recorded.

        Args:
            run: returns what it writes.

        Raises:
            Exception: what it does cannot be recorded; everything else goes on as before.
        """
        index = torch.cuda.current_device()
        device, stream = torch.device("cuda", index), _stream(index)
        current = torch.cuda.current_stream(device)
        # The turn first: who draws has it already, and would wait for who records and waits for it.
        with CudaGenerator(device).in_turn(), exclusive_allocator():
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    for _ in range(_WARM_UPS):
                        run()
            finally:
                current.wait_stream(stream)
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # while it is recorded nothing can be given back for want of memory
            before = torch.cuda.memory_reserved(device)
            graph = torch.cuda.CUDAGraph()
            outputs = _captured(graph, index, stream, run)
            nbytes = torch.cuda.memory_reserved(device) - before
        return CudaRecording(graph, current, outputs, max(0, nbytes))


def _stream(index: int) -> torch.cuda.Stream:
    with _MAKING:
        if index not in _STREAMS:
            _STREAMS[index] = torch.cuda.Stream(index, priority=_HIGH)  # type: ignore[no-untyped-call]
        return _STREAMS[index]


def _captured(
    graph: torch.cuda.CUDAGraph, index: int, stream: torch.cuda.Stream, run: Callable[[], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """Have a graph record what a function does on a stream."""
    pool = torch.cuda.graph_pool_handle()
    with torch.cuda.stream(stream):
        try:
            graph.capture_begin(pool=pool, capture_error_mode=_MODE)
            outputs = run()
            graph.capture_end()
        except BaseException:
            _abandon(graph, index, pool)
            _end_of_drawing(index)
            raise
    return outputs


def _abandon(graph: torch.cuda.CUDAGraph, index: int, pool: tuple[int, int]) -> None:
    """End a recording that has failed, and have the allocator know that it has ended."""
    _FAILED.append(graph)
    with suppress(RuntimeError):
        graph.capture_end()
    try:
        torch._C._cuda_endAllocateToPool(index, pool)  # noqa: SLF001 - there is no public way, and torch's own use this
    except RuntimeError:
        pass  # the recording has been ended in order: what failed came before or after it
    else:
        with suppress(RuntimeError):
            torch._C._cuda_releasePool(index, pool)  # noqa: SLF001
    graph.reset()


def _end_of_drawing(index: int) -> None:
    """Have the default generator know that nothing is recorded: what tells it is the end of a recording that succeeds."""
    other = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    try:
        other.capture_begin(pool=pool, capture_error_mode=_MODE)
        torch.zeros(1, device=torch.device("cuda", index))
        other.capture_end()
        other.reset()
    except RuntimeError:  # the GPU is lost, or has no memory; whoever draws next hears of it
        _abandon(other, index, pool)
