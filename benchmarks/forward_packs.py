"""Bytes of a step whose forward units are made of several shards each, while backward units stay as they are.

    python benchmarks/forward_packs.py               # some seconds
    python benchmarks/forward_packs.py --rows 256    # of a batch; 64 by default

Counts, not times: a step is played through as for `num_shards="tuned"` (`hydra_tune/shard/cost/traffic_model.py`), for
24 equal layers of width 192, a shard each, with AdamW and activations recomputed, alone on a device that holds a part
of all weights, gradients and optimizer state. Harmony's tuner chooses packs for forward and backward separately; this
is what larger ones for the forward would save under a pager that lets parameters stay.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

from hydra_tune import TrainTask
from hydra_tune.shard.cost import traffic_model
from hydra_tune.shard.cost.pilot import ShardCost
from hydra_tune.shard.partition.budget import ShardPlanConstraints
from hydra_tune.shard.partition.plan_cache import PlanLibrary

WIDTH, DEPTH = 192, 24
SHARES = (60, 40, 25, 15)  # percent of all weights, gradients and optimizer state
PACKS = (1, 2, 4, 8)
MIB = 1 << 20


def costs(rows: int) -> list[ShardCost]:
    """What the pilot finds of each layer."""
    task = TrainTask(
        model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH))),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss=functional.mse_loss,
        train=lambda: [(torch.zeros(rows, WIDTH), torch.zeros(rows, WIDTH))],
        activations="recompute",
    )
    budget = ShardPlanConstraints(budget_bytes=1 << 30, buffer_fraction=0.0, alignment=64, num_shards=DEPTH)
    module = task.model()
    (batch,) = task.train()
    plan = PlanLibrary(budget).prepare(task, module, task.optimizer(module.parameters()), batch, "train").plan
    return [shard.cost for shard in plan.shards]


def packed(
    units: Sequence[traffic_model.TrafficUnit], sizes: dict[traffic_model.PlayedBlock, int], count: int
) -> Iterator[traffic_model.TrafficUnit]:
    """The same units, with so many forward units in a row as one."""
    forward = units[: DEPTH - 1]
    for start in range(0, len(forward), count):
        group = forward[start : start + count]
        made = [block for unit in group for block in unit.makes]
        workspace, kept = 0, 0
        for unit in group:
            workspace = max(workspace, kept + unit.workspace_bytes)
            kept += sum(sizes.get(block, 0) for block in unit.makes)
        needs = tuple(block for unit in group for block in unit.needs if block not in made)
        yield traffic_model.TrafficUnit(needs=needs, workspace_bytes=workspace, makes=tuple(made))
    yield from units[DEPTH - 1 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="of a batch  [64]")
    torch.set_num_threads(1)
    found, habits = costs(parser.parse_args().rows), traffic_model.StepAccessPattern()
    sizes = traffic_model.sizes_of(found, 1)
    units = list(traffic_model.units_of(found, habits))
    state = sum(cost.state_bytes + cost.trained_bytes + cost.optimizer_bytes for cost in found)
    table = Table("device", *(f"{count} a unit" for count in PACKS), "most saved", title="MiB a step")
    for share in SHARES:
        moved = [
            traffic_model.played(list(packed(units, sizes, count)), sizes, state * share // 100, habits).nbytes
            for count in PACKS
        ]
        saved = 1 - min(moved) / moved[0]
        table.add_row(f"{share}%", *(f"{nbytes / MIB:.2f}" for nbytes in moved), f"{saved:.1%}")
    table.add_row("units", *(str(len(list(packed(units, sizes, count)))) for count in PACKS), "")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
