"""Jobs that are alike are compared by the steps that are left, whenever they were told how long a step takes."""

import heapq
import random
from itertools import count, pairwise

import pytest

from hydra_tune.schedule import (
    DeviceAdded,
    Fifo,
    JobAdmitted,
    JobStopped,
    JobSubmitted,
    Scheduler,
    ShardedLRTF,
    ShardMoved,
    Unit,
    UnitFinished,
)
from tests.support.schedule_invariants import check

UNIT = Unit(kind="forward", shard=0, seconds=1.0)


def admitted(job, steps, step_seconds, alike="plan"):
    return JobAdmitted(
        job=job, unit=UNIT, remaining_seconds=steps * step_seconds, step_seconds=step_seconds, alike=alike
    )


def finished(job, steps, step_seconds, alike="plan"):
    return UnitFinished(job, "cpu:0", 1.0, UNIT, steps * step_seconds, step_seconds, (), alike)


def machine(*events):
    """One device, which runs a unit of the first job."""
    made = Scheduler(policy=Fifo(), max_concurrent=9)
    made.handle(DeviceAdded(device="cpu:0"))
    made.handle(*[JobSubmitted(job=event.job) for event in events])
    for event in events:
        made.handle(event)
    check(made)
    return made


def shown(made, job):
    view = made.view(job)
    return view.remaining_seconds, view.step_seconds


def test_a_little_more_or_less_a_step_is_shown_as_before():
    made = machine(admitted("a", 6, 10.0), admitted("b", 6, 11.0), admitted("c", 6, 9.0))
    assert shown(made, "b") == shown(made, "c") == (60.0, 10.0)


@pytest.mark.parametrize("together", [False, True], ids=["by itself", "in one call with another event"])
def test_much_more_is_shown_of_all_at_once(together):
    made = machine(admitted("a", 6, 10.0), admitted("b", 6, 10.0), admitted("c", 5, 10.0))
    events = [finished("a", 5, 20.0)]
    made.handle(*events, *[ShardMoved(job="c", shard=1, device="cpu:0")] * together)
    check(made)
    assert shown(made, "b") == (120.0, 20.0)
    assert shown(made, "c") == (100.0, 20.0)
    assert made.step_seconds("plan") == 20.0


def test_jobs_that_are_not_alike_are_left_alone():
    made = machine(
        admitted("a", 6, 10.0),
        admitted("b", 6, 10.0),
        admitted("c", 6, 11.0, alike=None),
        admitted("d", 6, 12.0, "other"),
    )
    made.handle(finished("a", 5, 20.0))
    assert shown(made, "b") == (120.0, 20.0)
    assert shown(made, "c") == (66.0, 11.0)
    assert shown(made, "d") == (72.0, 12.0)


def test_a_job_whose_steps_are_others_now_goes_by_these():
    made = machine(admitted("x", 9, 1.0), admitted("a", 6, 10.0), admitted("b", 6, 30.0, "other"))
    made.handle(JobStopped(job="x"), finished("x", 9, 1.0))
    (running,) = made.running.values()
    assert running == "a"
    made.handle(finished("a", 5, 33.0, "other"), JobStopped(job="b"))
    check(made)
    assert made.step_seconds("plan") is None
    assert made.step_seconds("other") == 30.0


def test_what_will_be_shown_of_a_job_that_runs_is_rescaled_as_well():
    made = machine(admitted("a", 6, 10.0), admitted("b", 6, 11.0))
    made.handle(finished("a", 5, 11.0))
    after = made.view_after("a", unit=UNIT, seconds=1.0, remaining_seconds=44.0, shard_device=None)
    assert (after.remaining_seconds, after.step_seconds) == (40.0, 10.0)


def test_of_jobs_that_are_over_nothing_is_kept():
    made = machine(admitted("a", 6, 10.0), admitted("b", 6, 10.0))
    made.handle(JobStopped(job="b"))
    made.handle(finished("a", 5, 10.0), JobStopped(job="a"))
    assert made.step_seconds("plan") is None
    assert made.jobs_alike("plan") == ()


def run(policy, *, alike):
    """Eight equal jobs of thirty steps of seven units on two devices; what a step is thought to take goes up and down.

    Returns:
        The devices of each job's units, and the jobs of each device's.
    """
    made, clock, numbers, ends = Scheduler(policy=policy, max_concurrent=8), 0.0, count(), []
    places = {f"job{index}": [] for index in range(8)}
    turns = {"cpu:0": [], "cpu:1": []}

    rng, thought = random.Random(1), [10.0]
    while len(thought) <= 8 * 210:
        thought.append(min(20.0, max(5.0, thought[-1] * rng.uniform(0.9, 1 / 0.9))))

    def do(commands):
        for command in commands:
            if hasattr(command, "device"):
                places[command.job].append(command.device)
                turns[command.device].append(command.job)
                heapq.heappush(ends, (clock + 1.0, next(numbers), command))

    for device in turns:
        made.handle(DeviceAdded(device=device))
    made.handle(*[JobSubmitted(job=job) for job in places])
    for job in places:
        do(made.handle(admitted(job, 30, thought[0], alike)))
    total = 0
    while ends:
        clock, _, command = heapq.heappop(ends)
        job, done = command.job, len(places[command.job])
        total += 1
        step = thought[total]
        unit = UNIT if done < 210 else None
        ended = UnitFinished(job, command.device, 1.0, unit, (210 - done) / 7 * step, step, (), alike)
        moved = ShardMoved(job=job, shard=0, device=command.device)
        do(made.handle(moved, ended) if unit else made.handle(ended, JobStopped(job=job)))
    return places, turns


def changes(runs):
    return sum(before != after for before, after in pairwise(runs))


def test_equal_jobs_stay_on_their_devices_though_times_go_up_and_down():
    places, turns = run(ShardedLRTF(), alike="plan")
    assert [len(set(devices)) for devices in places.values()] == [1] * 8
    assert len(turns["cpu:0"]) == len(turns["cpu:1"])
    assert abs(changes(turns["cpu:0"]) - changes(turns["cpu:1"])) <= 1
    alone, _ = run(ShardedLRTF(), alike=None)
    assert sum(changes(devices) for devices in alone.values()) > 0, "or this says nothing"
