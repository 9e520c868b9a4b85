"""How a trial's idea of its units' seconds follows what is measured."""

import pytest

from hydra_tune.train.timing.unit_times import UnitTimes


def test_of_the_first_two_measurements_the_shorter_counts():
    times = UnitTimes({"a": 5.0, "b": 1.0})
    times.measured("a", 9.0)
    assert times.of("a") == 9.0, "whatever the pilot's device took, this one takes another time"
    times.measured("a", 2.0)
    assert times.of("a") == 2.0
    assert times.total == 3.0


def test_one_unit_that_was_held_up_changes_little_and_a_slow_device_is_noticed():
    times = UnitTimes({"a": 1.0})
    for _ in range(5):
        times.measured("a", 1.0)
    times.measured("a", 1000.0)
    assert times.of("a") < 1.2
    for _ in range(60):
        times.measured("a", 10.0)
    assert times.of("a") == pytest.approx(10.0, rel=0.1)
    assert times.total == pytest.approx(times.of("a"))


def test_what_repeats_within_a_step_counts_so_often_and_what_is_unknown_not_at_all():
    times = UnitTimes({"a": 1.0, "b": 1.0}, {"a": 3})
    times.measured("a", 2.0)
    times.measured("c", 7.0)
    assert times.total == 7.0
    assert len(times) == 4


def test_a_measurement_without_seconds_does_not_count():
    """The cap of later measurements is a multiple of the estimate, and would hold an estimate of zero there for ever."""
    times = UnitTimes({"a": 1.0})
    for seconds in (0.0, -0.1, 2.0, 3.0):
        times.measured("a", seconds)
    assert times.of("a") == times.total == 2.0
