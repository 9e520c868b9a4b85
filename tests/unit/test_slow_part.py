"""Which slow tests run in a release: the same at one turn, all of them in 41, and some of each kind at each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.registry import FAMILIES
from tests.parity.test_results import WAYS
from tests.support.slow_part import KINDS, TURNS, kind_of, part

ROOT = Path(__file__).parents[2]
TESTS = [
    *(f"tests/faults/test_kills.py::test_killed_and_gone_on_with[{number}]" for number in range(10)),
    *(f"tests/parity/test_registry.py::test_the_product[mlp-{cut}-{devices}]" for cut in range(80) for devices in "12"),
    *(f"tests/parity/test_registry.py::test_a_draw_of_each_family[vision-{number}]" for number in range(23)),
    "tests/ray/test_schedulers.py::test_hyperband_pauses_trials_and_they_go_on_as_they_were[True]",
    "tests/unit/shard/capture/test_step_module.py::test_a_step",
]


def collected(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    output = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=240
    ).stdout
    return [line for line in output.splitlines() if "::" in line]


def test_every_test_is_taken_within_its_turns():
    for first in (0, 7):
        turns = range(first, first + TURNS)
        assert {test for turn in turns for test in part(TESTS, turn)} == set(TESTS)


def test_each_turn_has_some_of_each_kind():
    kinds = {kind_of(test) for test in TESTS}
    assert len(kinds) == 5
    for turn in range(2 * TURNS):
        assert {kind_of(test) for test in part(TESTS, turn)} == kinds


def test_no_turn_has_many_more_than_another():
    sizes = {len(part(TESTS, turn)) for turn in range(TURNS)}
    assert sizes <= {7, 8}, "160 of one kind make three or four, and each other kind one"


def test_what_a_turn_takes_of_a_kind_depends_on_no_other_kind():
    some = [test for test in TESTS if test.startswith("tests/parity")]
    assert part(some, 5) == {test for test in part(TESTS, 5) if test in some}


def quick_tests(folder: Path, turn: int) -> set[str]:
    (folder / "conftest.py").write_text(
        f"""
from tests.support.slow_part import leave_cases_to_the_slow_tests

def pytest_collection_modifyitems(items):
    leave_cases_to_the_slow_tests(items, {turn})
"""
    )
    (folder / "test_many.py").write_text(
        """
import pytest

@pytest.mark.cases(2)
@pytest.mark.parametrize("number", [*range(8), pytest.param(8, marks=pytest.mark.slow)])
def test_many(number):
    assert number < 9

@pytest.mark.cases(1 / 2)
@pytest.mark.parametrize("number", range(2))
def test_long(number):
    assert number < 2

def test_one():
    pass
"""
    )
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", "not slow"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    output = subprocess.run(
        [*command, str(folder)], cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout
    return {line.partition("::")[2] for line in output.splitlines() if "::" in line}


def test_other_cases_are_quick_at_each_turn_and_the_rest_are_slow(tmp_path):
    seen, turns_of_long = set(), []
    for turn in range(4):
        quick = quick_tests(tmp_path, turn)
        seen |= quick
        turns_of_long += [turn] * len(long := {test for test in quick if test.startswith("test_long")})
        assert quick - long == {"test_one", f"test_many[{turn}]", f"test_many[{turn + 4}]"}
    assert len(seen) == 1 + 8 + 2
    assert turns_of_long in ([0, 2], [1, 3])


def test_tests_that_have_not_begun_in_time_are_skipped_and_listed(tmp_path):
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    (tmp_path / "tests" / "unit" / "test_slow.py").write_text(
        """
import pytest

@pytest.mark.slow
def test_one():
    assert False, "has begun"
"""
    )
    command = [sys.executable, "-m", "pytest", "-ra", "-q", "-p", "no:cacheprovider", "-p", "tests.support.slow_part"]
    run = subprocess.run(
        [*command, "--turn", "0", "--minutes", "0", "tests"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert "SKIPPED [1] tests/unit/test_slow.py:4: had not begun within --minutes" in run.stdout


def test_a_file_outside_the_folders_is_refused():
    with pytest.raises(ValueError, match=r"test_x\.py::test is in no folder of tests/"):
        kind_of("tests/test_x.py::test")


@pytest.mark.cases(1 / 3)
def test_the_slow_tests_that_there_are_have_every_kind():
    registry, results = (f"tests/parity/test_{name}.py" for name in ("registry", "results"))
    slow = collected("-m", "slow", "tests/faults", "tests/ray", "tests/integration/test_memory.py", registry, results)
    several = {"parity": FAMILIES, "results": WAYS, "else": ("faults", "integration", "parity", "ray")}
    assert {kind_of(test) for test in slow} == {
        f"{name} {each}".strip() for name in KINDS for each in several.get(name, [""])
    }
    of_plugin = collected("-p", "tests.support.slow_part", "--turn", "7", "tests/faults")
    assert set(of_plugin) == part([test for test in slow if test.startswith("tests/faults")], 7)
