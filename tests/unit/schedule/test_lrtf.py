"""Sharded-LRTF: what is chosen on one device, and what the slack saves over a whole schedule."""

import pytest

from hydra_tune.schedule import JobView, ShardedLRTF, Unit, makespan_bound
from tests.unit.schedule.driver import drive

HERE, THERE = "cpu:0", "cpu:1"


def view(job, remaining_seconds, *, on=None, step_seconds=0.0, order=None):
    return JobView(
        job=job,
        order=ord(job) if order is None else order,
        unit=Unit(kind="forward", shard=0, seconds=1.0),
        remaining_seconds=remaining_seconds,
        step_seconds=step_seconds,
        shard_device=on,
    )


CASES = {
    "the longest": ([view("a", 5.0), view("b", 9.0), view("c", 7.0)], "b"),
    "ties go to the earliest submitted": ([view("b", 5.0), view("a", 5.0), view("c", 5.0)], "a"),
    "without slack the longest, wherever it is": ([view("a", 9.0, on=THERE), view("b", 8.9, on=HERE)], "a"),
    "without slack place decides between equals": ([view("a", 9.0, on=THERE), view("b", 9.0, on=HERE)], "b"),
    "here before nowhere": ([view("a", 9.0, step_seconds=2.0), view("b", 8.0, on=HERE)], "b"),
    "nowhere before elsewhere": ([view("a", 9.0, on=THERE, step_seconds=2.0), view("b", 8.0)], "b"),
    "the slack's edge is inside": ([view("a", 9.0, on=THERE, step_seconds=2.0), view("b", 7.0, on=HERE)], "b"),
    "beyond the slack": ([view("a", 9.0, on=THERE, step_seconds=2.0), view("b", 6.9, on=HERE)], "a"),
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
    "of unknown length": ([view("a", 9.0), view("b", float("inf"), step_seconds=1.0)], "b"),
}


@pytest.mark.parametrize(("candidates", "chosen"), CASES.values(), ids=CASES.keys())
def test_choice(candidates, chosen):
    assert ShardedLRTF().choose(HERE, candidates).job == chosen


def training(steps, num_shards=4, seconds=1.0):
    forward = [Unit(kind="forward", shard=shard, seconds=seconds) for shard in range(num_shards)]
    backward = [Unit(kind="backward", shard=shard, seconds=2 * seconds) for shard in reversed(range(num_shards))]
    return (forward + backward) * steps


def test_slack_saves_most_loads_and_hardly_any_time():
    jobs = {f"job{index}": training(steps=20, seconds=seconds) for index, seconds in enumerate([1.0, 1.25, 1.5, 0.75])}
    totals = [sum(unit.seconds for unit in units) for units in jobs.values()]
    step_seconds = 12.0 * 1.5
    strict = drive(jobs, policy=ShardedLRTF(), num_devices=2)
    slack = drive(jobs, policy=ShardedLRTF(), num_devices=2, step_seconds=step_seconds)
    assert slack.num_loads < strict.num_loads / 2
    assert slack.now <= makespan_bound(totals, 2) + step_seconds


def test_a_lone_job_stays_where_it_is_whatever_else_is_idle():
    pool = drive({"a": training(steps=5)}, policy=ShardedLRTF(), num_devices=4)
    assert pool.num_loads == 4, "each shard once"
