"""The scheduler under any sequence of events that can happen, and its schedules against the bound."""

import pytest
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hydra_tune.errors import ScheduleError
from hydra_tune.schedule import (
    ADMISSIONS,
    Admit,
    DeviceAdded,
    DeviceLost,
    DeviceSlowed,
    EndBurst,
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
    makespan_bound,
)
from tests.support.schedule_invariants import check, eligible_jobs
from tests.unit.schedule.driver import drive
from tests.unit.schedule.oracles import some_policies

SHARDS = 3
SECONDS = st.integers(0, 20).map(float)
SPEEDS = st.sampled_from([0.25, 0.5, 1.0, 2.0])
PRIORITIES = st.sampled_from([0, 0, 0, 1, -1])
ALIKE = st.sampled_from([None, "large", "small"])
DEVICES = ("cpu:0", "cpu:1", "cpu:2")
BEGIN_TO_WAIT = (JobAdmitted, JobResumed, JobUnpaused, PriorityChanged)


class AnyHistory(RuleBasedStateMachine):
    """Plays the pool with books of its own, and holds the scheduler's commands against them."""

    @initialize(
        policy=st.sampled_from(sorted(some_policies())),
        max_concurrent=st.integers(1, 4),
        admission=st.sampled_from(ADMISSIONS),
    )
    def start(self, policy, max_concurrent, admission):
        self.max_concurrent, self.admission = max_concurrent, admission
        self.scheduler = Scheduler(policy=some_policies()[policy], max_concurrent=max_concurrent, admission=admission)
        self.num_jobs = 0
        self.queued, self.preparing, self.waiting = [], [], []
        self.units, self.running = {}, {}  # job -> its units that are ready or held back; device -> (job, unit)
        self.idle, self.speeds = set(), {}  # every device has a speed
        self.stopped, self.over = set(), set()  # over: a Release must come in this very call
        self.paused, self.priorities, self.staggered = set(), {}, set()
        self.num_made = {}  # units of a job made so far; a unit carries its number in `kind`
        self.places, self.last, self.turns, self.done = {}, {}, {}, {}  # what policies are told beside the unit
        self.num_runs = 0
        self.asked = set()  # devices whose burst was asked to end
        self.victims = []  # jobs that have lost a device since the last call
        self.pending, self.num_held_back = [], 0  # events that have happened and are not told yet

    def tell(self, *events):
        self.pending += events
        if self.num_held_back:
            self.num_held_back -= 1
        else:
            self.flush()

    def flush(self):
        events, self.pending = self.pending, []
        if len(events) > 1:  # refused with one that cannot be, they leave no trace
            before = repr(self.scheduler._state)
            with pytest.raises(ScheduleError):
                self.scheduler.handle(*events, JobStopped(job="nobody"))
            assert repr(self.scheduler._state) == before
        ends = []
        for command in self.scheduler.handle(*events):
            if isinstance(command, EndBurst):
                ends.append(command)
            elif isinstance(command, Admit):
                assert self.num_slots < self.max_concurrent
                admissible = [job for job in self.queued if job not in self.paused]
                first = min(admissible, key=lambda job: -self.priorities[job])  # of equals the first submitted
                assert command.job == first, "admission is by priority, then in submission order"
                self.queued.remove(command.job)
                self.preparing.append(command.job)
            elif isinstance(command, Run):
                self.check_run(command)
                self.idle.remove(command.device)
                self.running[command.device] = (command.job, command.unit)
                self.asked.discard(command.device)
            else:
                assert isinstance(command, Release)
                self.over.remove(command.job)
                self.stopped.discard(command.job)
        assert not self.over, "released at once"
        victims, self.victims = self.victims, []
        self.check_ends([event.job for event in events if isinstance(event, BEGIN_TO_WAIT)] + victims, ends)

    def check_ends(self, jobs, ends):
        """One burst is asked to end for each of these jobs that waits, if any may for it, and none is asked twice."""
        for job in jobs:
            could = {
                device: self.priorities[other]
                for device, (other, unit) in self.running.items()
                if unit.may_end_early and device not in self.asked and self.priorities[other] <= self.priorities[job]
            }
            if could and job in self.ready:
                command = ends.pop(0)
                assert could[command.device] == min(could.values())
                assert command.job == self.running[command.device][0]
                self.asked.add(command.device)
        assert not ends

    def check_run(self, command):
        units, fastest = self.units[command.job], max(self.speeds[device] for device in self.idle)
        assert self.priorities[command.job] == max(self.priorities[job] for job in self.ready or self.offering)
        if self.ready:
            assert command.job in self.ready, "a second unit of a job comes after the first ones of others"
            self.check_age(command.job)
            assert command.unit == min(units, key=lambda unit: unit.rank), "in order"
            meant = command.unit.near in self.idle
        else:
            meant = any(unit.near in self.idle for unit in units)
        if meant:
            assert command.unit.near == command.device, "a unit goes where it is meant to run, if that can be"
        else:
            assert self.speeds[command.device] == fastest, "the fastest is fed first"
        units.remove(command.unit)  # each once
        self.num_runs += 1
        self.turns[command.job], self.last[command.job] = self.num_runs, command.device

    def check_age(self, job):
        """No staggered job goes before one of the oldest staggered, as many as there are devices, or one not staggered."""
        if self.admission == "eager":
            return
        staggered = {other for other in self.alive() if self.admission == "staggered" or other in self.staggered}
        flying = [other for other in staggered if other not in self.queued and other not in self.paused]
        flying.sort(key=lambda other: (-self.priorities[other], int(other.removeprefix("job"))))
        front = flying[: len(self.speeds)]
        first = {*front, *(other for other in self.alive() if other not in staggered)}
        passed_over = [other for other in first if other in self.ready]
        assert job in first or not [other for other in passed_over if self.priorities[other] >= self.priorities[job]]

    def next_unit(self, job, shard, rank=0, near=None, is_burst=False):
        self.num_made[job] = self.num_made.get(job, -1) + 1
        kind = str(self.num_made[job])
        return Unit(kind=kind, shard=shard, seconds=1.0, rank=rank, near=near, may_end_early=is_burst)

    def make_ready(self, job, *units):
        self.units.setdefault(job, []).extend(units)

    @property
    def busy(self):
        """Jobs of which a unit runs."""
        return {job for job, _ in self.running.values()}

    @property
    def ready(self):
        """Jobs that run nothing and could."""
        return [job for job, units in self.units.items() if units and job not in self.busy | self.paused]

    @property
    def offering(self):
        """Jobs that run something and could run more."""
        return [job for job in self.busy - self.paused - self.stopped if self.units.get(job)]

    @property
    def num_slots(self):
        return len(self.preparing) + len(self.ready) + len(self.busy)

    def end(self, job):
        """A job has got its end: it is over, unless something of it runs."""
        self.units.pop(job, None)
        (self.stopped if job in self.busy else self.over).add(job)

    def alive(self):
        with_units = (job for job, units in self.units.items() if units)
        return [*self.queued, *sorted({*self.preparing, *self.waiting, *self.busy, *with_units})]

    @rule(count=st.integers(1, 4))
    def hold_back(self, count):
        """What happens next is told together."""
        self.num_held_back = count

    @precondition(lambda self: len(self.speeds) < len(DEVICES))
    @rule(data=st.data(), speed=SPEEDS)
    def add_device(self, data, speed):
        device = data.draw(st.sampled_from([device for device in DEVICES if device not in self.speeds]))
        self.speeds[device] = speed
        self.idle.add(device)
        self.tell(DeviceAdded(device=device, speed=speed))

    @precondition(lambda self: self.speeds)
    @rule(data=st.data(), is_fatal=st.booleans())
    def lose_device(self, data, is_fatal):
        device = data.draw(st.sampled_from(sorted(self.speeds)))
        del self.speeds[device]
        self.idle.discard(device)
        self.places = {key: place for key, place in self.places.items() if place != device}
        self.last = {job: place for job, place in self.last.items() if place != device}
        events = [DeviceLost(device=device)]
        if device in self.running:
            job, unit = self.running.pop(device)
            self.victims.append(job)
            if job in self.stopped:
                self.end(job)
            elif is_fatal:
                self.end(job)
                events.append(JobStopped(job=job))
            else:
                self.make_ready(job, unit)
        if len(events) > 1:  # both in one call, or the unit would run elsewhere before the job is stopped
            self.num_held_back += 1
            self.tell(events.pop(0))
        self.tell(*events)

    @precondition(lambda self: self.speeds)
    @rule(data=st.data(), speed=SPEEDS)
    def slow_device(self, data, speed):
        device = data.draw(st.sampled_from(sorted(self.speeds)))
        self.speeds[device] = speed
        self.tell(DeviceSlowed(device=device, speed=speed))

    @rule(count=st.integers(1, 3), priority=PRIORITIES, staggered=st.booleans())
    def submit(self, count, priority, staggered):
        jobs = [f"job{self.num_jobs + index}" for index in range(count)]
        self.num_jobs += count
        self.queued += jobs
        self.priorities.update(dict.fromkeys(jobs, priority))
        self.staggered.update(jobs if staggered else ())
        self.tell(*[JobSubmitted(job=job, priority=priority, staggered=staggered) for job in jobs])

    @precondition(lambda self: self.preparing)
    @rule(
        data=st.data(),
        shard=st.integers(0, SHARDS - 1),
        remaining=SECONDS,
        step=SECONDS,
        alike=ALIKE,
        rejected=st.booleans(),
        is_burst=st.booleans(),
    )
    def end_preparation(self, data, shard, remaining, step, alike, rejected, is_burst):
        job = data.draw(st.sampled_from(self.preparing))
        self.preparing.remove(job)
        unit = self.next_unit(job, shard, is_burst=is_burst)
        if rejected or job in self.stopped:
            self.over.add(job)
        else:
            self.make_ready(job, unit)
        admitted = JobAdmitted(job=job, unit=unit, remaining_seconds=remaining, step_seconds=step, alike=alike)
        self.tell(JobRejected(job=job) if rejected else admitted)

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        shard=st.integers(0, SHARDS - 1),
        seconds=SECONDS,
        remaining=st.none() | SECONDS,
        step=st.none() | SECONDS,
        alike=ALIKE,
        others=st.lists(st.tuples(st.integers(0, 3), st.none() | st.sampled_from(DEVICES)), max_size=2),
        is_burst=st.booleans(),
    )
    def finish_unit(self, data, shard, seconds, remaining, step, alike, others, is_burst):
        device = data.draw(st.sampled_from(sorted(self.running)))
        job, done = self.running.pop(device)
        self.idle.add(device)
        self.done[job] = self.done.get(job, 0.0) + seconds * self.speeds[device]
        self.last[job] = device
        follows = data.draw(st.integers(0, 3))
        near = device if follows > 1 else None
        unit = self.next_unit(job, shard, done.rank, near, is_burst) if follows else None
        beside = tuple(self.next_unit(job, shard, rank, near) for rank, near in others)
        if job in self.stopped:
            self.end(job)
        else:
            self.make_ready(job, *([unit] if unit else []), *beside)
            if not self.units[job] and job not in self.busy:
                self.waiting.append(job)
        self.tell(
            UnitFinished(
                job=job,
                device=device,
                seconds=seconds,
                unit=unit,
                remaining_seconds=remaining,
                step_seconds=step,
                others=beside,
                alike=alike,
            )
        )

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail_unit(self, data):
        device = data.draw(st.sampled_from(sorted(self.running)))
        job, _ = self.running.pop(device)
        self.idle.add(device)
        self.end(job)
        self.tell(UnitFailed(job=job, device=device))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), shard=st.integers(0, SHARDS - 1), remaining=st.none() | SECONDS, is_burst=st.booleans())
    def resume(self, data, shard, remaining, is_burst):
        job = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(job)
        unit = self.next_unit(job, shard, is_burst=is_burst)
        self.make_ready(job, unit)
        self.tell(JobResumed(job=job, unit=unit, remaining_seconds=remaining))

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def stop(self, data):
        job = data.draw(st.sampled_from(self.alive()))
        if job in self.preparing:
            self.stopped.add(job)
        else:
            self.end(job)
            for jobs in (self.queued, self.waiting):
                if job in jobs:
                    jobs.remove(job)
        self.tell(JobStopped(job=job))

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def pause(self, data):
        job = data.draw(st.sampled_from(self.alive()))
        self.paused.add(job)
        self.tell(JobPaused(job=job))

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), of_all=st.booleans())
    def unpause(self, data, of_all):
        alive = self.alive()
        jobs = alive if of_all else [job for job in alive if job in self.paused] or alive
        job = data.draw(st.sampled_from(jobs))
        self.paused.discard(job)
        self.tell(JobUnpaused(job=job))

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), priority=PRIORITIES)
    def change_priority(self, data, priority):
        job = data.draw(st.sampled_from(self.alive()))
        self.priorities[job] = priority
        self.tell(PriorityChanged(job=job, priority=priority))

    @precondition(lambda self: self.speeds and len(self.alive()) > len(self.queued))
    @rule(data=st.data(), shard=st.integers(0, SHARDS - 1))
    def move_shard(self, data, shard):
        job = data.draw(st.sampled_from(self.alive()[len(self.queued) :]))
        device = data.draw(st.none() | st.sampled_from(sorted(self.speeds)))
        self.places[job, shard] = device
        self.tell(ShardMoved(job=job, shard=shard, device=device))

    @invariant()
    def consistent(self):
        if self.pending:
            return
        check(self.scheduler)
        assert not (self.idle and (self.ready or self.offering)), "every device that could be fed is fed"
        assert self.num_slots >= self.max_concurrent or set(self.queued) <= self.paused, "no slot is left empty"
        assert set(self.scheduler.idle_devices) == self.idle
        assert set(eligible_jobs(self.scheduler)) == set(self.ready)
        assert set(self.scheduler._state.offering) == set(self.offering)
        assert self.scheduler.running == {device: job for device, (job, _) in self.running.items()}

    def end_unit(self, device):
        """A unit ends and none follows: the job is complete if it has no others."""
        job, _ = self.running.pop(device)
        self.idle.add(device)
        ended = UnitFinished(job=job, device=device, seconds=1.0, unit=None, remaining_seconds=0.0)
        is_complete = job not in self.stopped and not self.units.get(job) and job not in self.busy
        if is_complete or job in self.stopped:
            self.end(job)
        self.tell(*([ended, JobStopped(job=job)] if is_complete else [ended]))

    @invariant()
    def told(self):
        """The policy was told of each eligible job what is true of it, and of no other job."""
        if self.pending:
            return
        for job in self.alive():
            view = self.scheduler.view(job)
            assert (view is not None) == (job in self.ready)
            if view is not None:
                unit = min(self.units[job], key=lambda unit: unit.rank)
                assert (view.unit, view.priority) == (unit, self.priorities[job])
                assert view.shard_device == self.places.get((job, unit.shard))
                assert view.last_device == self.last.get(job)
                assert (view.turn, view.done_seconds) == (self.turns.get(job, 0), self.done.get(job, 0.0))

    def teardown(self):
        """Everything finishes: each job is answered, runs to its end, and nothing of it is kept."""
        if not hasattr(self, "scheduler"):
            return
        self.num_held_back = 0
        self.flush()
        if not self.speeds:
            self.speeds["cpu:0"] = 1.0
            self.idle.add("cpu:0")
            self.tell(DeviceAdded(device="cpu:0"))
        for job in self.alive():
            self.paused.discard(job)
            self.tell(JobUnpaused(job=job))
        for _ in range(len(self.alive()) + sum(map(len, self.units.values()))):  # each round ends a job or a unit
            for job in list(self.preparing):
                self.preparing.remove(job)
                unit = self.next_unit(job, 0)
                if job in self.stopped:
                    self.end(job)
                else:
                    self.make_ready(job, unit)
                self.tell(JobAdmitted(job=job, unit=unit, remaining_seconds=1.0))
            for device in list(self.running):
                self.end_unit(device)
            for job in list(self.waiting):
                self.waiting.remove(job)
                self.over.add(job)
                self.tell(JobStopped(job=job))
        assert not self.alive()
        check(self.scheduler)
        assert not self.scheduler.phases
        assert not self.scheduler._stories
        assert not self.scheduler._state.kinds


