"""Where the choice of a policy matters: four settings that are harder than equal devices and known times.

    python benchmarks/settings.py              # some minutes, on one core
    python benchmarks/settings.py --quick      # two seeds, and the first table only

Twelve trials of four shards on four devices, 60 steps each, simulated (`hydra_tune.simulate`); a forward unit takes 1, a
backward unit 2 units of time, times 0.5 to 2 for each trial. Each setting changes one thing, the last one all:

    known times        nothing
    early stopping     a report every 15 steps, of which 1/2, then 1/4, of the trials go on
    unequal devices    speeds 1, 1, 0.5, 0.25
    wrong estimates    the scheduler is told each trial's time times 1/3 to 3, for ever
    transfer costs     a load takes as long as the mean forward unit, and a device holds six shards of the 48
    all four           the sum of these

The bound counts what ran: for early stopping the steps each trial got, for unequal devices the one for these
(`uneven_makespan_bound`). It leaves transfers out, so with transfers it cannot be reached. Makespans over the bound are the
mean of the seeds and, in brackets, the worst; then loads per unit without each shard's first. Everything repeats exactly.

Then the settings of transfers alone: `lrtf` in every setting in which no load takes longer than the shortest unit, and
against `lrtf_paper` wherever the state of all trials fits the devices together.
"""

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from hydra_tune.schedule import POLICIES, RandomChoice, Unit, uneven_makespan_bound
from hydra_tune.simulate import Scenario, SimulatedDevice, SimulatedTrial, SimulationResult, simulate
from hydra_tune.simulate.workload import stop_early

NUM_TRIALS, NUM_DEVICES, NUM_SHARDS, STEPS = 12, 4, 4, 60
REPORT_STEPS, SURVIVAL = 15, (0.5, 0.25)
SPEEDS = (1.0, 1.0, 0.5, 0.25)
ESTIMATE_ERROR = 3.0
LOAD_SECONDS, CAPACITY = 1.0, 6
LIMIT, FEWER = 1.05, 4.0


@dataclass(frozen=True)
class Setting:
    """What makes it hard."""

    name: str
    stops: bool = False
    unequal: bool = False
    misleads: bool = False
    transfers: bool = False


SETTINGS = (
    Setting("known times"),
    Setting("early stopping", stops=True),
    Setting("unequal devices", unequal=True),
    Setting("wrong estimates", misleads=True),
    Setting("transfer costs", transfers=True),
    Setting("all four", stops=True, unequal=True, misleads=True, transfers=True),
)


def step_of(num_shards: int, factor: float) -> tuple[Unit, ...]:
    """Forward units of 1 and backward units of 2, times the factor."""
    forward = [Unit(kind="forward", shard=shard, seconds=factor) for shard in range(num_shards)]
    backward = [Unit(kind="backward", shard=shard, seconds=2 * factor) for shard in range(num_shards)]
    return (*forward, *reversed(backward))


def scenario(setting: Setting, seed: int) -> Scenario:
    """What is simulated for one seed."""
    factors, errors = random.Random(f"{seed}:factors"), random.Random(f"{seed}:errors")
    trials = [
        SimulatedTrial(
            name=f"trial{number}",
            step=step_of(NUM_SHARDS, factors.uniform(0.5, 2.0)),
            shard_bytes=(1,) * NUM_SHARDS,
            steps=STEPS,
            report_steps=REPORT_STEPS,
            estimate_factor=ESTIMATE_ERROR ** errors.uniform(-1, 1) if setting.misleads else 1.0,
        )
        for number in range(NUM_TRIALS)
    ]
    devices = tuple(
        SimulatedDevice(
            name=f"device{number}",
            speed=SPEEDS[number] if setting.unequal else 1.0,
            memory_bytes=CAPACITY if setting.transfers else None,
            bandwidth=1 / LOAD_SECONDS if setting.transfers else None,
        )
        for number in range(NUM_DEVICES)
    )
    return Scenario(trials=stop_early(trials, SURVIVAL if setting.stops else (), seed), devices=devices)


def bound_of(played: Scenario) -> float:
    """No schedule of the units that ran is shorter, transfers left aside."""
    seconds = [trial.steps_run * trial.step_seconds for trial in played.trials]
    return uneven_makespan_bound(seconds, [device.speed for device in played.devices])


def play(played: Scenario, policy: str, seed: int) -> SimulationResult:
    """One simulation."""
    return simulate(played, RandomChoice(seed=seed) if policy == "random" else policy)


def hard_settings(seeds: Sequence[int]) -> Table:
    """One row for each policy, one column for each setting."""
    table = Table(title=f"makespan / bound, mean of {len(seeds)} seeds (worst) / loads per unit beyond the first")
    table.add_column("policy")
    for setting in SETTINGS:
        table.add_column(setting.name, justify="right")
    for policy in POLICIES:
        cells = []
        for setting in SETTINGS:
            scenarios = [scenario(setting, seed) for seed in seeds]
            results = [play(played, policy, seed) for played, seed in zip(scenarios, seeds, strict=True)]
            ratios = [
                result.makespan_seconds / bound_of(played) for result, played in zip(results, scenarios, strict=True)
            ]
            cell = f"{statistics.mean(ratios):.3f} ({max(ratios):.3f})"
            if setting.transfers:
                cell += f" / {statistics.mean(result.reloads_per_unit for result in results):.2f}"
            cells.append(cell)
        table.add_row(policy, *cells)
    return table


