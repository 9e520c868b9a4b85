"""What a team of batches does next, and what it waits for."""

from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest

from hydra_tune.train.parallel.grouped_data_parallel import GroupedDataParallelStep
from hydra_tune.train.parallel.parallel_step import ParallelUnit
from tests.unit.train.parallel.test_pipeline_parallel import Course


def played(num_shards: int, num_batches: int, count: int, *, last_first: bool = False) -> list[tuple[int, str, int]]:
    """Batch, kind and shard of all units in the order in which they end; of those that are due one ends at a time."""
    lanes: Any = [Course(num_shards) for _ in range(num_batches)]
    nothing: Any = SimpleNamespace(close=lambda: None)
    teams = GroupedDataParallelStep(lanes, {}, nothing, count=count, updates=True)
    due, is_over, ran = teams.start(), False, []
    while due:
        first = sorted(due, key=lambda unit: unit.rank, reverse=last_first)[0]
        due.remove(first)
        ran.append((first.rank, first.pending.kind, first.pending.shard))
        found, is_over = teams.finished(first.rank, "anywhere")
        due += found
    assert is_over
    return ran


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize(("num_batches", "count"), [(4, 2), (5, 2), (3, 3), (2, 4), (7, 3)])
def test_a_team_takes_all_its_batches_through_a_shard_before_the_next(num_batches, count, last_first):
    ran = played(4, num_batches, count, last_first=last_first)
    assert len(ran) == num_batches * 7 + 4, "forward, backward, and the updates of the last batch"
    used = min(count, num_batches)
    for team in range(used):
        ranks = [rank for rank in range(num_batches) if rank * used // num_batches == team]
        shards = [(kind, shard) for rank, kind, shard in ran if rank in ranks and kind != "update"]
        stays = [unit for unit, _ in groupby(shards)]
        assert len(stays) == len(set(stays)), "it has left a shard and come back"


@pytest.mark.parametrize("last_first", [False, True])
def test_backwards_of_a_shard_are_in_the_order_of_the_batches_and_its_update_comes_after_them(last_first):
    ran = played(4, 6, 3, last_first=last_first)
    for shard in range(4):
        assert [(rank, kind) for rank, kind, where in ran if where == shard and kind != "forward"] == [
            *((rank, "backward") for rank in range(6)),
            (5, "update"),
        ]


def test_forwards_of_teams_do_not_wait_for_each_other():
    assert played(3, 2, 2, last_first=True)[:2] == [(1, "forward", 0), (1, "forward", 1)]


def test_only_the_last_team_works_on_the_parameters_that_are_updated():
    lanes: Any = [Course(4) for _ in range(5)]
    nothing: Any = SimpleNamespace(close=lambda: None)
    GroupedDataParallelStep(lanes, {}, nothing, count=2, updates=True)
    assert [lane.takes_copies for lane in lanes] == [True, True, True, False, False]


def test_a_unit_that_follows_is_near_the_last_one_of_its_team():
    lanes: Any = [Course(4) for _ in range(4)]
    nothing: Any = SimpleNamespace(close=lambda: None)
    teams = GroupedDataParallelStep(lanes, {}, nothing, count=2, updates=True)
    first, second = teams.start()
    assert (first.near, second.near) == (None, None)
    (following,), _ = teams.finished(first.rank, "cpu:1")
    assert isinstance(following, ParallelUnit)
    assert (following.rank, following.near) == (1, "cpu:1"), "the team's other batch, at the same shard"
