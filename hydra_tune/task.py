"""`TrainTask`: the executable form of a trial.

A task describes a training run with factories and data handles, and holds no live model or optimizer: two tasks can be compared
without building their models. Arguments are checked at construction, so that a mistake shows where the task was written and not
hours later on a worker. People import `TrainTask` from `hydra_tune`, and submit the task to a `HydraExecutor` or return the
task from a tuner's objective; `integrations/hydra_tune_transformers/task.py` and `integrations/hydra_tune_lightning/task.py`
make tasks, too. `train_plain` (`train/loop/reference_loop.py`) and the trials of a pool (`train/trial.py`,
`shard/capture/step_module.py`) read the arguments, and share the functions here that judge a user's values, so that both ways
accept and refuse the same. `LoopTask` (`loop_task.py`) checks its arguments by the functions here, too.

Note: a task is frozen, and several threads may share a task. The module must import nothing of shards and devices, and of
tuners has only the hint for a task returned to a tuner without an executor.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hydra_tune.closures import ClosureSnapshot, enclosed_parts
from hydra_tune.errors import ConfigError, MetricError, TaskError, did_you_mean, with_hint
from hydra_tune.quantities import parse_bytes

Batch = Any
"""A batch from a data handle: any nesting of tuples, lists, mappings, dataclasses, tensors and plain Python values."""

Precision = Literal["float32", "bfloat16", "float16"]

Activations = Literal["auto", "keep", "recompute", "spill"]

Parallel = Literal["auto", "data", "pipeline", "none"]

_LOGGER = logging.getLogger(__name__)
_PREFIX = "val_"
_KEPT = (_PREFIX, "val/", "train_", "train/")

DataHandle = Dataset[Any] | DataLoader[Any] | Callable[[], Iterable[Batch]]


# Arguments that the pool calls later, when their variables may have changed.
_FUNCTIONS = (
    "model", "optimizer", "param_groups", "loss", "step", "loss_weight", "after_step", "evaluate", "finish", "scheduler",
    "stop", "train", "validate",
)  # fmt: skip


class _ClosureSnapshotSlot:
    """Slot for state that a task keeps beside its arguments; a copy or a pickle of a task has none.

    `dataclasses.replace` constructs a task, and so fills the slot anew.
    """

    # In a base class, and so no dataclass field: comparisons, copies and pickles leave the slot out.
    __slots__ = ("_closures",)

    _closures: ClosureSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTask(_ClosureSnapshotSlot):
    """One training run, described and not yet built.

    `hydra_tune.train_plain` is the reference for the meaning of a task: seed torch, numpy and random; build model,
    parameter groups, optimizer, scheduler; for each epoch, train on every batch (accumulate, clip, step, zero), then
    evaluate. The pool gives the same numbers.

    Args:
        model: builds the module, with the trial's own random streams.
        optimizer: builds the optimizer from the result of `param_groups`, e.g. `partial(torch.optim.AdamW, lr=1e-3)`.
        train: training data: a `Dataset` (with `batch_size`, shuffled), a `DataLoader`, or a callable that returns an
            iterable of batches; iterated anew each epoch. A `DataLoader` is copied for each trial, so that several
            trials may share one loader.
        param_groups: builds the optimizer's parameter groups from the module; default `list(module.parameters())`.
        loss: `(output, target) -> scalar`, for batches `(input, target)`. Exactly one of `loss` and `step`.
        step: `(module, batch) -> scalar loss`, for full control; with `loss_weight`, `(module, batch, total) -> scalar loss`.
        loss_weight: `(batch) -> number`, such as the tokens of a batch. All batches of an optimizer step are then drawn, and
            weighed on the host, before the first of them trains, and `step` gets the sum of their weights: a tensor without
            dimensions on the batch's device, as `torch.tensor(sum)` makes it (int64 for integers, else torch's default
            type). Losses are not divided by `accumulate`; the training loss of a step is the sum over its batches.
        validate: validation data, in the forms of `train`; a `Dataset` is read in order.
        evaluate: `(module, batch) -> {name: scalar}`, of tensors or plain numbers, averaged over samples and reported
            as `val_<name>`, or unchanged for a name that begins with `val_`, `train_`, `val/` or `train/`; a `train_loss`
            takes the place of the mean of the losses. Default: the training loss, as `val_loss`.
            With `finish`, tensors of any shape, whose first dimension counts samples.
        finish: `(collected) -> {name: number}`, for metrics that are no means of batches (AUC, F1): called once after the
            last validation batch, in place of the average. `collected` has each value of `evaluate` for the whole pass,
            concatenated along the first dimension, as a tensor on the host; numbers are one element each.
        metric: metric reported to the tuner: a name, or several names for several objectives; default `val_loss`, or
            `train_loss` without `validate`.
        epochs: passes over `train`.
        batch_size: samples per batch, where `train` or `validate` is a `Dataset`.
        accumulate: batches whose gradients are summed for one optimizer step, each loss divided by `accumulate`.
            Batches left over at the end of an epoch make a step of their own.
        remainder: divisor of the losses of that last step: `"divide_by_accumulate"`, as of all others, or the number of
            batches left (`"divide_by_rest"`). No effect with `loss_weight`.
        split_batches: pieces that each batch is cut into, run one by one or side by side on idle devices; each piece's
            loss is weighted by its share of the batch's samples. Requires a loss that is the mean over samples and a
            model whose forward does not mix samples; any other is refused. Results depend on the number of pieces, not
            on the devices. 1 for whole batches. "auto": the pool chooses the number from the memory of its devices at
            the first batch; results are those of the chosen number, given in `Result.split_batches`.
        split_operators: `nn.Linear` and `nn.Embedding` modules to train with split weights, each piece a separate
            parameter, so that a device needs room for only one piece at a time: `{"head": 4}`, names of modules with
            numbers of pieces; or a size such as `"64MiB"`, for enough pieces to keep every operator's parameters below
            the size. The trained module is whole again. The last digits of results may depend on the pieces, not on the
            devices; see docs/howto/large-models.md. None for whole operators.
        max_grad_norm: clips the norm of all gradients of the optimizer's parameters together to this value, as
            `torch.nn.utils.clip_grad_norm_` does; None for no clipping.
        clip_order: order of the parameters given to `clip_grad_norm_`, which decides the last bits of the norm: that of the
            `"module"`, or that of the optimizer's parameter `"groups"`.
        precision: precision of matrix products: `"float32"` runs the model unchanged; `"bfloat16"` and `"float16"` run
            under `torch.autocast`, the latter with a `torch.amp.GradScaler`. Parameters keep their types.
        compile: name of a `torch.compile` backend for the shards of a captured model, e.g. `"inductor"`. The compiler's
            numbers are close to those of plain PyTorch, not equal. None for no compiler.
        activations: how a model cut into shards treats each shard's activations until its backward: `"recompute"`
            recomputes them; `"keep"` leaves activations on the device until the room is needed, and then spills them to
            the host; `"spill"` spills at once; `"auto"` keeps or recomputes, shard by shard, by the time of copies and
            of the shard's forward. Numbers are the same, to the last bit. Activations are always recomputed under
            `compile`, and where a unit would not fit its device.
        parallel: how the batches of an optimizer step (`accumulate`, `split_batches`) use devices that have nothing else to
            do: `"data"` runs batches side by side, each device with all shards; `"pipeline"` gives each device some of
            the shards, of which there have to be two (`num_shards`); `"none"` keeps a step on one device; `"auto"` takes
            the fastest way by measured times. Results are the same bits. A step that cannot be split
            this way runs on one device. Source: Harmony, section 3, whose users choose the scheme.
        on_bad_loss: whether a NaN or infinite training loss makes the trial `"fail"`, or ends the trial as if pruned
            (`"prune"`). The step is not taken.
        scheduler: builds the learning-rate scheduler from the optimizer; `ReduceLROnPlateau` is given `metric`.
        scheduler_interval: whether the scheduler steps after each `"epoch"` or each optimizer `"step"`.
        report_every: `"epoch"`, or a number of optimizer steps; every report evaluates if there is `validate`.
        after_step: `(module, optimizer, steps) -> None`: called after each optimizer step, and before the scheduler's, with
            the number of steps so far; may write weights, for averages (EMA) or constraints. Gradients are zeroed before.
        stop: `(history) -> bool`, for early stopping: called after each report with all reports so far, as
            `Result.history`; a true value completes the trial.
        result: report that gives the trial's value to a tuner: the `"last"` or the `"best"`.
        seed: seeds the trial's random streams.

    Raises:
        TaskError: an argument that cannot be right, by name.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    train: DataHandle
    param_groups: Callable[[nn.Module], Any] | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    step: Callable[..., Tensor] | None = None
    loss_weight: Callable[[Batch], Any] | None = None
    after_step: Callable[[nn.Module, torch.optim.Optimizer, int], object] | None = None
    validate: DataHandle | None = None
    evaluate: Callable[[nn.Module, Batch], Mapping[str, Any]] | None = None
    finish: Callable[[dict[str, Tensor]], Mapping[str, Any]] | None = None
    metric: str | tuple[str, ...] | None = None
    epochs: int = 1
    batch_size: int | None = None
    accumulate: int = 1
    remainder: Literal["divide_by_accumulate", "divide_by_rest"] = "divide_by_accumulate"
    split_batches: int | Literal["auto"] = 1
    split_operators: Mapping[str, int] | str | None = None
    max_grad_norm: float | None = None
    clip_order: Literal["module", "groups"] = "module"
    precision: Precision = "float32"
    compile: str | None = None
    activations: Activations = "auto"
    parallel: Parallel = "auto"
    on_bad_loss: Literal["fail", "prune"] = "fail"
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    scheduler_interval: Literal["epoch", "step"] = "epoch"
    report_every: Literal["epoch"] | int = "epoch"
    stop: Callable[[list[dict[str, float]]], bool] | None = None
    result: Literal["last", "best"] = "last"
    seed: int = 0

    def __post_init__(self) -> None:
        _check_factories(self)
        if (self.loss is None) == (self.step is None):
            arguments = "neither" if self.loss is None else "both"
            raise TaskError(f"TrainTask needs exactly one of loss= and step=, got {arguments}")
        _check_weighing(self)
        if self.finish is not None and self.evaluate is None:
            raise TaskError(
                "finish= computes metrics from the values of evaluate=, and there is no evaluate=; give both"
            )
        check_positive("epochs", self.epochs)
        check_positive("accumulate", self.accumulate)
        if self.split_batches != "auto":
            check_positive("split_batches", self.split_batches, instead="'auto' or a whole number of at least 1")
        _check_operators(self.split_operators)
        _check_norm(self.max_grad_norm)
        if self.batch_size is not None:
            check_positive("batch_size", self.batch_size)
        if self.report_every != "epoch":
            check_positive("report_every", self.report_every, instead="'epoch' or a number of optimizer steps")
        check_choice("remainder", self.remainder, ("divide_by_accumulate", "divide_by_rest"))
        check_choice("clip_order", self.clip_order, ("module", "groups"))
        if self.clip_order == "groups" and self.max_grad_norm is None:
            raise TaskError("clip_order is the order of max_grad_norm, which is not given; give both, or neither")
        check_choice("precision", self.precision, ("float32", "bfloat16", "float16"))
        _check_backend(self.compile)
        check_choice("activations", self.activations, ("auto", "keep", "recompute", "spill"))
        check_choice("parallel", self.parallel, ("auto", "data", "pipeline", "none"))
        if self.splits_steps and (self.accumulate, self.split_batches) == (1, 1):
            raise TaskError(
                f"parallel={self.parallel!r} runs the batches of an optimizer step on several devices, and a step has one "
                "batch; give accumulate= or split_batches= of at least 2, or leave parallel out"
            )
        check_choice("on_bad_loss", self.on_bad_loss, ("fail", "prune"))
        check_choice("scheduler_interval", self.scheduler_interval, ("epoch", "step"))
        check_choice("result", self.result, ("last", "best"))
        check_seed(self.seed)
        _check_data(self)
        _check_metric(self)
        # The dataclass is frozen: only object's own __setattr__ can fill the slot.
        object.__setattr__(self, "_closures", ClosureSnapshot({name: getattr(self, name) for name in _FUNCTIONS}))

    def warn_of_changes(self) -> None:
        """Log variables of the task's functions that have changed since construction; call before the functions run."""
        # A copied or unpickled task has no snapshot to compare with.
        closures = getattr(self, "_closures", None)
        for change in () if closures is None else closures.changed():
            _LOGGER.warning(
                "%s= of a TrainTask reads the variable %r, which was %s when the task was made and is %s now; the trial takes "
                "%s. If every task of a loop was to have its own value, bind it: functools.partial(f, %s), or "
                "lambda ..., %s=%s: ...",
                change.argument, change.variable, change.before, change.now,
                change.now, change.variable, change.variable, change.variable,
            )  # fmt: skip

    def enclosed_parts(self) -> Iterator[tuple[str, str, object]]:
        """Iterate over what the task's functions keep in closures: argument, variable, and the value or a part of it."""
        for argument in _FUNCTIONS:
            for variable, part in enclosed_parts(getattr(self, argument)):
                yield argument, variable, part

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics reported to the tuner, in order."""
        if self.metric is None:
            return ("train_loss",) if self.validate is None else ("val_loss",)
        return (self.metric,) if isinstance(self.metric, str) else self.metric

    @property
    def loss_divisor(self) -> int:
        """Divisor of the loss of each batch of an optimizer step, but for the last step of an epoch (`remainder`)."""
        return self.accumulate if self.loss_weight is None else 1

    @property
    def draws_whole_steps(self) -> bool:
        """Whether all batches of an optimizer step are drawn before the first of them trains."""
        return self.loss_weight is not None or self.divides_by_rest

    @property
    def divides_by_rest(self) -> bool:
        """Whether the losses of the last step of an epoch may have another divisor."""
        return self.remainder == "divide_by_rest" and self.loss_divisor > 1

    @property
    def num_pieces(self) -> int:
        """Pieces that each batch is cut into; defined only once chosen, so not while `split_batches` is "auto"."""
        assert self.split_batches != "auto", "nobody has chosen the number of pieces yet"
        return self.split_batches

    @property
    def splits_steps(self) -> bool:
        """Whether the task itself asks for steps on several devices, whatever they cost."""
        return self.parallel in ("data", "pipeline")

    def __float__(self) -> float:
        """Refuse the conversion that a stock Optuna study tries on the value of an objective.

        Raises:
            TypeError: always; the message gives the line that the study lacks.
        """
        message = (
            "a TrainTask is not a number: a study trains it if it has an executor and the objective returns the task by "
            "itself; make the study with hydra_tune_optuna.create_study(..., executor=hydra_tune.HydraExecutor())"
        )
        # Optuna fails the trial with the value's repr and drops the message of float(). Log a line instead of a
        # warning: with warnings turned into errors, a warning would end the search in Optuna's own assertion, the trial
        # still running.
        _LOGGER.warning(message)
        raise TypeError(message)


def _check_factories(task: TrainTask) -> None:
    """Check that each factory is callable and is not the live object to build, and that `loss` is no factory."""
    # Looked for before the test for callables, which a live module passes.
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
    optional = {"param_groups", "loss", "step", "loss_weight", "scheduler", "evaluate"}
    for name in ("model", "optimizer", "param_groups", "loss", "step", "loss_weight", "scheduler", "evaluate"):
        value = getattr(task, name)
        if value is None and name in optional:
            continue
        if name in live and isinstance(value, live[name][0]):
            raise TaskError(f"{name} is {type(value).__name__}, {live[name][1]}")
        if not callable(value):
            raise TaskError(f"{name} must be callable, not {value!r}")
    if isinstance(task.loss, type) and issubclass(task.loss, nn.Module):
        name = task.loss.__name__
        raise TaskError(f"loss is the class {name}, and a loss of each batch is needed; give loss={name}()")


def _check_weighing(task: TrainTask) -> None:
    if task.loss_weight is None:
        return
    if task.step is None:
        raise TaskError(
            "loss_weight= gives the sum of a step's weights to step=, and loss= does not take it; give step= instead, e.g. "
            "step=lambda module, batch, total: cross_entropy(module(batch[0]), batch[1], reduction='sum') / total"
        )
    if task.split_batches != 1:
        raise TaskError(
            f"loss_weight= sums the losses of whole batches, and split_batches={task.split_batches!r} takes means of pieces; "
            "leave split_batches out, and draw smaller batches with a larger accumulate=, which gives the same sum"
        )


def check_seed(seed: object) -> None:
    """Refuse, by a `TaskError`, a seed that torch, numpy and random do not all take."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise TaskError(f"seed must be an integer from 0 to 2**32 - 1 (numpy takes no other), not {seed!r}")


