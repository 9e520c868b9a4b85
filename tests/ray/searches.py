"""Searches by Ray Tune, and the same trials by hydra-tune alone."""

import time
from functools import partial

import ray
import torch
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import PopulationBasedTraining

import hydra_tune_ray
from hydra_tune import HydraExecutor, Reported
from hydra_tune_ray.pools import pools_of
from tests.support import ray_tasks

DEVICES = {"devices": "cpu:2", "device_memory": "64MiB"}
EACH = tune.CheckpointConfig(checkpoint_frequency=1, checkpoint_at_end=True)
RATES = [0.05 / 2 ** (number / 4) for number in range(16)]


def build(config):
    """In a module that workers can import, whichever way the tests are run."""
    return ray_tasks.build(config)


def searched(
    trained,
    folder,
    *,
    scheduler=None,
    space=None,
    checkpoints=None,
    failures=0,
    callbacks=(),
    reuse=True,
    name="search",
    **options,
):
    """Run a search to its end."""
    tuner = tune.Tuner(
        trained,
        param_space=space or {"lr": tune.grid_search(RATES), "epochs": 8},
        tune_config=tune.TuneConfig(
            metric="train_loss",
            mode="min",
            scheduler=scheduler,
            reuse_actors=reuse,
            **{"max_concurrent_trials": 4} | options,
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=str(folder),
            verbose=0,
            callbacks=[hydra_tune_ray.PoolCallback(trained), *callbacks],
            failure_config=tune.FailureConfig(max_failures=failures),
            checkpoint_config=checkpoints or tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    )
    return tuner.fit()


class Pausing(PopulationBasedTraining):
    """With `synch=True`; says when all trials but one are paused, for `held_back`."""

    def __init__(self, flag, **options):
        super().__init__(synch=True, **options)
        self.flag = flag

    def choose_trial_to_run(self, tune_controller, **options):
        statuses = [trial.status for trial in tune_controller.get_trials()]
        if statuses.count(Trial.PAUSED) == len(statuses) - 1:
            self.flag.touch()
        return super().choose_trial_to_run(tune_controller, **options)


def held_back(trained, flag, lr, number):
    """The trainable, of which the trial with this rate makes its report of that number when all others are paused.

    Ray saves a trial twice that it still pauses when the last one reports, and may write over the checkpoint that the last one
    is to go on from.
    """

    class HeldBack(trained):
        def step(self):
            deadline = time.monotonic() + 60
            while self.config["lr"] == lr and self.iteration == number - 1 and not flag.exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            return super().step()

    return HeldBack


def losses(result):
    """All reports of a trial, in order."""
    return list(result.metrics_dataframe["train_loss"])


def expected(configs):
    """The reports of the same trials in a pool without Ray."""
    with HydraExecutor(**DEVICES) as pool:
        results = pool.run([ray_tasks.build(config) for config in configs])
    return [[report["train_loss"] for report in result.history] for result in results]


def trained_by_itself(configs):
    """The weights of the same trials in a pool without Ray."""
    with HydraExecutor(**DEVICES) as pool:
        return [result.state_dict() for result in pool.run([ray_tasks.build(config) for config in configs])]


def same(found, wanted):
    """Whether weights are equal to the last bit."""
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def units(*, epochs):
    """Shard units that a trial of so many reports runs alone."""
    with HydraExecutor(**DEVICES) as pool:
        (result,) = pool.run([ray_tasks.build({"lr": 0.01, "epochs": epochs})])
    return result.units_run


def cloned_after(number, rate, changed, **config):
    """The last reports, and the weights, of a trial that takes another's state after so many reports, and another rate."""
    with HydraExecutor(**DEVICES) as pool:
        events = pool.events()
        good = pool.submit(ray_tasks.build({"lr": rate, "epochs": 4, **config}), events=events)
        for _ in range(number - 1):
            assert isinstance(events.get(60), Reported)
            good.proceed()
        assert isinstance(events.get(60), Reported)
        job = pool.clone(good, {"optimizer": partial(torch.optim.AdamW, lr=changed)})
        good.cancel()
        result = job.result(60)
    return [report["train_loss"] for report in result.history][number:], result.state_dict()


def in_actor(actor, function):
    """What a function of an actor's own object returns in the actor's process."""
    return ray.get(actor.__ray_call__.remote(function))


def empty_pools(trained, *, seconds=60.0):
    """The figures of the pools, once there is nothing left in them."""
    deadline = time.monotonic() + seconds
    while any(each.trials for each in pools_of(trained).figures()):
        assert time.monotonic() < deadline, pools_of(trained).figures()
        time.sleep(0.1)
    return pools_of(trained).figures()
