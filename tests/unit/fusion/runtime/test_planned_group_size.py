"""How many trials are one job is asked once for those that wait, and not again for what is left of them."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.runtime import planned_group_size
from hydra_tune.fusion.runtime.plan_report import KEPT, PAIR, PlannedSizeOption, chosen_of
from hydra_tune.fusion.runtime.planned_group_size import PlannedSizeChooser

WANTED = SimpleNamespace(tensors=())
OWN = SimpleNamespace(seconds=None, plan=SimpleNamespace(operators=()))


def member(loss="one"):
    return SimpleNamespace(
        task=SimpleNamespace(max_grad_norm=None), loss=loss, built=lambda: None, peek=lambda: nullcontext({})
    )


class Plans:
    """Of groups, whose members have one loss or several."""

    def of_members(self, members, wanted):
        return OWN, SimpleNamespace(rows="rows" if len({one.loss for one in members}) > 1 else None, drops=())

    def stacked(self, own, count, slots):
        return count


@pytest.fixture
def asked(monkeypatch):
    """How many trials planned ways were compared for; four of them are to be a pair."""
    found = []

    def compared(planner, stack, num_trials, kept, most, *, insists, least_gain, budget):
        found.append(num_trials)
        size = min(4, num_trials)
        pair = PlannedSizeOption(name=PAIR, sizes=(size // 2, size - size // 2), seconds=1.0, peak_bytes=1)
        return chosen_of([kept, pair], pair)

    kept = PlannedSizeOption(name=KEPT, sizes=(1,), seconds=1.0, peak_bytes=1)
    monkeypatch.setattr(planned_group_size, "compared", compared)
    monkeypatch.setattr(planned_group_size, "stack_of", lambda *_, **__: None)
    monkeypatch.setattr(planned_group_size, "kept_way", lambda *_: kept)
    monkeypatch.setattr(planned_group_size, "steps_of", lambda _: 100)
    return found


def best(sizes, members):
    choice = sizes.best("kind", members, WANTED, 1)
    return None if choice is None else choice.size


def test_what_was_chosen_for_many_holds_for_those_that_are_left(asked):
    sizes = PlannedSizeChooser(Plans(), None, insists=True)
    assert [best(sizes, [member()] * count) for count in (8, 7, 4, 3, 3, 8, 9)] == [4, 4, 4, 3, 3, 4, 4]
    assert asked == [8, 3, 9]


def test_members_with_losses_of_their_own_are_not_given_what_was_chosen_for_others(asked, caplog):
    caplog.set_level(logging.INFO, "hydra_tune.fusion")
    sizes = PlannedSizeChooser(Plans(), None, insists=True)
    assert best(sizes, [member()] * 4) == 4
    assert best(sizes, [*[member()] * 3, member("other")]) is None
    assert "no more than 1 of 4 trials are computed together: their losses are not the same" in caplog.text
    assert best(sizes, [member()] * 4) == 4
    assert asked == [4]


def test_trials_that_were_too_few_to_be_planned_are_not_planned_when_fewer_are_left(asked, monkeypatch):
    """What a look at their steps takes is known the second time, and counts all the same."""
    times = iter([0.0, 100.0, 100.0, 100.0])
    monkeypatch.setattr(planned_group_size.time, "thread_time", lambda: next(times))
    sizes = PlannedSizeChooser(Plans(), None, insists=False)
    assert not sizes.keeps("kind", 8, 1, clips=False)
    assert best(sizes, [member()] * 8) is None
    assert [sizes.keeps("kind", count, 1, clips=False) for count in (7, 8, 9)] == [True, True, False]
    assert best(sizes, [member()] * 7) is None
    assert asked == []


def measured(seconds):
    """A plan whose step was measured to take so long, in fifteen operators."""
    return SimpleNamespace(
        seconds=SimpleNamespace(forward=(seconds / 2,), backward=(seconds / 2,)),
        plan=SimpleNamespace(operators=("",) * 15),
    )


@pytest.mark.parametrize(("seconds", "devices"), [(10.0, 1), (60.0, 4)])
def test_a_search_in_which_a_look_takes_over_two_percent_has_none(seconds, devices):
    """Tracing a step halts all devices."""
    sizes = PlannedSizeChooser(Plans(), None, insists=False, num_devices=devices)
    with pytest.raises(UnfusableError, match="too few to plan them"):
        sizes.check_worth(measured(1e-3), seconds / 1e-3)
    PlannedSizeChooser(Plans(), None, insists=True).check_worth(measured(1e-3), seconds / 1e-3)
    PlannedSizeChooser(Plans(), None, insists=False).check_worth(measured(1e-3), 60.0 / 1e-3)


def test_where_looks_take_longer_than_guessed_later_ones_are_expected_to(asked, monkeypatch):
    times = iter([0.0, 2.0])
    monkeypatch.setattr(planned_group_size, "steps_of", lambda _: 10)
    monkeypatch.setattr(planned_group_size.time, "thread_time", lambda: next(times))
    sizes = PlannedSizeChooser(Plans(), None, insists=False)
    sizes.check_worth(measured(1e-3), 60_000)
    assert best(sizes, [member()] * 8) is None
    with pytest.raises(UnfusableError, match="too few to plan them"):
        sizes.check_worth(measured(1e-3), 60_000)


def test_trials_that_a_partition_leaves_over_get_their_part_of_it(asked, monkeypatch):
    """Seven trials are a pair of three and two, and a pair of one and one, which is not asked about again."""

    def compared(planner, stack, num_trials, kept, most, **_):
        asked.append(num_trials)
        parts = [PlannedSizeOption(name=PAIR, sizes=sizes, seconds=1.0, peak_bytes=1) for sizes in ((3, 2), (1, 1))]
        return chosen_of([kept, *parts], *parts)

    monkeypatch.setattr(planned_group_size, "compared", compared)
    sizes = PlannedSizeChooser(Plans(), None, insists=False)
    first, second = (sizes.best("kind", [member()] * count, WANTED, 1) for count in (7, 2))
    assert [(one.size, one.each) for one in (first, second)] == [(5, 3), (2, 1)]
    assert asked == [7]
