"""Everything of a `Trainer` that the pool would not do exactly, by name, with the reason and the remedy.

`task_of` (`task.py`), for `task_from_trainer` and for each trial of a search, refuses a `Trainer` with any of these. Each
argument of `TrainingArguments` is taken over, has no effect on the numbers, or stands in the table of refusals. An argument
unknown to this module is refused unless the argument has its default, or is as empty as its default. Three arguments of
generation and `sortish_sampler` pass (`_arguments`), and so does every argument that a script's own subclass adds under a name
unknown to `REFUSED`. The module only reads the `Trainer`, and must not know shards or the pool's devices.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback, Trainer, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback

from hydra_tune.task import length_of
from hydra_tune_transformers.around import holds_part, losses_around
from hydra_tune_transformers.installed import is_bfloat16, recomputation_of
from hydra_tune_transformers.own_loss import has_metrics, own_loss_of, refused_attributes

TAKEN_OVER = frozenset(
    [
        "per_device_train_batch_size",
        "num_train_epochs",
        "max_steps",
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "warmup_ratio",
        "optim",
        "optim_args",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "gradient_accumulation_steps",
        "average_tokens_across_devices",
        "max_grad_norm",
        "label_smoothing_factor",
        "bf16",
        "eval_strategy",
        "eval_steps",
        "per_device_eval_batch_size",
        "prediction_loss_only",
        "metric_for_best_model",
        "greater_is_better",
        "seed",
        "data_seed",
        "accelerator_config",
        "dataloader_drop_last",
        "remove_unused_columns",
        "label_names",
        "train_sampling_strategy",
        "group_by_length",  # up to 5.1, as the next ones up to 4.57: old names of arguments above
        "evaluation_strategy",
        "per_gpu_train_batch_size",
        "per_gpu_eval_batch_size",
        "adafactor",
        "dispatch_batches",  # `Trainer` notes these two in `accelerator_config`
        "split_batches",
        "no_cuda",
        "length_column_name",
        "use_cpu",
        "save_strategy",
        "logging_nan_inf_filter",
        "report_to",
    ]
)
"""Arguments that act as in `Trainer.train()`, some with refused values (`_values`)."""

WITHOUT_EFFECT = frozenset(
    [
        "output_dir",
        "do_train",
        "do_eval",
        "do_predict",
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "log_on_each_node",
        "include_num_input_tokens_seen",
        "log_level",
        "log_level_replica",
        "disable_tqdm",
        "run_name",
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
        "logging_dir",
        "save_only_model",
        "save_steps",
        "save_on_each_node",
        "save_total_limit",
        "hub_token",
        "hub_private_repo",
        "hub_model_id",
        "hub_strategy",
        "hub_always_push",
        "hub_revision",
        "ignore_data_skip",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context",
        "dataloader_in_order",
        "eval_accumulation_steps",
        "eval_use_gather_object",
        "torch_empty_cache_steps",
        "skip_memory_metrics",
        "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_static_graph",
        "ddp_backend",
        "ddp_timeout",
        "local_rank",
        "torch_compile_backend",
        "torch_compile_mode",
        "use_cache",
        "fsdp_config",
        "liger_kernel_config",
        "activation_checkpointing",  # with refused values (`_values`); the pool recomputes where a device lacks room
        "gradient_checkpointing",
        "activation_checkpointing_kwargs",
        "gradient_checkpointing_kwargs",
        "place_model_on_device",
        "overwrite_output_dir",  # this and the next ones up to 4.57
        "save_safetensors",
        "push_to_hub_model_id",
        "push_to_hub_organization",
        "push_to_hub_token",
        "include_tokens_per_second",
        "include_inputs_for_metrics",  # sets `include_for_metrics`
        "torchdynamo",  # sets `torch_compile`
        "fp16_opt_level",
        "fp16_backend",
        "half_precision_backend",
        "use_mps_device",
        "tpu_num_cores",
        "tpu_metrics_debug",
        "fsdp_min_num_params",
        "fsdp_transformer_layer_cls_to_wrap",
        "mp_parameters",
        "ray_scope",
        "_n_gpu",
    ]
)
"""Arguments that change no number of a training on one device, as long as no refused argument is set beside them."""

REFUSED = {
    "fp16": "use bf16=True, or float32",
    "bf16_full_eval": "evaluate in the precision of the training",
    "fp16_full_eval": "evaluate in the precision of the training",
    "tf32": "set torch.backends.cuda.matmul.allow_tf32 for the process",
    "activation_offloading": "leave it out; the pool spills activations where a device lacks room for them",
    "torch_compile": "leave it out, and set compile= of the task, as in dataclasses.replace(task, compile='inductor')",
    "use_liger_kernel": "leave it out; its kernels have other numbers on other devices",
    "neftune_noise_alpha": "leave it out; its hook draws noise for the embeddings in every step",
    "auto_find_batch_size": "give per_device_train_batch_size; the pool cuts a model that does not fit",
    "optim_target_modules": "use an optimizer over whole parameters",
    "eval_on_start": "leave it out, or evaluate before you submit the task",
    "eval_delay": "evaluate from the beginning",
    "eval_do_concat_batches": "leave it at True",
    "include_for_metrics": "compute the metrics from predictions and labels",
    "batch_eval_metrics": "compute the metrics from all predictions",
    "load_best_model_at_end": "leave it out, with save_strategy='no': EarlyStoppingCallback works without; for the weights of "
    "the best report see the page 'Compute metrics' of the documentation; keep_best= of a study keeps the best trials",
    "restore_callback_states_from_checkpoint": "let the pool resume trials, HydraExecutor(checkpoint_dir=...)",
    "resume_from_checkpoint": "let the pool resume trials, HydraExecutor(checkpoint_dir=...)",
    "enable_jit_checkpoint": "let the pool save trials, HydraExecutor(checkpoint_dir=...)",
    "push_to_hub": "push after the search, from trainer_from_result(make_trainer, result)",
    "full_determinism": "set torch.use_deterministic_algorithms(True) for the process",
    "dataloader_num_workers": "load the data in the process, which is exact for a collator that draws random numbers too",
    "parallelism_config": "give the devices to the pool, HydraExecutor(devices=...)",
    "fsdp": "give the devices to the pool, HydraExecutor(devices=...), which trains models larger than one",
    "deepspeed": "give the devices to the pool, HydraExecutor(devices=...), which trains models larger than one",
    "debug": "leave it out",
    "past_index": "leave it at -1",
    "use_legacy_prediction_loop": "leave it out",
    "jit_mode_eval": "leave it out",
    "use_ipex": "leave it out",
    "tp_size": "give the devices to the pool, HydraExecutor(devices=...), which trains models larger than one",
    "predict_with_generate": "evaluate by the loss, and generate after the search",
}
"""Arguments refused with any other value than their default, but for another empty value in place of an empty default: the
remedy of each."""

_MAY_OVERRIDE = frozenset(
    [
        "compute_loss",  # see `own_loss.py`
        "prediction_step",  # as above
        "create_optimizer",
        "get_decay_parameter_names",
        "get_optimizer_cls_and_kwargs",
        "_get_train_sampler",
        "_get_eval_sampler",
        "_set_signature_columns_if_needed",
        "get_train_dataloader",
        "get_eval_dataloader",
        # Of no training without checkpoints, and the `Trainer` of `trainer_from_result` has them.
        "get_test_dataloader",
        "predict",
        "save_model",
        "_save",
        "_save_checkpoint",
        "_load_from_checkpoint",
        "_load_best_model",
        "_push_from_checkpoint",
        "push_to_hub",
        "create_model_card",
    ]
)
_TRIED = frozenset(
    [
        "trl.trainer.sft_trainer.SFTTrainer.training_step",  # enters the context of `activation_offloading`, refused below
        "trl.trainer.sft_trainer.SFTTrainer.evaluate",  # prepares a dataset that is given to it
        "sentence_transformers.base.trainer.BaseTrainer.evaluate",  # as above
        "sentence_transformers.base.trainer.BaseTrainer.evaluation_loop",  # calls an evaluator, refused below
        "sentence_transformers.base.trainer.BaseTrainer.log",  # logs parts of a loss, whose collection is refused
        "sentence_transformers.base.trainer.BaseTrainer.call_model_init",  # with a model_init, refused below
    ]
)
"""Methods of other libraries that change no number of a training and an evaluation."""
_WITHOUT_AUTOCAST = frozenset(["trl.trainer.sft_trainer.SFTTrainer.compute_loss"])
"""Losses with no operator outside of the model's forward that autocast would change."""
_OF_THE_LOSS = frozenset({"compute_loss", "training_step", "loss_is_scaled_for_ga"})
_ZEROING = frozenset(["sentence_transformers.base.trainer._OptimizerZeroGradCallback"])
"""Callbacks that zero the gradients of losses, as the pool zeroes all gradients of the optimizer."""
_WITHOUT_NUMBERS = frozenset(["sentence_transformers.base.model_card.BaseModelCardCallback"])
"""Callbacks that change no number, also as a base of other libraries' classes."""
_CALLBACKS = (DefaultFlowCallback, ProgressCallback, PrinterCallback, EarlyStoppingCallback)


