"""A process forked beside a pool has none of its threads, and leaves the pool alone."""

from tests.support.forked import forked, run_code

PROGRAM = """
import os
import signal
import sys
from pathlib import Path

from hydra_tune import HydraExecutor
from hydra_tune.errors import HydraTuneError
from tests.unit.pool.tasks import Held, task


def in_a_fork(function):
    child = os.fork()
    if not child:
        signal.alarm(60)
        function()
        sys.exit()
    return os.waitpid(child, 0)[1]


def submit():
    try:
        pool.submit(task())
    except HydraTuneError as error:
        print(str(error).partition(";")[2].strip())
    for call in (job.result, pool.stats, job.checkpoint):
        try:
            call()
        except HydraTuneError as error:
            print("was forked" in str(error))
    pool.shutdown()


spill_dir, held = Path(sys.argv[1]), Held()
pool = HydraExecutor(devices="cpu:1", spill_dir=spill_dir, instrument=held)
job = pool.submit(task())
folder = list(spill_dir.iterdir())
print(in_a_fork(submit), list(spill_dir.iterdir()) == folder)
held.go()
print(job.result().status)
pool.shutdown()
print(list(spill_dir.iterdir()))
"""


def test_the_end_of_a_forked_process_ends_no_job_and_removes_no_file(tmp_path):
    ended = forked(run_code, PROGRAM, tmp_path)
    told = "make a HydraExecutor in the forked process"
    assert ended.stdout.splitlines() == [told, "True", "True", "True", "0 True", "completed", "[]"], ended.stderr
