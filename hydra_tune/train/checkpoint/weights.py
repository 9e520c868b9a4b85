"""A task's model with weights from a file, a checkpoint or another process.

People import `load_module` from `hydra_tune`, and the integrations call `load_module` for their own
(`integrations/hydra_tune_optuna/weights.py`, `integrations/hydra_tune_ray/weights.py`). `isolation/sending.py` sends a
trained module that cannot be pickled by `weights_of`, and calls `with_weights` when the weights arrive.

The module must not write files. A model is built with the streams of the task's seed, so the process's own random
generators stay unchanged. Each function that builds a model holds the capture gate shared meanwhile, because the task's
own code runs.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hydra_tune.checkpoint.folder import load_checkpoint
from hydra_tune.checkpoint.tensors import load_tensors
from hydra_tune.errors import WeightsError
from hydra_tune.paths import absolute_path
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.capture.step_capture import named_state
from hydra_tune.task import TrainTask
from hydra_tune.train.building import own_build
from hydra_tune.train.checkpoint.compatibility import kinds_as_built, kinds_of
from hydra_tune.train.checkpoint.trial_checkpoint import (
    check_base,
    copy_weights,
    decoded,
    end_laziness,
    materialize,
    with_extra_state,
)
from hydra_tune.train.rng.rng_streams import RandomStreams

_NUM_NAMED = 3


def load_module(task: TrainTask, path: str | Path) -> nn.Module:
    """Build the task's model anew, and load weights from a safetensors file.

    The model is built from the task's seed, as for training; the process's own random generators stay unchanged.

    Args:
        task: builds the model.
        path: path of a file from `Result.save`, or of any other safetensors of a `state_dict()`; or the folder of a
            trial's checkpoints.

    Returns:
        The module on the device and in the mode in which its factory leaves the module, for most modules the host and
        training mode; call `.eval()`.

    Raises:
        FileError: the file cannot be read, or is damaged.
        CheckpointError: the folder has no complete checkpoint, or the model has another shared base.
        WeightsError: the model has other tensors, or tensors of other shapes or dtypes; the first few are named.
        Exception: any error of the task's `model`.
    """
    path = absolute_path(path)
    if path.is_dir():
        return _from_checkpoint(task, path)
    state, _ = load_tensors(path)
    with RandomStreams(task.seed).everything(), GATE.shared():
        with own_build():
            module = task.model()
        # Checked here, because `load_state_dict` would silently convert dtypes.
        differing = _differences(module.state_dict(), state)
        if differing:
            shown = "; ".join(differing[:_NUM_NAMED])
            more = f"; and {len(differing) - _NUM_NAMED} more" if len(differing) > _NUM_NAMED else ""
            raise WeightsError(
                f"the weights in {str(path)!r} do not fit the task's model: {shown}{more}; build the model as it was when they "
                f"were trained"
            )
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            raise WeightsError(
                f"the model refuses the weights in {str(path)!r}: {error}; build it as it was when they were trained"
            ) from error
    return module


def _from_checkpoint(task: TrainTask, path: Path) -> nn.Module:
    state = decoded(load_checkpoint(path))
    with RandomStreams(task.seed).everything(), GATE.shared():
        with own_build():
            module = task.model()
        # Training may have added, replaced or removed buffers.
        if kinds_of(module) == kinds_as_built(state["made_for"]):
            copy_weights(module, state)
            _set_extra_state(module, state["extra"])
            return module
    what = f"the checkpoint in {str(path)!r}"
    return with_weights(task, state["model"], state["extra"], shared=state["shared"], what=what)


def weights_of(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the arguments of `with_weights`: parameters and buffers by name, and extra states of modules by path."""
    tensors = {name: tensor.detach() for name, tensor in named_state(module)}
    return tensors, {path: submodule.get_extra_state() for path, submodule in with_extra_state(module)}


def with_weights(
    task: TrainTask,
    tensors: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    *,
    shared: Mapping[str, str] = MappingProxyType({}),
    what: str = "what was trained",
) -> nn.Module:
    """Build the task's model anew, as `load_module` does, and set all parameters and buffers.

    Args:
        task: builds the model.
        tensors: tensors from `weights_of` or a checkpoint.
        extra: extra states from the same source.
        shared: digests of parameters in a shared base, by name, which the task's model must have.
        what: name of the weights in messages.

    Raises:
        WeightsError: the model has other tensors.
        CheckpointError: the model has another base.
        Exception: any error of the task's `model`.
    """
    with RandomStreams(task.seed).everything(), GATE.shared(), torch.no_grad():
        with own_build():
            module = task.model()
        check_base(module, shared)
        materialize(module, tensors)
        end_laziness(module)
        named = {name: tensor for name, tensor in named_state(module) if name not in shared}
        differing = _differences(named, dict(tensors))
        if differing:
            raise WeightsError(
                f"{what} does not fit the task's model: {'; '.join(differing[:_NUM_NAMED])}; build "
                "the model as it was when it was trained, without split_operators"
            )
        # Not `load_state_dict`, which leaves out buffers that are not persistent.
        for name, tensor in named.items():
            tensor.copy_(tensors[name])
        _set_extra_state(module, extra)
    return module


def _set_extra_state(module: nn.Module, extra: Mapping[str, Any]) -> None:
    for path, submodule in with_extra_state(module):
        if path in extra:
            submodule.set_extra_state(extra[path])


def _differences(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """List the differences, in the order of the model, then of the file."""
    lines = []
    for name, tensor in wanted.items():
        if name not in found:
            lines.append(f"{name!r} of the model is not in the file")
        elif not is_lazy(tensor) and _kind(tensor) != _kind(found[name]):
            lines.append(f"{name!r} is {_kind(tensor)} in the model and {_kind(found[name])} in the file")
    return lines + [f"{name!r} of the file is not in the model" for name in found if name not in wanted]


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
