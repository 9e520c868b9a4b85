"""What spilled training costs: a step under a budget against a plain loop, with activations recomputed, kept and spilled.

    python benchmarks/spill.py              # three rounds, about a quarter of an hour
    python benchmarks/spill.py --rounds 1 --budget 40

A GPT of 51 million parameters (vocabulary 8192, width 640, 9 layers, batches of 4 sequences of 256 tokens) with AdamW, on one
CPU device. Budgets are parts of the peak of a plain loop, which is counted first. Each arm is a process of its own with one
intra-op thread, and the arms take turns. A step is from its batch being drawn to the next one; the first ones are left out.
`ratio` is the plain loop's seconds over the arm's, of the same round, by wall time and by the CPU time of the whole process,
copies included. All arms must end with the same loss, to the last bit.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import transformer  # noqa: E402 - benchmarks/ is the script's folder
from pool import machine  # noqa: E402

from hydra_tune import HydraExecutor, TrainTask, train_plain  # noqa: E402 - needs the path above
from hydra_tune.shard.cost.pilot import StorageTracker  # noqa: E402

VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH, BATCH_SIZE = 8192, 640, 10, 9, 256, 4
WARM_STEPS, NUM_STEPS = 2, 5
BUDGETS = (100, 40, 15)  # percent of the plain loop's peak
MODES = ("recompute", "keep", "spill", "auto")
MB = 1e6


class Data:
    """The same batches in every arm; notes the time, and what `look` says, whenever one is drawn."""

    def __init__(self, num_steps: int, look: Callable[[], dict[str, int]] = dict) -> None:
        self._num_steps, self.look = num_steps, look
        self.marks: list[float] = []
        self.cpu_marks: list[float] = []
        self.seen: list[dict[str, int]] = []

    def draw(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(self._num_steps):
            ids = torch.randint(VOCABULARY, (BATCH_SIZE, LENGTH + 1), generator=generator)
            self._mark()
            yield ids[:, :-1], ids[:, 1:]
        self._mark()

    def _mark(self) -> None:
        self.marks.append(time.perf_counter())
        self.cpu_marks.append(time.process_time())
        self.seen.append(self.look())


def task(data: Data, activations: str = "auto") -> TrainTask:
    model = partial(transformer.Transformer, VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    return TrainTask(
        model=model, optimizer=optimizer, loss=transformer.loss, train=data.draw, activations=activations, seed=1
    )


def peak_bytes() -> int:
    """Of a plain loop: its second step has the optimizer's state and all activations."""
    tracker = StorageTracker(64)
    with tracker:
        train_plain(task(Data(2)))
    return tracker.peak_bytes


def run(budget_bytes: int, activations: str) -> dict[str, Any]:
    """One run in this process; a budget of 0 is the plain loop."""
    data = Data(NUM_STEPS)
    found: dict[str, Any] = {}
    if not budget_bytes:
        loss = train_plain(task(data)).metrics["train_loss"]
    else:
        with HydraExecutor(devices="cpu:1", device_memory=budget_bytes, max_concurrent=1) as pool:
            device = next(iter(pool.stats().devices))
            data.look = lambda: _moved(pool.stats().devices[device])
            job = pool.submit(task(data, activations))
            result = job.result()
            if result.error is not None:
                raise result.error
            loss = result.metrics["train_loss"]
            found = {"shards": job.progress.num_shards, "peak": pool.stats().devices[device].peak_bytes}
    moved = {
        key: (value - data.seen[WARM_STEPS][key]) / (NUM_STEPS - WARM_STEPS) for key, value in data.seen[-1].items()
    }
    return found | {
        "wall": statistics.median(b - a for a, b in pairwise(data.marks[WARM_STEPS:])),
        "cpu": statistics.median(b - a for a, b in pairwise(data.cpu_marks[WARM_STEPS:])),
        "moved": moved,
        "loss": loss.hex(),
    }


def _moved(device: Any) -> dict[str, int]:
    ways = {"in": device.bytes_in_by_kind, "out": device.bytes_out_by_kind}
    return {f"{kind} {way}": count for way, counts in ways.items() for kind, count in counts.items()}


def start(*arguments: str) -> Any:
    """One run in a fresh process."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def show(budgets: list[int], modes: list[str], rounds: int) -> None:
    """Run all arms in turns and print a table."""
    peak = start("--arm", "peak")
    print(
        f"{machine()}; {rounds} rounds; load {os.getloadavg()[0]:.1f}; peak of a plain loop {peak / MB:.0f} MB",
        flush=True,
    )
    arms = [(budget, mode) for budget in budgets for mode in (modes if budget < 100 else modes[-1:])]
    runs: dict[tuple[int, str], list[dict[str, Any]]] = {arm: [] for arm in arms}
    plain = []
    for _ in range(rounds):
        plain.append(start("--arm", "plain"))
        for budget, mode in arms:
            found = start("--arm", mode, "--bytes", str(peak * budget // 100 + MARGIN))
            print(
                f"{budget}% {mode}: {found['wall']:.2f} s, plain {plain[-1]['wall']:.2f} s", file=sys.stderr, flush=True
            )
            runs[budget, mode].append(found)
    if len({run["loss"] for arm in (plain, *runs.values()) for run in arm}) != 1:
        raise SystemExit("the arms disagree on the loss")
    middle = {key: statistics.median(run[key] for run in plain) for key in ("wall", "cpu")}
    print(f"plain: {middle['wall']:.2f} s a step, {middle['cpu']:.2f} s of CPU")
    for (budget, mode), found in runs.items():
        print(_row(budget, mode, found, plain), flush=True)


MARGIN = 1 << 20  # what the ledger's rounding to 64 bytes adds to a tracked peak is far less


def _row(budget: int, mode: str, found: list[dict[str, Any]], plain: list[dict[str, Any]]) -> str:
    ratios = {key: [a[key] / b[key] for a, b in zip(plain, found, strict=True)] for key in ("wall", "cpu")}
    wall, cpu = (statistics.median(ratios[key]) for key in ("wall", "cpu"))
    last = found[-1]
    moved = ", ".join(f"{key} {value / MB:.0f}" for key, value in sorted(last["moved"].items()) if value >= MB / 2)
    seconds = statistics.median(run["wall"] for run in found)
    spread = f"{min(ratios['wall']):.2f} to {max(ratios['wall']):.2f}"
    return (
        f"{budget:3}% {mode:9} {last['shards']:2} shards, peak {last['peak'] / MB:5.0f} MB: {seconds:.2f} s a step, ratio "
        f"{wall:.2f} ({spread}) by wall time, {cpu:.2f} by CPU; MB a step: {moved or 'none'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, action="append", help="percent of the peak; may be given several times")
    parser.add_argument("--mode", choices=MODES, action="append", help="may be given several times")
    parser.add_argument("--arm", choices=("peak", "plain", *MODES), help="run only this one, in this process")
    parser.add_argument("--bytes", type=int, default=0, help="the budget of --arm")
    options = parser.parse_args()
    if options.arm:
        torch.set_num_threads(1)
        print(json.dumps(peak_bytes() if options.arm == "peak" else run(options.bytes, options.arm)))
        return
    show(options.budget or list(BUDGETS), options.mode or list(MODES), options.rounds)


if __name__ == "__main__":
    main()
