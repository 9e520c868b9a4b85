"""A trial's torch stream is one stream, whichever way its units and its own code draw from it."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hydra_tune.devices import own_generator as routing
from hydra_tune.devices.cpu import CpuDevice, DefaultCpuGenerator
from hydra_tune.devices.own_generator import own_generator
from hydra_tune.devices.positions import MersennePositions, PhiloxPositions
from hydra_tune.train.rng.rng_streams import RandomStreams


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    made = CpuDevice(0, 1 << 20)
    yield made
    made.close()


def draw() -> list[float]:
    """Numbers as a captured unit draws them; an odd count of normals leaves one cached in the generator."""
    return torch.randn(3, generator=own_generator()).tolist() + torch.rand(2, generator=own_generator()).tolist()


def test_all_ways_of_drawing_go_on_with_one_stream(device):
    before = torch.get_rng_state()
    streams = RandomStreams(7)
    found = []
    for turn in range(9):
        if turn % 3 == 0:
            with streams.everything():
                found += draw()
            continue
        with streams.drawing(device, keep=True):
            found += draw()
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(7)
        assert found == [number for _ in range(9) for number in draw()]


class OfGpu(MersennePositions):
    """Stands for a GPU's default generator, and for the GPU: trials have its stream in turn."""

    shares_generator = False
    torch_device = torch.device("cpu")

    def __init__(self):
        self.generator, self.stream = self, torch.Generator()

    def get_state(self):
        return self.stream.get_state()

    def set_state(self, state):
        self.stream.set_state(state)

    def in_turn(self):
        return threading.RLock()

    def draw(self):
        return torch.rand(3, generator=self.stream).tolist()


def test_what_is_saved_while_a_gpu_draws_is_where_its_stream_is():
    """Own code is saved, and its evaluation undone, within a burst, which has the GPU's generator from its beginning on."""
    gpu, streams, other = OfGpu(), RandomStreams(7), RandomStreams(8)
    with streams.drawing(gpu, keep=True):
        gpu.draw()
        mark, saved = streams.mark(), streams.state()
        second = gpu.draw()
        streams.go_back(mark)
        assert gpu.draw() == second
        streams.restore(saved)
    with streams.drawing(gpu, keep=True):
        assert gpu.draw() == second
    other.restore(saved)
    with other.drawing(gpu, keep=True):
        assert gpu.draw() == second


def test_a_recompute_draws_again_and_leaves_the_stream(device):
    streams = RandomStreams(7)
    with streams.drawing(device, keep=True):
        saved = device.generator.get_state()
        first = draw()
    with streams.drawing(device, keep=True):
        second = draw()
    with streams.drawing(device, keep=False):
        device.generator.set_state(saved)
        assert draw() == first
    with streams.drawing(device, keep=True):
        assert draw() not in (first, second)


