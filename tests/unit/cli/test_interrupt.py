"""Ctrl-C ends a sweep in order; pressing it twice does not cut that short."""

import signal

import pytest

from hydra_tune.cli.interrupt import interrupts


def press():
    signal.raise_signal(signal.SIGINT)


def test_the_first_raises_the_second_is_absorbed_the_third_raises():
    noted = []
    with interrupts(lambda: noted.append(1)):
        with pytest.raises(KeyboardInterrupt):
            press()
        press()
        with pytest.raises(KeyboardInterrupt):
            press()
    assert noted == [1]


def test_the_handler_of_before_is_back_afterwards():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupts(lambda: None):
        press()
    assert signal.getsignal(signal.SIGINT) is before
