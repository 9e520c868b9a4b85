"""What holds for all tests."""

import gc
import importlib.util
import multiprocessing
import signal

import pytest
import torch

from tests.support.captured_once import captured_once as capturing_once
from tests.support.slow_part import leave_cases_to_the_slow_tests, present_turn

# A shell that starts the tests in the background has them ignore SIGINT, and tests that send it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The plain loop gives the pool's numbers with one intra-op thread, like every device of a pool.
torch.set_num_threads(1)
# Workers of data loaders, and the programs of tests/support/forked.py, are forked from a process that has loaded all this.
multiprocessing.set_forkserver_preload(["tests.support.warm"])

# Limits of time for an example would tell of the machine; the GPU tests do without hypothesis.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Where pytest-timeout is not installed its settings in pyproject.toml are no mistake: nobody reads them."""
    if not pluginmanager.hasplugin("timeout"):
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "of pytest-timeout, which is not there")


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` and the part of the slow tests choose
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_cases_to_the_slow_tests(items, present_turn())


def pytest_collection_finish() -> None:
    """Leave out of each later look for garbage what lives as long as the process: a million objects of packages and tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def captured_once():
    """Equal steps of a file's tests are captured once: for files that are about what is done with them."""
    with capturing_once() as known:
        yield known
