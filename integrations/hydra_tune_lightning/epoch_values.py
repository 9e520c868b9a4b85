"""The values of an epoch: logged tensors reduced as `self.log` says, and metrics of torchmetrics from their states.

A metric begins each batch anew (`new_metrics`), in training and in validation. The pool concatenates the states of all
batches of a validation, and `EpochValues`, the task's `finish`, adds the states up in the order of the batches, as the
metric itself would have done. The first update of each metric shows whether the metric adds so. `StepLogs` collects the
logged values of a batch: `self.log` reaches `StepLogs.log` through `trainer_stand_in.py`. `task.py` makes `EpochValues`,
which the pool and `hydra_tune.train_plain` call after each validation. `step.py`, `train_logs.py` (the values of
`training_step`), `validation_end.py` and `task.py` use the rest, and `refusals.py` asks for `metric_refusals`.

Note: bits. Values are added one after another, in Lightning's order and types.
"""

import copy
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _get_default_dtype, _Metadata
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from hydra_tune.errors import MetricError
from hydra_tune.train.rng.stream_state import StreamState

ADDED: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dim_zero_sum: torch.add,
    dim_zero_max: torch.maximum,
    dim_zero_min: torch.minimum,
}
_STATE = "state"
_TWICE = "twice"
_COUNT = "count"
_KINDS = ("mean", "sum", "max", "min", "metric")


@dataclass(frozen=True)
class LoggedValue:
    """A name of `self.log`, and how its values become one.

    Args:
        kind: `"mean"`, `"sum"`, `"min"`, `"max"`, `"metric"` for a metric of torchmetrics, or `"last"` for the value of
            the last step.
        is_forked: whether the value is also reported as `<name>_epoch`, because the module logs the value on each step as well.
    """

    kind: str
    name: str
    is_forked: bool

    @property
    def key(self) -> str:
        """The value's name among the values concatenated by the pool."""
        return f"{self.kind}|{'forked' if self.is_forked else ''}|{self.name}"

    @property
    def size_key(self) -> str:
        """The name of the batch sizes for a weighted mean."""
        return f"size|{self.name}"

    @classmethod
    def of(cls, key: str) -> "LoggedValue":
        """Return the value of a key."""
        kind, forked, name = key.split("|", 2)
        return cls(kind, name, bool(forked))


@dataclass
class StepLogs:
    """Collects the logged values of a step, as Lightning's collection of results does.

    Args:
        batch: the batch; None in a hook.
        names: names to collect, also if logged on steps alone; None: all names logged with `on_epoch`.
        watched: names monitored by a callback or a scheduler; a step fails that logs such a name where the value is
            not collected.

    Attributes:
        values: logged tensors, by `LoggedValue.key`, and the sizes of batches that weigh means, by `LoggedValue.size_key`.
        metrics: places of logged metrics in the module, each with the names under which the step logs the metric.
    """

    batch: Any
    names: Collection[str] | None = None
    watched: Collection[str] = ()
    values: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, list[LoggedValue]] = field(default_factory=dict)

    def log(self, fx: str, name: str, value: Any, **given: Any) -> None:
        """Take a value, with the arguments of `self.log`.

        Raises:
            MetricError: the step logs a number twice under a name, reduced alike, or a monitored name that is not collected.
        """
        on_step, on_epoch = given["on_step"], given["on_epoch"]
        # Lightning's own class turns text into a reduction, and refuses the same reductions as a `Trainer`.
        meta = _Metadata(fx=fx, name=name, on_step=on_step, on_epoch=on_epoch, reduce_fx=given["reduce_fx"])
        if not on_epoch if self.names is None else name not in self.names:
            if not {name, f"{name}_step", f"{name}_epoch"}.isdisjoint(self.watched):
                raise MetricError(
                    f"{fx} logs {name!r}, which a callback or a scheduler monitors, and no report has: "
                    f"give train_logs=[{name!r}]"
                )
            return
        if isinstance(value, Metric) and on_epoch:
            entry = LoggedValue("metric", name, is_forked=meta.forked)
            self.metrics.setdefault(given["metric_attribute"], []).append(entry)
            return
        if isinstance(value, Metric) and (value := value._forward_cache) is None:  # noqa: SLF001 - as Lightning reads it
            return
        entry = LoggedValue(meta.reduce_fx.__name__ if on_epoch else "last", name, is_forked=meta.forked)
        if entry.key in self.values:
            raise MetricError(f"{fx} logs {name!r} twice for a batch; log each name once")
        value = value.detach()
        # As for the results of Lightning, whose sums are float32 at least.
        exact = value.dtype in (torch.float32, torch.float64)
        self.values[entry.key] = value if exact else value.to(_get_default_dtype())
        if entry.kind == "mean":
            size = given["batch_size"]
            self.values[entry.size_key] = size or (1 if self.batch is None else extract_batch_size(self.batch))


