"""The recipes of docs/training.md train as they stand, in the pool as in the plain loop."""

import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune import HydraExecutor, TrainTask, train_plain

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
OPTIMIZER = torch.optim.SGD


def snippet(heading):
    section = PAGE.partition(f"# {heading}\n")[2].partition("\n#")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return code


def data(size):
    generator = torch.Generator().manual_seed(size)
    points = torch.randn(size, 4, generator=generator)
    return TensorDataset(points, (points[:, 0] > 0).long())


def net():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))


TRAINING = {"train": data(80), "batch_size": 16, "epochs": 3, "loss": torch.nn.functional.cross_entropy}


def assert_as_plain(make):
    """Train a fresh task in the pool and in the plain loop, with the same bits; return the pool's result."""
    expected = train_plain(make())
    with HydraExecutor(devices="cpu:2") as pool:
        (result,) = pool.run([make()])
    values = [[report[metric] for metric in report if metric != "seconds"] for report in result.history]
    assert values == [[report[metric] for metric in report if metric != "seconds"] for report in expected.history]
    for name, tensor in expected.state_dict().items():
        assert torch.equal(result.state_dict()[name], tensor), name
    return result


@pytest.mark.parametrize("name", [field.name for field in fields(TrainTask)])
def test_every_argument_is_named(name):
    assert f"{name}=" in PAGE or f"`{name}`" in PAGE


def test_the_call_with_all_arguments_trains():
    batches = [dict(zip(("image", "label"), batch, strict=True)) for batch in DataLoader(data(80), batch_size=16)]
    names = {
        "torch": torch,
        "TrainTask": TrainTask,
        "Net": lambda width: net(),
        "width": 8,
        "lr": 0.1,
        "cross_entropy": torch.nn.functional.cross_entropy,
        "accuracy": lambda module, batch: (module(batch["image"]).argmax(1) == batch["label"]).double().mean(),
        "train_set": lambda: batches,
        "validation_set": lambda: batches,
    }
    # Ten epochs of these few batches have no hundredth step.
    call = (
        snippet("All arguments")
        .replace("report_every=100", "report_every=7")
        .replace("batch_size=64", "batch_size=None")
    )
    result = assert_as_plain(lambda: eval(call, dict(names)))
    assert "val_acc" in result.metrics


def test_the_average_in_the_module_is_trained_and_evaluated():
    def task(**given):
        return TrainTask(optimizer=lambda groups: OPTIMIZER(groups, lr=0.1), validate=data(24), **given, **TRAINING)

    names = {"torch": torch, "Net": net, "TrainTask": task}
    definitions, call = snippet("After each step").split("\n\n\nTrainTask")
    exec(definitions, names)
    result = assert_as_plain(lambda: eval("TrainTask" + call.replace(", ...)", ")"), names))
    weights = result.state_dict()
    assert weights["average.n_averaged"] == 15  # one for each step
    assert not torch.equal(weights["average.module.0.weight"], weights["net.0.weight"])


def test_the_loss_over_all_tokens_of_a_step_is_trained():
    generator = torch.Generator().manual_seed(2)
    batches = []
    for padding in range(5):
        words = torch.randint(12, (4, 6), generator=generator)
        labels = words.clone()
        labels[:, 6 - padding :] = -100
        batches.append({"input_ids": words, "labels": labels})

    def task(**given):
        return TrainTask(
            model=lambda: torch.nn.Sequential(torch.nn.Embedding(12, 8), torch.nn.Linear(8, 12)),
            optimizer=lambda parameters: OPTIMIZER(parameters, lr=0.1),
            train=lambda: batches,
            **given,
        )

    names = {"cross_entropy": torch.nn.functional.cross_entropy, "TrainTask": task}
    definitions, call = snippet("Losses over all tokens of a step").split("\n\n\nTrainTask")
    exec(definitions, names)
    result = assert_as_plain(lambda: eval("TrainTask" + call.replace("..., ", ""), names))
    assert result.metrics["train_loss"] == pytest.approx(np.log(12), rel=0.2)  # a mean over tokens


def test_collected_values_give_the_metric_of_the_whole_set():
    def share_of_pairs(labels, scores):
        return float((scores[labels == 1][:, None] > scores[labels == 0]).mean())

    names = {"roc_auc_score": share_of_pairs}
    definition = snippet("Metrics over the whole set").partition("\n\n\nTrainTask")[0]
    exec(definition, names)
    result = assert_as_plain(
        lambda: TrainTask(
            model=net,
            optimizer=lambda parameters: OPTIMIZER(parameters, lr=0.1),
            validate=data(30),
            evaluate=names["evaluate"],
            finish=names["finish"],
            metric="val_auc",
            **TRAINING,
        )
    )
    module, (points, labels) = result.module().eval(), data(30).tensors
    with torch.no_grad():
        scores = torch.cat([module(part)[:, 1] for part in points.split(16)])
    assert result.metrics["val_auc"] == share_of_pairs(labels.numpy(), scores.numpy())
