"""Pruners in a wide pool: what each waits for, what is said of those that cannot work, and what staggering gives them."""

import re
import threading
from dataclasses import replace
from functools import partial

import optuna
import pytest
import torch
from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    MedianPruner,
    NopPruner,
    PatientPruner,
    PercentilePruner,
    SuccessiveHalvingPruner,
    ThresholdPruner,
    WilcoxonPruner,
)

import hydra_tune_optuna
from hydra_tune import HydraExecutor
from hydra_tune_optuna.optuna_internals import completed_needed
from hydra_tune_optuna.search import driver
from hydra_tune_optuna.search.pruner_checks import RunAheadRule, choose_admission, num_unjudged, useless_pruner
from tests.contract.optuna_drivers import Driver, batches, build, metrics_task, optuna_log, record
from tests.support.gathered import gather
from tests.unit.pool.tasks import PATIENCE_SECONDS, task, until

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


class Own(BasePruner):
    """One that Optuna does not know."""

    def prune(self, study, trial):
        return False


PRUNERS = {
    "median": (MedianPruner, 5),
    "median of a few": (partial(MedianPruner, n_startup_trials=2, n_min_trials=3), 3),
    "median at once": (partial(MedianPruner, n_startup_trials=0), 1),
    "percentile": (partial(PercentilePruner, 25.0, n_startup_trials=4), 4),
    "wilcoxon": (WilcoxonPruner, 1),
    "halving": (partial(SuccessiveHalvingPruner, min_resource=1), 0),
    "halving, learnt": (SuccessiveHalvingPruner, 1),
    "hyperband": (partial(HyperbandPruner, max_resource=9), 0),
    "hyperband, learnt": (HyperbandPruner, 1),
    "patient": (partial(PatientPruner, None, patience=1), 0),
    "patient median": (lambda: PatientPruner(MedianPruner(n_startup_trials=7), patience=1), 7),
    "threshold": (partial(ThresholdPruner, upper=1.0), 0),
    "none": (NopPruner, 0),
    "own": (Own, 0),
}


def reported(study, number, value, *, steps=4):
    """A trial that reports one value again and again; whether it was pruned."""
    trial = study.ask()
    for step in range(steps):
        trial.report(value, step)
        if trial.should_prune():
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return True
    study.tell(trial, value)
    return False


@pytest.mark.parametrize("name", PRUNERS)
def test_each_pruner_waits_for_so_many_completed_trials(name):
    """Held against the pruner itself: nothing is pruned before that many, however bad."""
    make, needed = PRUNERS[name]
    pruner = make()
    assert completed_needed(pruner) == needed
    if isinstance(pruner, PatientPruner | ThresholdPruner | NopPruner | Own) or "halving" in name or "hyper" in name:
        return
    study = optuna.create_study(pruner=pruner)
    assert not any(reported(study, number, 0.0 if number == 0 else float(number), steps=9) for number in range(needed))
    assert reported(study, needed, 1e6, steps=9), "and then the worst is"


@pytest.mark.parametrize(("needed", "abreast", "expected"), [(5, 1, 5), (5, 4, 8), (1, 40, 40), (0, 8, 0), (8, 8, 8)])
def test_whole_waves_end_before_a_pruner_can_judge(needed, abreast, expected):
    assert num_unjudged(needed, abreast) == expected


@pytest.fixture(scope="module")
def pools():
    made = {}

    def pool(width, admission):
        key = (width, admission)
        if key not in made:
            made[key] = HydraExecutor(devices="cpu:2", device_memory="64MiB", max_concurrent=width, admission=admission)
        return made[key]

    yield pool
    for each in made.values():
        each.shutdown()


@pytest.mark.parametrize(
    ("pruner", "width", "admission", "n_trials", "remedies"),
    [
        (MedianPruner, 8, "eager", 8, ["staggered", "max_concurrent=5)"]),
        (MedianPruner, 20, "eager", 16, ["staggered", "max_concurrent=8)"]),
        (MedianPruner, 4, "eager", 8, ["staggered", "max_concurrent=1)"]),
        (MedianPruner, 8, "eager", 6, ["max_concurrent=5)"]),
        (MedianPruner, 2, "eager", 6, ["max_concurrent=1)"]),
        (SuccessiveHalvingPruner, 8, "eager", 8, ["staggered", "max_concurrent=4)"]),
        (HyperbandPruner, 8, "eager", 8, ["staggered", "max_concurrent=4)"]),
        (WilcoxonPruner, 8, "eager", 8, ["staggered", "max_concurrent=4)"]),
        (MedianPruner, 8, "staggered", 6, ["max_concurrent=1)"]),
    ],
    ids=repr,
)
def test_a_pruner_that_cannot_work_at_this_width_is_named_with_remedies(
    pools, pruner, width, admission, n_trials, remedies
):
    pool = pools(width, admission)
    study = hydra_tune_optuna.create_study(pruner=pruner(), executor=pool)
    said = useless_pruner(study, pool, n_trials=n_trials, width=width)
    assert said.startswith(f"{type(study.pruner).__name__} may prune few or none of {n_trials} trials")
    assert "SuccessiveHalvingPruner(min_resource=1)" in said
    assert all(remedy in said for remedy in remedies)
    assert ("staggered" in said) == ("staggered" in remedies)


