"""`on_validation_epoch_end` of a module, called on a copy with the module's metrics, lists and other values, and no weights.

A metric that `validation_step` updates has its states of all batches there, and a list its items of all batches: each batch
gives the appended items (`appended`), and `ValidationEnd` puts the batches together again. A list of a class counts as each
trial's own. Another attribute that steps change is missing in the copy. The same holds for parts with metrics. A value kept
by the hook for the next epoch is an error, because each call gets a new copy. `step.py` enters `appended` around
`validation_step`, and `states_alone` around both steps, and `task.py` makes the `ValidationEnd` that `EpochValues`
(`epoch_values.py`) calls.

Note: trials share the copy in `ValidationEnd.module`, from several threads, so no call may change the shared copy.
"""

import copy
import itertools
import json
import math
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils import _pytree
from torchmetrics import Metric, MetricCollection

from hydra_tune.errors import CaptureError, MetricError
from hydra_tune.shard.python_state.code_names import is_installed
from hydra_tune_lightning.epoch_values import StepLogs, collected_count, collected_states, metrics_of, put_states
from hydra_tune_lightning.options import TrainerOptions
from hydra_tune_lightning.trainer_stand_in import standing_in

HOOK = "on_validation_epoch_end"
_LIST, _FORMS, _SIZES = "list|", "forms|", "sizes|"
_NUMBERS = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}
_SET, _LENGTH = "set|", "length|"
_STOCK = (
    frozenset(vars(LightningModule()))
    | frozenset(vars(MetricCollection([])))
    | {"_hparams", "_hparams_initial", "_hparams_name"}
)
_STOCK_KINDS = frozenset({*LightningModule.__mro__, *MetricCollection.__mro__, *Metric.__mro__})
_SIZED: tuple[type, ...] = (dict, list, tuple, set, deque)
_WALKED, _DEPTH = 256, 4  # entries of a container that are compared, and how deep


def _owners(module: nn.Module) -> dict[str, nn.Module]:
    """Return the parts that a copy `without_weights` has, but the metrics, by the beginning of their attributes' names."""
    owners = {"": module}
    for place in metrics_of(module):
        part, path = module, ""
        for name in place.split(".")[:-1]:
            part, path = part.get_submodule(name), f"{path}{name}."
            if isinstance(part, Metric):
                break
            owners[path] = part
    return owners


def _lists(owners: Mapping[str, nn.Module]) -> dict[str, list[Any]]:
    return {
        path + name: value for path, part in owners.items() for name, value in vars(part).items() if type(value) is list
    }


def _contents(value: Any, depth: int = 0) -> Iterator[tuple[Any, int]]:
    """Iterate over a value and the values inside, each with a number: the version of a tensor, or the number of entries.

    A write in place changes a tensor's version. A container counts by its number of entries and, up to 256, by the entries, a
    dict by its values.
    """
    if isinstance(value, Tensor):
        # A tensor made in inference mode has no version counter.
        yield value, 0 if value.is_inference() else value._version  # noqa: SLF001 - no public name
        return
    parts: Any = ()
    if isinstance(value, _SIZED):
        parts = value.values() if isinstance(value, dict) else value
    elif not isinstance(value, nn.Module | type) and not is_installed(type(value).__module__):
        parts = getattr(value, "__dict__", {}).values()
    yield value, len(parts)
    if depth < _DEPTH and len(parts) <= _WALKED:
        # Listed, because another trial may change a value of a class meanwhile.
        for part in [*parts]:
            yield from _contents(part, depth + 1)


def _attributes(owners: Mapping[str, nn.Module], lengths: Mapping[str, int]) -> dict[str, list[tuple[Any, int]]]:
    """Return the contents of the attributes that the own code of modules and classes sets, of lists up to some lengths."""
    found: dict[str, list[tuple[Any, int]]] = {}
    for path, part in owners.items():
        for name, value in vars(part).items():
            if type(value) is list:
                items = value[: lengths.get(path + name, 0)]
                found[path + name] = [each for item in items for each in _contents(item)]
            elif name not in _STOCK:
                found[path + name] = [*_contents(value)]
        for name, value in _of_class(part).items():
            found.setdefault(path + name, []).extend(_contents(value))
    return found


