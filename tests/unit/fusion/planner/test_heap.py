"""Freed memory stays with the process: what is freed and taken again costs no page faults."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from hydra_tune.fusion.planner.heap import keep_freed_memory

def step():
    return [torch.ones(1 << 20) for _ in range(48)]

is_kept = {kept} and keep_freed_memory()
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(is_kept, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5)
"""


def faults(*, kept, **environment):
    script = SCRIPT.format(kept=kept)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    is_kept, number = done.stdout.split()
    return is_kept == "True", int(number)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux's C library alone")
def test_a_step_that_takes_what_the_last_one_freed_has_no_page_faults():
    _, without = faults(kept=False)
    is_kept, number = faults(kept=True)
    assert not is_kept or number < without / 10
    assert faults(kept=True, MALLOC_TRIM_THRESHOLD_="1000000")[0] is False
