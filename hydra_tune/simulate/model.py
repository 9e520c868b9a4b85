"""The simulator's input: trials, devices and links, as plain numbers.

People import these classes from `hydra_tune.simulate`; for `hydra-tune simulate` (`cli/commands/simulate.py`), `profile.py` or
`workload.py` makes the trials and devices, and the command the faults of its options, before the simulation begins. The engine
(`engine/simulator.py`, `engine/entities.py`, `engine/transfers.py`) plays a `Scenario`. The classes refuse wrong input, and the
engine relies on the refusals. The module must not know models, tensors or policies, and must not import the pool, torch or
numpy.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hydra_tune.errors import ConfigError
from hydra_tune.quantities import format_bytes, format_bytes_up
from hydra_tune.schedule import ADMISSIONS, Unit, check_admission

MAX_PARTS = (
    10_000_000  # shards of all trials together, or devices: more would exhaust the memory before a simulation starts
)

PROFILE_FORMAT = 1
"""Format version of the profiles that `profile.py` reads and makes, and `pool/dry_run/simulator_profile.py` makes."""


def check_size(count: int, what: str) -> None:
    """Refuse a simulation too large for memory.

    Raises:
        ConfigError: `count` is more than `MAX_PARTS`.
    """
    if count > MAX_PARTS:
        raise ConfigError(f"a simulation holds at most {MAX_PARTS:,} {what}, not {count:,}; simulate a part of it")


def _check(value: float, what: str, *, least: float = 0.0, open_end: bool = True) -> None:
    fits = value > least if open_end else value >= least
    if not (fits and math.isfinite(value)):
        raise ConfigError(f"{what} must be a finite number {'>' if open_end else '>='} {least:g}, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTrial:
    """A trial: one step of shard units, repeated.

    Args:
        name: unique.
        step: the units of one training step, in order; `seconds` is the true duration on a device of speed 1.
        shard_bytes: bytes to load for each shard, for every shard that `step` uses.
        steps: training steps planned.
        report_steps: steps between reports; None: no reports.
        stop_after_reports: the report, from 1, after which the trial is pruned; None: the trial runs to its end.
        arrival_seconds: time of the submission.
        estimate_factor: the scheduler's estimate as a multiple of the true time; below 1 is optimistic.
        corrected_after_steps: steps after which the scheduler learns the true time; None: never.
        boundary_bytes: bytes that move along when a trial's next unit runs on another device.
        priority: trials of a higher priority are admitted, and run, before all trials of a lower priority.
        burst_steps: steps that run as one unit, for a trial with its own code and one unit per step. A burst ends at a
            report, a corrected estimate or the trial's end, or earlier at the scheduler's request.
    """

    name: str
    step: tuple[Unit, ...]
    shard_bytes: tuple[int, ...]
    steps: int
    report_steps: int | None = None
    stop_after_reports: int | None = None
    arrival_seconds: float = 0.0
    estimate_factor: float = 1.0
    corrected_after_steps: int | None = None
    boundary_bytes: int = 0
    priority: int = 0
    burst_steps: int = 1

    def __post_init__(self) -> None:
        name = f"trial {self.name!r}"
        if not self.step:
            raise ConfigError(f"{name}: a step must have at least one unit")
        for unit in self.step:
            _check(unit.seconds, f"{name}: the seconds of its {unit.kind} unit of shard {unit.shard}")
            if not 0 <= unit.shard < len(self.shard_bytes):
                raise ConfigError(f"{name}: a unit needs shard {unit.shard}; there are {len(self.shard_bytes)}, from 0")
        for shard, size in enumerate(self.shard_bytes):
            _check(size, f"{name}: the bytes of shard {shard}", open_end=False)
        _check(self.arrival_seconds, f"{name}: arrival_seconds", open_end=False)
        _check(self.estimate_factor, f"{name}: estimate_factor")
        _check(self.boundary_bytes, f"{name}: boundary_bytes", open_end=False)
        self._check_counts(name)

    def _check_counts(self, name: str) -> None:
        if self.burst_steps > 1 and len(self.step) > 1:
            raise ConfigError(
                f"{name}: bursts are of steps that are one unit, and a step of this trial has {len(self.step)} units"
            )
        for field_name in ("steps", "report_steps", "stop_after_reports", "corrected_after_steps", "burst_steps"):
            count = getattr(self, field_name)
            if count is not None and count < 1:
                raise ConfigError(f"{name}: {field_name} must be at least 1, not {count}")
        if self.stop_after_reports is not None and self.report_steps is None:
            raise ConfigError(f"{name}: stop_after_reports needs reports; give report_steps")

    @property
    def step_seconds(self) -> float:
        """Seconds of one step on one device of speed 1, without transfers."""
        return sum(unit.seconds for unit in self.step)

    @property
    def steps_run(self) -> int:
        """Steps that the trial runs: the planned steps, or those up to the report after which the trial is pruned."""
        if self.stop_after_reports is None or self.report_steps is None:
            return self.steps
        return min(self.steps, self.stop_after_reports * self.report_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDevice:
    """A device.

    Args:
        name: unique.
        speed: a unit of s seconds takes s / speed.
        memory_bytes: memory for shards; None: unlimited.
        bandwidth: bytes a second at which shards are loaded; None: loads take no time.
        node: the device's machine; loads from another machine's memory also cross the network.
        joins_seconds: time at which the device joins.
    """

    name: str
    speed: float = 1.0
    memory_bytes: int | None = None
    bandwidth: float | None = None
    node: str = "node0"
    joins_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check(self.speed, f"device {self.name!r}: speed")
        _check(self.joins_seconds, f"device {self.name!r}: joins_seconds", open_end=False)
        for field_name in ("memory_bytes", "bandwidth"):
            if getattr(self, field_name) is not None:
                _check(getattr(self, field_name), f"device {self.name!r}: {field_name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """A fault: a device becomes slower, or faster again.

    Args:
        device: name of the device.
        at_seconds: time of the change; units that start later are affected.
        factor: multiplies the device's own speed, and replaces an earlier factor.
    """

    device: str
    at_seconds: float
    factor: float

    def __post_init__(self) -> None:
        _check(self.at_seconds, f"the slowdown of {self.device!r}: at_seconds", open_end=False)
        _check(self.factor, f"the slowdown of {self.device!r}: factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A fault: a device is lost, with its running unit, and may come back.

    Trials resume from their host memory: each trial loses at most its running unit, which runs again.

    Args:
        device: name of the device.
        at_seconds: time of the loss.
        until_seconds: time of the return; None: never.
    """

    device: str
    at_seconds: float
    until_seconds: float | None = None

    def __post_init__(self) -> None:
        _check(self.at_seconds, f"the outage of {self.device!r}: at_seconds", open_end=False)
        if self.until_seconds is not None:
            _check(self.until_seconds, f"the outage of {self.device!r}: until_seconds", least=self.at_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything besides the policy that determines a simulation.

    Args:
        trials: in the order of submission; trials that arrive later are submitted later.
        devices: in the order in which the scheduler offers work.
        slowdowns: faults that change a device's speed.
        outages: faults that take a device away; one device must remain or return in the end.
        max_concurrent: trials admitted at once; None: all.
        admission: "eager", or "staggered": of the admitted trials the oldest go first.
        overlap: prefetch the next shard while a unit runs (double buffering); otherwise loads wait for the device.
        network_bandwidth: bytes a second between nodes; None: transfers take no time.
        node_bandwidth: bytes a second of each node's host memory, shared by its devices' loads; None: no limit.
        answer_seconds: time between a report and its answer, in which the trial waits.
        prepare_seconds: time to prepare a trial for its first unit; trials are prepared one at a time.
    """

    trials: tuple[SimulatedTrial, ...]
    devices: tuple[SimulatedDevice, ...]
    slowdowns: tuple[Slowdown, ...] = field(default=())
    outages: tuple[Outage, ...] = field(default=())
    max_concurrent: int | None = None
    admission: str = "eager"
    overlap: bool = True
    network_bandwidth: float | None = None
    node_bandwidth: float | None = None
    answer_seconds: float = 0.0
    prepare_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.trials or not self.devices:
            raise ConfigError("a simulation needs at least one trial and one device")
        _check_unique((trial.name for trial in self.trials), "trials")
        _check_unique((device.name for device in self.devices), "devices")
        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise ConfigError(f"max_concurrent must be at least 1, not {self.max_concurrent}")
        check_admission(self.admission, ADMISSIONS[1:])
        for field_name in ("network_bandwidth", "node_bandwidth"):
            if getattr(self, field_name) is not None:
                _check(getattr(self, field_name), field_name)
        for field_name in ("answer_seconds", "prepare_seconds"):
            _check(getattr(self, field_name), field_name, open_end=False)
        self._check_faults()
        self._check_memory()

    def _check_faults(self) -> None:
        joins = {device.name: device.joins_seconds for device in self.devices}
        faults: tuple[Slowdown | Outage, ...] = (*self.slowdowns, *self.outages)
        for fault in faults:
            fault_name = "a slowdown" if isinstance(fault, Slowdown) else "an outage"
            if fault.device not in joins:
                raise ConfigError(f"{fault_name} names device {fault.device!r}; there are {', '.join(sorted(joins))}")
        # The time from which each device is there; infinity for a device that is lost for ever.
        free: dict[str, float] = dict(joins)
        # By time, so that overlapping outages of one device are found.
        for outage in sorted(self.outages, key=lambda outage: outage.at_seconds):
            since = free[outage.device]
            if outage.at_seconds < since:
                again = "is lost for ever before" if since == math.inf else f"is there again at {since:g} s"
                raise ConfigError(
                    f"device {outage.device!r} is to be lost at {outage.at_seconds:g} s, when it is not there; it {again}"
                )
            free[outage.device] = math.inf if outage.until_seconds is None else outage.until_seconds
        if min(free.values()) == math.inf:
            raise ConfigError("every device is lost for ever, so the trials never end; give one outage an end")

    def _check_memory(self) -> None:
        memories = [(device.memory_bytes, device.name) for device in self.devices if device.memory_bytes is not None]
        if not memories:
            return
        # The smallest memory, because any device may be given any shard.
        memory, device = min(memories)
        for trial in self.trials:
            largest = max(trial.shard_bytes)
            if largest > memory:
                raise ConfigError(
                    f"a shard of trial {trial.name!r} needs {format_bytes(largest)} but device {device!r} has "
                    f"{format_bytes(memory)}; cut the trial into more shards or raise its memory to at least "
                    f"{format_bytes_up(largest)}"
                )

    @property
    def num_units(self) -> int:
        """Number of units in all steps that will run; repeats after an outage do not count, and a burst counts as its steps."""
        return sum(trial.steps_run * len(trial.step) for trial in self.trials)

    def longest_possible_seconds(self) -> float:
        """Upper bound on any schedule's makespan: every unit alone, on the slowest device, after a load of its own."""
        slowest = min(device.speed for device in self.devices) * min([1.0, *(fault.factor for fault in self.slowdowns)])
        bandwidths = [device.bandwidth for device in self.devices]
        limits = [limit for limit in (*bandwidths, self.network_bandwidth, self.node_bandwidth) if limit is not None]
        # A byte may pass the device's link, the network and the node's memory: at most three times the slowest.
        byte_seconds = 3 / min(limits) if limits else 0.0
        starts = [fault.at_seconds for fault in self.slowdowns] + [device.joins_seconds for device in self.devices]
        starts += [outage.until_seconds or outage.at_seconds for outage in self.outages]
        total = max([*starts, *(trial.arrival_seconds for trial in self.trials)])
        if self.outages:  # each may repeat the longest unit, and its load, once
            unit = max(unit.seconds for trial in self.trials for unit in trial.step) / slowest
            size = max(size + trial.boundary_bytes for trial in self.trials for size in trial.shard_bytes)
            total += len(self.outages) * (unit + 2 * size * byte_seconds)
        for trial in self.trials:
            loads = sum(trial.shard_bytes[unit.shard] + trial.boundary_bytes for unit in trial.step) * byte_seconds
            reports = trial.steps // trial.report_steps if trial.report_steps else 0
            # All planned steps, even of a pruned trial, at their estimate if that is longer: the remaining times told
            # to the scheduler must fit the grid, too.
            total += trial.steps * (2 * loads + trial.step_seconds * max(1 / slowest, trial.estimate_factor, 1.0))
            total += reports * self.answer_seconds + self.prepare_seconds
        return total


def _check_unique(names: Iterable[str], what: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"names of {what} must differ; {twice[0]!r} is there more than once")


def training_step(forward_seconds: Sequence[float], backward_seconds: Sequence[float]) -> tuple[Unit, ...]:
    """Build one training step of the engine: `F0 .. F(K-2), B(K-1) .. B0`.

    The last shard has no forward unit: its backward begins with the same computation.

    Args:
        forward_seconds: of each shard; the last shard's value is not used.
        backward_seconds: of each shard, with the recomputed forward and the update.

    Returns:
        The units in order.

    Raises:
        ConfigError: the lists are empty, or differ in length.
    """
    if len(forward_seconds) != len(backward_seconds) or not backward_seconds:
        raise ConfigError(
            f"forward and backward seconds must be given for the same shards, at least one; there are "
            f"{len(forward_seconds)} and {len(backward_seconds)}"
        )
    forward = [Unit(kind="forward", shard=shard, seconds=seconds) for shard, seconds in enumerate(forward_seconds[:-1])]
    backward = [Unit(kind="backward", shard=shard, seconds=seconds) for shard, seconds in enumerate(backward_seconds)]
    return (*forward, *reversed(backward))
