"""The maps that a minimum cut keeps are the fewest bytes that all others can be computed from."""

import pytest

from hydra_tune.planner.cost.peak_memory import peak_of
from hydra_tune.planner.ir.plan_state import undecided
from hydra_tune.planner.ir.verify import verify_schedule
from hydra_tune.planner.passes.min_cut import min_cut, min_cut_planned
from tests.unit.planner.hand import array, chain, op


def test_a_narrow_place_is_kept_and_not_the_wide_maps_behind_it():
    """The first is random, so that something has to be kept; `small` is the cheapest place to cut."""
    forward = [
        op("noise", is_random=True),
        op("small", reads=["noise"]),
        op("wide", reads=["small"]),
        op("wider", reads=["wide"]),
        op("end", reads=["wider"]),
    ]
    backward = [op("d", reads=["wider"]), op("e", reads=["wide"]), op("f", reads=["small", "noise"])]
    sizes = {"noise": 5, "small": 2, "wide": 40, "wider": 50}
    made = array(forward, backward, sizes, results=("end",))
    assert min_cut(made) == {"noise"}  # which has to be kept, and all others can be made of it
    unread = array(forward, [*backward[:2], op("f", reads=["small"])], sizes, results=("end",))
    assert min_cut(unread) == {"small"}


def test_what_is_made_of_parameters_alone_need_not_be_kept():
    assert min_cut(chain(5)) == frozenset()


@pytest.mark.parametrize("limit", [70, 50, 40])
def test_no_more_is_recomputed_than_the_limit_asks_for(limit):
    pair = (chain(8, num_bytes=10), chain(8, num_bytes=10))
    schedule = min_cut_planned(undecided(pair, limit))
    assert peak_of(schedule)[1].peak_bytes <= limit
    assert not any(one.swaps or one.slots for one in schedule.decisions)
    verify_schedule(schedule)


def test_within_the_limit_nothing_is_recomputed():
    schedule = min_cut_planned(undecided((chain(8, num_bytes=10),), 80))
    assert not schedule.decisions[0].recomputes
