"""Skips what repeats itself exactly.

Note: why this changes nothing. Between two happenings that have a time of their own (an arrival, a fault, a report that
is answered later) or change a trial's course, a simulation follows from its state alone: who runs what and for how much
longer, which shards are where and in which order they were used, what is being sent, and what the policy is told. If
that state comes again a period later, with every time measured from now and every remaining time from that of one trial,
then so does everything after it, as long as the policy looks at differences of remaining times only and times are exact
(`grid.py`). So the clock and all counts go on by whole periods at once. The scheduler is not touched: from then on it is
told remaining times with the skipped part added, which keeps every difference.

Only policies of which this is known are skipped; any other is played unit by unit.
"""

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from hydra_tune.schedule import Fifo, ShardedLRTF
from hydra_tune.simulate.entities import Entry, Happening, SimDevice, SimJob
from hydra_tune.simulate.transfers import Timeline, Transfers

REMAINING_MATTERS: dict[type, bool] = {ShardedLRTF: True, Fifo: False}
"""Policies that keep nothing in mind and look at no more than differences of remaining times; and whether they do."""


class Course(Protocol):
    """What is looked at and moved on: the simulator."""

    now: float
    offset: float
    heap: list[Entry]
    alive: dict[int, SimJob]
    devices: list[SimDevice]
    transfers: Transfers
    timeline: Timeline
    units_skipped: int

    def claimed_by(self, job: SimJob) -> str | None:
        """The device whose buffer is for a job."""


@dataclass(slots=True, kw_only=True)
class _Seen:
    """A state, and the counts when it was there."""

    signature: Hashable
    time: float
    told: float
    steps: dict[int, int]
    devices: list[tuple[float, float, int, int, int, int]]
    network_bytes: int


