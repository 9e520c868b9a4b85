"""What is left behind by recordings, those that fail above all. Stood in for by what torch's sources say of its interface.

There (`CUDAGraph.cpp`, `CUDACachingAllocator.cpp`, `CUDAGeneratorImpl.cpp`): `capture_end` raises before it has told allocator
or generator that a capture has ended, where the capture was spoilt; the allocator cannot be emptied while one is under way; and
a generator that takes part in one is not drawn from outside it.
"""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from hydra_tune.devices import cuda_graphs
from hydra_tune.devices.cuda import CudaGenerator, exclusive_allocator

FIRST = torch.device("cuda", 0)


class Stream:
    def __init__(self, gpu, index=0, priority=0):
        self.gpu, self.priority, self.waited, self.device = gpu, priority, [], FIRST

    def wait_stream(self, other):
        self.waited.append(other)

    def synchronize(self):
        self.gpu.notes.append(("waited for", self))


class Graph:
    def __init__(self, gpu):
        self.gpu, self.pool, self.has_ended = gpu, None, False

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        assert self.gpu.current.priority < 0, "a stream of its own"
        self.gpu.tell()
        self.pool, self.gpu.capturing = pool, "recorded"
        self.gpu.underway.add(pool)
        self.gpu.generator_captures = True

    def capture_end(self):
        state, self.gpu.capturing = self.gpu.capturing, None
        if state != "recorded":
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.gpu.underway.remove(self.pool)
        self.gpu.generator_captures = False
        self.has_ended = True

    def replay(self):
        assert self.has_ended
        assert held_by_others(CudaGenerator(FIRST).in_turn()), "the generator is moved on"
        self.gpu.notes.append(("replayed on", self.gpu.current))

    def reset(self):
        if self.has_ended:
            self.gpu.release(0, self.pool)
            self.has_ended = False


class Gpu:
    """As much of `torch` as recording touches."""

    def __init__(self):
        self.compute = self.current = Stream(self)
        self.capturing, self.underway, self.generator_captures = None, set(), False
        self.pools, self.released, self.notes = 0, [], []
        self.error = None  # of work that it has been asked for
        self.device, self.Tensor = torch.device, torch.Tensor
        self._C = SimpleNamespace(_cuda_endAllocateToPool=self.end_allocating, _cuda_releasePool=self.release)
        self.cuda = SimpleNamespace(
            CUDAGraph=lambda: Graph(self),
            Stream=lambda index, priority: Stream(self, index, priority),
            current_device=lambda: 0,
            current_stream=lambda _device: self.current,
            stream=self.stream,
            synchronize=self.synchronize,
            empty_cache=self.at_once,
            memory_reserved=lambda _device: 100 * self.pools,
            graph_pool_handle=self.pool,
        )

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def at_once(self):
        assert not self.underway, "captures_underway.empty() INTERNAL ASSERT FAILED"

    def synchronize(self, _device):
        self.at_once()
        self.tell()

    def tell(self):
        """It tells of an error when it is waited for, or asked for more."""
        if self.error is not None:
            raise self.error

    def pool(self):
        self.pools += 1
        return (0, self.pools)

    def end_allocating(self, _index, pool):
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, _index, pool):
        assert pool not in self.released
        self.released.append(pool)

    def zeros(self, *_size, device):
        assert device == FIRST

    def wait(self):
        """What must not be done while recording."""
        if self.capturing:
            self.capturing = "spoilt"
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def draw(self):
        assert not self.generator_captures, "Offset increment outside graph capture encountered unexpectedly."


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    monkeypatch.setattr(cuda_graphs, "torch", made)
    monkeypatch.setattr(cuda_graphs, "_STREAMS", {})
    monkeypatch.setattr(cuda_graphs, "_FAILED", [])
    return made


