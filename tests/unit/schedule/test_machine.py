"""The scheduler's rules one by one. That they hold in any order of events is guarded in tests/property."""

import pytest

from hydra_tune.errors import ConfigError, ScheduleError
from hydra_tune.schedule import (
    Admit,
    DeviceAdded,
    DeviceLost,
    DeviceSlowed,
    Fifo,
    IncrementalPolicy,
    JobAdmitted,
    JobPaused,
    JobRejected,
    JobResumed,
    JobStopped,
    JobSubmitted,
    JobUnpaused,
    PriorityChanged,
    Release,
    Run,
    Scheduler,
    ShardedLRTF,
    ShardMoved,
    Unit,
    UnitFailed,
    UnitFinished,
    make_policy,
)
from tests.support.schedule_invariants import check, eligible_jobs

FIRST = Unit(kind="forward", shard=0, seconds=1.0)
SECOND = Unit(kind="forward", shard=1, seconds=1.0)


def scheduler(*, num_devices=1, max_concurrent=4, policy=None):
    machine = Scheduler(policy=policy or Fifo(), max_concurrent=max_concurrent)
    for index in range(num_devices):
        machine.handle(DeviceAdded(device=f"cpu:{index}"))
    return machine


def admitted(job, unit=FIRST, remaining_seconds=10.0, step_seconds=0.0):
    return JobAdmitted(job=job, unit=unit, remaining_seconds=remaining_seconds, step_seconds=step_seconds)


def finished(job, unit=SECOND, device="cpu:0", remaining_seconds=9.0, step_seconds=None):
    return UnitFinished(
        job=job,
        device=device,
        seconds=1.0,
        unit=unit,
        remaining_seconds=remaining_seconds,
        step_seconds=step_seconds,
    )


def submit(machine, *jobs):
    return machine.handle(*[JobSubmitted(job=job) for job in jobs])


def start(machine, *jobs):
    submit(machine, *jobs)
    return machine.handle(*[admitted(job) for job in jobs])


def run(job, unit=FIRST, device="cpu:0"):
    return Run(job=job, device=device, unit=unit)


def test_a_jobs_life():
    machine = scheduler()
    assert submit(machine, "a") == [Admit(job="a")]
    assert machine.handle(admitted("a")) == [run("a")]
    assert machine.handle(finished("a")) == [run("a", SECOND)]
    assert machine.handle(finished("a", unit=None)) == []
    assert machine.handle(JobResumed(job="a", unit=FIRST, remaining_seconds=1.0)) == [run("a")]
    assert machine.handle(finished("a", unit=None)) == []
    assert machine.handle(JobStopped(job="a")) == [Release(job="a")]
    assert machine.idle_devices == ("cpu:0",)


def test_a_device_that_is_added_late_is_fed_at_once():
    machine = scheduler(num_devices=0)
    assert start(machine, "a", "b") == []
    assert machine.handle(DeviceAdded(device="cpu:0")) == [run("a")]
    assert machine.handle(DeviceAdded(device="cpu:1")) == [run("b", device="cpu:1")]


def test_one_job_never_takes_two_devices():
    machine = scheduler(num_devices=2)
    assert start(machine, "a") == [run("a")]
    assert machine.idle_devices == ("cpu:1",)
    assert eligible_jobs(machine) == []


def test_events_of_one_call_are_decided_together():
    machine = scheduler(num_devices=2, policy=ShardedLRTF())
    submit(machine, "short", "long", "longest")
    events = [admitted(job, remaining_seconds=s) for job, s in (("short", 1.0), ("long", 2.0), ("longest", 3.0))]
    assert machine.handle(*events) == [run("longest"), run("long", device="cpu:1")]


def test_admission_is_in_submission_order_up_to_the_slots():
    machine = scheduler(max_concurrent=2)
    assert submit(machine, "a", "b", "c", "d") == [Admit(job="a"), Admit(job="b")]
    assert machine.handle(JobRejected(job="b")) == [Release(job="b"), Admit(job="c")]
    assert machine.num_slots_taken == 2


