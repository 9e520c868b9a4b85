"""Every suite of the Makefile, one after the other, and a table of how they went: `make all-tests`.

What has passed is kept in `build/every-suite`, test by test, and is not run again as long as the checkout is the same: so it
goes on where it was stopped. As a pytest plugin this module leaves out what has passed before, and writes down what passes.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KEPT = Path("build", "every-suite")
MINUTES = {"test": 40, "ray": 30, "faults": 60, "slow": 90, "parity": 240}  # at most, of each target of the Makefile
FOLDER = "HYDRA_TUNE_SUITE"

Rows = dict[str, dict[str, Any]]


def checkout(root: Path) -> str:
    """Says which files these are: the commit, and a digest of whatever differs from it."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=True).stdout

    changed = git("diff", "HEAD")
    for name in filter(None, git("ls-files", "--others", "--exclude-standard", "-z").decode().split("\0")):
        changed += name.encode() + (root / name).read_bytes()
    commit = git("rev-parse", "--short", "HEAD").decode().strip()
    return f"{commit}+{hashlib.sha256(changed).hexdigest()[:8]}" if changed else commit


def run_suite(root: Path, name: str, minutes: float) -> str:
    """Run one target: "passed", "failed" or "took too long"."""
    environment = os.environ | {FOLDER: str(root / KEPT / name), "PYTEST_ADDOPTS": "-p tests.support.every_suite"}
    process = subprocess.Popen(["make", name, "ENDS="], cwd=root, env=environment, start_new_session=True)
    try:
        return "failed" if process.wait(60 * minutes) else "passed"
    except subprocess.TimeoutExpired:
        return "took too long"
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what there is of a suite: interrupted, it prints what has failed."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(60)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def run_all(root: Path, minutes: dict[str, float]) -> Rows:
    """Run every suite that has not passed with these files."""
    here, path = checkout(root), root / KEPT / "rows.json"
    rows: Rows = json.loads(path.read_text()) if path.exists() else {}
    for name, most in minutes.items():
        folder, row = root / KEPT / name, rows.setdefault(name, {})
        if row.get("of") != here:
            row |= {"of": here, "outcome": "", "seconds": 0.0}
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "passed").write_text("")
        if row["outcome"] == "passed":
            continue
        (folder / "before").write_text((folder / "passed").read_text())
        row["outcome"], began = "was stopped", time.monotonic()
        try:
            row["outcome"] = run_suite(root, name, most)
        finally:
            row["seconds"] += time.monotonic() - began
            row["tests"] = len((folder / "passed").read_text().splitlines())
            if row["outcome"] == "passed":
                row |= {"passed_at": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "passed_of": here}
            path.write_text(json.dumps(rows, indent=1))
            print(table(rows))  # noqa: T201
    return rows


def table(rows: Rows) -> str:
    """How each suite went, and when it last passed as a whole, of which files."""
    lines = [f"{'suite':8} {'outcome':14} {'passed':>6} {'minutes':>7}  last passed whole"]
    for name, row in rows.items():
        last = f"{row['passed_at']}, {row['passed_of']}" if "passed_at" in row else "never"
        lines.append(f"{name:8} {row['outcome']:14} {row.get('tests', 0):6} {row['seconds'] / 60:7.1f}  {last}")
    return "\n".join(lines)


class _Suite:
    """What pytest leaves out and writes down, within a suite."""

    def __init__(self, folder: Path, *, is_worker: bool) -> None:
        self._before = set(
            (folder / "before").read_text().splitlines()
        )  # not what passes meanwhile: workers read it as they start
        self._passed = None if is_worker else (folder / "passed").open("a", buffering=1)
        self._failed: set[str] = set()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._before])
        items[:] = [item for item in items if item.nodeid not in self._before]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        if self._passed is not None and report.when == "teardown" and report.nodeid not in self._failed:
            self._passed.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._before:
            session.exitstatus = pytest.ExitCode.OK


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Suite(Path(os.environ[FOLDER]), is_worker=hasattr(config, "workerinput")))


if __name__ == "__main__":
    sys.exit(any(row["outcome"] != "passed" for row in run_all(ROOT, dict(MINUTES)).values()))