class Repeats:
    """Watches the states at which one trial, the same each time, begins a step.

    Args:
        course: the simulation.
        *policies: all that decide in it; None for one that is not there.

    Source:
        Brent, An Improved Monte Carlo Factorization Algorithm (1980), section 2: which state to keep for comparison.
    """

    def __init__(self, course: Course, *policies: object | None) -> None:
        kinds = {type(policy) for policy in policies if policy is not None}
        self._course = course
        self._applies = kinds <= REMAINING_MATTERS.keys()
        self._remaining_matters = any(REMAINING_MATTERS.get(kind, True) for kind in kinds)
        self.wants_look = False
        self._watched: int | None = None
        self._seen: _Seen | None = None
        self._distance, self._reach = 0, 1
        self._num_steps = 0  # steps of all trials since the last look

    def step_ended(self, job: SimJob) -> None:
        """A trial begins its next step, or is about to be over."""
        if not self._applies:
            return
        self._num_steps += 1
        if job.step >= job.milestone or job.is_cut_by_report:
            self._forget()
        elif self._watched is None or self._watched == job.number:
            self._watched = job.number
            # To look costs as much as there is to look at, so it waits until as much has happened.
            self.wants_look = self._num_steps >= len(self._course.alive) + len(self._course.devices)

    def look(self, what: Happening) -> None:
        """Everything of this moment is done: compare, and skip if it was so before."""
        self.wants_look = False
        self._num_steps = 0
        if what > Happening.UNIT_STARTS:
            self._forget()
            return
        if not self._applies or not self._course.timeline.is_full:
            return
        signature = self._signature()
        if self._seen is not None and signature == self._seen.signature:
            self._skip(self._seen)
            self._seen = None
            self._distance, self._reach = 0, 1
            return
        self._distance += 1
        if self._seen is None or self._distance == self._reach:
            self._seen = self._record(signature)
            self._reach *= 2
            self._distance = 0

    def _forget(self) -> None:
        self._watched = None
        self._seen = None
        self._distance, self._reach = 0, 1

    def _told(self) -> float:
        """The remaining time that others are measured from."""
        return next(iter(self._course.alive.values())).remaining_seconds()

    def _signature(self) -> Hashable:
        course = self._course
        now, told = course.now, self._told()
        clock = [(entry[0] - now, *entry[2:]) for entry in sorted(course.heap) if entry[2] <= Happening.UNIT_STARTS]
        jobs = [
            (
                job.number,
                job.position,
                job.is_ready,
                course.claimed_by(job),
                job.last_device,
                tuple(job.places),
                tuple(job.homes),
                job.remaining_seconds() - told if self._remaining_matters else None,
            )
            for job in course.alive.values()
        ]
        devices = [
            (
                device.speed,
                None if device.job is None else device.job.number,
                max(0.0, device.link_free - now),
                self._held(device),
                frozenset(device.dirty),
            )
            for device in course.devices
        ]
        nodes = [max(0.0, free - now) for free in course.transfers.node_free.values()]
        return tuple(clock), tuple(jobs), tuple(devices), tuple(nodes)

    def _held(self, device: SimDevice) -> Hashable:
        arrivals = {key: ready - self._course.now for key, ready in device.shards.items() if ready > self._course.now}
        # Where everything fits, nothing ever leaves and the order of use is without effect.
        order = frozenset(device.shards) if device.memory_bytes is None else tuple(device.shards)
        return order, frozenset(arrivals.items())

    def _record(self, signature: Hashable) -> _Seen:
        course = self._course
        return _Seen(
            signature=signature,
            time=course.now,
            told=self._told(),
            steps={number: job.step for number, job in course.alive.items()},
            devices=[_counts(device) for device in course.devices],
            network_bytes=course.transfers.network_bytes,
        )

    def _num_periods(self, seen: _Seen, period: float) -> int:
        """Periods until something happens that does not repeat."""
        course = self._course
        limits = []
        for number, job in course.alive.items():
            advance = job.step - seen.steps[number]
            if advance:
                # One unit to spare: in the last one before a milestone there is no next one to send ahead, and bursts are cut
                # there, and at reports.
                stop = job.milestone if job.trial.burst_steps == 1 else job.next_stop()
                limits.append((stop - 1 - job.trial.burst_steps - job.step) // advance)
        times = [entry[0] for entry in course.heap if entry[2] > Happening.UNIT_STARTS]
        if times:
            # Division rounds; what is to be strictly before may not depend on that.
            limits.append(max(0, int((min(times) - course.now) / period) - 1))
        return min(limits)

    def _skip(self, seen: _Seen) -> None:
        course = self._course
        period = course.now - seen.time
        count = self._num_periods(seen, period)
        if count < 1:
            return
        span = count * period
        for device, before in zip(course.devices, seen.devices, strict=True):
            course.units_skipped += count * (device.units - before[2])
            _add(device, before, count, span)
        course.transfers.network_bytes += count * (course.transfers.network_bytes - seen.network_bytes)
        for node in course.transfers.node_free:
            course.transfers.node_free[node] += span
        if self._remaining_matters:
            course.offset += count * (seen.told - self._told())
        for number, job in course.alive.items():
            job.advance(count * (job.step - seen.steps[number]))
        course.heap[:] = [
            (entry[0] + span, *entry[1:]) if entry[2] <= Happening.UNIT_STARTS else entry for entry in course.heap
        ]
        heapq.heapify(course.heap)
        course.now += span


def _counts(device: SimDevice) -> tuple[float, float, int, int, int, int]:
    return (
        device.busy_seconds,
        device.stall_seconds,
        device.units,
        device.loads,
        device.bytes_in,
        device.bytes_out,
    )


def _add(device: SimDevice, before: tuple[float, float, int, int, int, int], count: int, span: float) -> None:
    device.busy_seconds += count * (device.busy_seconds - before[0])
    device.stall_seconds += count * (device.stall_seconds - before[1])
    device.units += count * (device.units - before[2])
    device.loads += count * (device.loads - before[3])
    device.bytes_in += count * (device.bytes_in - before[4])
    device.bytes_out += count * (device.bytes_out - before[5])
    device.link_free += span
    device.started += span
    for key in device.shards:
        device.shards[key] += span
