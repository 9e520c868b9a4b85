"""A search with checkpoints that may be killed at any moment; tests start it: `python -m tests.support.killed_study FOLDER`."""

import sys
from functools import partial
from pathlib import Path

import torch

import hydra_tune_optuna as optuna
from hydra_tune import HydraExecutor, TrainTask
from tests.support.killed import described

RATES = (1e-3, 3e-3, 1e-2)


def build(trial: optuna.Trial, epochs: int = 8) -> TrainTask:
    """A trial of twelve steps an epoch, with a report after every fifth."""
    task = described(trial.number, epochs)
    rate = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    values = {name: getattr(task, name) for name in task.__dataclass_fields__}
    return TrainTask(**values | {"optimizer": partial(torch.optim.AdamW, lr=rate)})


def storage(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


def begin(folder: Path, pool: HydraExecutor) -> optuna.Study:
    """A study whose trials are fixed."""
    study = optuna.create_study(storage=storage(folder), study_name="killed", executor=pool)
    for rate in RATES:
        study.enqueue_trial({"lr": rate})
    return study


def main(folder: str) -> None:
    """Search, until somebody kills this process."""
    torch.set_num_threads(1)
    with HydraExecutor(devices="cpu:2", max_concurrent=2, checkpoint_dir=Path(folder) / "saved") as pool:
        begin(Path(folder), pool).optimize(build, n_trials=len(RATES))


if __name__ == "__main__":
    main(*sys.argv[1:])
