"""A trial's torch stream is one stream, whichever way its units and its own code draw from it."""

import threading
from collections.abc import Iterator

import pytest
import torch

from hydra_tune.devices.cpu import CpuDevice, DefaultCpuGenerator, own_generator
from hydra_tune.train.streams import STREAMS, RandomStreams, draws_between


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
        with streams.drawing(device, keep=True, own=turn % 3 == 1):
            found += draw()
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(7)
        assert found == [number for _ in range(9) for number in draw()]


def test_a_recompute_draws_again_and_leaves_the_stream(device):
    for own in (False, True):
        streams = RandomStreams(7)
        with streams.drawing(device, keep=True, own=own):
            saved = device.generator.get_state()
            first = draw()
        with streams.drawing(device, keep=True, own=own):
            second = draw()
        with streams.drawing(device, keep=False, own=own):
            device.generator.set_state(saved)
            assert draw() == first
        with streams.drawing(device, keep=True, own=own):
            assert draw() not in (first, second)


def test_units_that_draw_on_their_own_do_not_wait_for_each_other_nor_touch_the_default_generator(device):
    before = torch.get_rng_state()
    inside = threading.Barrier(3, timeout=60)
    found = {}

    def unit(seed: int) -> None:
        with RandomStreams(seed).drawing(device, keep=True, own=True):
            inside.wait()
            found[seed] = draw()
            inside.wait()

    threads = [threading.Thread(target=unit, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    with STREAMS:  # another trial's own code
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


def test_the_state_of_a_thread_without_a_generator_is_the_default_one():
    assert torch.equal(DefaultCpuGenerator().get_state(), torch.get_rng_state())


@pytest.mark.parametrize("start", [0, 5, 623, 624])
@pytest.mark.parametrize("count", [0, 1, 7, 617, 624, 1248, 40_001])
def test_the_way_between_two_positions_is_found_and_gone_again(start, count):
    streams = RandomStreams(7)
    streams.skip(start)
    before, fork = streams.position(), streams.fork()
    streams.skip(count)
    assert draws_between(before, streams.position()) == count
    assert torch.equal(fork.position(), before), "a fork stays where it is"
    fork.skip(count)
    assert torch.equal(fork.position(), streams.position())


def test_no_way_is_found_to_where_no_number_of_draws_leads():
    streams = RandomStreams(7)
    before = streams.position()
    with streams.everything():
        torch.randn(1)  # leaves a number cached
    assert draws_between(before, streams.position()) is None


@pytest.mark.parametrize("size", [1, 15, 100, 5000])
def test_a_dropout_moves_the_stream_by_as_much_wherever_it_stands(device, size):
    streams, found = RandomStreams(7), set()
    for turn in range(3):
        streams.skip(turn)
        before = streams.position()
        with streams.drawing(device, keep=True, own=True):
            torch.empty(size).bernoulli_(0.3, generator=own_generator())
        found.add(draws_between(before, streams.position()))
    assert len(found) == 1
    assert None not in found