def refusals(trainer: Trainer) -> Iterator[str]:
    """Describe everything of a `Trainer` that is refused, each with the remedy."""
    for look in (
        _arguments,
        _values,
        _forward,
        _loss_scale,
        _code,
        refused_attributes,
        _losses,
        _callbacks,
        _data,
        _model,
    ):
        yield from look(trainer)


def _defaults(arguments: type[TrainingArguments]) -> dict[str, Any]:
    defaults = {}
    for field in dataclasses.fields(arguments):
        make = field.default_factory
        defaults[field.name] = field.default if make is dataclasses.MISSING else make()
    return defaults


def _arguments(trainer: Trainer) -> Iterator[str]:
    stock = next(kind for kind in type(trainer.args).__mro__ if kind.__module__.startswith("transformers."))
    # The defaults of `Trainer`, because a subclass may have others. Most fields that a subclass adds mean nothing to `Trainer`.
    added = {name: default for name, default in _defaults(type(trainer.args)).items() if name in REFUSED}
    for name, default in (added | _defaults(stock)).items():
        value = getattr(trainer.args, name, default)
        # Several settings are None by default and become False or an empty list.
        if name in TAKEN_OVER | WITHOUT_EFFECT or value == default or (not value and not default):
            continue
        if name in REFUSED:
            yield f"{name}={value!r}: {REFUSED[name]}"
        elif name not in {"generation_max_length", "generation_num_beams", "generation_config", "sortish_sampler"}:
            yield f"{name}={value!r}: an argument that this version of hydra-tune does not know; leave it at {default!r}"


