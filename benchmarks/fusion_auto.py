"""CPU seconds of whole runs through the pool, of the same trials with fusion off, and left to the pool; ratios within one run.

    python benchmarks/fusion_auto.py [mlp] [cnn] [transformer] [wide] [images] [resnet] [mixed] [--pairs 2]

One CPU device, one intra-op thread. Each run is of a pool of its own, so that building, capturing and the steps that "auto"
times are counted. The two take turns, each of them first in every other pair, and the ratio is the median of those of the
pairs. Where nothing is computed together both run the same units, which take no longer in one than in the other but for what
the machine does meanwhile; so "units" is that ratio of the seconds of units alone, which shows how far to trust the other one,
and "beside" are the seconds of all else, where "auto" can be told from "off" exactly. "mixed" is one run of small and of large
models.
"""

import argparse
import itertools
import statistics
import sys
import time
from functools import partial

import torch
from fusion import Transformer, cnn, mlp
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune import HydraExecutor, TrainTask
from hydra_tune.pool.runtime.worker import Worker

IN_UNITS = []  # CPU seconds, one for each unit


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a skip."""

    def __init__(self, channels):
        super().__init__()
        convolution = partial(nn.Conv2d, channels, channels, 3, padding=1, bias=False)
        self.inner = nn.Sequential(
            convolution(), nn.BatchNorm2d(channels), nn.ReLU(), convolution(), nn.BatchNorm2d(channels)
        )

    def forward(self, x):
        """The sum of both."""
        return functional.relu(x + self.inner(x))


def resnet():
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    body = [
        Residual(16),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        Residual(32),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
    ]
    return nn.Sequential(*stem, *body, Residual(64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def wide():
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def images():
    first = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(2048, 10))


CASES = {  # model, inputs of so many samples, batch size, trials, steps of each
    "mlp": (mlp, lambda count: torch.randn(count, 64), 32, 16, 320),
    "cnn": (cnn, lambda count: torch.randn(count, 1, 8, 8), 32, 16, 160),
    "transformer": (Transformer, lambda count: torch.randint(64, (count, 16)), 8, 16, 160),
    "wide": (wide, lambda count: torch.randn(count, 256), 128, 8, 160),
    "images": (images, lambda count: torch.randn(count, 3, 32, 32), 16, 8, 80),
    "resnet": (resnet, lambda count: torch.randn(count, 3, 32, 32), 8, 8, 80),
}


MIXED = {"mixed": ("mlp", "wide", "images")}  # cases whose trials are submitted by turns


def trials_of(name):
    """Tasks of a case's trials."""
    build, inputs, batch_size, count, steps = CASES[name]
    torch.manual_seed(0)
    x = inputs(8 * batch_size)
    y = torch.randint(10, (len(x),))
    return [
        TrainTask(
            model=build,
            optimizer=partial(torch.optim.AdamW, lr=1e-3 / (number + 1)),
            train=TensorDataset(x, y),
            batch_size=batch_size,
            loss=functional.cross_entropy,
            epochs=steps // 8,
            seed=number,
        )
        for number in range(count)
    ]


def run(name, fusion):
    """CPU seconds of a run, those of its units, and with how many others its trials were computed."""
    parts = [trials_of(part) for part in MIXED.get(name, (name,))]
    tasks = [task for turn in itertools.zip_longest(*parts) for task in turn if task is not None]
    IN_UNITS.clear()
    start = time.process_time()
    with HydraExecutor(devices="cpu:1", device_memory="2GiB", fusion=fusion) as pool:
        results = pool.run(tasks)
    seconds = time.process_time() - start
    assert all(result.status == "completed" for result in results), results[0].error
    return seconds, sum(IN_UNITS), max(result.group_size for result in results)


def time_units():
    """Have it noted what each unit takes."""
    run_unit = Worker._run_pending  # noqa: SLF001

    def noted(*args):
        start = time.thread_time()
        try:
            return run_unit(*args)
        finally:
            IN_UNITS.append(time.thread_time() - start)

    Worker._run_pending = noted  # noqa: SLF001


def pairs_of(name, count):
    """Runs of a case by turns: for each way of running it (seconds, seconds of units), and how many were computed together."""
    found = {"off": [], "auto": []}
    sizes = set()
    for pair in range(count):
        for fusion in ("auto", "off") if pair % 2 else ("off", "auto"):
            seconds, units, size = run(name, fusion)
            print(f"    {fusion} {seconds:.2f} s, {units:.2f} s of it in units", file=sys.stderr)
            found[fusion].append((seconds, units))
            sizes |= {size} if fusion == "auto" else set()
    return found, " and ".join(map(str, sorted(sizes)))


def shown(name, count):
    """A row of the table."""
    found, together = pairs_of(name, count)
    pairs = list(zip(found["off"], found["auto"], strict=True))
    ratios = [off / auto for (off, _), (auto, _) in pairs]
    units = statistics.median(off / auto for (_, off), (_, auto) in pairs)
    off, auto = (statistics.median(seconds for seconds, _ in found[fusion]) for fusion in ("off", "auto"))
    beside = [statistics.median(seconds - units for seconds, units in found[fusion]) for fusion in ("off", "auto")]
    counts = [CASES[part][3:] for part in MIXED.get(name, (name,))]
    trials, steps = sum(count for count, _ in counts), max(steps for _, steps in counts)
    return (
        f"{name:12} {trials:6} {steps:6} {off:7.2f} s {auto:7.2f} s {statistics.median(ratios):9.2f}x "
        f"({min(ratios):.2f} to {max(ratios):.2f}) {units:6.2f}x {beside[0]:7.2f} s {beside[1]:7.2f} s {together:>9}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, *MIXED, []])
    parser.add_argument("--pairs", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    time_units()
    run("mlp", "on")  # whatever is done once in a process
    print(
        "model        trials  steps       off      auto  off / auto     (of pairs)   units  beside: off       auto  together"
    )
    for name in options.cases or (*CASES, *MIXED):
        print(shown(name, options.pairs), flush=True)


if __name__ == "__main__":
    main()