def _of_class(part: nn.Module) -> dict[str, Any]:
    """Return the values that the own classes of a module hold for all its objects."""
    return {
        name: value
        for kind in reversed(type(part).__mro__)
        if kind not in _STOCK_KINDS
        for name, value in vars(kind).items()
        if not (name.startswith("__") or callable(value) or hasattr(type(value), "__get__"))
    }


class _StockMetric(Metric):  # type: ignore[misc]  # torchmetrics has no types here
    def update(self) -> None:
        """Take nothing."""

    def compute(self) -> None:
        """Compute nothing."""


_OF_METRIC = frozenset(vars(_StockMetric()))


@contextmanager
def states_alone(metrics: Mapping[str, Metric], read: Mapping[str, Any]) -> Iterator[None]:
    """Context around a step, in which updates of metrics may change the metrics' states and no other attribute.

    Args:
        metrics: the metrics by place, as new.
        read: places of metrics whose values are read; looked at after the step.

    Raises:
        MetricError: an update of a metric that is read changes another attribute.
    """
    before = {place: _beside_states(metric) for place, metric in metrics.items()}
    yield
    for place in read:
        metric = metrics[place]
        for name, contents in _beside_states(metric).items():
            if not _is_same(before[place].get(name, []), contents):
                raise MetricError(
                    f"update() of the metric {place!r} ({type(metric).__name__}) changes self.{name}, which is no state, and a "
                    f"pool adds up states alone; make {name} a state by add_state, or log tensors"
                )


def _beside_states(metric: Metric) -> dict[str, list[tuple[Any, int]]]:
    states = _OF_METRIC.union(metric._defaults)  # noqa: SLF001 - no public name
    return {
        name: [*_contents(value)] for name, value in (_of_class(metric) | vars(metric)).items() if name not in states
    }


def _own_lists(owners: Mapping[str, nn.Module]) -> list[tuple[nn.Module, str]]:
    """Give modules lists of their own in the place of lists of their classes, which all trials share; return the places."""
    places = [
        (part, name)
        for part in owners.values()
        for name, value in _of_class(part).items()
        if type(value) is list and len(value) <= _WALKED and name not in vars(part)
    ]
    for part, name in places:
        vars(part)[name] = [*getattr(type(part), name)]
    return places


def _is_same(before: list[tuple[Any, int]], now: list[tuple[Any, int]]) -> bool:
    return len(before) == len(now) and all(a is b and m == n for (a, m), (b, n) in zip(before, now, strict=True))


@contextmanager
def appended(module: nn.Module, *, is_wanted: bool) -> Iterator[dict[str, Tensor]]:
    """Context around a step; the dict then has the items appended to lists of the module, and the lists are as before.

    The dict also names other attributes that the step has changed, and the lengths of lists before, for the hook's copy.

    Unless a hook wants the lists (`is_wanted`), the dict stays empty, and the lists are left alone.
    """
    values: dict[str, Tensor] = {}
    if not is_wanted:
        yield values
        return
    owners = _owners(module)
    own = _own_lists(owners)
    before = {name: len(value) for name, value in _lists(owners).items()}
    attributes = _attributes(owners, before)
    try:
        yield values
        for name, contents in _attributes(owners, before).items():
            if not _is_same(attributes.get(name, []), contents):
                values[f"{_SET}{name}"] = torch.ones(1)
        values |= {f"{_LENGTH}{name}": torch.tensor([length]) for name, length in before.items()}
        for name, value in _lists(owners).items():
            values |= _stored(name, value[before.get(name, 0) :])
    finally:
        for name, value in _lists(owners).items():
            del value[before.get(name, 0) :]
        for part, name in own:
            vars(part).pop(name, None)


