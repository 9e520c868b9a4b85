"""The state of a simulation: bookkeeping for each trial and each device.

The classes only keep books on the virtual clock, and know no recording and no pool. `Simulator` (`simulator.py`) makes
all of the objects before the clock starts, and decides what happens at each event; `transfers.py`, `lookahead.py` and
`repeats.py` read and change the objects for the simulator.
"""

from collections import OrderedDict
from enum import IntEnum

from hydra_tune.schedule import Unit
from hydra_tune.simulate.engine.grid import TimeGrid
from hydra_tune.simulate.model import SimulatedDevice, SimulatedTrial

ABSENT = -1
"""Number in place of a device's number where there is no device."""


class SimulationEventKind(IntEnum):
    """Kinds of events on the clock. The first two follow from running units; all others have a time of their own.

    `Simulator.run` has its handlers in this order, and `repeats.py` compares kinds by number.
    """

    UNIT_ENDS = 0
    UNIT_STARTS = 1
    ARRIVES = 2
    DEVICE_JOINS = 3
    DEVICE_SLOWS = 4
    DEVICE_LEAVES = 5
    PREPARED = 6
    ANSWERED = 7


Entry = tuple[float, int, SimulationEventKind, int, float]
"""Time, running number for ties, happening, number of the job or device, and a value."""


