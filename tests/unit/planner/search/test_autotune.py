"""Measured steps decide; a prediction that is off by more than a fifth is put down to the operators of the step."""

from dataclasses import replace

import pytest

from benchmarks.mutwo_choice import contenders, settled
from hydra_tune.errors import BudgetError
from hydra_tune.planner.cost.latency import StepTimeBreakdown
from hydra_tune.planner.search.autotune import key_of, operator_ratio, slowed
from hydra_tune.planner.search.portfolio import Planner
from tests.unit.planner.search.test_portfolio import array

LIMIT = 1500


class Machine:
    """Where operators of a sub-array, and swaps, take other times than the profile has them."""

    def __init__(self, limit=LIMIT, arrays=array, compute=(), swap_seconds=0.0):
        self.planner = Planner(array=arrays, limit_bytes=limit)
        self.compute, self.swap_seconds = dict(compute), swap_seconds
        self.ran = []

    def __call__(self, members):
        self.ran += members
        return [sum(map(self.seconds, one.parts)) for one in members]

    def seconds(self, part):
        arrays = tuple(slowed(array(size), self.compute.get(size, 1.0)) for size in part.sizes)
        swaps = sum(len(one.swaps) for one in part.schedule.decisions)
        return self.planner.timed(part, arrays).times.seconds + swaps * self.swap_seconds


def swaps(member):
    return sum(len(one.swaps) for part in member.parts for one in part.schedule.decisions)


def test_the_fastest_measured_is_taken_not_the_fastest_predicted():
    machine = Machine(swap_seconds=8.0)
    predicted = machine.planner.portfolio(4).best
    assert swaps(predicted)
    found = settled(machine.planner, 4, machine)
    assert found.name != predicted.name
    assert machine([found]) == [min(machine(machine.ran))]


def test_members_that_do_the_same_are_measured_once():
    portfolio = Planner(array=array, limit_bytes=LIMIT).portfolio(4)
    found = contenders(portfolio, 99)
    assert len({key_of(one) for one in found}) == len(found) < len([one for one in portfolio.members if one.fits])


def test_a_tensor_that_returns_at_no_time_makes_no_other_plan():
    member = Planner(array=array, limit_bytes=LIMIT).portfolio(4).best
    key = key_of(member)
    member.parts[0].schedule.decisions[0].returns["left over"] = {}
    assert key_of(member) == key


def test_one_without_swaps_is_always_among_those_measured():
    found = contenders(Planner(array=array, limit_bytes=LIMIT).portfolio(4), 1)
    assert any(not swaps(member) for member in found)
    assert len(found) > 1


def test_a_disturbed_profile_of_one_size_hides_nothing():
    """Two trials look four times as slow as they are: what has them comes last, and is measured all the same."""

    def disturbed(size):
        return slowed(array(size), 4.0 if size == 2 else 1.0)

    machine = Machine(arrays=disturbed)
    settled(machine.planner, 4, machine, most=1)
    assert any(2 in part.sizes for one in machine.ran for part in one.parts)


def test_each_partition_is_among_those_measured():
    def partition(member):
        return sorted(part.sizes for part in member.parts)

    members = Planner(array=array, limit_bytes=1000).portfolio(4)
    every = [partition(one) for one in members.members if one.fits]
    found = [partition(one) for one in contenders(members, 1)]
    assert all(one in found for one in every)
    assert sorted(one for place, one in enumerate(every) if one not in every[:place]) == [
        [(1,)] * 4,
        [(2, 2)],
    ]


def test_where_no_plan_fits_it_says_so():
    machine = Machine(limit=200)
    with pytest.raises(BudgetError, match="no plan"):
        settled(machine.planner, 4, machine)
    assert machine.ran == []


def test_the_whole_difference_is_of_operators():
    (part,) = Planner(array=array, limit_bytes=LIMIT).portfolio(4).best.parts
    waiting = replace(part, times=StepTimeBreakdown(compute=6.0, recompute=2.0, stall=1.0, copies=3.0))
    assert operator_ratio(waiting, 17.0) == 2.0
    assert operator_ratio(waiting, 0.5) == 0.0, "waits are not taken for operators"


def test_slower_operators_are_planned_with():
    profiled, slower = array(2), slowed(array(2), 1.5)
    assert slower.seconds == pytest.approx(1.5 * profiled.seconds)
    assert (slower.sizes, slower.out_seconds) == (profiled.sizes, profiled.out_seconds)
