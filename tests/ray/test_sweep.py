"""`hydra-tune sweep FILE --ray ADDRESS`: the same file, on a cluster."""

import json
import socket
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("ray")

from tests.ray.searches import expected

TASK = """
    from tests.support import ray_tasks

    def build(lr, epochs, report_every):
        if lr == 0.01:
            raise RuntimeError("not this one")
        return ray_tasks.build({"lr": lr, "epochs": epochs, "dtype": "float64", "report_every": report_every})
"""
SPACE = """
    task: task:build
    method: {method}
    run_cap: {cap}
    seed: 0
    metric: {{name: train_loss, goal: minimize}}
    parameters:
      lr: {lr}
      epochs: {{value: 4}}
      report_every: {{value: {report_every}}}
    early_terminate: {{type: successive_halving, min_iter: 2, eta: 2}}
    hydra: {{devices: cpu:2, device_memory: 64MiB, {more}}}
"""


def sweep(
    folder,
    *arguments,
    method="grid",
    cap=3,
    lr="{values: [0.01, 0.02, 0.03]}",
    more="",
    address="local",
    report_every="epoch",
    task=TASK,
    cwd=None,
):
    (folder / "task.py").write_text(textwrap.dedent(task))
    (folder / "space.yaml").write_text(
        textwrap.dedent(SPACE).format(method=method, cap=cap, lr=lr, more=more, report_every=report_every)
    )
    file = str(folder / "space.yaml")
    return subprocess.run(
        [sys.executable, "-m", "hydra_tune", "sweep", file, "--ray", address, "--json", *arguments],
        cwd=cwd or folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )


def test_what_ray_has_its_own_of_is_refused(tmp_path):
    run = sweep(tmp_path, more="storage: 'sqlite:///x.db'")
    assert run.returncode == 2
    assert "hydra.storage is not for sweeps on a Ray cluster" in run.stderr
    run = sweep(tmp_path, "--timeout", "3")
    assert run.returncode == 2
    assert "--timeout is not for sweeps on a Ray cluster" in run.stderr


def test_an_address_at_which_nobody_listens(ray_environment, tmp_path):
    with socket.socket() as taken:  # nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = sweep(tmp_path, address=address)
    assert run.returncode == 2
    assert f"--ray: there is no Ray cluster at '{address}': nobody listens at" in run.stderr
    assert "ray start --head" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "fuse: 'on', fuse_size: 4"])
def test_a_grid_is_run_and_a_trial_that_fails_is_told(ray_environment, tmp_path, monkeypatch, more):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = sweep(tmp_path, more=more)
    assert run.returncode == 0, run.stderr[-3000:]
    shown = json.loads(run.stdout)
    trials = {trial["params"]["lr"]: trial for trial in shown["trials"]}
    assert trials[0.01]["state"] == "failed"
    assert trials[0.01]["error"] == "TrialError: RuntimeError: not this one"
    rates = 0.02, 0.03
    wanted = dict(zip(rates, expected([{"lr": lr, "epochs": 4, "dtype": "float64"} for lr in rates]), strict=True))
    # Successive halving looks after the second epoch of four, and ends there the worse one if it is the later one to come.
    last = {"completed": 3, "pruned": 1}
    assert [trials[lr]["value"] for lr in rates] == pytest.approx(
        [wanted[lr][last[trials[lr]["state"]]] for lr in rates], rel=1e-9 if more else 0, abs=0
    )
    assert min(wanted, key=lambda lr: wanted[lr][1]) in [lr for lr in rates if trials[lr]["state"] == "completed"]


DIVERGING = """
    import dataclasses

    from tests.support import ray_tasks

    def build(lr, epochs, report_every):
        task = ray_tasks.build({"lr": lr, "epochs": epochs, "report_every": report_every})
        return dataclasses.replace(task, on_bad_loss="prune")
"""


@pytest.mark.slow
def test_a_trial_that_prunes_itself_after_a_report_is_pruned(ray_environment, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = sweep(tmp_path, cap=2, lr="{values: [0.02, 1.0e+30]}", report_every=1, task=DIVERGING)
    assert run.returncode == 0, run.stderr[-3000:]
    trials = {trial["params"]["lr"]: trial for trial in json.loads(run.stdout)["trials"]}
    assert {rate: trial["state"] for rate, trial in trials.items()} == {0.02: "completed", 1e30: "pruned"}
    assert isinstance(trials[1e30]["value"], float), "that of its report"


@pytest.mark.slow
def test_a_trial_that_trains_on_after_its_last_report_is_completed(ray_environment, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = sweep(tmp_path, cap=1, lr="{values: [0.02]}", report_every=5)  # of 16 steps
    assert run.returncode == 0, run.stderr[-3000:]
    assert [trial["state"] for trial in json.loads(run.stdout)["trials"]] == ["completed"]


@pytest.mark.slow
def test_modules_beside_a_file_in_another_folder_are_found(ray_environment, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "beside.py").write_text("from tests.support import ray_tasks\n")
    task = TASK.replace("from tests.support import ray_tasks", "import beside").replace(
        "ray_tasks.", "beside.ray_tasks."
    )
    run = sweep(folder, cap=1, lr="{values: [0.02]}", task=task, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert [trial["state"] for trial in json.loads(run.stdout)["trials"]] == ["completed"]


@pytest.mark.slow
def test_tpe_draws(ray_environment, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = sweep(tmp_path, method="bayes", cap=5, lr="{min: 0.011, max: 0.03}")
    assert run.returncode == 0, run.stderr[-3000:]
    trials = json.loads(run.stdout)["trials"]
    assert len(trials) == 5
    assert len({trial["params"]["lr"] for trial in trials}) == 5