def test_units_that_draw_on_their_own_do_not_wait_for_each_other_nor_touch_the_default_generator(device):
    before = torch.get_rng_state()
    inside = threading.Barrier(3, timeout=60)
    found = {}

    def unit(seed: int) -> None:
        with RandomStreams(seed).drawing(device, keep=True):
            inside.wait()
            found[seed] = draw()
            inside.wait()

    threads = [threading.Thread(target=unit, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    inside.wait()
    assert own_generator() is None
    inside.wait()
    for thread in threads:
        thread.join()
    assert torch.equal(torch.get_rng_state(), before)
    for seed in (1, 2):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            assert found[seed] == draw()


def meddle() -> None:
    """What another thread of the process may do at any time."""

    def run() -> None:
        torch.manual_seed(5)
        torch.randn(3)
        nn.functional.dropout(torch.ones(9))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


class Watching(TorchDispatchMode):
    """Something that follows operators, as much of torch's own does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def draw_in_all_ways() -> list[Tensor]:
    """Numbers that the user's own code draws, or operators that no generator can be given to."""
    lstm = nn.LSTM(3, 4, 2, dropout=0.5)
    found = [torch.rand(3), torch.randperm(9), lstm(torch.ones(2, 3))[0].detach()]
    found += [torch.native_dropout(torch.ones(9), 0.5, True)[0], torch.rand(3, generator=torch.default_generator)]
    with Watching():
        found += [torch.randn(3), torch.native_dropout(torch.ones(9), 0.5, True)[0], torch.rand_like(torch.ones(9))]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        found += [torch.rand(3), torch.tensor(torch.initial_seed())]
    twice = torch.ones(9, requires_grad=True)
    checkpoint(nn.functional.dropout, twice, use_reentrant=False).sum().backward()
    return [*found, twice.grad, torch.rand(3), torch.get_rng_state()]


@pytest.mark.parametrize("way", ["own code", "unit", "recompute"])
def test_what_other_threads_draw_and_seed_is_nothing_to_a_trial_nor_what_it_draws_to_them(way, device):
    streams = RandomStreams(7)
    ways = {
        "own code": streams.everything,
        "unit": lambda: streams.drawing(device, keep=True),
        "recompute": lambda: streams.drawing(device, keep=False),
    }
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(7)
        expected = draw_in_all_ways()
        torch.manual_seed(5)
        torch.randn(3)
        nn.functional.dropout(torch.ones(9))
        there = torch.get_rng_state()
    with torch.random.fork_rng(devices=()):
        with ways[way]():
            meddle()
            assert all(map(torch.equal, draw_in_all_ways(), expected))
            meddle()
        assert torch.equal(torch.get_rng_state(), there)
    assert torch.equal(
        streams.position(device), RandomStreams(7).position(device) if way == "recompute" else expected[-1]
    )


def test_a_seed_that_the_own_code_sets_is_that_of_its_stream(device):
    streams, before = RandomStreams(7), torch.get_rng_state()
    with streams.everything():
        torch.manual_seed(3)
        torch.rand(2)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        torch.rand(2)
        assert torch.equal(torch.get_rng_state(), streams.position(device))


def test_the_state_of_a_thread_without_a_generator_is_the_default_one():
    assert torch.equal(DefaultCpuGenerator().get_state(), torch.get_rng_state())


@pytest.mark.parametrize("of", ["host", "gpu"])
@pytest.mark.parametrize("start", [0, 5, 623, 624])
@pytest.mark.parametrize("count", [0, 1, 7, 617, 624, 1248, 40_001])
def test_the_way_between_two_positions_is_found_and_gone_again(device, start, count, of):
    drawn_from, streams = device if of == "host" else OfGpu(), RandomStreams(7)
    streams.skip(start, drawn_from)
    before, fork = streams.position(drawn_from), streams.fork()
    streams.skip(count, drawn_from)
    assert drawn_from.generator.draws_between(before, streams.position(drawn_from)) == count
    assert torch.equal(fork.position(drawn_from), before), "a fork stays where it is"
    fork.skip(count, drawn_from)
    assert torch.equal(fork.position(drawn_from), streams.position(drawn_from))


def test_a_stream_that_was_moved_on_is_the_one_that_a_gpu_draws_from():
    gpu, streams, ahead = OfGpu(), RandomStreams(7), RandomStreams(7)
    host = ahead.position(CpuDevice)
    with streams.drawing(gpu, keep=True):
        gpu.draw()
        second = gpu.draw()
    ahead.skip(3, gpu)
    with ahead.drawing(gpu, keep=True):
        assert gpu.draw() == second
    assert torch.equal(ahead.position(CpuDevice), host)


def test_no_way_is_found_to_where_no_number_of_draws_leads(device):
    streams = RandomStreams(7)
    before = streams.position(device)
    with streams.everything():
        torch.randn(1)  # leaves a number cached
    assert device.generator.draws_between(before, streams.position(device)) is None


def philox(seed, offset):
    """The state of a GPU's generator."""
    return torch.tensor([seed, offset]).view(torch.uint8)


def test_positions_of_a_gpus_generator_are_its_offsets():
    before = philox(-3, 8)
    assert PhiloxPositions.draws_between(before, philox(-3, 20)) == 12
    assert torch.equal(PhiloxPositions.moved(before, 12), philox(-3, 20))
    assert torch.equal(before, philox(-3, 8)), "the state it was given is left alone"
    assert PhiloxPositions.draws_between(before, philox(-3, 4)) is None
    assert PhiloxPositions.draws_between(before, philox(5, 20)) is None, "seeded anew"


@pytest.mark.parametrize("size", [1, 15, 100, 5000])
def test_a_dropout_moves_the_stream_by_as_much_wherever_it_stands(device, size):
    streams, found = RandomStreams(7), set()
    for turn in range(3):
        streams.skip(turn, device)
        before = streams.position(device)
        with streams.drawing(device, keep=True):
            torch.empty(size).bernoulli_(0.3, generator=own_generator())
        found.add(device.generator.draws_between(before, streams.position(device)))
    assert len(found) == 1
    assert None not in found


def test_every_operator_of_torch_that_takes_a_generator_is_known():
    named = set(routing._DRAWING.split())
    schemas = torch._C._jit_get_all_schemas()
    taking = {schema.name.removeprefix("aten::") for schema in schemas if routing.takes_generator(schema)}
    assert {name for name in taking - named if hasattr(torch.ops.aten, name)} == set()
