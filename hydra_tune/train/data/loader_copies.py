"""A trial's own copies of objects that change while data is drawn.

A `DataLoader`, the sampler and the generator are the user's objects, may belong to several trials, and change with each
iteration. A trial draws from copies in the state left by the user, except for a data pipe, and for a loader that a callable
draws from in place of returning it. A dataset's samples are never copied: a dataset with random streams of its own, and an
`IterableDataset` that is no data pipe, has a shallow copy. `TrialDataFeed` (`data_feed.py`) and `train_plain`
(`train/loop/reference_loop.py`) get the batches of each pass from `TrialLoaderCopies`. The module must not know models, steps
or the pool's devices, and takes no lock, because one thread at a time works on a trial.
"""

import copy
import itertools
import logging
import operator
import pickle
import random
import sys
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, MapDataPipe, Sampler

from hydra_tune.closures import enclosed_parts
from hydra_tune.errors import TaskError
from hydra_tune.task import Batch, DataHandle
from hydra_tune.train.data.handles import make_loader
from hydra_tune.train.data.loader_state import give_state, set_back, state_of

_LOGGER = logging.getLogger(__name__)

# Loaders that a warning has named.
_WARNED: "weakref.WeakSet[DataLoader[Any]]" = weakref.WeakSet()

_PLAIN = (bool, int, float, str)
_OWN_REFERENCES = 2
# Larger collections of a sampler are followed only where they are replaced, because reading them takes time in each pass.
_MOST_MARKED = 1 << 22


@dataclass(slots=True)
class _KnownCopy:
    """A copy, by the original.

    Attributes:
        original: the original, or a weak reference to it.
        plain: plain attributes of the original, as last copied.
        handle: index of the data handle that the copy was made for.
        dataset: data of the loader whose sampler the original is; None for any other object.
        marks: marks of a sampler's collections, as last copied.
        own_marks: marks of the copy's collections since.
        has_warned: whether a warning has told that both have changed.
    """

    original: object
    own: Any
    plain: dict[str, Any]
    handle: int
    dataset: Any = None
    marks: "dict[str, _Mark]" = field(default_factory=dict)
    own_marks: "dict[str, _Mark]" = field(default_factory=dict)
    has_warned: bool = False


