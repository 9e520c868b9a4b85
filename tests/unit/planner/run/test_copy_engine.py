"""Planned copies on a GPU's streams, which run as early or as late as they may (`tests/support/streams.py`)."""

import pytest
import torch

from hydra_tune.planner.run import copy_engine
from tests.support.streams import HASTES, Gpus, Stream

SIZE = 64
GPU = torch.device("cuda", 0)


@pytest.fixture(params=[*HASTES, 1, 2])
def gpus(request, monkeypatch):
    made = Gpus(request.param)
    made.stand_in(monkeypatch, copy_engine)
    monkeypatch.setattr(copy_engine, "_STREAMS", {})
    with made.computing_on(Stream(made, GPU)):
        yield made
    assert not made.faults


@pytest.fixture
def made(gpus):
    found = copy_engine.copies_for(GPU, {"map": SIZE, "other": SIZE})
    assert isinstance(found, copy_engine.CudaCopyEngine)
    return found


def on(gpus, value):
    return gpus.empty(SIZE, dtype=torch.uint8, device=GPU).fill_(value)


def all_are(tensor, value):
    return tensor.tolist() == [value] * SIZE


def test_a_map_comes_back_as_it_went_step_after_step(gpus, made):
    """The host's memory is the same at each step: a copy to it must not meet the last copy from it."""
    seen = []
    for value in range(1, 6):
        handle = made.offload(on(gpus, value), "map")
        on_host = made.release(handle)
        back = made.arrived(made.prefetch(on_host))
        seen.append(on(gpus, 0))
        seen[-1].copy_(back)
    gpus.finish()
    assert [tensor[0].item() for tensor in seen] == [1, 2, 3, 4, 5]


def test_what_a_map_leaves_is_somebody_elses_when_it_has_gone(gpus, made):
    value = on(gpus, 3)
    handle = made.offload(value, "map")
    on_host = made.release(handle)
    value.fill_(9)  # what the allocator gives to the next operator
    back = made.arrived(made.prefetch(on_host))
    gpus.finish()
    assert all_are(back, 3)


def test_a_map_comes_back_to_memory_that_an_operator_still_reads(gpus, made, monkeypatch):
    on_host = made.release(made.offload(on(gpus, 3), "map"))
    used, seen = on(gpus, 5), on(gpus, 0)
    seen.copy_(used)
    monkeypatch.setattr(gpus, "empty", lambda *_size, **_options: used)
    back = made.arrived(made.prefetch(on_host))
    gpus.finish()
    assert back is used
    assert all_are(seen, 5)
    assert all_are(back, 3)


def test_maps_go_and_come_beside_each_other(gpus, made):
    first = made.release(made.offload(on(gpus, 3), "map"))
    going, coming = made.offload(on(gpus, 4), "other"), made.prefetch(first)
    back = made.arrived(coming)
    second = made.arrived(made.prefetch(made.release(going)))
    gpus.finish()
    assert all_are(back, 3)
    assert all_are(second, 4)


def test_what_is_under_way_is_over_when_they_are_closed(gpus, made):
    made.offload(on(gpus, 3), "map")
    made.close()
    assert all_are(made._host["map"], 3)
    assert not made._held


def test_what_nobody_comes_for_is_over_and_let_go_of_when_they_are_given_up(gpus, made):
    going, first = on(gpus, 3), made.release(made.offload(on(gpus, 4), "other"))
    made.offload(going, "map")
    made.prefetch(first)
    made.give_up()
    assert not made._held
    assert all_are(made._host["map"], 3)
    again = made.arrived(made.prefetch(made.release(made.offload(on(gpus, 5), "map"))))  # they go on
    gpus.finish()
    assert all_are(again, 5)


def test_a_gpu_has_one_pair_of_streams_however_many_plans_there_are(made):
    """Torch has few, and gives them out again: a further one might be that of the computing."""
    other = copy_engine.copies_for(GPU, {})
    elsewhere = copy_engine.copies_for(torch.device("cuda", 1), {})
    assert (other._out, other._in) == (made._out, made._in)
    assert {elsewhere._out, elsewhere._in}.isdisjoint({made._out, made._in})


def test_of_a_gpu_that_is_lost_they_can_be_closed(made, monkeypatch):
    def lost(_stream):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Stream, "synchronize", lost)
    made.offload(torch.zeros(SIZE, dtype=torch.uint8), "map")
    with pytest.raises(RuntimeError, match="illegal"):
        made.give_up()
    assert not made._held
    made.close()
