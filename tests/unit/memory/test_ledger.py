"""The ledger counts and refuses; nothing is ever counted beyond the budget."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hydra_tune.memory.ledger import MemoryLedger

PATIENCE_SECONDS = 60


def test_what_fits_is_taken_and_what_does_not_is_not():
    ledger = MemoryLedger("cpu:0", 100)
    assert ledger.try_take(60)
    assert not ledger.try_take(41)
    assert ledger.used_bytes == 60
    assert ledger.try_take(40)
    ledger.give_back(100)
    assert (ledger.used_bytes, ledger.peak_bytes) == (0, 100)


def test_the_peak_since_somebody_looked_is_counted():
    ledger = MemoryLedger("cpu:0", 100)
    assert ledger.try_take(60)
    ledger.give_back(50)
    ledger.recent_peak_bytes = ledger.used_bytes
    assert ledger.try_take(20)
    ledger.give_back(30)
    assert (ledger.recent_peak_bytes, ledger.peak_bytes) == (30, 60)


def test_more_than_was_taken_cannot_be_given_back():
    ledger = MemoryLedger("cpu:0", 100)
    assert ledger.try_take(10)
    with pytest.raises(AssertionError, match="cpu:0: more given back than was taken"):
        ledger.give_back(11)


def test_who_waits_for_room_is_woken_by_what_is_given_back():
    ledger = MemoryLedger("cpu:0", 100)
    assert ledger.try_take(100)
    waiting = threading.Event()

    def wait():
        while not ledger.try_take(50):
            waiting.set()
            ledger.wait_for_room(PATIENCE_SECONDS)

    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(wait)
        assert waiting.wait(PATIENCE_SECONDS)
        ledger.give_back(60)
        future.result(PATIENCE_SECONDS)
    assert ledger.used_bytes == 90


def test_threads_that_take_at_once_never_take_too_much():
    ledger = MemoryLedger("cpu:0", 10)
    barrier = threading.Barrier(4)

    def take():
        barrier.wait(PATIENCE_SECONDS)
        taken = 0
        for _ in range(500):
            if ledger.try_take(3):
                taken += 1
                assert ledger.used_bytes <= 10
                ledger.give_back(3)
        return taken

    with ThreadPoolExecutor(4) as threads:
        taken = [future.result(PATIENCE_SECONDS) for future in [threads.submit(take) for _ in range(4)]]
    assert sum(taken) > 0
    assert ledger.used_bytes == 0
    assert ledger.peak_bytes <= 10
