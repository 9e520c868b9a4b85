"""Trials that run their own code in bursts, simulated; figures that can be worked out on paper."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_tune.errors import ConfigError
from hydra_tune.schedule import ShardedLRTF, Unit
from hydra_tune.simulate import Outage, Scenario, SimulatedDevice, SimulatedTrial, simulate
from hydra_tune.simulate.workload import RandomWorkload, equal_devices

ONE_DEVICE = (SimulatedDevice(name="d0"),)


def trial(name="a", *, steps=1, burst_steps=10, seconds=1.0, size=0, **more):
    step = (Unit(kind="burst", shard=0, seconds=seconds),)
    return SimulatedTrial(name=name, step=step, shard_bytes=(size,), steps=steps, burst_steps=burst_steps, **more)


def play(*trials, devices=ONE_DEVICE, policy="round_robin", timeline=1000, **more):
    return simulate(Scenario(trials=trials, devices=tuple(devices), **more), policy, timeline=timeline)


def bars(result, kinds=("burst",)):
    return [(bar.job, bar.start_seconds, bar.end_seconds) for bar in result.timeline if bar.kind in kinds]


def test_one_trial_runs_as_many_steps_at_once_as_a_burst_has():
    result = play(trial(steps=25))
    assert bars(result) == [("a", 0, 10), ("a", 10, 20), ("a", 20, 25)]
    assert (result.units_run, result.makespan_seconds, result.devices[0].busy_seconds) == (25, 25, 25)


@pytest.mark.parametrize(
    ("arrival_seconds", "ends_at"),
    [
        pytest.param(2.5, 3, id="within a step"),
        pytest.param(3.0, 3, id="between two steps"),
        pytest.param(0.0625, 1, id="in the first step"),
        pytest.param(9.5, 10, id="in the last step"),
    ],
)
def test_a_burst_ends_after_its_present_step_when_another_trial_begins_to_wait(arrival_seconds, ends_at):
    result = play(trial(steps=20), trial("b", steps=2, arrival_seconds=arrival_seconds))
    assert bars(result) == [
        ("a", 0, ends_at),
        ("b", ends_at, ends_at + 2),
        *[("a", at + ends_at + 2, min(at + 10, 20 - ends_at) + ends_at + 2) for at in range(0, 20 - ends_at, 10)],
    ]
    assert (result.units_run, result.makespan_seconds) == (22, 22)


def test_a_burst_that_was_shortened_is_as_long_as_ever_the_next_time():
    result = play(trial(steps=30), trial("b", steps=1, arrival_seconds=0.5))
    assert bars(result) == [("a", 0, 1), ("b", 1, 2), ("a", 2, 12), ("a", 12, 22), ("a", 22, 31)]


def test_a_burst_that_still_waits_for_its_state_ends_after_its_first_step():
    link = (SimulatedDevice(name="d0", bandwidth=10),)
    result = play(trial(steps=5, size=50), trial("b", steps=1, arrival_seconds=2), devices=link)
    assert bars(result) == [("a", 5, 6), ("b", 6, 7), ("a", 7, 11)]


def test_of_trials_that_come_together_the_first_has_one_step_before_the_others_begin():
    result = play(trial(steps=12), trial("b", steps=12))
    assert bars(result) == [("a", 0, 1), ("b", 1, 11), ("a", 11, 21), ("b", 21, 23), ("a", 23, 24)]


def test_a_burst_goes_on_while_another_device_is_free():
    result = play(trial(steps=10), trial("b", steps=5, arrival_seconds=2.5), devices=equal_devices(2))
    assert bars(result) == [("a", 0, 10), ("b", 2.5, 7.5)]


def test_a_burst_goes_on_while_only_a_trial_of_lower_priority_waits():
    result = play(trial(steps=10, priority=1), trial("b", steps=1, arrival_seconds=2.5))
    assert bars(result) == [("a", 0, 10), ("b", 10, 11)]


def test_of_two_bursts_one_ends_for_each_trial_that_waits():
    """The second to come does not wait for the burst that ends already for the first."""
    early = [trial(name, steps=20) for name in "ab"]
    late = [trial(name, steps=1, arrival_seconds=at) for name, at in (("c", 2.25), ("d", 2.5))]
    result = play(*early, *late, devices=equal_devices(2))
    assert sorted(bars(result)[:4]) == [("a", 0, 3), ("b", 0, 3), ("c", 3, 4), ("d", 3, 4)]


def test_beside_a_trials_last_burst_the_state_of_another_is_sent():
    link = (SimulatedDevice(name="d0", memory_bytes=20, bandwidth=10),)
    result = play(trial(steps=10, size=10), trial("b", steps=1, size=10, priority=-1), devices=link)
    assert bars(result, ("load",)) == [("a", 0, 1), ("b", 1, 2)]
    assert bars(result) == [("a", 1, 11), ("b", 11, 12)]


def test_a_burst_ends_at_a_report():
    result = play(trial(steps=9, burst_steps=3, report_steps=4))
    assert bars(result) == [("a", 0, 3), ("a", 3, 4), ("a", 4, 7), ("a", 7, 8), ("a", 8, 9)]


def test_a_trial_that_comes_back_from_a_report_ends_the_burst_that_it_waits_for():
    pair = trial(steps=8, burst_steps=4, report_steps=4), trial("b", steps=20, burst_steps=20, arrival_seconds=4)
    result = play(*pair, answer_seconds=2.5)
    assert bars(result) == [("a", 0, 4), ("b", 4, 7), ("a", 7, 11), ("b", 11, 28)]


def test_a_pruned_trial_runs_no_step_beyond_its_last_report():
    result = play(trial(steps=50, burst_steps=10, report_steps=15, stop_after_reports=2))
    assert bars(result) == [("a", 0, 10), ("a", 10, 15), ("a", 15, 25), ("a", 25, 30)]
    assert (result.units_run, result.units_saved) == (30, 20)


def test_a_burst_that_is_lost_with_its_device_runs_again():
    outage = Outage(device="d0", at_seconds=13.5, until_seconds=20)
    result = play(trial(steps=20), outages=(outage,))
    assert bars(result, ("burst", "lost")) == [("a", 0, 10), ("a", 10, 13.5), ("a", 20, 30)]
    assert (result.units_run, result.makespan_seconds) == (20, 30)


def test_bursts_are_of_steps_that_are_one_unit():
    units = tuple(Unit(kind="forward", shard=0, seconds=1.0) for _ in range(2))
    with pytest.raises(
        ConfigError, match="bursts are of steps that are one unit, and a step of this trial has 2 units"
    ):
        SimulatedTrial(name="a", step=units, shard_bytes=(0,), steps=1, burst_steps=2)
    with pytest.raises(ConfigError, match="burst_steps must be at least 1, not 0"):
        trial(burst_steps=0)


def test_a_workload_has_as_many_steps_in_a_burst_as_fit():
    """At least one, however long it is."""
    bursts = {
        seconds: RandomWorkload(num_trials=1, num_shards=1, backward_seconds=0.25, burst_seconds=seconds).trials(0)[0]
        for seconds in (0.0, 0.1, 0.25, 0.9, 1.0)
    }
    assert [described.burst_steps for described in bursts.values()] == [1, 1, 1, 3, 4]
    with pytest.raises(ConfigError, match="trials of 4 shards run no bursts; give num_shards=1, or no burst_seconds"):
        RandomWorkload(num_trials=1, burst_seconds=1.0)


@pytest.mark.parametrize("policy", ["lrtf", "fifo"])
@pytest.mark.parametrize(
    "trials",
    [
        pytest.param([trial(steps=1005)], id="its end"),
        pytest.param([trial(steps=1000, burst_steps=3, report_steps=70)], id="reports"),
        pytest.param([trial(steps=1005), trial("b", steps=1005)], id="two ends"),
        pytest.param([trial(steps=2000), trial("b", steps=995, burst_steps=7, report_steps=500)], id="unlike"),
    ],
)
def test_skipped_bursts_end_where_played_ones_do(trials, policy):
    """A burst is cut by the trial's end and by reports, so that what comes there is no repeat."""
    scenario = Scenario(trials=tuple(trials), devices=ONE_DEVICE)
    skipped = simulate(scenario, policy)
    assert dataclasses.replace(skipped, units_skipped=0) == simulate(scenario, policy, skip_repeats=False)


