"""Which plans' batches may be pipelined, and which together; what a home does next."""

from collections.abc import Iterator
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from hydra_tune.train.parallel.pipeline_parallel import PipelineParallelStep, goes_with
from tests.unit.shard.bench import Bench, bench, task_of, vectors


@pytest.fixture(scope="module")
def made() -> Bench:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    return bench(task_of(model, train=lambda: [vectors()], accumulate=4))


def first_linear(made: Bench) -> int:
    return next(place for place, node in enumerate(made.captured.nodes) if "linear" in str(node.target))


def test_a_pipeline_needs_two_shards(made):
    cut = made.plan(first_linear(made) + 1)
    assert cut.may_be_pipelined, "its buffers are one shard's"
    assert not cut.may_run_beside, "but each forward reads what the one before has written"
    assert not made.plan().may_be_pipelined


def test_only_plans_that_are_cut_alike_go_together(made):
    place = first_linear(made) + 1
    cut, again, other = made.plan(place), made.plan(place), made.plan(*made.spread(3))
    assert goes_with(cut, again)
    assert not goes_with(cut, other)
    assert not goes_with(cut, made.plan())


class Course:
    """A batch as a pipeline sees it: units in order, and sums that are nobody's here."""

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self.trained: list[list[str]] = [[] for _ in range(num_shards)]

    def units(self, *, is_last: bool) -> Iterator[Any]:
        order = [("forward", shard) for shard in range(self.num_shards - 1)]
        for shard in reversed(range(self.num_shards)):
            order += [("backward", shard)] + ([("update", shard)] if is_last else [])
        return (SimpleNamespace(kind=kind, shard=shard) for kind, shard in order)

    def give_away(self, names: list[str]) -> dict[str, Any]:
        return {}

    def take_in(self, values: dict[str, Any]) -> None:
        assert values == {}

    def check_draws(self) -> None:
        """It draws nothing."""

    def clear(self) -> None:
        """It has nothing."""


def stays(homes: str, num_batches: int, width: int, *, goes_on_with_shard: bool) -> dict[str, list[tuple[str, int]]]:
    """By home, the shards that it goes through, forward or backward; a batch runs on as soon as it may."""
    lanes: Any = [Course(len(homes)) for _ in range(num_batches)]
    nothing: Any = SimpleNamespace(close=lambda: None)
    pipeline = PipelineParallelStep(
        lanes, {}, width, nothing, homes=homes, goes_on_with_shard=goes_on_with_shard, updates=True
    )
    ran: dict[str, list[tuple[str, int]]] = {home: [] for home in homes}
    due, is_over = pipeline.start(), False
    while due:
        first = min(due, key=lambda unit: unit.rank)
        due.remove(first)
        if first.pending.kind != "update":
            ran[homes[first.pending.shard]].append((first.pending.kind, first.pending.shard))
        found, is_over = pipeline.finished(first.rank, "anywhere")
        due += found
    assert is_over
    assert sum(map(len, ran.values())) == num_batches * (2 * len(homes) - 1)
    return {home: [unit for unit, _ in groupby(units)] for home, units in ran.items()}


@pytest.mark.parametrize("homes", ["aab", "abab", "abba", "aabbab", "abcabc", "cbaabc", "abbbbb", "ab"])
def test_a_home_that_cannot_hold_its_shards_takes_all_batches_through_one_before_the_next(homes):
    for found in stays(homes, 4, 4, goes_on_with_shard=True).values():
        assert len(found) == len(set(found)), "it has left a shard and come back"


def test_with_room_for_all_shards_the_oldest_batch_goes_first():
    found = stays("aab", 4, 4, goes_on_with_shard=False)
    assert len(found["a"]) > len(set(found["a"]))
