"""Skips exact repetitions of a simulation's state.

Unless `skip_repeats` is False, `Simulator` (`simulator.py`) calls `RepetitionSkipper.step_ended` at each end of a step or of a
burst, and `look` after events: where the skipper wants a look, and after each event with a time of its own. All that decides
the course of a simulation must be part of `_signature`, and each count that grows must be part of `_skip`.

Note: exactness. The simulation is deterministic between external events: events with a time of their own (an arrival, a
fault, a late answer to a report), and events that change a trial's course. The state comprises the running units with
their remaining times, the places and the order of use of shards, the transfers under way, and the policy's inputs. If
the state recurs a period later, with times measured from now and remaining times from one trial's, all later events
recur as well. Two conditions apply: the policy looks only at differences of remaining times, and times are exact
(`grid.py`). The clock and all counts then advance by whole periods at once. The scheduler is not touched: later
remaining times have the skipped part added, so every difference stays the same.

Only runs of policies known to meet the condition are skipped; all others are simulated unit by unit.
"""

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from hydra_tune.schedule import Fifo, ShardedLRTF
from hydra_tune.simulate.engine.entities import Entry, SimulatedDeviceState, SimulatedJobState, SimulationEventKind
from hydra_tune.simulate.engine.transfers import ShardTransferSimulator, SimulationTimeline

REMAINING_MATTERS: dict[type, bool] = {ShardedLRTF: True, Fifo: False}
"""Policies without memory that compare at most differences of remaining times, and whether they compare these."""


class SkippableSimulation(Protocol):
    """Interface of the simulator that `RepetitionSkipper` observes and advances."""

    now: float
    offset: float
    heap: list[Entry]
    alive: dict[int, SimulatedJobState]
    devices: list[SimulatedDeviceState]
    transfers: ShardTransferSimulator
    timeline: SimulationTimeline
    units_skipped: int

    def claimed_by(self, job: SimulatedJobState) -> str | None:
        """Name of the device whose buffer is claimed for a job, or None."""


@dataclass(slots=True, kw_only=True)
class _SimulationSnapshot:
    """A state, with the counts at its time."""

    signature: Hashable
    time: float
    told: float
    steps: dict[int, int]
    devices: list[tuple[float, float, int, int, int, int]]
    network_bytes: int


