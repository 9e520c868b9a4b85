"""Data that hangs for certain: no other draw of this process ages, so that none is given up on, however slow the machine is."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hydra_tune.train.data.loader_clock import DrawClock

_threads: set[int] = set()


@contextmanager
def hanging() -> Iterator[None]:
    """Around code of a trial's data that is to be taken for hanging."""
    _threads.add(threading.get_ident())
    try:
        yield
    finally:
        _threads.discard(threading.get_ident())


def have_others_not_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have draws in this process take no time but within `hanging`."""
    seconds = DrawClock.seconds.fget
    assert seconds is not None

    def aged(clock: DrawClock) -> float:
        return seconds(clock) if clock.thread in _threads or not clock.is_in_process else 0.0

    monkeypatch.setattr(DrawClock, "seconds", property(aged))
