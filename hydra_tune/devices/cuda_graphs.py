"""Recording of GPU work as a CUDA graph, independent of the recorded work.

`GroupCaptureCache` (`fusion/compile/cuda_graph_steps.py`) records a group's traced step once the state of the group
keeps its addresses, and replays the recording at later steps; `GroupTrial` (`fusion/group/group_trial.py`) makes the
recorder. The module must not know blocks, models or trials.

Note: stream order. Before the recording, the work runs twice on a stream used for recordings alone, one for each GPU. In
these runs, libraries choose their kernels and allocate the workspaces that they keep for the stream; the graph uses the
same workspaces. The recording stream waits for all work requested on the current stream, and the current stream then waits
for the recording stream. The recording stream is a high-priority stream, because torch reuses its few streams: an ordinary
stream might be the same as a copy stream, and a copy requested during the recording would become part of the graph. A
replay runs on the current stream, in order with the work before and after.

Note: restrictions during a recording. The recording thread must not wait for the GPU, read values from the GPU, copy
from or to unpinned memory, or draw from a generator unknown to the graph. CUDA raises an error in these cases, and the
caller does without a graph. Other threads continue (`thread_local`): copy threads wait for events of their own streams,
and allocate pinned memory. During a recording, no thread may empty the caching allocator or wait for the whole GPU
(`exclusive_allocator`). Nor may another thread draw from the GPU's default generator, which counts the graph's draws
during a recording, so the recording thread holds the generator's turn. A replay advances the generator, too, and holds
the turn. A thread that records or replays within a unit takes the turn before the capture gate
(`fusion/group/group_step.py`), like every thread that draws.

Note: failures. If a recording fails, torch ends the recording with an error before telling its other components about
the end: the capture's stream stays current, all allocations continue as if a graph were being recorded, so memory is
never given back, and no thread can draw from the default generator. Therefore the recording is ended step by step here,
and a failure is followed by the repair of each of these states. The generator needs another, empty recording, because
only a successful recording tells the generator that none is under way.

Note: memory. Allocations during a recording lie in a pool of the graph's own until the graph is dropped.
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

_STREAMS: dict[int, torch.cuda.Stream] = {}  # by GPU: the stream for recordings
_MAKING = threading.Lock()
_FAILED: list[torch.cuda.CUDAGraph] = []  # kept alive: allocator and generator keep pointers to failed graphs for ever


class CudaRecording:
    """A recorded graph.

    Attributes:
        outputs: tensors that the graph writes.
        nbytes: bytes that the GPU's allocator reserved during the recording, as the size of the graph's memory pool.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, outputs: Sequence[Tensor], nbytes: int
    ) -> None:
        self.outputs = outputs
        self.nbytes = nbytes
        self._graph = graph
        self._stream = stream

    def replay(self) -> None:
        """Launch the graph on the stream that was current at the recording, and has to be current now."""
        # In turn, because every replay advances the generator, possibly by zero draws.
        with CudaGenerator(self._stream.device).in_turn():
            self._graph.replay()

    def drop(self) -> None:
        """Give the graph's memory back to the allocator."""
        # A replay may still be queued, and the allocator would give the graph's memory to others.
        self._stream.synchronize()
        self.outputs = ()
        self._graph.reset()


class CudaRecorder:
    """Records on the current GPU; one recording at a time in a process."""

    def record(self, run: Callable[[], Sequence[Tensor]]) -> CudaRecording:
        """Record the GPU work of a function, which is called three times; the third call is recorded, not executed.

        The function returns the tensors that the work writes.

        Raises:
            Exception: the work cannot be recorded; everything else continues as before.
        """
        index = torch.cuda.current_device()
        device, stream = torch.device("cuda", index), _stream(index)
        current = torch.cuda.current_stream(device)
        # Lock order: a thread that draws already holds the turn. With the locks in the other order, such a thread and a
        # recording thread would wait for each other.
        with CudaGenerator(device).in_turn(), exclusive_allocator():
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    for _ in range(_WARM_UPS):
                        run()
            finally:
                current.wait_stream(stream)
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # during the recording, the allocator cannot free cached memory on demand
            reserved_before = torch.cuda.memory_reserved(device)
            graph = torch.cuda.CUDAGraph()
            outputs = _captured(graph, index, stream, run)
            nbytes = torch.cuda.memory_reserved(device) - reserved_before
        return CudaRecording(graph, current, outputs, max(0, nbytes))


def _stream(index: int) -> torch.cuda.Stream:
    with _MAKING:
        if index not in _STREAMS:
            _STREAMS[index] = torch.cuda.Stream(index, priority=_HIGH)  # type: ignore[no-untyped-call]
        return _STREAMS[index]


def _captured(
    graph: torch.cuda.CUDAGraph, index: int, stream: torch.cuda.Stream, run: Callable[[], Sequence[Tensor]]
) -> Sequence[Tensor]:
    # An explicit pool, so that `_abandon` can name the pool to the allocator.
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
    """End a failed recording, and tell the allocator about the end."""
    _FAILED.append(graph)
    with suppress(RuntimeError):
        graph.capture_end()
    try:
        torch._C._cuda_endAllocateToPool(index, pool)  # noqa: SLF001 - there is no public way, and torch's own use this
    except RuntimeError:
        pass  # the recording had ended properly: the failure came before or after
    else:
        with suppress(RuntimeError):
            torch._C._cuda_releasePool(index, pool)  # noqa: SLF001
    graph.reset()


def _end_of_drawing(index: int) -> None:
    """Tell the default generator that no recording is under way, by a further recording that succeeds."""
    empty_graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    try:
        empty_graph.capture_begin(pool=pool, capture_error_mode=_MODE)
        torch.zeros(1, device=torch.device("cuda", index))
        empty_graph.capture_end()
        empty_graph.reset()
    except RuntimeError:  # the GPU is lost or out of memory; the next draw raises the error
        _abandon(empty_graph, index, pool)
