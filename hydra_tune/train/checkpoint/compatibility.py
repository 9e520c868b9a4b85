"""Description of a checkpoint's origin: the task and the objects of its factories, as comparable values.

A checkpoint serves the same task again, and differences are reported by name. Differences are refused unless the user allows
changes; parts that the state itself depends on (`_ESSENTIAL`) must be the same wherever a trial resumes. `TrialObjects`
(`trial_checkpoint.py`) describes a trial just after its factories have run, and compares the description with a checkpoint's
before the trial resumes. `weights.py` compares parameters and buffers alone, and `Trial` (`train/trial.py`) and
`train/data/loader_state.py` copy positions by `copied`.

Note: older checkpoints. A new entry of the description makes each older checkpoint a checkpoint of another task. So a
new setting is described only where the setting differs from its default.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hydra_tune.checkpoint.values import decode, encode
from hydra_tune.errors import CheckpointError
from hydra_tune.shard.capture.step_capture import named_state
from hydra_tune.task import DataHandle, TrainTask, length_of
from hydra_tune.train.checkpoint.attribute_diff import same_value

_TASK = (
    "epochs", "batch_size", "accumulate", "split_batches", "split_operators", "max_grad_norm", "precision", "compile",
    "scheduler_interval", "report_every", "seed",
)  # fmt: skip
# Settings that decide the order of samples: a change makes the position in a pass meaningless.
_OF_THE_PASS = ("task.train", "task.batch_size", "task.seed")
# Settings that the saved tensors depend on: no state can be restored after a change.
_ESSENTIAL = ("parameters", "buffers", "optimizer", "members", "task.split_operators")
_MISSING = "nothing"

Change = tuple[str, Any, Any]
"""The name of a difference, the old value, and the new value."""


def describe(task: TrainTask, module: nn.Module, optimizer: Optimizer, scheduler: Any) -> dict[str, Any]:
    """Describe a task and the objects that its factories have just built, before training; plain values and tensors."""
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    return {
        "torch": torch.__version__.partition("+")[0],
        "task": {
            **{name: _plain(getattr(task, name)) for name in _TASK},
            # Checkpoints from before the arguments lack them.
            **({"remainder": task.remainder} if task.divides_by_rest else {}),
            **({"clip_order": task.clip_order} if task.clip_order != "module" else {}),
            "train": _data(task.train),
            "validate": _data(task.validate),
        },
        **kinds_of(module),
        # Lazy parameters, which have no kind yet, train as well.
        "trained": [name for name, parameter in module.named_parameters() if parameter.requires_grad],
        "optimizer": class_name(optimizer),
        "members": [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups],
        "groups": [copied(hyperparameters(group)) for group in optimizer.param_groups],
        "scheduler": None if scheduler is None else class_name(scheduler),
        # Where nothing is saved a schedule needs no state; the first save refuses one without.
        "schedule": copied(schedule_of(scheduler)) if _has_state(scheduler) else None,
    }


def kinds_of(module: nn.Module) -> dict[str, Any]:
    """Describe the parameters and buffers of a module."""
    named = dict(named_state(module))
    return {
        "parameters": {name: _kind(tensor) for name, tensor in named.items() if isinstance(tensor, nn.Parameter)},
        "buffers": {name: _kind(tensor) for name, tensor in named.items() if not isinstance(tensor, nn.Parameter)},
    }


def kinds_as_built(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a description that `kinds_of` makes, as of the factories."""
    return {part: description[part] for part in ("parameters", "buffers")}


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters; tensors are copied, because training changes them in place."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def copied(value: Any) -> Any:
    """Copy a value, down to the parts that a checkpoint can hold; the copy shares all other parts."""
    tensors: dict[str, Tensor] = {}
    try:
        encoded = encode(value, "", tensors)
    except CheckpointError:
        return {key: copied(item) for key, item in value.items()} if isinstance(value, dict) else value
    return decode(encoded, {name: tensor.clone() for name, tensor in tensors.items()})


def schedule_of(scheduler: Any) -> dict[str, Any]:
    """Return the state of a scheduler, without functions, which the factory recreates.

    Raises:
        CheckpointError: the scheduler has no `state_dict`.
    """
    if not _has_state(scheduler):
        raise CheckpointError(
            f"this trial cannot be checkpointed: its scheduler {type(scheduler).__name__} has no state_dict(); give it "
            "state_dict() and load_state_dict(), or leave out checkpoint_dir"
        )
    state: Mapping[str, Any] = scheduler.state_dict()
    return {key: value for key, value in state.items() if not callable(value)}


def _has_state(scheduler: Any) -> bool:
    return callable(getattr(scheduler, "state_dict", None))


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the differences between the description in a checkpoint and the present one."""
    return list(_changes("", saved, now))


def is_essential(change: Change) -> bool:
    """Whether the change makes the saved state unusable."""
    return _is_part_of(change, _ESSENTIAL)


def is_of_the_pass(change: Change) -> bool:
    """Whether the change forces a pass under way to begin again."""
    return _is_part_of(change, _OF_THE_PASS)


def in_words(found: list[Change]) -> str:
    """Return changes as a text."""
    shown = [
        f"{name}: {saved_value!r} when it was saved, {new_value!r} now" for name, saved_value, new_value in found[:6]
    ]
    return "; ".join(shown) + (f"; and {len(found) - 6} more" if len(found) > 6 else "")  # noqa: PLR2004 - a few are enough


def merged(saved: Any, built: Any, now: Any) -> Any:
    """Return a saved value, or the new value where the factories now build another initial value.

    Args:
        saved: the value when it was saved.
        built: the value from the factories at that time, before any training.
        now: the value from the factories now.
    """
    if isinstance(saved, dict) and isinstance(built, dict) and isinstance(now, dict):
        return {
            key: merged(value, built[key], now[key]) if key in built and key in now else value
            for key, value in saved.items()
        }
    if isinstance(saved, list) and isinstance(built, list) and isinstance(now, list):
        if len(saved) == len(built) == len(now):
            return [merged(*items) for items in zip(saved, built, now, strict=True)]
        # Lists of another length cannot be matched item by item; the task's new list wins if the task has changed it.
        return now if len(built) != len(now) else saved
    return saved if same_value(built, now) else now


def _changes(path: str, saved: Any, now: Any) -> Iterator[Change]:
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*saved, *now)):
            yield from _changes(f"{path}.{key}".lstrip("."), saved.get(key, _MISSING), now.get(key, _MISSING))
    elif isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        for index, (saved_item, new_item) in enumerate(zip(saved, now, strict=True)):
            yield from _changes(f"{path}.{index}", saved_item, new_item)
    elif not same_value(saved, now):
        yield path, saved, now


def _is_part_of(change: Change, parts: tuple[str, ...]) -> bool:
    return any(change[0] == part or change[0].startswith(f"{part}.") for part in parts)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def class_name(value: object) -> str:
    """Return the name of a value's class, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _data(handle: DataHandle | None) -> Any:
    """Describe data without drawing any."""
    if handle is None:
        return None
    if isinstance(handle, DataLoader):
        order = type(handle.sampler if handle.batch_sampler is None else handle.batch_sampler).__name__
        inner = type(handle.sampler).__name__
        return {
            "of": _data(handle.dataset),
            "batch_size": handle.batch_size,
            "order": [order, inner],
            "workers": handle.num_workers,
        }
    name = getattr(handle, "__qualname__", None) if not hasattr(handle, "__getitem__") else None
    return {"is": type(handle).__name__ if name is None else "a callable", "samples": length_of(handle)}
