"""What a device would do next: the policy's own choice, asked beforehand, that binds nobody."""

import pytest

from hydra_tune.schedule import (
    POLICIES,
    DeviceAdded,
    JobAdmitted,
    JobStopped,
    JobSubmitted,
    LRTFPaper,
    NextJobPredictor,
    Run,
    Scheduler,
    ShardMoved,
    Unit,
    UnitFinished,
    make_policy,
)

HERE, THERE = "cpu:0", "cpu:1"


def unit(shard=0):
    return Unit(kind="forward", shard=shard, seconds=1.0)


class Course:
    """A scheduler with jobs of given lengths on devices, and what looks ahead of it."""

    def __init__(self, lengths, devices=(HERE, THERE), policy="lrtf_paper", *, staggered="", **options):
        made = make_policy(policy) if isinstance(policy, str) else policy
        self.scheduler = Scheduler(policy=made, max_concurrent=len(lengths), **options)
        self.ahead = NextJobPredictor(made, self.scheduler)
        self.left = dict(lengths)
        for device in devices:
            self.ahead.set_speed(device, 1.0)
        self.tell(*[DeviceAdded(device=device) for device in devices])
        self.tell(*[JobSubmitted(job=job, staggered=job in staggered) for job in lengths])
        self.tell(*[JobAdmitted(job=job, unit=unit(), remaining_seconds=left) for job, left in lengths.items()])

    def tell(self, *events):
        commands = self.scheduler.handle(*events)
        for event in events:
            if hasattr(event, "job"):
                self.ahead.notice(event.job)
        for command in commands:
            self.ahead.notice(command.job)
            if isinstance(command, Run):
                self.ahead.unclaim(command.job)
        self.ahead.notice_front()
        return commands

    def own(self, device):
        job = self.scheduler.running[device]
        return self.scheduler.view_after(
            job, unit=unit(), seconds=1.0, remaining_seconds=self.left[job] - 1.0, shard_device=None
        )

    def finish(self, device):
        job = self.scheduler.running[device]
        self.left[job] -= 1.0
        done = UnitFinished(job=job, device=device, seconds=1.0, unit=unit(), remaining_seconds=self.left[job])
        return [command for command in self.tell(done) if isinstance(command, Run)]


def test_it_is_what_the_scheduler_does_when_nothing_else_happens():
    course = Course({"a": 9.5, "b": 9.0, "c": 7.0}, devices=[HERE])
    for _ in range(12):
        foreseen = course.ahead.choose(HERE, course.own(HERE))
        (command,) = course.finish(HERE)
        assert command.job == foreseen


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"random", "lpt"}))
def test_every_policy_that_does_not_draw_is_foreseen(policy):
    course = Course({"a": 9.5, "b": 9.0, "c": 7.0}, devices=[HERE], policy=policy)
    right = 0
    for _ in range(12):
        right += course.ahead.choose(HERE, course.own(HERE)) == course.finish(HERE)[0].job
    # A policy that looks at turns sees the running job as it was when its unit began, like the scheduler.
    assert right == 12


def test_the_job_that_runs_is_among_those_that_may_follow():
    course = Course({"a": 9.0, "b": 5.0}, devices=[HERE])
    assert course.scheduler.running == {HERE: "a"}
    assert course.ahead.choose(HERE, course.own(HERE)) == "a"
    assert course.ahead.choose(HERE, None) == "b", "unless it cannot follow itself"


def test_two_devices_do_not_fill_their_buffers_for_the_same_job():
    course = Course({"a": 9.0, "b": 9.0, "c": 8.9, "d": 8.0})
    assert course.ahead.choose(HERE, None) == "c"
    assert course.ahead.choose(THERE, None) == "d"
    assert (course.ahead.claimed_by("c"), course.ahead.claimed_by("d")) == (HERE, THERE)
    assert course.ahead.choose(HERE, None) == "c", "a device that asks again gives its buffer up first"


def test_the_answer_binds_nobody():
    course = Course({"a": 9.0, "b": 9.0, "c": 8.9})
    assert course.ahead.choose(HERE, None) == "c"
    (command,) = course.finish(THERE)
    assert (command.job, command.device) == ("c", THERE), "it is the longest now, and the device that is free takes it"
    assert course.ahead.claimed_by("c") is None


def test_asking_leaves_no_trace_in_what_is_chosen():
    plain, asked = (Course({"a": 9.0, "b": 8.0, "c": 7.5, "d": 3.0}, policy="random") for _ in range(2))
    for _ in range(8):
        asked.ahead.choose(HERE, asked.own(HERE))
        for device in (HERE, THERE):
            assert asked.finish(device) == plain.finish(device)


def test_a_policy_that_binds_early_is_not_asked_but_told():
    course = Course({"a": 9.0, "b": 8.0, "c": 7.0}, devices=[HERE], policy=LRTFPaper(idle_only=True))
    for _ in range(6):
        foreseen = course.ahead.choose(HERE, course.own(HERE))
        assert foreseen == course.scheduler.bound_to(HERE)
        assert course.finish(HERE)[0].job == foreseen


def test_places_and_ends_are_noticed():
    course = Course({"a": 9.0, "b": 8.0, "c": 8.0}, devices=[HERE], policy="lrtf")
    course.tell(ShardMoved(job="c", shard=0, device=HERE))
    assert course.ahead.choose(HERE, None) == "c", "its shard is here"
    course.tell(JobStopped(job="c"))
    assert course.ahead.choose(HERE, None) == "b"
    course.tell(JobStopped(job="b"))
    assert course.ahead.choose(HERE, None) is None, "nobody is left but the one that runs"
    assert course.ahead.claimed_by("b") is None


def test_where_admission_is_staggered_the_front_goes_first():
    course = Course({"a": 3.0, "b": 9.0, "c": 9.0}, devices=[HERE], admission="staggered")
    assert course.scheduler.front == ("a",)
    assert course.ahead.choose(HERE, course.own(HERE)) == "a"
    course.tell(JobStopped(job="a"))
    course.tell(UnitFinished(job="a", device=HERE, seconds=1.0, unit=None, remaining_seconds=0.0))
    assert course.scheduler.front == ("b",)
    assert course.ahead.choose(HERE, course.own(HERE)) == "b", "the front has moved on"


def test_jobs_that_are_not_staggered_are_predicted_beside_the_front():
    lengths = {"a": 3.0, "b": 9.0, "c": 5.0, "d": 6.0}
    course = Course(lengths, devices=[HERE], staggered="ab", admission="auto")
    assert course.scheduler.running == {HERE: "d"}
    assert course.ahead.choose(HERE, None) == "c", "of a, in the front, and c the longer; b is beyond the front"
    course.tell(JobStopped(job="c"))
    assert course.ahead.choose(HERE, None) == "a"
