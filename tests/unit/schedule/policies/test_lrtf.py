"""Sharded-LRTF: what is chosen on one device, and what the slack saves over a whole schedule."""

import itertools

import pytest

from hydra_tune.errors import ConfigError
from hydra_tune.schedule import (
    DeviceAdded,
    JobAdmitted,
    JobSubmitted,
    JobView,
    Scheduler,
    ShardedLRTF,
    Unit,
    UnitFinished,
    makespan_bound,
)
from tests.unit.schedule.driver import drive

HERE, THERE = "cpu:0", "cpu:1"


def view(job, remaining_seconds, *, on=None, step_seconds=0.0, order=None, turn=0, last=None):
    return JobView(
        job=job,
        order=ord(job) if order is None else order,
        unit=Unit(kind="forward", shard=0, seconds=1.0),
        remaining_seconds=remaining_seconds,
        step_seconds=step_seconds,
        shard_device=on,
        turn=turn,
        last_device=last,
    )


CASES = {
    "the longest": ([view("a", 5.0), view("b", 9.0), view("c", 7.0)], "b"),
    "ties go to the earliest submitted": ([view("b", 5.0), view("a", 5.0), view("c", 5.0)], "a"),
    "without slack the longest, wherever it is": ([view("a", 9.0, on=THERE), view("b", 8.9, on=HERE)], "a"),
    "without slack place decides between equals": ([view("a", 9.0, on=THERE), view("b", 9.0, on=HERE)], "b"),
    "here before nowhere": ([view("a", 9.0, step_seconds=2.0), view("b", 8.0, on=HERE)], "b"),
    "nowhere before elsewhere": ([view("a", 9.0, on=THERE, step_seconds=2.0), view("b", 8.0)], "b"),
    "the edge of half the slack is inside": ([view("a", 9.0, step_seconds=2.0), view("b", 7.0, on=HERE)], "b"),
    "beyond half the slack": ([view("a", 9.0, step_seconds=2.0), view("b", 6.9, on=HERE)], "a"),
    "the slack's edge is inside": ([view("a", 9.0, on=THERE, step_seconds=2.0), view("b", 5.0, on=HERE)], "b"),
    "beyond the slack": ([view("a", 9.0, on=THERE, step_seconds=2.0), view("b", 4.9, on=HERE)], "a"),
    "here before nowhere, within half the slack of the longest at hand": (
        [view("a", 9.0, on=THERE, step_seconds=2.0), view("b", 7.0), view("c", 5.0, on=HERE)],
        "c",
    ),
    "nowhere before here, beyond half the slack of the longest at hand": (
        [view("a", 9.0, on=THERE, step_seconds=2.0), view("b", 7.0), view("c", 4.9, on=HERE)],
        "b",
    ),
    "its turn is as long on a device that is ahead": (
        [
            view("a", 9.0, on=THERE, step_seconds=2.0),
            view("b", 6.0, on=HERE),
            view("c", 2.0, on=HERE, turn=1, last=HERE),
        ],
        "c",
    ),
    "and no longer": (
        [
            view("a", 9.0, on=THERE, step_seconds=2.0),
            view("b", 6.0, on=HERE),
            view("c", 1.9, on=HERE, turn=1, last=HERE),
        ],
        "b",
    ),
    "the slack is the longest job's own": ([view("a", 9.0), view("b", 8.0, on=HERE, step_seconds=5.0)], "a"),
    "of equally long ones the earliest gives the slack": (
        [view("b", 9.0, on=THERE), view("a", 9.0, on=THERE, step_seconds=5.0), view("c", 5.0, on=HERE)],
        "c",
    ),
    "several here: the longest of them": (
        [view("a", 9.0, step_seconds=5.0), view("b", 6.0, on=HERE), view("c", 7.0, on=HERE)],
        "c",
    ),
    "all elsewhere: the longest": ([view("a", 8.0, on=THERE), view("b", 9.0, on=THERE, step_seconds=5.0)], "b"),
    "the device's last job goes on before longer ones": (
        [view("a", 9.0, on=HERE, step_seconds=3.0), view("b", 7.0, on=HERE, turn=1, last=HERE)],
        "b",
    ),
    "it goes on where its shard is on no device": (
        [view("a", 9.0, on=HERE, step_seconds=3.0), view("b", 7.0, turn=1, last=HERE)],
        "b",
    ),
    "it goes on where no other would be begun": (
        [view("a", 9.0, on=THERE, step_seconds=3.0), view("b", 3.0, turn=1, last=HERE), view("c", 5.9, on=HERE)],
        "b",
    ),
    "it does not go on where its shard is elsewhere": (
        [view("a", 9.0, on=HERE, step_seconds=3.0), view("b", 7.0, on=THERE, turn=1, last=HERE)],
        "a",
    ),
    "it does not go on beyond the slack": (
        [view("a", 9.0, on=THERE, step_seconds=3.0), view("b", 2.9, on=HERE, turn=1, last=HERE)],
        "a",
    ),
    "of several that ran here the last": (
        [
            view("a", 9.0, on=HERE, step_seconds=3.0, turn=1, last=HERE),
            view("b", 7.0, on=HERE, turn=3, last=HERE),
            view("c", 8.0, on=HERE, turn=2, last=HERE),
        ],
        "b",
    ),
    "one that ran last elsewhere is like any other": (
        [view("a", 9.0, step_seconds=3.0), view("b", 7.0, turn=1, last=THERE)],
        "a",
    ),
    "of unknown length": ([view("a", 9.0), view("b", float("inf"), step_seconds=1.0)], "b"),
}