def test_a_waiting_job_holds_no_slot_and_goes_on_beyond_the_slots():
    machine = scheduler(num_devices=2, max_concurrent=1)
    submit(machine, "a", "b", "c")
    machine.handle(admitted("a"))
    assert machine.handle(finished("a", unit=None)) == [Admit(job="b")]
    assert machine.handle(admitted("b")) == [run("b", device="cpu:1")]
    assert machine.handle(JobResumed(job="a", unit=SECOND, remaining_seconds=1.0)) == [run("a", SECOND, "cpu:0")]
    assert machine.num_slots_taken == 2
    # One of the two ends; only the second end makes room.
    machine.handle(JobStopped(job="a"))
    assert machine.handle(finished("a")) == [Release(job="a")]
    assert machine.handle(finished("b", unit=None, device="cpu:1")) == [Admit(job="c")]


def test_memory_is_released_before_it_is_taken():
    machine = scheduler(max_concurrent=2)
    start(machine, "a", "b")
    submit(machine, "c")
    assert machine.handle(UnitFailed(job="a", device="cpu:0")) == [Release(job="a"), run("b"), Admit(job="c")]


def test_stop_while_queued_or_eligible_or_waiting_releases_at_once():
    machine = scheduler(max_concurrent=2)
    start(machine, "running", "eligible")
    submit(machine, "queued")
    assert machine.handle(JobStopped(job="queued")) == [Release(job="queued")]
    assert machine.handle(JobStopped(job="eligible")) == [Release(job="eligible")]
    machine.handle(finished("running", unit=None))
    assert machine.handle(JobStopped(job="running")) == [Release(job="running")]


@pytest.mark.parametrize("answer", [admitted("a"), JobRejected(job="a")], ids=["admitted", "rejected"])
def test_stop_while_preparing_releases_when_prepared_and_runs_nothing(answer):
    machine = scheduler(max_concurrent=1)
    submit(machine, "a", "b")
    assert machine.handle(JobStopped(job="a")) == []
    assert machine.handle(answer) == [Release(job="a"), Admit(job="b")]
    assert machine.idle_devices == ("cpu:0",)


@pytest.mark.parametrize(
    "end",
    [finished("a"), finished("a", unit=None), UnitFailed(job="a", device="cpu:0")],
    ids=["more to do", "nothing to do", "failed"],
)
def test_stop_while_running_releases_after_the_unit_and_frees_the_device(end):
    machine = scheduler(max_concurrent=2)
    start(machine, "a", "b")
    assert machine.handle(JobStopped(job="a")) == []
    assert machine.num_slots_taken == 2
    assert machine.handle(end) == [Release(job="a"), run("b")]


def test_stopping_twice_is_stopping_once():
    machine = scheduler()
    start(machine, "a")
    machine.handle(JobStopped(job="a"))
    assert machine.handle(JobStopped(job="a")) == []
    assert machine.handle(finished("a")) == [Release(job="a")]


def test_a_failed_job_fails_alone():
    machine = scheduler(num_devices=2)
    start(machine, "a", "b")
    assert machine.handle(UnitFailed(job="a", device="cpu:0")) == [Release(job="a")]
    assert machine.handle(finished("b", device="cpu:1")) == [run("b", SECOND, "cpu:1")]


def test_nothing_is_kept_of_jobs_that_are_over():
    machine = scheduler()
    for index in range(50):
        start(machine, f"job{index}")
        machine.handle(finished(f"job{index}", unit=None), JobStopped(job=f"job{index}"))
    assert dict(machine.phases) == {}
    assert machine._stories == {}
    assert machine.story("job49") == []


def test_the_chosen_job_goes_to_the_idle_device_that_has_its_shard():
    """With fewer jobs than devices a unit still travels to its shard, and not to the first idle device."""
    machine = scheduler(num_devices=2)
    start(machine, "a")
    machine.handle(ShardMoved(job="a", shard=1, device="cpu:1"))
    assert machine.handle(finished("a")) == [run("a", SECOND, "cpu:1")]


def test_a_job_that_begins_goes_to_the_idle_device_where_the_fewest_ran_last():
    """So that trials that come one by one are dealt out, and their state is not all on the first device."""
    machine = scheduler(num_devices=2)
    start(machine, "a")
    machine.handle(finished("a", unit=None))  # it waits, and what it has loaded stays
    assert start(machine, "b") == [run("b", device="cpu:1")]
    machine.handle(finished("b", unit=None, device="cpu:1"))
    assert start(machine, "c") == [run("c", device="cpu:0")]
    machine.handle(finished("c", unit=None))
    machine.handle(JobStopped(job="a"), JobStopped(job="c"))
    assert start(machine, "d") == [run("d", device="cpu:0")]
    check(machine)


