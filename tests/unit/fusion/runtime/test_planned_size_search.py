"""Which sizes of planned groups are tried, and for how long."""

from types import SimpleNamespace

import pytest

from hydra_tune.fusion.runtime import planned_group_size, planned_size_search
from hydra_tune.fusion.runtime.plan_report import KEPT, PlannedSizeOption
from hydra_tune.fusion.runtime.planned_group_size import compared
from hydra_tune.fusion.runtime.planned_size_search import PlannedSizeSearch, PlanningBudget

LARGEST = {"in proportion": 1.0, "more than in proportion": 1.5, "less than in proportion": 0.6}


@pytest.mark.parametrize("power", LARGEST.values(), ids=LARGEST)
@pytest.mark.parametrize("is_for_largest", [True, False])
def test_the_largest_size_that_has_a_plan_is_found_in_few_tries(power, is_for_largest):
    for room in range(1, 12):
        for most in range(room + 1, 65):
            first = most if is_for_largest else 2 * room
            for largest in range(room, most + 1):
                search, tried = PlannedSizeSearch(room, most, first, is_for_largest=is_for_largest), []
                while (size := search.next) is not None:
                    assert room < size <= most
                    tried.append(size)
                    share = 1.0 if size <= largest else min(0.999, ((largest + 0.5) / size) ** power)
                    search.tried(size, share)
                assert len(set(tried)) == len(tried)
                assert {largest, largest + 1} - {room, most + 1} <= set(tried)
                assert len(tried) <= (14 if is_for_largest else 16)


def test_sizes_are_halved_where_no_need_is_known():
    search, tried = PlannedSizeSearch(1, 16, 16, is_for_largest=True), []
    while (size := search.next) is not None:
        tried.append(size)
        search.tried(size, 1.0 if size <= 2 else 0.0)
    assert tried == [16, 8, 4, 2, 3]


def test_where_the_fastest_size_counts_sizes_below_the_largest_are_tried_as_well():
    search, tried = PlannedSizeSearch(2, 16, 4, is_for_largest=False), []
    while (size := search.next) is not None:
        tried.append(size)
        search.tried(size, 1.0 if size <= 10 else 10.5 / size)
    assert tried == [4, 10, 13, 11, 6, 3]


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
        least_gain=1.0,
        **({"insists": True} | options),
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