def _stored(name: str, items: Sequence[Any]) -> dict[str, Tensor]:
    """Return the items that a batch appends to a list: the parts of each kind in a tensor, and the forms of the items as text.

    Each batch has its own forms, because a smaller batch may append fewer items.
    """
    parts: dict[str, list[Any]] = {}
    forms: list[tuple[Any, list[str]]] = []
    for item in items:
        leaves, spec = _pytree.tree_flatten(item)
        kinds = [_kind(name, leaf) for leaf in leaves]
        forms.append((spec, kinds))
        for kind, leaf in zip(kinds, leaves, strict=True):
            parts.setdefault(kind, []).append(leaf)
    if not forms:
        return {}
    runs = [(_pytree.treespec_dumps(spec), kinds, len([*alike])) for (spec, kinds), alike in itertools.groupby(forms)]
    values = {f"{_FORMS}{name}": torch.tensor([*f"{json.dumps(runs)}\n".encode()], dtype=torch.uint8)}
    for kind, leaves in parts.items():
        key = f"{_LIST}{name}|{kind}"
        if kind in _NUMBERS:
            values[key] = torch.tensor(leaves, dtype=_NUMBERS[kind])
            continue
        flat = [leaf.detach().reshape(-1) for leaf in leaves]
        values[key] = torch.cat(flat) if len(flat) > 1 else flat[0]
        if leaves[0].ndim:
            values[f"{_SIZES}{key}"] = torch.tensor([size for leaf in leaves for size in leaf.shape])
    return values


def _kind(name: str, leaf: Any) -> str:
    """Return the kind of a part of an item: a type of numbers, or the type and the number of dimensions of a tensor."""
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {leaf.ndim}"
    if isinstance(leaf, torch.SymFloat | torch.SymInt | torch.SymBool):  # while the step is captured
        raise CaptureError(f"validation_step appends a plain number to self.{name}, which a graph does not know")
    for kind, numbers in (("bool", bool), ("int", int), ("float", float)):
        if isinstance(leaf, numbers):
            return kind
    raise MetricError(f"validation_step appends a {type(leaf).__name__} to self.{name}; append tensors and numbers")


