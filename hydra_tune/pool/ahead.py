"""What a device of the pool would do next, and which blocks that needs: asked when a unit begins to compute there.

The scheduler and what is told of it are the pool's, and so is the lock under which the questions are asked. As long as no
device is short of memory nobody asks, and a decision costs no more than taking down whose it was.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from hydra_tune.memory.prefetch import Need
from hydra_tune.schedule import Ahead, Command, Event, JobView, Policy, Release, Run, Scheduler, Unit
from hydra_tune.train.step import Expected, PendingUnit


class Ongoing(Protocol):
    """What has to be known of a job."""

    @property
    def key(self) -> str:
        """What the scheduler calls it."""

    @property
    def goes_on(self) -> bool:
        """Whether it will want a further unit, as far as is known."""

    @property
    def is_spread(self) -> bool:
        """Whether units of it run side by side now."""

    @property
    def remaining_seconds(self) -> float:
        """Seconds of compute to come."""

    @property
    def places(self) -> Mapping[int, str | None]:
        """Device of each shard that is on one."""

    @property
    def pending(self) -> PendingUnit | None:
        """Its next unit, where that is the only one and does not run yet."""


class NextUnits:
    """Knows what follows on each device.

    Args:
        policy: of the scheduler.
        scheduler: of the pool.
        devices: their names.
        records: the pool's jobs, by name.
        lock: of the pool; held by whoever calls `decided`.

    Attributes:
        seconds: CPU time spent choosing.
    """

    def __init__(
        self,
        policy: Policy,
        scheduler: Scheduler,
        devices: Iterable[str],
        records: Mapping[str, Ongoing],
        lock: threading.Condition,
    ) -> None:
        self._scheduler = scheduler
        self._records = records
        self._lock = lock
        self._ahead = Ahead(policy, scheduler)
        self._concerned: set[str] = set()  # jobs of which the policy may have been told something else
        self._begun: set[str] = set()
        self._paces: dict[str, float | None] = {}
        self.seconds = 0.0
        for device in devices:
            self.added(device)

    def added(self, device: str) -> None:
        """A device is there. Under the lock."""
        self._ahead.set_speed(device, 1.0)

    def lost(self, device: str) -> None:
        """A device has gone. Under the lock."""
        self._ahead.unclaim_device(device)
        self._ahead.set_speed(device, 0.0)

    def decided(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """The scheduler was told something and has said what to do. Under the lock."""
        concerned = self._concerned
        for event in events:
            job = getattr(event, "job", None)
            if job is not None:
                concerned.add(job)
            alike = getattr(event, "alike", None)
            if alike is not None:
                self._notice_pace(alike)
        for command in commands:
            concerned.add(command.job)
            if type(command) is Run:
                self._begun.add(command.job)
            elif type(command) is Release:
                self._forget(command.job)

    def needs(self, record: Ongoing, pending: PendingUnit, device: str) -> list[Need]:
        """What is needed after a unit that begins to compute.

        Args:
            record: of its job.
            pending: the unit.
            device: where it runs; called on its worker's thread.

        Returns:
            What the next units need, in their order.
        """
        following = [] if record.is_spread else pending.following()
        due: list[PendingUnit | Expected] = []
        if following and (following[0].kind, following[0].shard) == ("update", pending.shard):
            due.append(following.pop(0))  # it comes along with this one, whatever the scheduler says
        with self._lock:
            start = time.thread_time()
            unit = self._next_unit(record, pending, following, device)
            self.seconds += time.thread_time() - start
        if unit is not None:
            due.append(unit)
        return [Need(one.blocks(), one.workspace_bytes) for one in due]

    def _next_unit(
        self, record: Ongoing, pending: PendingUnit, following: Sequence[Expected], device: str
    ) -> PendingUnit | Expected | None:
        self._catch_up()
        own = self._own_view(record, pending, following[0]) if following else None
        job = self._ahead.choose(device, own)
        if job is None:
            return None
        if job == record.key:
            return following[0] if following else None
        other = self._records.get(job)
        return None if other is None else other.pending

    def _own_view(self, record: Ongoing, pending: PendingUnit, expected: Expected) -> JobView | None:
        """The job that runs, as it will be when its unit is over; None if it does not go on."""
        if not record.goes_on:
            return None
        return self._scheduler.view_after(
            record.key,
            unit=Unit(kind=expected.kind, shard=expected.shard, seconds=expected.seconds),
            seconds=pending.seconds,
            remaining_seconds=max(0.0, record.remaining_seconds - pending.seconds),
            shard_device=record.places.get(expected.shard),
        )

    def _notice_pace(self, alike: str) -> None:
        """What one job was told of its steps may have changed what policies are shown of others."""
        step_seconds = self._scheduler.step_seconds(alike)
        if step_seconds != self._paces.get(alike):
            self._paces[alike] = step_seconds
            self._concerned.update(self._scheduler.jobs_alike(alike))

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
