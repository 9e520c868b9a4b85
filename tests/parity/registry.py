"""The registry: models x optimizers x features, each combination a task that any process can build from its name.

Crossed with shard and device counts by the tests, and with what was observed by `tests.parity.table`.
"""

from dataclasses import dataclass
from typing import Any

from torch.nn import functional

from hydra_tune.task import TrainTask
from tests.parity.features import BATCH, BATCHES, EPOCHS, FEATURES, Samples, fits
from tests.parity.optimizers import OPTIMIZERS, OTHERS
from tests.parity.zoo import hugging_face, sequences, traits, vision, whole
from tests.parity.zoo.entry import Entry

FAMILIES: dict[str, list[Entry]] = {
    "traits": traits.ENTRIES,
    "vision": vision.ENTRIES,
    "sequences": sequences.ENTRIES,
    "hugging_face": hugging_face.ENTRIES,
    "whole": whole.ENTRIES,
}
ENTRIES: dict[str, Entry] = {entry.name: entry for family in FAMILIES.values() for entry in family}


@dataclass(frozen=True, slots=True, order=True)
class Spec:
    """One task of the registry, by names."""

    model: str
    feature: str = "plain"
    optimizer: str = "adamw"
    seed: int = 5

    @property
    def evaluates(self) -> bool:
        """Whether the task has validation data."""
        return "validate" in FEATURES[self.feature](ENTRIES[self.model])

    def __str__(self) -> str:
        return f"{self.model}/{self.feature}/{self.optimizer}/{self.seed}"

    @classmethod
    def parse(cls, text: str) -> "Spec":
        """The inverse of `str`."""
        model, feature, optimizer, seed = text.split("/")
        return cls(model, feature, optimizer, int(seed))


def build(spec: Spec) -> TrainTask:
    """A fresh task; equal specs give equal tasks in every process."""
    entry = ENTRIES[spec.model]
    arguments: dict[str, Any] = {
        "model": entry.model,
        "optimizer": (OPTIMIZERS | OTHERS)[spec.optimizer],
        "train": Samples(entry.samples(BATCH * BATCHES)),
        "epochs": EPOCHS,
        "report_every": 1,
        "seed": spec.seed,
    }
    arguments |= {"loss": functional.cross_entropy} if entry.step is None else {"step": entry.step}
    arguments |= FEATURES[spec.feature](entry)
    if any(isinstance(arguments.get(name), Samples) for name in ("train", "validate")) or spec.feature == "iterable":
        arguments["batch_size"] = BATCH
    return TrainTask(**arguments)


def product(models: list[str] | None = None) -> list[Spec]:
    """Every model with every feature that it fits, the optimizers taking turns from model to model."""
    optimizers = list(OPTIMIZERS)
    return [
        Spec(name, feature, optimizers[row % len(optimizers)])
        for row, name in enumerate(ENTRIES)
        for feature in FEATURES
        if fits(ENTRIES[name], feature) and (models is None or name in models)
    ]
