"""What devices that have nothing else to do bring to one trial: the batches of its steps run on several of them at once.

    python benchmarks/splitting.py              # three rounds
    python benchmarks/splitting.py --rounds 1 --model "transformer, 0.8M"
    python benchmarks/splitting.py --ways --model "language model, 12M"   # data-parallel beside pipelined

Each arm is a process of its own, with one intra-op thread for each device, and the arms take turns. A step is four batches; its
time is the wall time from its first batch being drawn to that of the next step, the first steps left out. *one* is `cpu:1`,
*two* `cpu:2`; in the arms of two trials both have the same two devices, with and without lending them to running trials.

Wall time says something only where there is a core for each device. So the CPU time of the units is shown too, by device:
`by CPU` is what *one* spends in a step over what the busier device of *two* does, the speedup that the division of the work
allows. Waiting is left out, and so are copies by the copy threads: these are in the CPU time of the whole process. `at once` is
the part of a device's time in units during which the other is in one as well.

With `--ways` the model is cut into four shards or more, and a step on one device is set beside one on two, data-parallel,
pipelined, and the way that the pool chooses: with memory for everything and copies as fast as they are, behind a link of
200 MB/s, and with memory on neither device for the whole model behind a link of 1 GB/s. MB are parameters loaded in a step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import overhead  # noqa: E402 - benchmarks/ is the script's folder
import transformer  # noqa: E402
from pool import machine  # noqa: E402

from hydra_tune import HydraExecutor, TrainTask  # noqa: E402 - needs the path above
from hydra_tune.pool.devices.idle_devices import PoolDeviceLender  # noqa: E402

ACCUMULATE = 4
WARM_STEPS = 2


class Meter:
    """Entered around each unit: CPU time and intervals by worker."""

    def __init__(self) -> None:
        self.cpu: Counter[str] = Counter()
        self.units: list[tuple[float, float, str]] = []
        self.begins = 0.0  # what was before does not count

    @contextmanager
    def __call__(self):
        """Around one unit."""
        name, start, cpu = threading.current_thread().name, time.perf_counter(), time.thread_time()
        yield
        if start >= self.begins > 0:
            self.cpu[name] += time.thread_time() - cpu
            self.units.append((start, time.perf_counter(), name))

    def at_once(self) -> float:
        """The part of the time in units during which two are under way."""
        marks = sorted([(start, 1) for start, _, _ in self.units] + [(end, -1) for _, end, _ in self.units])
        inside, before, busy, both = 0, 0.0, 0.0, 0.0
        for now, change in marks:
            busy += inside * (now - before)
            both += inside * (now - before) if inside > 1 else 0.0
            inside, before = inside + change, now
        return both / busy if busy else 0.0


class Data:
    """Batches, and when each step's first one was drawn."""

    def __init__(self, batches, num_steps: int, meter: Meter) -> None:
        self._batches, self._num_steps, self._meter = batches, num_steps, meter
        self.marks: list[float] = []
        self.cpu_marks: list[float] = []

    def draw(self):
        """The batches of one pass."""
        for step in range(self._num_steps):
            self._mark()
            if step == WARM_STEPS:
                self._meter.begins = self.marks[-1]
            for index in range(ACCUMULATE):
                yield self._batches[(step * ACCUMULATE + index) % len(self._batches)]
        self._mark()

    def _mark(self) -> None:
        self.marks.append(time.perf_counter())
        self.cpu_marks.append(time.process_time())


def language_model(meter: Meter, num_steps: int, seed: int) -> tuple[TrainTask, Data]:
    """51 million parameters, batches of 256 tokens."""
    tokens = torch.randint(1000, (8, 4, 65), generator=torch.Generator().manual_seed(0))
    data = Data([(row[:, :-1], row[:, 1:]) for row in tokens], num_steps, meter)
    return task(partial(overhead.LanguageModel, width=768, depth=7), data, seed), data


