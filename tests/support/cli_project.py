"""A folder with a small real sweep, and `hydra-tune` run in it: as a process of its own, or within this one."""

import os
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from textwrap import dedent
from unittest import mock

from click.testing import CliRunner

from hydra_tune.cli import main
from tests.support.forked import Forked, forked, run_module

MODEL = """
import threading
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from hydra_tune import TrainTask

torch.manual_seed(0)
x = torch.randn(64, 8)
y = x.sum(1, keepdim=True)


def batches():
    return [(x[at : at + 16], y[at : at + 16]) for at in range(0, 64, 16)]


def net(width):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def build(lr, width=16, epochs=4):
    print("building")
    return TrainTask(
        model=partial(net, width),
        optimizer=partial(torch.optim.AdamW, lr=lr),
        loss=nn.functional.mse_loss,
        train=batches,
        validate=batches,
        epochs=epochs,
    )


def from_trial(trial):
    return build(trial.suggest_float("lr", 1e-4, 1e-1, log=True), width=trial.suggest_int("width", 4, 8))


def hanging():
    yield from batches()[:3]
    print("hanging", flush=True)
    threading.Event().wait()


def hangs(lr):
    return replace(build(lr, epochs=50), train=hanging if lr > 0.5 else batches)


def broken(lr):
    return build(lr).__class__(
        model=fail, optimizer=torch.optim.SGD, loss=nn.functional.mse_loss, train=batches, validate=batches
    )


def fail():
    raise RuntimeError("no such model")
"""

SPACE = """
task: model:build
metric: {name: val_loss}
run_cap: 8
seed: 0
parameters:
  lr: {distribution: log_uniform_values, min: 1e-5, max: 0.1}
  width: {values: [8, 16]}
hydra: {devices: "cpu:2", device_memory: 4MiB, max_concurrent: 4}
"""


class Project:
    """A folder with `model.py` and `space.yaml`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model.py").write_text(MODEL)
        self.write(SPACE)

    def write(self, space):
        (self.folder / "space.yaml").write_text(dedent(space).lstrip())

    def change(self, old, new):
        path = self.folder / "space.yaml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def files(self):
        return sorted(path.name for path in self.folder.iterdir() if path.name != "__pycache__")

    def command(self, *arguments):
        return [sys.executable, "-m", "hydra_tune", "sweep", "space.yaml", *arguments]

    @staticmethod
    def environment(**more):
        kept = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "FORCE_COLOR"}}
        return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}

    def start(self, *arguments):
        """The same without waiting, in a process group of its own."""
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def fork(self, *arguments):
        """The same in a process that has loaded torch already, for what is not about an interpreter that comes up."""
        return Forked(*self._forked(*arguments), cwd=self.folder, environment=self.environment())

    def run(self, *arguments):
        """The same to its end."""
        return forked(*self._forked(*arguments), cwd=self.folder, environment=self.environment())

    @staticmethod
    def _forked(*arguments):
        return run_module, "hydra_tune", "sweep", "space.yaml", *arguments

    def call(self, *arguments):
        """The same within this process, which need not load torch once more; for what is not about processes, or crashes."""
        environment = dict.fromkeys(("COLUMNS", "LINES", "FORCE_COLOR"))
        with chdir(self.folder), mock.patch.object(sys, "path", list(sys.path)):
            sys.modules.pop("model", None)
            try:
                done = CliRunner(env=environment).invoke(main, ["sweep", "space.yaml", "--no-isolate", *arguments])
            finally:
                sys.modules.pop("model", None)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)
