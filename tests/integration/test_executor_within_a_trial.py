"""A trial's own code uses another executor: each call that waits lets that executor capture its models meanwhile."""

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import sys, tempfile
    import torch
    from torch import nn
    from hydra_tune import HydraExecutor, TrainTask

    call = sys.argv[1]

    def data():
        return [(torch.zeros(4, 8), torch.zeros(4, 1)) for _ in range(3)]

    def sgd(parameters):
        return torch.optim.SGD(parameters, 0.1)

    def inner_task():
        model = lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        return TrainTask(model=model, optimizer=sgd, loss=nn.functional.mse_loss, train=data, epochs=200)

    def use_another(folder):
        with HydraExecutor(devices="cpu:1", num_shards=2, checkpoint_dir=folder) as inner:
            if call == "plan":
                return inner.plan(inner_task()).trials[0].num_shards
            if call == "profile":
                return len(inner.profile([inner_task()], steps=1)["trials"])
            job = inner.submit(inner_task())
            if call == "checkpoint":
                return job.checkpoint()
            if call == "clone":
                return inner.clone(job).state
            if call == "save_to":
                return inner.save_to(job, folder + "/saved")
            if call == "suspend":
                return inner.suspend([job])
            assert call == "shutdown"

    calls = []

    def step(module, batch):
        if not calls:
            with tempfile.TemporaryDirectory() as folder:
                calls.append(use_another(folder))
        return nn.functional.mse_loss(module(batch[0]), batch[1])

    outer = TrainTask(model=lambda: nn.Linear(8, 1), optimizer=sgd, step=step, train=data)
    with HydraExecutor(devices="cpu:1") as pool:
        print(pool.run(outer).status)
"""


@pytest.mark.cases(2)
@pytest.mark.parametrize("call", ["plan", "profile", "checkpoint", "clone", "save_to", "suspend", "shutdown"])
def test_a_call_that_waits_leaves_the_capture_gate(call, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    ended = subprocess.run(
        [sys.executable, str(program), call], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout.split() == ["completed"], ended.stderr
