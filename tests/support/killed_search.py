"""A search with checkpoints that may be killed at any moment, and goes on with what others have left."""

import random
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from optuna.samplers import BaseSampler

import hydra_tune_optuna as optuna
from hydra_tune import HydraExecutor, TrainTask
from hydra_tune_optuna.search.checkpoint_gc import StudyCheckpointCollector
from tests.support.killed import described

NUM_TRIALS = 8
ENQUEUED = (2e-3, 4e-3, 6e-3)
STUDY = "killed"


class ByNumber(BaseSampler):
    """Draws what only the trial's number decides, so that searches that were killed can be compared with one that was not."""

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        return random.Random(f"{trial.number} {param_name}").uniform(param_distribution.low, param_distribution.high)


def storage(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


def build(trial: optuna.Trial) -> TrainTask:
    """A trial of 36 steps, with a report after every fifth."""
    task = described(trial.number, 3)
    rate, decay = trial.suggest_float("lr", 1e-3, 1e-2), trial.suggest_float("decay", 0.0, 0.1)
    values = {name: getattr(task, name) for name in task.__dataclass_fields__}
    return TrainTask(**values | {"optimizer": partial(torch.optim.AdamW, lr=rate, weight_decay=decay)})


def begin(folder: Path) -> None:
    """The study, with some trials that wait."""
    study = optuna.create_study(storage=storage(folder), study_name=STUDY)
    for rate in ENQUEUED:
        study.enqueue_trial({"lr": rate})


def search(folder: Path, devices: str) -> None:
    """Go on until there are as many trials as there are to be."""
    torch.set_num_threads(1)
    with HydraExecutor(
        devices=devices, max_concurrent=3, num_shards=2, checkpoint_dir=folder / "saved", checkpoint_every=4
    ) as pool:
        study = optuna.load_study(
            study_name=STUDY,
            storage=storage(folder),
            sampler=ByNumber(),
            pruner=optuna.pruners.NopPruner(),
            executor=pool,
            keep_best=NUM_TRIALS,
            weights_dir=folder / "weights",
        )
        asked = sum(trial.state != optuna.trial.TrialState.WAITING for trial in study.trials)
        study.optimize(build, n_trials=NUM_TRIALS - asked)


def search_in_step(folder: Path, devices: str) -> None:
    """The same where the search waits, at each trial that is told, for the threads that keep weights and remove checkpoints.

    Killed in a removal, it has told no trial after that one, however late the threads come to it.
    """
    settle = StudyCheckpointCollector.settle

    def settle_whole(self: StudyCheckpointCollector, *, waits: bool = False) -> None:
        settle(self, waits=True)
        self._pool.find_checkpoint("of no trial")  # looks only when the pool has written and removed all that it was to

    with mock.patch.object(StudyCheckpointCollector, "settle", settle_whole):
        search(folder, devices)
