"""`task_from_trainer`: a stock `Trainer` of the transformers library as a `TrainTask`.

`task_from_trainer` makes a `Trainer`, reads the `Trainer`, and gives the `Trainer` up; the task keeps its settings, its
data and the factories. Without a `model_init`, each trial makes another `Trainer` for its model. Read `task_of` first,
for the place of each part: `data.py` for the batches, `loss.py` for a step, `optimizer.py`, `evaluation.py`.
`refusals.py` has most of the refusals; `installed.py` refuses old versions, and this module, `data.py` and `optimizer.py`
refuse the rest. People import `task_from_trainer` and `trainer_from_result`, the way back, from
`hydra_tune_transformers`; `search.py` calls `task_of` for each trial of a search, within `own_random_state`.

Note: streams. A `Trainer` seeds the process's random streams, so `task_from_trainer` makes a `Trainer` within
`own_random_state`, and a trial makes a `Trainer` in the trial's own streams on a thread of the pool. Only
`trainer_from_result` lets the new `Trainer` seed the process's streams on the host; GPU streams stay seeded each time.
The numbers must be those of `Trainer.train()` to the last bit, or the `Trainer` is refused. The module must not know
shards or devices. Each trial has a model of its own (`own_copy`).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers import EarlyStoppingCallback, Seq2SeqTrainer, Trainer, get_scheduler, set_seed
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hydra_tune import TrainTask
from hydra_tune.shard.verify.process_state import preserved_streams
from hydra_tune.train.building import own_build
from hydra_tune.train.own_copy import mark_seen, own_copy
from hydra_tune.train.rng.stream_state import StreamState
from hydra_tune_transformers import installed
from hydra_tune_transformers.around import module_of, own_losses, replace_model
from hydra_tune_transformers.data import AheadLoader, SameOrder, parts_of
from hydra_tune_transformers.errors import RefusedTrainerError
from hydra_tune_transformers.evaluation import EarlyStop, TrainerEvaluation, TrainerMetrics
from hydra_tune_transformers.loss import ItemCount, TrainerStep, draw_together
from hydra_tune_transformers.optimizer import NamedGroups, recipe_of
from hydra_tune_transformers.own_loss import own_loss_of
from hydra_tune_transformers.refusals import refusals
from hydra_tune_transformers.shared import SharedObject, shared_objects


def task_from_trainer(make_trainer: Callable[[], Trainer]) -> TrainTask:
    """Describe the training of a stock `Trainer` as a task, whose numbers are those of `Trainer.train()` on a CPU.

    Reports have the metrics of `Trainer.evaluate()` as `val_<name>`: `val_loss` for `eval_loss`, `val_accuracy` for
    `eval_accuracy`. With `eval_strategy="no"` and an `eval_dataset` there is one report, after the last step. Without an
    `eval_dataset` each epoch reports `train_loss`. The tuner sees `metric_for_best_model`, or the loss.

    Args:
        make_trainer: builds a `Trainer` with `use_cpu=True`, `save_strategy="no"` and `report_to="none"`. With a
            `model_init` the function is called once, here; with a `model`, again whenever a trial is built, in a
            thread of the pool.

    Returns:
        The task. Change settings that `TrainingArguments` do not have with `dataclasses.replace(task, activations=...)`.

    Raises:
        RefusedTrainerError: the `Trainer` has settings or code that the pool would not train exactly; all are named.
    """
    if isinstance(make_trainer, Trainer):
        reason = f"make_trainer is a {type(make_trainer).__name__}, and each trial needs a Trainer of its own"
        raise RefusedTrainerError([f"{reason}: give a function that makes the Trainer, such as lambda: Trainer(...)"])
    with own_random_state():
        trainer = make_trainer()
        if not isinstance(trainer, Trainer):
            raise RefusedTrainerError(
                [f"make_trainer returned {type(trainer).__name__}: return a transformers.Trainer"]
            )
        init = trainer.model_init
        model = _TrainersModel(make_trainer) if init is None else InitializedModel(init, None, trainer.processing_class)
        return task_of(trainer, model, begins_again=init is not None)


def trainer_from_result(make_trainer: Callable[[], Trainer], result: Any) -> Trainer:
    """Return a new `Trainer` with the trained weights of a result.

    `evaluate()` gives the numbers of the last report, and `save_model()` writes the model and its tokenizer. `state` with its
    log history, the optimizer and the scheduler belong to the new `Trainer`; the reports are in `result.history`.

    Args:
        make_trainer: as for `task_from_trainer`.
        result: a pool's `Result` of the task, or the `PlainResult` of `hydra_tune.train_plain`.
    """
    with own_build():
        trainer = make_trainer()
    # A copy, because Trainers of a script may share one model, and every trial begins with the weights of that model.
    model = installed.align_special_tokens(own_copy(trainer.model), trainer.processing_class)
    replace_model(trainer, model)
    own_losses(trainer)
    module_of(trainer).load_state_dict(result.state_dict())
    return trainer


@contextmanager
def own_random_state() -> Iterator[None]:
    """Put the process's random streams back after the block, because a `Trainer` seeds the streams; GPU streams stay out."""
    with own_build(), preserved_streams():
        yield


