"""Which pool a trial goes to, and which trials leave: by the compute that is left, never for less than it gains."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_tune_ray.node.balance import PoolBacklog, least_busy, moves


def work(*seconds, devices=1, started=False, name=""):
    trials = {f"{name}{number}": float(each) for number, each in enumerate(seconds)}
    return PoolBacklog(num_devices=devices, trials=trials, started=set(trials) if started else set())


def test_a_trial_goes_where_it_would_end_first():
    assert least_busy({"a": work(10), "b": work(4, 4)}, 5.0) == "b"
    assert least_busy({"a": work(10, devices=4), "b": work(4)}, 5.0) == "a"


def test_equal_pools_get_trials_by_turns_and_the_near_one_first():
    assert least_busy({"a": work(3), "b": work(3)}, 5.0) == "a"
    assert least_busy({"a": work(3), "b": work(3)}, 5.0, near="b") == "b"
    assert least_busy({"a": work(3), "b": work(1)}, 5.0, near="a") == "b"


def test_an_idle_pool_takes_the_trial_that_evens_best():
    pools = {"a": work(10, 6, 4, name="a"), "b": work()}
    assert moves(pools, 0.5) == {"a0": "b"}


def test_one_trial_alone_stays_and_what_gains_little_stays():
    assert moves({"a": work(10, name="a"), "b": work()}, 0.5) == {}
    assert moves({"a": work(10, 9.9, name="a"), "b": work(19, name="b")}, 0.5) == {}


def test_a_trial_that_has_begun_has_to_gain_the_cost_of_its_move():
    pools = {"a": work(1.0, 0.4, started=True, name="a"), "b": work()}
    assert moves(pools, 0.7) == {}
    assert moves(pools, 0.1) == {"a1": "b"}


def test_of_equal_ones_a_trial_that_has_not_begun_goes():
    pools = {"a": PoolBacklog(num_devices=1, trials={"x": 5.0, "y": 5.0}, started={"x"}), "b": work()}
    assert moves(pools, 0.0) == {"y": "b"}


def test_devices_that_have_one_trial_each_give_none_to_a_pool_that_is_busy():
    pools = {"a": work(10, 10, devices=2, name="a"), "b": work(1, devices=2, name="b")}
    assert moves(pools, 0.0) == {}


@given(st.lists(st.tuples(st.integers(1, 4), st.lists(st.floats(0.1, 100.0), max_size=8)), min_size=2, max_size=5))
def test_moves_come_to_an_end_and_never_have_it_end_later(pools):
    works = {str(n): work(*seconds, devices=devices, name=f"{n}-") for n, (devices, seconds) in enumerate(pools)}
    before = max(each.seconds for each in works.values())
    for key, target in moves(works, 0.5).items():
        source = next(name for name, each in works.items() if key in each.trials)
        assert source != target
        works[target].trials[key] = works[source].trials.pop(key)
    assert max(each.seconds for each in works.values()) <= before * (1 + 1e-9)


@pytest.mark.parametrize("count", [2, 3, 64])
def test_moves_spread_what_was_placed_badly_to_within_a_tenth(count):
    generous = {f"t{number}": 1.0 + number % 7 for number in range(20 * count)}
    pools = {"p0": PoolBacklog(num_devices=1, trials=dict(generous))}
    pools |= {f"p{number}": PoolBacklog(num_devices=1, trials={}) for number in range(1, count)}
    found = moves(pools, 0.5)
    loads = dict.fromkeys(pools, 0.0)
    for key, seconds in generous.items():
        loads[found.get(key, "p0")] += seconds
    assert max(loads.values()) <= 1.1 * sum(generous.values()) / count
