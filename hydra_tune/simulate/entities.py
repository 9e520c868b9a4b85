"""The moving parts of a simulation: what is true of each trial and each device now.

Only books are kept here; `simulator.py` decides what happens.
"""

from collections import OrderedDict
from enum import IntEnum

from hydra_tune.schedule import Unit
from hydra_tune.simulate.grid import Grid
from hydra_tune.simulate.model import SimulatedDevice, SimulatedTrial

ABSENT = -1
"""No device, where the number of a device is expected."""


class Happening(IntEnum):
    """What the clock brings. The first two belong to the course of units; the others have a time of their own."""

    UNIT_ENDS = 0
    UNIT_STARTS = 1
    ARRIVES = 2
    DEVICE_JOINS = 3
    DEVICE_SLOWS = 4
    DEVICE_LEAVES = 5
    PREPARED = 6
    ANSWERED = 7


Entry = tuple[float, int, Happening, int, float]
"""Time, running number for ties, what, number of the job or device, and a value."""


class SimJob:
    """A trial on its way.

    Args:
        number: its place in the order of submission.
        trial: what it is.
        grid: rounds its durations.
        reports_wait: it waits for an answer to each report.

    Attributes:
        steps_under_way: steps of the burst that runs; 1 where a step is made of units.
        burst_step_seconds: of each of them, where it runs.
        step, position: the unit that is next or runs: of which step, and where in it.
        milestone: the step whose beginning is not like any other: a report, a corrected estimate, or the end.
        is_ready: the scheduler has its next unit and may run it.
        places: for each shard the device that holds it, or is being sent it.
        told: the places the scheduler knows of.
        homes: for each shard the node whose host memory has it; None while any may.
        last_device: where its last unit ran.
        planned_seconds: what the scheduler is told of the time left when this step began.
    """

    __slots__ = (
        "_reports_wait", "burst_step_seconds", "changes", "durations", "homes", "is_ready", "is_true", "last_device",
        "milestone", "name", "number", "places", "planned_seconds", "position", "prefix", "shards", "step",
        "step_seconds", "steps_run", "steps_under_way", "told", "trial", "truth", "units",
    )  # fmt: skip

    def __init__(self, number: int, trial: SimulatedTrial, grid: Grid, *, reports_wait: bool) -> None:
        self.number, self.name, self.trial = number, trial.name, trial
        self.step = self.position = 0
        self.steps_under_way = 1
        self.burst_step_seconds = 0.0
        self.steps_run = trial.steps_run
        self.is_ready = False
        self.last_device = ABSENT
        self.places = [ABSENT] * len(trial.shard_bytes)
        self.told = [ABSENT] * len(trial.shard_bytes)
        self.homes: list[str | None] = [None] * len(trial.shard_bytes)
        self.shards = [unit.shard for unit in trial.step]
        self.changes = [unit.kind not in ("forward", "evaluate") for unit in trial.step]
        self.durations: dict[float, list[float]] = {}  # by the speed of the device
        self.truth = [grid.round(unit.seconds) for unit in trial.step]
        self.is_true = trial.estimate_factor == 1.0
        self._estimate([grid.round(unit.seconds * trial.estimate_factor) for unit in trial.step])
        self.milestone = 0
        self._reports_wait = reports_wait
        self.next_milestone()

    def correct(self) -> None:
        """From now on the scheduler is told the truth."""
        self.is_true = True
        self._estimate(self.truth)

    def next_milestone(self) -> None:
        """Set the milestone after the present step."""
        trial, candidates = self.trial, [self.steps_run]
        if not self.is_true and trial.corrected_after_steps is not None:
            candidates.append(trial.corrected_after_steps)
        if self._reports_wait and trial.report_steps is not None:
            candidates.append((self.step // trial.report_steps + 1) * trial.report_steps)
        self.milestone = min(step for step in candidates if step > self.step)

    def next_stop(self) -> int:
        """The step at which a burst that begins now ends at the latest: a milestone, or a report that nobody answers."""
        every = self.trial.report_steps
        return self.milestone if every is None else min(self.milestone, (self.step // every + 1) * every)

    @property
    def is_cut_by_report(self) -> bool:
        """Whether the burst that has ended now could have had no further step, for a report was due."""
        every = self.trial.report_steps
        return self.trial.burst_steps > 1 and every is not None and self.step % every == 0

    def remaining_seconds(self) -> float:
        """What the scheduler is told of the time left: of all steps planned, whether or not a report ends it before."""
        return self.planned_seconds - self.prefix[self.position]

    def true_seconds(self) -> float:
        """Seconds of all units it runs, on a device of speed 1."""
        return self.steps_run * sum(self.truth)

    def seconds_on(self, speed: float, grid: Grid) -> list[float]:
        """Seconds of each unit of the step on a device of this speed."""
        self.durations[speed] = [grid.round(seconds / speed) for seconds in self.truth]
        return self.durations[speed]

    def advance(self, num_steps: int) -> None:
        """Some steps are done."""
        self.step += num_steps
        self.planned_seconds = (self.trial.steps - self.step) * self.step_seconds

    def _estimate(self, seconds: list[float]) -> None:
        burst = self.trial.burst_steps
        self.units = [
            Unit(kind=unit.kind, shard=unit.shard, seconds=told * burst, may_end_early=burst > 1)
            for unit, told in zip(self.trial.step, seconds, strict=True)
        ]
        self.prefix = [sum(seconds[:position]) for position in range(len(seconds))]
        self.step_seconds = sum(seconds)
        self.advance(0)


class SimDevice:
    """A device at work.

    Args:
        number: its place in the scenario.
        device: what it is.

    Attributes:
        is_there: it has joined and is not lost.
        job: whose unit it has, and in `started` since when that computes or will.
        shards: what it holds, least recently used first: (job, shard) to the time at which the bytes are there.
        dirty: which of these were changed since they came.
        link_free: when its link has nothing to send.
    """

    __slots__ = (
        "bandwidth", "busy_seconds", "bytes_in", "bytes_out", "dirty", "is_there", "job",
        "link_free", "loads", "memory_bytes", "name", "node", "number", "shards", "speed", "stall_seconds", "started",
        "units", "used_bytes",
    )  # fmt: skip

    def __init__(self, number: int, device: SimulatedDevice) -> None:
        self.number, self.name, self.node, self.speed = number, device.name, device.node, device.speed
        self.memory_bytes, self.bandwidth = device.memory_bytes, device.bandwidth
        self.job: SimJob | None = None
        self.shards: OrderedDict[tuple[int, int], float] = OrderedDict()
        self.dirty: set[tuple[int, int]] = set()
        self.started = self.link_free = self.busy_seconds = self.stall_seconds = 0.0
        self.is_there = False
        self.used_bytes = self.bytes_in = self.bytes_out = self.loads = self.units = 0

    def lose_everything(self) -> list[tuple[int, int]]:
        """The device is lost; returns what it held, as keys of `shards`."""
        held = list(self.shards)
        self.shards.clear()
        self.dirty.clear()
        self.used_bytes, self.job, self.is_there = 0, None, False
        return held

    def pinned(self) -> tuple[int, int] | None:
        """The shard that must stay, because its unit runs."""
        job = self.job
        return None if job is None else (job.number, job.shards[job.position])

    def release(self, key: tuple[int, int], size: int) -> None:
        """Forget a shard."""
        del self.shards[key]
        self.used_bytes -= size
        if key in self.dirty:
            self.dirty.remove(key)
            self.bytes_out += size