def test_bursts_that_repeat_are_skipped():
    """Guards that the comparison above compares with something."""
    scenario = Scenario(trials=(trial(steps=1005), trial("b", steps=1005)), devices=ONE_DEVICE)
    assert simulate(scenario).units_skipped > 800


WORKLOADS = st.fixed_dictionaries(
    {
        "num_trials": st.integers(1, 8),
        "steps": st.integers(1, 40),
        "epochs": st.integers(1, 3),
        "spread": st.sampled_from([1.0, 1.5, 4.0]),
        "burst_seconds": st.sampled_from([0.0, 0.5, 2.0, 30.0]),
    }
)


@settings(max_examples=60, deadline=None)
@given(workload=WORKLOADS, num_devices=st.integers(1, 4), seed=st.integers(0, 99))
def test_bursts_stay_within_one_of_them_and_the_slack_of_the_bound(workload, num_devices, seed):
    trials = RandomWorkload(num_shards=1, **workload).trials(seed)
    result = simulate(Scenario(trials=trials, devices=equal_devices(num_devices)), "lrtf")
    longest = max(described.burst_steps * described.step_seconds for described in trials)
    slack = ShardedLRTF().slack_steps * max(described.step_seconds for described in trials)
    allowed = result.bound_seconds + longest + slack
    assert result.bound_seconds * (1 - 1e-9) <= result.makespan_seconds <= allowed * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    workload=WORKLOADS,
    arrival_gap_seconds=st.sampled_from([0.0, 0.3, 3.0]),
    num_devices=st.integers(1, 3),
    seed=st.integers(0, 99),
    policy=st.sampled_from(["lrtf", "fifo", "round_robin", "srtf"]),
)
def test_the_work_is_the_same_however_it_is_cut_into_bursts(workload, arrival_gap_seconds, num_devices, seed, policy):
    """Whatever ended early: each step runs once."""
    trials = RandomWorkload(num_shards=1, arrival_gap_seconds=arrival_gap_seconds, **workload).trials(seed)
    result = simulate(Scenario(trials=trials, devices=equal_devices(num_devices)), policy, timeline=10**6)
    for described in trials:
        row = [bar for bar in result.timeline if bar.job == described.name]
        seconds = math.fsum(bar.end_seconds - bar.start_seconds for bar in row)
        assert seconds == pytest.approx(described.steps * described.step_seconds)
        longest = max(bar.end_seconds - bar.start_seconds for bar in row)
        assert longest <= described.burst_steps * described.step_seconds * (1 + 1e-9)
    assert result.units_run == sum(described.steps for described in trials)
    assert sum(device.busy_seconds for device in result.devices) == pytest.approx(
        sum(described.steps * described.step_seconds for described in trials)
    )
