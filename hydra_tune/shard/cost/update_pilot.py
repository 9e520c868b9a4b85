"""The pilot of an optimizer update: measures the bytes of optimizer state and temporaries, by stepping stand-ins.

The module makes stand-ins without calling a constructor, so a user's class is measured as well. `PlanLibrary`
(`shard/partition/plan_cache.py`) makes a pilot for each training step that needs a plan, and the optimizer checks in
`shard/verify/`, `update_seconds` (`optimizer_placement.py`) and rehearsals (`train/timing/fake_trial.py`) step stand-ins
made by this module. `shard/execute/eager_plan.py` makes a pilot for a trial of the user's own code. `ModelState`
(`train/state/model_state.py`) and `fusion/matching/fusion_key.py` ask here about a user's own `zero_grad`.

Note: stand-ins. A step of a stand-in must change nothing of the trial: a stand-in has parameters, state and containers of
its own, and `trying` puts back the objects that a stand-in shares with the trial's optimizer, and the random streams. The
gradients are ones, because a user's optimizer may divide by a norm of gradients, which is hardly ever 0 in training.

Note: foreach. On a GPU, torch's optimizers step all parameters of a group in one operator after the other (`foreach`)
unless the user chooses otherwise, and their temporaries are then as large as all of these parameters together. On the
host, where a pilot steps its stand-ins, the same optimizers step parameter by parameter. So the pilot of an update on a
GPU gives its stand-ins the choice that torch will make there.
"""

import copy
import dis
import inspect
import math
import random
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from hydra_tune.shard.analysis.graph_analysis import fake_like
from hydra_tune.shard.analysis.mutating_ops import overwritten
from hydra_tune.shard.capture.fingerprint import optimizer_key
from hydra_tune.shard.capture.step_capture import StateSpec
from hydra_tune.shard.cost.pilot import StorageTracker, UpdatePilot, aligned, quiet_collector
from hydra_tune.shard.fake.fake_world import RehearsalFakeMode
from hydra_tune.shard.python_state.state_guard import PythonStateUndo, TaskStateGuard
from hydra_tune.shard.verify.process_state import preserved_streams

_ZEROING = (
    "super",
    "zero_grad",
    "param_groups",
    "params",
    "grad",
    "detach_",
    "requires_grad_",
    "zero_",
    "torch",
    "no_grad",
)
_RATE = 0.1  # replaces a rate of 0 at the start of a schedule, with which no difference would show
_LATE = 10_000  # a step number by which every optimizer of torch's does all of its work
# Bytes of parameters, below which running real operators is faster than following the operators on fakes.
_SMALL_BYTES = 4 << 20
_MAX_KNOWN = 1 << 12
_KNOWN: dict[Hashable, tuple[int, int, int]] = {}
"""Bytes of updates by kind of optimizer and geometry of the parameters, for all trials of the process."""

_Make = Callable[[StateSpec], Tensor]
_Known = dict[int, Any]
"""Copies of optimizers and of their parameter groups, by the `id` of the original."""


