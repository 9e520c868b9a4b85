"""Which sizes of planned groups are tried, and for how long."""

from dataclasses import replace
from math import inf
from types import SimpleNamespace

import pytest

from hydra_tune.fusion.runtime import planned_group_size, planned_size_search
from hydra_tune.fusion.runtime.plan_report import KEPT, PAIR, WHOLE, PlannedSizeOption
from hydra_tune.fusion.runtime.planned_group_size import compared
from hydra_tune.fusion.runtime.planned_size_search import PlannedSizeSearch, PlanningBudget
from hydra_tune.planner.search.partitions import cheapest

LARGEST = {"in proportion": 1.0, "more than in proportion": 1.5, "less than in proportion": 0.6}


@pytest.mark.parametrize("power", LARGEST.values(), ids=LARGEST)
def test_the_largest_size_that_has_a_plan_is_found_in_few_tries(power):
    for room in range(1, 12):
        for most in range(room + 1, 65):
            for largest in range(room, most + 1):
                search, tried = PlannedSizeSearch(room, most), []
                while (size := search.next) is not None:
                    assert room < size <= most
                    tried.append(size)
                    share = 1.0 if size <= largest else min(0.999, ((largest + 0.5) / size) ** power)
                    search.tried(size, share)
                assert len(set(tried)) == len(tried)
                assert {largest, largest + 1} - {room, most + 1} <= set(tried)
                assert len(tried) <= 14


def test_sizes_are_halved_where_no_need_is_known():
    search, tried = PlannedSizeSearch(1, 16), []
    while (size := search.next) is not None:
        tried.append(size)
        search.tried(size, 1.0 if size <= 2 else 0.0)
    assert tried == [16, 8, 4, 2, 3]


KEPT_WAY = PlannedSizeOption(name=KEPT, sizes=(1,), seconds=1e-3, peak_bytes=100)


@pytest.fixture
def planned(monkeypatch):
    """The sizes of the ways that were planned; up to three trials in all have a plan."""
    found = []

    def tried(planner, stacks):
        sizes = tuple(stacks)
        found.append(sizes)
        if sum(sizes) > 3:
            return PlannedSizeOption(name="", sizes=sizes, why_not="too large", enough_bytes=40 * sum(sizes))
        return PlannedSizeOption(name="", sizes=sizes, seconds=1e-3 * len(sizes), peak_bytes=1)

    monkeypatch.setattr(planned_group_size, "_tried", tried)
    return found


def of(num_trials, most, **options):
    planner = SimpleNamespace(budget_bytes=120)
    return compared(
        planner,
        lambda begin, end: end - begin,
        num_trials,
        KEPT_WAY,
        most,
        **({"insists": True, "least_gain": 1.0} | options),
    )


@pytest.mark.parametrize("most", [1, 2])
def test_sizes_whose_state_has_no_room_beside_an_evaluation_use_up_no_tries(planned, most):
    choice = of(16, most)
    assert choice.size == (3 if most == 2 else 2)
    assert choice.ways[1].sizes == (16,)
    assert "beside the evaluation of one" in choice.ways[1].why_not
    assert max(max(sizes) for sizes in planned) == most


def test_with_insisting_users_the_largest_size_is_taken_and_the_faster_way_of_it(planned):
    choice = of(16, 16)
    assert (choice.size, choice.chosen.sizes) == (3, (3,))
    assert planned == [(16,), (8, 8), (3,), (2, 1), (4,), (2, 2)]


@pytest.fixture
def clock(monkeypatch):
    """CPU seconds of the thread, which tries alone take."""
    now = [0.0]
    monkeypatch.setattr(planned_size_search.time, "thread_time", lambda: now[0])
    return now


@pytest.mark.parametrize("look", [0.1, 0.39, 1.0, 1.19])
@pytest.mark.parametrize("cost", [0.5, 1.0, 2.0])
def test_a_search_of_a_minute_gives_two_percent_to_planning_that_finds_nothing(monkeypatch, clock, look, cost):
    def tried(planner, stacks):
        clock[0] += cost * look
        return PlannedSizeOption(name="", sizes=tuple(stacks), why_not="too large", enough_bytes=10**9)

    monkeypatch.setattr(planned_group_size, "_tried", tried)
    budget = PlanningBudget(60.0, look, insists=False)
    if budget.allows(None):
        assert of(64, 64, insists=False, budget=budget).size == 1
    assert look + clock[0] <= 0.02 * 60 + 1e-9
    assert look >= 0.4 or clock[0] > 0, "something was tried"


def test_a_way_that_gains_is_worth_more_planning(clock):
    budget = PlanningBudget(60.0, 1.0, insists=False)
    assert not budget.allows(None)
    assert not budget.allows(1.05)
    assert budget.allows(2.0)


