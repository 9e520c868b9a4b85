"""What `HydraExecutor.plan` says a step moves, against what is counted.

    python benchmarks/forecast.py            # all cases, some minutes
    python benchmarks/forecast.py gpt        # those whose names begin so
    python benchmarks/forecast.py --kinds    # each kind of bytes as well
    python benchmarks/forecast.py --runs 5   # count so often: how far runs are apart

Counts, not times. Each case is planned, and run with numbers of steps that differ, so that beginnings and ends cancel; where
what is sent ahead has come too late once, at a beginning, that is spread over all steps.
A row is one case: bytes of a step as planned and as counted (the median of the runs), how far apart they are, the kind that is
furthest off, in percent of all bytes, and the spread of the runs' totals. Each case is there with what is sent ahead and
without it; what is sent ahead depends on how fast copies are. Exits with 1 if anything is off by more than 2% of all bytes, and
by more than the runs are apart.

`linear`: the model of `traffic.py`, a step of m batches. `gpt`: a GPT of vocabulary 512, width 64 and 5 layers, with 40% or 20%
of a plain loop's peak. `two`, `three`, `four`: trials of it, together.
"""

import argparse
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import traffic  # noqa: E402 - benchmarks/ is the script's folder
import transformer  # noqa: E402

from hydra_tune import HydraExecutor, TrainTask, train_plain  # noqa: E402 - needs the path above
from hydra_tune.pool.dry_run.report import PoolForecast  # noqa: E402
from hydra_tune.shard.cost.pilot import StorageTracker  # noqa: E402

VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH, BATCH_SIZE = 512, 64, 4, 5, 32, 4
WARM_STEPS = 2
STEPS = 20  # of a trial alone
MOST = 2.0  # percent of all bytes
AHEAD = {0.0: "", 0.15: ", sent ahead"}  # by the part of a device that is kept for that
Make = Callable[[int], TrainTask]
Bytes = dict[str, float]