class _UpdateTracker(StorageTracker):  # type: ignore[no-untyped-call]
    """Skips operators that make no memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        target = overwritten(func, args)
        return super().__torch_dispatch__(func, types, args, kwargs) if target is None else target


def optimizer_pilot(
    optimizer: Optimizer,
    parameters: dict[str, Tensor],
    specs: dict[str, StateSpec],
    *,
    alignment: int,
    uses_foreach: bool = False,
) -> UpdatePilot:
    """Return a function that measures this optimizer's update of some of its parameters; the function holds no parameters.

    The optimizer is only read. Callers of both functions are inside the capture gate, because optimizers ask
    `torch.compiler.is_compiling()`. `uses_foreach`: whether torch's default for the device is to step all parameters of a
    group at once; see the note.
    """
    groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    group_of = {name: groups[id(p)] for name, p in parameters.items() if id(p) in groups}
    copies: _Known = {}
    bare = _without_parameters(optimizer, copies)
    if uses_foreach:
        _choose_foreach(copied for copied in copies.values() if isinstance(copied, Optimizer))
    kind = optimizer_key(optimizer)
    # A user's class may be edited, and existing state affects the measurement, so such an optimizer does not share
    # results.
    is_common = type(optimizer).__module__.partition(".")[0] == "torch" and not optimizer.state
    results = _KNOWN if is_common else {}
    # Weak, because the pilot outlives the trial in a plan.
    original = weakref.ref(optimizer)

    def measure(names: Sequence[str]) -> tuple[int, int, int]:
        """Return the byte counts of an `UpdatePilot` for these parameters; zeros if the optimizer has none of them."""
        members = [(name, group_of[name]) for name in names if name in group_of]
        if not members:
            return 0, 0, 0
        geometry = tuple((specs[name].shape, specs[name].stride, specs[name].dtype, group) for name, group in members)
        key = kind, uses_foreach, alignment, geometry
        measured_bytes = results.get(key)  # a deep model has many groups of parameters that differ only in their names
        if measured_bytes is None:
            if len(results) >= _MAX_KNOWN:
                results.clear()
            measured_bytes = results[key] = _measured(bare, members, specs, alignment, original())
        return measured_bytes

    return measure


def _choose_foreach(optimizers: Iterable[Optimizer]) -> None:
    """Choose `foreach` in each parameter group whose step would choose it on a GPU; see the note."""
    for optimizer in optimizers:
        # An optimizer of torch without this function, e.g. Adafactor, steps parameter by parameter on GPUs, too.
        modules = [sys.modules.get(kind.__module__) for kind in type(optimizer).__mro__ if kind is not Optimizer]
        if not any(hasattr(module, "_default_to_fused_or_foreach") for module in modules):
            continue
        for index, group in enumerate(optimizer.param_groups):
            if group.get("foreach", False) is None and group.get("fused") is None:
                group["foreach"] = True
                group["foreach"] = _steps_a_number(optimizer, index) or None


def _steps_a_number(optimizer: Optimizer, index: int) -> bool:
    """Whether a step with a parameter group's options works; Adam has no `foreach` for a rate that is a tensor."""
    leaf = torch.zeros(1, requires_grad=True)
    leaf.grad = torch.ones_like(leaf)
    with preserved_streams(), suppress(Exception):
        _stand_in(optimizer, [("", index)], [leaf]).step()
        return True
    return False


def _measured(
    optimizer: Optimizer,
    members: list[tuple[str, int]],
    specs: dict[str, StateSpec],
    alignment: int,
    original: Optimizer | None,
) -> tuple[int, int, int]:
    """Measure by the quickest way that works.

    Parameters that are small together are real tensors. Others are stand-ins without bytes, or real where no such step works.
    """
    nbytes = sum(math.prod(specs[name].shape) * specs[name].dtype.itemsize for name, _ in members)
    ways: tuple[_Make, ...] = (_meta_leaf, partial(fake_like, RehearsalFakeMode())) if nbytes > _SMALL_BYTES else ()
    for make in ways:
        # An optimizer that reads values, or has kernels for some devices only, may fail with some kinds of stand-ins.
        with suppress(Exception), trying(optimizer, original):
            return _measure(optimizer, members, specs, alignment, make)
    with trying(optimizer, original):
        return _measure(optimizer, members, specs, alignment, _real_leaf)


def _real_leaf(spec: StateSpec) -> Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype).zero_().requires_grad_()


def _meta_leaf(spec: StateSpec) -> Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta").requires_grad_()


def _measure(
    optimizer: Optimizer, members: list[tuple[str, int]], specs: dict[str, StateSpec], alignment: int, make: _Make
) -> tuple[int, int, int]:
    """Step stand-ins: the first update creates the state, later updates show the temporaries of a later update."""
    leaves = []
    for name, _ in members:
        leaf = make(specs[name])
        leaf.grad = torch.ones_like(leaf)
        leaves.append(leaf)
    tracker = _UpdateTracker(alignment)
    with quiet_collector(), tracker:
        tracker.know(*leaves, *(leaf.grad for leaf in leaves if leaf.grad is not None))
        stand_in = _stand_in(optimizer, members, leaves)
        stand_in.step()
        first_peak = tracker.peak_bytes
        state_bytes = tracker.current_bytes
        # The peak starts again from the state, so that the first update does not count for the later updates.
        tracker.peak_bytes = tracker.current_bytes
        if not is_of_torch(optimizer):  # torch's own do as much late as early, or more
            stand_in.step()
        _grow_old(stand_in)
        stand_in.step()
        later_bytes = tracker.peak_bytes - state_bytes
    state = [
        aligned(value.untyped_storage().nbytes(), alignment)
        for entries in _of_parameters(stand_in)
        for value in entries.values()
        if isinstance(value, Tensor)
    ]
    return sum(state), later_bytes, first_peak


