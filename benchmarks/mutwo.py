"""μ-TWO's comparison at the scale of a CPU: fusing what fits, fusing everything in less memory, and planned pairs.

    python benchmarks/mutwo.py [cnn] [resnet] [transformer] [dlrm] [--trials 4 8] [--demand 2]

For each model and number of trials a limit is set that full fusion with everything kept would need `demand` times.
All members of the portfolio are planned for it, and those that fit are run, in turn, so that all find the machine as it
is: `fits, one after another` is as HFTA, `full fusion` as Capuchin on HFTA. Milliseconds of a step of all trials, predicted
and measured (median of 10 after 3), one intra-op thread and one thread that copies; speedups are over these two, and
hours of 10,000 steps at this pace. Static tensors of sub-arrays that do not run stay in memory here, outside of the limit.
"""

import argparse
import statistics
import time
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from hydra_tune import TrainTask
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.fusion.drawing import GroupGenerator
from hydra_tune.fusion.member import Member
from hydra_tune.fusion.planner.memory import peak_of
from hydra_tune.fusion.planner.portfolio import MARGIN, Planner
from hydra_tune.fusion.planner.profiled_run import made_up
from hydra_tune.fusion.planner.profiler import Profiles
from hydra_tune.fusion.planner.run import PlannedRun
from hydra_tune.fusion.planner.schedule import undecided
from hydra_tune.fusion.planner.step_graph import step_graph
from hydra_tune.fusion.planner.updates import UpdateTracer
from hydra_tune.fusion.plans import GroupPlans
from hydra_tune.shard.budget import Budget
from hydra_tune.shard.compute import Operands
from hydra_tune.shard.library import PlanLibrary

CPU = torch.device("cpu")
WARM, STEPS = 3, 10


class CNN(nn.Module):
    """Four convolutions with batch norm."""

    def __init__(self):
        super().__init__()
        widths = [3, 16, 16, 32, 32]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in widths[1:])
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        """Class scores."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = functional.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


class Residual(nn.Module):
    """Two convolutions with batch norm, and what came in."""

    def __init__(self, width):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x):
        """`(batch, width, height, width of the image)`, as it comes."""
        y = functional.relu(self.norms[0](self.convs[0](x)))
        return functional.relu(x + self.norms[1](self.convs[1](y)))


class ResNet(nn.Module):
    """Three residual blocks of width 16."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.blocks, self.head = nn.Sequential(*(Residual(16) for _ in range(3))), nn.Linear(16, 10)

    def forward(self, x):
        """Class scores."""
        return self.head(self.blocks(functional.relu(self.norm(self.stem(x)))).mean((2, 3)))


