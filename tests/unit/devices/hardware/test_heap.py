"""Freed memory stays with the process: what is freed and taken again costs no page faults."""

import os
import subprocess
import sys

import pytest

from hydra_tune.devices.hardware.heap import PLAN_BYTES, STEP_BYTES

# Without huge pages (PR_SET_THP_DISABLE): with them a fault brings up to 512 pages, and counts depend on the machine's memory.
SCRIPT = """
import ctypes, resource, threading, torch
from hydra_tune.devices.hardware.heap import keep_freed_memory
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)

def step():
    return [torch.ones({size}) for _ in range({count})]

def run():
    global faults
    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5

is_kept = {kept} > 0 and keep_freed_memory({kept})
{run}
print(is_kept, faults)
"""
PLANNED = {"size": 1 << 20, "count": 48, "run": "run()"}
ON_A_THREAD = {
    "size": 100_000,
    "count": 30,
    "run": "thread = threading.Thread(target=run); thread.start(); thread.join()",
}


def faults(of, *, kept=0, **environment):
    script = SCRIPT.format(kept=kept, **of)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    is_kept, number = done.stdout.split()
    return is_kept == "True", int(number)


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux's C library alone")


@pytest.mark.slow
def test_a_step_that_takes_what_the_last_one_freed_has_no_page_faults():
    _, without = faults(PLANNED)
    is_kept, number = faults(PLANNED, kept=PLAN_BYTES)
    # The library keeps all by itself where something lies behind the last block.
    assert not is_kept or number <= without / 10
    assert faults(PLANNED, kept=PLAN_BYTES, MALLOC_TRIM_THRESHOLD_="1000000")[0] is False


@pytest.mark.cases(1 / 3)
def test_batches_that_a_thread_makes_have_none_either():
    """The library gives threads other than the main one memory of their own, and takes it back sooner."""
    _, without = faults(ON_A_THREAD)
    is_kept, number = faults(ON_A_THREAD, kept=STEP_BYTES)
    assert without > 100
    assert not is_kept or number < without / 10
