"""Copies on a CPU (Algorithm H): by one other thread, in the order in which they are asked, while the computing one goes on."""

import threading

import pytest
import torch

from hydra_tune.planner.run.copy_engine import ThreadCopyEngine, _ThreadCopyHandle


class Held:
    """A copy that does not end until it is let go, which keeps the copying thread; it notes which thread that is."""

    def __init__(self, copies):
        self._go, self._begun, self.by = threading.Event(), threading.Event(), None
        copies._asked.put(_ThreadCopyHandle(self, self, threading.Event()))
        assert self._begun.wait(60)

    def copy_(self, _source):
        self.by = threading.current_thread()
        self._begun.set()
        assert self._go.wait(60)

    def let_go(self):
        self._go.set()


@pytest.fixture
def copies():
    made = ThreadCopyEngine({"a": 8, "b": 8})
    yield made
    made.close()


def noted(order, copy):
    """Copying that notes where to, and by which thread."""

    def copy_(self, *given, **options):
        order.append((self.data_ptr(), threading.current_thread().name))
        return copy(self, *given, **options)

    return copy_


def tensor(*values):
    return torch.tensor(values)


def numbers(copy):
    return copy.view(torch.float32).tolist()


def test_the_computing_thread_goes_on_while_another_copies_in_the_order_that_was_asked(copies, monkeypatch):
    held, order = Held(copies), []
    monkeypatch.setattr(torch.Tensor, "copy_", noted(order, torch.Tensor.copy_))
    first, second = copies.offload(tensor(1.0, 2.0), "a"), copies.offload(tensor(3.0, 4.0), "b")
    coming = copies.prefetch(torch.tensor([7] * 8, dtype=torch.uint8))
    assert not any(one.is_done.is_set() for one in (first, second, coming))  # and this thread is here
    held.let_go()
    assert copies.arrived(coming).tolist() == [7] * 8
    assert order == [(one.to.data_ptr(), "planned copies") for one in (first, second, coming)]
    assert held.by.name == "planned copies"
    assert numbers(copies.release(first)) == [1.0, 2.0]
    assert numbers(copies.release(second)) == [3.0, 4.0]


def test_who_needs_a_copy_waits_for_its_end_and_for_no_other(copies):
    on_host = copies.release(copies.offload(tensor(1.0, 2.0), "a"))
    assert copies.arrived(first := copies.prefetch(on_host)).tolist() == on_host.tolist()
    assert first.is_done.is_set()
    waited = copies.waited_seconds
    held = Held(copies)
    behind = copies.prefetch(on_host)
    assert copies.arrived(first) is first.to  # has come: nothing to wait for
    assert copies.waited_seconds == waited
    wait = behind.is_done.wait
    behind.is_done.wait = lambda: (held.let_go(), wait())  # not before somebody waits
    assert copies.arrived(behind).tolist() == on_host.tolist()
    assert copies.waited_seconds > waited


def test_what_has_been_sent_is_held_until_its_copy_has_ended_and_dropped_then(copies):
    held = Held(copies)
    handle = copies.offload(tensor(1.0, 2.0), "a")
    assert handle.source is not None
    held.let_go()
    copies.release(handle)
    assert handle.source is None


def test_small_copies_are_made_by_the_computing_thread_at_once(copies):
    """The copying thread is busy all the while."""
    held = Held(copies)
    leaving = copies.offload_at_once(tensor(1.0, 2.0), "a")
    assert leaving.is_done is None
    coming = copies.prefetch_at_once(copies.release(leaving))
    assert coming.is_done is None
    assert numbers(copies.arrived(coming)) == [1.0, 2.0]
    assert copies.waited_seconds == 0
    held.let_go()


def test_what_nobody_comes_for_is_over_when_they_are_given_up(copies, monkeypatch):
    held, wait = Held(copies), _ThreadCopyHandle.wait
    leaving, coming = copies.offload(tensor(1.0, 2.0), "a"), copies.prefetch(torch.zeros(8, dtype=torch.uint8))
    # Not before somebody waits.
    monkeypatch.setattr(_ThreadCopyHandle, "wait", lambda handle: (held.let_go(), wait(handle))[1])
    copies.give_up()
    are_over = [one.is_done.is_set() for one in (leaving, coming)]
    held.let_go()  # in any case, for they are closed next
    assert are_over == [True, True]
    assert numbers(copies.release(copies.offload(tensor(3.0, 4.0), "a"))) == [3.0, 4.0]  # they go on


def test_all_of_a_storage_is_copied_where_a_value_is_a_view_of_it(copies):
    """The first row of two, transposed: the other one comes back with it."""
    value = tensor(1.0, 2.0).view(1, 2)[:, :1].t()
    assert numbers(copies.release(copies.offload(value, "a"))) == [1.0, 2.0]


class Link:
    """A link that notes how many bytes go over it, and by which thread."""

    def __init__(self):
        self.sent = []

    def send(self, copy, nbytes, *, is_waited_for):
        self.sent.append((nbytes, threading.current_thread().name, is_waited_for))
        copy()


def test_all_copies_of_a_device_behind_a_link_go_over_the_link_and_beside_the_computation():
    """Small ones too, or the computing thread would sleep; copies that a unit waits for to begin go first."""
    link = Link()
    copies = ThreadCopyEngine({"a": 8, "b": 8}, link)
    on_host = copies.release(copies.offload(tensor(1.0, 2.0), "a"))
    also = copies.release(copies.offload_at_once(tensor(3.0, 4.0), "b"))
    assert numbers(copies.arrived(copies.prefetch(on_host))) == [1.0, 2.0]
    assert numbers(copies.arrived(copies.prefetch_at_once(also))) == [3.0, 4.0]
    copies.close()
    assert link.sent == [(8, "planned copies", False)] * 4
