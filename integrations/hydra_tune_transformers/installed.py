"""Differences between the supported versions of the transformers library, in one place.

No function here branches on a version, but for `refused_versions`. The others ask the installed library and the given
`Trainer`: by a call with small data, by a signature, by the source of a method, or by an attribute. `task.py` and
`refusals.py` ask here, so a version between two compared versions is treated by its own code.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

from hydra_tune_transformers.loss import IGNORED_LABEL, ItemCount

OLDEST = (4, 50)
"""Oldest supported version of the transformers library."""
COMPARED = ("4.50", "4.57", "5.0", "5.24")
"""Versions of the transformers library with which the numbers have been compared; `make compat-integrations` repeats some."""
COMPARED_SUBCLASSES = {"trl": ("1.16",), "sentence_transformers": ("6.2",)}
"""Versions of other libraries with which the numbers of their trainers have been compared."""

_LOGGER = logging.getLogger(__name__)


def refused_versions(kind: type) -> Iterator[str]:
    """Describe versions that are too old, for a class of Trainers; log versions that have not been compared."""
    version = transformers.__version__
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        yield f"transformers {version}, and the oldest supported is {oldest}: install transformers>={oldest}"
    elif not _is_one_of(version, COMPARED):
        _LOGGER.warning(
            "the numbers of a Trainer have been compared with transformers %s, and %s is installed; compare a trial with "
            "Trainer.train()", ", ".join(COMPARED), version,
        )  # fmt: skip
    for library in dict.fromkeys(base.__module__.partition(".")[0] for base in kind.__mro__):
        compared, version = COMPARED_SUBCLASSES.get(library), getattr(sys.modules.get(library), "__version__", "")
        if compared is None or _is_one_of(version, compared):
            continue
        major, installed = (each.partition(".")[0] for each in (compared[0], version))
        if installed.isdecimal() and int(installed) < int(major):
            name = library.replace("_", "-")
            yield f"{name} {version}, whose trainers have not been compared: install {name}>={major}"
        else:
            _LOGGER.warning(
                "the numbers of a %s have been compared with %s %s, and %s is installed; compare a trial with its train()",
                kind.__name__, library, ", ".join(compared), version,
            )  # fmt: skip


def _is_one_of(version: str, compared: tuple[str, ...]) -> bool:
    return any(version.startswith(each + ".") for each in compared)


def item_count_of(trainer: Trainer) -> tuple[ItemCount | None, torch.dtype | None]:
    """Return how a `Trainer` counts the labels of batches that have labels, and the dtype of the sum; None: not at all."""
    labels = torch.tensor([[1, 1, 1]])

    def counted(**batch: torch.Tensor) -> Any:
        # Not by `trainer.get_batch_samples`: a script's own is refused elsewhere.
        return Trainer.get_batch_samples(trainer, iter([batch]), 1, torch.device("cpu"))[1]

    total = counted(labels=labels)
    if total is None:
        return None, None
    shifted = counted(labels=labels, shift_labels=torch.full_like(labels, IGNORED_LABEL))
    return ItemCount(is_shifted=total.item() < labels.numel(), reads_shifted=shifted.item() == 0), total.dtype


def counts_in_evaluation() -> bool:
    """Whether `Trainer` gives the number of labels to the loss of an evaluation, too."""
    return _says(Trainer.prediction_step, "_get_num_items_in_batch")


def smooths_by_count() -> bool:
    """Whether `Trainer` divides the loss of smoothed labels by the number of labels of an optimizer step."""
    return "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters


def skips_rest() -> bool:
    """Whether `Trainer` draws too few batches for a shorter last step, and keeps their gradients for the next epoch."""
    return _says(Trainer._inner_training_loop, "num_examples % args.gradient_accumulation_steps")  # noqa: SLF001


def divides_by_rest() -> bool:
    """Whether `Trainer` divides the losses of a shorter last step by the number of batches in the step."""
    return _says(Trainer.training_step, "current_gradient_accumulation_steps")


def divisor_of(trainer: Trainer, *, is_counted: bool) -> int:
    """Return the divisor of all losses in training, also of a shorter last step, where `divides_by_rest` is false."""
    takes_count = trainer.model_accepts_loss_kwargs
    # Up to transformers 4.52 the losses of batches without labels are summed, if the model takes a number of labels.
    if trainer.compute_loss_func is not None or (
        takes_count and (is_counted or not _says(Trainer.training_step, "num_items_in_batch is "))
    ):
        return 1
    return int(trainer.args.gradient_accumulation_steps)


def drops_bad_losses(arguments: Any) -> bool:
    """Whether an evaluation leaves losses that are NaN or infinite out of the mean."""
    return arguments.logging_nan_inf_filter and _says(Trainer.evaluation_loop, "isfinite")


def ignored_outputs(model: nn.Module) -> tuple[str, ...]:
    """Return the outputs of a model that are no predictions."""
    default = "cache" if _says(Trainer.prediction_step, '["cache"]') else "past_key_values"
    config = getattr(model, "config", None)
    return () if config is None else tuple(getattr(config, "keys_to_ignore_at_inference", [default]))


def is_bfloat16(trainer: Trainer) -> bool:
    """Whether a `Trainer` computes forwards in bfloat16.

    `ACCELERATE_MIXED_PRECISION` of the process counts as well as `bf16=True`, and up to transformers 4.57 `bf16=True` of one
    `Trainer` sets that variable for all later ones. On a CPU the accelerator knows no other low precision.
    """
    return bool(trainer.accelerator.native_amp)


def recomputation_of(arguments: Any) -> tuple[bool, dict[str, Any]]:
    """Return whether activations are recomputed, and the options of that."""
    name = "activation" if hasattr(arguments, "activation_checkpointing") else "gradient"
    options = getattr(arguments, f"{name}_checkpointing_kwargs")
    return bool(getattr(arguments, f"{name}_checkpointing")), options or {}


def align_special_tokens(model: nn.Module, processing_class: Any) -> nn.Module:
    """Give a model's settings the special tokens of its tokenizer, where `Trainer.train()` does."""
    kinds = (transformers.PreTrainedTokenizerBase, transformers.ProcessorMixin)
    if isinstance(processing_class, kinds) and hasattr(model, "config"):
        function = getattr(transformers.trainer_utils, "align_special_tokens", None)
        method = getattr(Trainer, "_align_special_tokens", None)
        if function is not None:
            function(model, processing_class)
        elif method is not None:
            method(SimpleNamespace(model=model, processing_class=processing_class))
    return model


def _says(method: Callable[..., Any], text: str) -> bool:
    return text in inspect.getsource(method)
