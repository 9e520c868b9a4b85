"""Batches in the order and at the time of a `Trainer`.

`Trainer` draws through a loader of accelerate, always a batch ahead of the training: a collator with random numbers (masked
tokens) draws the numbers of the next batch before the present batch trains. `AheadLoader` does the same, from the samplers
of the `Trainer`. `task.py` makes the loaders, and the pool draws from a copy of the `AheadLoader` for each trial.

Note: order. Each draw must come at the time of `Trainer`'s draw. `num_passes` is part of a trial's place in its data, and a
checkpoint holds the number as an attribute of the loader.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from torch.utils.data import DataLoader, Sampler

from hydra_tune.errors import TaskError
from hydra_tune_transformers.errors import RefusedTrainerError
from hydra_tune_transformers.shared import check


class AheadLoader(DataLoader[Any]):
    """Draws each batch while the batch before is still to train, and gives batches as dicts.

    Args:
        prepared: loader of the `Trainer`.
        short_pass: number of the pass with an early end, from 0, and the batches of the pass; None: no pass ends early.

    Attributes:
        last_kept: samples that an evaluation keeps of the last batch; None: all.
    """

    def __init__(self, prepared: Any, short_pass: tuple[int, int] | None = None) -> None:
        if not isinstance(prepared, DataLoaderShard):
            reason = (
                f"a loader of the class {type(prepared).__name__}, which draws at other times than that of accelerate"
            )
            raise RefusedTrainerError([f"{reason}: return self.accelerator.prepare(loader)"])
        if hasattr(prepared.dataset, "set_epoch"):
            reason = f"the dataset {type(prepared.dataset).__name__} has set_epoch(), which the pool would not call"
            raise RefusedTrainerError([f"{reason}: let the dataset count its passes"])
        sampler: Any = getattr(prepared.batch_sampler, "sampler", None)
        super().__init__(
            prepared.dataset,
            batch_sampler=prepared.batch_sampler,
            collate_fn=prepared.collate_fn,
            num_workers=prepared.num_workers,
            worker_init_fn=prepared.worker_init_fn,
            generator=prepared.generator,
        )
        self.short_pass = short_pass
        self.num_passes = 0
        self.last_kept = _last_kept(prepared)
        # Accelerate's sampler makes its generator in the first pass, and a checkpoint holds only generators that were there
        # before. The sampler seeds it at the beginning of each pass.
        if hasattr(sampler, "initial_seed") and sampler.generator is None:
            sampler.generator = torch.Generator()

    def __iter__(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]  # a generator, as in accelerate
        # As accelerate, of the samplers, which are copied for each trial.
        within = getattr(self.batch_sampler, "batch_sampler", None)
        parts: tuple[Any, ...] = (self.batch_sampler, getattr(self.batch_sampler, "sampler", None))
        for part in (*parts, getattr(within, "sampler", None)):
            # Accelerate's sampler counts its passes itself, and its `set_epoch` changes nothing then.
            if hasattr(part, "set_epoch") and not isinstance(part, SeedableRandomSampler):
                part.set_epoch(self.num_passes)
        # Torch's own iterator at once: it draws a number, and a pass whose later batches draw none can be saved within.
        return self._ahead(super().__iter__())

    def _ahead(self, batches: Iterator[Any]) -> Iterator[dict[str, Any]]:
        most = self.short_pass[1] if self.short_pass is not None and self.short_pass[0] == self.num_passes else None
        drawn: list[Any] = []
        # Of a `Trainer`'s loader, within the object that leaves out columns.
        collator = getattr(self.collate_fn, "data_collator", self.collate_fn)
        check(collator)
        for number, batch in enumerate(batches):
            check(collator)
            drawn.append(batch)
            if len(drawn) > 1:
                yield _as_dict(drawn.pop(0))
            # Only after the yield: accelerate has drawn the next batch, too, when the last batch of the pass trains.
            if number == most:
                return
        yield from map(_as_dict, drawn)
        self.num_passes += 1


class SameOrder:
    """Makes a loader anew for each pass, with its generators as at the beginning: `Trainer` evaluates so."""

    def __init__(self, loader: AheadLoader) -> None:
        self._loader = loader

    def __call__(self) -> AheadLoader:
        """Return the loader of a pass."""
        # A copy of each object down to the generators: the loader itself must stay as before the first pass.
        parts = parts_of(self._loader)
        copies = {id(part): _begun_again(part) for part in parts}
        for part in parts:
            if not isinstance(part, torch.Generator):
                # In `vars`, because torch refuses the assignment.
                vars(copies[id(part)]).update(
                    {name: copies[id(value)] for name, value in vars(part).items() if id(value) in copies}
                )
        loader: AheadLoader = copies[id(self._loader)]
        return loader


def parts_of(loader: DataLoader[Any]) -> list[Any]:
    """Return a loader, its samplers, and the generators of all of these."""
    parts: list[Any] = [loader]
    for part in parts:  # grows
        if not isinstance(part, torch.Generator):
            parts += [
                value
                for name, value in vars(part).items()
                if isinstance(value, Sampler | torch.Generator) or name in ("sampler", "batch_sampler")
                if hasattr(value, "__dict__") or isinstance(value, torch.Generator)
                if all(value is not each for each in parts)
            ]
    return parts


def _last_kept(prepared: DataLoaderShard) -> int | None:
    # As `DataLoaderStateMixin.begin` of accelerate: all samples where the loader drops the rest, or a number is unknown.
    with suppress(Exception):
        if not prepared._drop_last:  # noqa: SLF001 - accelerate has no public name
            length = getattr(prepared.dataset, "total_dataset_length", len(prepared.dataset))
            return length % prepared.total_batch_size or None
    return None


def _begun_again(part: Any) -> Any:
    if isinstance(part, torch.Generator):
        return torch.Generator(part.device).set_state(part.get_state())
    return copy.copy(part)


def _as_dict(batch: Any) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        raise TaskError(
            f"the collator made a {type(batch).__name__}, and a model of the transformers library takes names; return a dict"
        )
    return dict(batch)