class TrialLoaderCopies:
    """The copies of a trial, one for each original: parts shared by originals are shared by the copies.

    Note: positions. A callable may make new loaders for each pass, and their copies are forgotten with them, so the order
    in which all copies were made says nothing about which handle a copy is for. Positions are therefore kept by data
    handle, and in the order of creation only within each.

    Attributes:
        current_handle: place of the data handle used last, in the order of the handles' first use.
    """

    def __init__(self) -> None:
        self._copies: dict[int, _KnownCopy] = {}
        # Data handles in the order of their first use, which is the same in each run of a task.
        self._handles: list[DataHandle] = []
        self.current_handle = 0
        # Objects whose parts are being copied.
        self._entered: set[int] = set()
        # Restored positions for copies that do not exist yet, by handle.
        self._waiting: list[deque[Any]] = []
        # The same from a checkpoint written before positions were kept by handle.
        self._waiting_for_any: deque[Any] = deque()

    def use(self, handle: DataHandle) -> None:
        """Attribute copies made from now on to a data handle of the task."""
        for index, known_handle in enumerate(self._handles):
            if known_handle is handle:
                self.current_handle = index
                return
        self.current_handle = len(self._handles)
        self._handles.append(handle)

    def states(self) -> dict[str, list[Any]]:
        """Return the positions of the live copies and those still waiting for their copies, for `restore`."""
        self._forget_unheld()
        # A list, because a garbage collection at any point may call `_forget`.
        copies = [(_resolved(known.original), known) for known in list(self._copies.values())]
        copy_ids = {id(known.own) for _, known in copies}
        count = max([len(self._handles), len(self._waiting), *(known.handle + 1 for _, known in copies)])
        by_handle: list[list[Any]] = [[] for _ in range(count)]
        for original, known in copies:
            by_handle[known.handle].append(state_of(original, known.own, copy_ids))
        for positions, waiting in zip(by_handle, self._waiting, strict=False):
            positions.extend(waiting)
        return {"by_handle": by_handle, "of_any_handle": list(self._waiting_for_any)}

    def stream_marks(self) -> dict[int, Hashable]:
        """Return a value for each generator among the copies, another one whenever the generator has moved."""
        owns = [known.own for known in list(self._copies.values())]
        return {id(own): _mark_of(own) for own in owns if _is_stream(own)}

    def restore(self, states: Mapping[str, Sequence[Any]] | Sequence[Any]) -> None:
        """Set copies to positions from `states`; copies made later follow when they are made.

        An older checkpoint has a list of positions in the order in which all copies were made.
        """
        # The older list does not tell the handles, so its positions go to copies of any handle.
        positions = states if isinstance(states, Mapping) else {"by_handle": [], "of_any_handle": states}
        self._waiting = [deque(waiting) for waiting in positions["by_handle"]]
        self._waiting_for_any = deque(positions["of_any_handle"])
        self._forget_unheld()
        copies = list(self._copies.values())
        copy_ids = {id(known.own) for known in copies}
        for known in copies:
            set_back(_resolved(known.original), known.own, copy_ids)
            self._give_waiting(known)

    def batches(self, handle: DataHandle, batch_size: int | None, *, shuffle: bool) -> Iterable[Batch]:
        """Return the batches of one pass over a handle, as `make_loader` does, but from copies.

        Raises:
            TaskError: the data cannot be iterated, or a loader cannot be copied.
        """
        self.use(handle)
        self._forget_unheld()
        if isinstance(handle, Dataset):
            self._take_over_changes()
            return make_loader(self.stream_in(handle), batch_size, shuffle)
        batches = make_loader(handle, batch_size, shuffle)
        self._take_over_changes()
        if isinstance(batches, DataLoader):
            return self.loader(batches)
        _warn_of_shared_loaders(handle)
        return batches

    def _take_over_changes(self) -> None:
        """Copy numbers and texts set since on the originals, as by `sampler.set_epoch(n)`, and collections of samplers."""
        for known in list(self._copies.values()):
            new_attributes = _plain_attributes(_resolved(known.original))
            changes = {
                name: value
                for name, value in new_attributes.items()
                if name not in known.plain or known.plain[name] != value
            }
            if changes:
                vars(known.own).update(changes)
                known.plain = new_attributes
            if known.dataset is not None:
                self._take_over_values(known)

    def _take_over_values(self, known: _KnownCopy) -> None:
        """Copy a sampler's collections, such as weights, that the user has changed since, unless the copy has changed, too."""
        original, old_marks, own_marks = _resolved(known.original), known.marks, known.own_marks
        known.marks = _marks_of(original)
        # A collection that the sampler makes for itself, as when asked for its length, is no change of the user's.
        changed = [name for name, mark in known.marks.items() if name in old_marks and mark != old_marks[name]]
        if not changed:
            return
        own_parts, present = vars(known.own), _marks_of(known.own)
        moved = [
            name
            for name in changed
            if present.get(name) != own_marks.get(name) and own_parts.get(name) is not known.marks[name].value
        ]
        if moved and not known.has_warned:
            known.has_warned = True
            _LOGGER.warning(
                "your code changed the attribute %r of the sampler %s, and so did the trial's own copy of the sampler, which "
                "keeps its own value; change attributes that the sampler itself leaves alone",
                moved[0],
                type(original).__name__,
            )
        # A copy of a sampler of torch's shares the collections.
        source = original if _is_torchs(original) else self._deep(original, known.dataset)
        own_parts |= {name: vars(source)[name] for name in changed if name not in moved and name in vars(source)}
        known.own_marks = _marks_of(known.own) | {name: own_marks[name] for name in moved if name in own_marks}

    def loader(self, original: DataLoader[Any]) -> DataLoader[Any]:
        """Return the trial's copy of a loader; always the same copy.

        Raises:
            TaskError: the loader's sampler cannot be copied, or the loader keeps an iterator of its own.
        """
        known_copy: DataLoader[Any] | None = self._known(original)
        if known_copy is not None:
            return known_copy
        own_copy = copy.copy(original)
        parts = vars(own_copy)
        for name, value in parts.items():
            if name != "_iterator" and hasattr(value, "_next_data"):
                raise TaskError(
                    f"{type(original).__name__} keeps an iterator in {name!r}, which trials would share; give a plain "
                    "DataLoader, with persistent_workers=True to keep its workers"
                )
        parts |= {name: self.stream_in(parts[name]) for name in ("dataset", "generator", "collate_fn")}
        # Without these the copy would share the original's persistent workers and its length warning.
        parts |= {"_iterator": None, "_IterableDataset_len_called": None}
        for name in ("sampler", "batch_sampler"):
            parts[name] = self._sampler(parts[name], original.dataset)
        self._remember(original, own_copy)
        return own_copy

    def stream_in(self, original: Any) -> Any:
        """Return a stream's copy; for other data, the object itself, or a shallow copy with the trial's own random streams."""
        known_copy = self._known(original)
        if known_copy is not None:
            return known_copy
        if _is_stream(original):
            return self._remember(original, copy.deepcopy(original))
        if isinstance(original, IterDataPipe | MapDataPipe) or not hasattr(original, "__dict__") or _is_code(original):
            return original
        # Datasets may refer to each other, as a part to the whole.
        if id(original) in self._entered:
            return original
        self._entered.add(id(original))
        own_parts = {
            name: own_part
            for name, value in vars(original).items()
            if (own_part := self._part_of_data(value)) is not value
        }
        self._entered.discard(id(original))
        # An `IterableDataset` may keep its position in itself, so it is copied in any case.
        if not own_parts and not isinstance(original, IterableDataset):
            return original
        own_copy = copy.copy(original)
        vars(own_copy).update(own_parts)
        return self._remember(original, own_copy)

    def _part_of_data(self, value: Any) -> Any:
        """Return an attribute of a dataset with the trial's own streams, those of wrapped datasets included."""
        if _is_stream(value) or isinstance(value, Dataset):
            return self.stream_in(value)
        datasets = _datasets_in(value)
        own_datasets = [self.stream_in(dataset) for dataset in datasets]
        if all(own is dataset for own, dataset in zip(own_datasets, datasets, strict=True)):
            return value
        return dict(zip(value, own_datasets, strict=True)) if type(value) is dict else type(value)(own_datasets)

    def _sampler(self, original: Any, dataset: Dataset[Any]) -> Any:
        if original is None or isinstance(original, list | tuple | range):
            return original
        known_copy = self._known(original)
        if known_copy is not None:
            return known_copy
        if _is_torchs(original):
            own_sampler = copy.copy(original)
            for name, value in vars(original).items():
                if isinstance(value, torch.Generator):
                    vars(own_sampler)[name] = self.stream_in(value)
                elif name == "sampler":
                    vars(own_sampler)[name] = self._sampler(value, dataset)
            return self._remember(original, own_sampler, dataset)
        return self._remember(original, self._deep(original, dataset), dataset)

    def _deep(self, original: Any, dataset: Dataset[Any]) -> Any:
        """Return a deep copy of a user-defined sampler; the copy shares the data."""
        memo: dict[int, Any] = {}
        parts = getattr(original, "__dict__", {}).values()
        # A sampler may be over another object than its loader's dataset, as over the whole of a part.
        sources = [value for value in parts if isinstance(value, Dataset) or _is_alike(value, dataset)]
        for value in itertools.chain.from_iterable(map(_data_of, (dataset, *sources))):
            memo[id(value)] = self._part_of_data(value)
        for value in parts:
            if _is_stream(value):
                memo[id(value)] = self.stream_in(value)
            elif isinstance(value, Sampler):
                memo[id(value)] = self._sampler(value, dataset)
        try:
            return copy.deepcopy(original, memo)
        except Exception as error:
            raise TaskError(
                f"the sampler {type(original).__name__} cannot be copied: {error}. Each trial draws from its own copy; keep "
                "what cannot be copied out of the sampler, or give it a __deepcopy__ (which may return self if it has no state)"
            ) from error

    def _known(self, original: object) -> Any:
        known = self._copies.get(id(original))
        return None if known is None else known.own

    def _forget(self, key: int) -> None:
        self._copies.pop(key, None)

    def _forget_unheld(self) -> None:
        """Forget the copies of originals that nobody else holds, among those that cannot be referenced weakly.

        Generators of numpy cannot, nor those of torch 2.11.
        """
        for key, known in list(self._copies.items()):
            # Held by `known`, and as the argument.
            if not isinstance(known.original, weakref.ref) and sys.getrefcount(known.original) <= _OWN_REFERENCES:
                self._forget(key)

    def _remember(self, original: object, own: Any, dataset: Dataset[Any] | None = None) -> Any:
        key = id(original)
        try:
            # A weak reference, because a callable may create a new loader and new data for each pass.
            reference: object = weakref.ref(original, lambda _: self._forget(key))
        except TypeError:
            reference = original
        known = _KnownCopy(reference, own, _plain_attributes(original), self.current_handle)
        if dataset is not None:
            known.dataset, known.marks = dataset, _marks_of(original)
        self._copies[key] = known
        self._give_waiting(known)
        return own

    def _give_waiting(self, known: _KnownCopy) -> None:
        """Set a copy to the next position that waits for a copy of the same handle."""
        waiting = self._waiting[known.handle] if known.handle < len(self._waiting) else None
        positions = waiting or self._waiting_for_any
        if positions:
            give_state(known.own, positions.popleft())
        if known.dataset is not None:
            known.own_marks = _marks_of(known.own)