@pytest.mark.parametrize(
    ("pruner", "width", "admission", "n_trials"),
    [
        (MedianPruner, 8, "staggered", 8),
        (MedianPruner, 8, "eager", 9),
        (MedianPruner, 8, "eager", 5),  # not the width's fault: five are needed at any
        (MedianPruner, 1, "eager", 3),
        (MedianPruner, 8, "eager", None),
        (partial(SuccessiveHalvingPruner, min_resource=1), 8, "eager", 8),
        (partial(HyperbandPruner, max_resource=4), 8, "eager", 8),
        (partial(ThresholdPruner, upper=1.0), 8, "eager", 8),
        (NopPruner, 8, "eager", 8),
        (Own, 8, "eager", 8),
    ],
    ids=repr,
)
def test_nothing_is_said_of_one_that_can_work_or_could_not_at_any_width(pools, pruner, width, admission, n_trials):
    pool = pools(width, admission)
    study = hydra_tune_optuna.create_study(pruner=pruner(), executor=pool)
    assert useless_pruner(study, pool, n_trials=n_trials, width=width) is None


@pytest.mark.parametrize(
    ("pruner", "n_trials", "chosen"),
    [
        (MedianPruner, 16, "staggered"),
        (partial(PercentilePruner, 25.0), None, "staggered"),
        (WilcoxonPruner, 16, "staggered"),
        (partial(PatientPruner, MedianPruner(), patience=1), 16, "staggered"),
        (SuccessiveHalvingPruner, 16, "staggered"),
        (HyperbandPruner, 16, "staggered"),
        (Own, 16, "staggered"),
        (partial(SuccessiveHalvingPruner, min_resource=1), 16, "eager"),
        (partial(HyperbandPruner, max_resource=4), 16, "eager"),
        (partial(ThresholdPruner, upper=1.0), 16, "eager"),
        (NopPruner, 16, "eager"),
        (MedianPruner, 3, "eager"),
    ],
    ids=lambda value: re.sub(" object at 0x[0-9a-f]+", "", repr(value)),
)
def test_the_pruner_chooses_the_admission_and_the_log_says_why(pools, pruner, n_trials, chosen):
    pool = pools(8, "auto")
    study = hydra_tune_optuna.create_study(pruner=pruner(), executor=pool)
    choice = choose_admission(study, pool, n_trials=n_trials)
    assert f"({chosen})" in choice.why
    assert (choice.staggered_from is not None) == (chosen == "staggered")
    waits = isinstance(study.pruner, PercentilePruner) and chosen == "staggered"
    assert (choice.rule is not None) == waits
    assert useless_pruner(study, pool, n_trials=n_trials, width=8, choice=choice) is None


@pytest.mark.parametrize("admission", ["eager", "staggered"])
def test_an_option_of_the_executor_goes_before_the_pruner(pools, admission):
    choice = choose_admission(
        hydra_tune_optuna.create_study(executor=pools(8, admission)), pools(8, admission), n_trials=9
    )
    assert (choice.why, choice.rule, choice.staggered_from) == (None, None, None)


