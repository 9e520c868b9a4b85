"""The logged values of `training_step`, kept in buffers of the module, so that a model cut into shards keeps the values too.

`TrainLogs` gives a module a table with a row for each name, and room for the states of its metrics. Each step adds its
values, by the operations of Lightning's collection of results; the first step of an epoch begins anew. An evaluation reads
the table, and `EpochValues` (`epoch_values.py`) reports the values of `Trainer.callback_metrics` at the end of the epoch.
`task.py` makes the `TrainLogs`, calls `prepare` for each new module, and gives `values` to `EpochValues`. `step.py` calls
`add` and `read`.

Note: no branch of `add` may depend on the value of a tensor, because a captured step has one course for all batches. The
table counts calls of `add`: exactly one for each batch of an epoch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from hydra_tune.errors import MetricError
from hydra_tune_lightning.epoch_values import ADDED, LoggedValue, StepLogs, metric_value, metrics_of

_KEY = "train|"
_BUFFER = "_hydra_tune_logs"
_STATE = "_hydra_tune_state_"
_KINDS = ("mean", "sum", "max", "min", "last", "metric")
_FORKED = 10
_PLACE = 20
_COLUMNS = 5
_BEGINNINGS = {"max": float("-inf"), "min": float("inf")}


@dataclass(frozen=True)
class TrainLogs:
    """Keeps and reads the values of some names.

    The table has a row for each name: the sum or the extreme so far, its size for a mean, the value of the epoch so far, the
    value of the last step, and a number for the kind of the value. The last row counts batches.

    Args:
        names: names that `training_step` logs.
        batches: batches of an epoch.
    """

    names: tuple[str, ...]
    batches: int

    def prepare(self, module: nn.Module) -> None:
        """Give a new module the table, and a buffer for each state of its metrics that is a tensor."""
        # In float64, which holds each value of a lower precision exactly; not persistent, so that `state_dict()` has the
        # module's own keys alone.
        module.register_buffer(
            _BUFFER, torch.zeros(len(self.names) + 1, _COLUMNS, dtype=torch.float64), persistent=False
        )
        for number, metric in enumerate(metrics_of(module).values()):
            for state, default in _defaults(metric):
                module.register_buffer(f"{_STATE}{number}_{state}", default.detach().clone(), persistent=False)

    @torch.no_grad()
    def add(self, module: nn.Module, logged: StepLogs, metrics: Mapping[str, Metric]) -> None:
        """Add the values that a step has logged; the `metrics` of the module have the states of the batch."""
        table = module.get_buffer(_BUFFER)
        is_first = table[-1, 0].remainder(self.batches) == 0
        rows = {name: torch.where(is_first, 0.0, table[index]) for index, name in enumerate(self.names)}
        for key, value in logged.values.items():
            if key.startswith("size|"):
                continue
            entry = LoggedValue.of(key)
            total, size = rows[entry.name][0], rows[entry.name][1] + logged.values.get(entry.size_key, 0)
            if entry.kind in _BEGINNINGS:  # also where the first batches of the epoch have not logged the name
                total = torch.where(rows[entry.name][-1] == 0, _BEGINNINGS[entry.kind], total)
            # In the precision of the value, as Lightning adds, and not in the precision of the table.
            total = _added(entry.kind, total.to(value.dtype), value.reshape(()), logged.values.get(entry.size_key, 0))
            epoch = total / size.long() if entry.kind == "mean" else total
            rows[entry.name] = _row(table, total, size, epoch, value, _code(entry))
        for number, (place, metric) in enumerate(metrics.items()):
            self._add_states(module, number, place, metric, is_first)
        for place, entries in logged.metrics.items():
            number = [*metrics].index(place)
            if any(not isinstance(default, Tensor) for default in metrics[place]._defaults.values()):  # noqa: SLF001
                raise MetricError(
                    f"training_step logs the metric {place!r}, whose states are lists and grow with each step; log tensors, or "
                    "leave the name out of train_logs"
                )
            last = metrics[place]._forward_cache  # noqa: SLF001 - as Lightning reads the value of a batch
            for entry in entries:
                rows[entry.name] = _row(table, 0, 0, 0, 0 if last is None else last, _code(entry) + number * _PLACE)
        table.copy_(torch.stack([*rows.values(), table[-1] + 1]))

    def _add_states(self, module: nn.Module, number: int, place: str, metric: Metric, is_first: Tensor) -> None:
        # Each batch, because a metric counts batches that do not log the metric as well.
        for state, default in _defaults(metric):
            of_batch = getattr(metric, state)
            if of_batch.is_floating_point() and metric.update_count > 1:
                raise MetricError(f"a step updates the metric {place!r} twice for a batch; update it once")
            buffer = module.get_buffer(f"{_STATE}{number}_{state}")
            before = torch.where(is_first, default.to(buffer.device), buffer)
            add = ADDED[metric._reductions[state]]  # noqa: SLF001 - no public name
            buffer.copy_(add(before, of_batch) if metric.update_count else before)

    def read(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the table and the states, as values of an evaluation."""
        names = (name for name, _ in module.named_buffers(recurse=False) if name.startswith((_BUFFER, _STATE)))
        return {_KEY + name: module.get_buffer(name).reshape(-1) for name in names}

    def values(self, collected: Mapping[str, Tensor], metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Return the values of the epoch by logged name, from the values of an evaluation and the new metrics.

        Raises:
            MetricError: a name has not been logged.
        """
        values: dict[str, float] = {}
        rows = collected[_KEY + _BUFFER].view(-1, _COLUMNS).tolist()
        # More rows follow: the count of batches, and the same table of every further batch.
        for name, (*_, of_epoch, last, code) in zip(self.names, rows, strict=False):
            if not code:
                raise MetricError(
                    f"train_logs has {name!r}, which training_step has not logged in the epoch; log {name!r}, or leave the "
                    "name out"
                )
            place, rest = divmod(int(code) - 1, _PLACE)
            is_forked, kind = divmod(rest, _FORKED)
            value = _metric_value(name, place, collected, metrics) if _KINDS[kind] == "metric" else of_epoch
            values |= {name: value, f"{name}_epoch": value, f"{name}_step": last} if is_forked else {name: value}
        return values


def _metric_value(name: str, number: int, collected: Mapping[str, Tensor], metrics: Mapping[str, Metric]) -> float:
    metric = [*metrics.values()][number]
    prefix = f"{_KEY}{_STATE}{number}_"
    # The states of the first batch, because each batch of an evaluation has the same.
    states = {state: collected[prefix + state][: default.numel()] for state, default in _defaults(metric)}
    # A step that is captured counts no updates.
    value, other = (metric_value(metric, name, states, count) for count in (1, 2))
    if not torch.equal(value.nan_to_num(), other.nan_to_num()):
        raise MetricError(
            f"the metric logged as {name!r} computes from the number of its updates; count in a state made by add_state"
        )
    return float(value.item())


def _defaults(metric: Metric) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the states of a metric that are no lists, each with its value of a new metric."""
    for state, default in metric._defaults.items():  # noqa: SLF001 - no public name
        if isinstance(default, Tensor):
            yield state, default


def _code(entry: LoggedValue) -> int:
    # From 1, because a row of zeros stands for a name that the epoch has not logged.
    return 1 + _KINDS.index(entry.kind) + (_FORKED if entry.is_forked else 0)


def _row(table: Tensor, *values: Any) -> Tensor:
    tensors = (value.to(table.dtype) if isinstance(value, Tensor) else table.new_full((), value) for value in values)
    return torch.stack([tensor.reshape(()) for tensor in tensors])


def _added(kind: str, total: Tensor, value: Tensor, size: int) -> Tensor:
    """Add a step's value, by the operations of Lightning's collection of results."""
    if kind == "mean":
        return total + value * size
    if kind == "sum":
        return total + value
    if kind == "last":
        return value
    return torch.maximum(total, value) if kind == "max" else torch.minimum(total, value)