class Transformer(nn.Module):
    """Three layers of width 64."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.embedding, self.head = nn.Embedding(64, 64), nn.Linear(64, 10)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, ids):
        """Class scores."""
        return self.head(self.layers(self.embedding(ids)).mean(1))


class DLRM(nn.Module):
    """Six tables, two MLPs and the products between."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(100, 16) for _ in range(6))
        self.bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16 + 21, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x):
        """Class scores."""
        dense, ids = self.bottom(x), (x[:, :6].abs() * 30).long() % 100
        rows = torch.stack([dense, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        crossed = (rows @ rows.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([dense, crossed[:, :21]], 1))


FAMILIES = {
    "cnn": (CNN, lambda: torch.randn(16, 3, 16, 16)),
    "resnet": (ResNet, lambda: torch.randn(8, 3, 16, 16)),
    "transformer": (Transformer, lambda: torch.randint(64, (8, 32))),
    "dlrm": (DLRM, lambda: torch.randn(256, 13)),
}


class Family:
    """The sub-arrays of one model: graphs, profiles and arguments by size."""

    def __init__(self, name):
        build, draw = FAMILIES[name]
        x = draw()
        self._name, self._batch = name, (x, torch.randint(10, (len(x),)))
        self._device = CpuDevice(0, 1 << 33)
        self._library = PlanLibrary(Budget(budget_bytes=1 << 33, buffer_fraction=0.0, alignment=self._device.alignment))
        arguments = {"optimizer": partial(torch.optim.AdamW, lr=1e-3), "loss": functional.cross_entropy}
        self._task = partial(TrainTask, model=build, train=lambda: [self._batch], **arguments)
        self._profiles, self.steps = Profiles(), {}

    def array(self, size):
        """The profiled sub-array of so many trials."""
        members = [Member(self._task(seed=seed), self._library, self._device) for seed in range(size)]
        built = [member.built() for member in members]
        plans, wanted = GroupPlans(self._library), members[0].peek()["train"]
        plan = plans.stacked(plans.of_member(members[0], wanted), size).plan
        (shard,) = plan.shards
        named = dict(built[0][0].named_parameters())
        own = named | dict(built[0][0].named_buffers())
        state = {name: torch.stack([own[name].detach()] * size) for name in shard.graph.state}
        operands = Operands(
            state=list(state.values()),
            constants=[plan.constants[name] for name in shard.graph.constants],
            inputs=[torch.stack([wanted.leaves.tensors[i]] * size) for i in shard.graph.inputs],
            live_in=(),
        )
        trains = [name in named for name in state]
        tracer = UpdateTracer([optimizer for _, optimizer in built])
        self.steps[size] = step_graph(
            shard.graph.module, list(state), operands, trains, size, tracer, dict.fromkeys(named, 0)
        )
        return self._profiles.array(f"{self._name} x {size}", self.steps[size], CPU)

    def runner(self, part):
        """Makes so many steps of a part; on numbers made up, for they decide nothing."""
        steps = [self.steps[size] for size in part.sizes]
        given = [{name: made_up(like, CPU) for name, like in step.geometry.items()} for step in steps]
        groups = [GroupGenerator([torch.Generator() for _ in range(size)]) for size in part.sizes]
        arguments = [lambda _number, own=own: own for own in given]
        run = PlannedRun(
            part.schedule, steps, CPU, arguments, lambda side, n: steps[side].noise[n].draw(groups[side], CPU)
        )
        return run, lambda count: run.run([count] * len(steps))


def milliseconds(family, members):
    """What a step of each takes, by its name; they take turns."""
    runs = {member.name: [family.runner(part) for part in member.parts] for member in members}
    found = {name: [] for name in runs}
    for number in range(WARM + STEPS):
        for name, parts in runs.items():
            start = time.perf_counter()
            for _, steps in parts:
                steps(1)
            if number >= WARM:
                found[name].append((time.perf_counter() - start) * 1e3)
    for parts in runs.values():
        for run, _ in parts:
            run.close()
    return {name: statistics.median(times) for name, times in found.items()}


def compare(name, num_trials, demand):
    family = Family(name)
    whole = undecided((family.array(num_trials),), 1 << 60)
    limit = int(peak_of(whole)[1].peak_bytes / demand)
    planner = Planner(array=family.array, limit_bytes=int(limit / (1 - MARGIN)), is_duplex=False)
    start = time.process_time()
    portfolio = planner.portfolio(num_trials)
    seconds = time.process_time() - start
    print(f"\n{name}, {num_trials} trials, {limit / 2**20:.2f} MiB; planned in {seconds:.1f} s of CPU time", flush=True)
    print(portfolio.table(), flush=True)
    members = [member for member in portfolio.members if member.fits]
    measured = milliseconds(family, members)
    print(f"{'':34} predicted  measured  ratio  over HFTA  over Capuchin  hours of 10,000")
    for member in members:
        took, chosen = measured[member.name], " (chosen)" if member is members[0] else ""
        over = [measured.get(name, float("nan")) / took for name in ("fits, one after another", "full fusion")]
        print(
            f"{member.name + chosen:34} {member.seconds * 1e3:9.2f} {took:9.2f} {member.seconds * 1e3 / took:6.2f} "
            f"{over[0]:10.2f} {over[1]:14.2f} {took / 360:15.3f}",
            flush=True,
        )
    if members:
        slower = measured[members[0].name] / min(measured.values())
        print(f"the one chosen takes {slower:.2f} times what the fastest takes")
    if "fits, one after another" not in measured:
        print("not even one trial at a time fits with everything kept")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(FAMILIES), help="of " + ", ".join(FAMILIES))
    parser.add_argument("--trials", nargs="*", type=int, default=[4], help="numbers of trials")
    parser.add_argument("--demand", type=float, default=2.0, help="what all would need, over what there is")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name in options.models:
        for num_trials in options.trials:
            compare(name, num_trials, options.demand)


if __name__ == "__main__":
    main()
