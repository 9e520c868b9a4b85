"""Every partition the paper's rule admits, in pairs of closest times, and none that cannot win."""

import itertools

import pytest

from hydra_tune.planner.search.partitions import pairs, within


def partitions(total, largest=None, *, is_part=False):
    """All divisions into an even number of sub-arrays, largest first; a single trial is alone."""
    if not total:
        return [()]
    sizes = range(min(total, largest or total), 0, -1)
    found = [(size, *rest) for size in sizes for rest in partitions(total - size, size, is_part=True)]
    return found if is_part or total == 1 else [parts for parts in found if len(parts) % 2 == 0]


def every(num_trials):
    """The partitions that come where none is known to be faster."""
    return set(within(num_trials, float, lambda: float("inf")))


def test_eight_trials_have_the_papers_four_partitions_and_what_else_the_rule_admits():
    assert {(4, 4), (3, 3, 1, 1), (2, 2, 2, 2), (1,) * 8} <= every(8)
    assert len(every(8)) == 12
    assert all(sum(parts) == 8 and len(parts) % 2 == 0 for parts in every(8))


@pytest.mark.parametrize(("num_trials", "expected"), [(1, {(1,)}), (2, {(1, 1)}), (3, {(2, 1)})])
def test_a_single_trial_and_few_trials(num_trials, expected):
    assert every(num_trials) == expected


def test_an_odd_number_of_trials_makes_an_even_number_of_sub_arrays():
    assert every(5) == {(4, 1), (3, 2), (2, 1, 1, 1)}


def test_pairs_are_the_closest_of_all_ways_to_pair():
    seconds = {1: 1.0, 2: 1.1, 3: 5.0, 4: 4.5, 5: 9.0, 6: 9.5}
    found = pairs(list(seconds), seconds.__getitem__)
    apart = sum(abs(seconds[first] - seconds[second]) for first, second in found)
    ways = (
        sum(abs(seconds[a] - seconds[b]) for a, b in zip(order[::2], order[1::2], strict=True))
        for order in itertools.permutations(seconds)
    )
    assert apart == pytest.approx(min(ways))


def test_of_an_odd_number_the_one_that_fits_worst_is_alone():
    assert pairs([1, 2, 7], float) == [(1, 2), (7,)]


@pytest.mark.parametrize("num_trials", [1, 2, 7, 12])
def test_the_bound_leaves_out_only_what_cannot_win(num_trials):
    def seconds(size):
        return 1.0 + 0.1 * size * size

    totals = [float("inf")]
    seen = []
    for parts in within(num_trials, seconds, lambda: min(totals)):
        seen.append(parts)
        totals.append(sum(map(seconds, parts)))
    assert min(totals) == min(sum(map(seconds, parts)) for parts in partitions(num_trials))
    assert len(seen) == len(set(seen)) <= sum(1 for _ in partitions(num_trials))


def test_without_a_bound_all_partitions_come():
    assert every(9) == set(partitions(9))


def test_a_bound_spares_most_of_many_partitions():
    best = 2.5
    assert sum(1 for _ in within(40, lambda size: 1.0 + 0.01 * size, lambda: best)) < 100


def test_pairs_are_of_close_times_and_not_of_close_sizes():
    """The trial of one takes as long as the three, and the two as the four."""
    seconds = {1: 9.0, 2: 1.0, 3: 8.0, 4: 2.0}
    assert [set(pair) for pair in pairs(list(seconds), seconds.__getitem__)] == [{2, 4}, {1, 3}]


def test_a_partition_that_can_only_be_as_fast_as_the_best_one_known_is_left_out():
    """Each trial takes a second by itself, so that all partitions of four take at least four."""
    assert list(within(4, float, lambda: 4.0)) == []
    assert (2, 2) in set(within(4, float, lambda: 4.5))