def _values(trainer: Trainer) -> Iterator[str]:
    args = trainer.args
    if args.device.type != "cpu" or args.n_gpu > 1 or args.world_size > 1:
        place = f"{args.n_gpu} GPUs" if args.n_gpu > 1 else str(args.device)
        yield f"a Trainer on {place}: set use_cpu=True, because the pool moves the model, and give the pool the devices"
    if not args.torch_compile and _text(trainer.accelerator.state.dynamo_plugin.backend).upper() != "NO":
        yield (
            "ACCELERATE_DYNAMO_BACKEND of the process, perhaps by an earlier Trainer with torch_compile=True, by which Trainer "
            "compiles the model: remove the variable, and set compile= of the task"
        )
    if _text(args.save_strategy) != "no":
        yield (
            f"save_strategy={_text(args.save_strategy)!r}: set save_strategy='no'; the pool saves trials "
            "(HydraExecutor(checkpoint_dir=...)), and trainer_from_result(make_trainer, result).save_model() the trained model"
        )
    if args.report_to:
        yield f"report_to={args.report_to!r}: set report_to='none'; a result's history has all reports"
    if _text(args.lr_scheduler_type) in ("reduce_lr_on_plateau", "greedy"):
        yield f"lr_scheduler_type={_text(args.lr_scheduler_type)!r}: choose a schedule by steps, such as 'linear'"
    if _text(getattr(args, "train_sampling_strategy", "")) == "batch_rebalance":
        yield "train_sampling_strategy='batch_rebalance': use 'random', 'group_by_length' or 'sequential'"
    if _text(args.optim) in ("lomo", "adalomo"):
        yield f"optim={_text(args.optim)!r}: it steps within the backward; use an optimizer of torch"
    config = args.accelerator_config
    for name in ("split_batches", "dispatch_batches", "gradient_accumulation_kwargs", "use_configured_state"):
        kwargs = getattr(config, name, None)
        # `Trainer` itself notes one step here.
        if kwargs and kwargs != {"num_steps": 1}:
            yield f"accelerator_config with {name}={kwargs!r}: leave it out"


