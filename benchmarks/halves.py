"""Shards of half the device beside copies, against the largest that fit: the speed of a step over a plain loop's.

    python benchmarks/halves.py                              # about six minutes
    python benchmarks/halves.py --shares 0.4 --links 1GB/s

A GPT of 6 layers (width 256, vocabulary 2048, batches of 8 sequences of 128 tokens) with AdamW, on one CPU device behind a
simulated link. The device has a share of a plain loop's peak, which is counted first. A step is from its batch being drawn to
the next one, the median of eight; the ways take turns, twice each, beside the plain loop in one process. `overlap` is the
share of the loaded bytes that came beside a unit.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import transformer  # noqa: E402 - benchmarks/ is the script's folder
from pool import machine  # noqa: E402

from hydra_tune import HydraExecutor, TrainTask, train_plain  # noqa: E402 - needs the path above
from hydra_tune.shard.cost.pilot import StorageTracker  # noqa: E402
from hydra_tune.shard.partition import partition_planner  # noqa: E402

VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH, BATCH_SIZE = 2048, 256, 8, 6, 128, 8
WARM_STEPS, NUM_STEPS, ROUNDS = 3, 11, 2
halves = partition_planner.beside_copies


def largest_shards(largest: Sequence[int], *_: object) -> list[int]:
    """The cut without the choice."""
    return list(largest)


class Data:
    """The same batches for all ways, and the times at which they are drawn."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps, self.times = num_steps, list[float]()

    def draw(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.num_steps):
            tokens = torch.randint(VOCABULARY, (BATCH_SIZE, LENGTH + 1), generator=generator)
            self.times.append(time.perf_counter())
            yield tokens[:, :-1], tokens[:, 1:]
        self.times.append(time.perf_counter())

    def step_seconds(self) -> float:
        """Median seconds of a step."""
        return statistics.median(end - start for start, end in pairwise(self.times[WARM_STEPS:]))


def task(data: Data) -> TrainTask:
    return TrainTask(
        model=partial(transformer.Transformer, VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss=transformer.loss,
        train=data.draw,
        seed=1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.6, 0.4, 0.25], help="of a plain loop's peak")
    parser.add_argument("--links", nargs="+", default=["300MB/s", "1GB/s", "3GB/s"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    with StorageTracker(64) as tracker:
        train_plain(task(Data(2)))
    print(machine())
    print("link     share  shards      plain ms  step ms   speed  MB in  MB out  overlap")
    for link, share in product(given.links, given.shares):
        data = Data(NUM_STEPS)
        loss = train_plain(task(data)).metrics["train_loss"]
        plain_seconds = data.step_seconds()
        for name, choose in [("largest", largest_shards), ("halves", halves)] * ROUNDS:
            partition_planner.beside_copies = choose
            data = Data(NUM_STEPS)
            with HydraExecutor(
                devices="cpu:1", device_memory=int(tracker.peak_bytes * share), link_bandwidth=link
            ) as pool:
                (result,) = pool.run([task(data)])
                (device,) = pool.stats().devices.values()
            assert result.metrics["train_loss"] == loss, "the bits of the plain loop"
            seconds = data.step_seconds()
            print(
                f"{link:8} {share:5.2f}  {result.num_shards:2} {name:8}  {plain_seconds * 1e3:8.0f} {seconds * 1e3:8.0f}  "
                f"{plain_seconds / seconds:6.2f} {device.bytes_in / NUM_STEPS / 1e6:6.0f} "
                f"{device.bytes_out / NUM_STEPS / 1e6:7.0f} {device.overlap:8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
