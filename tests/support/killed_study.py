"""A search with checkpoints that may be killed at any moment; tests start it: `python -m tests.support.killed_study FOLDER`."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

import hydra_tune_optuna as optuna
from hydra_tune import HydraExecutor, TrainTask
from tests.support.killed import described

RATES = (1e-3, 3e-3, 1e-2)


def build(trial: optuna.Trial, epochs: int = 4) -> TrainTask:
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


def saved_trials(folder: Path) -> int:
    """How many trials have a checkpoint now."""
    return len({path.parent for path in folder.glob("saved/*/*.manifest")})


def main(folder: str) -> None:
    """Search until two trials are saved, and wait there: somebody kills this process, however late they look."""
    torch.set_num_threads(1)

    @contextmanager
    def instrument() -> Iterator[None]:
        while saved_trials(Path(folder)) == 2:
            time.sleep(0.01)
        yield

    with HydraExecutor(
        devices="cpu:2", max_concurrent=2, checkpoint_dir=Path(folder) / "saved", instrument=instrument
    ) as pool:
        begin(Path(folder), pool).optimize(build, n_trials=len(RATES))


if __name__ == "__main__":
    main(*sys.argv[1:])
