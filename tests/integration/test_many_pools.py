"""Pools come and go in one process, with all their threads; an older torch's CUDA build without a GPU died of that."""

import subprocess
import sys

import pytest


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("count", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_one_pool_after_the_other_with_a_new_model_in_each(count):
    program = [sys.executable, "-m", "tests.support.many_pools", str(count)]
    ended = subprocess.run(program, capture_output=True, text=True, check=False, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [f"{width} completed" for width in range(1, count + 1)]