def metrics_of(module: nn.Module) -> dict[str, Metric]:
    """Return the metrics of a module by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}


def metric_refusals(module: nn.Module) -> Iterator[str]:
    """Describe metrics that cannot be added up from the states of batches, each with the remedy."""
    for name, part in module.named_modules():
        if isinstance(part, MetricCollection) and part._enable_compute_groups:  # noqa: SLF001 - no public name
            yield f"the MetricCollection {name!r} with compute groups: give it compute_groups=False"
        if not isinstance(part, Metric):
            continue
        if len(metrics_of(part)) > 1:
            yield f"the metric {name!r} ({type(part).__name__}) wraps another metric: log the inner metric"
        for state, reduction in part._reductions.items():  # noqa: SLF001 - no public name
            is_list = isinstance(part._defaults[state], list)  # noqa: SLF001 - as above
            if not (reduction in ADDED and not is_list) and not (reduction is dim_zero_cat and is_list):
                kind = type(part).__name__
                yield f"the metric {name!r} ({kind}), whose state {state!r} is no sum, maximum, minimum or list: log tensors"


@contextmanager
def new_metrics(module: nn.Module, tried: set[str]) -> Iterator[dict[str, Metric]]:
    """Within the block, the metrics of a module are as new; afterwards the metrics are as before.

    Args:
        module: the module.
        tried: places of metrics known to add up; the first update of another metric is tried, and its place added.
    """
    metrics = metrics_of(module)
    parts = [part for part in module.modules() if isinstance(part, Metric | MetricCollection)]
    before = [dict(vars(part)) for part in parts]
    # The states of a metric are neither parameters nor buffers, so the pool has not moved them.
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    # Not by `reset()`, which empties lists that belong to the state before.
    for place, metric in metrics.items():
        for state, default in metric._defaults.items():  # noqa: SLF001 - no public name
            vars(metric)[state] = [] if isinstance(default, list) else default.detach().clone().to(device)
        vars(metric).update(_device=device, _update_count=0, _forward_cache=None, _computed=None)
        if place not in tried:
            _try_update(place, metric, tried)
        _guard_compute(metric)
    try:
        yield metrics
    finally:
        for part, saved in zip(parts, before, strict=True):
            vars(part).clear()
            vars(part).update(saved)


def _try_update(place: str, metric: Metric, tried: set[str]) -> None:
    """Refuse a metric whose update does not add to its states: the first update runs once more, on other states."""
    update = metric.update

    def tried_update(*arguments: Any, **options: Any) -> None:
        # A forward that adds the states of batches itself is exact.
        is_added = metric._enable_grad and metric.full_state_update is False  # noqa: SLF001 - set within a forward
        if place in tried or is_added or metric.update_count:
            update(*arguments, **options)
            return
        with _disable_current_modes():
            streams = StreamState.now()
        update(*arguments, **options)
        states = {state: getattr(metric, state) for state in metric._defaults}  # noqa: SLF001 - no public name
        # A step that is captured has no values to compare.
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(states)):
            return
        # The pool compares the operators of a step with those of its capture, which has no trial.
        with _disable_current_modes():
            _try_on_others(place, metric, states, streams, lambda: update(*arguments, **options))
        # Not before: a metric that is refused has to be refused in each trial.
        tried.add(place)

    vars(metric).update(update=tried_update)


def _try_on_others(
    place: str, metric: Metric, states: dict[str, Any], streams: StreamState, update: Callable[[], None]
) -> None:
    """Refuse a metric whose update, from other states, does not add the states of the batch; leave the states of the batch."""
    count, after = metric.update_count, StreamState.now()
    of_batch = {state: _copied(value) for state, value in states.items()}
    starts = {state: _start(metric._reductions[state], value) for state, value in of_batch.items()}  # noqa: SLF001
    vars(metric).update({state: _copied(start) for state, start in starts.items()})
    streams.restore()
    try:
        update()
    finally:
        found = {state: getattr(metric, state) for state in states}
        vars(metric).update(states, _update_count=count, _computed=None)
        after.restore()
    for state, value in of_batch.items():
        reduce: Any = ADDED.get(metric._reductions[state], operator.add)  # noqa: SLF001 - as above; lists are joined
        if not _is_equal(found[state], reduce(starts[state], value)):
            raise MetricError(
                f"update() of the metric {place!r} ({type(metric).__name__}) does not add a batch to the state {state!r} in "
                "one addition as dist_reduce_fx says, and a pool adds the batches up so; log tensors"
            )


def _copied(value: Any) -> Any:
    return [*value] if isinstance(value, list) else value.detach().clone()


def _start(reduction: Any, value: Any) -> Any:
    """Return a state to begin from that differs from a new one, and that hides no part of a sum or an extreme."""
    if isinstance(value, list):
        return [*value]
    return (value - 1 if reduction is dim_zero_min else value + 1).to(value.dtype)


def _is_equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(_is_equal, found, expected))
    return found.shape == expected.shape and bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def _guard_compute(metric: Metric) -> None:
    """Refuse `compute()` in a step, where the metric has seen one batch; its own forward computes the value of the batch."""
    forward, compute, is_inside = metric.forward, metric.compute, False

    def guarded_forward(*arguments: Any, **options: Any) -> Any:
        nonlocal is_inside
        is_inside = True
        try:
            return forward(*arguments, **options)
        finally:
            is_inside = False

    def guarded_compute(*arguments: Any, **options: Any) -> Any:
        if not is_inside:
            raise MetricError(
                f"a step calls compute() of a {type(metric).__name__}, which has the batches so far in Lightning and one batch "
                "in a pool; log the metric itself, as in self.log(name, self.metric)"
            )
        return compute(*arguments, **options)

    vars(metric).update(forward=guarded_forward, compute=guarded_compute)


def states_of(metrics: Mapping[str, Metric], logged: Mapping[str, Sequence[LoggedValue]]) -> dict[str, Any]:
    """Return the states of updated metrics after a batch, and the logged names of each metric."""
    values: dict[str, Any] = {}
    for place, names in logged.items():
        values |= {f"{each.key}|{place}": 1 for each in names}
        values[f"{_COUNT}|{place}"] = metrics[place].update_count
        for state in metrics[place]._defaults:  # noqa: SLF001 - no public name
            value = getattr(metrics[place], state)
            if isinstance(value, Tensor):
                # A sum of sums has other last bits.
                if value.is_floating_point() and metrics[place].update_count > 1:
                    values[f"{_TWICE}|{place}"] = 1
                values[f"{_STATE}|{place}|{state}"] = value.detach().reshape(-1)
            elif value:
                values[f"{_STATE}|{place}|{state}"] = dim_zero_cat(value).detach()
    return values


@dataclass(frozen=True, eq=False)
class EpochValues:
    """Computes the values of an epoch from the values of all batches.

    Args:
        metrics: the module's metrics by name, as new.
        of_training: computes the logged values of the training (`TrainLogs.values`); None: no such value is reported.
        at_end: computes the values logged by a hook after the last batch (`ValidationEnd`); None: there is no hook.
    """

    metrics: Mapping[str, Metric]
    of_training: Callable[[Mapping[str, Tensor], Mapping[str, Metric]], dict[str, float]] | None = None
    at_end: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None

    def __call__(self, collected: dict[str, Tensor]) -> dict[str, float]:
        """Return the values by the names logged by the module.

        Raises:
            MetricError: a metric computes no number or was updated twice in a batch, a hook fails, or training and validation
                log the same name.
        """
        computed = {} if self.of_training is None else self.of_training(collected, self.metrics)
        logged = collected if self.at_end is None else collected | self.at_end(collected)
        of_training = set(computed)
        for key, values in logged.items():
            if key.partition("|")[0] not in _KINDS:
                continue
            entry = LoggedValue.of(key)
            name = entry.name
            if entry.kind == "metric":
                name, place = name.rsplit("|", 1)
                states = collected_states(self.metrics[place], place, collected)
                value = metric_value(self.metrics[place], name, states, collected_count(place, collected))
            else:
                value = _reduced(entry.kind, values, logged.get(entry.size_key))
            if name in of_training:
                raise MetricError(
                    f"training_step and validation_step log {name!r}; give one of the values another name"
                )
            number = float(value.item())
            computed |= {name: number, f"{name}_epoch": number} if entry.is_forked else {name: number}
        return computed


def collected_states(metric: Metric, place: str, collected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the states of all batches of a metric, concatenated; a state left by no batch is missing.

    Raises:
        MetricError: a batch has updated a metric with float states twice.
    """
    if f"{_TWICE}|{place}" in collected:
        raise MetricError(f"a step updates the metric {place!r} twice for a batch; update it once")
    keys = {state: f"{_STATE}|{place}|{state}" for state in metric._defaults}  # noqa: SLF001 - no public name
    return {state: collected[key] for state, key in keys.items() if key in collected}


