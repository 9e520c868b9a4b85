"""The pilot of an optimizer update: bytes of its state and of its temporaries, from a step on fake tensors.

Knows optimizers only through `torch.optim.Optimizer`'s own interface, so it holds for a user's class as well.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from hydra_tune.shard.analysis import fake_like
from hydra_tune.shard.capture import StateSpec
from hydra_tune.shard.pilot import StorageTracker, UpdatePilot, aligned, quiet_collector

_LATE = 10_000  # a step by which every optimizer does all that it ever does


def optimizer_pilot(
    optimizer: Optimizer, parameters: dict[str, Tensor], specs: dict[str, StateSpec], *, alignment: int
) -> UpdatePilot:
    """A function that measures this optimizer's update of some of its parameters.

    Args:
        optimizer: a trial's optimizer; it is only read.
        parameters: the optimizer's parameters by canonical name.
        specs: their geometry.
        alignment: bytes to which the device aligns its allocations.
    """
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}

    def measure(names: Sequence[str]) -> tuple[int, int, int]:
        trained = [name for name in names if id(parameters[name]) in group_of]
        if not trained:
            return 0, 0, 0
        members = [(name, group_of[id(parameters[name])]) for name in trained]
        try:
            return _measure(optimizer, members, specs, alignment, fake=True)
        except Exception:  # noqa: BLE001 - an optimizer that reads values cannot run on fakes: measure it for real
            return _measure(optimizer, members, specs, alignment, fake=False)

    return measure


def _measure(
    optimizer: Optimizer, members: list[tuple[str, int]], specs: dict[str, StateSpec], alignment: int, *, fake: bool
) -> tuple[int, int, int]:
    """Two updates of stand-ins: the first makes the state, the second shows a later update's temporaries."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    leaves = []
    for name, _ in members:
        spec = specs[name]
        leaf = fake_like(mode, spec) if fake else torch.zeros(spec.shape, dtype=spec.dtype).requires_grad_()
        leaf.grad = torch.zeros_like(leaf)
        leaves.append(leaf)
    stand_in = stand_in_for(optimizer, members, leaves)
    tracker = StorageTracker(alignment)
    with quiet_collector(), tracker:
        tracker.know(*leaves, *(leaf.grad for leaf in leaves if leaf.grad is not None))
        stand_in.step()
        first = tracker.peak_bytes
        kept = tracker.current_bytes
        tracker.peak_bytes = tracker.current_bytes
        stand_in.step()
        _grow_old(stand_in)
        stand_in.step()
        later = tracker.peak_bytes - kept
    state = [
        aligned(value.untyped_storage().nbytes(), alignment)
        for entries in stand_in.state.values()
        for value in entries.values()
        if isinstance(value, Tensor)
    ]
    return sum(state), later, first


def _grow_old(optimizer: Optimizer) -> None:
    """Some optimizers do more after a number of steps (RAdam adapts from the sixth on)."""
    for entries in optimizer.state.values():
        step = entries.get("step")
        if isinstance(step, Tensor):
            step.fill_(_LATE)
        elif isinstance(step, int | float) and not isinstance(step, bool):
            entries["step"] = type(step)(_LATE)


def stand_in_for(optimizer: Optimizer, members: list[tuple[str, int]], leaves: list[Tensor]) -> Optimizer:
    """An optimizer of the same class and options over other tensors, without calling its constructor."""
    groups = [
        {**group, "params": [leaf for leaf, (_, owner) in zip(leaves, members, strict=True) if owner == index]}
        for index, group in enumerate(optimizer.param_groups)
    ]
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    # A learning-rate scheduler has put its own step there, bound to the trial's optimizer; hooks are the trial's too.
    stand_in.__dict__.pop("step", None)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        stand_in.__dict__[hooks] = OrderedDict()
    stand_in.param_groups = [group for group in groups if group["params"]]
    stand_in.state = defaultdict(dict)
    return stand_in