def heavy_model(meter: Meter, num_steps: int, seed: int) -> tuple[TrainTask, Data]:
    """12 million parameters, batches of 64 tokens: much to load, little to compute, less to send."""
    tokens = torch.randint(1000, (8, 2, 33), generator=torch.Generator().manual_seed(0))
    data = Data([(row[:, :-1], row[:, 1:]) for row in tokens], num_steps, meter)
    return task(partial(overhead.LanguageModel, width=384, depth=6), data, seed), data


def small_transformer(meter: Meter, num_steps: int, seed: int) -> tuple[TrainTask, Data]:
    """The transformer of the other benchmarks."""
    size = (8, transformer.BATCH_SIZE, transformer.LENGTH + 1)
    tokens = torch.randint(transformer.VOCABULARY, size, generator=torch.Generator().manual_seed(0))
    data = Data([(row[:, :-1], row[:, 1:]) for row in tokens], num_steps, meter)
    return task(transformer.Transformer, data, seed), data


def task(model, data: Data, seed: int) -> TrainTask:
    return TrainTask(
        model=model,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss=transformer.loss,
        train=data.draw,
        accumulate=ACCUMULATE,
        seed=seed,
    )


MODELS = {
    "transformer, 0.8M": (small_transformer, 12),
    "language model, 51M": (language_model, 6),
    "language model, 12M": (heavy_model, 8),
}
TIGHT = {"transformer, 0.8M": "10MiB", "language model, 51M": "160MiB", "language model, 12M": "32MiB"}
SETTINGS = {  # options of the pool; {} leaves the cutting to it
    "": {},
    "plenty": {"num_shards": 4},
    "slow link": {"num_shards": 4, "link_bandwidth": "200MB/s"},
    "tight memory": {"num_shards": 4, "link_bandwidth": "1GB/s"},
}


@dataclass(frozen=True)
class Arm:
    """What is compared.

    Args:
        devices: of the pool.
        trials: how many.
        lends: whether devices are lent to running trials.
        parallel: of the tasks, how their steps are split.
    """

    devices: str
    trials: int = 1
    lends: bool = True
    parallel: str = "auto"


ARMS = {
    "one": Arm("cpu:1"),
    "two": Arm("cpu:2"),
    "two trials": Arm("cpu:2", trials=2),
    "two trials, nothing lent": Arm("cpu:2", trials=2, lends=False),
}
WAYS = {
    "one": Arm("cpu:1"),
    "data-parallel": Arm("cpu:2", parallel="data"),
    "pipelined": Arm("cpu:2", parallel="pipeline"),
    "chosen": Arm("cpu:2"),
}


def run(name: str, arm: Arm, setting: str) -> dict:
    """One run in this process."""
    build, num_steps = MODELS[name]
    meter = Meter()
    made = [build(meter, num_steps, seed) for seed in range(arm.trials)]
    options = dict(SETTINGS[setting])
    if setting == "tight memory":
        options["device_memory"] = TIGHT[name]
    lending = mock.patch.object(PoolDeviceLender, "offer", PoolDeviceLender.offer if arm.lends else lambda *_: None)
    executor = HydraExecutor(devices=arm.devices, instrument=meter, **options)
    with lending, executor as pool:
        results = pool.run([replace(task, parallel=arm.parallel) for task, _ in made])
        stats = pool.stats()
    for result in results:
        if result.error is not None:
            raise result.error
    steps = [after - before for _, data in made for before, after in pairwise(data.marks)][WARM_STEPS:]
    begins = min(data.marks[WARM_STEPS] for _, data in made)
    return {
        "step": statistics.median(steps),
        "all": max(data.marks[-1] for _, data in made) - begins,
        "cpu": sorted(seconds / (num_steps - WARM_STEPS) for seconds in meter.cpu.values()),
        "process": statistics.median(b - a for _, data in made for a, b in pairwise(data.cpu_marks[WARM_STEPS:])),
        "at once": meter.at_once(),
        "losses": [result.metrics["train_loss"] for result in results],
        "shards": results[0].num_shards,
        "loaded": sum(device.bytes_in_by_kind.get("parameters", 0) for device in stats.devices.values()) / num_steps,
        "ways": stats.steps_by_way,
    }