def collected_count(place: str, collected: Mapping[str, Tensor]) -> int:
    """Return how often the batches have updated a metric."""
    counts = collected.get(f"{_COUNT}|{place}")
    return 0 if counts is None else int(counts.sum())


def put_states(metric: Metric, states: Mapping[str, Tensor], count: int) -> bool:
    """Give a new metric the states of all batches, concatenated, and the count of updates; return whether there are states."""
    for state, values in states.items():
        default = metric._defaults[state]  # noqa: SLF001 - no public name
        if isinstance(default, list):
            setattr(metric, state, [values])
            continue
        total = default.clone()
        for value in values.reshape(-1, *default.shape):
            total = ADDED[metric._reductions[state]](total, value)  # noqa: SLF001 - as above
        setattr(metric, state, total)
    metric._update_count = count  # noqa: SLF001 - as above
    return bool(states)


def metric_value(metric: Metric, name: str, states: Mapping[str, Tensor], count: int) -> Tensor:
    """Compute a new metric, logged as `name`, from the states of all batches, concatenated, and the count of updates.

    Raises:
        MetricError: the metric computes no number.
    """
    # A copy, because the metric must be as new in the next epoch.
    metric = copy.deepcopy(metric)
    put_states(metric, states, count)
    value = metric.compute()
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise MetricError(f"the metric logged as {name!r} computes no number; log numbers, as by log_dict")
    return value


def _reduced(kind: str, values: Tensor, sizes: Tensor | None) -> Tensor:
    """Reduce the values of all batches to one, by the operations of Lightning's collection of results."""
    # One after another, as Lightning adds: `Tensor.sum()` has another order, and other last bits.
    if kind == "mean":
        assert sizes is not None
        total, count = values.new_zeros(()), torch.tensor(0)
        for value, size in zip(values, sizes.tolist(), strict=True):
            total, count = total + value * int(size), count + int(size)
        return total / count
    if kind == "sum":
        total = values.new_zeros(())
        for value in values:
            total = total + value
        return total
    return values.min() if kind == "min" else values.max()
