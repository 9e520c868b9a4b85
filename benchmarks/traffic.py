"""Bytes that one optimizer step moves, counted: what each of the ways to move fewer of them is worth.

    python benchmarks/traffic.py
    python benchmarks/traffic.py --devices 2    # only the tables of a step split over two devices

A model of equal layers, one shard each, on one CPU device whose memory holds what one unit needs, so that next to nothing stays
from one unit to the next. |W| is the bytes of its parameters. Each table but the second takes one more thing
away:

* all: batches go through each shard together, each shard is updated right after its last backward, and what has not changed is
  dropped and not written back; expected 3|W| of parameters, however many batches a step has;
* updates on the host: the same, with optimizer state that never leaves it: gradients go down, and parameters come up twice;
* no groups: batches go through the model one after the other;
* no updates in time: all updates come after the last backward, as clipping needs them;
* no dropping: whatever leaves the device is written back, and nothing is sent ahead; (4m + 2)|W| for m batches.

Harmony (Li et al.), section 2, has (4m + 2)|W| for a runtime that swaps by memory pressure alone, and section 3 has 3|W|.

Two more tables split a step over two devices, each with memory as above. There bytes to and from the host are shown beside
those that went from one device to the other (`across`), which no host memory sees:

* data-parallel: each device takes its batches through a shard together, forward and backward, and the last one updates and
  writes back: (2N + 1)|W| on N devices. Harmony has 3N|W| for replicas that are updated on each device.
* pipelined: each shard is loaded once for all forwards and once for all backwards, updated right after them, and written back:
  3|W|, as in Harmony.
  A unit that becomes due just before its device is told to be idle runs on the other one, which loads the shard once more; so
  the figure varies from run to run.

Counts, not times; what is sent ahead makes the second decimal vary. Exits with 1 if the first row is above 1.02 times 3|W|, or
the last of one device below 0.9 times (4m + 2)|W|. What is missing there is the last shard's forward, which is its backward,
and the shards that forward units, which need the least, leave on the device for the backward units that follow.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from hydra_tune import HydraExecutor, TrainTask  # noqa: E402 - the package needs the path above
from hydra_tune.memory.block import Block  # noqa: E402
from hydra_tune.memory.pager import Pager  # noqa: E402
from hydra_tune.train.loop.gradient_rules import GradientProcessor  # noqa: E402
from hydra_tune.train.parallel import batch_grouping  # noqa: E402
from hydra_tune.train.parallel.cost_model import DATA_PARALLEL, PIPELINED  # noqa: E402

WIDTH, LAYERS, STEPS = 96, 48, 3
MEMORY = "272KiB"
PARAMETER_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
PARALLEL = {DATA_PARALLEL: "data", PIPELINED: "pipeline"}
KINDS = ("parameters", "gradients", "optimizer", "activations", "boundaries")
ROWS = ("all", "updates on the host", "no groups", "no updates in time", "no dropping")
MOST, LEAST = 1.02, 0.9


def task(batches: int, steps: int) -> TrainTask:
    """Steps of 16 samples in so many batches."""
    inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(5))
    return TrainTask(
        model=lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]),
        optimizer=torch.optim.AdamW,
        loss=functional.mse_loss,
        train=TensorDataset(inputs, inputs),
        batch_size=16 // batches,
        accumulate=batches,
        epochs=steps,
    )


@contextmanager
def without(row: str) -> Iterator[None]:
    """Switch off what a row goes without."""
    depth = ROWS.index(row)
    write_back = Pager.write_back

    def always(pager: Pager, block: Block) -> None:
        block.dirty = block.dirty or (block.kind == "parameters" and block.data is not None)
        write_back(pager, block)

    with ExitStack() as stack:
        if depth >= ROWS.index("no groups"):
            stack.enter_context(mock.patch.object(batch_grouping, "is_worth_it", return_value=False))
        if depth >= ROWS.index("no updates in time"):
            stack.enter_context(mock.patch.object(GradientProcessor, "has_two_phases", True))
        if depth >= ROWS.index("no dropping"):
            stack.enter_context(mock.patch.object(Pager, "write_back", always))
        yield


def moved(row: str, batches: int) -> Counter[str]:
    """Bytes of one step by kind, both ways together, once optimizer state is there."""
    totals: list[Counter[str]] = []
    for steps in (2, 2 + STEPS):
        placement = "host" if row == "updates on the host" else "device"
        ahead = 0.0 if row == "no dropping" else 0.15  # what is sent ahead makes its room by dropping
        pool = HydraExecutor("cpu:1", MEMORY, num_shards=LAYERS, optimizer_placement=placement, buffer_fraction=ahead)
        with without(row), pool:
            (result,) = pool.run([task(batches, steps)])
            if result.error is not None:
                raise result.error
            (device,) = pool.stats().devices.values()
        totals.append(Counter(device.bytes_in_by_kind) + Counter(device.bytes_out_by_kind))
    return Counter({kind: (nbytes - totals[0][kind]) // STEPS for kind, nbytes in totals[1].items()})


def split(way: str, batches: int, num_devices: int) -> dict[str, Counter[str]]:
    """Bytes of one step by kind, to and from the host and across, where it is split this way over devices."""
    totals: list[dict[str, Counter[str]]] = []
    for steps in (2, 2 + STEPS):
        executor = HydraExecutor(f"cpu:{num_devices}", MEMORY, num_shards=LAYERS)
        with executor as pool:
            (result,) = pool.run([replace(task(batches, steps), parallel=PARALLEL[way])])
            if result.error is not None:
                raise result.error
            stats = pool.stats()
        if set(stats.steps_by_way) != {way}:
            raise SystemExit(f"steps were to run {way}, but ran {stats.steps_by_way}")
        found = {"host": Counter[str](), "across": Counter[str]()}
        for device in stats.devices.values():
            found["host"].update(device.bytes_in_by_kind)
            found["host"].update(device.bytes_out_by_kind)
            found["across"].update(device.bytes_across_by_kind)
        totals.append(found)
    first, last = totals
    return {
        where: Counter({kind: (nbytes - first[where][kind]) // STEPS for kind, nbytes in last[where].items()})
        for where in first
    }


def show_split(console: Console, num_devices: int) -> None:
    """Tables of steps split over devices."""
    for way, harmony in ((DATA_PARALLEL, 3.0 * num_devices), (PIPELINED, 3.0)):
        columns = [*KINDS, "parameters across", "gradients across", "activations across", "ours", "Harmony's"]
        table = Table("m", *columns, title=f"{way} on {num_devices} devices: bytes moved in a step, over |W|")
        for batches in (num_devices, 2 * num_devices):
            counted = split(way, batches, num_devices)
            found = [counted["host"][kind] for kind in KINDS]
            found += [counted["across"][kind] for kind in ("parameters", "gradients", "activations")]
            ours = 2 * num_devices + 1 if way == DATA_PARALLEL else 3
            table.add_row(
                str(batches), *(f"{nbytes / PARAMETER_BYTES:.2f}" for nbytes in found), str(ours), f"{harmony:.0f}"
            )
        console.print(table)


def main() -> int:
    """Print the tables; 0 if the figures are as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=0, help="only steps split over so many devices")
    options = parser.parse_args()
    console = Console(width=150)
    missed = 0 if options.devices else show_rows(console)
    show_split(console, options.devices or 2)
    return 1 if missed else 0


def show_rows(console: Console) -> int:
    """The tables of one device; returns how many figures are not as expected."""
    missed = 0
    for row in ROWS:
        table = Table("m", *KINDS, "expected, parameters", title=f"{row}: bytes moved in a step, over |W|")
        for batches in (1, 2, 4, 8):
            counted = moved(row, batches)
            over = {kind: counted[kind] / PARAMETER_BYTES for kind in KINDS}
            expected = {"all": 3.0, "no dropping": 4.0 * batches + 2}.get(row)
            table.add_row(str(batches), *(f"{over[kind]:.2f}" for kind in KINDS), f"{expected or '':}")
            missed += row == "all" and over["parameters"] > MOST * 3
            missed += expected is not None and row != "all" and over["parameters"] < LEAST * expected
        console.print(table)
    return missed


if __name__ == "__main__":
    sys.exit(main())
