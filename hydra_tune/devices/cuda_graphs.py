"""Work of a GPU recorded as a CUDA graph. Knows nothing of what it is that is recorded.

Note: stream order. What is recorded runs twice before, on a stream of its own, so that libraries have chosen their kernels
and have the workspaces that they keep for this stream, which the graph uses from then on. That stream waits for what the
current one has been asked for, and the current one for it. A replay is launched on the current stream, in line with what is
before and after it there. Before a graph is given up the GPU is waited for, since a replay may be queued still.

Note: what is not allowed while a graph is recorded. The recording thread must not wait for the GPU, ask values of it, copy
from or to memory that is not pinned, or draw from a generator that the graph does not know: CUDA raises an error then, and
who records does without. Other threads go on (`thread_local`): copy threads wait for events of their own streams, and make
pinned memory.

Note: memory. What is allocated while recording lies in a pool of the graph's own, which nobody else is given memory of until
the graph is gone.
"""

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_WARM_UPS = 2


class CudaRecording:
    """A graph, as of `fusion.captures.Recording`.

    Args:
        graph: recorded.
        device: its GPU.
        outputs: what it writes.
        nbytes: of its pool.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, device: torch.device, outputs: Sequence[Tensor], nbytes: int
    ) -> None:
        self.outputs = outputs
        self.nbytes = nbytes
        self._graph = graph
        self._device = device

    def replay(self) -> None:
        """Launch it on the current stream."""
        self._graph.replay()

    def drop(self) -> None:
        """Give its memory back to the allocator."""
        torch.cuda.synchronize(self._device)
        self.outputs = ()
        self._graph.reset()


class CudaRecorder:
    """Records on the current GPU; one stream for each GPU and thread, for libraries keep workspaces by both."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}

    def record(self, run: Callable[[], Sequence[Tensor]]) -> CudaRecording:
        """Record what a function has the GPU do; it is run three times, of which the last is only recorded."""
        index = torch.cuda.current_device()
        device, stream = torch.device("cuda", index), self._stream(index)
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    run()
        finally:
            current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            before = torch.cuda.memory_reserved(device)
            outputs = run()
        nbytes = torch.cuda.memory_reserved(device) - before
        return CudaRecording(graph, device, outputs, max(0, nbytes))

    def _stream(self, index: int) -> torch.cuda.Stream:
        key = index, threading.get_ident()
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        return self._streams[key]
