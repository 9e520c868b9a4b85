"""How good schedules are, in simulation: against the bound, the optimum and each other.

    python benchmarks/schedule.py              # minutes, on one core
    python benchmarks/schedule.py --quick      # one set of models of each kind, CP-SAT for a few seconds: indicative

HYDRA's other figures, in which bytes move, are in `hydra_figures.py`.

HYDRA's Figure 6. The paper gives, for one epoch: homogeneous models of 2 hours and 2,000 shard units each; heterogeneous
ones of 30 minutes to 4 hours and 100 to 10,000 units; equal devices; no transfers, since double buffering hides them.
It does not give the following, which are assumptions: 8 devices; 8 to 24 models; runtimes and numbers of units drawn
evenly from their ranges, independently; units of a heterogeneous model between 0.5 and 1.5 of their mean. Its "optimal" is
a MILP that Gurobi is given 100 s for, here it is CP-SAT, started from a longest-remaining-time-first schedule.

Every policy drives the pool's own `Scheduler`. Figures are makespans over the bound of the same models (McNaughton), the
mean of several sets of models; in brackets the worst. Everything but CP-SAT, which stops by the clock, repeats exactly.
"""

import argparse
import heapq
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baselines import longest_first_makespan
from hydra_plots import lines
from rich.console import Console
from rich.table import Table

from hydra_tune.schedule import (
    POLICIES,
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
    Unit,
    UnitFinished,
    make_policy,
    makespan_bound,
)
from hydra_tune.simulate.optimal import optimal_schedule

NUM_DEVICES = 8
NUM_MODELS = (8, 12, 16, 20, 24)
HOUR = 3600.0

Models = Mapping[str, Sequence[float]]
"""For each model, the seconds of its units."""


def homogeneous(num_models: int) -> Models:
    """2 hours and 2,000 units each."""
    return {f"model{index}": [2 * HOUR / 2000] * 2000 for index in range(num_models)}


def heterogeneous(num_models: int, seed: int) -> Models:
    """30 minutes to 4 hours and 100 to 10,000 units each."""
    rng = random.Random(f"figure 6, {num_models} models, set {seed}")
    models = {}
    for index in range(num_models):
        seconds, num_units = rng.uniform(0.5 * HOUR, 4 * HOUR), rng.randint(100, 10_000)
        shares = [rng.uniform(0.5, 1.5) for _ in range(num_units)]
        unit = seconds / math.fsum(shares)
        models[f"model{index}"] = [share * unit for share in shares]
    return models


@dataclass
class Clock:
    """Drives a scheduler through models whose units need no transfers, from the end of one unit to the next."""

    scheduler: Scheduler
    models: Models

    def __post_init__(self) -> None:
        self.now = 0.0
        self._num_done = dict.fromkeys(self.models, 0)
        # What is left before each unit, by the same sums on every run.
        self._left = {model: [*itertools.accumulate(reversed(seconds))][::-1] for model, seconds in self.models.items()}
        self._units = {
            model: [Unit(kind="forward", shard=0, seconds=unit) for unit in seconds]
            for model, seconds in self.models.items()
        }
        self._ends: list[tuple[float, int, Run]] = []
        self._started = itertools.count()

    def run(self, num_devices: int) -> float:
        """The makespan in seconds."""
        devices = [DeviceAdded(device=f"device{index}") for index in range(num_devices)]
        self._tell(*devices, *[JobSubmitted(job=model) for model in self.models])
        while self._ends:
            self.now = self._ends[0][0]
            self._tell(*self._ended())
        return self.now

    def _ended(self) -> Iterator[Event]:
        """What happened at this moment: all of it, before anything is decided."""
        while self._ends and self._ends[0][0] == self.now:
            run = heapq.heappop(self._ends)[2]
            self._num_done[run.job] += 1
            units, done = self._units[run.job], self._num_done[run.job]
            over = done == len(units)
            yield UnitFinished(
                job=run.job,
                device=run.device,
                seconds=run.unit.seconds,
                unit=None if over else units[done],
                remaining_seconds=0.0 if over else self._left[run.job][done],
            )
            if over:
                yield JobStopped(job=run.job)

    def _tell(self, *events: Event) -> None:
        commands: list[Command] = self.scheduler.handle(*events)
        for command in commands:
            if isinstance(command, Run):
                heapq.heappush(self._ends, (self.now + command.unit.seconds, next(self._started), command))
        admitted = [command.job for command in commands if isinstance(command, Admit)]
        if admitted:
            self._tell(
                *[
                    JobAdmitted(job=job, unit=self._units[job][0], remaining_seconds=self._left[job][0])
                    for job in admitted
                ]
            )


