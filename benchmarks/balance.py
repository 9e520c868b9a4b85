"""Whether equal devices are loaded equally: peak bytes and bytes moved, device by device.

    python benchmarks/balance.py
    python benchmarks/balance.py --devices 4 --rounds 3
    python benchmarks/balance.py --steps 60

Harmony (Li et al.), Figure 2, shows a pipeline whose first stages swap several times as much as its last ones. Here eight
equal trials share equal CPU devices: a model of eight equal layers in four shards with AdamW, 12 steps each or as many as are
asked for. *fits*: there is room for the state of all trials. *most*: for three quarters of it. *tight*: for one trial's and a
fourth of it.

The last rows are of one trial of four batches a step, split over the devices, pipelined and data-parallel: what Harmony's
figure is about.

Shown are the least and the most of any device, and by how much the most is above the least. Bytes moved are those to and from
the host, and those taken over from other devices, counted where they come to. Counts, not times; but which device runs which
unit depends on times. Exits with 1 if peaks or bytes moved of the eight trials differ by more than 10%.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from hydra_tune import HydraExecutor, TrainTask  # noqa: E402 - the package needs the path above
from hydra_tune.pool.stats import DeviceStats  # noqa: E402
from hydra_tune.train.parallel.cost_model import DATA_PARALLEL, PIPELINED  # noqa: E402

WIDTH, LAYERS, SHARDS, TRIALS, STEPS = 96, 8, 4, 8, 12
STATE_BYTES = 3 * 4 * LAYERS * (WIDTH * WIDTH + WIDTH)  # of one trial: parameters, and two moments of each
MOST = 0.10
PARALLEL = {None: "auto", DATA_PARALLEL: "data", PIPELINED: "pipeline"}


def task(seed: int, batches: int = 1, steps: int = STEPS) -> TrainTask:
    """One trial; each step is an epoch."""
    inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(5))
    return TrainTask(
        model=lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]),
        optimizer=torch.optim.AdamW,
        loss=functional.mse_loss,
        train=TensorDataset(inputs, inputs),
        batch_size=16 // batches,
        accumulate=batches,
        epochs=steps,
        seed=seed,
    )


def run(
    tasks: Sequence[TrainTask], num_devices: int, memory: int | None, shards: int, way: str | None = None
) -> list[DeviceStats]:
    """Train; returns what each device has done."""
    executor = HydraExecutor(f"cpu:{num_devices}", memory, num_shards=shards, max_concurrent=len(tasks))
    with executor as pool:
        for result in pool.run([replace(task, parallel=PARALLEL[way]) for task in tasks]):
            if result.error is not None:
                raise result.error
        return list(pool.stats().devices.values())


def moved(device: DeviceStats) -> int:
    """All bytes that a device's copies have brought and taken."""
    return device.bytes_in + device.bytes_out + device.bytes_across


def difference(figures: Sequence[int]) -> float:
    """By how much the largest is above the smallest."""
    return max(figures) / max(1, min(figures)) - 1


def main() -> int:
    """Print the table; 0 if the eight trials are balanced."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="runs of each; the median difference is shown")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each of the eight trials")
    options = parser.parse_args()
    each = STATE_BYTES * TRIALS // options.devices
    eight = [task(seed, steps=options.steps) for seed in range(TRIALS)]
    settings = {
        "fits": (eight, 2 * each, SHARDS, None),
        "most": (eight, 3 * each // 4, SHARDS, None),
        "tight": (eight, 5 * STATE_BYTES // 4, SHARDS, None),
        "one trial, pipelined": ([task(0, 4)], 5 * STATE_BYTES // 4, LAYERS, PIPELINED),
        "one trial, data-parallel": ([task(0, 4)], 5 * STATE_BYTES // 4, LAYERS, DATA_PARALLEL),
    }
    table = Table("", "peak, KiB", "differs by", "moved, KiB", "differs by", "units", "differs by")
    missed = 0
    for name, (tasks, memory, shards, way) in settings.items():
        rounds = [run(tasks, options.devices, memory, shards, way) for _ in range(options.rounds)]
        row = [name]
        for what in (lambda device: device.peak_bytes, moved, lambda device: device.units):
            found = [[what(device) for device in devices] for devices in rounds]
            unit = 1 if what is not moved and max(found[0]) < 1 << 14 else 1024
            differs = median(difference(figures) for figures in found)
            row += [f"{min(found[-1]) / unit:,.0f} to {max(found[-1]) / unit:,.0f}", f"{differs:.1%}"]
            missed += len(tasks) == TRIALS and differs > MOST and unit == 1024
        table.add_row(*row)
    Console(width=120).print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
