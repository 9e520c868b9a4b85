"""References are computed once per test run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity import reference
from tests.parity.models import MODELS
from tests.support.forked import forked

SPECS = (*(f"{name}:5" for name in MODELS), "mlp:11", "cnn_by_epoch:11", "vit:11", "gpt2:11")
DROPOUTS = ("gpt2_attention", "gpt2_bfloat16", "cnn_dropout", "mlp_native")
DROPOUT_SPECS = tuple(f"{name}:{seed}" for name in DROPOUTS for seed in (5, 11))


# One slow test trains a model with every feature and optimizer: minutes, and more where the machine has other work.
SLOW_SECONDS = 1800


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests of this folder longer than others before they count as hung."""
    for item in items:
        is_slow = item.path.parent == Path(__file__).parent and item.get_closest_marker("slow") is not None
        if is_slow and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What plain PyTorch gives, by `name:seed`."""
    output = tmp_path_factory.mktemp("references") / "references.pt"
    forked(reference.main, output, *SPECS, *DROPOUT_SPECS, timeout=240).check_returncode()
    return torch.load(output, weights_only=True)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
