"""What a step would take one way or the other, and which way is chosen."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_tune.train.parallel.cost_model import (
    DATA_PARALLEL,
    ONE_DEVICE,
    PIPELINED,
    DeviceOffer,
    ShardStepCost,
    data_parallel,
    fastest,
    fits,
    neighbours,
    on_one_device,
    pipelined,
)

MIB, GIB = 1 << 20, 1 << 30


def offer(count=2, *, budget=10 * GIB, link=2e9):
    names = tuple(f"cpu:{index}" for index in range(count))
    return DeviceOffer(devices=names, budget_bytes=budget, bytes_per_second=link, most_devices=count)


def shards(count=4, *, seconds=0.1, weights=MIB, values=MIB, optimizer=0):
    one = ShardStepCost(
        seconds=seconds,
        state_bytes=weights,
        gradient_bytes=weights,
        optimizer_bytes=optimizer,
        value_bytes=values,
        handed_bytes=values,
        work_bytes=values,
    )
    return [one] * count


def test_small_weights_are_copied():
    assert fastest(shards(), 4, offer()).way == DATA_PARALLEL


def test_large_weights_behind_a_slow_link_stay_where_they_are():
    heavy = shards(weights=200 * MIB)
    assert fastest(heavy, 4, offer(link=2e8)).way == PIPELINED
    assert fastest(heavy, 4, offer(link=1e12)).way == DATA_PARALLEL, "were it not for the link"


def test_values_that_take_longer_than_the_work_are_not_sent_away():
    assert fastest(shards(2, weights=GIB, values=GIB), 2, offer(link=2e8)).way == ONE_DEVICE


def test_a_way_that_is_not_exact_is_not_chosen_and_one_that_is_forced_is():
    heavy = shards(weights=200 * MIB)
    assert fastest(heavy, 4, offer(link=2e8), [DATA_PARALLEL]).way == ONE_DEVICE
    assert fastest(heavy, 4, offer(link=2e8), parallel="data").way == DATA_PARALLEL
    assert fastest(heavy, 4, offer(link=2e8), [DATA_PARALLEL], "pipeline").way == ONE_DEVICE


@pytest.mark.parametrize("parallel", ["auto", "data", "pipeline"])
def test_one_batch_has_nothing_to_share(parallel):
    assert fastest(shards(), 1, offer(), parallel=parallel).way == ONE_DEVICE


def test_one_shard_is_no_pipeline():
    assert fastest(shards(1, weights=GIB), 4, offer(link=2e8)).way == ONE_DEVICE


def test_data_parallel_takes_a_batch_on_each_device_and_the_copies():
    """Parameters to the host and to the other device; the sums of the batches that help taken over."""
    found = data_parallel(shards(4, weights=50 * MIB), 5, offer(link=1e9))
    weights = 4 * 50 * MIB
    assert found.seconds == pytest.approx(3 * 0.4 + (2 * weights + 2 * weights) / 1e9)
    assert found.parameter_bytes == weights


def test_a_pipeline_takes_one_way_through_and_the_slowest_device_for_every_further_batch():
    found = pipelined(shards(3, values=0), 4, offer(link=1e9))
    assert found.seconds == pytest.approx(0.3 + 3 * 0.2)
    assert sorted(found.homes) in (["cpu:0", "cpu:0", "cpu:1"], ["cpu:0", "cpu:1", "cpu:1"])
    assert (found.parameter_bytes, found.is_dealt) == (0, False)
    crossing = pipelined(shards(3, values=50 * MIB), 4, offer(link=1e9))
    copies = 100 * MIB / 1e9  # values there, gradients back, each in one copy
    stages = [0.1 * crossing.homes.count("cpu:0"), 0.1 * crossing.homes.count("cpu:1") + copies]
    assert crossing.seconds == pytest.approx(sum(stages) + 3 * max(stages))


def test_parameters_that_do_not_fit_are_loaded_as_often_as_harmony_says():
    """2N|W| data-parallel on N devices, however many batches; 2|W| pipelined. |W| is written back."""
    large, count = shards(8, weights=GIB, values=0, optimizer=2 * GIB), 4
    weights = 8 * GIB
    small = offer(count, budget=3 * GIB)
    for batches in (count, 3 * count):
        teams = data_parallel(large, batches, small)
        assert (teams.parameter_bytes, teams.teams) == (2 * count * weights, count)
    pipe = pipelined(large, count, small)
    assert pipe.parameter_bytes == 2 * weights
    assert pipe.is_dealt
    assert pipe.homes == tuple(f"cpu:{index % count}" for index in range(8))
    assert fastest(large, count, small, [DATA_PARALLEL, PIPELINED]).way == PIPELINED


def test_with_few_shards_each_batch_is_by_itself():
    few, count = shards(4, weights=GIB, values=0, optimizer=2 * GIB), 4
    apart = data_parallel(few, count, offer(count, budget=3 * GIB))
    assert (apart.parameter_bytes, apart.teams) == ((2 * count + 1) * 4 * GIB, 0)


def test_batches_that_go_through_each_shard_together_load_it_twice():
    large, count = shards(8, weights=GIB, values=MIB), 4
    alone, together = (on_one_device(large, count, offer(budget=3 * GIB), grouped=way) for way in (False, True))
    assert (alone.parameter_bytes, together.parameter_bytes) == (count * 2 * 8 * GIB, 2 * 8 * GIB)
    assert together.seconds < alone.seconds / 2
    plenty = [on_one_device(large, count, offer(budget=100 * GIB), grouped=way).seconds for way in (False, True)]
    assert plenty[0] == plenty[1], "nothing is loaded where all fits"


def test_shards_are_dealt_so_that_no_device_gets_all_the_large_ones():
    small, large = (shards(1, seconds=0, weights=size, optimizer=2 * size)[0] for size in (MIB, 4 * MIB))
    found = pipelined([small, large] * 6, 4, offer(budget=8 * MIB))
    assert found.is_dealt
    held = Counter()
    for home, shard in zip(found.homes, [small, large] * 6, strict=True):
        held[home] += shard.state_bytes
    assert abs(held["cpu:0"] - held["cpu:1"]) <= large.state_bytes


def test_dealt_shards_wait_for_each_other_where_batches_are_fewer_than_devices():
    large = shards(8, weights=1, values=0)
    few, enough = (pipelined(large, count, offer(4, budget=2)).seconds for count in (2, 4))
    assert few == pytest.approx(enough)


def test_one_device_loads_parameters_for_every_unit_where_they_do_not_fit():
    large = shards(4, weights=GIB, values=0)
    assert on_one_device(large, 3, offer(budget=3 * GIB)).parameter_bytes == 2 * 3 * 4 * GIB
    assert on_one_device(large, 3, offer(budget=8 * GIB)).parameter_bytes == 0


FACTS = st.builds(
    ShardStepCost,
    seconds=st.integers(0, 9).map(float),
    state_bytes=st.integers(0, 9),
    gradient_bytes=st.integers(0, 9),
    work_bytes=st.integers(0, 9),
)


def runs_of(facts, ends):
    return [facts[first:last] for first, last in zip([0, *ends], ends, strict=False)]


def all_cuts(count, pieces):
    if pieces == 1:
        return [[count]]
    return [[*ends, count] for last in range(pieces - 1, count) for ends in all_cuts(last, pieces - 1)]


@settings(deadline=None)
@given(facts=st.lists(FACTS, min_size=1, max_size=6), num_devices=st.integers(1, 4), budget=st.integers(10, 60))
def test_neighbours_are_cut_as_well_as_any(facts, num_devices, budget):
    ends = neighbours(facts, num_devices, budget)
    possible = [
        max(sum(shard.seconds for shard in run) for run in runs_of(facts, cut))
        for cut in all_cuts(len(facts), min(num_devices, len(facts)))
        if all(fits(run, budget) for run in runs_of(facts, cut))
    ]
    if ends is None:
        assert not possible
        return
    found = runs_of(facts, ends)
    assert all(found)
    assert ends[-1] == len(facts)
    assert all(fits(run, budget) for run in found)
    assert max(sum(shard.seconds for shard in run) for run in found) == min(possible)