def _of_parameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the state of each parameter; an optimizer may keep values of its own beside them."""
    return [entries for entries in optimizer.state.values() if isinstance(entries, dict)]


def _grow_old(optimizer: Optimizer) -> None:
    """Raise the step counters: some optimizers do more after a number of steps (RAdam adapts from the sixth on)."""
    for entries in _of_parameters(optimizer):
        step = entries.get("step")
        if isinstance(step, Tensor):
            step.fill_(_LATE)
        elif isinstance(step, int | float) and not isinstance(step, bool):
            entries["step"] = type(step)(_LATE)


def _without_parameters(optimizer: Optimizer, known: _Known | None = None) -> Optimizer:
    """Copy class and options, and the geometry of state created by the constructor; the copy may outlive the trial."""
    known = {} if known is None else known
    bare = known[id(optimizer)] = _shell(optimizer)
    bare.param_groups = [known.setdefault(id(group), {**group, "params": []}) for group in optimizer.param_groups]
    _wrap(optimizer, bare, lambda inner: _without_parameters(inner, known), known)
    if _has_state_at_once(optimizer):
        for group, options in zip(optimizer.param_groups, bare.param_groups, strict=True):
            for p in {(p.shape, p.stride(), p.dtype): p for p in group["params"] if optimizer.state.get(p)}.values():
                leaf = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
                bare.state[leaf] = _state_like(optimizer, p, leaf)
                options["params"].append(leaf)
    return bare


def stand_in_for(optimizer: Optimizer, members: list[tuple[str, int]], leaves: list[Tensor]) -> Optimizer:
    """Return an optimizer of the same class and options over other tensors, without calling the constructor.

    `members` has name and parameter group of each of the `leaves`. The optimizer is only read.
    """
    if _has_state_at_once(optimizer):
        return _stand_in(optimizer, members, leaves)
    return _over(optimizer, members, leaves)


def use_rates(stand_in: Optimizer) -> None:
    """Give each parameter group of a stand-in a learning rate in place of a rate of 0, with which a schedule may begin."""
    for options in stand_in.param_groups:
        rate = options.get("lr")
        if rate is not None and not rate:
            options["lr"] = torch.full_like(rate, _RATE) if isinstance(rate, Tensor) else type(rate)(_RATE)


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether the class is one of torch's own optimizers."""
    return type(optimizer).__module__.startswith("torch.optim.")


@contextmanager
def trying(optimizer: Optimizer, original: Optimizer | None = None) -> Iterator[None]:
    """Context for steps of stand-ins, at whose end the objects shared with a trial's optimizer are as before.

    So are the random streams. For an optimizer of torch's own, whose steps change no shared object, only the streams
    are put back. Where `optimizer` is a copy without parameters, `original` is the trial's optimizer.
    """
    with preserved_streams():
        if is_of_torch(optimizer):
            yield
            return
        shared = _shared(optimizer)
        # Optimizers of other trials may change their class at any time.
        of_classes = tuple(f"{name}." for name, value in shared.items() if isinstance(value, type))
        tasks = TaskStateGuard.tasks_of(optimizer if original is None else original)
        with PythonStateUndo(shared, *tasks).undone(of_classes):
            yield


def _shared(optimizer: Optimizer, outer: tuple[Optimizer, ...] = ()) -> dict[str, object]:
    """Return the classes and objects, by name, that a stand-in has in common with an optimizer; see `_own`."""
    attributes = {name: value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")}
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    leaves = list({id(leaf): leaf for leaf in tree_leaves((attributes, options))}.values())
    outer = (*outer, optimizer)
    name = type(optimizer).__name__
    shared: dict[str, object] = {name: type(optimizer)}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Optimizer):
            shared |= {} if any(leaf is each for each in outer) else _shared(leaf, outer)
        elif not isinstance(leaf, Tensor | nn.Module | torch.Generator | random.Random | set):
            shared[f"object {number} of {name}"] = leaf
    return shared