def test_as_many_run_ahead_as_the_pruner_needs_and_at_least_half_of_the_devices(pools, monkeypatch):
    pool = pools(8, "auto")
    study = hydra_tune_optuna.create_study(pruner=MedianPruner(n_warmup_steps=2), executor=pool)

    def chosen(num_devices):
        monkeypatch.setattr(HydraExecutor, "device_names", tuple(map(str, range(num_devices))))
        choice = choose_admission(study, pool, n_trials=None)
        assert choice.rule.at_least == -(-num_devices // 2)
        return choice.rule.ahead, choice.staggered_from

    assert choose_admission(study, pool, n_trials=None).rule.from_step == 2
    # Five on three or four devices are not one after another: the last would be alone for most of its time.
    assert [chosen(number) for number in (1, 2, 3, 4, 5, 8, 12)] == [
        *[(5, 0), (5, 0), (5, 5), (5, 5), (5, 0), (5, 0), (6, 0)]
    ]
    for _ in range(5):
        study.add_trial(optuna.trial.create_trial(value=1.0))
    assert choose_admission(study, pool, n_trials=None).rule is None, "it can judge from the first trial on"


def test_trials_wait_until_as_many_as_it_needs_have_completed():
    rule = RunAheadRule(needed=3, before=0, ahead=3, from_step=1)
    assert [number for number in range(6) if rule.holds(number, 1, range(6), 0)] == [3, 4, 5]
    assert not rule.holds(5, 0, range(6), 0), "at a step that it does not judge"
    assert [number for number in range(1, 6) if rule.holds(number, 1, range(1, 6), 1)] == [3, 4, 5]
    assert not rule.holds(5, 1, range(3, 6), 3)
    assert not rule.holds(3, 1, [0, 1, 3, 4], 0), "2 failed, is paused or has not begun"
    wider = RunAheadRule(needed=5, before=0, ahead=5, from_step=1, at_least=2)
    assert [number for number in range(4, 9) if wider.holds(number, 1, range(4, 9), 4)] == [6, 7, 8], "4 is a long one"


@pytest.fixture
def fusing():
    with HydraExecutor(devices="cpu:2", device_memory="64MiB", fusion="auto", fusion_size=16) as pool:
        yield pool


def test_before_trials_are_seen_to_be_fused_nothing_is_said_of_groups(fusing):
    """Without groups four of them advance together, so that the pruner has the first four to compare the others with."""
    study = hydra_tune_optuna.create_study(pruner=MedianPruner(), executor=fusing)
    assert useless_pruner(study, fusing, n_trials=16, width=16) is None
    said = useless_pruner(study, fusing, n_trials=16, width=16, is_fused=True)
    assert said.startswith(
        "MedianPruner may prune few or none of 16 trials if they are equally long: 16 advance together"
    )


@pytest.mark.parametrize("fuses", [True, False])
def test_a_pruner_that_groups_make_useless_is_named_only_where_there_are_groups(fuses, monkeypatch):
    gather(monkeypatch, lambda count: count >= 8)
    options = {"devices": "cpu:1", "device_memory": "64MiB", "fusion": "on", "fusion_size": 8}

    def objective(trial):
        width = 16 if fuses else 8 + trial.number
        model = partial(torch.nn.Sequential, torch.nn.Linear(8, width), torch.nn.Linear(width, 4))
        return task(model=model, epochs=3, seed=trial.number)

    with optuna_log() as lines, HydraExecutor(**options) as pool:
        study = hydra_tune_optuna.create_study(pruner=MedianPruner(n_startup_trials=4), executor=pool)
        study.optimize(objective, n_trials=8)
    assert any("MedianPruner may prune few or none of 8 trials" in line for line in lines) == fuses


def test_trials_that_completed_before_count(pools):
    pool = pools(8, "eager")
    study = hydra_tune_optuna.create_study(pruner=MedianPruner(n_startup_trials=3), executor=pool)
    assert useless_pruner(study, pool, n_trials=8, width=8) is not None
    for _ in range(3):
        study.add_trial(optuna.trial.create_trial(value=1.0))
    assert useless_pruner(study, pool, n_trials=8, width=8) is None


def searched(pool, pruner, task, *, n_trials=8, n_jobs=1):
    """What the search says of its own."""
    study = hydra_tune_optuna.create_study(pruner=pruner, executor=pool)
    with optuna_log() as log:
        study.optimize(lambda trial: task(trial.number), n_trials=n_trials, n_jobs=n_jobs)
    return study, [line for line in log if "hydra_tune" in line]


def good_then_bad(number, epochs=6):
    """The first trial is the best at every step."""
    return metrics_task(*[float(number > 0)] * epochs)


def test_a_search_says_once_that_its_pruner_cannot_work(pools):
    _, said = searched(pools(8, "eager"), MedianPruner(n_startup_trials=1), good_then_bad)
    assert len(said) == 1
    assert said[0].startswith("optuna.hydra_tune WARNING: MedianPruner may prune few or none of 8 trials")
    assert 'HydraExecutor(admission="staggered")' in said[0]


@pytest.mark.parametrize(
    "search",
    [
        partial(searched, pruner=NopPruner(), task=good_then_bad),
        partial(searched, pruner=MedianPruner(n_startup_trials=1), task=good_then_bad, n_jobs=4),
        partial(searched, pruner=MedianPruner(n_startup_trials=1), task=partial(good_then_bad, epochs=1)),
        partial(searched, pruner=MedianPruner(n_startup_trials=1), task=float),
    ],
    ids=["no pruner", "narrower", "one report each", "no training"],
)
def test_a_search_says_nothing_without_need(pools, search):
    assert search(pools(8, "eager"))[1] == []


def test_staggered_trials_are_pruned_where_all_are_in_flight_at_once(pools):
    pool = pools(8, "staggered")
    before = pool.stats()
    study, said = searched(pool, MedianPruner(n_startup_trials=1), partial(good_then_bad, epochs=40))
    after = pool.stats()
    assert said == []
    pruned = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.PRUNED]
    assert len(pruned) >= 4, "all but those that ran beside the first could be"
    run, saved = after.units_run - before.units_run, after.units_saved - before.units_saved
    assert saved > 0.3 * (run + saved)
    epochs_saved = sum(40 - 1 - trial.last_step for trial in pruned)
    assert saved / (run + saved) == pytest.approx(epochs_saved / (8 * 40)), "each epoch has as many units"