def _items(collected: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return the items of each list, in the order of the batches."""
    items: dict[str, list[Any]] = {}
    for key, text in collected.items():
        if not key.startswith(_FORMS):
            continue
        name = key.removeprefix(_FORMS)
        prefix = f"{_LIST}{name}|"
        parts = {each.removeprefix(prefix): _parts(collected, each) for each in collected if each.startswith(prefix)}
        items[name] = []
        for line in bytes(text.tolist()).decode().splitlines():
            for dumped, kinds, count in json.loads(line):
                spec = _pytree.treespec_loads(dumped)
                for _ in range(count):
                    items[name].append(_pytree.tree_unflatten([next(parts[kind]) for kind in kinds], spec))
    return items


def _parts(collected: Mapping[str, Tensor], key: str) -> Iterator[Any]:
    """Iterate over the parts of one kind, in the order of the batches."""
    kind, values = key.rpartition("|")[2], collected[key]
    if kind in _NUMBERS:
        # Numbers of Python again: those of a tensor count and add otherwise.
        return iter(values.tolist())
    dimensions = int(kind.rpartition(" ")[2])
    if not dimensions:
        return iter(values.unbind())
    shapes = collected[f"{_SIZES}{key}"].reshape(-1, dimensions).tolist()
    parts = torch.split(values, [math.prod(shape) for shape in shapes])
    return (part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))


def _unseen(collected: Mapping[str, Tensor], lists: Mapping[str, list[Any]]) -> set[str]:
    """Return the names of attributes without a value in a copy: steps have changed or filled these attributes otherwise."""
    found = {key.removeprefix(_SET) for key in collected if key.startswith(_SET)}
    lengths = {name: collected.get(f"{_LENGTH}{name}") for name in lists}
    return found | {name for name, of in lengths.items() if of is not None and bool((of != len(lists[name])).any())}


def _hide(owners: Mapping[str, nn.Module], name: str) -> None:
    """Take an attribute from a copy, also where the class has a value under the name."""

    def unseen(_part: nn.Module) -> Any:
        raise AttributeError(name)

    path, dot, own = name.rpartition(".")
    part = owners[path + dot]
    vars(part).pop(own, None)
    kind = type(part)
    if hasattr(kind, own):
        names = {own: property(unseen), "__module__": kind.__module__}
        part.__class__ = types.new_class(kind.__name__, (kind,), exec_body=lambda space: space.update(names))


def _values(owners: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the attributes of a copy, of its parts those that their own code sets."""
    return {
        path + name: value
        for path, part in owners.items()
        for name, value in vars(part).items()
        if not path or name not in _STOCK
    }


def without_weights(part: Any) -> Any:
    """Return a copy of a module with its metrics, and without parameters, buffers and parts that have no metric."""
    return _bare(part, {})


def _bare(part: Any, memo: dict[int, Any]) -> Any:
    if isinstance(part, Metric):
        return copy.deepcopy(part, memo)
    if id(part) in memo:
        return memo[id(part)]
    bare = memo[id(part)] = copy.copy(part)
    parts = {name: child for name, child in part._modules.items() if child is not None and metrics_of(child)}  # noqa: SLF001
    # New dicts, because the shallow copy shares the dicts of the module.
    vars(bare).update(_parameters={}, _buffers={}, _modules={name: _bare(child, memo) for name, child in parts.items()})
    return bare


@dataclass(frozen=True, eq=False)
class ValidationEnd:
    """Calls the hook on copies of a module `without_weights`."""

    module: LightningModule
    options: TrainerOptions

    def __call__(self, collected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values logged by the hook, in the form of a batch, after the values of all batches.

        Raises:
            MetricError: the hook needs more than the module's metrics and lists, or keeps something for the next epoch.
        """
        module = copy.deepcopy(self.module)
        metrics, lists, owners = metrics_of(module), _items(collected), _owners(module)
        _own_lists(owners)
        updated = {
            place
            for place, metric in metrics.items()
            if put_states(metric, collected_states(metric, place, collected), collected_count(place, collected))
        }
        for name in _unseen(collected, _lists(owners)):
            _hide(owners, name)
            lists.pop(name, None)
        values = _lists(owners)
        for name, items in lists.items():
            values[name] += items
        sizes = {name: 0 if name in lists else len(value) for name, value in values.items()}
        before = _values(owners)
        logged = StepLogs(None)
        try:
            with torch.no_grad(), standing_in(module, self.options, HOOK, logged):
                module.on_validation_epoch_end()
        except AttributeError as error:
            raise MetricError(
                f"{HOOK} gets the module's metrics and lists in a pool, and neither weights nor other attributes that "
                f"steps change: {error}; log a value in validation_step, or append values to a list of the module"
            ) from error
        lasting = {place for place, metric in metrics.items() if metric.update_count}
        reset = {key.rsplit("|", 1)[1] for key in collected if key.startswith("metric|")} | set(logged.metrics)
        for place in sorted(lasting - (updated & reset)):
            raise MetricError(
                f"{HOOK} leaves values in the metric {place!r} for the next epoch; call reset() of the metric at the end, or "
                "compute the value from result.history"
            )
        for name, value in _values(owners).items():
            if sizes.get(name, 0) != len(value) if type(value) is list else before.get(name, self) is not value:
                raise MetricError(
                    f"{HOOK} leaves values in self.{name} for the next epoch; empty self.{name} at the end of the hook, or "
                    "compute the value from result.history"
                )
        found = {key: torch.as_tensor(value).reshape(1) for key, value in logged.values.items()}
        return found | {
            f"{entry.key}|{place}": torch.ones(1) for place, all_ in logged.metrics.items() for entry in all_
        }
