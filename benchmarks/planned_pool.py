"""A search whose trials do not fit a device fused as many as wait, with steps that are planned and without, through a pool.

    python benchmarks/planned_pool.py [--model cnn transformer] [--demand 4.4 3] [--trials 8] [--steps 400] [--rounds 2]

One CPU device of one intra-op thread, of which all trials at once would need `--demand` times the memory; all wait from the
beginning. `fusion="on"` with `fusion_planner` "off", "auto" and "on" take turns, each in a pool of its own, so
that building, capturing, profiling and planning are counted; and once more the units alone, of which a longer search consists.
Seconds are those of one step of one trial. What is swapped and computed again is of one step of all trials that are on the
device at once, by the plan that ran last.

    python benchmarks/planned_pool.py --multiples 1.3 1.7 2.5 5 10 [--trials 16] [--steps 40]

how many trials are on the device at once, where its memory is so many times what one trial needs, in float64, with evaluations
and the default options of a pool. It prints how many trials began in jobs of which sizes, and in how large groups each was.

Trials take `--steps` optimizer steps, with an evaluation after every 40. Seconds want a machine that does nothing else, and
rows of one block can be compared with each other alone.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from hydra_tune import HydraExecutor, TrainTask  # noqa: E402 - needs the path above
from hydra_tune.fusion.runtime.paired_unit import PairStepRunner  # noqa: E402
from hydra_tune.fusion.runtime.planned_unit import GroupStepRunner  # noqa: E402
from hydra_tune.fusion.runtime.step_planner import PlannedStep  # noqa: E402
from hydra_tune.pool.fusion.group_jobs import GroupJobLauncher  # noqa: E402
from hydra_tune.pool.runtime.worker import Worker  # noqa: E402

PLANNERS = ("off", "auto", "on")
BATCH, EPOCH = 8, 40


class CNN(nn.Module):
    """Convolutions with BatchNorm, of which the maps are large beside the parameters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width if i else 3, width, 3, padding=1, bias=False) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(3))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of four classes, (batch, 4)."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = functional.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


class Transformer(nn.Module):
    """Two layers of width 16 on 16 tokens."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
        self.table, self.head = nn.Embedding(64, width), nn.Linear(width, 4)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of four classes, (batch, 4)."""
        return self.head(self.layers(self.table(ids)).mean(1))


MODELS = {
    "cnn": (CNN, lambda count, generator: torch.randn(count, 3, 8, 8, generator=generator)),
    "transformer": (Transformer, lambda count, generator: torch.randint(64, (count, 16), generator=generator)),
}


@dataclass(slots=True)
class Seen:
    """What one run has done.

    Attributes:
        wall, cpu: seconds in all.
        in_units: CPU seconds of units alone.
        peak_share: of the device's memory.
        sizes: how many trials have been computed with how many.
        ran: the planned steps that were made, the last of them last.
    """

    wall: float = 0.0
    cpu: float = 0.0
    in_units: float = 0.0
    peak_share: float = 0.0
    sizes: Counter[int] = field(default_factory=Counter)
    ran: list[PlannedStep] = field(default_factory=list)


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Note what units take, and which planned steps run."""
    run_pending = Worker._run_pending  # noqa: SLF001 - where units are run

    def timed(self: Worker, *arguments: Any) -> float:
        begin = time.thread_time()
        try:
            return run_pending(self, *arguments)
        finally:
            seen.in_units += time.thread_time() - begin

    def noted(run: Any) -> Any:
        def noting(self: Any, *arguments: Any) -> Any:
            if not seen.ran or seen.ran[-1] is not self.planned:
                seen.ran.append(self.planned)
            return run(self, *arguments)

        return noting

    with (
        mock.patch.object(Worker, "_run_pending", timed),
        mock.patch.object(PairStepRunner, "run", noted(PairStepRunner.run)),
        mock.patch.object(GroupStepRunner, "forward", noted(GroupStepRunner.forward)),
    ):
        yield


class Double(nn.Module):
    """A model in float64."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model().double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As of the model."""
        return self.inner(x.double() if x.is_floating_point() else x)


