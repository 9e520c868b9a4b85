"""Random workloads: trials and devices from a few numbers, reproducible by a seed.

`hydra-tune simulate` (`cli/commands/simulate.py`) makes a `RandomWorkload` before the simulation, if neither PROFILE nor
`--replay` is given, and makes the devices by `equal_devices`. The command prunes these trials, or those of PROFILE, by
`stop_early` (`--survival`). `benchmarks/admission.py` and others make trials and devices here, too. The same seed gives the
same trials. The module must not import the pool, torch or numpy.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydra_tune.errors import ConfigError
from hydra_tune.simulate.model import SimulatedDevice, SimulatedTrial, check_size, training_step


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWorkload:
    """Trials of one kind.

    Args:
        num_trials: number of trials.
        num_shards: shards of each trial.
        steps: training steps of an epoch.
        epochs: epochs; each ends with a report.
        forward_seconds, backward_seconds: of each shard.
        shard_bytes: of each shard.
        spread: each trial's seconds are multiplied by a factor drawn between 1 / spread and spread; 1: all are equal.
        arrival_gap_seconds: mean time between arrivals (exponential); 0: all at once.
        estimate_error: the scheduler's estimate of each trial's time is multiplied by a factor drawn between 1 / x and
            x.
        burst_seconds: seconds of steps that run as one unit, for trials of one shard that fit their devices and run
            their own code. 0: each step is a unit.

    Raises:
        ConfigError: a number out of its range, or bursts of trials with several shards.
    """

    num_trials: int
    num_shards: int = 4
    steps: int = 100
    epochs: int = 1
    forward_seconds: float = 0.1
    backward_seconds: float = 0.2
    shard_bytes: int = 0
    spread: float = 1.0
    arrival_gap_seconds: float = 0.0
    estimate_error: float = 1.0
    burst_seconds: float = 0.0

    def __post_init__(self) -> None:
        for field_name in ("num_trials", "num_shards", "steps", "epochs"):
            if getattr(self, field_name) < 1:
                raise ConfigError(f"{field_name} must be at least 1, not {getattr(self, field_name)}")
        check_size(self.num_trials * self.num_shards, "shards of all trials together")
        for field_name in ("forward_seconds", "backward_seconds"):
            if not 0 < getattr(self, field_name) < math.inf:
                raise ConfigError(f"{field_name} must be a finite number > 0, not {getattr(self, field_name)!r}")
        for field_name in ("spread", "estimate_error"):
            if not 1 <= getattr(self, field_name) < math.inf:
                raise ConfigError(f"{field_name} must be a finite number >= 1, not {getattr(self, field_name)!r}")
        for field_name in ("arrival_gap_seconds", "burst_seconds"):
            if not 0 <= getattr(self, field_name) < math.inf:
                raise ConfigError(f"{field_name} must be a finite number >= 0, not {getattr(self, field_name)!r}")
        if self.burst_seconds and self.num_shards > 1:
            raise ConfigError(
                f"trials of {self.num_shards} shards run no bursts; give num_shards=1, or no burst_seconds"
            )

    def trials(self, seed: int) -> tuple[SimulatedTrial, ...]:
        """Draw the trials."""
        # A stream for each purpose: a change of one spread leaves the other draws the same.
        random_factors, arrivals, errors = (
            random.Random(f"{seed}:{purpose}")  # noqa: S311
            for purpose in ("spread", "arrival", "error")
        )
        arrival, trials = 0.0, []
        for number in range(self.num_trials):
            factor = _draw(random_factors, self.spread)
            trials.append(
                SimulatedTrial(
                    name=f"trial{number}",
                    step=training_step(
                        [self.forward_seconds * factor] * self.num_shards,
                        [self.backward_seconds * factor] * self.num_shards,
                    ),
                    shard_bytes=(self.shard_bytes,) * self.num_shards,
                    steps=self.steps * self.epochs,
                    report_steps=self.steps,
                    arrival_seconds=arrival,
                    estimate_factor=_draw(errors, self.estimate_error),
                    # Bursts need trials of one shard, whose step is a backward alone (`training_step`).
                    burst_steps=max(1, int(self.burst_seconds / (self.backward_seconds * factor))),
                )
            )
            if self.arrival_gap_seconds:
                arrival += arrivals.expovariate(1 / self.arrival_gap_seconds)
        return tuple(trials)


def _draw(generator: random.Random, spread: float) -> float:
    # Uniform in the exponent, so that a factor is as likely as its reciprocal.
    return spread ** generator.uniform(-1, 1) if spread > 1 else 1.0


def stop_early(trials: Sequence[SimulatedTrial], survival: Sequence[float], seed: int) -> tuple[SimulatedTrial, ...]:
    """Prune trials along an early-stopping curve.

    Args:
        trials: only trials with `report_steps` may be pruned.
        survival: after each report, from the first, the share of the trials that continues; between 0 and 1, and never
            rising. After the last share no trial is pruned.
        seed: decides which trials are pruned.

    Returns:
        The same trials; a pruned trial has the report of its end.

    Raises:
        ConfigError: a share that is not between 0 and 1, or larger than the share before.
    """
    before = 1.0
    for share in survival:
        if not 0 <= share <= before:
            raise ConfigError(f"survival must be shares that fall from 1 to 0, not {', '.join(map(str, survival))}")
        before = share
    # One order for all reports, so that shares that fall leave a pruned trial pruned.
    order = list(range(len(trials)))
    random.Random(f"{seed}:survival").shuffle(order)  # noqa: S311
    stops: dict[int, int] = {}
    for report, share in enumerate(survival, start=1):
        num_continuing = max(0, round(share * len(trials)))
        for number in order[num_continuing:]:
            # Later reports find the trial beyond their share, too; the first report ends it.
            stops.setdefault(number, report)
    return tuple(
        replace(trial, stop_after_reports=stops[number]) if number in stops and trial.report_steps else trial
        for number, trial in enumerate(trials)
    )


def equal_devices(
    num_devices: int,
    *,
    memory_bytes: int | None = None,
    bandwidth: float | None = None,
    num_nodes: int = 1,
    speeds: Sequence[float] = (1.0,),
) -> tuple[SimulatedDevice, ...]:
    """Make devices that differ in name, speed and node alone, spread over nodes in parts as equal as possible.

    Args:
        num_devices: number of devices.
        memory_bytes: of each.
        bandwidth: of each, in bytes a second.
        num_nodes: number of machines.
        speeds: speeds, assigned in turn.

    Raises:
        ConfigError: no device, more nodes than devices, or too many devices.
    """
    if num_devices < 1 or not 1 <= num_nodes <= num_devices:
        raise ConfigError(
            f"there must be at least 1 device and at most one node for each; not {num_devices} devices on "
            f"{num_nodes} nodes"
        )
    check_size(num_devices, "devices")
    return tuple(
        SimulatedDevice(
            name=f"device{number}",
            speed=speeds[number % len(speeds)],
            memory_bytes=memory_bytes,
            bandwidth=bandwidth,
            node=f"node{number * num_nodes // num_devices}",
        )
        for number in range(num_devices)
    )
