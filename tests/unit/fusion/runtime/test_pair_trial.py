"""Which of two groups goes on: both in turn where they can, neither long without the other, and one alone at the end."""

import time
from types import SimpleNamespace

import pytest

from hydra_tune.errors import BudgetError
from hydra_tune.fusion.group.membership import PATIENCE_SECONDS
from hydra_tune.fusion.runtime import pair_trial
from hydra_tune.fusion.runtime.pair_side import PairSide
from hydra_tune.fusion.runtime.pair_trial import PairTrial
from hydra_tune.train.loop.batch_units import PendingUnit
from hydra_tune.train.timing.unit_times import UnitTimes
from hydra_tune.train.trial import PendingReport
from tests.unit.pool.fusion.test_planned_steps import task


def unit(kind):
    return PendingUnit(kind=kind, shard=0, seconds=1.0, run=lambda *_: 0.0, times=UnitTimes({}), key=(kind, 0))


class Group:
    """A group that does what it is told: a name for a unit, ("offer", kind of batch, steps done), "wait", or nothing more."""

    def __init__(self, remaining, *plot):
        self.task = task(0)
        self.plot = list(plot)
        self.remaining_seconds = remaining
        self.seats, self.state, self.beside, self.offer = [], None, None, None
        self.takes_turns = self.hands_back = False
        self.num_shards, self.optimizer_placement, self.plans = 1, None, set()
        self.is_due = self.is_closed = False
        self.given = []

    def advance(self):
        if self.offer is not None:  # it has not been run
            self.offer = None
            return unit("alone")
        if not self.plot:
            return None
        what = self.plot.pop(0)
        if what == "wait":
            self.plot.insert(0, "wait") if not self.is_due else None
            return PendingReport(step=0, metrics={})
        if isinstance(what, tuple):
            self.offer = SimpleNamespace(
                kind=what[1], wanted=None, steps_done=what[2], prepared=object(), stack=None, half=None
            )
            return unit("offered")
        return unit(what)

    def units_in(self, one):
        return 1

    def finished(self, one, seconds):
        self.given.append((one.kind, seconds))

    def close(self, *, keep):
        self.is_closed = True


class NoPlanner:
    """Plans nothing, so that groups make their steps by themselves."""

    def planned(self, *stacks):
        raise BudgetError("no room", enough_bytes=1)


def trial_of(first, second):
    told = []
    desk = SimpleNamespace(stays=lambda size, why: told.append(size))
    sides = PairSide(desk), PairSide(desk)
    return PairTrial(sides, (first, second), None, None, desk, NoPlanner()), told


def kinds(trial, count):
    """What is due, unit by unit, each of which takes a second."""
    found = []
    for _ in range(count):
        step = trial.advance()
        if step is None or isinstance(step, PendingReport):
            found.append(None if step is None else "waits")
            continue
        found.append(step.kind)
        trial.finished(step, 1.0)
    return found


def test_evaluations_of_one_go_before_steps_that_the_other_is_ready_for():
    first, second = Group(3.0, ("offer", "a", 1)), Group(2.0, "evaluate", "evaluate", ("offer", "a", 1))
    trial, told = trial_of(first, second)
    assert trial.remaining_seconds == 5.0
    assert kinds(trial, 2) == ["evaluate", "evaluate"]
    assert first.given == []
    assert second.given == [("evaluate", 1.0)] * 2
    assert kinds(trial, 3) == ["alone", "alone", None]  # there is no plan for both
    assert first.given == [("alone", 1.0)]
    assert [first.is_closed, second.is_closed] == [True, True]
    assert told == [0]


def test_of_batches_of_two_kinds_those_of_the_group_that_is_behind_go_first():
    first, second = Group(1.0, ("offer", "a", 8)), Group(1.0, ("offer", "b", 7), ("offer", "a", 8))
    trial, _ = trial_of(first, second)
    assert kinds(trial, 1) == ["alone"]
    assert (first.given, second.given) == ([], [("alone", 1.0)])


@pytest.mark.parametrize("now", [0.0, 1e3, 4711.11, 86400.1, 1e6 / 3, 1e8 + 0.3])
def test_a_group_waits_for_answers_to_the_other_and_not_for_long(now, monkeypatch):
    """However long the machine has been up: readings of a clock are rounded by that."""
    first, second = Group(1.0, ("offer", "a", 1)), Group(1.0, "wait")
    trial, _ = trial_of(first, second)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert kinds(trial, 1) == ["waits"]
    assert trial.is_held
    assert not trial.is_due
    now += PATIENCE_SECONDS
    assert trial.is_due
    assert kinds(trial, 1) == ["alone"]


def test_a_group_that_is_answered_goes_on_with_the_other(monkeypatch):
    first, second = Group(1.0, ("offer", "a", 1)), Group(1.0, "wait", ("offer", "a", 1))
    trial, _ = trial_of(first, second)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    assert kinds(trial, 1) == ["waits"]
    second.is_due = True
    assert trial.is_due


@pytest.mark.parametrize("order", [1, -1])
def test_one_goes_on_by_itself_when_the_other_has_ended(order):
    going, ending = Group(1.0, ("offer", "a", 1), "evaluate"), Group(2.0)
    trial, told = trial_of(*[going, ending][::order])
    going.seats = ["seat"] * 3
    assert kinds(trial, 3) == ["alone", "evaluate", None]
    assert not going.takes_turns
    assert told[0] == 3
    assert ending.is_closed


class Steps:
    """Merged steps that hold memory until they are closed."""

    def __init__(self, *_):
        self.host_bytes = 8

    def close(self):
        self.host_bytes = 0


def test_merged_steps_of_plans_that_a_group_has_no_more_are_dropped(monkeypatch):
    monkeypatch.setattr(pair_trial, "StepPlanAutotuner", Steps)
    monkeypatch.setattr(NoPlanner, "planned", lambda *_: None)
    monkeypatch.setattr(NoPlanner, "replanned", None, raising=False)
    groups = Group(1), Group(1)
    trial, _ = trial_of(*groups)

    def steps_of(*prepared):
        for group, plan in zip(groups, prepared, strict=True):
            group.offer = SimpleNamespace(prepared=plan, wanted=None, stack=None, state_of=lambda *_: None)
            group.plans.add(plan)
        return trial._steps()

    full, last = steps_of("full a", "full b"), steps_of("last a", "last b")
    assert (full.host_bytes, last.host_bytes) == (8, 8)
    groups[0].plans = {"last a"}  # its state has changed, and another plan of full batches is made
    anew = steps_of("full a, anew", "full b")
    assert (full.host_bytes, last.host_bytes, anew.host_bytes) == (0, 8, 8)
    assert steps_of("last a", "last b") is last
