"""What the registry knows of a model: how it is built, its data, and what is done with a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

MIXED = ("bfloat16", "float16", "all at once")
"""The features in mixed precision."""

Path = Literal["cut", "whole", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model of the registry.

    Args:
        name: how tests and tables call it.
        what: the trait it is there for, for the table.
        model: builds it.
        samples: `count -> samples`, each of which a `DataLoader` can collate.
        step: `(module, batch) -> loss`; None for cross entropy of `(input, target)` batches.
        shorter: makes of a batch one of another shape; None where the model takes one shape only.
        evaluate: as in `TrainTask`.
        train: which path its training is expected to take.
        evaluation: which path its evaluation is expected to take.
        evaluated_whole_with: features with which its evaluation is expected to run whole all the same.
        left_out: features that are tested elsewhere, without the tracker, which is seen in the last bits of fused kernels.
    """

    name: str
    what: str
    model: Callable[[], nn.Module]
    samples: Callable[[int], list[Any]]
    step: Callable[[nn.Module, Any], Tensor] | None = None
    shorter: Callable[[Any], Any] | None = None
    evaluate: Callable[[nn.Module, Any], dict[str, Tensor]] | None = None
    train: Path = "cut"
    evaluation: Path = "cut"
    evaluated_whole_with: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def path(self, mode: str, feature: str) -> Path:
        """The path that is expected; what trains whole is evaluated whole."""
        if self.train == "refused":
            return "refused"
        if self.train == "whole":
            return "whole"
        if mode == "train":
            return self.train
        return "whole" if feature in self.evaluated_whole_with else self.evaluation


def accuracy(module: nn.Module, batch: Any) -> dict[str, Tensor]:
    """What a classifier of `(input, target)` batches is evaluated by."""
    logits = module(batch[0])
    return {"acc": (logits.argmax(1) == batch[1]).float().mean(), "loss": functional.cross_entropy(logits, batch[1])}


def generator(seed: int) -> torch.Generator:
    """Data must be the same in every process."""
    return torch.Generator().manual_seed(seed)


def vectors(count: int) -> list[Any]:
    """16 numbers; the label is which of the first four is the largest."""
    inputs = torch.randn(count, 16, generator=generator(1))
    return list(zip(inputs, inputs[:, :4].argmax(dim=1), strict=True))


def images(count: int) -> list[Any]:
    """8 x 8 pixels; the label is the brightest quarter."""
    pixels = torch.randn(count, 1, 8, 8, generator=generator(2))
    return list(zip(pixels, functional.avg_pool2d(pixels, 4).flatten(1).argmax(dim=1), strict=True))


def texts(count: int) -> list[Any]:
    """12 tokens of 23; the label is the first token's remainder by four. Token 0 is padding, at the ends."""
    ids = torch.randint(1, 23, (count, 12), generator=generator(3))
    lengths = torch.randint(6, 13, (count,), generator=generator(4))
    ids = ids.masked_fill(torch.arange(12) >= lengths[:, None], 0)
    return list(zip(ids, ids[:, 0] % 4, strict=True))


def shorter_texts(batch: Any) -> Any:
    """The first ten tokens of each."""
    return [batch[0][:, :10].contiguous(), batch[1]]


def smaller_images(batch: Any) -> Any:
    """The upper three quarters of each."""
    return [batch[0][:, :, :6].contiguous(), batch[1]]
