"""Searches drawn at random: what each trial does, what callbacks do meanwhile, and all that a study may be given.

A search is drawn before it runs, from a seed, so that two drivers run the same one. The parameters that a sampler draws
are not in it: those are compared.
"""

import math
import random
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import optuna
import torch
from torch import nn

from tests.contract.optuna_drivers import metrics_task, small_task

SPECIAL = (math.nan, math.inf, -math.inf, 0.0)


class Odd:
    """An object that is no number, and looks the same in every process."""

    def __repr__(self):
        return "Odd()"


class OddError(ValueError):
    """One of the user's own, with a message that formats itself."""

    def __str__(self):
        return "100% odd {}"


ERRORS = (
    partial(ValueError, "no %s"),
    partial(KeyError, "key"),
    OddError,
    RuntimeError,
    partial(optuna.TrialPruned, "enough"),
)
VALUES = (
    1,
    True,
    0.5,
    "bad",
    None,
    Odd(),
    np.float64(0.75),
    np.array(0.5),
    np.array([0.5]),
    torch.tensor(2.0),
    [0.5],
    (0.5, 0.25),
    [0.5, None],
    [],
    {},
    1j,
    nn.Identity(),
    *SPECIAL,
)


@dataclass
class Search:
    """One search: `trials` says what the objective does, by the trial's number, over and over."""

    trials: list = field(default_factory=list)
    callbacks: list = field(default_factory=list)
    calls: list = field(default_factory=list)
    prepare: object = None
    options: dict = field(default_factory=dict)

    def __call__(self, trial):
        outcome = None
        for act in self.trials[trial.number % len(self.trials)]:
            outcome = act(trial)
        return outcome


def draw(seed):
    """The search of this seed."""
    dice = random.Random(seed)
    num_objectives = 2 if dice.random() < 0.15 else 1
    directions = [dice.choice(["minimize", "maximize"]) for _ in range(num_objectives)]
    return Search(
        trials=[_trial(dice, num_objectives) for _ in range(dice.randint(1, 6))],
        callbacks=[partial(dice.choice(CALLBACKS), number=dice.randint(0, 5)) for _ in range(dice.randint(0, 3))],
        calls=[_call(dice) for _ in range(dice.randint(1, 3))],
        prepare=dice.choice(PREPARATIONS),
        options={
            "directions": directions,
            "sampler": dice.choice(SAMPLERS if num_objectives == 1 else SAMPLERS[:4]),
            "pruner": dice.choice(PRUNERS),
        },
    )


def draw_wide(seed):
    """A search whose trials do not depend on which of them have ended: no sampler, pruner or call that looks at others."""
    dice = random.Random(seed)
    directions = [dice.choice(["minimize", "maximize"]) for _ in range(2 if dice.random() < 0.15 else 1)]
    trials = [
        [
            *[dice.choice(SUGGESTIONS) for _ in range(dice.randint(0, 3))],
            _outcome(dice, len(directions), ends_search=False),
        ]
        for _ in range(dice.randint(1, 6))
    ]
    return Search(
        trials=trials,
        callbacks=[partial(_spoils, number=0)],
        calls=[{"n_trials": dice.randint(0, 12), "catch": Exception} for _ in range(dice.randint(1, 2))],
        prepare=dice.choice(PREPARATIONS),
        options={
            "directions": directions,
            "sampler": SAMPLERS[0],
            "pruner": dice.choice([PRUNERS[0], *PRUNERS[-2:]]),
        },
    )


def _call(dice):
    call = {"n_trials": dice.randint(0, 6)}
    if dice.random() < 0.5:
        call["catch"] = dice.choice([ValueError, (KeyError,), [ValueError, RuntimeError], Exception, ()])
    if dice.random() < 0.1:
        call["timeout"] = dice.choice([0, -1.0, 1000])
    return call


def _trial(dice, num_objectives):
    acts = [dice.choice(SUGGESTIONS) for _ in range(dice.randint(0, 3))]
    if dice.random() < 0.3:
        acts.append(dice.choice(ACTS))
    return [*acts, _outcome(dice, num_objectives)]


def _outcome(dice, num_objectives, *, ends_search=True):
    """How a trial ends. Those that end the search all at once are left out where what else runs then would differ."""
    kinds = {
        lambda: partial(_raise, dice.choice(ERRORS)): 10,
        lambda: partial(_raise, KeyboardInterrupt): 2 * ends_search,
        lambda: _tell_itself: 1 * ends_search,
        lambda: partial(_return, dice.choice(VALUES)): 10,
        lambda: partial(_return, [dice.uniform(-1, 1) for _ in range(num_objectives)]): 15,
        lambda: partial(_fail_in, dice.choice(["train", "evaluate", "model", "optimizer"]), dice.choice(ERRORS)): 8,
        lambda: partial(_own_loop, [dice.uniform(0, 1) for _ in range(4)]): 8,
    }
    if num_objectives > 1:
        kinds[lambda: partial(_two_metrics, dice.randint(0, 3))] = 50
    else:
        kinds[lambda: partial(_train, report_every=dice.choice(["epoch", 1, 3, 7]), seed=dice.randint(0, 3))] = 15
        kinds[lambda: partial(_report, _scores(dice), dice.choice(["last", "last", "best"]))] = 35
    return dice.choices(list(kinds), list(kinds.values()))[0]()


def _scores(dice):
    return [dice.choice(SPECIAL) if dice.random() < 0.15 else dice.uniform(0, 1) for _ in range(dice.randint(1, 4))]