def start(name: str, arm: str, setting: str = "") -> dict:
    """One run in a fresh process."""
    command = [sys.executable, __file__, "--model", name, "--arm", arm, "--setting", setting]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def show_ways(name: str, rounds: int) -> None:
    """Data-parallel beside pipelined, in each setting."""
    for setting in SETTINGS:
        if not setting:
            continue
        runs: dict[str, list[dict]] = {arm: [] for arm in WAYS}
        for _ in range(rounds):
            for arm in WAYS:
                runs[arm].append(start(name, arm, setting))
        if len({run["losses"][0] for found in runs.values() for run in found}) != 1:
            raise SystemExit(f"{name}, {setting}: the arms disagree on the loss")
        told = [
            f"{arm} {statistics.median(run['step'] for run in found):.2f} s ({found[0]['loaded'] / 1e6:.1f} MB)"
            for arm, found in runs.items()
        ]
        chosen = Counter(way for run in runs["chosen"] for way, count in run["ways"].items() for _ in range(count))
        print(f"{name}, {setting}, {runs['one'][0]['shards']} shards: {'; '.join(told)} {dict(chosen)}", flush=True)


def show(name: str, rounds: int) -> None:
    """Run all arms of a model in turns and print what was found."""
    runs: dict[str, list[dict]] = {arm: [] for arm in ARMS}
    for _ in range(rounds):
        for arm in ARMS:
            runs[arm].append(start(name, arm))
    if len({run["losses"][0] for found in runs.values() for run in found}) != 1:
        raise SystemExit(f"{name}: the arms disagree on the loss")
    middle = {arm: {key: statistics.median(r[key] for r in found) for key in ("step", "all", "process", "at once")}
              for arm, found in runs.items()}  # fmt: skip
    walls = [one["step"] / two["step"] for one, two in zip(runs["one"], runs["two"], strict=True)]
    cpus = [one["cpu"][-1] / two["cpu"][-1] for one, two in zip(runs["one"], runs["two"], strict=True)]
    print(
        f"{name}: one trial, a step of {ACCUMULATE} batches {middle['one']['step']:.2f} s on one device, "
        f"{middle['two']['step']:.2f} s on two: {statistics.median(walls):.2f}x by wall time "
        f"({min(walls):.2f} to {max(walls):.2f}), {statistics.median(cpus):.2f}x by CPU ({min(cpus):.2f} to {max(cpus):.2f}), "
        f"{middle['two']['at once']:.0%} at once; CPU of the whole process {middle['one']['process']:.2f} s and "
        f"{middle['two']['process']:.2f} s a step"
    )
    both, alone = (middle[arm]["all"] for arm in ("two trials", "two trials, nothing lent"))
    print(f"{name}: two trials {both:.2f} s with lending, {alone:.2f} s without: {both / alone:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument("--ways", action="store_true", help="data-parallel beside pipelined instead")
    parser.add_argument("--arm", choices=ARMS | WAYS, help="run only this one, in this process, and print it as JSON")
    parser.add_argument("--setting", choices=SETTINGS, default="", help="of that arm")
    options = parser.parse_args()
    if options.arm:
        torch.set_num_threads(1)
        print(json.dumps(run(options.model, (ARMS | WAYS)[options.arm], options.setting)))
        return
    print(f"{machine()}; {options.rounds} rounds; load {os.getloadavg()[0]:.1f}", flush=True)
    for name in [options.model] if options.model else MODELS:
        (show_ways if options.ways else show)(name, options.rounds)


if __name__ == "__main__":
    main()
