"""Calls in order on a thread of its own."""

import gc
import subprocess
import threading
import weakref

import pytest

from hydra_tune.devices.single_thread import SingleThreadExecutor
from tests.support.forked import forked, run_code

AFTER_MAIN = """
import concurrent.futures.thread
import threading
import time

from hydra_tune import HydraExecutor
from tests.unit.pool.tasks import task


def search():
    while not concurrent.futures.thread._shutdown:  # the main thread has ended
        time.sleep(0.01)
    with HydraExecutor(devices="cpu:1", num_shards=2) as pool:
        print(pool.run(task()).status, flush=True)


threading.Thread(target=search).start()
"""


def test_a_search_on_another_thread_goes_on_after_the_end_of_the_main_thread():
    ended: subprocess.CompletedProcess[str] = forked(run_code, AFTER_MAIN)
    assert (ended.stdout, ended.returncode) == ("completed\n", 0), ended.stderr


def test_calls_are_made_in_order_on_one_thread_that_has_begun_once():
    begun, made = [], []
    with SingleThreadExecutor("calls", lambda: begun.append(threading.current_thread().name)) as thread:
        futures = [thread.submit(lambda number=number: made.append(number) or number) for number in range(5)]
        assert [future.result() for future in futures] == made == list(range(5))
    assert begun == ["calls"]
    assert not [other for other in threading.enumerate() if other.name == "calls"]


@pytest.mark.cases(1 / 3)
def test_an_error_goes_to_its_call_alone_and_keeps_nothing_alive():
    class Held:
        pass

    held = Held()
    dropped = weakref.ref(held)
    with SingleThreadExecutor("calls") as thread:
        failed = thread.submit(lambda kept=held: 1 / 0)
        del held
        with pytest.raises(ZeroDivisionError):
            failed.result()
        del failed
        assert thread.submit(lambda: 1).result() == 1
        gc.collect()
        assert dropped() is None


def test_the_end_drops_calls_that_have_not_begun_where_asked_to():
    may_end, has_begun = threading.Event(), threading.Event()
    thread = SingleThreadExecutor("calls")
    running = thread.submit(lambda: has_begun.set() or may_end.wait(30))
    waiting = thread.submit(lambda: 1)
    has_begun.wait(30)
    threading.Timer(0.05, may_end.set).start()
    thread.shutdown(cancel_futures=True)
    assert running.result()
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="thread calls has ended"):
        thread.submit(lambda: 1)
    thread.shutdown()