def test_a_shard_on_a_busy_device_does_not_keep_an_idle_one_waiting():
    machine = scheduler(num_devices=2)
    start(machine, "a", "b")
    machine.handle(ShardMoved(job="a", shard=1, device="cpu:1"))
    assert machine.handle(finished("a")) == [run("a", SECOND, "cpu:0")]


def test_a_shard_that_left_its_device_is_on_none():
    machine = scheduler(num_devices=2)
    start(machine, "a")
    machine.handle(ShardMoved(job="a", shard=1, device="cpu:1"))
    machine.handle(ShardMoved(job="a", shard=1, device=None))
    assert machine.handle(finished("a")) == [run("a", SECOND, "cpu:0")]


def test_a_new_step_time_holds_from_then_on():
    machine = scheduler(policy=ShardedLRTF())
    submit(machine, "a", "b")
    machine.handle(admitted("a", remaining_seconds=20.0), admitted("b", SECOND, remaining_seconds=11.0))
    assert machine.view("a") is None, "it runs"
    assert machine.handle(finished("a", remaining_seconds=10.0, step_seconds=0.5)) == [run("b", SECOND)]
    assert machine.view("a").step_seconds == 0.5
    # 10 - 2 x 0.5 = 9: b goes on as long as it is within the slack of a.
    assert machine.handle(finished("b", remaining_seconds=9.0)) == [run("b", SECOND)]
    assert machine.handle(finished("b", remaining_seconds=8.9)) == [run("a", SECOND)]


def test_a_paused_job_gets_no_unit_until_it_is_unpaused():
    machine = scheduler()
    start(machine, "running", "ready")
    assert machine.handle(JobPaused(job="ready")) == []
    assert machine.phases["ready"] == "paused"
    assert machine.handle(JobPaused(job="running")) == []
    assert machine.handle(finished("running")) == [], "the unit that ran was let finish"
    assert machine.num_slots_taken == 0
    assert machine.handle(JobUnpaused(job="running")) == [run("running", SECOND)]
    assert machine.handle(JobUnpaused(job="ready")) == []
    assert machine.handle(finished("running", unit=None)) == [run("ready")]


def test_a_paused_job_gives_its_slot_up_and_goes_on_beyond_the_slots():
    machine = scheduler(num_devices=2, max_concurrent=1)
    submit(machine, "a", "b")
    machine.handle(admitted("a"))
    assert machine.handle(JobPaused(job="a")) == []
    assert machine.handle(finished("a")) == [Admit(job="b")]
    assert machine.handle(admitted("b")) == [run("b", device="cpu:1")]
    assert machine.handle(JobUnpaused(job="a")) == [run("a", SECOND, "cpu:0")]
    assert machine.num_slots_taken == 2


def test_a_job_paused_while_queued_is_passed_over_and_keeps_its_place():
    machine = scheduler(max_concurrent=1)
    submit(machine, "a", "b", "c", "d")
    machine.handle(JobPaused(job="b"))
    assert machine.handle(JobStopped(job="a"), JobRejected(job="a")) == [Release(job="a"), Admit(job="c")]
    machine.handle(JobUnpaused(job="b"))
    assert machine.handle(JobRejected(job="c")) == [Release(job="c"), Admit(job="b")]


def test_a_job_paused_while_it_waits_or_prepares_is_held_when_its_unit_is_ready():
    machine = scheduler()
    submit(machine, "preparing")
    machine.handle(JobPaused(job="preparing"))
    assert machine.handle(admitted("preparing")) == []
    start(machine, "waiting")
    machine.handle(finished("waiting", unit=None))
    machine.handle(JobPaused(job="waiting"))
    assert machine.handle(JobResumed(job="waiting", unit=FIRST, remaining_seconds=1.0)) == []
    assert dict(machine.phases) == {"preparing": "paused", "waiting": "paused"}
    assert machine.handle(JobUnpaused(job="waiting")) == [run("waiting")]
    assert machine.handle(JobStopped(job="preparing")) == [Release(job="preparing")]


