"""Ctrl-C and SIGTERM wait where they are held, and are neither lost nor raised twice."""
# ruff: noqa: PT012 - what comes after the interrupt within the block is the matter of these tests

import multiprocessing
import signal
import threading
from contextlib import nullcontext

import pytest

from hydra_tune.interrupts import Terminated, ends_in_order, hold_interrupts, is_interrupt, let_interrupts_through


def press():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _the_handler_is_given_back():
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_waits_for_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt), hold_interrupts():
        press()
        press()
        done.append("all of it")
    assert done == ["all of it"]


def test_a_held_function_ends_before_the_interrupt_is_raised():
    done = []

    @hold_interrupts()
    def write():
        press()
        done.append("written")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert done == ["written"]


def test_inner_blocks_leave_it_to_the_outermost():
    done = []
    with pytest.raises(KeyboardInterrupt), hold_interrupts():
        with hold_interrupts():
            press()
        done.append("after the inner block")
    assert done == ["after the inner block"]


def test_the_third_press_gets_through():
    done = []
    with pytest.raises(KeyboardInterrupt), hold_interrupts():
        press()
        press()
        done.append("two")
        press()
        done.append("three")
    assert done == ["two"]


def test_a_window_raises_what_was_held_and_what_comes():
    done = []
    with pytest.raises(KeyboardInterrupt), hold_interrupts():
        press()
        with let_interrupts_through():
            done.append("before the held one")
    assert done == []
    with pytest.raises(KeyboardInterrupt), hold_interrupts():
        with let_interrupts_through():
            done.append("window")
            press()
        done.append("too late")
    assert done == ["window"]


def test_once_raised_interrupts_are_held_again_while_the_block_cleans_up():
    done = []
    with pytest.raises(KeyboardInterrupt) as raised, hold_interrupts():
        try:
            with let_interrupts_through():
                press()
        except KeyboardInterrupt:
            press()
            done.append("cleaned up")
            raise
    assert done == ["cleaned up"]
    assert raised.value.__context__ is None


def test_a_block_inside_a_window_holds_until_its_own_end():
    done = []
    with pytest.raises(KeyboardInterrupt), hold_interrupts(), let_interrupts_through():
        with hold_interrupts():
            press()
            done.append("inner")
        done.append("too late")  # the window is open again
    assert done == ["inner"]


def test_a_window_inside_a_window_leaves_it_open():
    done = []
    with pytest.raises(KeyboardInterrupt), hold_interrupts(), let_interrupts_through():
        with let_interrupts_through():
            pass
        press()
        done.append("too late")
    assert done == []


def test_another_error_does_not_lose_the_interrupt():
    with pytest.raises(KeyboardInterrupt) as raised, hold_interrupts():
        press()
        raise ValueError("while held")
    assert isinstance(raised.value.__context__, ValueError)


def test_the_programs_own_handler_is_called_instead():
    called = []
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    try:
        with hold_interrupts():
            press()
            assert called == []
        assert called == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_interrupt_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with hold_interrupts(), let_interrupts_through():
            press()
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_set_meanwhile_is_kept():
    before = signal.getsignal(signal.SIGINT)

    def mine(number, frame):
        pass

    with hold_interrupts():
        signal.signal(signal.SIGINT, mine)
    try:
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_hold_nothing():
    handlers = []

    def elsewhere():
        with hold_interrupts(), let_interrupts_through():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


def terminate():
    signal.raise_signal(signal.SIGTERM)


def test_sigterm_waits_like_ctrl_c_where_it_ends_in_order():
    done = []
    with pytest.raises(Terminated) as raised, ends_in_order(), hold_interrupts():
        terminate()
        press()
        done.append("all of it")
    assert done == ["all of it"]
    assert raised.value.code == 143
    assert is_interrupt(raised.value)
    assert not is_interrupt(SystemExit(143))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_second_sigterm_ends_the_process_by_itself():
    with ends_in_order():
        with pytest.raises(Terminated):
            terminate()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        with ends_in_order():  # another executor: the first signal has been already
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_programs_own_handler_of_sigterm_stays():
    called = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        with ends_in_order(), hold_interrupts():
            terminate()
            assert called == []
        assert called == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_for_a_signal(is_ready):
    is_ready.set()
    signal.pause()


@pytest.mark.filterwarnings(
    "ignore:.*fork:DeprecationWarning"
)  # of Python 3.12 and later, beside threads of other tests
@pytest.mark.parametrize("holds", [nullcontext, hold_interrupts])
def test_one_sigterm_ends_a_forked_process(holds):
    """As at the end of the block of a `multiprocessing.Pool` in a trial's own code."""
    fork = multiprocessing.get_context("fork")
    is_ready = fork.Event()
    with ends_in_order(), holds():
        process = fork.Process(target=wait_for_a_signal, args=(is_ready,), daemon=True)
        process.start()
        assert is_ready.wait(10)
        process.terminate()
        process.join(10)
        code = process.exitcode
        process.kill()
        process.join()
    assert code == -signal.SIGTERM


@pytest.mark.filterwarnings(
    "ignore:.*fork:DeprecationWarning"
)  # of Python 3.12 and later, beside threads of other tests
def test_a_forked_process_holds_no_interrupt_and_its_parent_still_does():
    fork = multiprocessing.get_context("fork")
    done = []
    with pytest.raises(KeyboardInterrupt), hold_interrupts():
        press()
        process = fork.Process(target=press)
        process.start()
        process.join()
        done.append(process.exitcode)
        press()
        done.append("held")
    assert done == [1, "held"]


def press_in_a_block(has_ended):
    with hold_interrupts():
        press()
        has_ended.set()


@pytest.mark.filterwarnings(
    "ignore:.*fork:DeprecationWarning"
)  # of Python 3.12 and later, beside threads of other tests
def test_a_process_forked_within_a_block_has_blocks_of_its_own():
    fork = multiprocessing.get_context("fork")
    has_ended = fork.Event()
    with hold_interrupts():
        process = fork.Process(target=press_in_a_block, args=(has_ended,))
        process.start()
        process.join()
    assert has_ended.is_set()
    assert process.exitcode == 1
