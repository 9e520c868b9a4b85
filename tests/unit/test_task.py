"""A task's mistakes show where it is written, with the argument's name and the remedy."""

import dataclasses
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hydra_tune.errors import HydraTuneError, TaskError
from hydra_tune.task import TrainTask

ROWS = TensorDataset(torch.zeros(4, 2), torch.zeros(4, 1))
EMPTY = TensorDataset(torch.zeros(0, 2))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


def arguments(**changes):
    made = {
        "model": partial(nn.Linear, 2, 1),
        "optimizer": torch.optim.SGD,
        "train": ROWS,
        "batch_size": 2,
        "loss": nn.functional.mse_loss,
    }
    return {name: value for name, value in (made | changes).items() if value is not ...}


def no_batches():
    return []


ADAM = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

WRONG = [
    ({"model": nn.Linear(2, 1)}, "model is Linear, a live module; give a callable that builds one"),
    ({"model": None}, "model must be callable, not None"),
    ({"model": "resnet"}, "model must be callable, not 'resnet'"),
    ({"optimizer": ADAM}, "optimizer is SGD, a live optimizer; give a factory"),
    ({"optimizer": "adam"}, "optimizer must be callable, not 'adam'"),
    ({"param_groups": nn.Linear(1, 1)}, "param_groups is Linear, a live module; give a function of the module"),
    ({"scheduler": torch.optim.lr_scheduler.StepLR(ADAM, 1)}, "scheduler is StepLR, a live scheduler"),
    ({"evaluate": nn.Linear(1, 1)}, "evaluate is Linear, a live module; give a function (module, batch)"),
    ({"loss": ..., "step": nn.Linear(1, 1)}, "step is Linear, a live module; give a function (module, batch) -> loss"),
    ({"loss": 3}, "loss must be callable, not 3"),
    ({"loss": nn.MSELoss}, "loss is the class MSELoss, and a loss of each batch is needed; give loss=MSELoss()"),
    ({"loss": ...}, "exactly one of loss= and step=, got neither"),
    ({"step": no_batches}, "exactly one of loss= and step=, got both"),
    ({"epochs": 0}, "epochs must be a whole number of at least 1, not 0"),
    ({"epochs": 1.5}, "epochs must be a whole number of at least 1, not 1.5"),
    ({"epochs": True}, "epochs must be a whole number of at least 1, not True"),
    ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0"),
    ({"split_operators": 4}, "split_operators must be {module name: pieces}, a size such as '64MiB', or None"),
    ({"split_operators": {3: 4}}, "or None for whole operators, not {3: 4}"),
    ({"split_operators": {"head": 0}}, "split_operators['head'] must be a whole number of at least 1, not 0"),
    ({"split_operators": "four"}, "split_operators must be a size such as '11GiB', '800 MB' or '4096', not 'four'"),
    ({"report_every": 0}, "report_every must be 'epoch' or a number of optimizer steps, not 0"),
    ({"report_every": "step"}, "report_every must be 'epoch' or a number of optimizer steps, not 'step'"),
    ({"activations": "offload"}, "activations must be one of 'auto', 'keep', 'recompute', 'spill', not 'offload'"),
    ({"activations": "Recompte"}, "not 'Recompte'; did you mean 'recompute'?"),
    ({"scheduler_interval": "batch"}, "scheduler_interval must be one of 'epoch', 'step', not 'batch'"),
    ({"result": "mean"}, "result must be one of 'last', 'best', not 'mean'"),
    ({"seed": -1}, "seed must be an integer from 0 to 2**32 - 1 (numpy takes no other), not -1"),
    ({"seed": 2**32}, "not 4294967296"),
    ({"seed": True}, "not True"),
    ({"seed": "1"}, "not '1'"),
    ({"batch_size": ...}, "train is a Dataset, so batch_size is needed; or give a DataLoader"),
    ({"train": no_batches, "validate": ROWS, "batch_size": ...}, "validate is a Dataset, so batch_size is needed"),
    (
        {"train": [1, 2]},
        "train must be a Dataset, a DataLoader or a callable that returns an iterable of batches, not list;",
    ),
    ({"train": [1, 2]}, "for batches at hand, train=lambda: batches"),
    ({"train": EMPTY}, "train is empty: TensorDataset of length 0"),
    ({"validate": EMPTY}, "validate is empty: TensorDataset of length 0"),
    ({"train": DataLoader(EMPTY), "batch_size": ...}, "train is empty: DataLoader of length 0"),
    ({"train": no_batches}, "batch_size is only for a Dataset; a DataLoader or a callable makes its own batches"),
    ({"metric": 3}, "metric must be a name or a tuple of names, not 3"),
    ({"metric": ()}, "metric must be a name or a tuple of names, not ()"),
    ({"metric": ("train_loss", 1)}, "metric must be a name or a tuple of names, not ('train_loss', 1)"),
    ({"metric": "accuracy"}, "metric 'accuracy' is never reported; reported are train_loss and val_<name>"),
    ({"metric": "val_loss"}, "metric 'val_loss' needs validation data; give validate=, or metric='train_loss'"),
    ({"metric": "val_acc", "validate": ROWS}, "metric 'val_acc' is never reported: without evaluate= only val_loss"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_a_mistake_is_refused_by_name(changes, message):
    with pytest.raises(TaskError, match=re.escape(message)):
        TrainTask(**arguments(**changes))


def test_errors_are_ours_and_value_errors():
    with pytest.raises(ValueError, match="epochs") as caught:
        TrainTask(**arguments(epochs=0))
    assert isinstance(caught.value, HydraTuneError)


def test_unknown_and_positional_arguments_are_refused():
    with pytest.raises(TypeError, match="epoch"):
        TrainTask(**arguments(), epoch=3)
    with pytest.raises(TypeError):
        TrainTask(nn.Linear)


@pytest.mark.parametrize(
    ("changes", "metrics"),
    [
        ({}, ("train_loss",)),
        ({"validate": ROWS}, ("val_loss",)),
        ({"validate": ROWS, "metric": "train_loss"}, ("train_loss",)),
        ({"validate": ROWS, "evaluate": no_batches, "metric": ("val_acc", "train_loss")}, ("val_acc", "train_loss")),
    ],
)
def test_what_is_reported_to_the_tuner(changes, metrics):
    assert TrainTask(**arguments(**changes)).metrics == metrics


@pytest.mark.parametrize(
    "changes",
    [
        {"train": no_batches, "batch_size": ...},
        {"train": no_batches, "validate": ROWS},
        {"train": DataLoader(ROWS), "batch_size": ...},
        {"train": DataLoader(Stream()), "batch_size": ...},
        {"train": Stream()},
        {"loss": nn.MSELoss()},
        {"report_every": 7},
        {"seed": 2**32 - 1},
    ],
)
def test_all_forms_of_data_and_factories_are_taken(changes):
    TrainTask(**arguments(**changes))


def test_a_task_is_frozen_and_equal_to_its_like():
    one, other = TrainTask(**(made := arguments())), TrainTask(**made)
    assert one == other
    assert dataclasses.replace(one, seed=1) != one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.seed = 3


def test_nothing_is_built_before_it_is_needed():
    def explode(*_):
        raise AssertionError("built too early")

    TrainTask(
        **arguments(
            model=explode, optimizer=explode, scheduler=explode, param_groups=explode, train=explode, batch_size=...
        )
    )


@pytest.mark.parametrize("parallel", ["data", "pipeline"])
def test_a_parallel_that_could_do_nothing_is_refused(parallel):
    with pytest.raises(
        TaskError, match=f"parallel='{parallel}' runs the batches .* give accumulate= or split_batches="
    ):
        TrainTask(**arguments(parallel=parallel))
    for several in ({"accumulate": 2}, {"split_batches": 2}, {"split_batches": "auto"}):
        assert TrainTask(**arguments(parallel=parallel, **several)).splits_steps
    assert not TrainTask(**arguments(parallel="none")).splits_steps


def test_parallel_is_one_of_four():
    with pytest.raises(TaskError, match="parallel must be one of 'auto', 'data', 'pipeline', 'none', not 'tensor'"):
        TrainTask(**arguments(parallel="tensor"))