def test_a_higher_priority_is_fed_and_admitted_first():
    machine = scheduler(max_concurrent=3, policy=ShardedLRTF())
    submit(machine, "long", "short")
    machine.handle(admitted("long", remaining_seconds=90.0), admitted("short", remaining_seconds=1.0))
    assert machine.running == {"cpu:0": "long"}
    assert machine.handle(PriorityChanged(job="short", priority=1)) == [], "the unit that runs is let finish"
    assert machine.handle(finished("long", remaining_seconds=80.0)) == [run("short")]
    submit(machine, "next", "a")
    assert machine.handle(JobSubmitted(job="b", priority=-1), JobSubmitted(job="c", priority=2)) == []
    assert machine.handle(JobRejected(job="next")) == [Release(job="next"), Admit(job="c")]
    assert machine.handle(JobRejected(job="c")) == [Release(job="c"), Admit(job="a")]
    assert machine.handle(JobRejected(job="a")) == [Release(job="a"), Admit(job="b")]


def test_a_one_method_policy_sees_the_highest_priority_only():
    seen = []

    class Sees:
        def choose(self, device, candidates):
            seen.append({view.job for view in candidates})
            return candidates[0]

    machine = scheduler(num_devices=0, policy=Sees())
    start(machine, "a", "b", "c")
    machine.handle(PriorityChanged(job="b", priority=1), PriorityChanged(job="c", priority=1))
    for index in range(3):
        machine.handle(DeviceAdded(device=f"cpu:{index}"))
    assert seen == [{"b", "c"}, {"b", "c"} - {machine.running["cpu:0"]}, {"a"}]


def test_a_unit_lost_with_its_device_runs_again_elsewhere():
    machine = scheduler(num_devices=2)
    start(machine, "a", "b")
    machine.handle(ShardMoved(job="b", shard=0, device="cpu:0"))
    assert machine.handle(DeviceLost(device="cpu:0")) == []
    assert machine.running == {"cpu:1": "b"}
    assert machine.story("a")[-1] == repr(DeviceLost(device="cpu:0"))
    assert machine.handle(finished("b", unit=FIRST, device="cpu:1")) == [run("a", FIRST, "cpu:1")]
    with pytest.raises(ScheduleError, match=r"the job is running on 'cpu:1'.*oldest first: .*DeviceLost.*Run"):
        machine.handle(finished("a"))
    assert machine.handle(DeviceAdded(device="cpu:0")) == [run("b")], "it may come back under its name"


def test_where_a_job_ran_last_is_forgotten_with_that_device():
    """By a job that waits for its turn and the one whose unit was lost; not by one that only had a shard there."""
    machine = scheduler(num_devices=2, policy=make_policy("round_robin"))
    start(machine, "a", "b", "c", "d")
    assert machine.handle(finished("a", unit=FIRST)) == [run("c")]
    assert machine.handle(finished("b", unit=FIRST, device="cpu:1")) == [run("d", device="cpu:1")]

    def last_devices(*jobs):
        return [machine.view(job).last_device for job in jobs]

    assert last_devices("a", "b") == ["cpu:0", "cpu:1"]
    machine.handle(ShardMoved(job="b", shard=1, device="cpu:0"))
    machine.handle(DeviceLost(device="cpu:0"))
    check(machine)
    assert last_devices("a", "b", "c") == [None, "cpu:1", None]
    assert machine.handle(DeviceAdded(device="cpu:0")) == [run("a")]
    assert last_devices("b", "c") == ["cpu:1", None], "one that comes back under the name is another device"
    assert machine.handle(finished("a", unit=FIRST)) == [run("b")]
    machine.handle(finished("d", unit=FIRST, device="cpu:1"))
    assert last_devices("a", "d") == ["cpu:0", "cpu:1"]


def test_a_device_or_a_name_that_comes_back_in_the_same_call_is_behind_the_others():
    machine = scheduler(num_devices=2)
    submit(machine, "a", "b")
    machine.handle(DeviceLost(device="cpu:0"), DeviceAdded(device="cpu:0"))
    check(machine)
    assert machine.idle_devices == ("cpu:1", "cpu:0")
    machine.handle(JobRejected(job="a"), JobSubmitted(job="a"))
    check(machine)
    assert list(machine.phases) == ["b", "a"]


def test_a_job_that_cannot_go_on_without_the_lost_device_is_stopped_in_the_same_call():
    machine = scheduler(num_devices=2)
    start(machine, "a", "b")
    assert machine.handle(DeviceLost(device="cpu:0"), JobStopped(job="a")) == [Release(job="a")]
    machine.handle(JobStopped(job="b"))
    assert machine.handle(DeviceLost(device="cpu:1")) == [Release(job="b")], "it was to end with its unit"
    assert machine.idle_devices == ()


