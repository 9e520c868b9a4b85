"""Staggered admission: the oldest go first, as many as there are devices. Any order of events: tests/property."""

import pytest

from hydra_tune.errors import ConfigError
from hydra_tune.schedule import (
    DeviceAdded,
    DeviceLost,
    JobAdmitted,
    JobPaused,
    JobResumed,
    JobStopped,
    JobSubmitted,
    JobUnpaused,
    PriorityChanged,
    Run,
    Scheduler,
    ShardedLRTF,
    Unit,
    UnitFinished,
)
from tests.support.schedule_invariants import check

UNIT = Unit(kind="backward", shard=0, seconds=1.0)
REMAINING = {"a": 3.0, "b": 4.0, "c": 5.0, "d": 9.0}


class Machine:
    """Four jobs on some devices, of which the last is the longest; the policy alone would run that one first."""

    def __init__(self, num_devices, admission="staggered", staggered=""):
        self.scheduler = Scheduler(policy=ShardedLRTF(), max_concurrent=4, admission=admission)
        self.handle(*[JobSubmitted(job=job, staggered=job in staggered) for job in REMAINING])
        self.handle(*[JobAdmitted(job=job, unit=UNIT, remaining_seconds=seconds) for job, seconds in REMAINING.items()])
        self.runs = self.handle(*[DeviceAdded(device=f"cpu:{index}") for index in range(num_devices)])

    def handle(self, *events):
        commands = self.scheduler.handle(*events)
        check(self.scheduler)
        return [command.job for command in commands if isinstance(command, Run)]

    def finish(self, job, *, waits=False):
        (device,) = [device for device, running in self.scheduler.running.items() if running == job]
        unit, left = (None if waits else UNIT), REMAINING[job]
        return self.handle(UnitFinished(job=job, device=device, seconds=1.0, unit=unit, remaining_seconds=left))


def test_the_oldest_run_first_and_without_staggering_the_longest():
    assert Machine(2).runs == ["b", "a"], "of the two oldest the longer first: the policy chooses among them"
    assert Machine(2, admission="eager").runs == ["d", "c"]


def test_others_fill_the_gaps_by_policy_and_are_left_for_the_oldest_again():
    machine = Machine(2)
    assert machine.finish("a", waits=True) == ["d"], "no device idles; of the rest the longest"
    assert machine.finish("d") == ["d"], "a is not answered yet"
    assert machine.handle(JobResumed(job="a", unit=UNIT, remaining_seconds=2.0)) == []
    assert machine.finish("d") == ["a"]


def test_when_one_is_over_the_next_oldest_takes_its_place():
    machine = Machine(1)
    machine.handle(JobStopped(job="a"))
    assert machine.finish("a") == ["b"]
    assert machine.finish("b") == ["b"], "and keeps it to its end, though others have more to do"


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (JobPaused(job="a"), "b"),
        (PriorityChanged(job="c", priority=1), "c"),
        (PriorityChanged(job="a", priority=-1), "b"),
    ],
    ids=repr,
)
def test_pauses_and_priorities_change_who_is_in_front(event, expected):
    machine = Machine(1)
    machine.handle(event)
    assert machine.finish("a") == [expected]


def test_one_that_goes_on_after_a_pause_is_as_old_as_before():
    machine = Machine(1)
    machine.handle(JobPaused(job="a"))
    machine.finish("a")
    machine.handle(JobUnpaused(job="a"))
    assert machine.finish("b") == ["a"]


def test_the_front_is_as_large_as_there_are_devices():
    machine = Machine(3)
    assert machine.runs == ["c", "b", "a"]
    assert machine.scheduler.front == ("a", "b", "c")
    machine.handle(DeviceLost(device=_device_of(machine, "b")))
    assert machine.scheduler.front == ("a", "b")
    assert machine.finish("c") == ["b"], "two devices, two in front"
    assert machine.handle(DeviceAdded(device="cpu:9")) == ["c"], "three again"
    assert Machine(3, admission="eager").scheduler.front == ()


def _device_of(machine, job):
    return next(device for device, running in machine.scheduler.running.items() if running == job)


@pytest.mark.parametrize(
    ("admission", "message"),
    [
        ("stagered", r"admission must be 'auto', 'eager' or 'staggered', not 'stagered'; did you mean 'staggered'\?"),
        (None, "admission must be 'auto', 'eager' or 'staggered', not None"),
        (["eager"], r"admission must be 'auto', 'eager' or 'staggered', not \['eager'\]"),
    ],
)
def test_anything_else_is_refused(admission, message):
    with pytest.raises(ConfigError, match=message):
        Scheduler(policy=ShardedLRTF(), max_concurrent=1, admission=admission)


def test_jobs_that_are_not_staggered_have_the_rank_of_the_front():
    staggered = Machine(1, admission="auto", staggered="abd")
    assert staggered.runs == ["c"], "of a, the oldest that is staggered, and c, which is not, the longer"
    assert staggered.scheduler.front == ("a", "c")
    staggered.handle(JobStopped(job="c"))
    assert staggered.finish("c") == ["a"]
    assert staggered.finish("a") == ["a"], "until its end, though d is longer"


def test_without_staggered_jobs_auto_is_eager():
    machine = Machine(2, admission="auto", staggered="")
    assert machine.runs == ["d", "c"]
    assert machine.scheduler.front == ()