def check_positive(name: str, value: object, *, instead: str = "a whole number of at least 1") -> None:
    """Refuse, by a `TaskError`, anything but a whole number of at least 1."""
    # bool is a subclass of int: True must not pass for 1.
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TaskError(f"{name} must be {instead}, not {value!r}")


def _check_operators(wanted: object) -> None:
    if wanted is None:
        return
    if isinstance(wanted, str):
        try:
            parse_bytes(wanted, what="split_operators")
        except ConfigError as error:
            # Mistakes in a task are TaskErrors; the text says the same.
            raise TaskError(str(error)) from None
        return
    if not isinstance(wanted, Mapping) or not all(isinstance(path, str) for path in wanted):
        raise TaskError(
            "split_operators must be {module name: pieces}, a size such as '64MiB', or None for whole operators, not "
            f"{wanted!r}"
        )
    for path, count in wanted.items():
        check_positive(f"split_operators[{path!r}]", count)


def _check_norm(norm: object) -> None:
    if norm is None:
        return
    # `not norm > 0` refuses NaN as well.
    if isinstance(norm, bool) or not isinstance(norm, int | float) or not norm > 0:
        raise TaskError(f"max_grad_norm must be a number above 0, or None for no clipping, not {norm!r}")


def _check_backend(backend: object) -> None:
    if backend is None:
        return
    # Includes debugging and experimental backends, which torch leaves out by default.
    backends = torch.compiler.list_backends(exclude_tags=())
    if backend not in backends:
        raise TaskError(f"compile must be None or a backend of torch.compile ({', '.join(backends)}), not {backend!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a value that is no choice.

    Raises:
        TaskError: names the argument and the choices.
    """
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
    """Return `len(handle)`, or None for a handle without a length."""
    if not isinstance(handle, Sized):
        return None
    try:
        return len(handle)
    except (TypeError, NotImplementedError, AttributeError):
        return None  # a DataLoader is Sized, but its dataset or sampler may have no length


def _check_not_empty(name: str, handle: object) -> None:
    # The length of an IterableDataset is only an estimate: torch iterates whatever the length says.
    if not isinstance(handle, IterableDataset) and length_of(handle) == 0:
        raise TaskError(f"{name} is empty: {type(handle).__name__} of length 0")


def reported_names(values: Mapping[str, float]) -> dict[str, float]:
    """Rename the values of `evaluate` to reported names: `val_<name>`; a name that begins as one of `_KEPT` is kept.

    Raises:
        MetricError: two values would be reported under one name.
    """
    reported_values: dict[str, float] = {}
    for name, value in values.items():
        reported = name if name.startswith(_KEPT) else f"{_PREFIX}{name}"
        if reported in reported_values:
            raise MetricError(
                f"evaluate returned both {name.removeprefix(_PREFIX)!r} and {reported!r}, which are both reported as "
                f"{reported!r}; rename one"
            )
        reported_values[reported] = value
    return reported_values


def check_reported(wanted: Iterable[str], metrics: Mapping[str, float]) -> None:
    """Refuse a report that lacks a metric of the tuner.

    Raises:
        MetricError: a name is not among the metrics.
    """
    for name in wanted:
        if name not in metrics:
            reported = f"reported are {', '.join(metrics)}; give metric= one of these"
            raise MetricError(with_hint(f"metric {name!r} is not reported; {reported}", name, metrics))


def number_of(value: object) -> float | None:
    """Convert a number of Python or numpy, or an array of one number, to a float; None for any other value."""
    if isinstance(value, int | float):
        return float(value)
    is_numpys = type(value).__module__.partition(".")[0] == "numpy"  # by name: numpy is not imported for this check
    if is_numpys and getattr(value, "size", 0) == 1:
        number = getattr(value, "item", lambda: None)()
        return float(number) if isinstance(number, int | float) else None
    return None


def weighed(task: TrainTask, window: Sequence[Batch]) -> list[tuple[Batch, Tensor]]:
    """Pair each batch of an optimizer step with the sum of the weights of all; runs the user's `loss_weight=`.

    Returns:
        Pairs (batch, total), `total` on the host and without dimensions: int64 if all weights are integers, else of torch's
        default type. Each has a tensor of its own, because a step may write to it.

    Raises:
        TaskError: a weight is not a number.
    """
    assert task.loss_weight is not None
    total = sum(_weight(task.loss_weight(batch)) for batch in window)
    return [(batch, torch.tensor(total, device="cpu")) for batch in window]


def _weight(value: object) -> int | float:
    is_number = value.numel() == 1 if isinstance(value, Tensor) else number_of(value) is not None
    # Numpy's numbers as Python's: `torch.tensor` makes float64 of the former.
    number = value.item() if is_number and hasattr(value, "item") else value
    if not isinstance(number, int | float):
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TaskError(
            f"loss_weight= must return a number, not {kind}; e.g. the tokens of a batch, (labels != -100).sum()"
        )
    return number


def returned(value: object) -> str:
    """Describe in words a value that a task's function returned instead of a scalar tensor, with the remedy."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}; reduce it, e.g. with .mean()"
    symbolic = (torch.SymFloat, torch.SymInt, torch.SymBool)  # numbers unknown during a capture
    if number_of(value) is not None or isinstance(value, symbolic):
        return "a plain number, as .item() and float() make one, which has no gradient; return the tensor itself"
    return f"{type(value).__name__}; return a tensor, e.g. functional.cross_entropy(output, target)"


def backward_called() -> TaskError:
    """Make the error for a training step that has called `backward()` itself."""
    return TaskError(
        "step= or loss= calls backward() itself, so that every gradient would be added up twice; return the loss, and leave "
        "backward(), optimizer.step() and zero_grad() to hydra-tune"
    )


def not_metrics(value: object, argument: str = "evaluate") -> MetricError:
    """Make the error for an `evaluate` or a `finish` that returned no mapping."""
    kind = "a tensor" if isinstance(value, Tensor) else type(value).__name__
    return MetricError(f"{argument}= must return {{name: scalar}}, not {kind}; name the value, as in {{'acc': value}}")


def not_a_metric(name: str, value: object) -> MetricError:
    """Make the error for an `evaluate` with a value that is no scalar."""
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    return MetricError(
        f"evaluate= returned {name!r} as {kind}, not as a scalar; reduce it over the batch, e.g. with .mean(), or give finish= "
        "to compute metrics from the values of all batches"
    )


def not_collectable(name: str, value: object) -> MetricError:
    """Make the error for a value of `evaluate` that `finish` cannot be given."""
    return MetricError(
        f"evaluate= returned {name!r} as {type(value).__name__}; with finish=, values are tensors or plain numbers"
    )


def finished(task: "TrainTask", collected: Mapping[str, Sequence[Tensor]]) -> dict[str, float]:
    """Compute metrics by `finish` from the tensors of all batches by name, on the host.

    Raises:
        MetricError: the tensors of a name do not fit together, or `finish` returned anything but names and numbers.
    """
    joined = {}
    for name, values in collected.items():
        try:
            joined[name] = torch.cat([value.reshape(1) if value.ndim == 0 else value for value in values])
        except RuntimeError as error:
            shapes = ", ".join(dict.fromkeys(str(tuple(value.shape)) for value in values))
            raise MetricError(
                f"evaluate= returned {name!r} in shapes that cannot be concatenated for finish= along the first dimension: "
                f"{shapes}; pad the values, or flatten them"
            ) from error
    assert task.finish is not None
    metrics = task.finish(joined)
    if not isinstance(metrics, Mapping):
        raise not_metrics(metrics, "finish")
    return numbers_of(metrics, "finish= must return {name: number}")


def numbers_of(metrics: Mapping[str, Any], rule: str) -> dict[str, float]:
    """Convert reported values, which may be tensors of one element, to numbers.

    Args:
        metrics: values by name.
        rule: the beginning of the error about a value that is no number.

    Raises:
        MetricError: a value is no number.
    """
    numbers = {}
    for name, value in metrics.items():
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else number_of(value)
        if number is None:
            raise MetricError(f"{rule}, and {name!r} is {type(value).__name__}")
        numbers[str(name)] = float(number)
    return numbers


def _check_metric(task: TrainTask) -> None:
    metric: object = task.metric
    names: Sequence[object] = metric if isinstance(metric, tuple) else (metric,)
    if metric is not None and not (names and all(isinstance(name, str) for name in names)):
        raise TaskError(f"metric must be a name or a tuple of names, not {metric!r}")
    for name in task.metrics:
        if name == "train_loss":
            continue
        if not name.startswith(_KEPT):
            hint = did_you_mean(name, ["train_loss"]) or f"did you mean '{_PREFIX}{name}'?"
            raise TaskError(f"metric {name!r} is never reported; reported are train_loss and val_<name>; {hint}")
        if task.validate is None:
            raise TaskError(f"metric {name!r} needs validation data; give validate=, or metric='train_loss'")
        if task.evaluate is None and name != "val_loss":
            raise TaskError(f"metric {name!r} is never reported: without evaluate= only val_loss and train_loss are")