def test_the_fastest_idle_device_is_fed_first():
    machine = scheduler(num_devices=2)
    machine.handle(DeviceSlowed(device="cpu:0", speed=0.5))
    assert machine.idle_devices == ("cpu:1", "cpu:0")
    assert start(machine, "a", "b") == [run("a", device="cpu:1"), run("b", device="cpu:0")]


def test_a_lone_job_leaves_a_slowed_device_though_its_shard_is_there():
    machine = scheduler(num_devices=2)
    start(machine, "a")
    machine.handle(ShardMoved(job="a", shard=1, device="cpu:0"))
    assert machine.handle(finished("a")) == [run("a", SECOND)]
    machine.handle(DeviceSlowed(device="cpu:0", speed=0.5))
    assert machine.handle(finished("a")) == [run("a", SECOND, "cpu:1")]


def test_a_speed_aware_selection_hears_of_devices():
    heard = []

    class Hears(IncrementalPolicy):
        def start(self):
            selection = Fifo().start()
            selection.set_speed = lambda device, speed: heard.append((device, speed))
            return selection

    machine = scheduler(policy=Hears())
    start(machine, "a")
    machine.handle(DeviceSlowed(device="cpu:0", speed=0.5), DeviceAdded(device="cpu:1"))
    machine.handle(DeviceLost(device="cpu:0"))
    assert heard == [("cpu:0", 1.0), ("cpu:0", 0.5), ("cpu:1", 1.0), ("cpu:0", 0.0)]


def remaining(machine, job):
    return machine._state.jobs[job].estimate.remaining_seconds


def test_what_is_left_follows_from_the_units_that_finished():
    machine = scheduler()
    submit(machine, "a")
    machine.handle(admitted("a", remaining_seconds=10.0))
    longer = UnitFinished(job="a", device="cpu:0", seconds=3.0, unit=FIRST, remaining_seconds=None)
    machine.handle(longer)
    assert remaining(machine, "a") == 9.0 * 3.0, "a unit of 1 s took 3"
    machine.handle(longer._replace(seconds=1.0))
    assert remaining(machine, "a") == 8.0 * 2.0
    machine.handle(longer._replace(remaining_seconds=5.0))
    assert remaining(machine, "a") == 5.0, "what is told is believed"
    machine.handle(DeviceSlowed(device="cpu:0", speed=0.5))
    machine.handle(longer._replace(seconds=2.0))
    assert remaining(machine, "a") == 4.0, "two seconds on a device half as fast are as predicted"
    machine.handle(longer._replace(unit=None, seconds=2.0))
    machine.handle(JobResumed(job="a", unit=FIRST, remaining_seconds=None))
    assert remaining(machine, "a") == 3.0
    assert machine._state.jobs["a"].estimate.done_seconds == 3.0 + 1.0 + 3.0 + 1.0 + 1.0


def test_the_story_is_the_last_events_and_commands():
    machine = scheduler()
    start(machine, "a")
    assert [line.split("(")[0] for line in machine.story("a")] == ["JobSubmitted", "Admit", "JobAdmitted", "Run"]
    for _ in range(30):
        machine.handle(finished("a"))
    assert len(machine.story("a")) == 20
    assert machine.story("a")[-1] == repr(run("a", SECOND))


def test_max_concurrent_must_be_positive():
    with pytest.raises(ConfigError, match="max_concurrent must be at least 1, not 0"):
        Scheduler(policy=Fifo(), max_concurrent=0)


@pytest.mark.parametrize("choice", [None, "a"])
def test_a_policy_must_return_a_candidate(choice):
    class Wrong:
        def choose(self, device, candidates):
            return choice

    with pytest.raises(ScheduleError, match=r"Wrong\.choose gave .* for device 'cpu:0', expected one of \['a'\]"):
        start(scheduler(policy=Wrong()), "a")


def snapshot(machine):
    return repr(machine._state), repr(machine._stories)


