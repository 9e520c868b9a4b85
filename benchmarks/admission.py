"""What staggered admission costs the end of a sweep, what it brings forward, and what pruners save by it, in simulation.

    python benchmarks/admission.py              # a minute, on one core
    python benchmarks/admission.py --quick      # two seeds, fewer steps
    python benchmarks/admission.py --search     # the default pruner over a table of learning curves; half a minute

Without `--search`: trials of four shards on eight devices, 100 steps, all admitted at once, under `lrtf`; forward units of
0.1, backward units of 0.2. Unequal trials take 0.5 to 2 times that, drawn. In the rows with transfers a shard has 1 GiB,
a device holds four of them and is sent 12 GB/s, so that a load takes 0.09. Eager or staggered: makespans over the bound,
which leaves transfers out, the mean of the seeds and, in brackets, the worst; when half of the trials had ended, over the
makespan of the eager run; loads per unit without each shard's first. Everything repeats exactly.

With `--search`: Optuna's own `MedianPruner` decides over learning curves, floor + a * epoch ** -b + noise, which cross.
Trials are 20 epochs long and not cut; the scheduler is the pool's, and the driver's part is played: two trials in
flight for each device, the next one asked for when one is over. Beside eager and staggered, `auto` is what
`choose_admission` chooses. Columns: epochs saved, as a share of what the same search saves at width 1; makespan over
the eager run's, the mean of the seeds and the worst; areas under the best value over time, over the eager run's, of
completed trials (`study.best_value`; 1 before there is any) and of all reports. Fused trials advance in groups of 16, one
on each CPU device, where a step of m of them takes 0.1 + 0.9 * m / 16 of the step of 16.
"""

import argparse
import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from optuna.pruners import MedianPruner
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from hydra_tune.schedule import (
    ADMISSIONS,
    Admit,
    DeviceAdded,
    Event,
    JobAdmitted,
    JobResumed,
    JobStopped,
    JobSubmitted,
    Run,
    Scheduler,
    Unit,
    UnitFinished,
    make_policy,
)
from hydra_tune.simulate import Scenario, SimulationResult, simulate
from hydra_tune.simulate.workload import RandomWorkload, equal_devices
from hydra_tune_optuna.search.pruner_checks import AdmissionChoice, choose_admission

NUM_DEVICES = 8
NUM_TRIALS = (12, 16, 20, 24)
KINDS = {"equal": (1.0, False), "unequal": (2.0, False), "unequal, transfers": (2.0, True)}
SHARD_BYTES, SHARDS_HELD, BANDWIDTH = 2**30, 4, 12e9
FIXED = ADMISSIONS[1:]  # without a pruner "auto" is eager

EPOCHS, PARTS, GROUP = 20, 2, 16  # an epoch is two units long
BASE = 0.1  # share of a stack's step that does not depend on its size
Curves = Sequence[Sequence[float]]


def scenario(num_trials: int, seed: int, admission: str, steps: int, spread: float, transfers: bool) -> Scenario:
    shard_bytes = SHARD_BYTES if transfers else 0
    workload = RandomWorkload(num_trials=num_trials, steps=steps, spread=spread, shard_bytes=shard_bytes)
    devices = equal_devices(NUM_DEVICES, memory_bytes=SHARDS_HELD * SHARD_BYTES, bandwidth=BANDWIDTH)
    return Scenario(trials=workload.trials(seed), devices=devices, admission=admission)


def _over_the_bound(result: SimulationResult) -> float:
    assert result.bound_seconds is not None
    return result.makespan_seconds / result.bound_seconds


def _row(name: str, pairs: Sequence[Sequence[SimulationResult]]) -> list[str]:
    """One row; of each seed the results under every admission."""
    ratios = [[_over_the_bound(result) for result in results] for results in zip(*pairs, strict=True)]
    halves = [
        [
            statistics.median_high(result.finished_seconds.values()) / pair[0].makespan_seconds
            for result, pair in zip(results, pairs, strict=True)
        ]
        for results in zip(*pairs, strict=True)
    ]
    moves = any(result.bytes_moved for pair in pairs for result in pair)
    loads = [[result.reloads_per_unit for result in results] for results in zip(*pairs, strict=True)]
    return [
        name,
        *[f"{statistics.mean(row):.3f} ({max(row):.3f})" for row in ratios],
        *[f"{statistics.mean(row):.2f}" for row in halves],
        *[f"{statistics.mean(row):.2f}" if moves else "" for row in loads],
    ]


