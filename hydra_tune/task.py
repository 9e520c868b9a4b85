"""`TrainTask`: the executable form of a trial.

A task describes a training run with factories and data handles and holds nothing live: it costs nothing while it waits,
and two tasks can be compared without building their models. It is checked when it is made, so that a mistake shows where
it was written and not hours later on a worker. This module knows nothing of shards and devices, and of tuners only what to
say where a task was returned to one that does not know it.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hydra_tune.closures import Closures
from hydra_tune.errors import ConfigError, MetricError, TaskError, did_you_mean, with_hint
from hydra_tune.quantities import parse_bytes

Batch = Any
"""What a data handle yields: any nesting of tuples, lists, dicts, tensors and plain Python values."""

Precision = Literal["float32", "bfloat16", "float16"]

Activations = Literal["auto", "keep", "recompute", "spill"]

_LOGGER = logging.getLogger(__name__)
_PREFIX = "val_"

DataHandle = Dataset[Any] | DataLoader[Any] | Callable[[], Iterable[Batch]]


_FUNCTIONS = (
    "model", "optimizer", "param_groups", "loss", "step", "evaluate", "scheduler", "train", "validate"
)  # fmt: skip


class _Noting:
    """What a task keeps beside its arguments: a copy or a pickle of a task has none."""

    __slots__ = ("_closures",)

    _closures: Closures


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTask(_Noting):
    """One training run, described and not yet built.

    The reference for what a task means is `hydra_tune.train_plain`: seed torch, numpy and random; build model, parameter
    groups, optimizer, scheduler; for each epoch, train on every batch (accumulate, clip, step, zero), then evaluate. The
    pool gives the same numbers.

    Args:
        model: builds the module; called once, with the trial's own random streams.
        optimizer: builds the optimizer from what `param_groups` returns, e.g. `partial(torch.optim.AdamW, lr=1e-3)`.
        train: training data: a `Dataset` (with `batch_size`, shuffled), a `DataLoader`, or a callable that returns an
            iterable of batches; iterated anew each epoch, on a copy of the trial's own where it is a `DataLoader`, so that
            several trials may share one.
        param_groups: what the optimizer is given; default `list(module.parameters())`.
        loss: `(output, target) -> scalar`, for batches `(input, target)`. Exactly one of `loss` and `step`.
        step: `(module, batch) -> scalar loss`, for full control.
        validate: validation data, in the forms of `train`; a `Dataset` is read in order.
        evaluate: `(module, batch) -> {name: scalar}`, of tensors or plain numbers, averaged over samples and reported as
            `val_<name>`, or by the name itself where that begins with `val_`; default: the training loss, as `val_loss`.
        metric: what is reported to the tuner, one name or, for several objectives, several; default `val_loss`, or
            `train_loss` where there is no `validate`.
        epochs: passes over `train`.
        batch_size: samples per batch, where `train` or `validate` is a `Dataset`.
        accumulate: batches whose gradients are added up for one optimizer step, each loss divided by this number. What is
            left over at the end of an epoch makes a step of its own, with the same divisor.
        split_batches: pieces that each batch is cut into, run one by one or side by side on devices that have nothing else to
            do; each piece's loss is weighted by its share of the batch's samples. For a loss that is the mean over samples
            and a model whose forward does not mix them; anything else is refused. What it gives depends on this number, and
            not on the devices. 1 for whole batches. "auto": the pool chooses the number by the memory of its devices, when the
            first batch is there; what it gives is then that of the number chosen, which `Result.split_batches` has.
        split_operators: `nn.Linear` and `nn.Embedding` modules whose weights are trained in pieces, each a parameter of its
            own, so that a device needs room for one piece at a time: `{"head": 4}`, names of modules and pieces of each; or a
            size such as `"64MiB"`, for as many pieces as it takes that no operator has more bytes of parameters at once. The
            module that comes out is whole again. What it gives may depend on the pieces in the last digits, and not on the
            devices; see docs/training.md. None for whole operators.
        max_grad_norm: clips the norm of all gradients of the optimizer's parameters together to this, as
            `torch.nn.utils.clip_grad_norm_` does; None for no clipping.
        precision: what matrix products are computed in: `"float32"` as the model is, or under `torch.autocast` to
            `"bfloat16"` or `"float16"`, the latter with a `torch.amp.GradScaler`. Parameters stay as they are.
        compile: name of a `torch.compile` backend that the shards of a captured model are run with, e.g. `"inductor"`. The
            numbers are then the compiler's own: close to those of plain PyTorch, not equal. None for no compiler.
        activations: what a model that is cut into shards does with the activations of each shard until its backward:
            `"recompute"` computes them again; `"keep"` leaves them on the device until something else needs the room, and
            then spills them to the host; `"spill"` sends them to the host at once; `"auto"` keeps or recomputes them, shard by
            shard, by what copies and the shard's forward take. The numbers are the same, to the last bit. Where they cannot
            be kept they are recomputed: under `compile`, and where a unit would not fit its device.
        on_bad_loss: whether a training loss that is NaN or infinite makes the trial `"fail"`, or ends it as if pruned
            (`"prune"`). The step is not taken.
        scheduler: builds the learning-rate scheduler from the optimizer; `ReduceLROnPlateau` is given `metric`.
        scheduler_interval: whether the scheduler steps after each `"epoch"` or each optimizer `"step"`.
        report_every: `"epoch"`, or a number of optimizer steps; every report evaluates if there is `validate`.
        result: which report is the trial's value for a tuner: the `"last"` or the `"best"`.
        seed: seeds the trial's random streams.

    Raises:
        TaskError: an argument that cannot be right, by name.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    train: DataHandle
    param_groups: Callable[[nn.Module], Any] | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    step: Callable[[nn.Module, Batch], Tensor] | None = None
    validate: DataHandle | None = None
    evaluate: Callable[[nn.Module, Batch], Mapping[str, Any]] | None = None
    metric: str | tuple[str, ...] | None = None
    epochs: int = 1
    batch_size: int | None = None
    accumulate: int = 1
    split_batches: int | Literal["auto"] = 1
    split_operators: Mapping[str, int] | str | None = None
    max_grad_norm: float | None = None
    precision: Precision = "float32"
    compile: str | None = None
    activations: Activations = "auto"
    on_bad_loss: Literal["fail", "prune"] = "fail"
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    scheduler_interval: Literal["epoch", "step"] = "epoch"
    report_every: Literal["epoch"] | int = "epoch"
    result: Literal["last", "best"] = "last"
    seed: int = 0

    def __post_init__(self) -> None:
        _check_factories(self)
        if (self.loss is None) == (self.step is None):
            given = "neither" if self.loss is None else "both"
            raise TaskError(f"TrainTask needs exactly one of loss= and step=, got {given}")
        _check_positive("epochs", self.epochs)
        _check_positive("accumulate", self.accumulate)
        if self.split_batches != "auto":
            _check_positive("split_batches", self.split_batches, instead="'auto' or a whole number of at least 1")
        _check_operators(self.split_operators)
        _check_norm(self.max_grad_norm)
        if self.batch_size is not None:
            _check_positive("batch_size", self.batch_size)
        if self.report_every != "epoch":
            _check_positive("report_every", self.report_every, instead="'epoch' or a number of optimizer steps")
        _check_choice("precision", self.precision, ("float32", "bfloat16", "float16"))
        _check_backend(self.compile)
        _check_choice("activations", self.activations, ("auto", "keep", "recompute", "spill"))
        _check_choice("on_bad_loss", self.on_bad_loss, ("fail", "prune"))
        _check_choice("scheduler_interval", self.scheduler_interval, ("epoch", "step"))
        _check_choice("result", self.result, ("last", "best"))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise TaskError(f"seed must be an integer from 0 to 2**32 - 1 (numpy takes no other), not {self.seed!r}")
        _check_data(self)
        _check_metric(self)
        object.__setattr__(self, "_closures", Closures({name: getattr(self, name) for name in _FUNCTIONS}))

    def warn_of_changes(self) -> None:
        """Log which variables of its functions have changed since the task was made; to be called before they run."""
        closures = getattr(self, "_closures", None)
        for one in () if closures is None else closures.changed():
            _LOGGER.warning(
                "%s= of a TrainTask reads the variable %r, which was %s when the task was made and is %s now; the trial takes "
                "%s. If every task of a loop was to have its own value, bind it: functools.partial(f, %s), or "
                "lambda ..., %s=%s: ...",
                one.argument, one.variable, one.before, one.now, one.now, one.variable, one.variable, one.variable,
            )  # fmt: skip

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names reported to the tuner, in order."""
        if self.metric is None:
            return ("train_loss",) if self.validate is None else ("val_loss",)
        return (self.metric,) if isinstance(self.metric, str) else self.metric

    @property
    def num_pieces(self) -> int:
        """Pieces that each batch is cut into. To be asked once they are known: not while `split_batches` is "auto"."""
        assert self.split_batches != "auto", "nobody has chosen the number of pieces yet"
        return self.split_batches

    def __float__(self) -> float:
        """What a stock Optuna study asks of everything that an objective returns.

        Raises:
            TypeError: always; with the line that the study lacks.
        """
        message = (
            "a TrainTask is not a number: a study trains it if it has an executor and the objective returns the task by "
            "itself; make the study with hydra_tune_optuna.create_study(..., executor=hydra_tune.HydraExecutor())"
        )
        # Optuna fails the trial with the value's repr, and drops what float() had to say. A log line is no warning on
        # purpose: where warnings are errors it would end the search in Optuna's own assertion, the trial still running.
        _LOGGER.warning(message)
        raise TypeError(message)


def _check_factories(task: TrainTask) -> None:
    """A factory must be callable, and must not be the thing it should build."""
    live = {
        "model": (nn.Module, "a live module; give a callable that builds one, e.g. model=lambda: Net(width=64)"),
        "optimizer": (
            torch.optim.Optimizer,
            "a live optimizer; give a factory, e.g. optimizer=partial(AdamW, lr=1e-3)",
        ),
        "param_groups": (nn.Module, "a live module; give a function of the module"),
        "step": (nn.Module, "a live module; give a function (module, batch) -> loss"),
        "scheduler": (torch.optim.lr_scheduler.LRScheduler, "a live scheduler; give a function of the optimizer"),
        "evaluate": (nn.Module, "a live module; give a function (module, batch) -> {name: scalar}"),
    }
    optional = {"param_groups", "loss", "step", "scheduler", "evaluate"}
    for name in ("model", "optimizer", "param_groups", "loss", "step", "scheduler", "evaluate"):
        value = getattr(task, name)
        if value is None and name in optional:
            continue
        if name in live and isinstance(value, live[name][0]):
            raise TaskError(f"{name} is {type(value).__name__}, {live[name][1]}")
        if not callable(value):
            raise TaskError(f"{name} must be callable, not {value!r}")


def _check_positive(name: str, value: object, *, instead: str = "a whole number of at least 1") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TaskError(f"{name} must be {instead}, not {value!r}")


def _check_operators(wanted: object) -> None:
    if wanted is None:
        return
    if isinstance(wanted, str):
        try:
            parse_bytes(wanted, what="split_operators")
        except ConfigError as error:
            raise TaskError(str(error)) from None
        return
    if not isinstance(wanted, Mapping) or not all(isinstance(path, str) for path in wanted):
        raise TaskError(
            "split_operators must be {module name: pieces}, a size such as '64MiB', or None for whole operators, not "
            f"{wanted!r}"
        )
    for path, count in wanted.items():
        _check_positive(f"split_operators[{path!r}]", count)


def _check_norm(norm: object) -> None:
    if norm is None:
        return
    if isinstance(norm, bool) or not isinstance(norm, int | float) or not norm > 0:
        raise TaskError(f"max_grad_norm must be a number above 0, or None for no clipping, not {norm!r}")


def _check_backend(backend: object) -> None:
    if backend is None:
        return
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise TaskError(f"compile must be None or a backend of torch.compile ({', '.join(known)}), not {backend!r}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        text = f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}"
        raise TaskError(with_hint(text, value, choices) if isinstance(value, str) else text)


def _check_data(task: TrainTask) -> None:
    handles = {"train": task.train} if task.validate is None else {"train": task.train, "validate": task.validate}
    for name, handle in handles.items():
        if isinstance(handle, Dataset):
            if task.batch_size is None:
                raise TaskError(f"{name} is a Dataset, so batch_size is needed; or give a DataLoader")
        elif not isinstance(handle, DataLoader) and not callable(handle):
            raise TaskError(
                f"{name} must be a Dataset, a DataLoader or a callable that returns an iterable of batches, not "
                f"{type(handle).__name__}; for batches at hand, {name}=lambda: batches"
            )
        _check_not_empty(name, handle)
    if task.batch_size is not None and not any(isinstance(handle, Dataset) for handle in handles.values()):
        raise TaskError("batch_size is only for a Dataset; a DataLoader or a callable makes its own batches")


def length_of(handle: object) -> int | None:
    """`len(handle)`, or None for what has no length."""
    if not isinstance(handle, Sized):
        return None
    try:
        return len(handle)
    except (TypeError, NotImplementedError, AttributeError):
        return None  # a DataLoader is Sized, but what it takes its length from may have none


def _check_not_empty(name: str, handle: object) -> None:
    if not isinstance(handle, IterableDataset) and length_of(handle) == 0:
        raise TaskError(f"{name} is empty: {type(handle).__name__} of length 0")


def reported_names(values: Mapping[str, float]) -> dict[str, float]:
    """What `evaluate` has returned, by the names that are reported: `val_<name>`, once where the name begins so itself.

    Raises:
        MetricError: two of them are reported by one name.
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        reported = name if name.startswith(_PREFIX) else f"{_PREFIX}{name}"
        if reported in found:
            raise MetricError(
                f"evaluate returned both {name.removeprefix(_PREFIX)!r} and {reported!r}, which are both reported as "
                f"{reported!r}; rename one"
            )
        found[reported] = value
    return found


