"""For all tests on GPUs. Read once, when they are first used: so they are set before any test."""

import os
from pathlib import Path

import pytest
import torch

if torch.cuda.is_available():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # deterministic, and small beside the budgets of tests
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1024")  # KiB


def pytest_collection_modifyitems(items):
    """What drivers and libraries warn of on a machine is told, and fails nothing."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
