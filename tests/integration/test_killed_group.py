"""A fused search that is killed goes on from its members' checkpoints, and ends as plain loops would."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hydra_tune import HydraExecutor, train_plain
from tests.support.killed_group import HELD_STEPS, SEEDS, described

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 120.0


def kill_among_checkpoints(folder, precision="float32"):
    """Start a search and kill it once all members are saved at the report where they wait."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.killed_group", str(folder), precision],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "saved\n", process.communicate()[1]
    process.send_signal(signal.SIGKILL)
    process.communicate()


def gone_on_with(folder, fusion, precision="float32"):
    """The results of a search that was killed."""
    with HydraExecutor(devices="cpu:1", checkpoint_dir=folder, fusion=fusion) as pool:
        found = [pool.find_checkpoint(str(seed)) for seed in SEEDS]
        assert [one.steps for one in found] == [HELD_STEPS] * len(SEEDS)
        jobs = [
            pool.submit(described(seed, precision), str(seed), resume_from=one.path)
            for seed, one in zip(SEEDS, found, strict=True)
        ]
        return [job.result(PATIENCE_SECONDS) for job in jobs]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_search_in_mixed_precision_that_is_killed_has_the_bits_of_one_that_is_not(tmp_path, precision):
    kill_among_checkpoints(tmp_path, precision)
    results = gone_on_with(tmp_path, "on", precision)
    with HydraExecutor(devices="cpu:1", fusion="on") as pool:
        whole = pool.run([described(seed, precision) for seed in SEEDS])
    assert {result.group_size for result in [*results, *whole]} == {len(SEEDS)}
    for result, expected in zip(results, whole, strict=True):
        assert [h["val_loss"] for h in result.history] == [h["val_loss"] for h in expected.history]
        for name, tensor in expected.state_dict().items():
            assert torch.equal(result.state_dict()[name], tensor)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fusion", ["on", "off"])
def test_a_fused_search_that_is_killed_ends_as_plain_loops(tmp_path, fusion):
    kill_among_checkpoints(tmp_path)
    results = gone_on_with(tmp_path, fusion)
    assert {result.group_size for result in results} == ({len(SEEDS)} if fusion == "on" else {1})
    for seed, result in zip(SEEDS, results, strict=True):
        plain = train_plain(described(seed))
        assert [h["val_loss"] for h in result.history] == pytest.approx(
            [h["val_loss"] for h in plain.history], rel=1e-9
        )
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(result.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
