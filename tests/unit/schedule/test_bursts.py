"""When the scheduler asks a burst of steps to end, and who has the device then. In any order of events: tests/property."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_tune.schedule import (
    DeviceAdded,
    DeviceLost,
    EndBurst,
    JobAdmitted,
    JobPaused,
    JobResumed,
    JobStopped,
    JobSubmitted,
    JobUnpaused,
    PriorityChanged,
    Release,
    Run,
    Scheduler,
    Unit,
    UnitFailed,
    UnitFinished,
    make_policy,
)
from tests.support.schedule_invariants import check

BURST = Unit(kind="burst", shard=0, seconds=1.0, may_end_early=True)
WHOLE = Unit(kind="forward", shard=0, seconds=1.0)


def scheduler(*, num_devices=1, policy="round_robin", max_concurrent=9):
    machine = Scheduler(policy=make_policy(policy), max_concurrent=max_concurrent)
    machine.handle(*[DeviceAdded(device=f"cpu:{index}") for index in range(num_devices)])
    return machine


def submit(machine, job, unit=BURST, *, remaining_seconds=10.0, priority=0):
    """A job is submitted and admitted."""
    machine.handle(JobSubmitted(job=job, priority=priority))
    commands = machine.handle(
        JobAdmitted(job=job, unit=unit, remaining_seconds=remaining_seconds, step_seconds=0.0),
    )
    check(machine)
    return commands


def finished(job, unit=BURST, device="cpu:0", remaining_seconds=9.0):
    return UnitFinished(job=job, device=device, seconds=1.0, unit=unit, remaining_seconds=remaining_seconds)


def run(job, unit=BURST, device="cpu:0"):
    return Run(job=job, device=device, unit=unit)


def end(job, device="cpu:0"):
    return EndBurst(job=job, device=device)


def test_a_job_that_is_admitted_ends_the_burst_that_it_waits_for_and_has_the_device_next():
    machine = scheduler()
    assert submit(machine, "a") == [run("a")]
    assert submit(machine, "b") == [end("a")]
    assert machine.handle(finished("a")) == [run("b")]
    assert machine.handle(finished("b")) == [run("a")]


def test_no_burst_ends_while_a_device_is_free():
    machine = scheduler(num_devices=2)
    assert submit(machine, "a") == [run("a")]
    assert submit(machine, "b") == [run("b", device="cpu:1")]


def test_a_unit_that_is_not_made_of_steps_is_never_asked_to_end():
    machine = scheduler()
    assert submit(machine, "a", WHOLE) == [run("a", WHOLE)]
    assert submit(machine, "b") == []
    assert machine.handle(finished("a", WHOLE)) == [run("b")]
    assert submit(machine, "c") == [end("b")], "a burst that began meanwhile is"


def waiting(machine, job):
    """A job waits for an answer, and another has its device."""
    submit(machine, job)
    machine.handle(finished(job, unit=None))
    submit(machine, "other")
    return JobResumed(job=job, unit=BURST, remaining_seconds=9.0)


def paused(machine, job):
    submit(machine, job)
    machine.handle(JobPaused(job=job))
    machine.handle(finished(job))
    submit(machine, "other")
    return JobUnpaused(job=job)


def raised(machine, job):
    submit(machine, "other", priority=1)
    assert submit(machine, job) == []
    return PriorityChanged(job=job, priority=1)


@pytest.mark.parametrize("way", [waiting, paused, raised])
def test_a_job_that_goes_on_or_is_raised_ends_the_burst_that_it_waits_for(way):
    machine = scheduler()
    event = way(machine, "a")
    assert machine.handle(event) == [end("other")]
    check(machine)
    assert machine.handle(finished("other")) == [run("a")]


def test_a_job_that_loses_its_device_ends_another_ones_burst():
    machine = scheduler(num_devices=2)
    submit(machine, "a")
    submit(machine, "b")
    assert machine.handle(DeviceLost(device="cpu:0")) == [end("b", device="cpu:1")]
    check(machine)
    assert machine.handle(finished("b", device="cpu:1")) == [run("a", device="cpu:1")]


def test_jobs_that_do_not_wait_for_a_device_end_no_burst():
    machine = scheduler(max_concurrent=2)
    submit(machine, "running")
    machine.handle(JobSubmitted(job="held"), JobPaused(job="held"))
    held = JobAdmitted(job="held", unit=BURST, remaining_seconds=1.0, step_seconds=0.0)
    assert machine.handle(JobUnpaused(job="held"), JobPaused(job="held")) == [], "it is only queued"
    machine.handle(JobUnpaused(job="held"))
    assert machine.handle(JobPaused(job="held"), held) == [], "the user holds it back"
    assert machine.handle(PriorityChanged(job="held", priority=5)) == []
    assert machine.handle(PriorityChanged(job="running", priority=5)) == [], "it has a device"
    assert machine.handle(JobUnpaused(job="held"), JobStopped(job="held")) == [Release(job="held")], "it is over"


def test_a_burst_is_asked_to_end_once_however_many_wait():
    machine = scheduler()
    submit(machine, "a")
    assert submit(machine, "b") == [end("a")]
    assert submit(machine, "c") == []
    assert machine.handle(JobPaused(job="b"), JobUnpaused(job="b")) == []
    assert machine.handle(finished("a")) == [run("b")]
    assert submit(machine, "d") == [end("b")], "the next burst is another one"


def test_the_next_job_that_waits_ends_another_burst():
    """The first is on its way to its end already, and is for who began to wait before."""
    machine = scheduler(num_devices=2)
    submit(machine, "a", remaining_seconds=1.0)
    submit(machine, "b", remaining_seconds=2.0)
    assert submit(machine, "c") == [end("a")]
    assert submit(machine, "d") == [end("b", "cpu:1")]
    assert submit(machine, "e") == []


def test_jobs_that_begin_to_wait_in_one_call_end_one_burst_each():
    machine = scheduler(num_devices=2)
    submit(machine, "a", remaining_seconds=1.0)
    submit(machine, "b", remaining_seconds=2.0)
    jobs = ("c", "d", "e")
    machine.handle(*[JobSubmitted(job=job) for job in jobs])
    events = [JobAdmitted(job=job, unit=BURST, remaining_seconds=9.0, step_seconds=0.0) for job in jobs]
    assert machine.handle(*events) == [end("a"), end("b", "cpu:1")]


def test_a_burst_does_not_end_for_a_job_of_lower_priority():
    machine = scheduler(num_devices=2)
    submit(machine, "high", remaining_seconds=1.0, priority=1)
    submit(machine, "low", remaining_seconds=5.0)
    assert submit(machine, "lowest", priority=-1) == []
    assert submit(machine, "equal") == [end("low", "cpu:1")]
    assert submit(machine, "as high", priority=1) == [end("high")]


def test_of_two_bursts_the_one_of_the_lower_priority_ends():
    machine = scheduler(num_devices=2)
    submit(machine, "nearly over", remaining_seconds=1.0, priority=1)
    submit(machine, "low", remaining_seconds=50.0)
    assert submit(machine, "highest", priority=2) == [end("low", "cpu:1")]


@pytest.mark.parametrize(("first", "second", "ended"), [(1.0, 2.0, 0), (2.0, 1.0, 1), (1.0, 1.0, 1)])
def test_of_two_bursts_that_of_the_job_with_the_least_left_ends_and_of_equals_the_later_one(first, second, ended):
    machine = scheduler(num_devices=2)
    submit(machine, "job 0", remaining_seconds=first)
    submit(machine, "job 1", remaining_seconds=second)
    assert submit(machine, "waits") == [end(f"job {ended}", f"cpu:{ended}")]


@pytest.mark.parametrize("over", [UnitFailed(job="a", device="cpu:0"), finished("a", unit=None)], ids=repr)
def test_a_burst_that_ends_by_itself_meanwhile_leaves_nothing_behind(over):
    """Its last step has failed, or has made a report."""
    machine = scheduler()
    submit(machine, "a")
    assert submit(machine, "b") == [end("a")]
    assert machine.handle(over)[-1] == run("b")
    assert submit(machine, "c") == [end("b")]


def test_the_policy_says_who_has_the_device_that_has_become_free():
    """It may be the one that had it: no policy is overruled."""
    machine = scheduler(policy="fifo")
    submit(machine, "a")
    assert submit(machine, "b") == [end("a")]
    assert machine.handle(finished("a")) == [run("a")]


def test_a_job_that_has_several_devices_may_have_a_burst_on_one():
    machine = scheduler(num_devices=2)
    submit(machine, "a", WHOLE)
    machine.handle(finished("a", unit=WHOLE)._replace(others=(BURST,)))
    assert machine.running == {"cpu:0": "a", "cpu:1": "a"}
    assert submit(machine, "b") == [end("a", "cpu:1")]


@settings(deadline=None)
@given(num_devices=st.integers(1, 4), late=st.integers(1, 6), data=st.data())
def test_whoever_waits_has_a_device_as_soon_as_the_bursts_that_end_for_it_have(num_devices, late, data):
    """Under a policy of turns: every job that comes while all devices run bursts has one after a step of each."""
    machine = scheduler(num_devices=num_devices, max_concurrent=20)
    for index in range(num_devices):
        left = data.draw(st.integers(1, 5).map(float))
        assert submit(machine, f"early {index}", remaining_seconds=left) == [
            run(f"early {index}", device=f"cpu:{index}")
        ]
    asked = [command for index in range(late) for command in submit(machine, f"late {index}")]
    assert len({command.device for command in asked}) == len(asked) == min(late, num_devices)
    for command in data.draw(st.permutations(asked)):
        (begun,) = machine.handle(finished(command.job, device=command.device))
        check(machine)
        assert begun.device == command.device
        assert begun.job.startswith("late")
    assert sum(job.startswith("late") for job in machine.running.values()) == len(asked)
