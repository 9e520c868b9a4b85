"""`Trainer.fit` of Lightning on a GPU, and the same module as a task of a pool there."""

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from hydra_tune import HydraExecutor
from hydra_tune_lightning import task_from_lightning
from tests.support.lightning_modules import Autoencoder, Classifier, DecayGroups, fitted

DEVICES, ACCELERATOR = "cuda:0", "gpu"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("deterministic"),
]
CASES: dict[str, dict[str, Any]] = {
    "an autoencoder": {"make": Autoencoder},
    "dropout, accumulated": {"make": partial(Classifier, dropout=0.2), "accumulate_grad_batches": 3},
    "clipped, with groups": {"make": DecayGroups, "gradient_clip_val": 0.1},
    "bfloat16": {"make": Classifier, "precision": "bf16-mixed"},
}


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("name", CASES)
def test_it_has_the_bits_of_lightning(name, shards):
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, **CASES[name]}
    make = options.pop("make")
    weights, epochs = fitted(make, accelerator=ACCELERATOR, **options)
    with HydraExecutor(DEVICES, num_shards=shards) as pool:
        (result,) = pool.run([task_from_lightning(make, seed=3, **options)])
    assert [entry["val_loss"] for entry in result.history] == [values["val_loss"] for values in epochs]
    for key, tensor in result.state_dict().items():
        assert torch.equal(tensor.cpu(), weights[key].cpu()), key
