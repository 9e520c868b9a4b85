"""Whatever the data handle, the pool draws what a plain loop in a fresh process draws."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_tune import train_plain
from tests.parity.exact import differences, without_seconds
from tests.support.feeds import FEEDS, build
from tests.unit.pool.tasks import PATIENCE_SECONDS, running

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator"),
    pytest.mark.usefixtures("captured_once"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("feeds") / "plain.pt"
    command = [sys.executable, "-m", "tests.support.feeds", str(output)]
    root = Path(__file__).parents[2]
    subprocess.run(command, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=240)
    return torch.load(output, weights_only=True)


OF_OTHERS = {"workers", "workers_drawing_sampler", "workers_new_each_pass", "workers_nested"}
"""Others with workers, and the same without workers, show next to all of what these show, each in seconds."""


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in OF_OTHERS)) for name in FEEDS])
def test_trials_that_share_their_data_each_draw_what_a_plain_loop_draws(name, plain):
    """Three trials over the same objects at once, the last from the state in which the user left them still."""
    shared = build(name)
    with running(devices="cpu:2", device_memory="96KiB", num_shards=2) as pool:
        jobs = [pool.submit(shared) for _ in range(3)]
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
    for result in results:
        if result.error is not None:
            raise result.error
        actual = {
            "history": without_seconds(result.history),
            "state": dict(result.state_dict()),
            "optimizer": result.optimizer_state_dict(),
        }
        assert list(differences(plain[name], actual)) == []


@pytest.mark.parametrize(
    "name", [name for name in FEEDS if not name.startswith("workers") and name not in ("pinned", "changing_lengths")]
)
def test_a_plain_loop_leaves_the_task_as_it_was(name, plain):
    """So that the pool, or the plain loop again, gives the same numbers for the same task."""
    shared = build(name)
    for _ in range(2):
        result = train_plain(shared)
        actual = {
            "history": without_seconds(result.history),
            "state": dict(result.state_dict()),
            "optimizer": result.optimizer_state_dict(),
        }
        assert list(differences(plain[name], actual)) == []
