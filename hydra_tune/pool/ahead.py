"""What a device of the pool would do next, and which blocks that needs: asked when a unit begins to compute there.

The scheduler and what is told of it are the pool's, and so is the lock under which the questions are asked. As long as no
device is short of memory nobody asks, and a decision costs no more than taking down whose it was.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence

from hydra_tune.memory.prefetch import Need
from hydra_tune.pool.record import Record
from hydra_tune.schedule import Ahead, Command, Event, JobView, Policy, Release, Run, Scheduler, Unit
from hydra_tune.train.step import Expected, PendingUnit


class NextUnits:
    """Knows what follows on each device.

    Args:
        policy: of the scheduler.
        scheduler: of the pool.
        devices: their names.
        records: of the pool's jobs, by name.
        lock: of the pool; held by whoever calls `decided`.
    """

    def __init__(
        self,
        policy: Policy,
        scheduler: Scheduler,
        devices: Iterable[str],
        records: Mapping[str, Record],
        lock: threading.Condition,
    ) -> None:
        self._scheduler = scheduler
        self._records = records
        self._lock = lock
        self._ahead = Ahead(policy, scheduler)
        self._concerned: set[str] = set()  # jobs of which the policy may have been told something else
        self._begun: set[str] = set()
        for device in devices:
            self._ahead.set_speed(device, 1.0)

    def decided(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """The scheduler was told something and has said what to do. Under the lock."""
        concerned = self._concerned
        for event in events:
            job = getattr(event, "job", None)
            if job is not None:
                concerned.add(job)
        for command in commands:
            concerned.add(command.job)
            if type(command) is Run:
                self._begun.add(command.job)
            elif type(command) is Release:
                self._forget(command.job)

    def needs(self, record: Record, pending: PendingUnit, device: str) -> list[Need]:
        """What is needed after a unit that begins to compute.

        Args:
            record: of its job.
            pending: the unit.
            device: where it runs; called on its worker's thread.

        Returns:
            What the next units need, in their order.
        """
        following = pending.following() if record.spread is None else []
        due: list[PendingUnit | Expected] = []
        if following and (following[0].kind, following[0].shard) == ("update", pending.shard):
            due.append(following.pop(0))  # it comes along with this one, whatever the scheduler says
        with self._lock:
            unit = self._next_unit(record, pending, following, device)
        if unit is not None:
            due.append(unit)
        return [Need(one.blocks(), one.workspace_bytes) for one in due]

    def _next_unit(
        self, record: Record, pending: PendingUnit, following: Sequence[Expected], device: str
    ) -> PendingUnit | Expected | None:
        self._catch_up()
        own = self._own_view(record, pending, following[0]) if following else None
        job = self._ahead.choose(device, own)
        if job is None:
            return None
        if job == record.job.key:
            return following[0] if following else None
        other = self._records.get(job)
        return None if other is None else other.pending

    def _own_view(self, record: Record, pending: PendingUnit, expected: Expected) -> JobView | None:
        """The job that runs, as it will be when its unit is over; None if it does not go on."""
        if record.outcome is not None or record.job.paused or record.trial is None:
            return None
        return self._scheduler.view_after(
            record.job.key,
            unit=Unit(kind=expected.kind, shard=expected.shard, seconds=expected.seconds),
            seconds=pending.seconds,
            remaining_seconds=max(0.0, record.trial.remaining_seconds - pending.seconds),
            shard_device=record.places.get(expected.shard),
        )

    def _catch_up(self) -> None:
        """Let the selections know what has happened since the last question."""
        ahead = self._ahead
        for job in self._concerned:
            ahead.notice(job)
        for job in self._begun:
            ahead.unclaim(job)
        self._concerned.clear()
        self._begun.clear()
        ahead.notice_front()

    def _forget(self, job: str) -> None:
        """A job is over."""
        self._ahead.notice(job)
        self._ahead.unclaim(job)
        self._concerned.discard(job)
        self._begun.discard(job)
