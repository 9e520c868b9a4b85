"""Of all ways to divide trials into sub-arrays and pairs the fastest is found, and few parts are planned for that."""

import itertools
from math import inf

import pytest

from hydra_tune.planner.search.partitions import PartitionSearch, cheapest


def partitions(total, largest=None):
    """All divisions into sub-arrays, largest first."""
    if not total:
        return [()]
    sizes = range(min(total, largest or total), 0, -1)
    return [(size, *rest) for size in sizes for rest in partitions(total - size, size)]


def paired(sizes):
    """All ways to make pairs of some sub-arrays, and to leave the others by themselves."""
    if not sizes:
        return [()]
    first, *rest = sizes
    alone = [((first,), *parts) for parts in paired(rest)]
    return alone + [
        ((first, rest[at]), *parts) for at in range(len(rest)) for parts in paired(rest[:at] + rest[at + 1 :])
    ]


def every(num_trials):
    """All partitions into parts."""
    return {tuple(sorted(parts)) for sizes in partitions(num_trials) for parts in paired(list(sizes))}


def operators(size):
    """Seconds of the operators of a step: the more trials, the fewer for each."""
    return 1.0 + 0.1 * size


def needs(part):
    """Units of memory, of which there are seven."""
    return part[0] + 0.5 * sum(part)


def seconds(part):
    """With waits, fewer in a pair; infinite for what does not fit."""
    return sum(map(operators, part)) * (1.3 if len(part) == 1 else 1.1) if needs(part) <= 7 else inf


def searched(num_trials, planned=seconds, share=lambda part: 7 / needs(part), at_least=operators):
    """The best partition, and the parts that were planned for that."""
    search, tried = PartitionSearch(num_trials, at_least), []
    while (part := search.next) is not None:
        tried.append(part)
        if planned(part) < inf:
            search.planned(part, planned(part))
        else:
            search.refused(part, share(part))
    return search, tried


@pytest.mark.parametrize("num_trials", [1, 2, 3, 5, 7, 9])
def test_the_fastest_of_all_partitions_is_found(num_trials):
    search, tried = searched(num_trials)
    assert search.seconds == pytest.approx(min(sum(map(seconds, parts)) for parts in every(num_trials)))
    assert search.seconds == pytest.approx(sum(map(seconds, search.best)))
    assert sum(map(sum, search.best)) == num_trials
    assert len(set(tried)) == len(tried)


def test_the_number_of_sub_arrays_may_be_odd_and_their_sizes_differ():
    assert searched(10)[0].best == ((4, 2), (4,))


def test_of_equally_fast_partitions_the_one_of_fewer_parts_is_best():
    assert cheapest(4, lambda part: float(sum(part)))[1] == ((2, 2),)
    assert cheapest(3, lambda part: 1.0 if part == (1,) else inf) == (3.0, ((1,),) * 3)


def test_what_does_not_fit_rules_out_what_needs_more():
    _, tried = searched(12, lambda part: seconds(part) if sum(part) <= 4 else inf, lambda part: 1.0)
    refused = [part for part in tried if sum(part) > 4]
    for first, other in itertools.combinations(refused, 2):
        assert not (len(first) == len(other) and other[0] >= first[0] and sum(other) >= sum(first))
    assert len(tried) < 20


def test_where_nothing_fits_there_is_none():
    search, tried = searched(6, lambda part: inf, lambda part: 0.1)
    assert (search.best, search.seconds) == ((), inf)
    assert tried[-1] == (1,)


def test_nothing_is_planned_that_cannot_be_faster_than_what_is_known():
    search = PartitionSearch(4, float)
    search.below = 4.0
    assert search.next is None
    search.below = 4.5
    assert search.next is not None


def test_a_small_saving_is_not_looked_for():
    search = PartitionSearch(4, operators, least_saving=0.5)
    search.planned((2, 2), 3.0)
    search.refused((4,))
    assert search.next is None
    eager = PartitionSearch(4, operators)
    eager.planned((2, 2), 3.0)
    eager.refused((4,))
    assert eager.next is not None


def test_sizes_that_are_not_wanted_are_not_planned():
    search, tried = searched(6, at_least=lambda size: operators(size) if size <= 2 else inf)
    assert max(map(max, tried)) == 2
    assert search.best


def test_many_trials_are_divided_with_few_plans():
    search, tried = searched(64)
    assert sum(map(sum, search.best)) == 64
    assert len(tried) <= 30
