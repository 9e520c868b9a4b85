"""The bound below which no plan is, and that plans meet it."""

from random import Random

import pytest

from benchmarks.mutwo_least import least
from hydra_tune.planner.cost.peak_memory import peak_of
from hydra_tune.planner.ir.plan_state import undecided
from hydra_tune.planner.passes.swap_recompute import planned
from hydra_tune.planner.search.portfolio import MARGIN, Planner
from tests.unit.planner.hand import array, chain, op
from tests.unit.planner.run.test_planned_run import array as traced
from tests.unit.planner.test_random_plans import random_array


def test_what_an_operator_reads_makes_and_works_in_is_there():
    made = array([op("a"), op("b", reads=["a"], workspace=5)], [op("d", reads=["a", "b"])], {"a": 3, "b": 4, "d": 2})
    assert (least(made).num_bytes, least(made).op) == (12, "b")


def test_a_map_that_the_backward_uses_twice_is_there_between():
    """`a` is used at `d` and at `f`: it is brought back once."""
    forward, backward = [op("a"), op("b")], [op("d", reads=["a"]), op("e", reads=["b"]), op("f", reads=["a", "e"])]
    made = array(forward, backward, {"a": 10, "b": 20, "e": 1}, copy={"a": 1.0, "b": 1.0})
    found = least(made)
    assert (found.num_bytes, found.op, found.used_bytes) == (31, "e", 21)


def test_what_is_never_moved_is_there_all_the_time():
    made = array([op("a"), op("tiny"), op("c")], [op("d", reads=["a", "tiny"])], {"a": 1000, "tiny": 1, "c": 7})
    assert least(made).num_bytes == 1001
    assert least(array([op("a"), op("b")], [op("d", reads=["b"])], {"a": 5, "b": 5})).num_bytes == 5


def smallest(made):
    """Of pairs planned for the bound as their limit, the one that needs least."""
    static = 2 * made.static_bytes
    limit = int((static + least(made).num_bytes) / (1 - MARGIN)) + 1
    members = Planner(array=lambda _: made, limit_bytes=limit).portfolio(2).members
    return min(part.peak_bytes for one in members for part in one.parts if part.sizes == (1, 1)) - static


def test_plans_meet_the_bound_of_a_chain():
    assert smallest(chain(8, num_bytes=10)) == least(chain(8, num_bytes=10)).num_bytes


LONGER = [pytest.param(name, marks=pytest.mark.slow) for name in ("cnn", "resnet", "transformer")]


@pytest.mark.parametrize("name", ["dlrm", *LONGER])
def test_plans_meet_the_bound_of_traced_models(name):
    made = traced(name)
    assert smallest(made) == least(made).num_bytes


def test_no_plan_of_random_steps_is_below_it():
    for seed in range(40):
        made = random_array(Random(seed))
        schedule, _ = planned(undecided((made,), made.static_bytes + least(made).num_bytes))
        assert peak_of(schedule)[1].peak_bytes >= made.static_bytes + least(made).num_bytes