def _drawing_nothing(make_loader: Callable[[], Any]) -> Any:
    """Return a loader; refuse a method that draws the order at once, because no trial draws the order again."""
    before = StreamState.now()
    loader = make_loader()
    if not before.is_same(StreamState.now()):
        name = getattr(make_loader, "func", make_loader).__name__
        raise RefusedTrainerError(
            [f"its {name}() draws random numbers: draw in a sampler, or from a generator with a seed of its own"]
        )
    return loader


@dataclass(frozen=True)
class _OwnModel:
    """Gives each trial a model of its own, also where the user's function returns the same model or parts each time.

    Scripts load the model before they make the `Trainer`: a second trial would begin with the weights of the first.

    Args:
        build: builds the model, or returns one.
        shared: objects that the trials of the task call, to be told each trial.
    """

    build: Callable[[], nn.Module]
    shared: tuple[SharedObject, ...]

    def __call__(self) -> nn.Module:
        for each in self.shared:
            each.num_trials += 1
        return own_copy(self.build())


@dataclass(frozen=True)
class InitializedModel:
    """Builds the model of a `model_init`.

    Args:
        init: the function, of no argument or one.
        trial: its argument.
        processing_class: tokenizer whose special tokens the model's settings take.
    """

    init: Callable[..., Any]
    trial: Any
    processing_class: Any

    def __call__(self) -> nn.Module:
        """Build the model."""
        arguments = (self.trial,) if transformers.trainer_utils.number_of_arguments(self.init) == 1 else ()
        model: nn.Module = self.init(*arguments)
        return installed.align_special_tokens(model, self.processing_class)


@dataclass(frozen=True)
class _TrainersModel:
    """Takes the model of a new `Trainer`, which has seeded the streams after the model was built."""

    make_trainer: Callable[[], Trainer]

    def __call__(self) -> nn.Module:
        # In the turn of `own_build`: a new `Trainer` sets up anew what accelerate keeps for the process.
        trainer = self.make_trainer()
        installed.align_special_tokens(trainer.model, trainer.processing_class)
        return module_of(trainer)


