"""Steps per second of N models stacked, one after the other, and in processes side by side, on a GPU.

    python benchmarks/gpu_fusion.py [--device cuda] [--quick] [cnn] [vit] [bert]

Needs torch and numpy beside hydra_tune, and no other package; takes less than 8 minutes. Every member has its own weights and
batch, and AdamW of its own rate. `stacked` is what the units of a group compute: the traced forward and backward, and the
optimizer; `graphed` is the same with forward and backward as one CUDA graph, which hydra-tune itself does not do. Seconds are
by the clock, with the device idle before and after. Of processes there are as many as members, and all run at the same time.
"""

import argparse
import multiprocessing
import time
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.optim import AdamW

from hydra_tune import TrainTask
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.fusion.member import Member
from hydra_tune.fusion.plans import GroupPlans
from hydra_tune.fusion.stack import StackedModule, stacked_optimizer
from hydra_tune.fusion.tracing import traced
from hydra_tune.shard.budget import Budget
from hydra_tune.shard.compute import Operands
from hydra_tune.shard.library import PlanLibrary

COUNTS, SIDE_BY_SIDE, SECONDS = (1, 4, 16, 64), (4, 16), 1.5


class Encoder(nn.Module):
    """Transformer layers on embedded tokens, and class scores of their mean."""

    def __init__(self, embedding, length, width, heads, depth):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, activation="gelu")
        self.embedding, self.positions = embedding, nn.Parameter(torch.zeros(length, width))
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        """Class scores."""
        return self.head(self.layers(self.embedding(x) + self.positions).mean(1))


class Patches(nn.Module):
    """Images as tokens."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 4, 4)

    def forward(self, x):
        """`(batch, 3, 32, 32)` to `(batch, 64, width)`."""
        return self.conv(x).flatten(2).transpose(1, 2)


def cnn():
    first = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(2048, 10))


def images():
    return torch.randn(32, 3, 32, 32)


MODELS = {
    "cnn": (cnn, images),
    "vit": (lambda: Encoder(Patches(64), 64, 64, 4, 4), images),
    "bert": (lambda: Encoder(nn.Embedding(1000, 128), 64, 128, 4, 4), lambda: torch.randint(1000, (16, 64))),
}


def batch(name, device):
    x = MODELS[name][1]()
    return x.to(device), torch.randint(10, (len(x),), device=device)


def one_step(name, device):
    """A step of one model, in plain PyTorch."""
    model, (x, y) = MODELS[name][0]().to(device), batch(name, device)
    optimizer = AdamW(model.parameters(), lr=1e-4)

    def run():
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def stacked(name, count, device, *, graphed=False):
    """A step of so many models at once."""
    host = CpuDevice(0, 1 << 33)
    library = PlanLibrary(Budget(budget_bytes=1 << 33, buffer_fraction=0.0, alignment=host.alignment))
    x, y = batch(name, "cpu")
    arguments = {"model": MODELS[name][0], "train": lambda: [(x, y)], "loss": functional.cross_entropy}
    rates = [partial(AdamW, lr=1e-4 / (index + 1)) for index in range(count)]
    members = [Member(TrainTask(**arguments, optimizer=o, seed=i), library, host) for i, o in enumerate(rates)]
    built = [member.built() for member in members]
    plans, wanted = GroupPlans(library), members[0].peek()["train"]
    plan = plans.stacked(plans.of_member(members[0], wanted), count).plan
    module = StackedModule([own for own, _ in built]).to(device)
    optimizer = stacked_optimizer([one for _, one in built], built[0][0], module)
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    host.close()
    graph = plan.shards[0].graph
    inputs = [torch.stack([wanted.leaves.tensors[index].to(device)] * count) for index in graph.inputs]
    constants = [plan.constants[n].to(device) for n in graph.constants]
    operands = Operands(state=[state[n] for n in graph.state], constants=constants, inputs=inputs, live_in=())
    trains = [tensor.requires_grad for tensor in operands.state]
    trace = traced(graph.module, graph.state, operands, trains, plan.outputs[0], count)
    compute = partial(trace.run, operands)
    if graphed:
        compute = as_graph(compute)

    def run():
        for one, gradient in compute().parameters.items():
            state[one].grad = gradient
        optimizer.step()

    return run


def as_graph(compute):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = compute()

    def run():
        graph.replay()
        return made

    return run


def settle(device):
    if device != "cpu":
        torch.cuda.synchronize()


def rate(run, device, seconds):
    """Runs per second."""
    for _ in range(3):
        run()
    settle(device)
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(5):
            run()
        settle(device)
        done += 5
    return done / (time.perf_counter() - start)


def child(name, device, seconds, barrier, found):
    torch.set_num_threads(1)
    run = one_step(name, device)
    run()
    barrier.wait()
    found.put(rate(run, device, seconds))


def side_by_side(name, count, device, seconds):
    """Steps per second of processes that run at the same time, all together."""
    context = multiprocessing.get_context("spawn")
    barrier, found = context.Barrier(count), context.Queue()
    started = [context.Process(target=child, args=(name, device, seconds, barrier, found)) for _ in range(count)]
    for process in started:
        process.start()
    total = sum(found.get(timeout=120) for _ in started)
    for process in started:
        process.join()
    return total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="one round of few steps, to see that it runs")
    options = parser.parse_args()
    device, seconds = options.device, 0.1 if options.quick else SECONDS
    torch.set_num_threads(1)
    print("device:", device if device == "cpu" else torch.cuda.get_device_name(device), "torch:", torch.__version__)
    print("steps of one model per second\nmodel   N  one by one       processes  stacked  graphed  stacked/one by one")
    for name in options.models or MODELS:
        for count in (2,) if options.quick else COUNTS:
            alone = rate(one_step(name, device), device, seconds)  # N of them take N times as long
            together = rate(stacked(name, count, device), device, seconds) * count
            graphed = processes = float("nan")
            if device != "cpu":
                graphed = rate(stacked(name, count, device, graphed=True), device, seconds) * count
            if count in SIDE_BY_SIDE or options.quick:
                processes = side_by_side(name, count, device, seconds)
            row = f"{name:6} {count:3} {alone:14.1f} {processes:15.1f} {together:8.1f} {graphed:8.1f} {together / alone:8.1f}x"
            print(row, flush=True)


if __name__ == "__main__":
    main()