def check_reported(wanted: Iterable[str], metrics: Mapping[str, float]) -> None:
    """Refuse a report without what the tuner is to be told.

    Raises:
        MetricError: a name is not among the metrics.
    """
    for name in wanted:
        if name not in metrics:
            raise MetricError(
                with_hint(f"metric {name!r} is not reported; reported are {', '.join(metrics)}", name, metrics)
            )


def number_of(value: object) -> float | None:
    """A number of Python's or numpy's, or an array of one, as a float; None of anything else."""
    if isinstance(value, int | float):
        return float(value)
    is_numpys = type(value).__module__.partition(".")[0] == "numpy"  # which is not imported for this
    if is_numpys and getattr(value, "size", 0) == 1:
        found = getattr(value, "item", lambda: None)()
        return float(found) if isinstance(found, int | float) else None
    return None


def returned(value: object) -> str:
    """What a task's function has returned instead of a scalar tensor, in words, and the remedy."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}; reduce it, e.g. with .mean()"
    symbolic = (torch.SymFloat, torch.SymInt, torch.SymBool)  # numbers that a capture does not know
    if number_of(value) is not None or isinstance(value, symbolic):
        return "a plain number, as .item() and float() make one, which has no gradient; return the tensor itself"
    return f"{type(value).__name__}; return a tensor, e.g. functional.cross_entropy(output, target)"


def backward_called() -> TaskError:
    """The error of a training step that has made gradients itself."""
    return TaskError(
        "step= or loss= calls backward() itself, so that every gradient would be added up twice; return the loss, and leave "
        "backward(), optimizer.step() and zero_grad() to hydra-tune"
    )


def not_metrics(value: object) -> MetricError:
    """The error of an `evaluate` that returned no mapping."""
    kind = "a tensor" if isinstance(value, Tensor) else type(value).__name__
    return MetricError(f"evaluate= must return {{name: scalar}}, not {kind}; name the value, as in {{'acc': value}}")


def not_a_metric(name: str, value: object) -> MetricError:
    """The error of an `evaluate` that returned something else than a scalar."""
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    return MetricError(
        f"evaluate= returned {name!r} as {kind}, not as a scalar; reduce it over the batch, e.g. with .mean()"
    )


def _check_metric(task: TrainTask) -> None:
    given: object = task.metric
    names: Sequence[object] = given if isinstance(given, tuple) else (given,)
    if given is not None and not (names and all(isinstance(name, str) for name in names)):
        raise TaskError(f"metric must be a name or a tuple of names, not {given!r}")
    for name in task.metrics:
        if name == "train_loss":
            continue
        if not name.startswith(_PREFIX):
            hint = did_you_mean(name, ["train_loss"]) or f"did you mean '{_PREFIX}{name}'?"
            raise TaskError(f"metric {name!r} is never reported; reported are train_loss and val_<name>; {hint}")
        if task.validate is None:
            raise TaskError(f"metric {name!r} needs validation data; give validate=, or metric='train_loss'")
        if task.evaluate is None and name != "val_loss":
            raise TaskError(f"metric {name!r} is never reported: without evaluate= only val_loss and train_loss are")
