"""Sharded-LRTF: what is chosen on one device, and what the slack saves over a whole schedule."""

import itertools
from dataclasses import replace

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


def based(steps, base="base", num_shards=4, reports=False):
    """A trial on a frozen base, cut into shards; after each step it may run code that reads nothing of the base."""
    units = [
        Unit(kind=unit.kind, shard=unit.shard, seconds=unit.seconds, base=base, base_position=100 * unit.shard)
        for unit in training(1, num_shards)
    ]
    resume = [Unit(kind="resume", shard=0, seconds=0.0)] if reports else []
    return (units + resume) * steps


class OneDevice:
    """A scheduler with a device, and what the units there read: the base and the place, one after the other."""

    def __init__(self, jobs, late=()):
        self.left, self.ran, self.read = {job: list(units) for job, units in jobs.items()}, [], []
        self.scheduler = Scheduler(policy=ShardedLRTF(), max_concurrent=99)
        self.scheduler.handle(DeviceAdded(device=HERE))
        self.commands = []
        for job in jobs:
            if job not in late:
                self.submit(job)

    def submit(self, job):
        self.commands += self.scheduler.handle(JobSubmitted(job=job))
        admit = next(command for command in self.commands if command.job == job)
        self.commands.remove(admit)
        self.commands += self.scheduler.handle(
            JobAdmitted(job=job, unit=self.left[job][0], remaining_seconds=self.seconds(job), step_seconds=12.0)
        )

    def seconds(self, job):
        return sum(unit.seconds for unit in self.left[job])

    def run(self, most=None):
        while self.commands and (most is None or len(self.ran) < most):
            (run,) = self.commands
            self.left[run.job].pop(0)
            self.ran.append(run.job)
            if run.unit.base is not None:
                self.read.append((run.unit.base, run.unit.base_position))
            following = self.left[run.job][0] if self.left[run.job] else None
            finished = UnitFinished(run.job, HERE, run.unit.seconds, following, self.seconds(run.job))
            self.commands = self.scheduler.handle(finished)

    @property
    def changes(self):
        """How often the device reads another place than before."""
        return 1 + sum(before != after for before, after in itertools.pairwise(self.read))


@pytest.mark.parametrize("reports", [False, True])
@pytest.mark.parametrize("num_jobs", [1, 2, 8])
def test_jobs_on_one_base_read_it_together(num_jobs, reports):
    device = OneDevice({f"job{index}": based(steps=10, reports=reports) for index in range(num_jobs)})
    device.run()
    # A step reads four places forward and then backward; at both turns the place stays the same.
    assert device.changes == 10 * 6 + 1, "as often as one job alone"


def test_jobs_of_different_lengths_read_a_base_as_often_as_the_longest_alone():
    device = OneDevice({job: based(steps) for job, steps in (("a", 3), ("b", 11), ("c", 7), ("d", 10))})
    device.run()
    assert device.changes <= 11 * 6 + 1 + 2 * 6


@pytest.mark.parametrize("begun", [1, 3, 5, 12])
def test_a_job_that_comes_later_joins_where_the_others_pass(begun):
    device = OneDevice({job: based(steps=10) for job in "abcd"}, late="d")
    device.run(most=3 * 8 + begun)
    device.submit("d")
    device.run()
    assert device.changes <= 12 * 6 + 1
    assert device.ran.index("d") <= 3 * 8 + begun + 3 * 8, "within a step of the others"


def test_jobs_whose_cuts_differ_a_little_go_together_as_well():
    """With other ranks of adapters, other shards fit: their places are near, not the same."""
    jobs = {job: based(steps=6) for job in "abcd"}
    for index, units in enumerate(jobs.values()):
        units[:] = [replace(unit, base_position=unit.base_position + index) for unit in units]
    device = OneDevice(jobs)
    device.run()
    near = [position // 100 for _, position in device.read]
    assert 1 + sum(before != after for before, after in itertools.pairwise(near)) == 6 * 6 + 1


def test_two_bases_and_a_job_without_one_are_served_by_length():
    jobs = {f"{base}{index}": based(12, base) for base in "xy" for index in range(4)} | {"z": training(steps=12)}
    device = OneDevice(jobs)
    device.run()
    bases = [base for base, _ in device.read]
    changes = sum(before != after for before, after in itertools.pairwise(bases))
    assert 2 <= changes <= 2 * 12, "neither waits for the other's end, and each goes on for some units"
    ends = [len(device.ran) - device.ran[::-1].index(job) for job in jobs]
    assert min(ends) > len(device.ran) * 0.7, "the longest goes first, so equal jobs end together"


def test_a_longer_job_takes_the_device_from_a_wavefront():
    short = view("a", 10.0, step_seconds=1.0, turn=2, last=HERE)._replace(
        unit=based(1)[1], last_on_base=based(1)[0], step_seconds=2.0
    )
    other = short._replace(job="b", order=2, turn=1, unit=based(1)[0])
    assert ShardedLRTF().choose(HERE, [short, other, view("c", 14.0, step_seconds=2.0)]).job == "b"
    assert ShardedLRTF().choose(HERE, [short, other, view("c", 14.1, step_seconds=2.0)]).job == "c"


def test_a_job_of_another_device_is_taken_over_last():
    mine = view("a", 10.0, turn=2, last=HERE)._replace(unit=based(1)[3], last_on_base=based(1)[0])
    theirs = view("b", 10.0, turn=1, last=THERE)._replace(unit=based(1)[0], last_on_base=based(1)[0])
    assert ShardedLRTF().choose(HERE, [mine, theirs]).job == "a"
    assert ShardedLRTF().choose(THERE, [mine, theirs]).job == "b"


def test_a_lone_job_stays_where_it_is_whatever_else_is_idle():
    pool = drive({"a": training(steps=5)}, policy=ShardedLRTF(), num_devices=4)
    assert pool.num_loads == 4, "each shard once"