TestAnyHistory = AnyHistory.TestCase
# One bug at a time and no explanations: a failure is told in seconds and not in minutes.
TestAnyHistory.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    report_multiple_bugs=False,
    phases=set(Phase) - {Phase.explain},
)

# Whole seconds, so that sums and comparisons are exact.
JOBS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=7)


def as_units(jobs):
    return {
        f"job{index}": [Unit(kind="forward", shard=n % SHARDS, seconds=float(s)) for n, s in enumerate(seconds)]
        for index, seconds in enumerate(jobs)
    }


@settings(deadline=None)
@given(jobs=JOBS, num_devices=st.integers(1, 4))
@example(jobs=[[1], [1], [2]], num_devices=2)
def test_lrtf_is_within_one_unit_of_the_bound(jobs, num_devices):
    pool = drive(as_units(jobs), policy=ShardedLRTF(), num_devices=num_devices)
    bound = makespan_bound([sum(seconds) for seconds in jobs], num_devices)
    assert bound <= pool.now <= bound + max(max(seconds) for seconds in jobs)


@settings(deadline=None)
@given(
    jobs=JOBS,
    num_devices=st.integers(1, 4),
    step_seconds=st.integers(1, 20),
    slack_steps=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_slack_costs_at_most_itself(jobs, num_devices, step_seconds, slack_steps):
    policy = ShardedLRTF(slack_steps=slack_steps)
    pool = drive(as_units(jobs), policy=policy, num_devices=num_devices, step_seconds=float(step_seconds))
    bound = makespan_bound([sum(seconds) for seconds in jobs], num_devices)
    assert bound <= pool.now <= bound + max(max(seconds) for seconds in jobs) + slack_steps * step_seconds


@settings(deadline=None)
@given(jobs=JOBS, num_devices=st.integers(1, 4))
def test_with_fewer_jobs_than_devices_the_longest_job_is_the_makespan(jobs, num_devices):
    assume(len(jobs) <= num_devices)
    pool = drive(as_units(jobs), policy=ShardedLRTF(), num_devices=num_devices)
    assert pool.now == max(sum(seconds) for seconds in jobs)


@settings(deadline=None)
@given(
    num_jobs=st.integers(1, 9),
    num_units=st.integers(1, 9),
    num_devices=st.integers(1, 4),
    policy=st.sampled_from(sorted(some_policies())),
)
def test_equal_staggered_jobs_end_as_early_as_any_can(num_jobs, num_units, num_devices, policy):
    """A job is no faster than one device: by then no schedule can have ended more, under any policy."""
    jobs = as_units([[1] * num_units] * num_jobs)
    pool = drive(jobs, policy=some_policies()[policy], num_devices=num_devices, admission="staggered")
    assert [pool.ended[job] for job in jobs] == [(index // num_devices + 1) * num_units for index in range(num_jobs)]


@settings(deadline=None)
@given(jobs=JOBS, num_devices=st.integers(1, 4))
def test_staggering_delays_the_last_end_by_less_than_the_longest_job(jobs, num_devices):
    """Graham's bound, which holds as long as no device idles while a job could run."""
    pool = drive(as_units(jobs), policy=ShardedLRTF(), num_devices=num_devices, admission="staggered")
    lengths = [sum(seconds) for seconds in jobs]
    assert pool.now <= sum(lengths) / num_devices + (1 - 1 / num_devices) * max(lengths) + 1e-9