def test_the_first_way_that_gains_is_taken_when_the_time_for_planning_is_over(monkeypatch, clock):
    def tried(planner, stacks):
        clock[0] += 10.0
        return PlannedSizeOption(name="", sizes=tuple(stacks), seconds=1e-3, peak_bytes=1)

    monkeypatch.setattr(planned_group_size, "_tried", tried)
    assert of(16, 16, insists=False, budget=PlanningBudget(60.0, 0.3, insists=False)).chosen.sizes == (2,)


def test_insisting_users_get_some_plan_however_long_that_takes(monkeypatch, clock):
    def tried(planner, stacks):
        clock[0] += 100.0
        if sum(stacks) > 2:
            return PlannedSizeOption(name="", sizes=tuple(stacks), why_not="too large")
        return PlannedSizeOption(name="", sizes=tuple(stacks), seconds=1.0, peak_bytes=1)

    monkeypatch.setattr(planned_group_size, "_tried", tried)
    assert of(16, 16, budget=PlanningBudget(1.0, 1.0, insists=True)).size == 2
    assert clock[0] == 700.0  # two ways of 16, 8 and 4, and one of 2


TRUTH = {"alone": 1.8, "pair": 1.1}
"""Seconds of a planned step over those of its operators."""


@pytest.fixture
def machine(monkeypatch):
    """The parts that were planned; a part needs 15 bytes for each trial, and as much again for each of its larger group."""
    found = []

    def tried(planner, stacks):
        sizes = tuple(stacks)
        found.append(sizes)
        operators = tuple(map(operator_seconds, sizes))
        way = PlannedSizeOption(name=PAIR if len(sizes) > 1 else WHOLE, sizes=sizes, operator_seconds=operators)
        needs = 15 * sum(sizes) + 15 * max(sizes)
        if needs > planner.budget_bytes:
            return replace(way, why_not="too large", enough_bytes=needs)
        return replace(way, seconds=sum(operators) * TRUTH["pair" if len(sizes) > 1 else "alone"], peak_bytes=needs)

    monkeypatch.setattr(planned_group_size, "_tried", tried)
    return found


def operator_seconds(size):
    return 1e-3 * (0.7 + 0.3 * size)


def seconds_of(part):
    return sum(map(operator_seconds, part)) * TRUTH["pair" if len(part) > 1 else "alone"]


@pytest.mark.parametrize(
    ("num_trials", "expected"),
    [(4, [(2, 2)]), (6, [(3, 2), (1,)]), (8, [(3, 2), (2, 1)]), (13, [(3, 2), (2, 2), (2, 2)])],
)
def test_all_that_wait_are_divided_into_the_fastest_partition(machine, num_trials, expected):
    """Of three and more groups, which differ in size."""
    choice = of(num_trials, 64, insists=False)
    assert [part.sizes for part in choice.parts] == expected
    assert choice.size == sum(expected[0])
    marked = {way.sizes for way in choice.ways if way.is_chosen}
    assert marked == set(expected)
    told = {
        1: "at once",
        2: "jobs of 1 x (3 + 2), 1 x (",
        3: "jobs of 1 x (3 + 2), 2 x (2 + 2): a step of all takes 8.91 ms",
    }
    assert told[len(expected)] in choice.told[-1]
    assert len(machine) <= 25


@pytest.mark.parametrize("num_trials", [3, 7, 12])
def test_the_partition_is_the_one_that_a_portfolio_of_all_plans_would_choose(machine, num_trials):
    choice = of(num_trials, 64, insists=False)
    seconds = sum(part.seconds for part in choice.parts)

    def of_any(part):
        fits = 15 * sum(part) + 15 * max(part) <= 120
        return min(seconds_of(part) if fits else inf, 1e-3 if part == (1,) else inf)

    assert seconds <= cheapest(num_trials, of_any)[0] / (1 - planned_size_search.LEAST_SAVING)


def test_groups_of_a_partition_have_no_more_members_than_can_be_evaluated(machine):
    choice = of(7, 2, insists=False)
    assert max(map(max, machine)) == 2
    assert [part.sizes for part in choice.parts] == [(2, 2), (2, 1)]


def test_where_the_time_is_over_trials_that_are_left_are_asked_about_again(machine, clock, monkeypatch):
    tried = planned_group_size._tried

    def slow(planner, stacks):
        clock[0] += 0.14
        return tried(planner, stacks)

    monkeypatch.setattr(planned_group_size, "_tried", slow)
    choice = of(9, 64, insists=False, budget=PlanningBudget(60.0, 0.05, insists=False))
    assert [part.sizes for part in choice.parts] == [(3, 2)]
    assert choice.rests(9) == {}
    choice = of(9, 64, insists=False, budget=PlanningBudget(1e3, 0.05, insists=False))
    assert [part.sizes for part in choice.parts] == [(3, 2), (2, 2)]
    assert list(choice.rests(9)) == [4]


def test_no_plan_is_chosen_that_gains_less_than_is_demanded(machine):
    assert of(4, 64, insists=False, least_gain=2.0).chosen.name == KEPT
