"""Points of a space that `hydra-tune plan` looks at."""

from collections import Counter

import pytest

from hydra_tune.cli.dry_run.sampling import grid, sample
from hydra_tune.cli.sweep_file.domains import ChoiceDomain, FloatDomain, IntDomain

SPACE = {
    "kind": ChoiceDomain(values=("a", "b", "c")),
    "fixed": ChoiceDomain(values=(None,)),
    "depth": IntDomain(low=2, high=13, step=1),
    "width": IntDomain(low=16, high=1024, log=True),
    "lr": FloatDomain(low=1e-5, high=1e-1, log=True),
    "rate": FloatDomain(low=0.0, high=0.4, step=0.1),
    "decay": FloatDomain(low=0.0, high=1.0),
}


def test_every_value_of_a_choice_comes_as_often_as_any_other():
    points = sample(SPACE, 12, seed=0)
    assert Counter(point["kind"] for point in points) == {"a": 4, "b": 4, "c": 4}
    assert sorted(point["depth"] for point in points) == list(range(2, 14))
    assert {point["fixed"] for point in points} == {None}


def test_ranges_are_spread_from_end_to_end():
    points = sample(SPACE, 20, seed=1)
    rates = sorted(point["lr"] for point in points)
    assert all(1e-5 * 10 ** (0.2 * i) <= rate <= 1e-5 * 10 ** (0.2 * (i + 1)) for i, rate in enumerate(rates))
    decays = sorted(point["decay"] for point in points)
    assert all(i / 20 <= decay <= (i + 1) / 20 for i, decay in enumerate(decays))
    widths = [point["width"] for point in points]
    assert all(type(width) is int and 16 <= width <= 1024 for width in widths)
    assert min(widths) < 24
    assert max(widths) > 700
    assert Counter(point["rate"] for point in points) == dict.fromkeys((0.0, 0.1, 0.2, 0.3, 0.4), 4)


def test_ranges_of_more_values_than_a_list_can_have_are_drawn_from():
    seed, fine = IntDomain(low=0, high=2**64 - 1), FloatDomain(low=0.0, high=1.0, step=1e-20)
    for point in sample({"seed": seed, "fine": fine}, 4, seed=0):
        assert 0 <= point["seed"] < 2**64
        assert 0 <= point["fine"] <= 1


def test_the_same_seed_gives_the_same_points_and_another_one_others():
    assert sample(SPACE, 5, seed=3) == sample(SPACE, 5, seed=3)
    assert sample(SPACE, 5, seed=3) != sample(SPACE, 5, seed=4)


@pytest.mark.parametrize("count", [1, 2])
def test_few_points_are_within(count):
    for point in sample(SPACE, count, seed=0):
        assert point["kind"] in "abc"
        assert 2 <= point["depth"] <= 13


def test_multiples_are_kept():
    space = {"lr": FloatDomain(low=0.001, high=0.1, log=True, multiple=0.001)}
    for point in sample(space, 10, seed=0):
        assert point["lr"] * 1000 == pytest.approx(round(point["lr"] * 1000))


def test_a_grid_has_every_combination_once_and_the_last_parameter_in_turn_first():
    parameters = {
        "batch": ChoiceDomain(values=(8, 16)),
        "depth": IntDomain(low=1, high=3),
        "data": ChoiceDomain(values=(None,)),
    }
    found = grid(parameters)
    assert found[:2] == [{"batch": 8, "depth": 1, "data": None}, {"batch": 8, "depth": 2, "data": None}]
    assert len(found) == len({tuple(point.items()) for point in found}) == 6
