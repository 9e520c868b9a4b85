"""A draw that is interrupted leaves the interpreter as it was, and nothing open."""

import subprocess
import sys
import threading
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.train.data.data_feed import TrialDataFeed
from hydra_tune.train.data.loader_clock import LoaderInterrupt

ROOT = Path(__file__).parents[4]
PROGRAM = """
import sys, threading
from hydra_tune.train.data.loader_clock import DrawClock, LoaderInterrupt

clock, is_hanging, may_go_on = DrawClock(), threading.Event(), threading.Lock()

def draw():
    try:
        with clock.drawing([], in_process=False):
            is_hanging.set()
            may_go_on.acquire()  # in the system, where no exception comes through
    except LoaderInterrupt:
        print("given up")

def called():
    return 1

may_go_on.acquire()
thread = threading.Thread(target=draw)
thread.start()
is_hanging.wait()
assert clock.interrupt()
if sys.argv[1] == "over":
    may_go_on.release()
    thread.join()
sys.setprofile(lambda *_: None)
called()
sys.setprofile(None)
print("profiled")
if sys.argv[1] == "hanging":
    may_go_on.release()
    thread.join()
"""


@pytest.mark.cases(1)
@pytest.mark.parametrize("when", ["hanging", "over"])
def test_functions_can_be_profiled_after_a_draw_was_interrupted(when):
    """On Python 3.11 the first one never began, for it waited for another thread to take its exception."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, when],
        env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.split()) == sorted(["given", "up", "profiled"])


def test_a_draw_that_is_interrupted_as_it_ends_leaves_clock_and_gate():
    """Python raises the exception of another thread at the beginning of a function, so in that of an `__exit__`, too."""
    for call in count(1):
        has_drawn, calls, interrupted = False, 0, []

        class Batches:
            def __iter__(self):
                return self

            def __next__(self):
                nonlocal has_drawn
                has_drawn = True
                return 0

        feed = TrialDataFeed(None, GATE.shared)
        thread = threading.Thread(target=lambda: interrupted.append(feed.clock.interrupt()))  # noqa: B023

        def trace(frame, *_):
            nonlocal calls
            if has_drawn and frame.f_code.co_name == "__exit__":  # noqa: B023
                calls += 1
                if calls == call:  # noqa: B023
                    thread.start()  # noqa: B023
                    thread.join(60.0)  # noqa: B023

        with closing(feed.draw(Batches, shuffle=False)) as draws:
            tracing = sys.gettrace()
            sys.settrace(trace)
            try:
                batch = next(draws)
            except LoaderInterrupt:
                batch = None
            finally:
                sys.settrace(tracing)
        if not thread.ident:
            break
        thread.join()
        assert (batch is None) == interrupted[0]
        assert feed.clock.seconds == 0.0
        assert GATE._sharing == 0
    assert call > 2
