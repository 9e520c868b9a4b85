"""The first signal ends a sweep in order; what ends the process out of order is in the integration tests."""

import fcntl
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from hydra_tune.cli.run import interrupt
from hydra_tune.cli.run.interrupt import StopSignalHandler, stops
from hydra_tune.interrupts import Terminated

ERRORS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}


def test_a_pipe_beyond_the_first_1024_descriptors_is_heard():
    """As in a program with many open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    ours, theirs = socket.socketpair()
    try:
        with ours, theirs, socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD, 2000)) as pipe:
            assert interrupt._next(pipe, time.monotonic()) is None
            theirs.send(bytes([signal.SIGTERM]))
            assert interrupt._next(pipe, time.monotonic() + 10) == signal.SIGTERM
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("number", ERRORS)
def test_the_first_raises_and_is_told(number):
    noted, told, heard = [], [], threading.Event()

    def first_words(name):
        told.append(name)
        heard.set()

    def before_raising():
        noted.append(1)

    with stops(600, before_raising, first_words, lambda _why: None) as stop:
        with pytest.raises(ERRORS[number]):
            signal.raise_signal(number)
        assert heard.wait(60)  # the other thread has read it: from the system, and not from this one
    assert (noted, told, stop.number) == ([1], [signal.Signals(number).name], number)


def test_all_is_as_before_afterwards():
    before = [signal.getsignal(number) for number in ERRORS]
    descriptors = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(KeyboardInterrupt), stops(600, lambda: None, lambda _name: None, lambda _why: None):
        signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in ERRORS] == before
    assert set(Path("/proc/self/fd").iterdir()) == descriptors
    assert signal.set_wakeup_fd(-1) == -1
    assert "hydra-signals" not in [thread.name for thread in threading.enumerate()]


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stops(600, lambda: None, lambda _name: None, lambda _why: None) as stop:
            signal.raise_signal(signal.SIGINT)
        assert (stop.number, signal.getsignal(signal.SIGINT)) == (None, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_signals_are_let_be():
    hits = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: hits.append(number))
    try:
        with stops(0.001, lambda: None, lambda _name: hits.append("first"), lambda _why: hits.append("last")):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert hits == [signal.SIGUSR1]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_write_to_its_parents_pipe():
    told = []
    with stops(600, lambda: None, told.append, told.append):
        child = os.fork()
        if child == 0:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os._exit(1)  # never on with the tests
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == -signal.SIGTERM
    assert told == []


def test_elsewhere_than_in_the_main_thread_there_are_no_signals_to_hear():
    found = []

    def elsewhere():
        with stops(600, lambda: None, lambda _name: None, lambda _why: None) as stop:
            found.append((isinstance(stop, StopSignalHandler), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [(True, signal.getsignal(signal.SIGTERM))]