@pytest.mark.parametrize(("candidates", "chosen"), CASES.values(), ids=CASES.keys())
def test_choice(candidates, chosen):
    assert ShardedLRTF(slack_steps=2).choose(HERE, candidates).job == chosen


@pytest.mark.parametrize(("slack_steps", "chosen"), [(0, "a"), (1, "b"), (2, "c")])
def test_the_slack_counts_steps_of_the_longest_job(slack_steps, chosen):
    views = [view("a", 9.0, on=THERE, step_seconds=2.0), view("b", 7.0), view("c", 5.0, on=HERE)]
    assert ShardedLRTF(slack_steps=slack_steps).choose(HERE, views).job == chosen


@pytest.mark.parametrize("slack_steps", [-1, float("nan"), float("inf")])
def test_a_slack_that_makes_no_sense_is_refused(slack_steps):
    with pytest.raises(ConfigError, match="slack_steps must be a finite number from 0"):
        ShardedLRTF(slack_steps=slack_steps)


def training(steps, num_shards=4, seconds=1.0):
    forward = [Unit(kind="forward", shard=shard, seconds=seconds) for shard in range(num_shards)]
    backward = [Unit(kind="backward", shard=shard, seconds=2 * seconds) for shard in reversed(range(num_shards))]
    return (forward + backward) * steps


def test_slack_saves_most_loads_and_hardly_any_time():
    jobs = {f"job{index}": training(steps=20, seconds=seconds) for index, seconds in enumerate([1.0, 1.25, 1.5, 0.75])}
    totals = [sum(unit.seconds for unit in units) for units in jobs.values()]
    step_seconds = 12.0 * 1.5
    strict = drive(jobs, policy=ShardedLRTF(), num_devices=2)
    slack = drive(jobs, policy=ShardedLRTF(slack_steps=2), num_devices=2, step_seconds=step_seconds)
    assert slack.num_loads < strict.num_loads / 2
    assert slack.now <= makespan_bound(totals, 2) + 2 * step_seconds


def test_a_device_goes_on_with_its_job_and_so_needs_room_for_one():
    """Three jobs on one device that holds a step of one: it changes jobs once in some steps, not after each unit."""
    ran = []
    jobs = {job: training(steps=20) for job in "abc"}
    scheduler = Scheduler(policy=ShardedLRTF(), max_concurrent=3)
    scheduler.handle(DeviceAdded(device=HERE))
    scheduler.handle(*[JobSubmitted(job=job) for job in jobs])
    left = {job: sum(unit.seconds for unit in units) for job, units in jobs.items()}
    commands = scheduler.handle(
        *[JobAdmitted(job=job, unit=jobs[job][0], remaining_seconds=left[job], step_seconds=12.0) for job in jobs]
    )
    while commands:
        (run,) = commands
        ran.append(run.job)
        left[run.job] -= jobs[run.job].pop(0).seconds
        following = jobs[run.job][0] if jobs[run.job] else None
        commands = scheduler.handle(UnitFinished(run.job, HERE, run.unit.seconds, following, left[run.job]))
    assert len(ran) == 3 * 160
    assert sum(before != after for before, after in itertools.pairwise(ran)) < 3 * 160 / 16


def test_a_lone_job_stays_where_it_is_whatever_else_is_idle():
    pool = drive({"a": training(steps=5)}, policy=ShardedLRTF(), num_devices=4)
    assert pool.num_loads == 4, "each shard once"
