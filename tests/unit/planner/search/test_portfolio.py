"""Of all ways to train the trials of a device, the fastest that fits is taken; where none does, the smallest limit is named."""

from dataclasses import replace

import pytest

from hydra_tune.errors import BudgetError
from hydra_tune.planner.search.portfolio import MARGIN, Planner
from tests.unit.planner.hand import chain

NAMES = {
    "fits, one after another",
    "full fusion",
    "kept",
    "no interleaving",
    "swaps alone",
    "recomputations alone",
    "min-cut",
    "interleaved",
    "each pair's best",
}


def array(size, *, copy=0.5, gain=0.3):
    """A sub-array whose operators take less than its trials would one after the other."""
    made = chain(6, num_bytes=100 * size, copy=copy * size, static=50 * size)
    times = {
        side: tuple(replace(op, seconds=op.seconds * (1 + gain * (size - 1))) for op in getattr(made, side))
        for side in ("forward", "backward")
    }
    return replace(made, **times)


def portfolio(limit, num_trials=4, **changes):
    return Planner(array=array, limit_bytes=limit, **changes).portfolio(num_trials)


def test_with_all_memory_that_is_wanted_all_are_fused():
    found = portfolio(1_000_000)
    assert found.best.name == "full fusion"
    assert found.best.seconds == pytest.approx(array(4).seconds)
    assert {one.name for one in found.members} == NAMES


@pytest.mark.parametrize("limit", [3000, 2000, 1500, 1200, 1000])
def test_the_best_is_the_fastest_of_those_that_fit(limit):
    found = portfolio(limit)
    fitting = [one for one in found.members if one.peak_bytes <= limit * (1 - MARGIN)]
    assert found.best.seconds == min(one.seconds for one in fitting)
    assert sum(sum(part.sizes) for part in found.best.parts) == 4
    assert all(one.fits for one in fitting)


def test_less_memory_never_makes_it_faster():
    seconds = [portfolio(limit).best.seconds for limit in (10_000, 3000, 2000, 1500, 1000)]
    assert seconds == sorted(seconds)


def test_where_nothing_fits_the_smallest_limit_is_named():
    found = portfolio(200)
    with pytest.raises(BudgetError, match="limit is 196 B") as raised:
        _ = found.best
    least = raised.value.enough_bytes
    assert portfolio(least).best.fits
    with pytest.raises(BudgetError):
        _ = portfolio(min(one.peak_bytes for one in found.members)).best


def test_a_single_trial_is_planned_alone():
    found = portfolio(700, 1)
    assert [part.sizes for part in found.best.parts] == [(1,)]


def test_an_odd_number_is_planned_in_pairs():
    found = portfolio(1400, 3)
    assert {sum(sum(part.sizes) for part in one.parts) for one in found.members} == {3}


def test_each_size_is_profiled_once():
    asked = []

    def counted(size):
        asked.append(size)
        return array(size)

    Planner(array=counted, limit_bytes=1500).portfolio(5)
    assert len(asked) == len(set(asked))


def test_sub_arrays_may_be_bounded():
    found = portfolio(100_000, 5, max_size=2)
    assert all(size <= 2 for one in found.members for part in one.parts for size in part.sizes)
