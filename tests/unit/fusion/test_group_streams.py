"""The streams of a group on a device whose generator its members have in turn."""

import pytest
import torch

from hydra_tune.batched.batched_random import HoistedDraw, draw_all
from hydra_tune.devices.own_generator import own_generator
from hydra_tune.fusion.group.group_rng import GroupStreams
from hydra_tune.train.rng.rng_streams import RandomStreams
from tests.support.turns import TurnsDevice

NOISE = [HoistedDraw(torch.ops.aten.bernoulli_.float, torch.Size((64,)), (1,), torch.float32, (0.5,))]


@pytest.fixture
def device():
    made = TurnsDevice(0, 1 << 20)
    with torch.random.fork_rng(devices=[]):
        yield made
    made.close()


def draw():
    (found,) = draw_all(NOISE, own_generator(), torch.device("cpu"))
    return found.tolist()


def test_they_go_back_while_they_draw_and_stay_there(device):
    """A forward that has failed within a unit draws the same again, whether in this unit or in the next."""
    streams = GroupStreams([RandomStreams(seed) for seed in (1, 2)])
    with streams.drawing(device, keep=True):
        first = draw()
        mark = streams.mark()
        second = draw()
        streams.go_back(mark)
        assert draw() == second != first
        streams.go_back(mark)
    with streams.drawing(device, keep=True):
        assert draw() == second


def test_a_mark_from_between_two_units_is_where_they_go_back_to(device):
    streams = GroupStreams([RandomStreams(seed) for seed in (1, 2)])
    mark = streams.mark()
    with streams.drawing(device, keep=True):
        first = draw()
    streams.go_back(mark)
    with streams.drawing(device, keep=True):
        assert draw() == first


def test_a_vacant_slot_takes_no_draw_of_its_member_back(device):
    """A vacant slot holds the streams of a member that draws in another slot."""
    first, second = RandomStreams(1), RandomStreams(2)
    streams = GroupStreams([first, second, first])
    streams.active = [True, True, False]
    draws = []
    for _ in range(3):
        with streams.drawing(device, keep=True):
            draws.append(draw()[0])
    alone = GroupStreams([RandomStreams(1)])
    for drawn in draws:
        with alone.drawing(device, keep=True):
            assert draw() == [drawn]


@pytest.mark.parametrize("host", [False, True])
def test_a_slot_that_does_not_draw_leaves_a_member_that_draws_elsewhere(device, host):
    """A member that has left its slot draws elsewhere while the group recomputes, or repeats a unit."""
    left, place = RandomStreams(2), None if host else device
    streams = GroupStreams([RandomStreams(1), left])
    streams.active = [True, False]
    mark = streams.mark()
    with streams.drawing(place, keep=False):
        with left.drawing(None, keep=True):
            torch.rand(3)
        left.keep_gpu_state(torch.Generator().manual_seed(3).get_state())
        after = left.state()
    streams.go_back(mark)
    assert left.state()["torch"].equal(after["torch"])
    assert left.state()["gpu"].equal(after["gpu"])
