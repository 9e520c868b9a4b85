"""What staggered admission costs the end of a sweep, and what it brings forward, in simulation.

    python benchmarks/admission.py              # a minute, on one core
    python benchmarks/admission.py --quick      # two seeds, fewer steps

Trials of four shards on eight devices, 100 steps, all admitted at once, under `lrtf`; forward units of 0.1, backward units
of 0.2. Unequal trials take 0.5 to 2 times that, drawn. In the rows with transfers a shard has 1 GiB, a device holds four of
them and is sent 12 GB/s, so that a load takes 0.09. Eager or staggered: makespans over the bound, which leaves transfers
out, the mean of the seeds and, in brackets, the worst; when half of the trials had ended, over the makespan of the eager
run; loads per unit without each shard's first. Everything repeats exactly.
"""

import argparse
import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from hydra_tune.schedule import ADMISSIONS
from hydra_tune.simulate import Scenario, SimulationResult, simulate
from hydra_tune.simulate.workload import RandomWorkload, equal_devices

NUM_DEVICES = 8
NUM_TRIALS = (12, 16, 20, 24)
KINDS = {"equal": (1.0, False), "unequal": (2.0, False), "unequal, transfers": (2.0, True)}
SHARD_BYTES, SHARDS_HELD, BANDWIDTH = 2**30, 4, 12e9


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds and a tenth of the steps")
    parser.add_argument("--seeds", type=int, default=8, help="sets of trials for each row")
    options = parser.parse_args()
    num_seeds, steps = (2, 10) if options.quick else (options.seeds, 100)
    table = Table(title=f"admission on {NUM_DEVICES} devices, mean of {num_seeds} seeds (worst)")
    table.add_column("trials")
    for what in ("makespan / bound", "half had ended", "reloads a unit"):
        for admission in ADMISSIONS:
            table.add_column(f"{what}, {admission}", justify="right")
    for kind, (spread, transfers) in KINDS.items():
        for count in NUM_TRIALS:
            pairs = [
                [simulate(scenario(count, seed, admission, steps, spread, transfers)) for admission in ADMISSIONS]
                for seed in range(num_seeds)
            ]
            table.add_row(*_row(f"{count} {kind}", pairs), end_section=count == NUM_TRIALS[-1])
    Console().print(table)


if __name__ == "__main__":
    main()
