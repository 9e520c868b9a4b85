"""A pytest plugin: of all slow tests another part at each turn, and one of each kind at every turn.

    python -m pytest -p tests.support.slow_part --turn 7

`TURNS` turns in a row take every slow test. `tests/turn` holds the turn of this release; each release raises it by one.
With `--minutes` tests that have not begun by then are skipped, and listed as such: a slow machine runs fewer of them.
"""

import re
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

import pytest

TURNS = 41  # shares no divisor with the numbers of cuts, devices and ways, so that each turn has some of each

# A test is of the first kind that its name matches, and what matches a group makes kinds of their own.
KINDS = {
    "killed in training": r"tests/faults/test_kills\.py::test_killed_and_gone_on_with",
    "killed in a search": r"tests/faults/test_killed_searches\.py::test_a_killed_search_ends_as_one_that_never_was",
    "a damaged file": r"tests/faults/test_damage\.py::test_damage_at_random_places",
    "eight trials": r"tests/integration/test_memory\.py::test_eight_trials_stay_within_the_budget_of_each_device",
    "Hyperband on Ray": r"tests/ray/test_schedulers\.py::test_hyperband_pauses_trials_and_they_go_on_as_they_were",
    "PBT on Ray": r"tests/ray/test_schedulers\.py::test_population_based_training_copies_and_changes",
    "fused on Ray": r"tests/ray/test_fused",
    "parity": r"tests/parity/test_registry\.py::test_a_draw_of_each_family\[(\w+)-\d+\]",
    "results": r"tests/parity/test_results\.py::test_results_of_every_model_stand_every_use\[\w+-([\w ,]+)\]",
    "else": r"tests/(\w+)/",
}


def present_turn() -> int:
    """The turn of this release."""
    return int((Path(__file__).parents[1] / "turn").read_text(encoding="ascii"))


def kind_of(test: str) -> str:
    """The kind that a test, by its name, counts as."""
    for name, pattern in KINDS.items():
        if found := re.match(pattern, test):
            return " ".join((name, *found.groups()))
    raise ValueError(f"{test} is in no folder of tests/")


def part(tests: Iterable[str], turn: int) -> set[str]:
    """The tests of a turn: of each kind every 41st, or one in turn where a kind has fewer."""
    kinds: dict[str, list[str]] = {}
    for test in tests:
        kinds.setdefault(kind_of(test), []).append(test)
    return {
        test for same in kinds.values() for period in [min(TURNS, len(same))] for test in same[turn % period :: period]
    }


def leave_cases_to_the_slow_tests(items: Iterable[pytest.Item], turn: int) -> None:
    """Mark all cases of a test slow but as many as its mark `cases` says: others at each turn, spread over all of them.

    With `cases(1 / 3)` there is one case at every third turn, and none at the others.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("cases") and not item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, cases in tests.items():
        (number,) = cases[0].get_closest_marker("cases").args
        if number < 1:
            number_of_times, is_out_of_turn = divmod(turn + zlib.crc32(test.encode()), round(1 / number))
            quick = set() if is_out_of_turn else {number_of_times % len(cases)}
        else:
            quick = {(turn + i * len(cases) // number) % len(cases) for i in range(number)}
        for position, item in enumerate(cases):
            if position not in quick:
                item.add_marker(pytest.mark.slow)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--turn", type=int, default=present_turn(), help="of which the slow tests are; by default tests/turn"
    )
    parser.addoption("--minutes", type=float, default=float("inf"), help="after which no further test begins")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Deadline(time.monotonic() + 60 * config.getoption("minutes")))


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        if time.monotonic() > self._seconds:
            item.add_marker(pytest.mark.skip(reason="had not begun within --minutes"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = [item.nodeid for item in items if item.get_closest_marker("slow")]
    taken = part(slow, config.getoption("turn"))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in taken])
    items[:] = [item for item in items if item.nodeid in taken]