def _warn_of_shared_loaders(handle: DataHandle) -> None:
    """Log, once each, the loaders that a callable draws from in place of returning them, if a pass changes the loader."""
    for variable, part in enclosed_parts(handle, with_globals=True):
        if not isinstance(part, DataLoader) or part in _WARNED:
            continue
        if part.generator is None and not part.persistent_workers:
            continue
        _WARNED.add(part)
        _LOGGER.warning(
            "a data callable of a TrainTask reads the variable %r, a DataLoader with %s, and does not return the loader: "
            "trials that draw from the loader at once change each other's batches, and a resumed trial gets other batches. "
            "Return the loader itself, or make the loader in the callable, without generator= and persistent_workers=True: "
            "lambda: islice(DataLoader(...), n)",
            variable,
            "persistent_workers=True" if part.generator is None else "a generator",
        )


def _plain_attributes(original: object) -> dict[str, Any]:
    attributes = getattr(original, "__dict__", {})
    return {name: value for name, value in attributes.items() if type(value) in _PLAIN and not name.startswith("__")}


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """A mark of a collection, not equal to an earlier mark once the collection has been replaced, or changed and `state` tells.

    Attributes:
        state: the version of a tensor, the hash of an array, or the items of any other collection; 0 where not followed.
    """

    value: Any
    state: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Mark) or self.value is not other.value:
            return False
        if not isinstance(self.state, list):
            return bool(self.state == other.state)
        # By identity, because comparing arbitrary objects may run the user's code or compare whole tensors.
        return len(self.state) == len(other.state) and all(map(operator.is_, self.state, other.state))

    __hash__ = None  # type: ignore[assignment]


