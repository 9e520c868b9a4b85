"""The loaders of a training: from arguments, a datamodule or the module itself.

The pool draws from copies of a `DataLoader`, so the loader itself is the task's data. If a step reads `batch_idx`, a
`NumberedLoader` gives each batch with a number. Otherwise a loader with a generator becomes a `LimitedLoader`. `task.py`
asks for the loaders.

Note: the user's loader must stay unchanged: the classes here are given to a shallow copy.
"""

import copy
import itertools
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from hydra_tune.task import length_of
from hydra_tune.train.rng.stream_state import StreamState
from hydra_tune_lightning.errors import RefusedModuleError


class LimitedLoader(DataLoader[Any]):
    """Ends a pass at its length without asking for a further batch, as Lightning does.

    A sampler with a generator draws once more when asked beyond the last batch, and the next pass would differ.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # no iterator class of torch
        # Torch's own iterator at once, which draws a number.
        return itertools.islice(super().__iter__(), len(self))


class NumberedLoader(LimitedLoader):
    """Gives each batch of a pass with a number, from 0."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # as above
        return ((batch, number) for number, batch in enumerate(super().__iter__()))


def source_of(name: str, given: Any, datamodule: Any, module: Any) -> Any:
    """Return where a stage's loader comes from, as Lightning chooses: an argument, the datamodule, the module; or None."""
    if given is not None:
        return given
    return next((each for each in (datamodule, module) if each is not None and is_overridden(name, each)), None)


def loader_from(source: Any, name: str, *, is_numbered: bool) -> DataLoader[Any] | None:
    """Return the loader of a stage.

    Args:
        source: a loader, or an object with a method that returns a loader.
        name: the method, `train_dataloader` or `val_dataloader`.
        is_numbered: whether the step reads the number of the batch.

    Returns:
        The user's loader, or a shallow copy of another class; None for no data.

    Raises:
        RefusedModuleError: the data has another form than a `DataLoader` with a length, `name` draws random numbers, a sampler
            has `set_epoch`, or a subclass of `DataLoader` would need another class.
    """
    if source is None:
        return None
    before = StreamState.now()
    loader = getattr(source, name)() if hasattr(source, name) else source
    if not before.is_same(StreamState.now()):
        raise RefusedModuleError([f"{name}() draws random numbers: split or shuffle the data in setup()"])
    if isinstance(loader, list | tuple) and not loader:
        return None
    # Lightning gives the batches of a list's only loader as they are in a validation, and each within a list in a training.
    if isinstance(loader, list | tuple) and len(loader) == 1 and name == "val_dataloader":
        (loader,) = loader
    if not isinstance(loader, DataLoader):
        raise RefusedModuleError([f"{name} gives {type(loader).__name__}: give one torch.utils.data.DataLoader"])
    if length_of(loader) is None:
        raise RefusedModuleError([f"{name} gives a DataLoader without a length: give a dataset with len()"])
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(hasattr(sampler, "set_epoch") for sampler in samplers):
        raise RefusedModuleError([f"{name} has a sampler with set_epoch(): let the sampler count its passes itself"])
    loader = _with_seeded_workers(loader)
    has_generator = any(getattr(each, "generator", None) is not None for each in (loader, *samplers))
    if not is_numbered and not has_generator:
        return loader
    if type(loader) is not DataLoader:
        why = "a step reads batch_idx" if is_numbered else "a loader has a generator of its own"
        kind = type(loader).__name__
        raise RefusedModuleError([f"{why}, and {name} gives {kind}: give a torch.utils.data.DataLoader"])
    changed = copy.copy(loader)
    changed.__class__ = NumberedLoader if is_numbered else LimitedLoader
    return changed


def _with_seeded_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the loader; after `seed_everything(workers=True)` a copy with the function that Lightning adds."""
    if not loader.num_workers or loader.worker_init_fn is not None or not int(os.environ.get("PL_SEED_WORKERS", "0")):
        return loader
    seeded = copy.copy(loader)
    seeded.worker_init_fn = partial(pl_worker_init_function, rank=0)
    return seeded
