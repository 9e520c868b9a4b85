"""What torch's allocator may take of a GPU, as devices open and close."""

import pytest
import torch

from hydra_tune.devices.hardware.caps import capped


@pytest.fixture
def fraction(monkeypatch):
    """Of each GPU, as torch would have it."""
    now = {0: 0.9, 1: 1.0}
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", now.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, index: now.update({index: part}))
    return now


def test_it_is_what_those_that_are_open_may_and_in_the_end_what_it_was(fraction):
    first, second, third = capped(0, 0.25), capped(0, 0.5), capped(1, 0.125)
    assert fraction == {0: 0.75, 1: 0.125}
    first()
    first()
    assert fraction == {0: 0.5, 1: 0.125}
    again = capped(0, 0.25)
    assert fraction[0] == 0.75
    for closed in (again, second, third):
        closed()
    assert fraction == {0: 0.9, 1: 1.0}


def test_more_than_there_is_is_all(fraction):
    closed = [capped(0, 0.6), capped(0, 0.6)]
    assert fraction[0] == 1.0
    for one in closed:
        one()
    assert fraction[0] == 0.9