def makespan(models: Models, num_devices: int, policy: Policy) -> float:
    scheduler = Scheduler(policy=policy, max_concurrent=len(models))
    return Clock(scheduler, models).run(num_devices)


@dataclass(frozen=True)
class Column:
    """One number of models of one kind: a value for each set of models that was drawn."""

    num_models: int
    units: list[int]
    bounds: list[float]
    gaps: list[float]
    ratios: dict[str, list[float]]
    """For each contender, its makespans over the bound."""


def measure(sets: Sequence[Models], time_limit_seconds: float) -> Column:
    column = Column(len(sets[0]), [], [], [], {})
    for models in sets:
        totals = [math.fsum(seconds) for seconds in models.values()]
        bound = makespan_bound(totals, NUM_DEVICES)
        best = optimal_schedule(models, NUM_DEVICES, time_limit_seconds=time_limit_seconds)
        makespans = {"CP-SAT": best.makespan_seconds}
        makespans |= {name: makespan(models, NUM_DEVICES, make_policy(name)) for name in POLICIES}
        makespans["whole trials, longest first"] = longest_first_makespan(totals, NUM_DEVICES)
        column.units.append(sum(map(len, models.values())))
        column.bounds.append(bound)
        column.gaps.append(best.gap)
        for name, seconds in makespans.items():
            column.ratios.setdefault(name, []).append(seconds / bound)
    return column


def table_of(kind: str, columns: Sequence[Column]) -> Table:
    table = Table(title=f"HYDRA's Figure 6, {kind}: makespan / bound on {NUM_DEVICES} devices, mean (worst)")
    table.add_column("models")
    for column in columns:
        table.add_column(str(column.num_models), justify="right")
    table.add_row("shard units", *[f"{statistics.mean(column.units):,.0f}" for column in columns])
    table.add_row("bound, hours", *[f"{statistics.mean(column.bounds) / HOUR:.2f}" for column in columns])
    table.add_row("gap of CP-SAT, worst", *[f"{max(column.gaps):.4%}" for column in columns], end_section=True)
    for name in columns[0].ratios:
        cells = [column.ratios[name] for column in columns]
        table.add_row(name, *[f"{statistics.mean(ratios):.4f} ({max(ratios):.4f})" for ratios in cells])
    return table


def plot(path: Path, kinds: Mapping[str, Sequence[Column]]) -> None:
    panels = {
        f"{kind} models: makespan / bound, {NUM_DEVICES} devices": (
            [column.num_models for column in columns],
            {name: [statistics.mean(column.ratios[name]) for column in columns] for name in columns[0].ratios},
        )
        for kind, columns in kinds.items()
    }
    lines(path, panels, x_label="models", from_zero=False)


def figure_6(console: Console, num_sets: int, time_limit_seconds: float, picture: Path | None) -> None:
    with console.status("HYDRA's Figure 6"):
        same = [measure([homogeneous(count)], time_limit_seconds) for count in NUM_MODELS]
    console.print(table_of("homogeneous", same))
    with console.status("HYDRA's Figure 6"):
        differing = [
            measure([heterogeneous(count, seed) for seed in range(num_sets)], time_limit_seconds)
            for count in NUM_MODELS
        ]
    console.print(table_of("heterogeneous", differing))
    if picture is not None:
        plot(picture, {"homogeneous": same, "heterogeneous": differing})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one set of models of each kind, CP-SAT for 5 s each")
    parser.add_argument("--sets", type=int, default=3, help="sets of heterogeneous models; 3, as in the paper")
    parser.add_argument(
        "--time-limit", type=float, default=15.0, help="seconds of CP-SAT for each set; the paper's is 100"
    )
    parser.add_argument("--plot", type=Path, help="a PNG file to draw the figure in")
    options = parser.parse_args()
    console = Console()
    if options.quick:
        options.sets, options.time_limit = 1, 5.0
    figure_6(console, options.sets, options.time_limit, options.plot)


if __name__ == "__main__":
    main()
