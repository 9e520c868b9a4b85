"""Work recorded as CUDA graphs: replayed on what lies there now, and nothing is left behind where it cannot be recorded."""

import gc
import threading

import pytest
import torch

from hydra_tune.devices import cuda_graphs
from hydra_tune.devices.cuda import CudaDevice
from hydra_tune.devices.cuda_graphs import CudaRecorder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MIB = 1 << 20


@pytest.fixture
def device():
    made = CudaDevice(0, 1 << 30)
    with made.worker():
        yield made
    made.close()


def randn(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def test_a_replay_reads_what_lies_there_now(device):
    x, weight, counter = randn(64, 256), randn(256, 256, seed=1), torch.zeros((), device="cuda")

    def run():
        counter.add_(1)
        return [(x @ weight).relu(), x.sum(0)]

    recording = CudaRecorder().record(run)
    assert counter.item() == 2, "twice to warm up; recorded, it is not run"
    for seed in range(2, 5):
        x.copy_(randn(64, 256, seed=seed))
        recording.replay()
        torch.testing.assert_close(recording.outputs[0], (x @ weight).relu())
        torch.testing.assert_close(recording.outputs[1], x.sum(0))
    assert counter.item() == 5
    assert recording.nbytes >= sum(tensor.nbytes for tensor in recording.outputs)


def test_what_it_kept_for_itself_is_given_back(device):
    x = randn(1024, 1024)
    CudaRecorder().record(lambda: [x @ x]).drop()  # libraries have what they keep
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    recording = CudaRecorder().record(lambda: [(x @ x) @ (x + 1) for _ in range(8)])
    assert torch.cuda.memory_reserved() - before >= recording.nbytes >= 32 * MIB
    recording.replay()
    recording.drop()
    del recording
    gc.collect()
    assert device.reclaim() > 0
    assert torch.cuda.memory_reserved() - before <= 2 * MIB


def asks_values(x):
    return [x * x.sum().item()]


def is_not_pinned(x):
    return [x + torch.ones(len(x)).to(x.device)]


def draws_from_another(x):
    return [torch.empty_like(x).bernoulli_(0.5, generator=torch.Generator("cuda").manual_seed(1))]


def fails_by_itself(x):
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("its own")
    return [x + 1]


@pytest.mark.parametrize("step", [asks_values, is_not_pinned, draws_from_another, fails_by_itself])
def test_where_it_cannot_be_recorded_everything_goes_on(device, step):
    x, stream = randn(256), torch.cuda.current_stream()
    with pytest.raises((RuntimeError, ValueError)):
        CudaRecorder().record(lambda: step(x))
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()
    torch.cuda.manual_seed(3)
    dropped = torch.native_dropout(x, 0.5, True)[0]
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.native_dropout(x, 0.5, True)[0], dropped)
    recording = CudaRecorder().record(lambda: [x + 1])
    recording.replay()
    assert torch.equal(recording.outputs[0], x + 1)
    recording.drop()


def test_streams_are_no_copy_streams_however_many_there_were(device):
    made = [torch.cuda.Stream() for _ in range(100)]
    CudaRecorder().record(lambda: [torch.zeros(1, device="cuda")]).drop()
    recorded_on = cuda_graphs._STREAMS[0]
    assert recorded_on not in made
    assert recorded_on not in (device._compute, device._inward, device.outward)


def test_copies_that_other_threads_make_meanwhile_are_made_and_are_no_part_of_the_graph(device):
    """As those that are sent ahead while a step is recorded."""
    size, over, wrong, rounds = 4 * MIB, threading.Event(), [], []
    other = CudaDevice(0, 1 << 30, part=1)

    def copy():
        with other.worker():
            host, back = (other.on_host(lambda: other.host_empty(size)) for _ in range(2))
            data = other.empty(size)
            while not over.is_set():
                host.fill_(len(rounds) % 251)
                other.start_load([(host, data)]).wait()
                other.spill([(data, back)])
                if not back.equal(host):
                    wrong.append(len(rounds))
                rounds.append(other.empty(size).nbytes)

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        x = randn(512, 512)
        for _ in range(20):
            recording = CudaRecorder().record(lambda: [x @ x])
            recording.replay()
            torch.testing.assert_close(recording.outputs[0], x @ x)
            recording.drop()
    finally:
        over.set()
        thread.join()
        other.close()
    assert rounds
    assert not wrong
