"""Captures run alone, eager code beside eager code. Threads meet at barriers; none sleeps."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from hydra_tune.shard.capture.capture_lock import GATE, CaptureGate

PATIENCE_SECONDS = 60


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_many_share_the_gate(threads):
    gate, barrier = CaptureGate(), threading.Barrier(4)

    def share():
        with gate.shared():
            barrier.wait(PATIENCE_SECONDS)

    for future in [threads.submit(share) for _ in range(4)]:
        future.result(PATIENCE_SECONDS)


def test_nobody_is_beside_who_is_alone(threads):
    gate = CaptureGate()
    inside, seen = [], []
    lock = threading.Lock()

    def enter(kind, mode):
        for _ in range(200):
            with mode():
                with lock:
                    inside.append(kind)
                    seen.append(tuple(inside))
                with lock:
                    inside.remove(kind)

    futures = [threads.submit(enter, "shared", gate.shared) for _ in range(4)]
    futures += [threads.submit(enter, "alone", gate.exclusive) for _ in range(3)]
    for future in futures:
        future.result(PATIENCE_SECONDS)
    assert all(held == ("alone",) for held in seen if "alone" in held)
    assert len(seen) == 200 * 7


class Announcing(threading.Condition):
    """Says when somebody begins to wait."""

    def __init__(self):
        super().__init__()
        self.waits = threading.Event()

    def wait_for(self, predicate, timeout=None):
        self.waits.set()
        return super().wait_for(predicate, timeout)


def test_who_wants_it_alone_goes_before_who_comes_later_to_share(threads):
    gate, order = CaptureGate(), []

    def alone():
        with gate.exclusive():
            order.append("alone")

    def late():
        with gate.shared():
            order.append("late")

    with gate.shared():
        gate._condition = Announcing()
        capture = threads.submit(alone)
        assert gate._condition.waits.wait(PATIENCE_SECONDS)
        gate._condition.waits.clear()
        latecomer = threads.submit(late)
        assert gate._condition.waits.wait(PATIENCE_SECONDS)
        assert order == []
    capture.result(PATIENCE_SECONDS)
    latecomer.result(PATIENCE_SECONDS)
    assert order == ["alone", "late"]


@pytest.mark.parametrize("mode", ["shared", "exclusive", "alone"])
def test_an_error_inside_opens_the_gate_again(mode):
    gate = CaptureGate()
    with pytest.raises(ZeroDivisionError), getattr(gate, mode)():
        _ = 1 / 0
    with gate.exclusive():
        pass
    with gate.shared():
        pass


def test_a_thread_inside_shares_again_though_a_capture_waits(threads):
    gate = CaptureGate()
    with gate.shared():
        capture = threads.submit(gate.exclusive().__enter__)
        while not gate.is_wanted:
            threading.Event().wait(0.001)
        with gate.shared(), gate.alone():
            assert not capture.done()


def test_a_thread_lets_captures_by_while_it_waits_and_comes_back(threads):
    gate = CaptureGate()

    def capture():
        with gate.exclusive():
            return True

    with gate.left():
        assert capture()
    with gate.shared():
        with gate.left():
            assert threads.submit(capture).result(PATIENCE_SECONDS)
        later = threads.submit(capture)
        while not gate.is_wanted:
            threading.Event().wait(0.001)
        assert not later.done()
    assert later.result(PATIENCE_SECONDS)


LONG = 2 * PATIENCE_SECONDS


def test_who_is_alone_keeps_all_others_out(threads):
    gate = CaptureGate()
    is_at_work, entered = threading.Event(), []

    def enter(mode):
        with mode():
            entered.append(is_at_work.is_set())

    with gate.alone(LONG), gate.shared():
        is_at_work.set()
        futures = [threads.submit(enter, mode) for mode in (gate.shared, gate.exclusive, gate.alone)]
        while gate._waiting < 2:
            threading.Event().wait(0.001)
        is_at_work.clear()
    for future in futures:
        future.result(PATIENCE_SECONDS)
    assert entered == [False] * 3


@pytest.mark.parametrize("way", ["left", "exclusive", "forget"])
def test_who_is_alone_and_waits_lets_others_in(threads, way):
    gate = CaptureGate()

    def share():
        with gate.shared():
            return True

    with gate.alone(LONG):
        if way == "exclusive":
            for _ in range(2):
                with gate.exclusive():
                    pass
        elif way == "left":
            with gate.left():
                assert threads.submit(share).result(PATIENCE_SECONDS)
        else:
            gate.forget(threading.get_ident())
        assert threads.submit(share).result(PATIENCE_SECONDS)
    with gate.exclusive():
        pass


def test_who_takes_long_alone_lets_others_in(threads):
    gate = CaptureGate()

    def share():
        with gate.shared():
            return True

    with gate.alone():
        assert threads.submit(share).result(PATIENCE_SECONDS)


def test_a_wait_that_is_interrupted_keeps_nobody_out(threads):
    gate = CaptureGate()

    class Interrupted(threading.Condition):
        def wait_for(self, predicate, timeout=None):
            raise KeyboardInterrupt

    condition = gate._condition
    gate._condition = Interrupted()
    with pytest.raises(KeyboardInterrupt), gate.exclusive():
        pass
    gate._condition = condition

    def share():
        with gate.shared():
            return True

    assert threads.submit(share).result(PATIENCE_SECONDS)


def test_a_tensor_printed_on_another_thread_leaves_a_capture_its_modes():
    """To print a tensor, torch switches off all modes for a moment."""
    off, over = threading.Event(), threading.Event()

    def switch_off():
        with _disable_current_modes():
            off.set()
            over.wait(20)

    class Interrupted(nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=switch_off)
            thread.start()
            off.wait(20)
            doubled = x * 2
            over.set()
            thread.join()
            return doubled

    with GATE.exclusive():
        graph = torch.export.export(Interrupted(), (torch.ones(2),)).graph
    assert [node.name for node in graph.nodes if node.op == "call_function"] == ["mul"]


def test_an_interrupted_wait_to_enter_again_leaves_the_gate_open_for_captures(monkeypatch):
    gate = CaptureGate()

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), gate.shared(), gate.left():
        monkeypatch.setattr(gate, "_enter", interrupted)
    monkeypatch.undo()
    with gate.shared():
        pass
    assert gate._sharing == 0


def until_waiting(gate, number):
    while len(gate._turns) < number:
        threading.Event().wait(0.001)


def test_one_thread_builds_at_a_time_in_the_order_of_arrival(threads):
    gate, order = CaptureGate(), []

    def build(number):
        with gate.building():
            order.append(number)

    with gate.building():
        futures = []
        for number in range(3):
            futures.append(threads.submit(build, number))
            until_waiting(gate, number + 2)
        with gate.building():
            order.append("again")
        order.append("first")
    for future in futures:
        future.result(PATIENCE_SECONDS)
    assert order == ["again", "first", 0, 1, 2]


def test_a_thread_inside_waits_for_its_turn_to_build_outside(threads):
    """The thread that builds may need to be alone."""
    gate = CaptureGate()

    def build():
        with gate.shared(), gate.building():
            return True

    with gate.building():
        other = threads.submit(build)
        until_waiting(gate, 2)
        with gate.exclusive():
            assert not other.done()
    assert other.result(PATIENCE_SECONDS)


def test_a_builder_that_takes_long_or_waits_lets_the_next_one_in(threads):
    gate = CaptureGate()

    def build():
        with gate.building():
            return True

    with gate.building(0.0):
        assert threads.submit(build).result(PATIENCE_SECONDS)
    with gate.building():
        with gate.left():
            assert threads.submit(build).result(PATIENCE_SECONDS)
        other = threads.submit(build)
        until_waiting(gate, 2)
        assert not other.done()
    assert other.result(PATIENCE_SECONDS)


def test_an_interrupted_wait_to_build_keeps_nobody_out(threads, monkeypatch):
    gate = CaptureGate()

    def build():
        with gate.building():
            return True

    def interrupted(timeout=None):
        raise KeyboardInterrupt

    def interrupted_build():
        monkeypatch.setattr(gate._condition, "wait", interrupted)
        try:
            with pytest.raises(KeyboardInterrupt):
                build()
        finally:
            monkeypatch.undo()

    with gate.building():
        threads.submit(interrupted_build).result(PATIENCE_SECONDS)
    assert threads.submit(build).result(PATIENCE_SECONDS)


@pytest.mark.parametrize("outer", ["shared", "alone", None])
def test_a_thread_inside_may_become_alone_without_an_end(threads, outer):
    gate = CaptureGate()
    entered = threading.Event()

    def share():
        with gate.shared():
            entered.set()

    with getattr(gate, outer)() if outer else nullcontext():
        with gate.alone_inside():
            other = threads.submit(share)
            assert not entered.wait(0.6)  # longer than `alone` lasts
        other.result(PATIENCE_SECONDS)
        if outer == "alone":
            with gate.exclusive():
                pass
    with gate.exclusive():
        pass