def assert_as_before(gpu):
    assert gpu.current is gpu.compute, "the thread computes where it has computed"
    gpu.at_once()
    gpu.draw()
    assert not held_by_others(exclusive_allocator())
    assert not held_by_others(CudaGenerator(FIRST).in_turn())


def held_by_others(lock):
    """Whether another thread would have to wait."""
    found = []

    def look():
        got = lock.acquire(blocking=False)
        found.append(not got)
        if got:
            lock.release()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def test_what_is_recorded_runs_on_a_stream_of_its_own_in_line_with_the_others(gpu):
    runs = []

    def run():
        runs.append((gpu.current, gpu.capturing))
        assert gpu.current.waited[0] is gpu.compute
        return [len(runs)]

    recording = cuda_graphs.CudaRecorder().record(run)
    own = runs[0][0]
    assert runs == [(own, None), (own, None), (own, "recorded")]
    assert own is not gpu.compute
    assert gpu.compute.waited == [own], "what comes later waits for the runs before the recording"
    assert recording.outputs == [3]
    assert recording.nbytes == 100, "what its pool has taken"
    assert_as_before(gpu)
    recording.replay()
    recording.drop()
    assert gpu.notes == [("replayed on", gpu.compute), ("waited for", gpu.compute)]
    assert gpu.released == [(0, 1)]


def test_all_of_a_gpus_recordings_are_made_on_one_stream(gpu):
    """Torch gives 32 streams in turn: each new one may be another's."""
    streams = []
    for _ in range(3):
        cuda_graphs.CudaRecorder().record(lambda: streams.append(gpu.current) or [])
    assert len(set(streams)) == 1


def test_what_waits_for_the_gpu_is_refused_and_everything_goes_on(gpu):
    recorder = cuda_graphs.CudaRecorder()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        recorder.record(lambda: [gpu.wait()])
    assert_as_before(gpu)
    assert gpu.released == [(0, 1), (0, 2)], "its own, and that of the one that has told the generator"
    assert len(cuda_graphs._FAILED) == 1
    recorder.record(list)
    assert_as_before(gpu)


def test_an_error_of_the_step_itself_ends_the_recording_in_order(gpu):
    runs = []

    def run():
        runs.append(1)
        if len(runs) == 3:
            raise ValueError("its own")
        return []

    with pytest.raises(ValueError, match="its own"):
        cuda_graphs.CudaRecorder().record(run)
    assert_as_before(gpu)
    assert gpu.released[0] == (0, 1)


def test_a_step_that_fails_before_it_is_recorded_leaves_the_stream_alone(gpu):
    with pytest.raises(RuntimeError, match="no memory"):
        cuda_graphs.CudaRecorder().record(lambda: (_ for _ in ()).throw(RuntimeError("no memory")))
    assert_as_before(gpu)
    assert not gpu.pools


def test_an_error_that_the_gpu_tells_of_late_is_raised_before_anything_is_recorded(gpu):
    """What fails while it is recorded is kept for ever."""

    def run():
        gpu.error = RuntimeError("CUDA error: an illegal memory access was encountered")
        return []

    with pytest.raises(RuntimeError, match="illegal memory access"):
        cuda_graphs.CudaRecorder().record(run)
    assert_as_before(gpu)
    assert not gpu.pools
    assert not cuda_graphs._FAILED


def test_meanwhile_nobody_else_empties_the_allocator_or_draws(gpu):
    seen = []

    def run():
        seen.append((held_by_others(exclusive_allocator()), held_by_others(CudaGenerator(FIRST).in_turn())))
        return []

    cuda_graphs.CudaRecorder().record(run)
    assert seen[-1] == (True, True)
    assert_as_before(gpu)


def test_whoever_draws_for_the_step_may_have_it_recorded(gpu):
    """Groups that drop have the generator's turn while their unit runs."""
    with CudaGenerator(FIRST).in_turn():
        assert cuda_graphs.CudaRecorder().record(lambda: ["made"]).outputs == ["made"]
