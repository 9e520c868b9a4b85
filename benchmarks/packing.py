"""Bytes of a step with shards as large as fit, and with the cut that `num_shards="tuned"` chooses.

    python benchmarks/packing.py                       # the layers of `mlp`, about a minute and a half of CPU time
    python benchmarks/packing.py gpt --budget 60       # percent of a plain loop's peak; may be given several times
    python benchmarks/packing.py gpt mlp taper         # all of them

Counts, not times: `HydraExecutor.plan`, for one trial alone on one CPU device: all kinds of bytes, both ways, by the rehearsal
with the pool's own pager. What each choice went by (`hydra_tune/shard/cost/traffic_model.py`) is on standard error.

`gpt`: a sister of the model of `spill.py`, a quarter as wide, with a fourth of the tokens. `mlp`: 24 equal layers of width 192.
`taper`: layers of widths from 64 to 640 and back.
"""

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import transformer  # noqa: E402 - benchmarks/ is the script's folder

from hydra_tune import HydraExecutor, TrainTask, train_plain  # noqa: E402 - needs the path above
from hydra_tune.errors import BudgetError  # noqa: E402
from hydra_tune.shard.cost.pilot import StorageTracker  # noqa: E402
from hydra_tune.shard.partition.shard_size_search import CHOICES  # noqa: E402

VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH, BATCH_SIZE = 2048, 160, 10, 9, 64, 4
BUDGETS = (80, 60, 40, 25, 15)  # percent of the plain loop's peak
TAPER = (64, 128, 256, 384, 512, 640, 512, 384, 256, 128, 64)
MIB = 1 << 20


def gpt(activations: str) -> TrainTask:
    ids = torch.randint(VOCABULARY, (2 * BATCH_SIZE, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return TrainTask(
        model=partial(transformer.Transformer, VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss=transformer.loss,
        train=TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()),
        batch_size=BATCH_SIZE,
        activations=activations,
        seed=1,
    )


def layers(widths: Sequence[int], activations: str) -> TrainTask:
    def model() -> nn.Module:
        pairs = pairwise(widths)
        return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairs))

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(128, widths[0], generator=generator), torch.randn(128, widths[-1], generator=generator)
    return TrainTask(
        model=model,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss=functional.mse_loss,
        train=TensorDataset(*rows),
        batch_size=64,
        activations=activations,
        seed=1,
    )


MODELS: dict[str, Any] = {"gpt": gpt, "mlp": partial(layers, [192] * 25), "taper": partial(layers, TAPER)}


class _Last(logging.Handler):
    """Keeps what was said last."""

    said = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.said = record.getMessage()


def plain_peak(task: TrainTask) -> int:
    tracker = StorageTracker(64)
    with tracker:
        train_plain(task)
    return tracker.peak_bytes


def rows(budgets: Sequence[int], names: Sequence[str], last: _Last) -> Iterator[list[str]]:
    """One for each model, way with activations, and budget."""
    for name in names:
        peak = plain_peak(MODELS[name]("recompute"))
        for activations in ("recompute", "keep"):
            for budget in budgets:
                found = []
                for num_shards in (None, "tuned"):
                    options: dict[str, Any] = {"device_memory": peak * budget // 100, "num_shards": num_shards}
                    with HydraExecutor("cpu:1", max_concurrent=1, **options) as pool:
                        try:
                            found.append(pool.plan([MODELS[name](activations)]))
                        except BudgetError:
                            break
                if len(found) == 2:
                    nbytes = [sum(one.bytes_by_kind.values()) for one in found]
                    shards = [str(one.trials[0].num_shards) for one in found]
                    ratio = f"{nbytes[1] / nbytes[0]:.2f}" if nbytes[0] else "-"
                    yield [name, activations, f"{budget}%", *shards, *(f"{n / MIB:.2f}" for n in nbytes), ratio]
                    print(f"{name} {activations} {budget}%: {last.said}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS)}  [mlp]")
    parser.add_argument("--budget", type=int, action="append", help="percent of the peak; may be given several times")
    options = parser.parse_args()
    torch.set_num_threads(1)
    last = _Last()
    CHOICES.addHandler(last)
    CHOICES.setLevel(logging.INFO)
    table = Table("model", "activations", "budget", "shards", "tuned", "MiB a step", "tuned", "ratio")
    for row in rows(options.budget or BUDGETS, options.names or ["mlp"], last):
        table.add_row(*row)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
