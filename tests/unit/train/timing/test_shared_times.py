"""Trials of one plan measure its units together."""

from dataclasses import replace

import pytest

from hydra_tune.shard.partition.plan_cache import PreparedPlan
from hydra_tune.shard.verify.step_outcome import UnitSeconds
from hydra_tune.train.timing.shared_times import SharedUnitTimes
from tests.unit.shard.bench import parity_bench


@pytest.fixture(scope="module")
def prepared():
    made = parity_bench("gpt2")
    seconds = UnitSeconds(forward=(1.0, 0.0), backward=(2.0, 2.0))
    return PreparedPlan(plan=made.plan(*made.spread(2)), seconds=seconds, smallest_budget=lambda: 0)


def test_what_one_trial_measures_the_others_know(prepared):
    shared = SharedUnitTimes()
    first, second = shared.of(prepared), shared.of(prepared)
    first.measured(("forward", 0), 7.0)
    assert second.of(("forward", 0)) == 7.0
    assert second.total == first.total


def test_another_plan_or_number_of_batches_has_times_of_its_own(prepared):
    shared = SharedUnitTimes()
    shared.of(prepared).measured(("forward", 0), 7.0)
    assert shared.of(prepared, 4).of(("forward", 0)) == 1.0
    assert shared.of(replace(prepared)).of(("forward", 0)) == 1.0
    assert SharedUnitTimes().of(prepared).of(("forward", 0)) == 1.0


def test_a_plan_that_runs_whole_is_each_trials_own(prepared):
    whole = replace(prepared, plan=replace(prepared.plan, eager=True))
    shared = SharedUnitTimes()
    shared.of(whole).measured(("forward", 0), 7.0)
    assert shared.of(whole).of(("forward", 0)) == 1.0