def ends(num_seeds: int, steps: int) -> Table:
    """The table without a pruner."""
    table = Table(title=f"admission on {NUM_DEVICES} devices, mean of {num_seeds} seeds (worst)")
    table.add_column("trials")
    for what in ("makespan / bound", "half had ended", "reloads a unit"):
        for admission in FIXED:
            table.add_column(f"{what}, {admission}", justify="right")
    for kind, (spread, transfers) in KINDS.items():
        for count in NUM_TRIALS:
            pairs = [
                [simulate(scenario(count, seed, admission, steps, spread, transfers)) for admission in FIXED]
                for seed in range(num_seeds)
            ]
            table.add_row(*_row(f"{count} {kind}", pairs), end_section=count == NUM_TRIALS[-1])
    return table


# A search with a pruner.


def curves(count: int, seed: int) -> Curves:
    """Learning curves of that many trials; lower is better."""
    draw = random.Random(seed)
    shapes = [(draw.uniform(0.05, 0.5), draw.uniform(0.3, 0.6), draw.uniform(0.3, 1.2)) for _ in range(count)]
    return [[floor + a * epoch**-b + draw.gauss(0, 0.02) for epoch in range(1, EPOCHS + 1)] for floor, a, b in shapes]


@dataclass
class Search:
    """Trials in flight, Optuna's pruner, and what came of it. Stands in for a study where the pruner asks one."""

    curves: Curves
    width: int
    now: float = 0.0
    num_asked: int = 0
    epochs_run: int = 0
    in_flight: dict[int, FrozenTrial] = field(default_factory=dict)
    parts: dict[int, int] = field(default_factory=dict)
    completed: list[FrozenTrial] = field(default_factory=list)
    reports: list[tuple[float, float]] = field(default_factory=list)
    ends: list[tuple[float, float]] = field(default_factory=list)
    pruner: MedianPruner = field(default_factory=MedianPruner)
    direction = StudyDirection.MINIMIZE
    directions = (StudyDirection.MINIMIZE,)

    def get_trials(self, **_: Any) -> list[FrozenTrial]:
        """The completed trials, for which alone the median asks."""
        return self.completed

    def ask(self) -> Iterator[int]:
        """New trials, as many as there is room for."""
        while self.num_asked < len(self.curves) and len(self.in_flight) < self.width:
            number, self.num_asked = self.num_asked, self.num_asked + 1
            self.in_flight[number] = FrozenTrial(
                number=number,
                state=TrialState.RUNNING,
                value=None,
                datetime_start=None,
                datetime_complete=None,
                params={},
                distributions={},
                user_attrs={},
                system_attrs={},
                intermediate_values={},
                trial_id=number,
            )
            self.parts[number] = 0
            yield number

    def seconds_left(self, number: int) -> float:
        """On a device of its own."""
        return (EPOCHS * PARTS - self.parts[number]) / PARTS

    def advance(self, number: int) -> bool | None:
        """Half an epoch; whether the trial goes on after its report, or None without a report."""
        self.parts[number] += 1
        epoch, part = divmod(self.parts[number], PARTS)
        if part:
            return None
        trial, value = self.in_flight[number], self.curves[number][epoch - 1]
        self.epochs_run += 1
        trial.intermediate_values[epoch - 1] = value
        self.reports.append((self.now, value))
        if self.judged(number):
            return False
        if epoch < EPOCHS:
            return True
        self.completed.append(self.in_flight.pop(number))
        self.ends.append((self.now, value))
        return False

    def judged(self, number: int) -> bool:
        """Whether the pruner ends the trial."""
        is_pruned = self.pruner.prune(self, self.in_flight[number])  # type: ignore[arg-type]
        if is_pruned:
            del self.in_flight[number]
        return is_pruned

    @property
    def epochs_saved(self) -> int:
        """Of all that were planned."""
        return len(self.curves) * EPOCHS - self.epochs_run


