"""A stock `Trainer` on a GPU, and the same `Trainer` as a task of a pool there."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Trainer needs accelerate")

from hydra_tune import HydraExecutor
from hydra_tune_transformers import task_from_trainer
from tests.support.trainers import making, trained

DEVICE = DEVICES = "cuda:0"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("deterministic"),
]
CASES: dict[str, dict[str, Any]] = {
    "BERT": {},
    "Llama": {"kind": "causal language model", "gradient_accumulation_steps": 4},
    "a masked model": {"kind": "masked language model"},
    "GPT-2 in bfloat16": {"kind": "GPT-2", "bf16": True},
}


@pytest.mark.parametrize("shards", [None, 3])
@pytest.mark.parametrize("name", CASES)
def test_it_has_the_bits_of_the_stock_trainer(name, shards, tmp_path):
    weights, reports, _ = trained(making(tmp_path, use_cpu=DEVICE == "cpu", **CASES[name]))
    with HydraExecutor(DEVICES, num_shards=shards) as pool:
        (result,) = pool.run([task_from_trainer(making(tmp_path, **CASES[name]))])
    losses = [entry["val_loss"] for entry in result.history]
    assert losses == [float(report["eval_loss"]) for report in reports]
    for key, tensor in result.state_dict().items():
        assert torch.equal(tensor.cpu(), weights[key].cpu()), key