def test_by_default_the_median_prunes_where_all_are_in_flight_at_once(pools):
    study, said = searched(pools(8, "auto"), MedianPruner(n_startup_trials=1), partial(good_then_bad, epochs=40))
    assert [len(trial.intermediate_values) for trial in study.trials] == [40] + [1] * 7
    assert len(said) == 1
    assert "INFO: The oldest trials go first (staggered): MedianPruner compares with completed trials" in said[0]


def test_trials_do_not_wait_for_one_that_is_paused(pools):
    """Here the first is paused, and goes on only once another one has completed."""
    pool, jobs = pools(8, "auto"), []

    def objective(trial):
        if trial.number == 4:
            jobs[0].pause()
        return good_then_bad(trial.number, epochs=200 if trial.number == 0 else 6)

    class Noting:
        def __getattr__(self, name):
            return getattr(pool, name)

        def submit(self, *given, **options):
            jobs.append(pool.submit(*given, **options))
            return jobs[-1]

    def unpause(study, trial):
        if jobs[0].paused:
            jobs[0].unpause()

    study = hydra_tune_optuna.create_study(pruner=MedianPruner(n_startup_trials=1), executor=Noting())
    study.optimize(objective, n_trials=8, callbacks=[unpause])
    numbers = [trial.number for trial in sorted(study.trials, key=lambda trial: trial.datetime_complete)]
    assert numbers.index(0) > 0
    assert all(trial.state.is_finished() for trial in study.trials)


def test_completed_trials_of_other_processes_end_the_wait(pools, monkeypatch):
    """The first trial is over only after another one: what has completed elsewhere meanwhile is seen at once."""
    monkeypatch.setattr(driver, "_RECOUNT_SECONDS", 0.01)
    pool, jobs, in_time, is_over = pools(8, "auto"), [], [], threading.Event()
    submit = pool.submit
    monkeypatch.setattr(pool, "submit", lambda *given, **options: jobs.append(submit(*given, **options)) or jobs[-1])

    def train():
        if jobs and jobs[0].state in {"running", "waiting"} and not in_time:
            until(lambda: [job.state for job in jobs[1:]] == ["waiting"] * 7)
            elsewhere = optuna.trial.create_trial(value=0.0, intermediate_values=dict.fromkeys(range(9), 0.0))
            study.add_trial(elsewhere)
            in_time.append(is_over.wait(PATIENCE_SECONDS))
        return batches()[:1]

    def objective(trial):
        described = good_then_bad(trial.number, epochs=20)
        return described if trial.number else replace(described, train=train)

    study = hydra_tune_optuna.create_study(pruner=MedianPruner(n_startup_trials=1), executor=pool)
    study.optimize(objective, n_trials=8, callbacks=[lambda study, trial: is_over.set()])
    assert in_time == [True]


def test_a_report_costs_no_look_at_each_trial_that_waits(pools, monkeypatch):
    looks, holds = [], RunAheadRule.holds
    monkeypatch.setattr(RunAheadRule, "holds", lambda *given: looks.append(given[1]) or holds(*given))
    study, _ = searched(pools(8, "auto"), MedianPruner(n_startup_trials=1), partial(good_then_bad, epochs=80))
    num_reports = sum(len(trial.intermediate_values) for trial in study.trials)
    assert num_reports == 87
    assert len(looks) < 4 * num_reports, "seven wait"


def test_trials_that_wait_are_judged_as_soon_as_it_can(pools):
    """A failing pruner fails the trial that it was asked about, and no other."""

    class Breaking(MedianPruner):
        def prune(self, study, trial):
            if len(study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))) and trial.number == 3:
                raise ValueError("no")
            return super().prune(study, trial)

    study = hydra_tune_optuna.create_study(pruner=Breaking(n_startup_trials=1), executor=pools(8, "auto"))
    study.optimize(lambda trial: good_then_bad(trial.number), n_trials=6, catch=ValueError)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "PRUNED", "FAIL", "PRUNED", "PRUNED"]


@pytest.mark.parametrize("pruner", [MedianPruner, SuccessiveHalvingPruner, HyperbandPruner])
def test_a_staggered_search_of_width_1_is_stock_optunas(pools, pruner):
    options = {
        "calls": [{"n_trials": 10}],
        "pruner": pruner,
        "sampler": partial(optuna.samplers.TPESampler, seed=3, n_startup_trials=4),
    }
    assert record(Driver(pools(1, "staggered")), build, **options) == record(Driver(), build, **options)
