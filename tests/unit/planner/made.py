"""What the tests of the planner share: sub-arrays of small models with all that a step has, and their steps unplanned."""

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hydra_tune.batched.batched_random import GroupGenerator
from hydra_tune.fusion.compile.batched_plan import stacked_plan
from hydra_tune.planner.profile.output_layouts import as_laid_out
from hydra_tune.planner.trace.optimizer_graph import UpdateTracer
from hydra_tune.planner.trace.step_graph import StepGraph, step_graph
from hydra_tune.shard.execute.compute import ShardOperands
from tests.unit.shard.bench import bench, task_of


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1, bias=False) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = functional.relu(norm(conv(x)))
        return self.head(functional.dropout(x.mean((2, 3)), 0.2, self.training))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x):
        y = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(x + self.norms[1](self.second(y)))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(*(Residual(8) for _ in range(3)))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.blocks(functional.relu(self.norm(self.stem(x)), inplace=True))
        return self.head(functional.dropout(x.mean((2, 3)), 0.1, self.training))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        weights = self.drop(torch.softmax(q @ k.transpose(-1, -2) * (w // self.heads) ** -0.5, -1))
        x = x + self.drop(self.out((weights @ v).transpose(1, 2).reshape(b, t, w)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norms[1](x)))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(11, 16), nn.Sequential(*(Layer(16, 2) for _ in range(3)))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.layers(self.table(x)).mean(1))


class Attention(nn.Module):
    """Attention as one operator, which could draw random numbers and does not."""

    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.head(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))


class Mixed(nn.Module):
    """Of two dtypes, and so are its updates."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.second, self.head = nn.Linear(16, 16).double(), nn.Linear(16, 4).double()

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.relu(self.norm(self.first(x))).double())))


class Swish(nn.Module):
    """Convolutions with an activation whose backward lies otherwise than traced: stacked images are channels-last."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for conv in self.convs:
            y = conv(x)
            x = y * functional.relu6(y + 3) / 6
        return self.head(x.mean((2, 3)))


class Counting(nn.Module):
    """Buffers that the forward overwrites, and the backward needs as they are then."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("count", torch.ones(1))
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        y = self.first(x)
        with torch.no_grad():
            self.count.add_(1)
            self.scale.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return self.head(torch.tanh(y * self.scale.view(4, 4).flatten() / self.count) * self.scale)


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(13, 8) for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))

    def forward(self, x):
        dense = self.bottom(x)
        ids = (x[:, :3].abs() * 4).long() % 13
        rows = torch.stack([dense, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        crossed = rows @ rows.transpose(1, 2)
        pairs = torch.stack([crossed[:, i, j] for i in range(4) for j in range(i)], 1)
        return self.top(torch.cat([dense, pairs], 1))


def _images():
    return torch.randn(6, 3, 8, 8), torch.randint(4, (6,))


MODELS = {
    "cnn": (CNN, _images),
    "resnet": (ResNet, _images),
    "transformer": (Transformer, lambda: (torch.randint(11, (6, 8)), torch.randint(4, (6,)))),
    "dlrm": (DLRM, lambda: (torch.randn(32, 6), torch.randint(4, (32,)))),
}
EXAMPLES = MODELS | {
    "attention": (Attention, lambda: (torch.randn(6, 5, 8), torch.randint(4, (6,)))),
    "swish": (Swish, _images),
    "counting": (Counting, lambda: (torch.randn(32, 8), torch.randint(4, (32,)))),
    "mixed": (Mixed, lambda: (torch.randn(32, 8), torch.randint(4, (32,)))),
}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=3e-3),
}


@dataclass
class SubArrayMade:
    """A traced sub-array, its tensors, its members' generators and the steps that it has made."""

    step: StepGraph
    state: dict[str, Tensor]
    moments: dict[tuple[str, str], Tensor]
    constants: list[Tensor]
    tracer: UpdateTracer
    generators: GroupGenerator
    count: int
    example: Any
    device: torch.device
    limits: Tensor

    def batch(self, number: int) -> list[Tensor]:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(100 + number)
            members = [self.example() for _ in range(self.count)]
        return [torch.stack(tensors).to(self.device) for tensors in zip(*members, strict=True)]

    def arguments(self, number: int) -> dict[str, Tensor]:
        """All arguments of step `number`."""
        found = {argument: self.state[name] for name, argument in self.step.state.items()}
        found |= {argument: self.moments[key] for key, argument in self.step.moments.items()}
        found |= dict(zip(self.step.constants, self.constants, strict=True))
        found |= dict(zip(self.step.inputs, self.batch(number), strict=True))
        if self.step.limits is not None:
            found[self.step.limits] = self.limits
        known: dict[int, list[list[float]]] = {}
        for argument, rate in self.step.rates.items():
            values = known.setdefault(rate.group, self.tracer.rates(rate.group, [number] * self.count))[rate.number]
            shape = self.step.geometry[argument].shape
            found[argument] = torch.tensor(values, dtype=rate.dtype, device=self.device).view(shape)
        return found

    def everything(self) -> list[Tensor]:
        """All that a step leaves behind."""
        return [*self.state.values(), *self.moments.values(), self.generators.get_state()]


@functools.cache
def _benched(name):
    model, example = EXAMPLES[name]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        batch = example()
        return bench(task_of(model(), train=lambda: [batch], loss=functional.cross_entropy)), example


@functools.cache
def _traced(name, count, optimizer, device, is_clipped=False):
    made, _ = _benched(name)
    plan = made.plan()
    group = stacked_plan(plan, count)
    (shard,) = group.shards
    state = {key: torch.stack([made.state[key].detach()] * count).to(device) for key in shard.graph.state}
    parameters = [key for key in state if made.state[key].requires_grad]
    members = [OPTIMIZERS[optimizer]([made.state[key] for key in parameters]) for _ in range(count)]
    for index, member in enumerate(members):
        member.param_groups[0]["lr"] *= 1 + 0.1 * index
    for key in parameters:
        state[key].requires_grad_()
    tracer = UpdateTracer(members)
    constants = [plan.constants[name].to(device) for name in shard.graph.constants]
    operands = ShardOperands(
        state=list(state.values()),
        constants=constants,
        inputs=[torch.stack([made.inputs[i]] * count).to(device) for i in shard.graph.inputs],
        live_in=(),
    )
    trains = [tensor.requires_grad for tensor in state.values()]
    groups = dict.fromkeys(parameters, 0)
    step = step_graph(shard.graph.module, list(state), operands, trains, count, tracer, groups, is_clipped=is_clipped)
    return step, state, parameters, tracer, constants


@functools.cache
def _laid_out(name, count, optimizer, device, is_clipped):
    step, *rest = _traced(name, count, optimizer, device, is_clipped)
    return as_laid_out(step, torch.device(device)), *rest


def sub_array(
    name: str,
    count: int = 2,
    optimizer: str = "adamw",
    seed: int = 0,
    device: str = "cpu",
    *,
    laid_out: bool = True,
    is_clipped: bool = False,
) -> SubArrayMade:
    """One; if it is clipped, the first member is, to a small norm, each of the others to more, and the last one is not."""
    make = _laid_out if laid_out else _traced
    step, like, parameters, tracer, constants = make(name, count, optimizer, device, is_clipped)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key, tensor in like.items():
        noise = (torch.randn(tensor.shape, generator=generator) * 0.01).to(device) if key in parameters else 0
        state[key] = (tensor.detach() + noise).to(tensor.dtype).clone()
    moments = {
        (key, moment): tensor
        for key in parameters
        for moment, tensor in tracer.initial_state(0, like[key]).items()
        if (key, moment) in step.moments
    }
    generators = GroupGenerator([torch.Generator(device).manual_seed(10 * seed + i) for i in range(count)])
    limits = torch.tensor(
        [*(0.1 * (1 + i) for i in range(count - 1)), float("inf")], dtype=torch.float64, device=device
    )
    example, place = _benched(name)[1], torch.device(device)
    return SubArrayMade(step, state, moments, constants, tracer, generators, count, example, place, limits)


def run_unplanned(made: SubArrayMade, number: int) -> Tensor:
    """One step as the graph says, node by node; the losses."""
    values: dict[Any, Any] = {}
    arguments = made.arguments(number)
    with torch.no_grad():
        for node in made.step.graph.nodes:
            if node.op == "placeholder":
                values[node] = arguments[node.name]
            elif node.op == "get_attr":
                values[node] = getattr(made.step.owner, node.target)
            elif node.op == "output":
                return values[node.args[0][0]].clone()
            elif node.target.__name__ == "draw":
                values[node] = made.step.noise[node.args[0]].draw(made.generators, made.device)
            else:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    raise AssertionError
