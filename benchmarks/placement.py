"""Seconds and bytes of a step with updates on the device, on the host, and where `optimizer_placement="auto"` has them.

    python benchmarks/placement.py                      # about two minutes
    python benchmarks/placement.py --link 1GB/s --rounds 5

One trial of a deep MLP with AdamW, alone on one CPU device that holds a part of it, behind links of 1 GB/s, 5 GB/s and as fast
as memory is. `fused` is `AdamW(fused=True)`, whose kernels pass over memory once; `loops` is torch's default for CPU tensors.
Steps are medians. The three placements take turns, round by round, so that what else the machine does meets all of them.
"auto" is held against the better one of the two: 1.00 is as good.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from hydra_tune import HydraExecutor, TrainTask  # noqa: E402 - needs the path above

WIDTH, LAYERS, ROWS = 512, 12, 64
LAYER_BYTES = (WIDTH + 1) * WIDTH * 4
ALL_BYTES = 4 * LAYERS * LAYER_BYTES  # weights, gradients and AdamW's state
WARM_UP, STEPS, ROUNDS = 3, 8, 2
LINKS = ("1GB/s", "5GB/s", None)
CASES = ((30, False), (30, True), (90, False))  # percent of all bytes that the device has, and whether AdamW is fused
PLACEMENTS = ("device", "host", "auto")


@dataclass(frozen=True, slots=True)
class Run:
    """What a run has shown."""

    seconds: list[float]
    nbytes: float
    place: str | None
    host_seconds: float


def model() -> nn.Module:
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def run(percent: int, link: str | None, placement: str, *, fused: bool) -> Run:
    marks: list[tuple[float, int, float]] = []
    x = torch.randn(ROWS, WIDTH)

    def mark() -> None:
        (device,) = pool.stats().devices.values()
        marks.append((time.perf_counter(), device.bytes_in + device.bytes_out, device.host_update_seconds))

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(WARM_UP + STEPS):
            mark()
            yield x, x
        mark()

    optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True if fused else None)
    task = TrainTask(model=model, optimizer=optimizer, loss=nn.MSELoss(), train=batches, activations="recompute")
    options = {"device_memory": ALL_BYTES * percent // 100, "link_bandwidth": link, "optimizer_placement": placement}
    with HydraExecutor("cpu:1", max_concurrent=1, **options) as pool:
        (result,) = pool.run([task])
    if result.error is not None:
        raise result.error
    kept = marks[WARM_UP:]
    per_step = [(b - a) / STEPS for a, b in zip(kept[0], kept[-1], strict=True)]
    return Run([b[0] - a[0] for a, b in pairwise(kept)], per_step[1], result.optimizer_placement, per_step[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", action="append", help="bandwidth of the device's link; may be given several times")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "fits | AdamW | link | device: step, MB | host: step, MB, updating | auto: step, on | auto over the better one"
    )
    for percent, fused in CASES:
        for link in given.link or LINKS:
            runs: dict[str, list[Run]] = {placement: [] for placement in PLACEMENTS}
            for _ in range(given.rounds):
                for placement in PLACEMENTS:
                    runs[placement].append(run(percent, link, placement, fused=fused))
            steps = {p: statistics.median(s for one in found for s in one.seconds) for p, found in runs.items()}
            moved = {p: found[-1].nbytes / 1e6 for p, found in runs.items()}
            places = "/".join(sorted({str(one.place) for one in runs["auto"]}))
            print(
                f"{percent}% | {'fused' if fused else 'loops'} | {link or 'memory'} | {steps['device'] * 1e3:.1f} ms, "
                f"{moved['device']:.0f} | {steps['host'] * 1e3:.1f} ms, {moved['host']:.0f}, "
                f"{runs['host'][-1].host_seconds * 1e3:.1f} ms | {steps['auto'] * 1e3:.1f} ms, {places} | "
                f"{steps['auto'] / min(steps['device'], steps['host']):.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
