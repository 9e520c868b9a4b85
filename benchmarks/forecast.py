"""What `HydraExecutor.plan` says a step moves, against what is counted.

    python benchmarks/forecast.py            # all cases, some minutes
    python benchmarks/forecast.py gpt        # those whose names begin so

Counts, not times. Each case is planned, and run twice with numbers of steps that differ, so that beginnings and ends cancel. A
row is one kind of bytes, or all: planned, counted, and how far apart they are, in percent of the kind, and of all bytes of the
case. Each case is there with what is sent ahead and without it; what is sent ahead depends on how fast copies are. Exits with 1
if anything is off by more than 2% of all bytes where nothing is sent ahead.

`linear`: the model of `traffic.py`, a step of m batches. `gpt`: a GPT of vocabulary 512, width 64 and 5 layers, with 40% and
15% of a plain loop's peak. `two`: two trials of it on one device, and three on two.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import TensorDataset

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import traffic  # noqa: E402 - benchmarks/ is the script's folder
import transformer  # noqa: E402

from hydra_tune import HydraExecutor, TrainTask, train_plain  # noqa: E402 - needs the path above
from hydra_tune.shard.pilot import StorageTracker  # noqa: E402

VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH, BATCH_SIZE = 512, 64, 4, 5, 32, 4
WARM_STEPS = 2
MOST = 2.0  # percent of all bytes
Make = Callable[[int], TrainTask]


def gpt(steps: int, activations: str = "recompute") -> TrainTask:
    """One step an epoch."""
    ids = torch.randint(VOCABULARY, (BATCH_SIZE, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return TrainTask(
        model=partial(transformer.Transformer, VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss=transformer.loss,
        train=TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()),
        batch_size=BATCH_SIZE,
        epochs=steps,
        report_every=steps,
        activations=activations,
        seed=1,
    )


def cases() -> Iterator[tuple[str, Make, int, int, dict[str, Any]]]:
    """Name, task, trials, steps to count, and options of the pool."""
    for batches in (1, 2, 4, 8):
        options = {"devices": "cpu:1", "device_memory": "272KiB", "num_shards": traffic.LAYERS}
        yield f"linear m={batches}", partial(_linear, batches), 1, 3, options
    peak = _plain_peak()
    for percent in (40, 15):
        for activations in ("recompute", "keep", "spill"):
            options = {"devices": "cpu:1", "device_memory": peak * percent // 100}
            yield f"gpt {percent}% {activations}", partial(gpt, activations=activations), 1, 3, options
    together = {"device_memory": peak * 4 // 10}
    yield "two on one device", gpt, 2, 40, together | {"devices": "cpu:1", "max_concurrent": 2}
    yield "two: three on two", gpt, 3, 40, together | {"devices": "cpu:2", "max_concurrent": 3}


def _linear(batches: int, steps: int) -> TrainTask:
    return traffic.task(batches, steps)


def _plain_peak() -> int:
    tracker = StorageTracker(64)
    with tracker:
        train_plain(gpt(2))
    return tracker.peak_bytes


def counted(make: Make, trials: int, steps: int, options: dict[str, Any]) -> dict[str, float]:
    """Bytes of a step by way and kind, over all devices; the mean of the trials."""
    totals: list[Counter[str]] = []
    for length in (WARM_STEPS, WARM_STEPS + steps):
        with HydraExecutor(**options) as pool:
            for result in pool.run([make(length) for _ in range(trials)]):
                if result.error is not None:
                    raise result.error
            devices = pool.stats().devices.values()
        total: Counter[str] = Counter()
        for device in devices:
            total.update({f"{kind} in": nbytes for kind, nbytes in device.bytes_in_by_kind.items()})
            total.update({f"{kind} out": nbytes for kind, nbytes in device.bytes_out_by_kind.items()})
            total.update({f"{kind} across": nbytes for kind, nbytes in device.bytes_across_by_kind.items()})
        totals.append(total)
    moved = {key: (nbytes - totals[0][key]) / steps / trials for key, nbytes in totals[1].items()}
    return {key: nbytes for key, nbytes in moved.items() if nbytes}


def planned(make: Make, trials: int, options: dict[str, Any]) -> dict[str, float]:
    """The same, from the plan."""
    with HydraExecutor(**options) as pool:
        found = pool.plan([make(1000) for _ in range(trials)])
    ways = {"in": found.bytes_in, "out": found.bytes_out, "across": found.bytes_across}
    return {f"{kind} {way}": nbytes for way, kinds in ways.items() for kind, nbytes in kinds.items()}


def main() -> int:
    """Print the tables; 0 if all that is not sent ahead is within the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases whose names begin so")
    names, console, missed = parser.parse_args().names, Console(width=120), 0
    torch.set_num_threads(1)
    for name, make, trials, steps, options in cases():
        if names and not any(name.startswith(one) for one in names):
            continue
        for fraction in (0.0, 0.15):
            chosen = options | {"buffer_fraction": fraction}
            foreseen, found = planned(make, trials, chosen), counted(make, trials, steps, chosen)
            how = "sent ahead" if fraction else "nothing sent ahead"
            missed += _show(console, f"{name}, {how}", foreseen, found) > MOST and not fraction
    return 1 if missed else 0


def _show(console: Console, title: str, foreseen: dict[str, float], found: dict[str, float]) -> float:
    """Print one case; the most that any kind is off, in percent of all bytes."""
    table = Table("bytes of a step", "planned", "counted", "% of the kind", "% of all", title=title)
    total, worst = sum(found.values()), 0.0
    for key in sorted({*foreseen, *found}):
        one, other = foreseen.get(key, 0.0), found.get(key, 0.0)
        off = f"{100 * (one / other - 1):+.2f}" if other else "-"
        worst = max(worst, 100 * abs(one - other) / total)
        table.add_row(key, f"{one:,.0f}", f"{other:,.0f}", off, f"{100 * (one - other) / total:+.2f}")
    one = sum(foreseen.values())
    table.add_row("all", f"{one:,.0f}", f"{total:,.0f}", "", f"{100 * (one / total - 1):+.2f}")
    console.print(table)
    return worst


if __name__ == "__main__":
    sys.exit(main())