class Alone:
    """Plays a search whose trials run alone, by the pool's scheduler."""

    def __init__(self, table: Curves, num_devices: int, width: int, admission: str) -> None:
        self.search = Search(table, width)
        names = tuple(f"cpu:{index}" for index in range(num_devices))
        executor: Any = SimpleNamespace(admission=admission, device_names=names, fusion_size=0)
        self.choice: AdmissionChoice = choose_admission(self.search, executor, n_trials=len(table))  # type: ignore[arg-type]
        self.scheduler = Scheduler(policy=make_policy("lrtf"), max_concurrent=width, admission=admission)
        self.unit = Unit(kind="step", shard=0, seconds=1 / PARTS)
        self.running: list[tuple[float, int, Run]] = []
        self.order = itertools.count()
        self.held: dict[int, int] = {}  # the step of the report that waits
        self._tell(*[DeviceAdded(device=name) for name in names])
        self._ask()
        while self.running:
            self.search.now, _, run = heapq.heappop(self.running)
            self._end(run)

    def _ask(self) -> None:
        staggered_from = self.choice.staggered_from
        events = [
            JobSubmitted(job=str(number), staggered=staggered_from is not None and number >= staggered_from)
            for number in self.search.ask()
        ]
        if events:
            self._tell(*events)

    def _tell(self, *events: Event) -> None:
        admitted = []
        for command in self.scheduler.handle(*events):
            if isinstance(command, Admit):
                left = self.search.seconds_left(int(command.job))
                step = self.unit.seconds
                admitted.append(JobAdmitted(job=command.job, unit=self.unit, remaining_seconds=left, step_seconds=step))
            elif isinstance(command, Run):
                entry = (self.search.now + command.unit.seconds, next(self.order), command)
                heapq.heappush(self.running, entry)
        if admitted:
            self._tell(*admitted)

    def _end(self, run: Run) -> None:
        search, number = self.search, int(run.job)
        goes_on = search.advance(number)
        waits = goes_on is True and self._is_held(number, search.parts[number] // PARTS - 1)
        done = UnitFinished(
            job=run.job,
            device=run.device,
            seconds=self.unit.seconds,
            unit=None if waits or goes_on is False else self.unit,
            remaining_seconds=search.seconds_left(number),
        )
        if goes_on is False:
            self._tell(done, JobStopped(job=run.job))
            self._ask()
            self._release()
        else:
            if waits:
                self.held[number] = search.parts[number] // PARTS - 1
            self._tell(done)

    def _is_held(self, number: int, step: int) -> bool:
        rule = self.choice.rule
        return rule is not None and rule.holds(number, step, self.search.in_flight, len(self.search.completed))

    def _release(self) -> None:
        for number, step in list(self.held.items()):
            if self._is_held(number, step):
                continue
            del self.held[number]
            if self.search.judged(number):
                self._tell(JobStopped(job=str(number)))
                self._ask()
            else:
                left = self.search.seconds_left(number)
                self._tell(JobResumed(job=str(number), unit=self.unit, remaining_seconds=left))


class Fused:
    """Plays a search whose trials are fused: a group on each device, and new members in vacant slots."""

    def __init__(self, table: Curves, num_devices: int, admission: str) -> None:
        width = num_devices * GROUP
        self.search = search = Search(table, width)
        names = tuple(f"cpu:{index}" for index in range(num_devices))
        executor: Any = SimpleNamespace(admission=admission, device_names=names, fusion_size=GROUP, width=width)
        choice = choose_admission(search, executor, n_trials=len(table))  # type: ignore[arg-type]
        groups: list[list[int]] = [[] for _ in range(num_devices)]
        running: list[tuple[float, int, list[int]]] = []  # the end of half an epoch, the group, and its members
        while True:
            size = GROUP
            if choice.first_wave is not None and choice.rule is not None and choice.first_groups is not None:
                is_first = len(search.completed) < choice.rule.needed
                first_width = choice.first_wave - len(search.completed)
                search.width, size = (first_width, choice.first_groups) if is_first else (width, GROUP)
            for number in search.ask():
                next(group for group in groups if len(group) < size).append(number)
            busy = {index for _, index, _ in running}
            for index, group in enumerate(groups):
                if group and index not in busy:
                    heapq.heappush(running, (search.now + self.seconds(len(group)), index, list(group)))
            if not running:
                return
            search.now, index, members = heapq.heappop(running)
            for number in members:
                if search.advance(number) is False:
                    groups[index].remove(number)

    @staticmethod
    def seconds(members: int) -> float:
        """Half an epoch of a stack, whose size is a power of two."""
        stack = 2 ** math.ceil(math.log2(members))
        return (BASE + (1 - BASE) * stack / GROUP) / PARTS


def _area(points: Sequence[tuple[float, float]], until: float) -> float:
    total, best, since = 0.0, 1.0, 0.0
    for time, value in points:
        if value < best:
            total, best, since = total + (time - since) * best, value, time
    return total + (until - since) * best


def _compared(name: str, seeds: Sequence[tuple[Search, Search, Search]]) -> list[str]:
    """One row; of each seed the search at width 1, the eager one, and the one shown."""
    saved = sum(shown.epochs_saved for _, _, shown in seeds) / sum(one.epochs_saved for one, _, _ in seeds)
    spans = [shown.now / eager.now for _, eager, shown in seeds]

    def areas(points: Callable[[Search], Sequence[tuple[float, float]]]) -> float:
        ratios = []
        for _, eager, shown in seeds:
            until = max(eager.now, shown.now)
            ratios.append(_area(points(shown), until) / _area(points(eager), until))
        return statistics.mean(ratios)

    return [
        name,
        f"{saved:.2f}",
        f"{statistics.mean(spans):.2f} ({max(spans):.2f})",
        f"{areas(lambda search: search.ends):.2f}",
        f"{areas(lambda search: search.reports):.2f}",
    ]


def searches(num_seeds: int, devices: Sequence[int]) -> Table:
    """The table with a pruner."""
    rows = Table(title=f"MedianPruner over {EPOCHS} epochs, {num_seeds} seeds")
    for column in ("trials, devices, admission", "saved", "makespan (worst)", "best value", "best report"):
        rows.add_column(column, justify="right" if rows.columns else "left")
    for count in (16, 32, 64, 128):
        tables = [curves(count, seed) for seed in range(num_seeds)]
        one = [Alone(table, 1, 1, "eager").search for table in tables]
        for num_devices in devices:
            eager = [Alone(table, num_devices, 2 * num_devices, "eager").search for table in tables]
            for admission in ("eager", "staggered", "auto"):
                shown = [Alone(table, num_devices, 2 * num_devices, admission).search for table in tables]
                name = f"{count}, {num_devices}, {admission}"
                rows.add_row(*_compared(name, list(zip(one, eager, shown, strict=True))))
        for num_devices in (1, *devices) if count > GROUP else ():
            eager = [Fused(table, num_devices, "eager").search for table in tables]
            for admission in ("eager", "auto"):
                shown = [Fused(table, num_devices, admission).search for table in tables]
                name = f"{count}, {num_devices} fused, {admission}"
                rows.add_row(*_compared(name, list(zip(one, eager, shown, strict=True))))
        rows.add_section()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds and a tenth of the steps")
    parser.add_argument("--seeds", type=int, default=8, help="sets of trials for each row")
    parser.add_argument("--search", action="store_true", help="with a pruner, over learning curves")
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 8], help="numbers of devices with --search")
    options = parser.parse_args()
    num_seeds, steps = (2, 10) if options.quick else (options.seeds, 100)
    Console().print(searches(num_seeds, options.devices) if options.search else ends(num_seeds, steps))


if __name__ == "__main__":
    main()