def _marks_of(sampler: object) -> dict[str, _Mark]:
    """Return marks of a sampler's attributes that are tensors, arrays or plain collections."""
    states = {name: (value, _state_of(value)) for name, value in getattr(sampler, "__dict__", {}).items()}
    return {name: _Mark(value, state) for name, (value, state) in states.items() if state is not None}


def _state_of(value: Any) -> Any:
    """Return the state of a collection for a mark; None for any other value."""
    if isinstance(value, torch.Tensor):
        # A tensor made in inference mode has no version.
        return 0 if value.is_inference() else value._version  # noqa: SLF001
    if type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
        return 0 if value.dtype.hasobject or value.size > _MOST_MARKED else hash(value.tobytes())
    if type(value) not in (list, tuple, set, dict):
        return None
    if len(value) > _MOST_MARKED:
        return 0
    return [*value.keys(), *value.values()] if type(value) is dict else list(value)


def _is_torchs(sampler: object) -> bool:
    return type(sampler).__module__ == Sampler.__module__


def _resolved(held: object) -> object:
    return held() if isinstance(held, weakref.ref) else held


def _is_stream(value: object) -> bool:
    return isinstance(value, torch.Generator | random.Random) or type(value).__module__.startswith("numpy.random")


def _mark_of(stream: Any) -> Hashable:
    return stream.get_state().numpy().tobytes() if isinstance(stream, torch.Generator) else pickle.dumps(stream)


def _is_code(value: object) -> bool:
    """Whether the value is a function or a class: both have attributes but no state to copy."""
    return isinstance(value, type) or hasattr(value, "__code__")


def _data_of(dataset: object) -> Iterator[object]:
    """Yield a dataset and its attributes, wrapped datasets included, each once."""
    found, waiting = {id(dataset)}, [dataset]
    while waiting:
        value = waiting.pop()
        yield value
        is_dataset = value is dataset or isinstance(value, Dataset)
        for part in getattr(value, "__dict__", {}).values() if is_dataset else _datasets_in(value):
            if id(part) not in found:
                found.add(id(part))
                waiting.append(part)


def _is_alike(value: object, dataset: object) -> bool:
    """Whether an object is a dataset like another one, of a class that torch does not know as one."""
    return type(value) is type(dataset) and type(value).__module__ != "builtins" and not isinstance(value, torch.Tensor)


def _datasets_in(value: Any) -> list[Any]:
    """Return the items of a list, tuple or dict of datasets; nothing for any other value."""
    if type(value) not in (list, tuple, dict):
        return []
    items = value.values() if type(value) is dict else value
    # The first item tells, because a dataset may keep a list of millions of samples.
    if not isinstance(next(iter(items), None), Dataset):
        return []
    return list(items)
