"""Checks whether an optimizer can be stepped shard by shard: the update of a parameter must depend on the parameter alone.

The check steps small stand-ins instead of recognizing optimizers by name, so that the check works for a user's class: a global
step must give the same bits as a step per parameter. `PlanLibrary` (`shard/partition/plan_cache.py`) runs the check for each
new training plan of several shards, and for each further trial that gets such a plan, unless `is_told_by_key` or the trial's
first plan was such a plan. `ModelState` (`train/state/model_state.py`) runs the check before a second update within one step of
a model in one shard. `ModelState` and `train/checkpoint/trial_checkpoint.py` ask `has_overlap`.

Note: callers of `check_separable` are inside the capture gate, because optimizers ask `torch.compiler.is_compiling()`. The
stand-ins of a user's class share objects with the trial's optimizer; `trying` (`shard/cost/update_pilot.py`) puts these back.
"""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hydra_tune.errors import TaskError
from hydra_tune.shard.capture.batch import same_bits
from hydra_tune.shard.capture.step_capture import StateSpec
from hydra_tune.shard.cost.update_pilot import is_of_torch, stand_in_for, trying, use_rates

_STEPS = 2  # of all parameters, with gradients of about 1
_MANY_STEPS = 12  # of a few parameters: some optimizers couple parameters every few steps, or after a few steps
_ARE_LARGE = (None, (True, False), (False, True))  # which gradients of these tries are huge; see `_difference_of_steps`
_ALIKE = 3  # parameters of the same kind among these few
_HUGE, _TINY = 1e6, 1e-6  # scales of gradients
_MAX_SIDE = 4  # largest side of a stand-in


def check_separable(
    optimizer: Optimizer,
    parameters: dict[str, Tensor],
    specs: dict[str, StateSpec],
    need: str = "this model has to be cut to fit",
) -> None:
    """Refuse an optimizer that would train differently if stepped shard by shard.

    Args:
        optimizer: a trial's optimizer; only read.
        parameters: the model's parameters by canonical name.
        specs: geometry of the parameters.
        need: why there is a step per shard, for the error.

    Raises:
        TaskError: a step per shard would differ from a single step.
    """
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    members = [(name, group_of[id(p)]) for name, p in parameters.items() if id(p) in group_of and p.requires_grad]
    if _has_hooks(optimizer):
        why = "has step hooks"
    elif _has_own_step(optimizer):
        why = "has a step that was put on the object, which cannot be tried on stand-ins"
    else:
        with trying(optimizer):
            difference = _difference(optimizer, members, specs)
        if difference is None:
            return
        why = difference
    raise TaskError(
        f"{type(optimizer).__name__} {why}, so it cannot be stepped shard by shard, and {need}; "
        "raise device_memory until the model fits whole, or use an optimizer whose update is per parameter"
    )


def is_told_by_key(optimizer: Optimizer) -> bool:
    """Whether optimizers of an equal `optimizer_key` pass the check together: torch's own, without hooks or a step put on.

    A user's class may read attributes and rates, which the key leaves out.
    """
    return is_of_torch(optimizer) and not _has_hooks(optimizer) and not _has_own_step(optimizer)


def _has_hooks(optimizer: Optimizer) -> bool:
    """Whether the object has step hooks: stepped shard by shard, these would run once per shard, on a part of the gradients."""
    return any(getattr(optimizer, name, None) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))


def _has_own_step(optimizer: Optimizer) -> bool:
    """Whether the object's `step` is not its class's; the wrapper of a learning-rate scheduler changes nothing."""
    step = vars(optimizer).get("step")
    return step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step


def _difference(optimizer: Optimizer, members: list[tuple[str, int]], specs: dict[str, StateSpec]) -> str | None:
    """Say why steps per parameter would differ from a single step; None: they would not."""
    why = _difference_of_steps(optimizer, members, specs, _STEPS)
    if why is not None or is_of_torch(optimizer):
        return why
    few = _few(members, specs)
    try:
        tries = (_difference_of_steps(optimizer, few, specs, _MANY_STEPS, is_large) for is_large in _ARE_LARGE)
        return next((why for why in tries if why is not None), None)
    except Exception:  # noqa: BLE001 - an optimizer may refuse huge gradients, and training would show the error
        return None


def _few(members: list[tuple[str, int]], specs: dict[str, StateSpec]) -> list[tuple[str, int]]:
    """Select a few members of each kind, so that many steps cost the same for every depth of a model."""
    kinds: dict[object, list[tuple[str, int]]] = {}
    for name, group in members:
        kinds.setdefault((group, specs[name].dtype, _small_shape(specs[name])), []).append((name, group))
    chosen = {member for alike in kinds.values() for member in alike[:_ALIKE]}
    return [member for member in members if member in chosen]


