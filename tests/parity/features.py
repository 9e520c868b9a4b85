"""What a task may ask for besides a model: each feature is a change of a task's arguments, and one line of `FEATURES`.

Every feature trains in two epochs of four batches (`long`: five) and reports at every step unless it is about reports, so
that every training loss is compared.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from tests.parity.zoo.entry import Entry

BATCH = 4
BATCHES = 4
EPOCHS = 2
STEPS = BATCHES * EPOCHS

Change = Callable[[Entry], dict[str, Any]]


class Samples(Dataset[Any]):
    """Samples at hand."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Stream(IterableDataset[Any]):
    """Samples in their order, of unknown number."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        yield from self.samples


def _plain(entry: Entry) -> dict[str, Any]:
    return {}


def _long(entry: Entry) -> dict[str, Any]:
    return {"epochs": 5}


def _groups(entry: Entry) -> dict[str, Any]:
    return {"param_groups": no_decay_groups}


def no_decay_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups by name, as is usual for transformers: biases and normalizations are not decayed."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    kept = [p for name, p in named if "norm" in name or name.endswith("bias")]
    decayed = [p for name, p in named if not ("norm" in name or name.endswith("bias"))]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0, "lr": 1e-3}]


def _schedule(make: Callable[..., Any], interval: str, **arguments: Any) -> Change:
    return lambda entry: {"scheduler": partial(make, **arguments), "scheduler_interval": interval}


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    """Moves the rate, and the momentum of those that have one."""
    has_momentum = not optimizer.defaults.keys().isdisjoint({"momentum", "betas"})
    return lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS, cycle_momentum=has_momentum)


def _plateau(entry: Entry) -> dict[str, Any]:
    return _evaluation(entry) | {
        "scheduler": partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, threshold=0.5)
    }


def _evaluation(entry: Entry) -> dict[str, Any]:
    """Validation data whose last batch is a smaller one, and the model's own metrics."""
    return {"validate": Samples(entry.samples(BATCH + 2)), "evaluate": entry.evaluate, "report_every": 2}


def _ragged(entry: Entry) -> dict[str, Any]:
    return {"train": Samples(entry.samples(BATCH * BATCHES - 1))}


def _shapes(entry: Entry) -> dict[str, Any]:
    """Every second batch has another shape."""
    shorter = entry.shorter
    assert shorter is not None

    def collate(samples: list[Any]) -> Any:
        batch = default_collate(samples)
        return shorter(batch) if torch.rand(()) < 0.5 else batch  # drawn, as padded lengths are

    return {"train": DataLoader(Samples(entry.samples(BATCH * BATCHES)), BATCH, shuffle=True, collate_fn=collate)}


def _iterable(entry: Entry) -> dict[str, Any]:
    return {"train": Stream(entry.samples(BATCH * BATCHES - 1)), "report_every": "epoch"}


def _with(**arguments: Any) -> Change:
    return lambda entry: arguments


FEATURES: dict[str, Change] = {
    "plain": _plain,
    "long": _long,
    "groups": _groups,
    "schedule per step": _schedule(lr_scheduler.CosineAnnealingLR, "step", T_max=STEPS),
    "schedule per epoch": _schedule(lr_scheduler.StepLR, "epoch", step_size=1, gamma=0.5),
    "plateau": _plateau,
    "one cycle": _schedule(one_cycle, "step"),
    "ragged": _ragged,
    "shapes": _shapes,
    "iterable": _iterable,
    "evaluation": _evaluation,
    "accumulate": _with(accumulate=2),
    "clip": _with(max_grad_norm=0.5),
    "bfloat16": _with(precision="bfloat16"),
    "float16": _with(precision="float16"),
    "prune bad losses": _with(on_bad_loss="prune"),
    "all at once": lambda entry: (
        _evaluation(entry) | _ragged(entry) | {"accumulate": 3, "max_grad_norm": 0.5, "precision": "bfloat16"}
    ),
}


def fits(entry: Entry, feature: str) -> bool:
    """Whether a feature makes sense for a model: not every model takes another shape."""
    return feature not in entry.left_out and (feature != "shapes" or entry.shorter is not None)
