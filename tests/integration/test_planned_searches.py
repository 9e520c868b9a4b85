"""Searches whose trials take turns on a device with no room for all: on disk, saved at each step, kept, pruned, replaced."""

import math
import random
from dataclasses import replace
from functools import partial

import optuna
import pytest
import torch
from optuna.trial import TrialState

import hydra_tune_optuna
from hydra_tune import TrainTask, train_plain
from hydra_tune.fusion.runtime import plan_autotuner
from hydra_tune.fusion.runtime.paired_unit import PairStepRunner
from hydra_tune.fusion.runtime.planned_unit import GroupStepRunner
from hydra_tune.planner.profile import profiler
from hydra_tune.pool.fusion import group_matcher
from tests.support.planned_searches import KINDS, differences_of, drawn_tasks, searched
from tests.support.together import together
from tests.unit.pool.fusion.test_planned_faults import assert_nothing_is_left, tasks_of
from tests.unit.pool.fusion.test_planned_pairs import pool_of, roomy
from tests.unit.pool.fusion.test_planned_pairs import tasks_of as single_precision
from tests.unit.pool.fusion.test_planned_steps import bits
from tests.unit.pool.tasks import PATIENCE_SECONDS, Held, running, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("captured_once")]


@pytest.fixture
def parts(monkeypatch):
    """How many parts of steps have run: of pairs, and of groups alone."""
    found = {"pair": 0, "group": 0}

    def counting(owner, name, kind):
        run = getattr(owner, name)

        def counted(*arguments):
            found[kind] += 1
            return run(*arguments)

        monkeypatch.setattr(owner, name, counted)

    counting(PairStepRunner, "run", "pair")
    counting(GroupStepRunner, "backward", "group")
    return found


@pytest.mark.parametrize("every", [1, 2, "0.02s"])
def test_a_pair_that_is_saved_again_and_again_has_the_bits_of_one_that_is_not(tmp_path, parts, every):
    with pool_of(checkpoint_dir=tmp_path, checkpoint_every=every) as pool:
        results = pool.run(single_precision(epochs=(4,) * 4))
    assert parts["pair"]
    assert [bits(result) for result in results] == roomy(epochs=(4,) * 4)
    assert all(result.checkpoint is not None for result in results)


@pytest.fixture
def swapping(monkeypatch):
    """Profiles in which a copy takes next to nothing beside any operator, so that plans swap all they may, and are kept."""
    found = profiler.measured

    def fixed(*arguments):
        profile = found(*arguments)
        copies = {name: dict.fromkeys(getattr(profile, name), 1e-7) for name in ("out_seconds", "in_seconds")}
        return replace(profile, seconds=dict.fromkeys(profile.seconds, 1e-3), pace_seconds=0.0, **copies)

    monkeypatch.setattr(profiler, "measured", fixed)
    monkeypatch.setattr(plan_autotuner, "TOLERANCE", math.inf)


def test_pairs_that_share_a_device_with_a_disk_have_the_bits_of_each_alone(tmp_path, parts, swapping, monkeypatch):
    """Three under way, of which the device has room for one, and the host for less than all.

    Who comes as another group ends, for want of host memory before, may be computed alone, which has other bits.
    """
    monkeypatch.setattr(group_matcher, "_SETTLED_SECONDS", 1.0)  # no group is closed before all trials are there
    monkeypatch.setattr(group_matcher, "_PATIENCE_SECONDS", 60.0)
    tasks, expected = single_precision(epochs=(6,) * 4) * 3, roomy(epochs=(6,) * 4) * 3
    held = Held()
    with pool_of(spill_dir=tmp_path, host_memory="260KiB", max_concurrent=12, instrument=held) as pool:
        with together():
            jobs = [pool.submit(one) for one in tasks]
        # Two groups are there before a step runs; the third waits until the host has room.
        until(lambda: sum(job.state == "running" for job in jobs) == 8)
        held.go()
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
        written = pool.stats().disk.bytes_written
        assert_nothing_is_left(pool)
    found = [(bits(one), other) for one, other in zip(results, expected, strict=True) if one.group_size == 2]
    assert len(found) >= 8
    assert [one for one, _ in found] == [other for _, other in found]
    assert parts["pair"]
    assert written > 0


def test_the_weights_of_the_best_of_a_pruned_search_are_kept_as_they_are_alone(tmp_path, parts):
    described = {}

    def objective(trial):
        rate = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
        (one, *_) = tasks_of(epochs=6)
        values = {name: getattr(one, name) for name in one.__dataclass_fields__}
        optimizer = partial(torch.optim.AdamW, lr=rate)
        described[trial.number] = TrainTask(**values | {"optimizer": optimizer, "seed": trial.number})
        return described[trial.number]

    with pool_of(device_memory="560KiB") as pool:
        study = hydra_tune_optuna.create_study(
            executor=pool,
            sampler=optuna.samplers.RandomSampler(seed=0),
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
            keep_best=2,
            weights_dir=tmp_path / "weights",
        )
        study.optimize(objective, n_trials=12)
    states = [trial.state for trial in study.trials]
    assert states.count(TrialState.PRUNED) >= 2
    assert parts["pair"]
    best = sorted((trial.value, trial.number) for trial in study.trials if trial.state is TrialState.COMPLETE)[:2]
    assert sorted(hydra_tune_optuna.kept_weights(study)) == sorted(number for _, number in best)
    for trial in study.trials:
        plain = train_plain(described[trial.number])
        reported = list(trial.intermediate_values.values())
        assert reported == pytest.approx([one["val_loss"] for one in plain.history][: len(reported)], rel=1e-9)
        assert trial.state is TrialState.PRUNED or len(reported) == len(plain.history)
        if (trial.value, trial.number) in best:
            kept = study.load_module(trial.number).state_dict()
            for name, tensor in plain.state_dict().items():
                torch.testing.assert_close(kept[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(24))
def test_a_search_drawn_at_random_comes_to_what_its_trials_come_to_alone(tmp_path, parts, seed):
    """In float64, with places that are vacated and filled; and nothing is left of it."""
    chance, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    tasks = drawn_tasks(chance, kind, chance.randint(5, 9))
    ends = {number: chance.randint(0, 3) for number in range(len(tasks)) if chance.random() < 0.35}
    with running() as pool:
        expected = searched(pool, tasks, ends, random.Random(0))
    options = {
        "devices": chance.choice(["cpu:1", "cpu:1", "cpu:2"]),
        "device_memory": f"{chance.choice([370, 560, 650, 780])}KiB",
        "fusion_size": chance.choice([4, 5, 6]),
        "fusion_planner": chance.choice(["on", "on", "auto"]),
        "host_memory": chance.choice(["3MiB", "64MiB"]),
    }
    with running(fusion="on", spill_dir=tmp_path, **options) as pool:
        found = searched(pool, tasks, ends, chance, pauses=kind == "paused")
        assert_nothing_is_left(pool)
        devices = pool.stats().devices.values()
    assert all(device.peak_bytes <= device.budget_bytes for device in devices)
    assert [differences_of(one, other) for one, other in zip(expected, found, strict=True)] == [[]] * len(tasks)
    assert not (kind in ("asks", "accumulate") and any(parts.values()))
