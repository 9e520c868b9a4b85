"""What the Optuna contract tests share: a small task, stock Optuna driving the plain loop, and records to compare."""

import logging
import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import optuna
import torch
from torch import nn

import hydra_tune_optuna
from hydra_tune import HydraExecutor, TrainTask, train_plain
from tests.contract.plain_pool import PlainPool

_GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(24, 3, generator=_GENERATOR)
TARGETS = torch.tanh(INPUTS.sum(1, keepdim=True))

_HAS_NEW_NAMES = hasattr(optuna.storages, "RetryHeartbeatStaleTrialCallback")  # from Optuna 4.9 on
RetryStale = getattr(optuna.storages, "RetryHeartbeatStaleTrialCallback", optuna.storages.RetryFailedTrialCallback)


def when_stale(callback):
    """The option of a storage that has a callback called for trials whose process has died."""
    return {"heartbeat_stale_trial_callback" if _HAS_NEW_NAMES else "failed_trial_callback": callback}


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 1))


def batches():
    return [(INPUTS[:8], TARGETS[:8]), (INPUTS[8:16], TARGETS[8:16])]


def validation():
    return [(INPUTS[16:], TARGETS[16:])]


def small_task(learning_rate=0.1, **options):
    """A few milliseconds of training, with dropout, so that random streams count."""
    arguments = {
        "model": net,
        "optimizer": partial(torch.optim.SGD, lr=learning_rate),
        "train": batches,
        "validate": validation,
        "loss": nn.functional.mse_loss,
        "epochs": 4,
    }
    return TrainTask(**(arguments | options))


class Scripted(nn.Module):
    """Scores, after each pass over one batch, the next of the given values."""

    def __init__(self, values):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("values", torch.tensor(values))
        self.register_buffer("passes", torch.tensor(-1))

    def forward(self, inputs):
        if self.training:
            self.passes.add_(1)
        return self.layer(inputs)


def metrics_task(*values, **options):
    """A task whose reports are the given values of `val_score`, one for each epoch."""
    return small_task(
        model=partial(Scripted, values),
        train=lambda: batches()[:1],
        epochs=len(values),
        metric="val_score",
        evaluate=lambda module, batch: {"score": module.values.index_select(0, module.passes.reshape(1)).sum()},
        **options,
    )


def build(trial):
    return small_task(
        learning_rate=trial.suggest_float("learning_rate", 1e-3, 0.3, log=True), seed=trial.suggest_int("seed", 0, 3)
    )


def as_objective(build):
    """What a user of stock Optuna would write for the same search: the plain loop, reporting and pruning."""

    def objective(trial):
        task = build(trial)
        if not isinstance(task, TrainTask):
            return task
        reports = []

        def report(step, metrics):
            reports.append([metrics[name] for name in task.metrics])
            if len(trial.study.directions) > 1:
                return True
            trial.report(reports[-1][0], step)
            return not trial.should_prune()

        if train_plain(task, report).status == "pruned":
            raise optuna.TrialPruned
        if task.result == "last":
            return reports[-1] if len(task.metrics) > 1 else reports[-1][0]
        best = np.nanmax if trial.study.direction == optuna.study.StudyDirection.MAXIMIZE else np.nanmin
        return float(best(reports)) if not np.isnan(reports).all() else math.nan

    return objective


def make_pool(kind, width):
    if kind == "plain":
        return PlainPool(max_concurrent=width)
    return HydraExecutor(devices="cpu:1", device_memory="64MiB", max_concurrent=width)


class Driver:
    """Makes and runs studies; with no pool, as stock Optuna does."""

    def __init__(self, pool=None):
        self.pool = pool

    def create_study(self, **options):
        if self.pool is None:
            return optuna.create_study(**options)
        return hydra_tune_optuna.create_study(**options, executor=self.pool)

    def optimize(self, study, build, **options):
        study.optimize(as_objective(build) if self.pool is None else build, **options)


@dataclass
class Record:
    """All that a search leaves and shows, but times."""

    trials: list = field(default_factory=list)
    called_back: list = field(default_factory=list)
    raised: list = field(default_factory=list)
    log: list = field(default_factory=list)
    hints: list = field(default_factory=list, compare=False)  # what only a study with an executor says


def trials_of(study):
    return [
        repr(
            (
                trial.number,
                trial.state.name,
                trial.params,
                trial.distributions,
                trial.values,
                trial.intermediate_values,
                trial.user_attrs,
                # A pickle of the library cmaes, with bytes of memory that nobody has written to; what it is for shows in
                # the parameters of the next trials.
                sorted(
                    (item for item in trial.system_attrs.items() if not item[0].startswith("cma:optimizer")), key=str
                ),
            )
        )
        for trial in study.trials
    ]


@contextmanager
def optuna_log():
    """The messages of Optuna's own loggers."""
    messages = []
    handler = logging.Handler()

    def emit(record):
        if not record.name.startswith("optuna._gp"):  # says once in a process that an optional package is missing
            shown = f" {type(record.exc_info[1]).__name__} shown" if record.exc_info else ""
            messages.append(f"{record.name} {record.levelname}: {record.getMessage()}{shown}")

    handler.emit = emit
    logger = logging.getLogger("optuna")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def seeded_random():
    return optuna.samplers.RandomSampler(seed=1)


def record(
    driver,
    build,
    *,
    calls=({"n_trials": 4},),
    prepare=None,
    callbacks=(),
    sampler=seeded_random,
    pruner=optuna.pruners.NopPruner,
    **options,
):
    """Run a search and keep what it left; each of `calls` is one call of `optimize`."""
    seen = Record()
    options = {"sampler": sampler(), "pruner": pruner(), "study_name": "search", **options}
    with optuna_log() as log:
        study = driver.create_study(**options)
        if prepare is not None:
            prepare(study)
        note = [lambda study, trial: seen.called_back.append((trial.number, trial.state.name)), *callbacks]
        for call in calls:
            try:
                driver.optimize(study, build, callbacks=note, **call)
            except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - compared
                seen.raised.append(repr(error))
    seen.trials = trials_of(study)
    seen.hints = [line for line in log if line.startswith("optuna.hydra_tune ")]
    seen.log = [line for line in log if line not in seen.hints]
    return seen