def _raise(error, trial):
    raise error()


def _return(value, trial):
    return value


def _tell_itself(trial):
    trial.study.tell(trial, [0.125] * len(trial.study.directions))
    return 0.125


def _fail_in(part, error, trial):
    def fail(*_):
        raise error()

    metric = ("val_loss", "train_loss") if len(trial.study.directions) > 1 else None
    return small_task(metric=metric, **{part: fail})


def _own_loop(values, trial):
    for step, value in enumerate(values):
        trial.report(value, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return values[-1]


def _two_metrics(seed, trial):
    def evaluate(module, batch):
        error = nn.functional.mse_loss(module(batch[0]), batch[1])
        return {"error": error, "cost": -error}

    return small_task(evaluate=evaluate, metric=("val_error", "val_cost"), seed=seed, epochs=2)


def _train(trial, **options):
    rate = trial.params.get("rate", 0.1)
    return small_task(rate, **options)


def _report(values, result, trial):
    shift = sum(value for value in trial.params.values() if isinstance(value, float))
    return metrics_task(*[value + shift for value in values], result=result)


SUGGESTIONS = (
    lambda trial: trial.suggest_float("rate", 1e-3, 0.3, log=True),
    lambda trial: trial.suggest_float("x", 0.0, 1.0),
    lambda trial: trial.suggest_float("stepped", 0.0, 1.0, step=0.25),
    lambda trial: trial.suggest_int("depth", 1, 3),
    lambda trial: trial.suggest_int("range", 1, 1 + trial.number % 3),
    lambda trial: trial.suggest_categorical("kind", ["a", "b", None]),
)
ACTS = (
    lambda trial: trial.set_user_attr("note", trial.number),
    lambda trial: trial.study.set_user_attr("last", trial.number),
    lambda trial: trial.study.stop(),
    lambda trial: trial.study.enqueue_trial({"x": 0.5}),
    lambda trial: trial.study.enqueue_trial({"x": 5.0, "other": 1}, user_attrs={"who": "me"}, skip_if_exists=True),
    lambda trial: trial.report(0.5, 0),
    lambda trial: trial.report("0.5", 1),
    lambda trial: trial.report(0.5, -1),
    lambda trial: trial.report(None, 0),
    lambda trial: trial.should_prune(),
    lambda trial: trial.suggest_categorical("rate", [0.1, 0.2]),
    lambda trial: trial.suggest_float("empty", 1.0, 0.0),
    lambda trial: trial.study.optimize(lambda trial: 1.0, n_trials=1),
    lambda trial: trial.study.best_trial,
)


def _at(study, trial, number, act):
    if trial.number == number:
        act()


def _stops(study, trial, number):
    _at(study, trial, number, study.stop)


def _breaks(study, trial, number):
    def act():
        raise OddError

    _at(study, trial, number, act)


def _enqueues(study, trial, number):
    _at(study, trial, number, lambda: study.enqueue_trial({"x": 0.25, "depth": 2}))


def _adds(study, trial, number):
    _at(study, trial, number, lambda: study.add_trial(optuna.create_trial(values=[0.1] * len(study.directions))))


def _spoils(study, trial, number):
    trial.user_attrs["spoilt"] = True
    trial.params.clear()


def _retries(study, trial, number):
    if trial.state == optuna.trial.TrialState.FAIL and trial.number < number:
        study.enqueue_trial(trial.params)


def _tells_another(study, trial, number):
    _at(study, trial, number, lambda: study.tell(study.ask(), [0.3] * len(study.directions)))


def _limits(study, trial, number):
    optuna.study.MaxTrialsCallback(number)(study, trial)


def _asks_best(study, trial, number):
    if len(study.directions) > 1 or study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,)):
        study.set_user_attr("best", [best.number for best in study.best_trials])


CALLBACKS = (_stops, _breaks, _enqueues, _adds, _spoils, _retries, _tells_another, _limits, _asks_best)


def _queue(study):
    study.enqueue_trial({"rate": 0.2, "depth": 3, "kind": "b"})
    study.enqueue_trial({"x": 0.5, "unknown": 1})


def _leave_one_running(study):
    study.ask({"depth": optuna.distributions.IntDistribution(1, 3)})


PREPARATIONS = (None, None, _queue, _leave_one_running)

SAMPLERS = (
    partial(optuna.samplers.RandomSampler, seed=1),
    partial(optuna.samplers.TPESampler, seed=2, n_startup_trials=2),
    partial(optuna.samplers.TPESampler, seed=2, n_startup_trials=1, multivariate=True, constant_liar=True),
    partial(optuna.samplers.NSGAIISampler, seed=3, population_size=3),
    partial(optuna.samplers.CmaEsSampler, seed=4, n_startup_trials=1),
    partial(optuna.samplers.QMCSampler, seed=5),
    partial(optuna.samplers.GridSampler, {"x": [0.25, 0.5], "depth": [1, 2]}, seed=6),
)
PRUNERS = (
    optuna.pruners.NopPruner,
    partial(optuna.pruners.MedianPruner, n_startup_trials=1),
    partial(optuna.pruners.SuccessiveHalvingPruner, min_resource=1),
    partial(optuna.pruners.HyperbandPruner, max_resource=4, reduction_factor=2),
    partial(optuna.pruners.ThresholdPruner, lower=0.1, upper=1.2),
    partial(optuna.pruners.PatientPruner, None, patience=1),
)
