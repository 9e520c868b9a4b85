"""The scheduler under any sequence of events that can happen, and its schedules against the bound."""

from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hydra_tune.schedule import (
    Admit,
    DeviceAdded,
    JobAdmitted,
    JobRejected,
    JobResumed,
    JobStopped,
    JobSubmitted,
    Release,
    Run,
    Scheduler,
    ShardedLRTF,
    ShardMoved,
    Unit,
    UnitFailed,
    UnitFinished,
    make_policy,
    makespan_bound,
)
from tests.unit.schedule.driver import drive

SHARDS = 3
SECONDS = st.integers(0, 20).map(float)


class AnyHistory(RuleBasedStateMachine):
    """Plays the pool with books of its own, and holds the scheduler's commands against them."""

    @initialize(policy=st.sampled_from(["lrtf", "fifo"]), max_concurrent=st.integers(1, 4))
    def start(self, policy, max_concurrent):
        self.max_concurrent = max_concurrent
        self.scheduler = Scheduler(policy=make_policy(policy), max_concurrent=max_concurrent)
        self.num_jobs = 0
        self.queued, self.preparing, self.waiting = [], [], []
        self.ready, self.running = {}, {}  # job -> its next unit; job -> (device, unit)
        self.idle, self.devices = set(), []
        self.stopped, self.over = set(), set()  # over: a Release must come in this very call
        self.num_made = {}  # units of a job made so far; a unit carries its number in `kind`

    def tell(self, *events):
        for command in self.scheduler.handle(*events):
            if isinstance(command, Admit):
                assert len(self.preparing) + len(self.ready) + len(self.running) < self.max_concurrent
                assert command.job == self.queued.pop(0), "admission is in submission order"
                self.preparing.append(command.job)
            elif isinstance(command, Run):
                assert command.job not in self.running, "one unit of a job at a time"
                assert command.unit == self.ready.pop(command.job), "each unit once, in order"
                self.idle.remove(command.device)
                self.running[command.job] = (command.device, command.unit)
            else:
                assert isinstance(command, Release)
                self.over.remove(command.job)
                self.stopped.discard(command.job)
        assert not self.over, "released at once"

    def next_unit(self, job, shard):
        self.num_made[job] = self.num_made.get(job, -1) + 1
        return Unit(kind=str(self.num_made[job]), shard=shard, seconds=1.0)

    def alive(self):
        return [*self.queued, *self.preparing, *self.ready, *self.running, *self.waiting]

    @precondition(lambda self: len(self.devices) < 3)
    @rule()
    def add_device(self):
        device = f"cpu:{len(self.devices)}"
        self.devices.append(device)
        self.idle.add(device)
        self.tell(DeviceAdded(device=device))

    @rule(count=st.integers(1, 3))
    def submit(self, count):
        jobs = [f"job{self.num_jobs + index}" for index in range(count)]
        self.num_jobs += count
        self.queued += jobs
        self.tell(*[JobSubmitted(job=job) for job in jobs])

    @precondition(lambda self: self.preparing)
    @rule(data=st.data(), shard=st.integers(0, SHARDS - 1), remaining=SECONDS, step=SECONDS, rejected=st.booleans())
    def end_preparation(self, data, shard, remaining, step, rejected):
        job = data.draw(st.sampled_from(self.preparing))
        self.preparing.remove(job)
        unit = self.next_unit(job, shard)
        if rejected or job in self.stopped:
            self.over.add(job)
        else:
            self.ready[job] = unit
        admitted = JobAdmitted(job=job, unit=unit, remaining_seconds=remaining, step_seconds=step)
        self.tell(JobRejected(job=job) if rejected else admitted)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), shard=st.integers(0, SHARDS - 1), remaining=SECONDS, step=st.none() | SECONDS)
    def finish_unit(self, data, shard, remaining, step):
        job = data.draw(st.sampled_from(sorted(self.running)))
        device, _ = self.running.pop(job)
        self.idle.add(device)
        unit = self.next_unit(job, shard) if data.draw(st.integers(0, 3)) else None
        if job in self.stopped:
            self.over.add(job)
        elif unit is None:
            self.waiting.append(job)
        else:
            self.ready[job] = unit
        self.tell(
            UnitFinished(job=job, device=device, seconds=1.0, unit=unit, remaining_seconds=remaining, step_seconds=step)
        )

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail_unit(self, data):
        job = data.draw(st.sampled_from(sorted(self.running)))
        device, _ = self.running.pop(job)
        self.idle.add(device)
        self.over.add(job)
        self.tell(UnitFailed(job=job, device=device))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), shard=st.integers(0, SHARDS - 1), remaining=SECONDS)
    def resume(self, data, shard, remaining):
        job = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(job)
        self.ready[job] = self.next_unit(job, shard)
        self.tell(JobResumed(job=job, unit=self.ready[job], remaining_seconds=remaining))

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def stop(self, data):
        job = data.draw(st.sampled_from(self.alive()))
        if job in self.preparing or job in self.running:
            self.stopped.add(job)
        else:
            self.over.add(job)
            self.ready.pop(job, None)
            for jobs in (self.queued, self.waiting):
                if job in jobs:
                    jobs.remove(job)
        self.tell(JobStopped(job=job))

    @precondition(lambda self: self.devices and len(self.alive()) > len(self.queued))
    @rule(data=st.data(), shard=st.integers(0, SHARDS - 1))
    def move_shard(self, data, shard):
        job = data.draw(st.sampled_from(self.alive()[len(self.queued) :]))
        device = data.draw(st.none() | st.sampled_from(self.devices))
        self.tell(ShardMoved(job=job, shard=shard, device=device))

    @invariant()
    def consistent(self):
        self.scheduler.check()
        assert not (self.idle and self.ready), "every device that could be fed is fed"
        slots = len(self.preparing) + len(self.ready) + len(self.running)
        assert slots >= self.max_concurrent or not self.queued, "no slot is left empty"
        assert set(self.scheduler.idle_devices) == self.idle
        assert set(self.scheduler.eligible_jobs) == set(self.ready)
        assert self.scheduler.running == {device: job for job, (device, _) in self.running.items()}

    def teardown(self):
        """Everything finishes: each job is answered, runs to its end, and nothing of it is kept."""
        if not hasattr(self, "scheduler"):
            return
        if not self.devices:
            self.add_device()
        for _ in self.alive():  # each round ends at least one job
            for job in list(self.preparing):
                self.preparing.remove(job)
                unit = self.next_unit(job, 0)
                self.ready.update({job: unit} if job not in self.stopped else {})
                self.over.update({job} & self.stopped)
                self.tell(JobAdmitted(job=job, unit=unit, remaining_seconds=1.0))
            for job, (device, _) in list(self.running.items()):
                del self.running[job]
                self.idle.add(device)
                self.over.add(job)
                ended = UnitFinished(job=job, device=device, seconds=1.0, unit=None, remaining_seconds=0.0)
                self.tell(*([ended] if job in self.stopped else [ended, JobStopped(job=job)]))
            for job in list(self.waiting):
                self.waiting.remove(job)
                self.over.add(job)
                self.tell(JobStopped(job=job))
        assert not self.alive()
        self.scheduler.check()
        assert not self.scheduler.phases
        assert not self.scheduler._stories


TestAnyHistory = AnyHistory.TestCase
# One bug at a time and no explanations: a failure is told in seconds and not in minutes.
TestAnyHistory.settings = settings(
    max_examples=100,
    stateful_step_count=40,
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
@given(jobs=JOBS, num_devices=st.integers(1, 4), step_seconds=st.integers(1, 20))
def test_slack_costs_at_most_itself(jobs, num_devices, step_seconds):
    pool = drive(as_units(jobs), policy=ShardedLRTF(), num_devices=num_devices, step_seconds=float(step_seconds))
    bound = makespan_bound([sum(seconds) for seconds in jobs], num_devices)
    assert bound <= pool.now <= bound + max(max(seconds) for seconds in jobs) + step_seconds


@settings(deadline=None)
@given(jobs=JOBS, num_devices=st.integers(1, 4))
def test_with_fewer_jobs_than_devices_the_longest_job_is_the_makespan(jobs, num_devices):
    assume(len(jobs) <= num_devices)
    pool = drive(as_units(jobs), policy=ShardedLRTF(), num_devices=num_devices)
    assert pool.now == max(sum(seconds) for seconds in jobs)