class SimulatedJobState:
    """A trial in the simulation.

    Args:
        number: place in the order of submission.
        reports_wait: whether the trial waits for an answer to each report.

    Attributes:
        steps_under_way: steps of the running burst; 1 where a step is made of units.
        burst_step_seconds: seconds of each step of the burst, on its device.
        step, position: the running or next unit: its step, and its place in the step.
        milestone: the next step with a special beginning: a report that waits for its answer, a corrected estimate, or the end.
        is_ready: whether the scheduler has the trial's next unit and may run it.
        places: for each shard the number of the device that holds or receives the shard.
        told: the places that the scheduler knows of.
        homes: for each shard the node with the shard in host memory; None until the first load, for any node may have
            it.
        last_device: device of the last unit.
        planned_seconds: time left, as told to the scheduler, at the beginning of this step.
    """

    __slots__ = (
        "_reports_wait", "burst_step_seconds", "changes", "durations", "homes", "is_ready", "is_true", "last_device",
        "milestone", "name", "number", "places", "planned_seconds", "position", "prefix", "shards", "step",
        "step_seconds", "steps_run", "steps_under_way", "told", "trial", "truth", "units",
    )  # fmt: skip

    def __init__(self, number: int, trial: SimulatedTrial, grid: TimeGrid, *, reports_wait: bool) -> None:
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
        # All other kinds change the shard's parameters, so the host's copy is outdated afterwards.
        self.changes = [unit.kind not in ("forward", "evaluate") for unit in trial.step]
        self.durations: dict[float, list[float]] = {}  # seconds of each unit, by the speed of the device
        self.truth = [grid.round(unit.seconds) for unit in trial.step]
        # A true estimate needs no correction, and so no milestone for it.
        self.is_true = trial.estimate_factor == 1.0
        self._estimate([grid.round(unit.seconds * trial.estimate_factor) for unit in trial.step])
        self.milestone = 0
        self._reports_wait = reports_wait
        self.next_milestone()

    def correct(self) -> None:
        """Tell the scheduler the true times from now on."""
        self.is_true = True
        self._estimate(self.truth)

    def next_milestone(self) -> None:
        """Set the milestone after the present step."""
        trial, candidates = self.trial, [self.steps_run]
        if not self.is_true and trial.corrected_after_steps is not None:
            candidates.append(trial.corrected_after_steps)
        # A report without a wait changes no course: such a report must not end the skipping of repetitions.
        if self._reports_wait and trial.report_steps is not None:
            candidates.append((self.step // trial.report_steps + 1) * trial.report_steps)
        self.milestone = min(step for step in candidates if step > self.step)

    def next_stop(self) -> int:
        """Last possible step of a burst that begins now: a milestone, or a report that needs no answer."""
        every = self.trial.report_steps
        return self.milestone if every is None else min(self.milestone, (self.step // every + 1) * every)

    @property
    def is_cut_by_report(self) -> bool:
        """Whether the burst that has just ended has ended at a report."""
        every = self.trial.report_steps
        return self.trial.burst_steps > 1 and every is not None and self.step % every == 0

    def remaining_seconds(self) -> float:
        """Time left, as told to the scheduler: for all planned steps, even if a report ends the trial earlier."""
        return self.planned_seconds - self.prefix[self.position]

    def true_seconds(self) -> float:
        """Seconds of all units that the trial runs, on a device of speed 1."""
        return self.steps_run * sum(self.truth)

    def seconds_on(self, speed: float, grid: TimeGrid) -> list[float]:
        """Compute and cache the seconds of each unit of the step on a device of this speed."""
        self.durations[speed] = [grid.round(seconds / speed) for seconds in self.truth]
        return self.durations[speed]

    def advance(self, num_steps: int) -> None:
        """Count steps as done; 0 only recomputes `planned_seconds`."""
        self.step += num_steps
        self.planned_seconds = (self.trial.steps - self.step) * self.step_seconds

    def _estimate(self, seconds: list[float]) -> None:
        burst = self.trial.burst_steps
        self.units = [
            Unit(kind=unit.kind, shard=unit.shard, seconds=estimated_seconds * burst, may_end_early=burst > 1)
            for unit, estimated_seconds in zip(self.trial.step, seconds, strict=True)
        ]
        # Summed once: the remaining time is asked after every unit.
        self.prefix = [sum(seconds[:position]) for position in range(len(seconds))]
        self.step_seconds = sum(seconds)
        self.advance(0)


class SimulatedDeviceState:
    """A device in the simulation.

    Args:
        number: place in the scenario.

    Attributes:
        is_there: whether the device has joined and is not lost.
        job: job of the running unit, or None; `started` is the start of the unit's compute.
        shards: resident shards, least recently used first: (job, shard) to the arrival time of the bytes.
        dirty: resident shards changed since their arrival.
        link_free: time from which the link is idle.
    """

    __slots__ = (
        "bandwidth", "busy_seconds", "bytes_in", "bytes_out", "dirty", "is_there", "job",
        "link_free", "loads", "memory_bytes", "name", "node", "number", "shards", "speed", "stall_seconds", "started",
        "units", "used_bytes",
    )  # fmt: skip

    def __init__(self, number: int, device: SimulatedDevice) -> None:
        self.number, self.name, self.node, self.speed = number, device.name, device.node, device.speed
        self.memory_bytes, self.bandwidth = device.memory_bytes, device.bandwidth
        self.job: SimulatedJobState | None = None
        self.shards: OrderedDict[tuple[int, int], float] = OrderedDict()
        self.dirty: set[tuple[int, int]] = set()
        self.started = self.link_free = self.busy_seconds = self.stall_seconds = 0.0
        self.is_there = False
        self.used_bytes = self.bytes_in = self.bytes_out = self.loads = self.units = 0

    def lose_everything(self) -> list[tuple[int, int]]:
        """Lose the device with all of its shards; return the keys of the lost shards."""
        lost_keys = list(self.shards)
        self.shards.clear()
        self.dirty.clear()
        self.used_bytes, self.job, self.is_there = 0, None, False
        return lost_keys

    def pinned(self) -> tuple[int, int] | None:
        """Key of the shard that the running unit pins, or None."""
        job = self.job
        return None if job is None else (job.number, job.shards[job.position])

    def release(self, key: tuple[int, int], size: int) -> None:
        """Evict a shard, counting the bytes of a changed shard as written back."""
        del self.shards[key]
        self.used_bytes -= size
        if key in self.dirty:
            self.dirty.remove(key)
            self.bytes_out += size