def _forward(trainer: Trainer) -> Iterator[str]:
    args, compute_loss = trainer.args, type(trainer).compute_loss
    recomputes, options = recomputation_of(args)
    # Without the cache that checkpointing turns off, models may take other kernels; the loss of trl has turned the cache off.
    if recomputes and _name_of(compute_loss) not in _WITHOUT_AUTOCAST:
        yield (
            "activation_checkpointing=True: leave it out; the pool recomputes activations where a device lacks room for them. "
            "Where True is the default, as of trl, set gradient_checkpointing=False"
        )
    elif recomputes and options.get("use_reentrant"):
        yield "activation_checkpointing=True with use_reentrant=True: leave use_reentrant out, which has other gradients"
    has_loss = own_loss_of(trainer) is not None and _name_of(compute_loss) not in _WITHOUT_AUTOCAST
    if is_bfloat16(trainer) and (
        has_loss or trainer.label_smoother is not None or trainer.compute_loss_func is not None
    ):
        given = (
            "bf16=True"
            if args.bf16
            else "ACCELERATE_MIXED_PRECISION=bf16 of the process, perhaps by an earlier Trainer,"
        )
        yield (
            f"{given} with a label_smoothing_factor, a compute_loss_func or a compute_loss of the Trainer's own, whose loss "
            "autocast would change; train in float32, or let the model compute its loss"
        )


def _loss_scale(trainer: Trainer) -> Iterator[str]:
    if getattr(trainer, "aux_loss_enabled", False):  # of trl
        yield "a loss of a model's router, which trl divides by the batches of a step: set router_aux_loss_coef=0.0"
    is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    is_counted = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if is_scaled is not None and bool(is_scaled) != is_counted and trainer.args.gradient_accumulation_steps > 1:
        yield (
            f"loss_is_scaled_for_ga={is_scaled!r} of the Trainer: leave it at None, and give a compute_loss_func= that divides "
            "the sum of the losses by num_items_in_batch"
        )


def _code(trainer: Trainer) -> Iterator[str]:
    names = set(vars(trainer)).intersection(name for name in dir(Trainer) if callable(getattr(Trainer, name, None)))
    places = dict.fromkeys(names, "this object")
    allowed = _MAY_OVERRIDE | ({"log"} if has_metrics(trainer) and own_loss_of(trainer) is not None else set())
    for kind in type(trainer).__mro__:
        if not kind.__module__.startswith("transformers."):
            places |= {
                name: kind.__name__
                for name, value in vars(kind).items()
                if hasattr(Trainer, name) and not name.startswith("__") and name not in allowed
                if f"{_name_of(kind)}.{name}" not in _TRIED and value is not getattr(Trainer, name)
            }
    for place in dict.fromkeys(places.values()):
        own = [name for name in places if places[name] == place]
        if _OF_THE_LOSS.isdisjoint(own):
            remedy = "use the stock method" + "s" * (len(own) > 1)
        else:
            remedy = "override compute_loss alone, in a class"
        yield (
            f"{place} has its own {', '.join(own)}, which the pool would not call: {remedy}, or write the TrainTask yourself "
            "(the page 'Bring a plain PyTorch loop' of the documentation)"
        )


