"""The stand-in for streams finds what it is there to find (`tests/support/streams.py`): faults that a program may have."""

import pytest
import torch

from tests.support.streams import (
    BLOCK_BYTES,
    COMPUTING_FIRST,
    COPIES_FIRST,
    HASTES,
    LATE,
    POISON,
    Gpus,
    RaceError,
    Stream,
)

SIZE = 64
GPU = torch.device("cuda", 0)


@pytest.fixture(params=[*HASTES, 1, 2])
def gpus(request):
    made = Gpus(request.param)
    made.compute, made.side = Stream(made, GPU), Stream(made, GPU)
    with made.computing_on(made.compute):
        yield made


def pinned(gpus, value=0):
    return gpus.empty(SIZE, dtype=torch.uint8, pin_memory=True).fill_(value)


def on(gpus, value=0):
    return gpus.empty(SIZE, dtype=torch.uint8, device=GPU).fill_(value)


def recorded(gpus, stream):
    event = gpus.cuda.Event()
    event.record(stream)
    return event


def copied(gpus, source, target, *, after=()):
    """On the other stream."""
    for event in after:
        gpus.side.wait_event(event)
    with gpus.cuda.stream(gpus.side):
        target.copy_(source, non_blocking=True)
    return recorded(gpus, gpus.side)


def test_a_copy_that_does_not_wait_for_the_writer_is_a_race_with_both_stacks(gpus):
    data = on(gpus, 3)
    with pytest.raises(RaceError) as caught:
        copied(gpus, data, pinned(gpus))
    first, second = str(caught.value).split("is not behind")
    assert "in copied" in first
    assert "in on" in second
    assert gpus.faults == [str(caught.value)], "known to whoever looks, if the code under test has caught it"


def test_a_copy_to_memory_that_is_still_read_is_a_race(gpus):
    data, seen = on(gpus, 3), on(gpus)
    written = recorded(gpus, gpus.compute)
    seen.copy_(data)
    with pytest.raises(RaceError, match="copy_"):
        copied(gpus, pinned(gpus), data, after=[written])


def test_two_readers_need_no_order(gpus):
    data, there, seen = on(gpus, 3), pinned(gpus), on(gpus)
    written = recorded(gpus, gpus.compute)
    seen.copy_(data)
    copied(gpus, data, there, after=[written]).synchronize()
    assert there.tolist() == [3] * SIZE


def test_a_reader_on_the_host_has_to_wait_for_the_copy(gpus):
    data, there = on(gpus, 3), pinned(gpus)
    over = copied(gpus, data, there, after=[recorded(gpus, gpus.compute)])
    with pytest.raises(RaceError):
        there.clone()
    over.synchronize()
    assert there.clone().tolist() == [3] * SIZE


def test_an_event_that_was_not_recorded_keeps_nobody_waiting(gpus):
    data = on(gpus, 3)
    with pytest.raises(RaceError):
        copied(gpus, data, pinned(gpus), after=[gpus.cuda.Event()])


def test_order_is_passed_on_from_stream_to_stream(gpus):
    data, there, third = on(gpus, 3), pinned(gpus), Stream(gpus, GPU)
    third.wait_stream(gpus.compute)
    copied(gpus, data, there, after=[recorded(gpus, third)]).synchronize()
    assert there.tolist() == [3] * SIZE


def test_memory_given_back_while_a_copy_works_on_it_is_a_race(gpus):
    there = pinned(gpus)
    data = on(gpus, 3)
    over = copied(gpus, data, there, after=[recorded(gpus, gpus.compute)])
    assert not gpus.faults
    del data
    assert "freed" in gpus.faults[0]
    over.synchronize()


@pytest.mark.parametrize("waits", ["the host", "the stream"])
def test_memory_given_back_behind_the_copy_is_none(gpus, waits):
    data, there = on(gpus, 3), pinned(gpus)
    over = copied(gpus, data, there, after=[recorded(gpus, gpus.compute)])
    if waits == "the host":
        over.synchronize()
    else:
        gpus.compute.wait_event(over)
    del data
    gpus.finish()
    assert not gpus.faults
    assert there.tolist() == [3] * SIZE


def test_memory_given_back_is_the_next_ones_at_once_and_has_other_bytes(gpus):
    data = on(gpus, 3)
    place = data.data_ptr()
    del data
    again = gpus.empty(BLOCK_BYTES, dtype=torch.uint8, device=GPU)
    gpus.finish()
    assert again.data_ptr() == place
    assert again.tolist() == [POISON] * BLOCK_BYTES


def test_memory_that_has_just_been_allocated_may_still_be_used_by_who_had_it(gpus):
    on(gpus, 3)
    data, source = gpus.empty(SIZE, dtype=torch.uint8, device=GPU), pinned(gpus, 5)
    with pytest.raises(RaceError, match="allocated"):
        copied(gpus, source, data)


def test_what_operators_make_is_memory_as_any_other(gpus):
    made = on(gpus, 3) + 1
    made = made.view(8, 8).t()
    with pytest.raises(RaceError):
        copied(gpus, made, gpus.empty(8, 8, dtype=torch.uint8, pin_memory=True))
    assert made.tolist() == [[4] * 8] * 8


def test_a_value_that_the_host_asks_for_is_waited_for(gpus):
    data, there = on(gpus, 3), pinned(gpus)
    assert data.sum().item() == 3 * SIZE
    copied(gpus, data, there).synchronize()
    assert there.tolist() == [3] * SIZE


@pytest.mark.parametrize(("haste", "early"), [(COPIES_FIRST, POISON), (COMPUTING_FIRST, 3), (LATE, 3)])
def test_an_order_that_nothing_demands_does_not_happen(haste, early):
    """A copy without a wait may come too early, and one that nobody waits for comes too late."""
    gpus = Gpus(haste, raises=False)
    gpus.compute, gpus.side = Stream(gpus, GPU), Stream(gpus, GPU)
    with gpus.computing_on(gpus.compute):
        data, there = on(gpus, 3), pinned(gpus)
        copied(gpus, data, there)
        gpus.finish()
        other, later = on(gpus, 3), pinned(gpus)
        copied(gpus, other, later, after=[recorded(gpus, gpus.compute)])
        other.fill_(9)
        gpus.finish()
    assert there.tolist() == [early] * SIZE
    assert later.tolist() == [9] * SIZE
    assert len(gpus.faults) == 2
