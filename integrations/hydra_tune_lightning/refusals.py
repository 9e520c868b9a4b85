"""Everything of a `LightningModule` or a datamodule that the pool would not do exactly, with the reason and the remedy.

`task_from_lightning` (`task.py`) refuses a module or a datamodule with any of these. A method of `LightningModule` that the
module has overridden is called as Lightning calls the method, has no effect on a training in a pool, does nothing where
Lightning's own method does nothing either, or is refused. `options.py` has the options of the `Trainer`, `callbacks.py` the
callbacks, and `data.py` and `optimizer.py` refuse loaders and optimizers.
"""

import dis
import inspect
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn

from hydra_tune_lightning.epoch_values import metric_refusals

CALLED = frozenset(
    {
        "training_step",
        "validation_step",
        "configure_optimizers",
        "forward",
        "prepare_data",
        "setup",
        "configure_model",
        "on_validation_epoch_end",
        "train_dataloader",
        "val_dataloader",
    }
)
"""Overridden methods that the package calls where Lightning calls the methods, or that the module's own code calls."""

WITHOUT_EFFECT = frozenset(
    {
        "test_step",
        "predict_step",
        "test_dataloader",
        "predict_dataloader",
        "on_save_checkpoint",
        "on_load_checkpoint",
        "load_from_checkpoint",
        "on_exception",
        "example_input_array",
        "to_onnx",
        "to_torchscript",
    }
)
"""Overridden attributes that no training in a pool uses, although Lightning may call some of them in `fit`."""

_USUAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
_OWN_STEP = "leave it out, or write the TrainTask yourself (the page 'Bring a plain PyTorch loop' of the documentation)"
_REMEDIES = {
    "optimizer_step": _OWN_STEP,
    "backward": _OWN_STEP,
    "optimizer_zero_grad": _OWN_STEP,
    "on_before_optimizer_step": _OWN_STEP,
    "configure_gradient_clipping": "give gradient_clip_val and gradient_clip_algorithm",
    "lr_scheduler_step": "use a scheduler of torch's, or a LambdaLR",
    "configure_callbacks": "leave it out; a result's history has all reports",
    "on_train_start": "leave it out; the pool runs no sanity steps, and metrics begin each validation anew",
    "on_train_epoch_end": "read a result's history instead",
    "on_train_end": "call it on result.module()",
    "on_fit_end": "call it on result.module()",
    "transfer_batch_to_device": "let collate_fn of the loader make the batch; the pool moves the batch",
    "on_before_batch_transfer": "let collate_fn of the loader do the work",
    "on_after_batch_transfer": "do the work in training_step and validation_step",
    "teardown": "close files and connections after the search",
}


def refusals(module: LightningModule) -> Iterator[str]:
    """Describe everything of a module as made that is refused, each with the remedy."""
    if not module.automatic_optimization:
        yield "manual optimization (automatic_optimization=False): return the loss, and leave the rest to the pool"
    for name, owner in overridden(module, LightningModule):
        # A step left out, as by an `lr_scheduler_step` that does nothing, is a change as well.
        is_idle = does_nothing(getattr(module, name)) and does_nothing(getattr(LightningModule, name))
        if name not in CALLED | WITHOUT_EFFECT and not is_idle:
            yield f"{owner} overrides {name}, which the pool would not call: {_REMEDIES.get(name, 'leave it out')}"
    for name in ("training_epoch_end", "validation_epoch_end"):
        if callable(getattr(module, name, None)):
            yield f"{name}, which Lightning 2 has removed: use on_validation_epoch_end, or leave it out"
    if type(module).training_step is LightningModule.training_step:
        yield f"{type(module).__name__} has no training_step: write one that returns the loss"
    yield from _arguments(module)
    yield from metric_refusals(module)


def module_refusals(module: nn.Module) -> Iterator[str]:
    """Describe refused states of a module ready to train; puts the module in training mode."""
    still = [name or "the module itself" for name, part in module.named_modules() if not part.training]
    module.train()
    stays = [name or "the module itself" for name, part in module.named_modules() if not part.training]
    if still or stays:
        yield (
            f"{(still or stays)[0]} is in eval mode before the training, or stays so in train(), and Lightning calls neither "
            "train() nor eval() at first: call eval() of the part at the beginning of training_step, and not in __init__; or, "
            "for a model that was loaded in eval mode and shall train, call train() at the end of __init__"
        )
    if any(p.device.type != "cpu" for p in module.parameters()):
        yield "a module off the CPU: build it there; the pool moves the module"


def datamodule_refusals(datamodule: Any) -> Iterator[str]:
    """Describe the refused parts of a datamodule."""
    if not isinstance(datamodule, LightningDataModule):
        yield f"datamodule is {type(datamodule).__name__}: give a lightning.pytorch.LightningDataModule"
        return
    for name, owner in overridden(datamodule, LightningDataModule):
        is_idle = does_nothing(getattr(datamodule, name)) and does_nothing(getattr(LightningDataModule, name))
        if name not in CALLED | WITHOUT_EFFECT | {"state_dict", "load_state_dict"} and not is_idle:
            yield f"{owner} overrides {name}, which the pool would not call: {_REMEDIES.get(name, 'leave it out')}"


def does_nothing(method: Any) -> bool:
    """Whether a method has no code but a docstring, `pass` or `return None`."""
    code = getattr(method, "__code__", None)
    idle = {"RESUME", "NOP", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE"}
    return (
        code is not None
        # The last constant is the returned one; a method that returns another value decides something.
        and code.co_consts[-1:] == (None,)
        and {each.opname for each in dis.get_instructions(code)} <= idle
    )


def overridden(value: object, stock: type) -> Iterator[tuple[str, str]]:
    """Iterate over the public names of a class of Lightning that an object overrides, each with the overriding class."""
    hooks = {
        name
        for kind in stock.__mro__
        if kind.__module__.startswith("lightning.")
        for name in vars(kind)
        if not name.startswith("_")
    }
    for name in sorted(hooks & set(vars(value))):
        if callable(vars(value)[name]):
            yield name, "this object"
    for kind in type(value).__mro__:
        if kind in stock.__mro__:
            break
        for name in sorted(hooks & set(vars(kind))):
            yield name, kind.__name__


def _arguments(module: LightningModule) -> Iterator[str]:
    for name in ("training_step", "validation_step"):
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        required = [each.name for each in parameters if each.default is each.empty and each.kind is _USUAL]
        if "dataloader_iter" in required:
            yield f"{name} takes dataloader_iter: take (batch, batch_idx)"
        elif required[2:]:
            yield f"{name} takes {', '.join(required[2:])}: take (batch, batch_idx), and give one loader"
