"""Marks: which trial each thread works for, and who runs beside whom after a crash that nobody is to blame for."""

import threading
from contextlib import suppress

import pytest

from hydra_tune.supervision.marks import TrialMarkTable, at_work, here, marked_as


@pytest.fixture
def marks():
    found = TrialMarkTable()
    yield found
    found.close()


def test_nothing_is_written_where_nobody_supervises():
    assert here() is None
    with at_work("trial 1"):
        pass


def test_marks_are_there_while_a_thread_is_at_work(marks):
    me = threading.get_ident()
    with marks.at_work("trial 1"):
        assert marks.marked() == {me: "trial 1"}
    assert marks.marked() == {}
    with suppress(ValueError), marks.at_work("größer" * 200):
        assert marks.marked()[me].startswith("größergrößer")
        raise ValueError
    assert marks.marked() == {}


def test_long_names_are_marked_by_what_tells_them_apart(marks):
    one, other = "x" * 600 + "1", "x" * 600 + "2"
    assert marked_as("trial 1") == "trial 1"
    assert marked_as(one) != marked_as(other)
    with marks.at_work(one):
        assert marks.marked() == {threading.get_ident(): marked_as(one)}


@pytest.mark.parametrize(("name", "mark"), [(3, "3"), ("caf\udce9", r"caf\udce9"), (("a", 1), "('a', 1)")])
def test_names_that_are_no_texts_of_utf_8_are_marked(marks, name, mark):
    assert marked_as(name) == mark
    with marks.at_work(name):
        assert marks.marked() == {threading.get_ident(): mark}


def test_more_threads_than_marks_are_let_through(marks):
    def nested(depth):
        with marks.at_work(f"trial {depth}"):
            return nested(depth - 1) if depth else 7

    assert nested(300) == 7
    assert marks.marked() == {}


def test_the_end_and_signals_are_read_by_the_supervisor(marks):
    assert (marks.ended, marks.num_heard) == (None, 0)
    marks.hear()
    marks.end(143)
    assert (marks.ended, marks.num_heard) == (143, 1)


def test_a_process_that_gives_up_says_why(marks):
    assert marks.why == ""
    with marks.at_work("trial 1"):
        marks.give_up("größer" * 200, None)
        assert marks.why.startswith("größergrößer")
    with marks.at_work("trial 2"):
        assert list(marks.marked().values()) == ["trial 1"], "as it was when the process gave up"
    assert (marks.ended, marks.num_heard) == (None, 0)


def test_a_process_that_gives_up_may_name_the_trial_to_blame(marks):
    with marks.at_work("trial 1"):
        marks.give_up("no device", "trial 2")
    assert marks.why == "no device"
    assert list(marks.marked().values()) == ["trial 2"]


def test_a_suspect_runs_with_no_other_beside_it(marks):
    """In either order, and others run beside each other as ever."""
    marks._suspects = frozenset({"suspect"})  # `begin` would say so of this whole process
    seen, is_in, may_go = [], threading.Event(), threading.Event()

    def work(name):
        with marks.at_work(name):
            seen.append(set(marks.marked().values()))

    def hold(name):
        with marks.at_work(name):
            is_in.set()
            may_go.wait()

    for first, second in (("other", "suspect"), ("suspect", "other")):
        holder, worker = threading.Thread(target=hold, args=(first,)), threading.Thread(target=work, args=(second,))
        holder.start()
        is_in.wait()
        worker.start()
        while worker.is_alive() and not marks._changed._waiters:
            pass
        assert worker.is_alive()
        may_go.set()
        holder.join()
        worker.join()
        is_in.clear()
        may_go.clear()
    assert seen == [{"suspect"}, {"other"}]
    with marks.at_work("other"):
        beside = threading.Thread(target=work, args=("third",))
        beside.start()
        beside.join()
    assert seen[-1] == {"other", "third"}


def test_threads_of_one_suspect_enter_beside_each_other(marks):
    """A worker waits, marked, for the thread of a user's loop; no other trial enters before the last of both has left."""
    marks._suspects = frozenset({"suspect"})
    seen, has_entered = [], threading.Event()

    def work(name):
        with marks.at_work(name):
            seen.append(set(marks.marked().values()))
            has_entered.set()

    other = threading.Thread(target=work, args=("other",), daemon=True)
    with marks.at_work("suspect"):
        beside = threading.Thread(target=work, args=("suspect",), daemon=True)
        beside.start()
        assert has_entered.wait(10)
        beside.join()
        other.start()
        while other.is_alive() and not marks._changed._waiters:
            pass
        assert other.is_alive()
    other.join()
    assert seen == [{"suspect"}, {"other"}]