def zeroes_more_than_gradients(optimizer: Optimizer) -> bool:
    """Whether the user's own `zero_grad` may do anything else than pass the call on or drop or zero gradients."""
    if "zero_grad" in vars(optimizer):
        return True
    inner = {name: value for name, value in vars(optimizer).items() if isinstance(value, Optimizer)}
    kinds = [kind for kind in type(optimizer).__mro__ if kind is not Optimizer and "zero_grad" in vars(kind)]
    codes = [getattr(inspect.unwrap(vars(kind)["zero_grad"]), "__code__", None) for kind in kinds]
    if any(code is None or not _only_zeroes(code, inner) for code in codes):
        return True
    return bool(kinds) and any(map(zeroes_more_than_gradients, inner.values()))


def _only_zeroes(code: CodeType, inner: Collection[str]) -> bool:
    """Whether the code of a `zero_grad` only passes the call on, or only sets gradients to None or to zero."""
    computes = any(step.opname in ("BINARY_OP", "STORE_SUBSCR") for step in dis.get_instructions(code))
    names = {*code.co_names, *(word for word in code.co_consts if isinstance(word, str) and word.isidentifier())}
    return not computes and {*_ZEROING, *inner}.issuperset(names) and {"__class__"}.issuperset(code.co_freevars)


def zeroes_by_gradients(optimizer: Optimizer) -> bool:
    """Whether the user's own `zero_grad` keeps other values after a step with a gradient than after one without."""
    if "zero_grad" in vars(optimizer):
        return False  # bound to the trial's own parameters, and so cannot be tried
    # No value that a `zero_grad` may have as a constant.
    without, with_gradient = (_zeroed(optimizer, gradient)[1] for gradient in (None, torch.full((1,), 0.3721)))
    return without != with_gradient


def keeps_gradients(optimizer: Optimizer) -> bool:
    """Whether the user's own `zero_grad` leaves gradients where torch's would set them to None."""
    if "zero_grad" in vars(optimizer):
        # Put on the object, and bound to the trial's own parameters.
        return True
    if type(optimizer).zero_grad is Optimizer.zero_grad:
        return False
    return _zeroed(optimizer, torch.ones(1))[0].grad is not None


def _zeroed(optimizer: Optimizer, gradient: Tensor | None) -> tuple[Tensor, str]:
    """Call `zero_grad` of a stand-in; return its parameter, and in words what the parameter and the stand-in keep."""
    leaf = torch.zeros(1, requires_grad=True)
    leaf.grad = gradient
    kept: list[Any] = []
    with suppress(Exception), trying(optimizer):  # an error of the user's own code appears where the code is used
        stand_in = _over(optimizer, [("", 0)], [leaf])
        stand_in.zero_grad()
        kept = [value for name, value in vars(stand_in).items() if name not in ("param_groups", "state")]
        kept += [value for group in stand_in.param_groups for name, value in group.items() if name != "params"]
    return leaf, repr((tree_leaves(kept), leaf.detach().tolist()))


def _stand_in(optimizer: Optimizer, members: list[tuple[str, int]], leaves: list[Tensor]) -> Optimizer:
    """As `stand_in_for`; a leaf has state if a parameter of its group has state."""
    stand_in = _over(optimizer, members, leaves)
    for leaf, (_, owner) in zip(leaves, members, strict=True):
        parameters = [p for p in optimizer.param_groups[owner]["params"] if optimizer.state.get(p)]
        like = max(parameters, key=lambda p: (p.shape == leaf.shape, p.dim() == leaf.dim()), default=None)
        if like is not None:
            stand_in.state[leaf] = _state_like(optimizer, like, leaf)
    return stand_in


def _over(
    optimizer: Optimizer, members: list[tuple[str, int]], leaves: list[Tensor], known: _Known | None = None
) -> Optimizer:
    """Copy class, options and attributes over other tensors, without any state."""
    known = {} if known is None else known
    copied_optimizer = known[id(optimizer)] = _shell(optimizer)
    attributes = {
        name: value for name, value in vars(copied_optimizer).items() if name not in ("param_groups", "state")
    }
    copied_optimizer.__dict__.update({name: _own(value) for name, value in attributes.items()})
    for index, group in enumerate(optimizer.param_groups):
        if id(group) not in known:
            known[id(group)] = {
                **{key: _own(value) for key, value in group.items() if key != "params"},
                "params": [leaf for leaf, (_, owner) in zip(leaves, members, strict=True) if owner == index],
            }
    groups: list[dict[str, Any]] = [known[id(group)] for group in optimizer.param_groups]
    copied_optimizer.param_groups = [group for group in groups if group["params"]]

    def over(inner: Optimizer) -> Optimizer:
        places = _places(optimizer, inner)
        chosen = [
            (leaf, (name, places[owner]))
            for leaf, (name, owner) in zip(leaves, members, strict=True)
            if owner in places
        ]
        return _over(inner, [member for _, member in chosen], [leaf for leaf, _ in chosen], known)

    _wrap(optimizer, copied_optimizer, over, known)
    return copied_optimizer


