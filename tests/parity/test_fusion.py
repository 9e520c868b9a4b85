"""Trials computed together train in float64 as each of their plain loops does, or they run as ever and it is said why.

The whole registry goes through `fusion="on"`; `docs/results/fusion.md` names what fuses, and is held against it.
"""

import logging
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils._pytree import tree_map_only

from hydra_tune import HydraExecutor, train_plain
from hydra_tune.task import TrainTask
from tests.parity.features import Samples
from tests.parity.optimizers import OPTIMIZERS
from tests.parity.registry import ENTRIES, Spec, build
from tests.support.gathered import gather

DOCS = Path(__file__).parents[2] / "docs" / "results" / "fusion.md"
TOLERANCE = 1e-9
OF_WEIGHTS = 1e-8  # some have gradients that are nothing but rounding, of which AdamW makes steps
FAST = ("dlrm",)


def wide(value: Any) -> Any:
    """Everything that is a real number in float64."""
    return tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, value)


def in_float64(task: TrainTask) -> TrainTask:
    changes: dict[str, Any] = {"model": partial(_wide_model, task.model)}
    for name in ("train", "validate"):
        data = getattr(task, name)
        if isinstance(data, Samples):
            changes[name] = Samples(wide(data.samples))
    return replace(task, **changes)


def _wide_model(make: Any) -> torch.nn.Module:
    return make().double()


def registry_tasks(name: str, feature: str = "plain", optimizer: str = "adamw") -> list[TrainTask]:
    """Two trials that differ in their seeds and rates."""
    make = OPTIMIZERS[optimizer]
    return [
        replace(in_float64(build(Spec(name, feature, optimizer, seed))), optimizer=partial(make, lr=rate))
        for seed, rate in ((5, 3e-3), (11, 1e-3))
    ]


def worst(results: list[Any], tasks: list[TrainTask]) -> tuple[float, float]:
    """The largest relative differences of losses, and of weights, from the plain loops'."""
    found = weights = 0.0
    for result, task in zip(results, tasks, strict=True):
        assert result.error is None, result.error
        plain = train_plain(task)
        assert len(result.history) == len(plain.history)
        for own, other in zip(result.history, plain.history, strict=True):
            for key in other.keys() - {"seconds"}:
                found = max(found, abs(own[key] - other[key]) / max(abs(other[key]), 1e-3))
        for key, tensor in plain.state_dict().items():
            if tensor.is_floating_point() and tensor.numel():
                difference = (result.state_dict()[key] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-3)
                weights = max(weights, difference.item())
    return found, weights


def fused(tasks: list[TrainTask], caplog: pytest.LogCaptureFixture) -> tuple[list[Any], list[str], bool]:
    """Train them, and say why one was not fused."""
    caplog.clear()
    options = {"devices": "cpu:1", "device_memory": "256MiB", "fusion": "on", "fusion_size": len(tasks)}
    with (
        pytest.MonkeyPatch.context() as patch,
        caplog.at_level(logging.INFO, logger="hydra_tune.fusion"),
        HydraExecutor(**options) as pool,
    ):
        gather(patch, lambda count: count >= len(tasks))
        results = pool.run(tasks, on_error="return")
    told = [record.getMessage() for record in caplog.records if record.name == "hydra_tune.fusion"]
    reasons = [line.partition("not fused: ")[2] for line in told if "is not fused: " in line]
    return results, reasons, any("trials are fused" in line for line in told)


IN_FLOAT32 = {"hf_gpt2", "hf_llama", "hf_gpt2_unmasked", "hf_llama_unmasked"}  # their losses, whatever the model is in


def documented() -> dict[str, str]:
    """What the documentation says of each model: "yes", or why not."""
    text = DOCS.read_text()
    rows = [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    fused = re.findall(r"`(\w+)`", text.partition("\nFused: ")[2].partition("\n\n")[0])
    return dict.fromkeys(fused, "yes") | {row[0].strip("`"): row[-1] for row in rows if row[0].strip("`") in ENTRIES}


def test_the_table_leaves_nothing_out():
    assert documented().keys() == ENTRIES.keys()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ENTRIES]
)
def test_each_model_fuses_or_runs_as_ever_as_is_documented(name, caplog):
    tasks = registry_tasks(name)
    results, reasons, is_fused = fused(tasks, caplog)
    said = documented()[name]
    assert is_fused == (said == "yes"), reasons
    assert is_fused or any(said in reason for reason in reasons), reasons
    losses, weights = worst(results, tasks)
    assert losses <= (1e-5 if name in IN_FLOAT32 else TOLERANCE)
    assert weights <= (1e-5 if name in IN_FLOAT32 else OF_WEIGHTS)


def fifty_steps(name: str, optimizer: type[torch.optim.Optimizer]) -> list[TrainTask]:
    """Trials that differ in all that they may, of 50 steps, or 46."""
    options: list[dict[str, Any]] = [
        {"lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-3},
        {"lr": 3e-3, "momentum": 0.5},
        {"lr": 1e-2, "weight_decay": 1e-2},
    ]
    if optimizer is AdamW:
        options = [{"lr": 3e-3}, {"lr": 1e-3, "betas": (0.8, 0.99)}, {"lr": 2e-3, "weight_decay": 0.1, "eps": 1e-6}]
    schedules: list[dict[str, Any]] = [
        {},
        {"scheduler": partial(ExponentialLR, gamma=0.97), "scheduler_interval": "step"},
        {"scheduler": partial(StepLR, step_size=4)},
    ]
    first = in_float64(build(Spec(name)))
    data = Samples(wide(ENTRIES[name].samples(20)))
    made = []
    for seed, (own, schedule) in enumerate(zip(options, schedules, strict=True)):
        changes = {"train": data, "batch_size": 4, "epochs": 10 - (seed == 1), "seed": seed, "report_every": 1}
        made.append(replace(first, optimizer=partial(optimizer, **own), **changes, **schedule))
    return made


FIFTY = (
    "mlp",
    "cnn",
    "resnet",
    "depthwise_cnn",
    "vit",
    "hf_vit",
    "hf_bert",
    "gpt2",
    "dlrm",
    "bag_offsets",
    "gru",
    "lstm",
)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("optimizer", [SGD, AdamW])
@pytest.mark.parametrize("name", FIFTY)
def test_fifty_steps_of_trials_that_differ_in_all_that_they_may(name, optimizer, caplog):
    tasks = fifty_steps(name, optimizer)
    results, reasons, is_fused = fused(tasks, caplog)
    assert is_fused, reasons
    losses, weights = worst(results, tasks)
    assert losses <= TOLERANCE
    assert weights <= OF_WEIGHTS