NAN = float("nan")
IMPOSSIBLE = {
    "device twice": (DeviceAdded(device="cpu:0"), "device 'cpu:0' is there already"),
    "job twice": (JobSubmitted(job="ready"), "the job is ready, expected a new job"),
    "unknown": (JobStopped(job="nobody"), "the job is unknown or over"),
    "over": (JobStopped(job="over"), "the job is unknown or over"),
    "finished by nobody": (finished("nobody"), "the job is unknown or over"),
    "admitted while queued": (admitted("queued"), "the job is queued, expected preparing"),
    "admitted twice": (admitted("ready"), "the job is ready, expected preparing"),
    "rejected while running": (JobRejected(job="running"), "the job is running on 'cpu:0', expected preparing"),
    "finished while ready": (finished("ready"), "the job is ready, expected running"),
    "finished while waiting": (finished("waiting"), "the job is waiting, expected running"),
    "finished elsewhere": (
        finished("running", device="cpu:1"),
        "the job is running on 'cpu:0', expected it running on 'cpu:1'",
    ),
    "failed elsewhere": (UnitFailed(job="running", device="cpu:1"), "expected it running on 'cpu:1'"),
    "failed while preparing": (UnitFailed(job="preparing", device="cpu:0"), "the job is preparing, expected running"),
    "resumed while running": (
        JobResumed(job="running", unit=FIRST, remaining_seconds=1.0),
        "the job is running on 'cpu:0', expected waiting",
    ),
    "moved while queued": (
        ShardMoved(job="queued", shard=0, device="cpu:0"),
        "the job is queued, expected preparing or ready or running or waiting",
    ),
    "moved nowhere": (
        ShardMoved(job="ready", shard=0, device="cpu:9"),
        "device 'cpu:9' is unknown, expected one of: cpu:0",
    ),
    "added at speed 0": (DeviceAdded(device="cpu:1", speed=0.0), "the speed is 0.0, expected a finite number above 0"),
    "slowed to NaN": (DeviceSlowed(device="cpu:0", speed=NAN), "the speed is nan, expected a finite number above 0"),
    "slowed but unknown": (
        DeviceSlowed(device="cpu:9", speed=1.0),
        "device 'cpu:9' is unknown, expected one of: cpu:0",
    ),
    "lost but unknown": (DeviceLost(device="cpu:9"), "device 'cpu:9' is unknown, expected one of: cpu:0"),
    "paused but over": (JobPaused(job="over"), "the job is unknown or over"),
    "unpaused but over": (JobUnpaused(job="over"), "the job is unknown or over"),
    "a priority between two": (PriorityChanged(job="ready", priority=0.5), "the priority is 0.5, expected an int"),
    "submitted with no priority": (JobSubmitted(job="new", priority=None), "the priority is None, expected an int"),
    "took less than no time": (
        UnitFinished(job="running", device="cpu:0", seconds=-1.0, unit=SECOND, remaining_seconds=1.0),
        "the unit took -1.0 s, expected a finite number from 0",
    ),
    "remaining is NaN": (finished("running", remaining_seconds=NAN), "remaining_seconds is NaN"),
    "resumed with NaN": (JobResumed(job="waiting", unit=FIRST, remaining_seconds=NAN), "remaining_seconds is NaN"),
    "step is infinite": (admitted("preparing", step_seconds=float("inf")), "step_seconds is inf, expected a finite"),
    "step is negative": (finished("running", step_seconds=-1.0), "step_seconds is -1.0, expected a finite"),
}