def _callbacks(trainer: Trainer) -> Iterator[str]:
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        # By name, because the module of this class imports IPython.
        if kind.__name__ == "NotebookProgressCallback" or kind in _CALLBACKS or _name_of(kind) in _ZEROING:
            continue
        if _is_of_tried_library(kind) and not _WITHOUT_NUMBERS.isdisjoint(map(_name_of, kind.__mro__)):
            continue
        yield (
            f"the callback {kind.__name__}, which the pool would not call: leave it out; a result's history has all reports, "
            "and after_step= of the task may write weights (the page 'Compute metrics' of the documentation)"
        )
    stops = [each for each in trainer.callback_handler.callbacks if type(each) is EarlyStoppingCallback]
    if stops and (trainer.args.metric_for_best_model is None or _text(trainer.args.eval_strategy) == "no"):
        yield "EarlyStoppingCallback without metric_for_best_model and eval_strategy, which it needs; give both"


def _is_of_tried_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in {name.partition(".")[0] for name in _WITHOUT_NUMBERS}


def _losses(trainer: Trainer) -> Iterator[str]:
    if getattr(trainer, "evaluator", None) is not None:  # of sentence-transformers
        yield "an evaluator, which the pool would not call: call it with trainer_from_result(make_trainer, result).model"
    if trainer.model_init is not None and type(trainer).call_model_init is not Trainer.call_model_init:
        yield "a model_init that call_model_init puts into the loss: give model=, made in the function that makes the Trainer"
    for name, loss in losses_around(trainer).items():
        text = f"self.{name} of {type(trainer).__name__}, a module around the model"
        if holds_part(vars(trainer)[name], trainer.model):
            yield f"{text}, which holds a part of the model as well: read the part from the model"
        if trainer.model_init is not None:
            yield f"{text}, and a model_init: give model=, and make the module in the function that makes the Trainer"
        is_trained = any(parameter.requires_grad for parameter in loss.parameters())
        if is_trained and trainer.args.max_grad_norm:
            yield f"{text}, with tensors of its own, whose gradients Trainer does not clip: set max_grad_norm=0"
        if is_trained and _ZEROING.isdisjoint(_name_of(type(each)) for each in trainer.callback_handler.callbacks):
            yield f"{text}, with tensors of its own, whose gradients Trainer does not zero: make these a part of the model"


def _data(trainer: Trainer) -> Iterator[str]:
    if isinstance(trainer.train_dataset, dict):
        yield "several train_datasets, which have not been tried: give one"
    elif trainer.train_dataset is None:
        yield "no train_dataset: give the Trainer one"
    elif _has_no_length(trainer.train_dataset):
        yield "a train_dataset without a length: give a dataset with len() and indices"
    if getattr(trainer, "_is_vision_dataset", False):  # of trl
        yield "a dataset with images in a trainer of trl, which has not been tried: train on texts"
    if isinstance(trainer.eval_dataset, dict):
        yield "several eval_datasets: give one, and evaluate on the others after the search"
    elif trainer.eval_dataset is not None and _has_no_length(trainer.eval_dataset):
        yield "an eval_dataset without a length: give a dataset with len() and indices"
    if getattr(trainer.data_collator, "seed", None) is not None:
        yield (
            f"{type(trainer.data_collator).__name__} with a seed, which trials would share: leave seed= out, and it draws "
            "from the trial's own stream"
        )


def _has_no_length(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or length_of(dataset) is None


def _model(trainer: Trainer) -> Iterator[str]:
    model = trainer.model
    checks: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: trainer.is_model_parallel, "a model on several devices: load it on the CPU; the pool cuts it"),
        (lambda: getattr(model, "hf_quantizer", None), "a quantized model: load it in full precision"),
        (
            lambda: {_text(one.peft_type) for one in getattr(model, "peft_config", {}).values()} - {"LORA"},
            "a PEFT model other than LoRA, which has not been tried: use LoRA, or train the whole model",
        ),
        (lambda: hasattr(trainer.optimizer, "train"), "an optimizer with modes (schedule-free): use another"),
        (lambda: trainer.lr_scheduler, "a scheduler in optimizers=: give lr_scheduler_type, or (optimizer, None)"),
        (
            lambda: any(p.device != torch.device("cpu") for p in model.parameters()),
            "a model off the CPU: load it there",
        ),
    )
    for holds, message in checks:
        if holds():
            yield message


def _name_of(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _text(value: Any) -> str:
    """Return the text of an argument that may be an enum."""
    return str(getattr(value, "value", value))
