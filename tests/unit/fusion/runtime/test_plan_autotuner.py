"""Planned steps are timed as they are made; where that is not as predicted, other ways are tried, and the fastest goes on."""

from types import SimpleNamespace

import pytest

from hydra_tune.fusion.runtime.plan_autotuner import _TURNS, _WARM_UPS, StepPlanAutotuner


def planned(how, seconds):
    """A way that is predicted to take so long."""
    part = SimpleNamespace(sizes=(2, 2), way=how, times=SimpleNamespace(seconds=seconds))
    return SimpleNamespace(part=part, host_bytes=10)


class Steps:
    """Of one way, which takes as long as `REALLY` says."""

    def __init__(self, one):
        self.planned = one
        self.is_closed = False

    def close(self):
        assert not self.is_closed
        self.is_closed = True


def run(ways, really, units):
    """So many units; how each was run."""
    found = []
    for _ in range(units):
        how = ways.current.planned.part.way
        found.append(how)
        ways.took(really[how])
    return found


def replanning(*others):
    """Plans once more with a first way that is predicted as it was measured, and these; notes what it is asked."""
    asked = []

    def replan(step, seconds):
        asked.append(seconds)
        return [planned(step.part.way, seconds), *others]

    return replan, asked


@pytest.mark.parametrize("seconds", [0.85, 1.15])
def test_steps_that_take_about_what_was_predicted_are_timed_and_no_more(seconds):
    replan, asked = replanning()
    told, made = [], []
    ways = StepPlanAutotuner(planned("kept", 1.0), lambda one: made.append(Steps(one)) or made[-1], replan, told.append)
    assert run(ways, {"kept": seconds}, 30) == ["kept"] * 30
    assert asked == []
    (found,) = told
    assert not found.is_replanned
    assert not found.is_slower
    assert (found.sizes, found.predicted_seconds, found.seconds) == ((2, 2), 1.0, pytest.approx(seconds))
    assert [(way.how, way.is_chosen) for way in found.ways] == [("kept", True)]
    ways.close()
    assert [one.is_closed for one in made] == [True]


def test_steps_that_take_other_than_predicted_are_planned_once_more_and_the_fastest_way_goes_on():
    replan, asked = replanning(planned("min-cut", 1.6), planned("swaps alone", 1.9))
    told, made = [], []
    ways = StepPlanAutotuner(
        planned("interleaved", 1.0), lambda one: made.append(Steps(one)) or made[-1], replan, told.append
    )
    really = {"interleaved": 2.0, "min-cut": 2.1, "swaps alone": 1.8}
    first = _WARM_UPS + _TURNS
    assert run(ways, really, first) == ["interleaved"] * first
    assert asked == [pytest.approx(2.0)]
    assert told == []
    assert ways.host_bytes == 30
    turns = run(ways, really, 3 * first)
    assert turns == ["interleaved", "min-cut", "swaps alone"] * first
    assert run(ways, really, 9) == ["swaps alone"] * 9
    (found,) = told
    assert found.is_replanned
    assert found.is_slower
    assert found.seconds_each == pytest.approx(1.8 / 4)
    assert [(way.how, way.predicted_seconds, way.is_chosen) for way in found.ways] == [
        ("interleaved", pytest.approx(2.0), False),
        ("min-cut", 1.6, False),
        ("swaps alone", 1.9, True),
    ]
    assert [way.seconds for way in found.ways] == pytest.approx([2.0, 2.1, 1.8])
    assert "takes 2.00 s, where 1.00 s were predicted; planned once more" in found.told
    assert [one.is_closed for one in made] == [True, True, False]
    assert ways.host_bytes == 10


def test_steps_that_cannot_be_planned_once_more_go_on_as_they_are():
    def fail(step, seconds):
        raise RuntimeError("as it happens")

    told = []
    ways = StepPlanAutotuner(planned("kept", 1.0), Steps, fail, told.append)
    assert run(ways, {"kept": 3.0}, 30) == ["kept"] * 30
    assert [(way.how, way.is_chosen) for way in told[0].ways] == [("kept", True)]


def test_steps_for_which_nothing_else_is_found_go_on_as_they_are():
    replan, asked = replanning()
    told = []
    ways = StepPlanAutotuner(planned("kept", 1.0), Steps, replan, told.append)
    assert run(ways, {"kept": 3.0}, 30) == ["kept"] * 30
    assert len(asked) == 1
    (found,) = told
    assert found.is_replanned
    assert [(way.predicted_seconds, way.is_chosen) for way in found.ways] == [(pytest.approx(3.0), True)]


def test_of_ways_of_which_one_cannot_be_made_none_is_left_running():
    replan, _ = replanning(planned("swaps", 1.0), planned("again", 1.0))
    told, made = [], []

    def make(one):
        if one.part.way == "again":
            raise MemoryError
        made.append(Steps(one))
        return made[-1]

    ways = StepPlanAutotuner(planned("kept", 1.0), make, replan, told.append)
    assert run(ways, {"kept": 5.0}, 30) == ["kept"] * 30
    assert [(one.planned.part.way, one.is_closed) for one in made] == [("kept", False), ("swaps", True)]
    (found,) = told
    assert [way.how for way in found.ways] == ["kept"]
    ways.close()
    assert made[0].is_closed