def _difference_of_steps(
    optimizer: Optimizer,
    members: list[tuple[str, int]],
    specs: dict[str, StateSpec],
    num_steps: int,
    is_large: tuple[bool, bool] | None = None,
) -> str | None:
    """Say how steps of all members (name and parameter group) at once and steps of each member differ; None: in no bit.

    `is_large` tells whether members at even and at odd places have huge gradients, beside which the gradients of the others
    are tiny. A bound on a norm of all gradients then holds for some members alone, wherever the bound lies.
    """
    why = "does not update each parameter by itself, or counts its steps"
    together, apart = (_small(optimizer, members, specs, is_tiny=is_large is not None) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        gradients = [
            (torch.randn(leaf.shape, generator=generator, dtype=torch.float64) * _scale(leaf, place, is_large)).to(leaf)
            for place, leaf in enumerate(together[1])
        ]
        _step(together[0], together[1], gradients)
        # In reverse, as the shards of a backward would be updated.
        for index, gradient in reversed(list(enumerate(gradients))):
            _step(apart[0], apart[1][index : index + 1], [gradient])
            # After each step, because a count that begins anew may be equal at the end.
            if _kept(apart[0]) != _kept(together[0]):
                return why
    if has_overlap(_tensors(*together)):
        return "keeps tensors in its state that share memory with each other or with a parameter"
    is_alike = _state(*together) == _state(*apart) and all(map(same_bits, _tensors(*together), _tensors(*apart)))
    return None if is_alike else why


def has_overlap(tensors: Iterable[Tensor]) -> bool:
    """Whether two different tensors lie on the same bytes, so that copies of both would be tensors apart."""
    spans: dict[int, list[tuple[int, int, Tensor]]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        if tensor.layout is torch.strided and tensor.numel():
            extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            start = int(tensor.storage_offset()) * tensor.element_size()
            storage = tensor.untyped_storage()._cdata  # noqa: SLF001 - the storage's identity
            spans.setdefault(storage, []).append((start, start + int(extent) * tensor.element_size(), tensor))
    return any(map(_meet, spans.values()))


def _meet(spans: list[tuple[int, int, Tensor]]) -> bool:
    """Whether tensors of one storage have bytes in common."""
    spans.sort(key=lambda span: span[:2])
    if all(later[0] >= earlier[1] for earlier, later in itertools.pairwise(spans)):
        return False
    # Tensors may lie interleaved, as columns of one matrix.
    counts = torch.zeros(max(end for _, end, _ in spans), dtype=torch.uint8)
    for start, _, tensor in spans:
        size = tensor.element_size()
        own = torch.zeros_like(counts)
        own.as_strided((*tensor.shape, size), (*(step * size for step in tensor.stride()), 1), start).fill_(1)
        counts += own
    return int(counts.max()) > 1


def _scale(leaf: Tensor, place: int, is_large: tuple[bool, bool] | None) -> float:
    if is_large is None:
        return 1.0
    # Squares of float16 must not overflow.
    return min(_HUGE, math.sqrt(torch.finfo(leaf.dtype).max) / 16) if is_large[place % 2] else _TINY


def _small_shape(spec: StateSpec) -> tuple[int, ...]:
    return tuple(min(side, _MAX_SIDE) for side in spec.shape)


def _small(
    optimizer: Optimizer, members: list[tuple[str, int]], specs: dict[str, StateSpec], *, is_tiny: bool
) -> tuple[Optimizer, list[Tensor]]:
    """Make a stand-in over small parameters of the same ranks; tiny values show tiny updates."""
    generator = torch.Generator().manual_seed(1)
    leaves = []
    for name, _ in members:
        values = torch.randn(_small_shape(specs[name]), generator=generator, dtype=torch.float64)
        leaves.append((values * _TINY if is_tiny else values).to(specs[name].dtype).requires_grad_())
    stand_in = stand_in_for(optimizer, members, leaves)
    use_rates(stand_in)
    return stand_in, leaves


def _step(optimizer: Optimizer, leaves: list[Tensor], gradients: list[Tensor]) -> None:
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient.clone()
    optimizer.step()
    # Without gradients, because a step of other leaves must skip these leaves.
    for leaf in leaves:
        leaf.grad = None


def _tensors(optimizer: Optimizer, leaves: list[Tensor]) -> list[Tensor]:
    state = [optimizer.state[leaf] for leaf in leaves]
    return [*leaves, *(entry[key] for entry in state for key in sorted(entry) if isinstance(entry[key], Tensor))]


def _kept(optimizer: Optimizer, outer: tuple[Optimizer, ...] = ()) -> list[object]:
    """Values in attributes, in options of groups and beside the state of parameters, which a count of steps would change.

    Those of optimizers that the optimizer wraps are included.
    """
    attributes = {name: value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")}
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    state: dict[Any, Any] = optimizer.state  # typed by torch as of tensors alone
    beside = [value for key, value in state.items() if not isinstance(key, Tensor) and not isinstance(value, dict)]
    leaves = tree_leaves((attributes, options, beside))
    outer = (*outer, optimizer)
    inner = [leaf for leaf in leaves if isinstance(leaf, Optimizer) and not any(leaf is each for each in outer)]
    values = [_value(leaf) for leaf in leaves if isinstance(leaf, bool | int | float | str | Tensor)]
    return values + [value for each in inner for value in _kept(each, outer)]


def _value(leaf: object) -> object:
    """A value that can be compared; NaN equals NaN. Of a tensor of several elements only the presence counts."""
    if isinstance(leaf, Tensor):
        return repr(leaf.tolist()) if leaf.numel() == 1 else None
    return repr(leaf)


def _state(optimizer: Optimizer, leaves: list[Tensor]) -> list[object]:
    return [
        {key: value for key, value in optimizer.state[leaf].items() if not isinstance(value, Tensor)} for leaf in leaves
    ]