@pytest.mark.parametrize(("event", "found"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
@pytest.mark.parametrize("batched", [False, True], ids=["alone", "after another"])
def test_an_impossible_event_is_named_with_the_state_and_changes_nothing(event, found, batched):
    machine = scheduler(max_concurrent=3)
    start(machine, "waiting", "over")
    machine.handle(finished("waiting", unit=None), JobStopped(job="over"))
    start(machine, "running", "ready")
    submit(machine, "preparing", "queued")
    check(machine)
    before = snapshot(machine)
    earlier = [JobStopped(job="queued")] if batched and getattr(event, "job", "") != "queued" else []
    with pytest.raises(ScheduleError) as caught:
        machine.handle(*earlier, event)
    text = str(caught.value)
    assert text.startswith(f"impossible event {event!r}: ")
    assert found in text
    for line in machine.story(getattr(event, "job", "")):
        assert line in text
    assert snapshot(machine) == before


def test_a_refused_call_leaves_no_trace_of_its_earlier_events():
    """Whatever part of the state they touched: devices, jobs, queue, eligible jobs and counts."""
    machine = scheduler(max_concurrent=3)
    start(machine, "running", "ready")
    submit(machine, "preparing", "queued")
    earlier = [
        DeviceAdded(device="cpu:1"),
        DeviceSlowed(device="cpu:0", speed=0.5),
        JobPaused(job="ready"),
        PriorityChanged(job="ready", priority=3),
        JobUnpaused(job="ready"),
        JobSubmitted(job="new", priority=2),
        JobStopped(job="queued"),
        JobStopped(job="ready"),
        ShardMoved(job="running", shard=0, device="cpu:1"),
        admitted("preparing"),
        finished("running"),
        DeviceLost(device="cpu:1"),
        DeviceAdded(device="cpu:1"),
    ]
    before = snapshot(machine)
    with pytest.raises(ScheduleError, match="the job is unknown or over"):
        machine.handle(*earlier, JobStopped(job="nobody"))
    assert snapshot(machine) == before
    machine.handle(*earlier)
    assert snapshot(machine) != before


def test_the_story_in_a_refusal_includes_the_events_of_the_same_call():
    machine = scheduler()
    with pytest.raises(ScheduleError, match=r"oldest first: JobSubmitted\(job='a', priority=0, staggered=False\)\. "):
        machine.handle(JobSubmitted(job="a"), finished("a"))


def test_check_finds_what_is_wrong():
    """The checks the other tests lean on do see each kind of damage."""
    machine = scheduler(max_concurrent=2)
    start(machine, "running", "ready")
    submit(machine, "queued")
    check(machine)
    state = machine._state
    state.devices["cpu:0"].job = None
    state.idle.append((-1.0, 7, "cpu:7"))
    state._queue.clear()
    state.num_slots_taken = 1
    state.homes.clear()
    state.jobs["running"].view = state.jobs["ready"].view
    state.jobs["ready"].paused = True
    with pytest.raises(AssertionError) as caught:
        check(machine)
    for found in (
        "runs on 'cpu:0', which runs None",
        "the idle devices are [(-1.0, 7, 'cpu:7')]",
        "None would be admitted next, expected the first of ['queued']",
        "1 slots are counted",
        "by device {} jobs have run last, expected {'cpu:0': 1}",
        "'running' is running, and the policy was told JobView",
        "1 jobs are eligible, by level {(0, False): 1}, expected {(0, False): 2}",
        "job 'ready' is ready, and the user's pause is True",
    ):
        assert found in str(caught.value)


def offered(rank, near=None):
    return Unit(kind="backward", shard=0, seconds=1.0, rank=rank, near=near)


def offering(machine, job, *units, device="cpu:0"):
    """A unit of the job ends, and these may run next, side by side."""
    return machine.handle(finished(job, unit=units[0], device=device)._replace(others=units[1:]))


def test_devices_that_have_nothing_to_do_are_lent_to_a_job_that_offers_units():
    machine = scheduler(num_devices=3)
    start(machine, "a")
    assert offering(machine, "a", offered(1), offered(0, "cpu:0")) == [
        run("a", offered(0, "cpu:0")),
        run("a", offered(1), "cpu:1"),
    ]
    check(machine)
    assert machine.running == {"cpu:0": "a", "cpu:1": "a"}
    assert machine.handle(finished("a", unit=None)._replace(others=(offered(2), offered(3, "cpu:2")))) == [
        run("a", offered(3, "cpu:2"), "cpu:2"),
        run("a", offered(2)),
    ]
    assert machine.handle(finished("a", unit=None, device="cpu:1")) == []
    assert machine.handle(finished("a", unit=None, device="cpu:2")) == []
    assert machine.phases["a"] == "running", "one of its units still is"
    assert machine.handle(finished("a", unit=None)) == []
    assert machine.phases["a"] == "waiting"


def test_a_job_that_runs_nothing_goes_on_at_the_home_of_its_next_unit():
    machine = scheduler(num_devices=0)
    machine.handle(DeviceAdded(device="cpu:0", speed=2.0))
    start(machine, "a")
    machine.handle(DeviceAdded(device="cpu:1", speed=1.0))
    assert offering(machine, "a", offered(0, "cpu:1")) == [run("a", offered(0, "cpu:1"), "cpu:1")]
    check(machine)


def test_a_unit_whose_home_works_for_another_job_runs_elsewhere():
    machine = scheduler(num_devices=3)
    start(machine, "a", "b")
    at_home, away = offered(0, "cpu:0"), offered(1, "cpu:1")
    assert offering(machine, "a", at_home, away) == [run("a", at_home), run("a", away, "cpu:2")]
    assert machine.running == {"cpu:0": "a", "cpu:1": "b", "cpu:2": "a"}


def test_a_device_that_is_free_takes_the_unit_it_is_home_to_before_an_earlier_one():
    machine = scheduler(num_devices=2)
    start(machine, "a")
    offering(machine, "a", offered(0, "cpu:0"), offered(1, "cpu:1"))
    machine.handle(JobSubmitted(job="b"))
    machine.handle(admitted("b"))
    assert machine.handle(finished("a", unit=offered(2, "cpu:0"))) == [run("b")], (
        "no job waits for the second of another"
    )
    later = machine.handle(finished("a", unit=offered(3, "cpu:1"), device="cpu:1"))
    assert later == [run("a", offered(2, "cpu:0"), "cpu:1")], "of what nobody runs, the first, wherever it is at home"
    assert machine.handle(finished("a", unit=offered(4, "cpu:1"), device="cpu:1")) == [
        run("a", offered(3, "cpu:1"), "cpu:1")
    ]
    assert machine.handle(finished("b", unit=None)) == [run("a", offered(4, "cpu:1"))]
    check(machine)


def test_no_job_waits_because_another_has_several_devices():
    machine = scheduler(num_devices=2)
    start(machine, "a")
    offering(machine, "a", offered(0), offered(1), offered(2))
    machine.handle(JobSubmitted(job="b", priority=-1))
    assert machine.handle(admitted("b")) == [], "units that run are let finish"
    assert machine.handle(finished("a", unit=offered(1), device="cpu:1")) == [run("b", device="cpu:1")], (
        "even one of a lower priority: the other has a device"
    )
    assert list(machine._state.offering) == ["a"]
    assert machine.handle(finished("b", unit=SECOND, device="cpu:1")) == [run("b", SECOND, "cpu:1")]
    assert machine.handle(finished("a", unit=None)) == [run("a", offered(1))], "now a runs nothing, and offers nothing"
    check(machine)


def test_of_two_jobs_that_offer_units_the_one_with_more_left_gets_the_device():
    machine = scheduler(num_devices=3)
    start(machine, "a", "b")
    machine.handle(DeviceLost(device="cpu:2"))
    machine.handle(finished("a", unit=offered(0), remaining_seconds=5.0)._replace(others=(offered(1),)))
    second = finished("b", unit=offered(0), device="cpu:1", remaining_seconds=50.0)._replace(others=(offered(1),))
    assert machine.handle(second) == [run("b", offered(0), "cpu:1")]
    assert machine.handle(DeviceAdded(device="cpu:2")) == [run("b", offered(1), "cpu:2")]


@pytest.mark.parametrize("end", [JobStopped(job="a"), UnitFailed(job="a", device="cpu:1")], ids=repr)
def test_a_job_is_released_when_the_last_of_its_units_has_ended(end):
    machine = scheduler(num_devices=3)
    start(machine, "a")
    offering(machine, "a", offered(0), offered(1), offered(2))
    offering(machine, "a", offered(0), offered(3), offered(4))
    assert machine.handle(end) == []
    check(machine)
    left = [device for device, job in machine.running.items() if job == "a"]
    for device in left[:-1]:
        assert machine.handle(finished("a", unit=offered(5), device=device)) == []
    assert machine.handle(finished("a", unit=None, device=left[-1])) == [Release(job="a")]
    check(machine)


def test_a_paused_job_offers_nothing_and_goes_on_with_all_it_had():
    machine = scheduler(num_devices=1)
    start(machine, "a")
    offering(machine, "a", offered(0), offered(1))
    machine.handle(JobPaused(job="a"))
    assert machine.handle(DeviceAdded(device="cpu:1")) == []
    assert machine.handle(finished("a", unit=offered(0))) == []
    check(machine)
    assert machine.phases["a"] == "paused"
    assert machine.handle(JobUnpaused(job="a")) == [run("a", offered(0)), run("a", offered(1), "cpu:1")]


def test_a_unit_lost_with_one_of_a_jobs_devices_is_offered_again():
    machine = scheduler(num_devices=2)
    start(machine, "a")
    offering(machine, "a", offered(0), offered(1))
    assert machine.handle(DeviceLost(device="cpu:1")) == []
    check(machine)
    assert machine.handle(DeviceAdded(device="cpu:2")) == [run("a", offered(1), "cpu:2")]
    machine.handle(JobStopped(job="a"))
    assert machine.handle(DeviceLost(device="cpu:2")) == []
    assert machine.handle(DeviceLost(device="cpu:0")) == [Release(job="a")]
