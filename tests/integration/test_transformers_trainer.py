"""A `Trainer` in the pool gives the bits of `Trainer.train()`, whole and cut; what would not is refused by name."""

import pytest
import torch

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

import hydra_tune_transformers
from hydra_tune import HydraExecutor, train_plain
from tests.support.trainers import KINDS, making, own_loss, trained
from transformers import EarlyStoppingCallback

CASES = {
    **{kind: {"kind": kind} for kind in KINDS},
    "accumulated, the last step of an epoch shorter": {"gradient_accumulation_steps": 4},
    "accumulated by tokens": {"kind": "causal language model", "gradient_accumulation_steps": 4},
    "accumulated, of a random collator": {"kind": "masked language model", "gradient_accumulation_steps": 4},
    "accumulated, a model that takes no count": {"kind": "multiple choice", "gradient_accumulation_steps": 4},
    "ends within an epoch": {"max_steps": 9, "gradient_accumulation_steps": 2, "kind": "masked language model"},
    "half an epoch": {"num_train_epochs": 1.5},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "in order": {"train_sampling_strategy": "sequential"},
    "another seed of the data": {"data_seed": 7, "seed": 3},
    "torch's own order": {"accelerator_config": {"use_seedable_sampler": False}},
    "smoothed labels": {"label_smoothing_factor": 0.1},
    "smoothed labels of a causal model": {
        "kind": "causal language model",
        "label_smoothing_factor": 0.1,
        "gradient_accumulation_steps": 2,
    },
    "a loss of one's own": {
        "kind": "token classification",
        "given": {"compute_loss_func": own_loss},
        "gradient_accumulation_steps": 2,
    },
    "no clipping": {"max_grad_norm": 0.0},
    "strong clipping": {"max_grad_norm": 0.05},
    "a cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 0.2},
    "SGD": {"optim": "sgd"},
    "Adafactor": {"optim": "adafactor"},
    "plain AdamW": {"optim": "adamw_torch"},
    "a live model": {"live_model": True},
    "dropped rests": {"dataloader_drop_last": True},
    "evaluated every four steps": {"eval_strategy": "steps", "eval_steps": 4},
    "evaluated at the end": {"eval_strategy": "no"},
    "the loss alone": {"given": {"compute_metrics": None}},
    "predictions picked": {
        "kind": "translation",
        "given": {"preprocess_logits_for_metrics": lambda logits, labels: logits[0] * 2},
    },
    "bfloat16": {"bf16": True},
}
FAST_CUTS = ("text classification", "accumulated by tokens", "ends within an epoch")


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """`Trainer.train()` of each case, once."""
    runs = {}

    def run(name):
        if name not in runs:
            folder = tmp_path_factory.mktemp("trainer")
            make = making(folder, **CASES[name])
            weights, reports, trainer = trained(make)
            # What a user without evaluation strategy calls after train().
            runs[name] = make, weights, reports or [trainer.evaluate()]
        return runs[name]

    return run


def assert_same(result, weights, reports):
    state = result.state_dict()
    assert list(state) == list(weights)
    assert [name for name, value in weights.items() if not torch.equal(value, state[name])] == []
    names = [name for name in result.metrics if name.startswith("val_")]
    assert "val_loss" in names
    assert len(result.history) == len(reports)
    for entry, report in zip(result.history, reports, strict=True):
        assert {name: entry[name] for name in names} == {
            name: float(report[name.replace("val_", "eval_", 1)]) for name in names
        }


@pytest.mark.parametrize("name", CASES)
def test_the_task_is_the_trainers_training(stock, name):
    make, weights, reports = stock(name)
    task = hydra_tune_transformers.task_from_trainer(make)
    assert_same(train_plain(task), weights, reports)
    with HydraExecutor("cpu:1") as pool:
        (result,) = pool.run([task])
    assert result.num_shards == 1
    assert_same(result, weights, reports)


@pytest.mark.parametrize(
    "name", [name if name in FAST_CUTS else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_model_that_is_cut_has_the_same_bits(stock, name):
    make, weights, reports = stock(name)
    with HydraExecutor("cpu:2", num_shards=3) as pool:
        (result,) = pool.run([hydra_tune_transformers.task_from_trainer(make)])
    assert result.num_shards == 3
    assert_same(result, weights, reports)
