"""Candidates take turns; who is clearly slower leaves, and the machine's own pace counts for nobody."""

import pytest

from hydra_tune.planner.search.tournament import SpeedTournament


def raced(seconds, pace=lambda turn: 1.0, **changes):
    """Run to the end with seconds given for each; the run-off, and who ran in what order."""
    race, order, turn = SpeedTournament(list(seconds), **changes), [], 0
    while (name := race.next) is not None:
        turn += name == next(iter(seconds))
        order.append(name)
        race.took(seconds[name] * pace(turn))
    return race, order


def test_they_take_turns_and_the_fastest_is_known():
    race, order = raced({"a": 1.1, "b": 1.0, "c": 1.2}, warm_ups=1, turns=2)
    assert order == ["a", "b", "c"] * 3
    assert race.best == "b"
    assert race.seconds == pytest.approx({"a": 1.1, "b": 1.0, "c": 1.2})


def test_warming_up_does_not_count():
    race = SpeedTournament(["a", "b"], warm_ups=1, turns=1)
    for seconds in (9.0, 1.0, 1.0, 2.0):
        race.took(seconds)
    assert race.next is None
    assert race.seconds == {"a": 1.0, "b": 2.0}


def test_who_is_clearly_slower_leaves():
    race, order = raced({"a": 1.0, "b": 2.0, "c": 1.1}, warm_ups=0, turns=5)
    assert [order.count(name) for name in "abc"] == [5, 3, 5]
    assert race.best == "a"
    assert race.seconds == pytest.approx({"a": 1.0, "b": 2.0, "c": 1.1})


def test_a_machine_that_becomes_slower_does_so_for_all():
    """By their medians alone the one that left while the machine was fast would be the fastest."""
    race, _ = raced({"a": 1.0, "b": 1.4}, pace=lambda turn: 1.0 if turn <= 3 else 3.0, warm_ups=0, turns=9)
    assert race.best == "a"
    assert race.seconds == pytest.approx({"a": 3.0, "b": 4.2})


def test_one_disturbed_step_decides_nothing():
    race = SpeedTournament(["a", "b"], warm_ups=0, turns=5)
    for turn in range(5):
        race.took(50.0 if turn == 2 else 1.0)
        race.took(1.2)
    assert race.best == "a"


def test_before_anything_was_measured_the_first_is_best():
    race = SpeedTournament(["a", "b"])
    assert (race.next, race.best, race.seconds) == ("a", "a", {})


def test_without_candidates_there_is_none():
    with pytest.raises(ValueError, match="none"):
        SpeedTournament([])


def test_steps_that_the_clock_cannot_measure_decide_nothing():
    race, order = raced({"a": 0.0, "b": 0.0}, warm_ups=0, turns=4)
    assert order == ["a", "b"] * 4
    assert race.best == "a"