def task_of(
    trainer: Trainer,
    model: Callable[[], nn.Module],
    compute_objective: Callable[[dict[str, float]], Any] | None = None,
    objectives: str | tuple[str, ...] | None = None,
    *,
    begins_again: bool = False,
) -> TrainTask:
    """Describe the training of a `Trainer`.

    Args:
        trainer: the `Trainer` before its training, with a model of the trial's architecture; not kept.
        model: builds the trial's model.
        compute_objective: as for `TrainerMetrics`.
        objectives: the metrics of the tuner, in place of `metric_for_best_model`.
        begins_again: whether the `Trainer` calls its `model_init` once more first, as `Trainer.train()` does.

    Raises:
        RefusedTrainerError: as `task_from_trainer`.
    """
    # Refusals by argument hold for supported versions alone, whose arguments are known.
    reasons = [*installed.refused_versions(type(trainer))] or [*refusals(trainer)]
    if reasons:
        raise RefusedTrainerError(reasons)
    args = trainer.args
    if trainer.model_init is not None:
        set_seed(args.seed)  # as train(), before it makes the loader, whose order goes by the seed
    if begins_again:
        # The new model lacks what a script has changed since the `Trainer` was made, such as a freeze or an adapter.
        trainer.model = trainer.model_wrapped = trainer.call_model_init()
        trainer.optimizer = None
    # From now on a model with these tensors is copied for each trial; see `own_copy`.
    module = module_of(trainer)
    mark_seen(module)
    prepared = _drawing_nothing(trainer.get_train_dataloader)
    length = _Length.of(args, len(prepared))
    try:
        param_groups, optimizer = recipe_of(trainer.create_optimizer(), module)
    except ValueError as error:
        raise RefusedTrainerError([f"its optimizer: {error}"]) from error
    if args.max_grad_norm and (outside := _unfrozen_outside(trainer.model, param_groups)):
        others = f" and {len(outside) - 1} other unfrozen parameters" * (len(outside) > 1)
        reason = (
            f"its optimizer lacks the unfrozen {outside[0]!r}{others}, whose gradients Trainer "
            "counts where it clips: freeze these with requires_grad_(False), or set max_grad_norm=0"
        )
        raise RefusedTrainerError([reason])
    step, item_count = _loss(trainer)
    return TrainTask(
        model=_OwnModel(model, shared_objects(trainer)),
        param_groups=param_groups,
        optimizer=optimizer,
        scheduler=partial(
            get_scheduler,
            args.lr_scheduler_type,
            num_warmup_steps=args.get_warmup_steps(length.steps),
            num_training_steps=length.steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        ),
        scheduler_interval="step",
        train=AheadLoader(prepared, length.short_pass),
        epochs=length.passes,
        step=step,
        loss_weight=item_count if item_count is not None or installed.divides_by_rest() else draw_together,
        accumulate=args.gradient_accumulation_steps,
        # Where the `Trainer` divides otherwise, the step does; see `installed.divides_by_rest`.
        remainder="divide_by_rest",
        # 0 turns clipping off in `Trainer`.
        max_grad_norm=args.max_grad_norm or None,
        precision="bfloat16" if installed.is_bfloat16(trainer) else "float32",
        seed=args.seed,
        **_evaluation(trainer, step, item_count, length.steps, compute_objective, objectives),
    )


def _unfrozen_outside(model: nn.Module, groups: NamedGroups) -> list[str]:
    """Name the parameters that are neither frozen nor in a group of the optimizer."""
    inside = {name for group in groups.groups for name in group["params"]}
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and name not in inside]


