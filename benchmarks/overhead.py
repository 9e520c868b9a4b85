"""What a step costs in the pool when nothing needs to spill: CPU time on one device against the plain loop.

    python benchmarks/overhead.py              # seven rounds
    python benchmarks/overhead.py --rounds 3

Each model is trained in the pool on `cpu:1`, with all the memory it likes, and by the plain loop, in turns, each run in a
process of its own with one intra-op thread. The time of a step is the CPU time of the whole process, all threads, from one
batch being drawn to the next; the first steps are left out, since capture, pilot and lazy optimizer state fall there. What
these first steps cost is shown apart. A ratio is that of two medians over the rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import transformer  # noqa: E402 - benchmarks/ is the script's folder
from pool import machine  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from hydra_tune import HydraExecutor, TrainTask, train_plain  # noqa: E402 - tests/ needs the path above

WARM_STEPS = 5


class MLP(nn.Module):
    """About 5 ms a step: what a single kernel takes counts here, and what stands around it too."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [256, 512, 512, 512, 10]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(0.1)]
        self.layers = nn.Sequential(*layers[:-2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return self.layers(x)


class CNN(nn.Module):
    """Many small operators."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 16), (16, 16), (16, 16)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return self.layers(x)


class Clock:
    """CPU time of the process at each batch that is drawn."""

    def __init__(self, batches: list[tuple[torch.Tensor, torch.Tensor]], num_steps: int) -> None:
        self._batches, self._num_steps = batches, num_steps
        self.marks: list[float] = []

    def draw(self):
        """The batches of one pass."""
        for step in range(self._num_steps):
            self.marks.append(time.process_time())
            yield self._batches[step % len(self._batches)]
        self.marks.append(time.process_time())


def _classifier(model, shape: tuple[int, ...], num_steps: int) -> tuple[TrainTask, Clock]:
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(shape, generator=generator), torch.randint(10, shape[:1], generator=generator)) for _ in range(4)
    ]
    clock = Clock(batches, num_steps)
    return _task(model, clock, loss=functional.cross_entropy), clock


def _language_model(num_steps: int) -> tuple[TrainTask, Clock]:
    """51 million parameters."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1000, (4, 2, 65), generator=generator)
    clock = Clock([(row[:, :-1], row[:, 1:]) for row in tokens], num_steps)
    model = partial(LanguageModel, width=768, depth=7)
    loss = lambda output, target: functional.cross_entropy(output.flatten(0, 1), target.flatten())  # noqa: E731
    return _task(model, clock, loss=loss), clock


class LanguageModel(nn.Module):
    """Predicts the next token; most of its parameters are in its blocks."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(transformer.Block(width, 12) for _ in range(depth))
        self.head = nn.Linear(width, 1000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # noqa: D102
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _task(model, clock: Clock, **arguments) -> TrainTask:
    return TrainTask(model=model, optimizer=partial(torch.optim.AdamW, lr=1e-3), train=clock.draw, **arguments)


MODELS = {
    # name: how it is built, steps, most that a step in the pool may take; None: no more than a look at what is smaller still
    "language model, 51M": (_language_model, 12, 1.10),
    "MLP, 5 ms": (partial(_classifier, MLP, (40, 256)), 300, 1.5),
    "CNN, 5 ms": (partial(_classifier, CNN, (7, 3, 24, 24)), 300, 1.5),
    "CNN, 3.5 ms": (partial(_classifier, CNN, (4, 3, 24, 24)), 300, None),
}


def run(name: str, arm: str) -> dict[str, float]:
    """One run in this process."""
    build, num_steps, _ = MODELS[name]
    task, clock = build(num_steps)
    if arm == "plain":
        loss = train_plain(task).metrics["train_loss"]
    else:
        with HydraExecutor(devices="cpu:1") as pool:
            (result,) = pool.run([task])
        if result.error is not None:
            raise result.error
        assert result.num_shards == 1
        loss = result.metrics["train_loss"]
    steps = [after - before for before, after in pairwise(clock.marks)]
    return {
        "step": statistics.median(steps[WARM_STEPS:]),
        "first": sum(steps[:WARM_STEPS]),
        "parameters": sum(p.numel() for p in task.model().parameters()),
        "loss": loss,
    }


def start(name: str, arm: str) -> dict[str, float]:
    """One run in a fresh process."""
    command = [sys.executable, __file__, "--model", name, "--arm", arm]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", choices=MODELS, help="run only this one, in this process, and print it as JSON")
    parser.add_argument("--arm", choices=("plain", "pool"))
    options = parser.parse_args()
    if options.arm:
        torch.set_num_threads(1)
        print(json.dumps(run(options.model, options.arm)))
        return 0
    print(f"{machine()}; {options.rounds} rounds; load {os.getloadavg()[0]:.1f}")
    print(f"{'model':<22}{'parameters':>12}{'plain ms':>10}{'pool ms':>9}{'ratio':>7}{'goal':>7}{'first steps':>22}")
    met = True
    for name, (_, _, goal) in MODELS.items():
        runs: dict[str, list[dict[str, float]]] = {"plain": [], "pool": []}
        for number in range(options.rounds):
            for arm in ("plain", "pool") if number % 2 == 0 else ("pool", "plain"):
                runs[arm].append(start(name, arm))
        losses = {run["loss"] for both in runs.values() for run in both}
        if len(losses) != 1:
            raise SystemExit(f"{name}: the arms disagree on the loss: {losses}")
        plain, pool = (statistics.median(r["step"] for r in runs[arm]) for arm in ("plain", "pool"))
        first = [statistics.median(r["first"] for r in runs[arm]) for arm in ("plain", "pool")]
        met = met and (goal is None or pool / plain <= goal)
        print(
            f"{name:<22}{runs['plain'][0]['parameters']:>12,}{plain * 1000:>10.2f}{pool * 1000:>9.2f}{pool / plain:>7.2f}"
            f"{goal or '':>7}{f'{first[0]:.2f} s, {first[1]:.2f} s':>22}",
            flush=True,
        )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
