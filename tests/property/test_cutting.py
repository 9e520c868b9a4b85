"""Whatever the graph and wherever it is cut: loss, gradients, buffers and random numbers are the eager step's, bit for bit."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from hydra_tune.shard.cost.activation_policy import ActivationBudget, keeping
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.shard.verify.plan_check import verify
from tests.unit.shard.bench import Bench, bench, task_of, vectors

WIDTH = 8
LAYERS = 4

KINDS = (
    "linear",
    "shared",
    "skip",
    "add",
    "relu_",
    "mul_",
    "view_mul_",
    "norm",
    "dropout",
    "dropout_",
    "split",
    "detach",
    "frozen",
    "count",
    "square",
    "buffer",
)


class Program(nn.Module):
    """Runs a list of small operations on a stack of values; the same list is the same model."""

    def __init__(self, operations: list[tuple[str, int]]) -> None:
        super().__init__()
        self.operations = operations
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(LAYERS))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("table", torch.linspace(-1, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linears[0](x)
        values = [x]
        for kind, index in self.operations:
            x = self.apply_one(kind, index, x, values)
            values.append(x)
        return x * self.scale

    def apply_one(self, kind: str, index: int, x: torch.Tensor, values: list[torch.Tensor]) -> torch.Tensor:
        old = values[index % len(values)]
        simple: dict[str, Any] = {
            "linear": lambda: self.linears[index](x),
            "shared": lambda: functional.linear(x, self.linears[0].weight),
            "skip": lambda: x + old,
            "add": lambda: old * self.scale + x,
            "relu_": lambda: functional.relu(x * 1, inplace=True),
            "norm": lambda: self.norms[index](x),
            "dropout": lambda: functional.dropout(x, 0.3),
            "dropout_": lambda: functional.dropout(x + 0, 0.3, inplace=True),
            "split": lambda: torch.cat(x.chunk(2, dim=1)[::-1], dim=1),
            "detach": lambda: x + old.detach(),
            "frozen": lambda: self.frozen(x),
            "square": lambda: x * x * 0.5,
            "buffer": lambda: x * self.table * self.count.clone(),
        }
        if kind in simple:
            return simple[kind]()
        if kind == "count":
            self.count.add_(0.5)
            return x * self.count.clone()
        fresh = x + 1
        if kind == "mul_":
            fresh.mul_(0.5)
            return fresh + x
        half = fresh[:, : WIDTH // 2]
        half.mul_(0.5)
        return fresh + old


# A failing program is short enough as it is; making it shorter takes a capture for each try.
PHASES = (Phase.explicit, Phase.generate)

operations = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, LAYERS - 1)), min_size=1, max_size=9)


def made_bench(program: list[tuple[str, int]]) -> Bench:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(5)
        return bench(task_of(Program(program)), vectors(6, WIDTH))


def check(made: Bench, plan: ShardPlan) -> None:
    """Raises where one bit of a loss, a gradient, a buffer or the generator differs, recomputed or kept."""
    kept = keeping(plan, made.pilot, "keep", ActivationBudget(capacity_bytes=1 << 40, budget_bytes=1 << 40))
    _, seconds = verify(made.task, made.model, plan, made.batch, kept=None if kept is plan else kept)
    assert kept is plan or seconds is not None
    assert all(shard.keeps_activations == shard.has_backward for shard in kept.shards[:-1])


def examples(count: int) -> settings:
    """The same ones each time."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=PHASES,
    )


def any_cut_is_the_eager_step(program, data):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        made = made_bench(program)
        assume(made.analysis.cuts)
        cuts = data.draw(st.sets(st.sampled_from(made.analysis.cuts), min_size=1, max_size=5))
        check(made, made.plan(*sorted(cuts)))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.cases(1 / 3)
@examples(8)
@given(operations, st.data())
def test_any_cut_of_any_graph_is_the_eager_step(program, data):
    any_cut_is_the_eager_step(program, data)


@pytest.mark.slow
@examples(100)
@given(operations, st.data())
def test_any_cut_of_many_more_graphs_is_the_eager_step(program, data):
    any_cut_is_the_eager_step(program, data)


def every_cut_is_the_eager_step(program):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        made = made_bench(program)
        check(made, made.plan(*made.analysis.cuts))
    finally:
        torch.set_num_threads(threads)


@examples(3)
@given(operations)
def test_cut_wherever_it_may_be(program):
    every_cut_is_the_eager_step(program)


@pytest.mark.slow
@examples(30)
@given(operations)
def test_more_are_cut_wherever_they_may_be(program):
    every_cut_is_the_eager_step(program)
