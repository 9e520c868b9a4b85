"""For all tests on GPUs. Read once, when they are first used: so they are set before any test."""

import functools
import itertools
import os
from pathlib import Path

import pytest
import torch

from hydra_tune import HydraExecutor

MOST_EVENTS = 20
_failed = {}  # where a failure is told, by test

if torch.cuda.is_available():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # deterministic, and small beside the budgets of tests
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1024")  # KiB


def pytest_collection_modifyitems(items):
    """What drivers and libraries warn of on a machine is told, and fails nothing."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture
def deterministic(deterministic_kernels, monkeypatch):
    """The same numbers twice, and in full float32: TF32 rounds groups of other sizes apart by a thousandth."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def deterministic_kernels():
    """The same numbers twice, in the precision that torch takes by default, which is TF32 for convolutions."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def _logged(monkeypatch, tmp_path):
    """Each pool writes an event log: whoever looks at a failure on a machine that is far away has that to go by."""
    init, number = HydraExecutor.__init__, itertools.count()

    @functools.wraps(init)
    def logged(self, *args, **options):
        init(self, *args, **{"event_log": tmp_path / f"events{next(number):03}.jsonl"} | options)

    monkeypatch.setattr(HydraExecutor, "__init__", logged)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed and not hasattr(item.config, "workerinput"):
        _failed[item.nodeid] = item.config.get_terminal_writer()
    folder = item.funcargs.get("tmp_path")
    logs = sorted(folder.glob("events*.jsonl")) if report.failed and folder is not None else []
    if logs:
        events = logs[-1].read_text(encoding="utf-8").splitlines()[-MOST_EVENTS:]
        report.sections.append(("last events of its last pool", "\n".join(events)))
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """A failure is told at once: a run that is ended at its limit prints no summary."""
    if report.nodeid in _failed:
        _failed.pop(report.nodeid).line(f"\n{report.longreprtext}")
