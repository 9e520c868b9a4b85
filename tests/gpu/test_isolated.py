"""`HydraExecutor(isolate=True)` on a GPU: an illegal index poisons CUDA for the whole process, and ends one trial only."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from hydra_tune import HydraExecutor, TrainTask, train_plain
from tests.parity.exact import differences, without_seconds

ROOT = Path(__file__).parents[2]
NUM_TRIALS, BAD, SECONDS = 4, 1, 240
WORDS = 64


def batches(*, is_bad):
    """The bad trial's fourth batch has an index beyond its table."""
    generator = torch.Generator().manual_seed(0)
    for number in range(6):
        index = torch.randint(WORDS, (8,), generator=generator)
        if is_bad and number == 3:
            index = index + (1 << 20)
        yield index, torch.randn(8, 4, generator=generator)


def net():
    return nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def task_of(number):
    return TrainTask(
        model=net,
        optimizer=partial(torch.optim.SGD, lr=0.01 * (1 + number)),
        loss=nn.functional.mse_loss,
        train=partial(batches, is_bad=number == BAD),
        epochs=4,
        seed=number,
    )


def search(devices, folder):
    """Write how each trial has ended; in a process of its own, which has not begun CUDA before."""
    torch.use_deterministic_algorithms(True)
    with HydraExecutor(devices, checkpoint_dir=Path(folder, "saved"), max_concurrent=3, isolate=True) as pool:
        results = pool.run([task_of(number) for number in range(NUM_TRIALS)], on_error="return")
    ends = []
    for number, result in enumerate(results):
        if result.error is not None:
            ends.append(f"{type(result.error).__name__}: {result.error}")
            continue
        plain = train_plain(task_of(number), device="cuda:0" if devices == "cuda" else "cpu")
        found = [*differences(plain.state_dict(), result.state_dict())]
        found += differences(without_seconds(plain.history), without_seconds(result.history))
        ends.append(str(found[0]) if found else "as in a plain loop")
    Path(folder, "ends.json").write_text(json.dumps(ends))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_illegal_index_ends_one_trial_of_an_isolated_pool(tmp_path):
    program = f"from tests.gpu.test_isolated import search; search('cuda', {str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        # The import asks whether there is a GPU, and must not begin CUDA for that.
        env=dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]), PYTORCH_NVML_BASED_CUDA_CHECK="1"),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ends = json.loads((tmp_path / "ends.json").read_text())
    error = ends.pop(BAD)
    assert ends == ["as in a plain loop"] * (NUM_TRIALS - 1), done.stderr
    times = f"job {BAD} has ended the pool's process 2 times while it ran, the last time"
    assert error.startswith(f"TrialCrashedError: {times} by the loss of its last device, cuda:0 ("), error
    assert "CUDA error: device-side assert triggered" in error
