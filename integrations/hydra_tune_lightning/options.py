"""The options of a `Trainer`, checked: some are taken over, some change no number, and all others are refused by name.

`task_from_lightning` (`task.py`) checks the options before the module is made, and reads `TrainerOptions` for the arguments
of the task. `optimizer.py` counts steps by the options, and `trainer_stand_in.py` shows the options to the module's code.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning.pytorch import Trainer

from hydra_tune.errors import TaskError, with_hint
from hydra_tune_lightning.callbacks import NOT_WRITTEN, warn_not_written
from hydra_tune_lightning.errors import RefusedModuleError

WITHOUT_EFFECT = frozenset(
    {
        "enable_progress_bar",
        "enable_model_summary",
        "enable_autolog_hparams",
        "log_every_n_steps",
        "default_root_dir",
        "inference_mode",
        "limit_test_batches",
        "limit_predict_batches",
        "use_distributed_sampler",
    }
)
"""Options that change no number of a training on one device."""

_DEVICES = "leave it out, and give the devices to the pool, HydraExecutor(devices=...)"
REFUSED = {
    "accelerator": _DEVICES,
    "devices": _DEVICES,
    "num_nodes": _DEVICES,
    "strategy": _DEVICES,
    "fast_dev_run": "give max_epochs=1 and small loaders",
    "max_steps": "give max_epochs",
    "min_steps": "leave it out; every training runs max_epochs",
    "min_epochs": "leave it out; every training runs max_epochs, unless a callback stops the training",
    "max_time": "give max_epochs",
    "limit_train_batches": "give a loader of fewer batches",
    "limit_val_batches": "give a loader of fewer batches",
    "overfit_batches": "give a loader of fewer batches",
    "val_check_interval": "leave it at 1.0; dataclasses.replace(task, report_every=...) reports every so many steps",
    "check_val_every_n_epoch": "leave it at 1",
    "deterministic": "set torch.use_deterministic_algorithms(True) for the process",
    "benchmark": "set torch.backends.cudnn.benchmark for the process",
    "profiler": "leave it out; hydra-tune trace shows where the time goes",
    "detect_anomaly": "use it with Trainer.fit()",
    "barebones": "leave it out",
    "plugins": "leave them out",
    "sync_batchnorm": "leave it out; a trial has one copy of its model",
    "reload_dataloaders_every_n_epochs": "let the dataset or the sampler change by itself",
    "model_registry": "upload the file of save_checkpoint() after the search",
}
"""Remedies of the options that are refused, unless with their default, None, a value in `_NEUTRAL`, or 1.0 in `_WHOLE`."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "accelerator": ("cpu", "auto"),
    "devices": (1, "1", "auto"),
    "strategy": ("auto",),
    "plugins": ([],),
    "deterministic": (False,),
    "benchmark": (False,),
    "min_epochs": (0, 1),
}
_WHOLE = ("val_check_interval", "limit_train_batches", "limit_val_batches")  # 1.0 is all batches, and 1 is one batch

PRECISIONS = {"32-true": "float32", "bf16-mixed": "bfloat16"}
"""Precisions of a `Trainer`, with those of a task."""


# Without slots, so that steps with equal options compare as equal.
@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """The options of a `Trainer` that decide numbers, by their names there, and whether its modules find a logger."""

    max_epochs: int
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    precision: str = "32-true"
    num_sanity_val_steps: int = 2
    has_logger: bool = True

    @property
    def max_norm(self) -> float | None:
        """Limit of the norm of the gradients; None: no clipping by norm."""
        return None if self.gradient_clip_algorithm == "value" else self.gradient_clip_val or None

    @property
    def max_value(self) -> float | None:
        """Limit of each value of the gradients; None: no clipping by value."""
        return self.gradient_clip_val or None if self.gradient_clip_algorithm == "value" else None


NUMERIC = tuple(field.name for field in fields(TrainerOptions) if field.name != "has_logger")
"""Names of the options that decide numbers."""


def checked(options: Mapping[str, Any]) -> TrainerOptions:
    """Return the options that decide numbers.

    Raises:
        TaskError: an option that `Trainer` does not have, or no `max_epochs`.
        RefusedModuleError: options that the pool does not honour.
    """
    # Of the installed `Trainer`, because versions of Lightning differ in their options.
    known = inspect.signature(Trainer.__init__).parameters
    for name in options:
        if name not in known or name == "self":
            raise TaskError(with_hint(f"Trainer has no option {name!r}", name, [*known]))
    if options.get("max_epochs") is None:
        raise TaskError("task_from_lightning needs max_epochs, as Trainer(max_epochs=...)")
    if reasons := [*_refused(options, known)]:
        raise RefusedModuleError(reasons)
    for name in NOT_WRITTEN.keys() & options.keys():
        if options[name]:
            warn_not_written(name)
    kept = {name: options[name] for name in NUMERIC if options.get(name) is not None}
    kept["precision"] = "bf16-mixed" if kept.get("precision") == "bf16-mixed" else "32-true"
    return TrainerOptions(**kept, has_logger=options.get("logger") not in (False, []))


def _refused(options: Mapping[str, Any], known: Mapping[str, inspect.Parameter]) -> Iterator[str]:
    for name, value in options.items():
        if name in _WHOLE and type(value) is float and value == 1.0:
            continue
        if (
            name in WITHOUT_EFFECT | NOT_WRITTEN.keys()
            or name in NUMERIC
            or value is None
            or value in _NEUTRAL.get(name, ())
        ):
            continue
        if value != known[name].default:
            unknown = "an option that this version of hydra-tune does not know; leave it out"
            yield f"{name}={value!r}: {REFUSED.get(name, unknown)}"
    if options.get("precision") not in (*PRECISIONS, None, 32, "32"):
        yield f"precision={options['precision']!r}: use '32-true' or 'bf16-mixed'"
    if options["max_epochs"] == -1:
        yield "max_epochs=-1: give a number of epochs"
    if options.get("gradient_clip_algorithm") not in (None, "norm", "value"):
        yield f"gradient_clip_algorithm={options['gradient_clip_algorithm']!r}: use 'norm' or 'value'"