def _wrap(optimizer: Optimizer, copied: Optimizer, made: Callable[[Optimizer], Optimizer], known: _Known) -> None:
    """Give the copy of an optimizer that wraps others (as Lookahead does) copies of these: a step would move the trial's."""

    def inner_copy(inner: Any) -> Any:
        """Return the copy of a wrapped optimizer, made at most once; any other value as it is."""
        if not isinstance(inner, Optimizer):
            return inner
        if id(inner) not in known:
            made(inner)
            if inner.param_groups is optimizer.param_groups:
                known[id(inner)].param_groups = copied.param_groups
            if inner.state is optimizer.state:
                known[id(inner)].state = copied.state
        return known[id(inner)]

    for name, value in list(vars(copied).items()):
        if name not in ("param_groups", "state") and any(isinstance(leaf, Optimizer) for leaf in tree_leaves(value)):
            copied.__dict__[name] = tree_map(inner_copy, value)


def _places(optimizer: Optimizer, inner: Optimizer) -> dict[int, int]:
    """Return the index of each parameter group among those of a wrapped optimizer, which hold the same dicts as a rule."""
    indices = {id(group): index for index, group in enumerate(inner.param_groups)}
    places = {index: indices[id(group)] for index, group in enumerate(optimizer.param_groups) if id(group) in indices}
    if not places and len(inner.param_groups) == len(optimizer.param_groups):
        return {index: index for index in range(len(inner.param_groups))}
    return places


def _shell(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same class with the same attributes, over nothing and without state; nobody may step it."""
    # Without the constructor, whose arguments are unknown and which may refuse an empty list of parameters.
    shell = object.__new__(type(optimizer))
    shell.__dict__.update(optimizer.__dict__)
    # A learning-rate scheduler replaces `step` by a method bound to the trial's optimizer; hooks belong to the trial as
    # well.
    shell.__dict__.pop("step", None)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        shell.__dict__[hooks] = OrderedDict()
    shell.param_groups = []
    shell.state = defaultdict(dict)
    return shell


def _own(value: Any) -> Any:
    """Copy what a step may change in place: containers, tensors and generators. Parameters and other objects are shared."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf if leaf.requires_grad else leaf.clone()
        if isinstance(leaf, set):
            return leaf.copy()
        return copy.deepcopy(leaf) if isinstance(leaf, torch.Generator | random.Random) else leaf

    return tree_map(copied, value)


def _has_state_at_once(optimizer: Optimizer) -> bool:
    """Whether the constructor creates the state, as `Adagrad` did up to torch 2.11: a step fails for a new parameter."""
    members = ((p, index) for index, group in enumerate(optimizer.param_groups) for p in group["params"])
    parameter_with_state, group = next(((p, index) for p, index in members if optimizer.state.get(p)), (None, 0))
    if parameter_with_state is None:
        return False
    leaf = torch.zeros([2] * parameter_with_state.dim(), dtype=parameter_with_state.dtype)
    leaf.grad = torch.ones_like(leaf)
    probe = _over(optimizer, [("", group)], [leaf])
    with trying(optimizer):
        try:
            probe.step()
        except KeyError:
            return True
        except Exception:  # noqa: BLE001 - another stand-in will show the error
            return False
    return False


def _state_like(optimizer: Optimizer, parameter: Tensor, leaf: Tensor) -> dict[str, Any]:
    """State for a tensor, of the kind kept by an optimizer for another tensor."""
    return {
        key: _entry_like(value, parameter, leaf) if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in optimizer.state[parameter].items()
    }


def _entry_like(value: Tensor, parameter: Tensor, leaf: Tensor) -> Tensor:
    if value.shape == parameter.shape:
        return torch.zeros_like(leaf, dtype=value.dtype, requires_grad=False)
    # Scalars such as step counters stay on the host, where torch's optimizers keep and read them.
    return torch.zeros(value.shape, dtype=value.dtype, device="cpu" if value.dim() == 0 else leaf.device)