@dataclass(frozen=True)
class Loads:
    """A setting of transfers: devices that hold `capacity` shards each, and a load of so many seconds."""

    kind: str
    num_devices: int
    num_trials: int
    num_shards: int
    capacity: int
    load_seconds: float

    @property
    def name(self) -> str:
        """As in the tables of docs/results/scheduling.md."""
        size = f"P{self.num_devices} N{self.num_trials} S{self.num_shards} C{self.capacity}"
        return f"{self.kind}, {size} r{self.load_seconds:g}"

    @property
    def fits(self) -> bool:
        """Whether the devices hold all shards of all trials together."""
        return self.num_devices * self.capacity >= self.num_trials * self.num_shards

    def factors(self, seed: int) -> list[float]:
        """By what each trial's units are multiplied."""
        draw = random.Random(seed)
        if self.kind == "unequal":
            return [draw.uniform(0.5, 2.0) for _ in range(self.num_trials)]
        if self.kind == "equal":
            return [1.0] * self.num_trials
        # One trial is as long as all others on the other devices together: as long as the bound.
        return [2.0] + [2.0 * (self.num_devices - 1) / (self.num_trials - 1)] * (self.num_trials - 1)

    def scenario(self, seed: int) -> Scenario:
        """What is simulated for one seed."""
        trials = tuple(
            SimulatedTrial(
                name=f"trial{number}",
                step=step_of(self.num_shards, factor),
                shard_bytes=(1,) * self.num_shards,
                steps=30,
            )
            for number, factor in enumerate(self.factors(seed))
        )
        device = SimulatedDevice(name="device", memory_bytes=self.capacity, bandwidth=1 / self.load_seconds)
        devices = tuple(replace(device, name=f"device{number}") for number in range(self.num_devices))
        return Scenario(trials=trials, devices=devices)

    def hides(self, seeds: Sequence[int]) -> bool:
        """Whether no load takes longer than the shortest unit."""
        return all(self.load_seconds <= min(self.factors(seed)) for seed in seeds)


SIZES = (
    (2, 4, 4, 4), (2, 4, 4, 8), (2, 3, 4, 8), (2, 8, 4, 8), (4, 8, 8, 16),
    (4, 6, 4, 8), (4, 12, 4, 12), (8, 12, 6, 3), (8, 12, 6, 9), (8, 16, 4, 8),
)  # fmt: skip
KINDS = ("unequal", "equal", "one long")
LOAD_TIMES = (0.25, 0.5, 1.0, 2.0)


def all_loads() -> Iterator[Loads]:
    """Every setting of transfers."""
    for kind in KINDS:
        for size in SIZES:
            for load_seconds in LOAD_TIMES:
                yield Loads(kind, *size, load_seconds)


def transfer_settings(console: Console, seeds: Sequence[int]) -> Table:
    """One row for each setting, and in the last column what does not hold."""
    table = Table(title="makespan / bound (worst seed) / loads per unit beyond the first")
    for column in ("setting", "all fits", "load <= unit", "lrtf_paper", "lrtf", "fewer loads", "missed"):
        table.add_column(column)
    for setting in all_loads():
        with console.status(setting.name):
            paper, ours = (_figures(setting, policy, seeds) for policy in ("lrtf_paper", "lrtf"))
        hides = setting.hides(seeds)
        missed = []
        if hides and ours[0] > LIMIT:
            missed.append(f"makespan > {LIMIT}")
        if setting.fits and paper[2] > 0.3 and FEWER * ours[2] > paper[2]:
            missed.append(f"not {FEWER:g}x fewer loads")
        table.add_row(
            setting.name,
            "yes" if setting.fits else "",
            "yes" if hides else "",
            *[f"{mean:.3f} ({worst:.3f}) / {reloads:.3f}" for mean, worst, reloads in (paper, ours)],
            f"{paper[2] / ours[2]:.1f}x" if ours[2] else "",
            ", ".join(missed),
        )
    return table


def _figures(setting: Loads, policy: str, seeds: Sequence[int]) -> tuple[float, float, float]:
    drawn = seeds if setting.kind == "unequal" else seeds[:1]  # the others do not depend on the seed
    results = [simulate(setting.scenario(seed), policy) for seed in drawn]
    ratios = [result.makespan_seconds / (result.bound_seconds or 1.0) for result in results]
    return statistics.mean(ratios), max(ratios), statistics.mean(result.reloads_per_unit for result in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds, and the first table only")
    parser.add_argument("--seeds", type=int, default=8, help="of the first table")
    options = parser.parse_args()
    console = Console(width=160)
    console.print(hard_settings(range(2 if options.quick else options.seeds)))
    if not options.quick:
        console.print(transfer_settings(console, range(3)))


if __name__ == "__main__":
    main()