def task(seed: int, kind: str, steps: int, *, evaluates: bool = True, is_double: bool = False) -> TrainTask:
    """One trial."""
    model, inputs = MODELS[kind]
    model = partial(Double, model) if is_double else model
    generator = torch.Generator().manual_seed(0)
    count = BATCH * min(EPOCH, steps)
    data = inputs(count, generator), torch.randint(4, (count,), generator=generator)
    return TrainTask(
        model=model,
        optimizer=partial(torch.optim.AdamW, lr=1e-3 * (seed + 1)),
        train=TensorDataset(*data),
        validate=TensorDataset(*(one[:BATCH] for one in data)) if evaluates else None,
        batch_size=BATCH,
        loss=functional.cross_entropy,
        epochs=max(1, steps // EPOCH),
        seed=seed,
    )


def one_run(planner: str, memory: int, options: argparse.Namespace, kind: str) -> Seen:
    """All trials, in a pool of their own."""
    seen = Seen()
    tasks = [task(seed, kind, options.steps) for seed in range(options.trials)]
    with watched(seen):
        wall, cpu = time.perf_counter(), time.process_time()
        with HydraExecutor(
            "cpu:1", device_memory=memory, fusion="on", fusion_size=options.trials, fusion_planner=planner
        ) as pool:
            results = pool.run(tasks)
            (device,) = pool.stats().devices.values()
        seen.wall, seen.cpu = time.perf_counter() - wall, time.process_time() - cpu
    for result in results:
        if result.error is not None:
            raise result.error
        seen.sizes[result.group_size] += 1
    seen.peak_share = device.peak_bytes / device.budget_bytes
    return seen


def peak_of_one(kind: str, *, is_double: bool = False) -> int:
    """Bytes that a step of one trial needs on a device."""
    with HydraExecutor("cpu:1", "1GiB") as pool:
        (device,) = pool.plan([task(0, kind, EPOCH, evaluates=False, is_double=is_double)]).devices.values()
    return device.peak_bytes


def sizes_of(planner: str, memory: int, kind: str, trials: int, steps: int) -> tuple[list[int], Counter[int]]:
    """How many trials each job of the pool began with, and how many were in groups of which size."""
    began: list[int] = []
    formed = GroupJobLauncher._formed  # noqa: SLF001 - where the jobs of a group are known

    def noted(self: GroupJobLauncher, entry: Any, others: Any, *rest: Any) -> Any:
        began.append(1 + len(others))
        return formed(self, entry, others, *rest)

    with (
        mock.patch.object(GroupJobLauncher, "_formed", noted),
        HydraExecutor("cpu:1", device_memory=memory, fusion="on", fusion_planner=planner) as pool,
    ):
        results = pool.run([task(seed, kind, steps, is_double=True) for seed in range(trials)])
    return sorted(began, reverse=True), Counter(result.group_size for result in results)


def show_sizes(options: argparse.Namespace) -> None:
    """A row for each model, multiple of one trial's memory, and planner."""
    print("model         memory  planner  at once  trials in groups of")
    for kind in options.model:
        one = peak_of_one(kind, is_double=True)
        for multiple in options.multiples:
            for planner in ("off", "on"):
                began, groups = sizes_of(
                    planner, int(multiple * one), kind, options.trials or 16, options.steps or EPOCH
                )
                told = ", ".join(f"{count} in {size}" for size, count in sorted(groups.items(), reverse=True))
                print(f"{kind:12} {multiple:6g}x  {planner:7}  {max(began, default=1):7}  {told}", flush=True)


def show(planner: str, runs: list[Seen], trial_steps: int) -> None:
    """A row: the medians of some runs."""

    def each(name: str) -> str:
        found = [1e3 * getattr(run, name) / trial_steps for run in runs]
        return f"{statistics.median(found):7.3f}"

    last = runs[-1]
    sizes = ", ".join(f"{count} in {size}" for size, count in sorted(last.sizes.items(), reverse=True))
    planned = "-"
    if last.ran:
        step = last.ran[-1]
        arrays = zip(step.part.schedule.arrays, step.part.schedule.decisions, strict=True)
        again = sum(array.sizes[name] for array, decided in arrays for name in decided.recomputes)
        sizes += f" ({' + '.join(map(str, step.part.sizes))})"
        planned = f"{step.part.way}: {step.host_bytes / 1024:.0f} KiB swapped, {again / 1024:.0f} KiB again"
    print(
        f"  {planner:5} {each('wall')} {each('cpu')} {each('in_units')}  {last.peak_share:5.0%}  {sizes:28} {planned}",
        flush=True,
    )


def main() -> None:
    """Print a block of rows for each model and demand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=sorted(MODELS), default=["cnn"])
    parser.add_argument("--demand", nargs="+", type=float, default=[4.4, 3.0], help="of all trials, in devices")
    parser.add_argument(
        "--multiples", nargs="+", type=float, help="show sizes alone, in so many times one trial's memory"
    )
    parser.add_argument("--trials", type=int, help="8, or 16 with --multiples")
    parser.add_argument("--steps", type=int, help="400, or 40 with --multiples")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.multiples:
        show_sizes(options)
        return
    options.trials, options.steps = options.trials or 8, options.steps or 400
    for kind in options.model:
        one = peak_of_one(kind)
        for demand in options.demand:
            memory = int(options.trials * one / demand)
            print(
                f"{kind}, {options.trials} trials of {options.steps} steps, {memory / 1024:.0f} KiB (demand {demand:g})"
            )
            print("  planner   wall     CPU  in units   peak  trials in groups of")
            runs: dict[str, list[Seen]] = {planner: [] for planner in PLANNERS}
            for number in range(options.rounds):
                for planner in PLANNERS if number % 2 == 0 else PLANNERS[::-1]:
                    runs[planner].append(one_run(planner, memory, options, kind))
            for planner in PLANNERS:
                show(planner, runs[planner], options.trials * options.steps)


if __name__ == "__main__":
    main()
