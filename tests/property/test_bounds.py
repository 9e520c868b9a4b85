"""The bounds hold for the best of all schedules, and cutting jobs anywhere meets them: none could be higher."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_tune.schedule import makespan_bound, uneven_makespan_bound
from tests.support.tiny_schedules import best_makespan, level_makespan

CHAINS = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=3).filter(
    lambda chains: sum(map(len, chains)) <= 6
)
SPEEDS = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@settings(deadline=None, max_examples=60)
@given(chains=CHAINS, num_devices=st.integers(1, 3))
def test_no_schedule_beats_the_bound(chains, num_devices):
    assert makespan_bound(map(sum, chains), num_devices) <= best_makespan(chains, [1] * num_devices) + 1e-9


@settings(deadline=None, max_examples=60)
@given(chains=CHAINS, speeds=SPEEDS)
def test_no_schedule_on_unequal_devices_beats_the_bound(chains, speeds):
    assert uneven_makespan_bound(map(sum, chains), speeds) <= best_makespan(chains, speeds) + 1e-9


@settings(deadline=None)
@given(jobs=st.lists(st.integers(0, 50), max_size=8), speeds=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_cutting_jobs_anywhere_meets_the_bound(jobs, speeds):
    assert uneven_makespan_bound(jobs, speeds) == pytest.approx(float(level_makespan(jobs, speeds)))


@settings(deadline=None)
@given(jobs=st.lists(st.integers(0, 50), max_size=8), num_devices=st.integers(1, 6), speed=st.integers(1, 9))
def test_devices_of_equal_speed_have_mcnaughtons_bound(jobs, num_devices, speed):
    bound = makespan_bound(jobs, num_devices)
    assert uneven_makespan_bound(jobs, [speed] * num_devices) == pytest.approx(bound / speed)
