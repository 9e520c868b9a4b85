"""Measured steps decide; what is off by more than a fifth corrects the model, and trials are planned again with that."""

import pytest

from benchmarks.mutwo_choice import contenders, settled
from hydra_tune.errors import BudgetError
from hydra_tune.planner.search.autotune import MeasuredPlan, ProfileCorrection, fitted, key_of
from hydra_tune.planner.search.portfolio import Planner
from tests.unit.planner.search.test_portfolio import array

LIMIT = 1500


class Machine:
    """Where arrays take what a correction says, and a swap so many seconds more than the profile has it."""

    def __init__(self, limit=LIMIT, **truth):
        self.planner = Planner(array=array, limit_bytes=limit)
        self.true = self.planner.corrected(ProfileCorrection(**truth).array)
        self.ran = []

    def __call__(self, members):
        self.ran.append([one.name for one in members])
        return [self.true.told(one).seconds for one in members]


def settled_on(machine, **changes):
    return settled(machine.planner, 4, machine, **changes)


def test_where_the_profile_is_right_nothing_is_planned_again():
    machine = Machine()
    found = settled_on(machine)
    assert found.corrections == ()
    assert len(machine.ran) == 1
    assert key_of(found.member) == key_of(machine.planner.portfolio(4).best)


def test_the_fastest_measured_is_taken_not_the_fastest_predicted():
    machine = Machine(swap_seconds=8.0)
    predicted = machine.planner.portfolio(4).best
    assert any(one.swaps for part in predicted.parts for one in part.schedule.decisions)
    found = settled_on(machine, max_corrections=0)
    assert found.member.name != predicted.name
    assert found.trials[0].seconds == min(trial.seconds for trial in found.trials)


def test_what_swaps_cost_is_learnt_and_planned_with():
    machine = Machine(swap_seconds=8.0)
    found = settled_on(machine)
    (correction,) = found.corrections
    assert correction.swap_seconds == pytest.approx(8.0)
    assert correction.others == pytest.approx(1.0)
    assert found.trials[0].seconds == pytest.approx(machine.true.portfolio(4).best.seconds)
    assert all(trial.member.seconds == pytest.approx(trial.seconds) for trial in found.trials)


def test_what_operators_of_a_size_take_is_learnt():
    machine = Machine(compute={2: 3.0})
    found = settled_on(machine)
    assert found.corrections[0].compute[2] == pytest.approx(3.0)
    still = [one for one in found.trials if not any(d.swaps for p in one.member.parts for d in p.schedule.decisions)]
    assert still
    assert all(trial.member.seconds == pytest.approx(trial.seconds) for trial in still)


def test_a_second_correction_comes_upon_the_first():
    planner = Planner(array=array, limit_bytes=LIMIT)
    twice = planner.corrected(ProfileCorrection(others=2.0).array).corrected(ProfileCorrection(others=1.5).array)
    assert twice.portfolio(4).best.seconds == pytest.approx(
        planner.corrected(ProfileCorrection(others=3.0).array).portfolio(4).best.seconds
    )


def test_a_machine_that_has_become_slower_meanwhile_is_no_reason_to_change():
    """New candidates are measured beside the fastest so far."""
    machine = Machine(swap_seconds=8.0)
    honest = settled_on(machine).member
    slow = Machine(swap_seconds=8.0)

    def measure(members):
        pace = 5.0 if slow.ran else 1.0
        return [pace * seconds for seconds in slow(members)]

    found = settled(slow.planner, 4, measure)
    assert len(slow.ran) == 2
    assert key_of(found.member) == key_of(honest)


def test_members_that_do_the_same_are_measured_once():
    portfolio = Planner(array=array, limit_bytes=LIMIT).portfolio(4)
    found = contenders(portfolio, 99)
    assert len({key_of(one) for one in found}) == len(found) < len([one for one in portfolio.members if one.fits])


def test_one_without_swaps_is_always_among_those_measured():
    found = contenders(Planner(array=array, limit_bytes=LIMIT).portfolio(4), 1)
    assert any(not one.swaps for member in found for part in member.parts for one in part.schedule.decisions)
    assert len(found) > 1


def test_a_disturbed_profile_of_one_size_hides_nothing():
    """Two trials look four times as slow as they are: what has them comes last, and is measured all the same."""

    def disturbed(size):
        return ProfileCorrection(compute={2: 4.0}).array(size, array(size))

    planner = Planner(array=disturbed, limit_bytes=LIMIT)
    true = Planner(array=array, limit_bytes=LIMIT)

    def measure(members):
        return [true.told(one).seconds for one in members]

    found = settled(planner, 4, measure, most=1)
    assert found.corrections[0].compute[2] == pytest.approx(0.25)
    assert found.trials[0].seconds <= 1.1 * true.portfolio(4).best.seconds


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


def test_what_always_swaps_is_told_apart_by_what_swaps_cost_others():
    """Four trials fit with swaps alone; two are measured with and without."""
    truth = ProfileCorrection(compute={1: 1.5, 2: 1.0, 4: 2.0}, swap_seconds=0.5)
    planner = Planner(array=array, limit_bytes=1200)
    true = planner.corrected(truth.array)
    members = contenders(planner.portfolio(4))
    assert {(4,), (2, 2), (1,)} == {part.sizes for one in members for part in one.parts}
    found = fitted([MeasuredPlan(member=one, seconds=true.told(one).seconds) for one in members])
    assert found.swap_seconds == pytest.approx(truth.swap_seconds)
    assert found.compute == pytest.approx(truth.compute, rel=0.02)  # slower operators hide a little more of the copies


def test_where_all_swap_the_whole_difference_is_of_operators():
    swapping = Planner(array=array, limit_bytes=LIMIT).portfolio(4).best
    assert any(one.swaps for part in swapping.parts for one in part.schedule.decisions)
    found = fitted([MeasuredPlan(member=swapping, seconds=2 * swapping.seconds)])
    assert (found.others, found.swap_seconds) == (2.0, 0.0)


def test_where_no_plan_fits_it_says_so():
    machine = Machine(limit=200)
    with pytest.raises(BudgetError, match="no plan"):
        settled_on(machine)
    assert machine.ran == []
