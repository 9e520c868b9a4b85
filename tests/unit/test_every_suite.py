"""All suites of a small project: what is run, what is left out when they are run again, and what the table says."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.every_suite import checkout, run_all, table

ROOT = Path(__file__).parents[2]
MAKEFILE = f"""
export PYTHONPATH := {ROOT}
quick slow:
	{sys.executable} -m pytest -q -p no:cacheprovider cases/test_$@.py
	echo $@ >> "$(RAN)"
"""
CASES = """
import os
import threading
from pathlib import Path
import pytest

@pytest.mark.parametrize("name", ["one", "two"])
def test_case(name):
    with Path(os.environ["RAN"]).open("a") as file:
        file.write("{suite} " + name + chr(10))
    assert name == "one" or not os.environ["FAILS"] == "{suite}"
    if os.environ["HANGS"] == "{suite}":
        threading.Event().wait()
"""
MINUTES = {"quick": 2.0, "slow": 2.0}


@pytest.fixture
def project(tmp_path, monkeypatch):
    root = tmp_path / "project"
    (root / "cases").mkdir(parents=True)
    (root / "Makefile").write_text(MAKEFILE)
    (root / ".gitignore").write_text("build/\n__pycache__/\n")
    for suite in MINUTES:
        (root / "cases" / f"test_{suite}.py").write_text(CASES.replace("{suite}", suite))
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for arguments in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *arguments], cwd=root, check=True)
    for name in ("FAILS", "HANGS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    return root


def ran(project):
    """What has run since this was asked last."""
    path = project.parent / "ran"
    lines = path.read_text().splitlines() if path.exists() else []
    path.write_text("")
    return lines


def outcomes(rows):
    return [(name, row["outcome"], row["tests"]) for name, row in rows.items()]


@pytest.mark.slow
def test_what_has_passed_is_not_run_again_until_a_file_changes(project):
    assert outcomes(run_all(project, MINUTES)) == [("quick", "passed", 2), ("slow", "passed", 2)]
    assert ran(project) == ["quick one", "quick two", "quick", "slow one", "slow two", "slow"]
    rows = run_all(project, MINUTES)
    assert ran(project) == []
    lines = table(rows).splitlines()
    assert lines[0].split() == ["suite", "outcome", "passed", "minutes", "last", "passed", "whole"]
    assert lines[1].startswith("quick    passed              2 ")
    assert lines[1].endswith(checkout(project))
    (project / "new.py").write_text("")
    run_all(project, MINUTES)
    assert len(ran(project)) == 6


@pytest.mark.slow
def test_after_a_failure_the_others_run_and_only_what_failed_runs_again(project, monkeypatch):
    monkeypatch.setenv("FAILS", "quick")
    rows = run_all(project, MINUTES)
    assert outcomes(rows) == [("quick", "failed", 1), ("slow", "passed", 2)]
    assert table(rows).splitlines()[1].endswith("never")
    ran(project)
    monkeypatch.setenv("FAILS", "")
    assert outcomes(run_all(project, MINUTES)) == [("quick", "passed", 2), ("slow", "passed", 2)]
    assert ran(project) == ["quick two", "quick"]


@pytest.mark.cases(1 / 3)
def test_a_suite_that_was_stopped_after_its_last_test_has_passed_when_it_goes_on(project):
    run_all(project, MINUTES)
    path = project / "build" / "every-suite" / "rows.json"
    path.write_text(path.read_text().replace('"passed"', '"was stopped"', 1))
    ran(project)
    assert outcomes(run_all(project, MINUTES)) == [("quick", "passed", 2), ("slow", "passed", 2)]
    assert ran(project) == ["quick"]


@pytest.mark.slow
def test_a_suite_that_hangs_is_ended_and_the_next_one_runs(project, monkeypatch):
    monkeypatch.setenv("HANGS", "quick")
    rows = run_all(project, {"quick": 0.2, "slow": 2.0})
    assert [row["outcome"] for row in rows.values()] == ["took too long", "passed"]