@dataclass(frozen=True)
class _Length:
    """Length of a training.

    Attributes:
        passes: epochs, begun ones included.
        steps: optimizer steps.
        short_pass: number and batches of a pass that ends early.
    """

    passes: int
    steps: int
    short_pass: tuple[int, int] | None

    @classmethod
    def of(cls, args: Any, batches: int) -> "_Length":
        """Return the length that `Trainer` computes for a loader of some batches.

        Raises:
            RefusedTrainerError: the installed `Trainer` leaves out the last batches of an epoch.
        """
        if batches % args.gradient_accumulation_steps and installed.skips_rest():
            reason = (
                f"gradient_accumulation_steps={args.gradient_accumulation_steps} in epochs of {batches} batches, whose rest "
                f"the Trainer of transformers {transformers.__version__} does not train: choose a number that divides the "
                "batches, or install transformers>=4.52"
            )
            raise RefusedTrainerError([reason])
        each = max(-(-batches // args.gradient_accumulation_steps), 1)
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * each)
        whole, rest = divmod(steps, each)
        if not rest:
            return cls(whole, steps, None)
        return cls(whole + 1, steps, (whole, rest * args.gradient_accumulation_steps))


def _loss(trainer: Trainer) -> tuple[TrainerStep, ItemCount | None]:
    # `Trainer` counts the labels of batches that have `labels`, as those of question answering have not.
    has_labels = trainer.compute_loss_func is not None or "labels" in trainer.label_names
    gives_count = trainer.model_accepts_loss_kwargs and has_labels
    own_loss = own_loss_of(trainer)
    item_count, count_dtype = installed.item_count_of(trainer)
    if not has_labels or not (gives_count or trainer.compute_loss_func is not None or own_loss is not None):
        item_count = None
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model  # of peft
    step = TrainerStep(
        gives_count=gives_count,
        count_dtype=None if item_count is None else count_dtype,
        divisor=1 if installed.divides_by_rest() else installed.divisor_of(trainer, is_counted=item_count is not None),
        refuses_labels=trainer.model_accepts_loss_kwargs and not has_labels,
        label_smoother=trainer.label_smoother,
        shifts_labels=type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        smooths_by_count=installed.smooths_by_count(),
        loss_function=trainer.compute_loss_func,
        own_loss=own_loss,
    )
    return step, item_count


def _evaluation(
    trainer: Trainer,
    step: TrainerStep,
    item_count: ItemCount | None,
    steps: int,
    compute_objective: Callable[[dict[str, float]], Any] | None,
    objectives: str | tuple[str, ...] | None,
) -> dict[str, Any]:
    """Return the arguments of the task that describe reports."""
    args, strategy = trainer.args, str(getattr(trainer.args.eval_strategy, "value", trainer.args.eval_strategy))
    if trainer.eval_dataset is None:
        return {}
    best = args.metric_for_best_model
    # `Trainer` takes the name with or without the prefix.
    metric = "val_loss" if best is None else "val_" + best.removeprefix("eval_")
    loader = AheadLoader(_drawing_nothing(partial(trainer.get_eval_dataloader, trainer.eval_dataset)))
    parts = parts_of(loader)
    # An evaluation begins with the first pass, of a new loader.
    has_order = any(isinstance(part, torch.Generator) or hasattr(part, "set_epoch") for part in parts)
    if has_order:
        generators = {id(part) for part in parts if isinstance(part, torch.Generator)}
        if any(
            id(part) in generators for part in parts_of(AheadLoader(trainer.get_eval_dataloader(trainer.eval_dataset)))
        ):
            reason = "a generator of its evaluation's order, which goes on from one evaluation to the next"
            raise RefusedTrainerError([f"{reason}: make a new generator for each loader, with a seed"])
    with_predictions = trainer.compute_metrics is not None and not args.prediction_loss_only
    return {
        "validate": SameOrder(loader) if has_order else loader,
        "evaluate": TrainerEvaluation(
            step=step,
            item_count=item_count if installed.counts_in_evaluation() else None,
            label_names=tuple(trainer.label_names),
            can_return_loss=trainer.can_return_loss,
            ignored_outputs=installed.ignored_outputs(trainer.model),
            with_predictions=with_predictions,
            preprocess=trainer.preprocess_logits_for_metrics,
            is_low_precision=installed.is_bfloat16(trainer),
        ),
        "finish": TrainerMetrics(
            compute_metrics=trainer.compute_metrics if with_predictions else None,
            batch_size=args.eval_batch_size,
            # `Seq2SeqTrainer` counts the loss of a shorter last batch as that of a full one.
            last_kept=None if isinstance(trainer, Seq2SeqTrainer) else loader.last_kept,
            drops_bad_losses=installed.drops_bad_losses(args),
            compute_objective=compute_objective,
            log=step.own_loss.log if step.own_loss is not None and step.own_loss.has_metrics else None,
        ),
        "metric": objectives or metric,
        "report_every": _interval(args, strategy, steps),
        "stop": _early_stop(trainer, metric),
    }


def _interval(args: Any, strategy: str, steps: int) -> int | str:
    if strategy == "epoch":
        return "epoch"
    if strategy == "no":
        return steps
    # Below 1 the number is a share of the training; see `TrainerState.compute_steps`.
    every = args.eval_steps if args.eval_steps >= 1 else math.ceil(steps * args.eval_steps)
    if steps % every:
        reason = (
            f"eval_steps={args.eval_steps!r} in a training of {steps} steps, after whose last Trainer evaluates once more: "
            "choose a number that divides the steps, or eval_strategy='epoch'"
        )
        raise RefusedTrainerError([reason])
    return int(every)


def _early_stop(trainer: Trainer, metric: str) -> EarlyStop | None:
    stops = [each for each in trainer.callback_handler.callbacks if type(each) is EarlyStoppingCallback]
    if not stops:
        return None
    if len(stops) > 1:
        raise RefusedTrainerError(["several EarlyStoppingCallbacks: leave one"])
    return EarlyStop(
        metric=metric,
        is_greater_better=bool(trainer.args.greater_is_better),
        patience=stops[0].early_stopping_patience,
        threshold=stops[0].early_stopping_threshold or 0.0,
    )