class RepetitionSkipper:
    """Watches the states in which one trial, the same each time, begins a step.

    Args:
        course: the simulation.
        *policies: all deciding policies; None stands for an absent policy.

    Source:
        Brent, An Improved Monte Carlo Factorization Algorithm (1980), section 2: which state to keep for comparison.
    """

    def __init__(self, course: SkippableSimulation, *policies: object | None) -> None:
        kinds = {type(policy) for policy in policies if policy is not None}
        self._course = course
        # An unknown policy may look at anything, so its runs are never skipped.
        self._applies = kinds <= REMAINING_MATTERS.keys()
        self._remaining_matters = any(REMAINING_MATTERS.get(kind, True) for kind in kinds)
        self.wants_look = False
        self._watched: int | None = None
        self._seen: _SimulationSnapshot | None = None
        self._distance, self._reach = 0, 1
        self._num_steps = 0  # steps and bursts of all trials since the last look

    def step_ended(self, job: SimulatedJobState) -> None:
        """Note that a trial begins its next step, or is about to end."""
        if not self._applies:
            return
        self._num_steps += 1
        if job.step >= job.milestone or job.is_cut_by_report:
            self._forget()
        elif self._watched is None or self._watched == job.number:
            self._watched = job.number
            # A look costs time in proportion to the state: wait until as many steps have run.
            self.wants_look = self._num_steps >= len(self._course.alive) + len(self._course.devices)

    def look(self, what: SimulationEventKind) -> None:
        """Compare the state after all events of this moment, and skip ahead at a repetition."""
        self.wants_look = False
        self._num_steps = 0
        # An external event: no earlier state can recur with the same future.
        if what > SimulationEventKind.UNIT_STARTS:
            self._forget()
            return
        # Kept bars must be simulated one by one.
        if not self._applies or not self._course.timeline.is_full:
            return
        signature = self._signature()
        if self._seen is not None and signature == self._seen.signature:
            self._skip(self._seen)
            self._seen = None
            self._distance, self._reach = 0, 1
            return
        self._distance += 1
        # Brent's rule: keep the state at distances that double, so a period of any length is found.
        if self._seen is None or self._distance == self._reach:
            self._seen = self._record(signature)
            self._reach *= 2
            self._distance = 0

    def _forget(self) -> None:
        self._watched = None
        self._seen = None
        self._distance, self._reach = 0, 1

    def _told(self) -> float:
        """Reference for other remaining times: the first live trial's."""
        return next(iter(self._course.alive.values())).remaining_seconds()

    def _signature(self) -> Hashable:
        course = self._course
        now, reference_seconds = course.now, self._told()
        # Without an entry's running number, which never recurs.
        clock = [
            (entry[0] - now, *entry[2:]) for entry in sorted(course.heap) if entry[2] <= SimulationEventKind.UNIT_STARTS
        ]
        jobs = [
            (
                job.number,
                job.position,
                job.is_ready,
                course.claimed_by(job),
                job.last_device,
                tuple(job.places),
                tuple(job.homes),
                job.remaining_seconds() - reference_seconds if self._remaining_matters else None,
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

    def _held(self, device: SimulatedDeviceState) -> Hashable:
        times_to_arrival = {
            key: ready - self._course.now for key, ready in device.shards.items() if ready > self._course.now
        }
        # Without a memory limit nothing is ever evicted, and the order of use has no effect.
        order = frozenset(device.shards) if device.memory_bytes is None else tuple(device.shards)
        return order, frozenset(times_to_arrival.items())

    def _record(self, signature: Hashable) -> _SimulationSnapshot:
        course = self._course
        return _SimulationSnapshot(
            signature=signature,
            time=course.now,
            told=self._told(),
            steps={number: job.step for number, job in course.alive.items()},
            devices=[_counts(device) for device in course.devices],
            network_bytes=course.transfers.network_bytes,
        )

    def _num_periods(self, seen: _SimulationSnapshot, period: float) -> int:
        """Number of whole periods before the next event that does not repeat."""
        course = self._course
        limits = []
        for number, job in course.alive.items():
            advance = job.step - seen.steps[number]
            if advance:
                # Spare one unit: the last unit before a milestone prefetches nothing, and bursts are cut there and at
                # reports.
                stop = job.milestone if job.trial.burst_steps == 1 else job.next_stop()
                limits.append((stop - 1 - job.trial.burst_steps - job.step) // advance)
        times = [entry[0] for entry in course.heap if entry[2] > SimulationEventKind.UNIT_STARTS]
        if times:
            # Division rounds: leave one period out, so that the skip ends strictly before the event.
            limits.append(max(0, int((min(times) - course.now) / period) - 1))
        # Never empty: the watched trial has advanced by at least a step since the earlier state.
        return min(limits)

    def _skip(self, seen: _SimulationSnapshot) -> None:
        course = self._course
        period = course.now - seen.time
        count = self._num_periods(seen, period)
        if count < 1:
            return
        span = count * period
        for device, before in zip(course.devices, seen.devices, strict=True):
            # Before `_add`, which changes the device's units.
            course.units_skipped += count * (device.units - before[2])
            _add(device, before, count, span)
        course.transfers.network_bytes += count * (course.transfers.network_bytes - seen.network_bytes)
        for node in course.transfers.node_free:
            course.transfers.node_free[node] += span
        if self._remaining_matters:
            # Before the jobs advance, because `_told` reads a job's remaining time.
            course.offset += count * (seen.told - self._told())
        for number, job in course.alive.items():
            job.advance(count * (job.step - seen.steps[number]))
        course.heap[:] = [
            (entry[0] + span, *entry[1:]) if entry[2] <= SimulationEventKind.UNIT_STARTS else entry
            for entry in course.heap
        ]
        # Only the entries of the course have moved, so their order among the others may be another.
        heapq.heapify(course.heap)
        course.now += span


def _counts(device: SimulatedDeviceState) -> tuple[float, float, int, int, int, int]:
    return (
        device.busy_seconds,
        device.stall_seconds,
        device.units,
        device.loads,
        device.bytes_in,
        device.bytes_out,
    )


def _add(
    device: SimulatedDeviceState, before: tuple[float, float, int, int, int, int], count: int, span: float
) -> None:
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
