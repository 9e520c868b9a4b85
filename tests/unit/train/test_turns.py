"""A lock that is taken away from a thread that hangs. Threads meet at events; none sleeps."""

import threading

from hydra_tune.train.turns import Turns

PATIENCE_SECONDS = 30


def test_one_thread_at_a_time_as_often_as_it_likes():
    turns, order = Turns(), []

    def other():
        with turns:
            order.append("other")

    thread = threading.Thread(target=other)
    with turns, turns:
        thread.start()
        thread.join(0.05)
        order.append("first")
        assert turns.is_held
    thread.join(PATIENCE_SECONDS)
    assert order == ["first", "other"]
    assert not turns.is_held


def test_what_is_taken_away_goes_to_those_who_wait_and_what_was_changed_is_as_it_was():
    turns, seen = Turns(), []
    inside, come_back = threading.Event(), threading.Event()

    def hangs():
        with turns:
            turns.begin(lambda: seen.append("outer"))
            turns.begin(lambda: seen.append("inner"))
            inside.set()
            assert come_back.wait(PATIENCE_SECONDS)
            seen.append(turns.is_held)

    hung = threading.Thread(target=hangs)
    hung.start()
    assert inside.wait(PATIENCE_SECONDS)
    entered, leave = threading.Event(), threading.Event()

    def waits():
        with turns:
            entered.set()
            assert leave.wait(PATIENCE_SECONDS)
            seen.append(turns.is_held)

    waiting = threading.Thread(target=waits)
    waiting.start()
    assert not entered.is_set()
    turns.take_away()
    assert entered.wait(PATIENCE_SECONDS)
    come_back.set()
    hung.join(PATIENCE_SECONDS)
    leave.set()
    waiting.join(PATIENCE_SECONDS)
    assert seen == ["outer", False, True]
