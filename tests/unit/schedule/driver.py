"""A virtual pool for tests: drives a `Scheduler` on a clock that jumps from one finished unit to the next."""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hydra_tune.schedule import (
    Admit,
    Command,
    DeviceAdded,
    Event,
    JobAdmitted,
    JobStopped,
    JobSubmitted,
    Policy,
    Run,
    Scheduler,
    ShardMoved,
    Unit,
    UnitFinished,
)
from tests.support.schedule_invariants import check


@dataclass
class VirtualPool:
    """Every job is a list of units. A shard stays where it last ran; a unit that runs elsewhere loads it."""

    scheduler: Scheduler
    jobs: dict[str, Sequence[Unit]]
    step_seconds: float
    now: float = 0.0
    num_loads: int = 0
    ran: dict[str, list[Unit]] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    ended: dict[str, float] = field(default_factory=dict)
    _ends: list[tuple[float, int, Run]] = field(default_factory=list)
    _ticks: Iterator[int] = field(default_factory=itertools.count)
    _where: dict[tuple[str, int], str] = field(default_factory=dict)

    def run(self, num_devices: int) -> None:
        for index in range(num_devices):
            self._tell(DeviceAdded(device=f"cpu:{index}"))
        # Submitted at one instant: otherwise the first jobs are bound before the longest is known.
        self._tell(*[JobSubmitted(job=job) for job in self.jobs])
        while self._ends:
            self.now, _, run = heapq.heappop(self._ends)
            self._end(run)

    def _end(self, run: Run) -> None:
        ran = self.ran.setdefault(run.job, [])
        ran.append(run.unit)
        rest = self.jobs[run.job][len(ran) :]
        done = UnitFinished(
            job=run.job,
            device=run.device,
            seconds=run.unit.seconds,
            unit=rest[0] if rest else None,
            remaining_seconds=sum(unit.seconds for unit in rest),
        )
        if rest:
            self._tell(done)
        else:  # both in one call, as a pool knows both: between the two the job would seem to wait for an answer
            self.ended[run.job] = self.now
            self._tell(done, JobStopped(job=run.job))

    def _tell(self, *events: Event) -> None:
        commands = self.scheduler.handle(*events)
        check(self.scheduler)
        admitted = [self._admitted(command.job) for command in commands if isinstance(command, Admit)]
        for command in commands:
            self._carry_out(command)
        if admitted:
            self._tell(*admitted)

    def _admitted(self, job: str) -> JobAdmitted:
        units = self.jobs[job]
        total = sum(unit.seconds for unit in units)
        return JobAdmitted(job=job, unit=units[0], remaining_seconds=total, step_seconds=self.step_seconds)

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Run):
            heapq.heappush(self._ends, (self.now + command.unit.seconds, next(self._ticks), command))
            key = (command.job, command.unit.shard)
            if self._where.get(key) != command.device:
                self.num_loads += 1
                self._where[key] = command.device
                self._tell(ShardMoved(job=command.job, shard=command.unit.shard, device=command.device))
        elif not isinstance(command, Admit):
            self.released.append(command.job)


def drive(
    jobs: dict[str, Sequence[Unit]],
    *,
    policy: Policy,
    num_devices: int,
    max_concurrent: int | None = None,
    step_seconds: float = 0.0,
    admission: str = "eager",
) -> VirtualPool:
    """Run all jobs to their end, checking every invariant after every event."""
    scheduler = Scheduler(policy=policy, max_concurrent=max_concurrent or len(jobs) or 1, admission=admission)
    pool = VirtualPool(scheduler=scheduler, jobs=jobs, step_seconds=step_seconds)
    pool.run(num_devices)
    return pool