def gpt(steps: int, activations: str = "recompute", **changes: Any) -> TrainTask:
    """One step an epoch."""
    ids = torch.randint(VOCABULARY, (BATCH_SIZE, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return TrainTask(
        model=partial(transformer.Transformer, VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss=transformer.loss,
        train=TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()),
        batch_size=BATCH_SIZE // changes.get("accumulate", 1),
        epochs=steps,
        report_every=steps,
        activations=activations,
        seed=1,
        **changes,
    )


def cases(spill_dir: str) -> Iterator[tuple[str, Make, int, int, dict[str, Any]]]:
    """Name, task, trials, steps to count, and options of the pool."""
    for batches in (1, 2, 4, 8):
        options = {"devices": "cpu:1", "device_memory": "272KiB", "num_shards": traffic.LAYERS}
        yield f"linear m={batches}", partial(_linear, batches), 1, STEPS, options
    clipped = partial(_linear, 4, max_grad_norm=1.0)
    yield "linear m=4 clipped", clipped, 1, STEPS, options
    yield "linear m=4 on the host", partial(_linear, 4), 1, STEPS, options | {"optimizer_placement": "host"}
    peak = _plain_peak()
    alone = {"devices": "cpu:1", "device_memory": peak * 4 // 10}
    for percent in (40, 20):
        for activations in ("recompute", "keep", "spill", "auto"):
            options = alone | {"device_memory": peak * percent // 100}
            yield f"gpt {percent}% {activations}", partial(gpt, activations=activations), 1, STEPS, options
    yield "gpt clipped", partial(gpt, max_grad_norm=1.0), 1, STEPS, alone
    yield "gpt accumulated", partial(gpt, accumulate=2), 1, STEPS, alone
    yield (
        "gpt accumulated, kept, clipped",
        partial(gpt, activations="keep", accumulate=2, max_grad_norm=1.0),
        1,
        STEPS,
        alone,
    )
    yield "gpt on the host", gpt, 1, STEPS, alone | {"optimizer_placement": "host"}
    disk = {"spill_dir": spill_dir, "host_memory": peak * 8 // 10}
    yield "gpt, with a disk", gpt, 1, STEPS, alone | disk
    yield "two on one device", gpt, 2, 40, alone | {"max_concurrent": 2}
    yield "two on one device, kept", partial(gpt, activations="keep"), 2, 40, alone | {"max_concurrent": 2}
    yield "two on one device, clipped", partial(gpt, max_grad_norm=1.0), 2, 40, alone | {"max_concurrent": 2}
    yield "two on two devices", gpt, 2, 40, alone | {"devices": "cpu:2", "max_concurrent": 2}
    yield "three on two devices", gpt, 3, 40, alone | {"devices": "cpu:2", "max_concurrent": 3}
    yield "four on two devices", gpt, 4, 40, alone | {"devices": "cpu:2", "max_concurrent": 4}


def _linear(batches: int, steps: int, **changes: Any) -> TrainTask:
    return replace(traffic.task(batches, steps), **changes)


def _plain_peak() -> int:
    tracker = StorageTracker(64)
    with tracker:
        train_plain(gpt(2))
    return tracker.peak_bytes


def measured(make: Make, trials: int, steps: int, options: dict[str, Any], runs: int) -> tuple[Bytes, list[Bytes]]:
    """Bytes of a step by way and kind, over all devices, the mean of the trials: as planned, and as counted in each run.

    The plan is made in the pool of the first run: what is kept by the clock is then kept by one look at the clock.
    """
    found = []
    for number in range(runs):
        with HydraExecutor(**options) as pool:
            if not number:
                foreseen = _ways(pool.plan([make(1000) for _ in range(trials)]))
            totals = []
            for length in (
                WARM_STEPS,
                WARM_STEPS,
                WARM_STEPS + steps,
            ):  # the first finds an empty device, the others do not
                for result in pool.run([make(length) for _ in range(trials)]):
                    if result.error is not None:
                        raise result.error
                totals.append(_totals(pool))
        empty, short, long = totals
        moved = {key: (long[key] - 2 * short[key] + empty[key]) / steps / trials for key in long}
        found.append({key: nbytes for key, nbytes in moved.items() if nbytes})
    return foreseen, found


def _ways(forecast: PoolForecast) -> Bytes:
    ways = {"in": forecast.bytes_in, "out": forecast.bytes_out, "across": forecast.bytes_across}
    return {f"{kind} {way}": nbytes for way, kinds in ways.items() for kind, nbytes in kinds.items()}


def _totals(pool: HydraExecutor) -> Counter[str]:
    total: Counter[str] = Counter()
    for device in pool.stats().devices.values():
        total.update({f"{kind} in": nbytes for kind, nbytes in device.bytes_in_by_kind.items()})
        total.update({f"{kind} out": nbytes for kind, nbytes in device.bytes_out_by_kind.items()})
        total.update({f"{kind} across": nbytes for kind, nbytes in device.bytes_across_by_kind.items()})
    return total


def main() -> int:
    """Print the table; 0 if all is within the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases whose names begin so")
    parser.add_argument("--kinds", action="store_true", help="each kind of bytes as well")
    parser.add_argument("--runs", type=int, default=1, help="count so often  [1]")
    given, missed = parser.parse_args(), 0
    torch.set_num_threads(1)
    print(f"{'case':<44} {'planned':>12} {'counted':>12} {'off':>7}  {'most off':<24} {'runs apart':>10}")
    with tempfile.TemporaryDirectory() as spill_dir:
        for name, make, trials, steps, options in cases(spill_dir):
            if given.names and not any(name.startswith(one) for one in given.names):
                continue
            for fraction, how in AHEAD.items():
                chosen = options | {"buffer_fraction": fraction}
                foreseen, runs = measured(make, trials, steps, chosen, given.runs)
                missed += _show(name + how, foreseen, runs, kinds=given.kinds)
    return 1 if missed else 0


def _show(name: str, foreseen: Bytes, runs: list[Bytes], *, kinds: bool) -> bool:
    """Print one case; whether it is off by too much."""
    keys = sorted({*foreseen, *(key for run in runs for key in run)})
    found = {key: statistics.median(run.get(key, 0.0) for run in runs) for key in keys}
    sums = [sum(run.values()) for run in runs]
    total, planned = statistics.median(sums), sum(foreseen.values())
    apart = 100 * (max(sums) - min(sums)) / total
    off = {key: 100 * (foreseen.get(key, 0.0) - found[key]) / total for key in keys}
    worst = max(off, key=lambda key: abs(off[key]))
    most = f"{worst} {off[worst]:+.2f}%" if off[worst] else "-"
    line = f"{name:<44} {planned:>12,.0f} {total:>12,.0f} {100 * (planned / total - 1):>+6.2f}%  {most:<24}"
    print(line + (f" {apart:>9.2f}%" if len(runs) > 1 else ""), flush=True)
    for key in keys if kinds else ():
        print(f"    {key:<40} {foreseen.get(key, 0.0):>12,.0f} {found[key]:>12,.0f} {off[key]:>+6.2f}%")
    return max(abs(off[worst]), 100 * abs(planned / total - 1)) > max(MOST, apart)


if __name__ == "__main__":
    sys.exit(main())
