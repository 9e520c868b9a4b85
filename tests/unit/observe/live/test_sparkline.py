"""Sparklines show the course of any numbers there may be."""

import math

import pytest

from hydra_tune.observe.live.sparkline import sparkline

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([3.0], "▄"),
        ([0.0, 0.0, 0.0], "▄▄▄"),
        (range(8), "▁▂▃▄▅▆▇█"),
        ([1.0, 0.0], "█▁"),
        ([NAN], "×"),  # noqa: RUF001
        ([NAN, 0.0, 1.0], "×▁█"),  # noqa: RUF001
        ([INF, 0.0, -INF, 1.0], "↑▁↓█"),
        ([1e308, -1e308], "█▁"),
        ([5e-324, 0.0], "▄▄"),  # no two numbers are nearer to each other
        ([1.0, 1.0 + 2**-52], "▁█"),
    ],
)
def test_each_value_is_a_bar(values, expected):
    assert sparkline(values, 20) == expected


def test_of_many_values_the_last_one_is_among_those_shown():
    assert sparkline(range(1000), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0] * 999 + [1.0], 5) == "▁▁▁▁█"


@pytest.mark.parametrize("width", [-1, 0])
def test_without_room_there_is_nothing(width):
    assert sparkline([1.0, 2.0], width) == ""
