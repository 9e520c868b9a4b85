"""The preparer's thread: whoever replaces it serves the queue, whatever number the system gives the new thread."""

import contextlib
import threading
from queue import SimpleQueue
from types import SimpleNamespace

from hydra_tune.pool.runtime import preparer
from tests.unit.pool.tasks import until


def test_a_thread_with_the_number_of_one_that_was_replaced_goes_on(monkeypatch):
    """Linux gives the number of an ended thread to the next one; here all threads have the same."""
    core = SimpleNamespace(to_prepare=SimpleQueue(), breaking=contextlib.nullcontext)
    served, prepared = preparer.JobPreparer(core, None, None, None, None, 0), []
    hangs, go_on = threading.Event(), threading.Event()

    def prepare(job):
        if job.number == 0:
            hangs.set()
            go_on.wait()
        prepared.append(job.number)

    monkeypatch.setattr(served, "_prepare", prepare)
    monkeypatch.setattr(preparer, "threading", SimpleNamespace(get_ident=lambda: 7))
    jobs = [
        SimpleNamespace(number=number, error=None, tenant=SimpleNamespace(at_work=contextlib.nullcontext))
        for number in range(3)
    ]
    first = threading.Thread(target=served.work, daemon=True)
    first.start()
    core.to_prepare.put(jobs[0])
    hangs.wait()
    assert served.replace(7)
    assert not served.replace(7)
    go_on.set()
    first.join()
    second = threading.Thread(target=served.work, daemon=True)
    second.start()
    for job in (*jobs[1:], None):
        core.to_prepare.put(job)
    until(lambda: not second.is_alive())
    assert prepared == [0, 1, 2]
