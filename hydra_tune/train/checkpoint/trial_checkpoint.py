"""A trial's state between two steps: saved as values and tensors, and restored into a newly built trial.

`Trial` (`train/trial.py`) restores a `StartCheckpoint` into the trial's `TrialObjects` before the first step, and encodes
the state for each snapshot; `LoopTrial` (`train/own_loop/loop_trial.py`) makes the objects of a loop of the user's own.
`weights.py` and `pool/checkpointing/lookup.py` decode checkpoints without a trial. `pool/checkpointing/writer.py` and
`pool/faults/retry.py` make each `StartCheckpoint`. The module must not copy live parameters, buffers or optimizer state: their
blocks may move, and `snapshot.py` copies under the locks of the blocks.

Note: contents of a checkpoint. Parameters and buffers, non-persistent buffers included; the optimizer's state and the
options of its groups, by parameter name; the scheduler; the loss scale; all random streams; the positions of the data's
samplers and generators, now and at the beginning of the present pass; reports and counts; gradients that are left
between two steps; and changed attributes of model and optimizer. Classes are not saved: the factories of the resumed
task build model and optimizer. Of a parameter in a shared base, only the digest is saved: the resumed task builds the same
base, and another base is refused. Older checkpoints lack some entries, so every reader of a newer entry has a default.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from hydra_tune.checkpoint.saved import CheckpointContent
from hydra_tune.checkpoint.values import decode, encode
from hydra_tune.errors import CheckpointError
from hydra_tune.memory.shared.shared_file import digest_of, shared_source
from hydra_tune.shard.capture.batch import same_bits
from hydra_tune.shard.capture.step_capture import named_state
from hydra_tune.shard.verify.plan_check import tensor_attributes
from hydra_tune.shard.verify.separable_optimizers import has_overlap
from hydra_tune.task import TrainTask
from hydra_tune.train.checkpoint.attribute_diff import AttributeTracker
from hydra_tune.train.checkpoint.compatibility import (
    Change,
    changes,
    class_name,
    describe,
    hyperparameters,
    in_words,
    is_essential,
    is_of_the_pass,
    kinds_as_built,
    merged,
    schedule_of,
)

_LOGGER = logging.getLogger("hydra_tune.checkpoints")
_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}
# "step", because a scheduler replaces the method on the instance.
_OPTIMIZER_INTERNALS = frozenset({"state", "param_groups", "defaults", "step"})
_WEIGHT = "model."
"""Prefix of the names of parameters and buffers in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """Position of a trial in its data.

    Attributes:
        epoch: the present pass.
        batches: batches of the pass already trained on.
        is_over: whether the pass is over and reported, but the epoch's scheduler has not stepped.
    """

    epoch: int = 0
    batches: int = 0
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCheckpoint:
    """Checkpoint from which a trial begins.

    Attributes:
        allows_changes: whether the task may differ from the saved task; changed settings take their present values.
        only_weights: whether only parameters and buffers are restored, and training starts from scratch.
    """

    saved: CheckpointContent
    allows_changes: bool = False
    only_weights: bool = False


@dataclass(slots=True, kw_only=True)
class TrialObjects:
    """The objects that a trial's factories have just built, to be saved and restored.

    Args:
        parts: the optimizers of which `optimizer` consists; empty for a single one.
    """

    task: TrainTask
    module: nn.Module
    optimizer: Optimizer
    scheduler: Any
    parts: Sequence[Optimizer] = ()
    _description: dict[str, Any] = field(init=False)
    _module_classes: dict[str, type] = field(init=False)
    _module_attributes: AttributeTracker = field(init=False)
    _optimizer_attributes: AttributeTracker = field(init=False)
    _has_warned: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        tied = [tensor for _, tensor in named_state(self.module)]
        self._description = describe(self.task, self.module, self.optimizer, self.scheduler)
        if self.parts:
            self._description["optimizer"] = [class_name(part) for part in self.parts]
        self._module_classes = _classes(self.module)
        self._module_attributes = AttributeTracker("model", self.module.named_modules, _MODULE_INTERNALS, tied)
        # A lambda over `self` would be a reference cycle and keep the weights alive until the garbage collector runs.
        optimizers = [(str(place), part) for place, part in enumerate(self.parts)] or [("", self.optimizer)]
        self._optimizer_attributes = AttributeTracker("optimizer", lambda: optimizers, _OPTIMIZER_INTERNALS, tied)
        self._warn_of_averages()

    def _warn_of_averages(self) -> None:
        """Log weights that are averaged beside the module, because no checkpoint holds them."""
        own = {id(module) for module in self.module.modules()}
        # Of other modules in closures, such as a frozen teacher, nothing says whether training changes them.
        averages = {
            id(part): (argument, variable)
            for argument, variable, part in self.task.enclosed_parts()
            if isinstance(part, AveragedModel) and id(part) not in own
        }
        for argument, variable in averages.values():
            _LOGGER.warning(
                "%s= of a TrainTask reads the variable %r, which holds an AveragedModel, whose state is in no checkpoint: a "
                "resumed trial averages anew, and so goes on to other numbers; make the average a part of the model "
                "(the page 'Compute metrics' of the documentation)",
                argument,
                variable,
            )

    def state(self) -> dict[str, Any]:
        """Return the state of all objects, without parameters and buffers; its tensors are live, but for options of groups.

        Raises:
            CheckpointError: an attribute has a value that no checkpoint can hold, or parameter groups were added.
        """
        num_groups, num_built = len(self.optimizer.param_groups), len(self._description["groups"])
        if num_groups != num_built:
            raise CheckpointError(
                f"this trial cannot be checkpointed: its optimizer has {num_groups} parameter groups and was built with "
                f"{num_built}, and a resumed trial would train without the added ones; give the optimizer all groups when it "
                "is built, and freeze parameters by requires_grad_ until they train"
            )
        named = dict(named_state(self.module))
        names = {id(tensor): name for name, tensor in self.module.named_parameters()}
        members = [[names.get(id(p)) for p in group["params"]] for group in self.optimizer.param_groups]
        if members != self._description["members"]:
            raise CheckpointError(
                "this trial cannot be checkpointed: a parameter of its optimizer is no longer the module's, or has another "
                "name there, and a resumed trial would train other parameters; keep the parameters that model= has built, "
                "and change their values in place"
            )
        self._refuse_common(names)
        self._refuse_exchanged()
        # An empty entry is an artefact of the optimizer's defaultdict and not state.
        states = [(key, value) for key, value in self.optimizer.state.items() if not isinstance(value, dict) or value]
        others = {key: value for key, value in states if not isinstance(key, Tensor)}
        self._optimizer_attributes.warn_of_ids("the state of the optimizer", others)
        self._warn_of_overlaps()
        module_changes, optimizer_changes = self._module_attributes.changed(), self._optimizer_attributes.changed()
        return {
            "made_for": self._description,
            "trained": [name for name, tensor in named.items() if tensor.requires_grad],
            "not_persistent": [
                f"{path}.{name}".lstrip(".")
                for path, submodule in self.module.named_modules()
                for name in submodule._non_persistent_buffers_set  # noqa: SLF001 - no public name
            ],
            "extra": {path: submodule.get_extra_state() for path, submodule in with_extra_state(self.module)},
            "attributes": module_changes,
            "optimizer": {names[id(p)]: value for p, value in states if isinstance(p, Tensor)},
            "optimizer_other": others,
            "groups": [hyperparameters(group) for group in self.optimizer.param_groups],
            "optimizer_attributes": optimizer_changes,
            "left_gradients": {
                # None for zeros, which an optimizer's own `zero_grad` leaves for each of its parameters.
                name: tensor.grad if tensor.grad.any() else None
                for name, tensor in self._leaves().items()
                if tensor.grad is not None and tensor.grad.layout is torch.strided
            },
            "attribute_details": {
                "model": self._module_attributes.details(module_changes),
                "optimizer": self._optimizer_attributes.details(optimizer_changes),
            },
            "schedule": None if self.scheduler is None else schedule_of(self.scheduler),
        }

    def _warn_of_overlaps(self) -> None:
        """Log, once, state of the optimizer whose tensors share memory, because a resumed trial has them apart."""
        if self._has_warned:
            return
        for name, parameter in self.module.named_parameters():
            entries = self.optimizer.state.get(parameter, {})
            values = entries.values() if isinstance(entries, Mapping) else ()
            tensors = [value for value in values if isinstance(value, Tensor)]
            if tensors and has_overlap([parameter, *tensors]):
                self._has_warned = True
                _LOGGER.warning(
                    "the optimizer's state of parameter %r has tensors that share memory with each other or with the "
                    "parameter: a resumed trial has the tensors apart, and so goes on to other numbers; keep each tensor in "
                    "memory of its own (.clone()), and make views where they are used",
                    name,
                )
                return

    def _refuse_common(self, names: Mapping[int, str]) -> None:
        """Refuse a parameter in two of the optimizers: a checkpoint has the state of one optimizer for each."""
        taken: set[str] = set()
        for part in self.parts:
            own = {names[id(parameter)]: None for group in part.param_groups for parameter in group["params"]}
            for name in own:
                if name in taken:
                    raise CheckpointError(
                        f"this trial cannot be checkpointed: two of its optimizers have parameter {name!r}, and a checkpoint "
                        "cannot tell their states apart; give each parameter to one optimizer, or leave out checkpoint_dir"
                    )
            taken |= own.keys()

    def _refuse_exchanged(self) -> None:
        """Refuse a module that training has exchanged; modules that training has added are left to the code that adds them."""
        classes = _classes(self.module)
        for path, built in self._module_classes.items():
            kind = classes.get(path)
            if kind is not built:
                raise CheckpointError(
                    f"this trial cannot be checkpointed: module {path!r} was built as {built.__name__} and is "
                    f"{'gone' if kind is None else kind.__name__} now, and a resumed trial would go on with the one that "
                    "model= builds; build both in model=, and choose between them by an attribute that is a number or a text"
                )

    def compare(self, state: Mapping[str, Any], *, allows_changes: bool) -> list[Change]:
        """Return the differences between the saved task and the present task.

        Raises:
            CheckpointError: the tasks differ without permission, or in a part that the saved state depends on.
        """
        differences = changes(state["made_for"], self._description)
        essential = [change for change in differences if is_essential(change)]
        if essential:
            raise CheckpointError(
                f"the checkpoint is of another model or optimizer: {in_words(essential)}; go on with the task it was saved "
                "from, or begin another from its weights (warm_start)"
            )
        if differences and not allows_changes:
            raise CheckpointError(
                f"the checkpoint is of another task: {in_words(differences)}; go on with the task it was saved from, or allow "
                "the changes with resume='allow-changes'"
            )
        return differences

    def restore_weights(self, state: Mapping[str, Any]) -> None:
        """Restore parameters and buffers only.

        Raises:
            CheckpointError: the saved weights do not match the model.
        """
        differences = changes(kinds_as_built(state["made_for"]), kinds_as_built(self._description))
        if differences:
            raise CheckpointError(f"the checkpoint has the weights of another model: {in_words(differences)}")
        copy_weights(self.module, state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore everything that needs no plan; the optimizer's per-parameter state and frozen parameters follow later."""
        copy_weights(self.module, state)
        end_laziness(self.module)
        for path, submodule in with_extra_state(self.module):
            if path in state["extra"]:
                submodule.set_extra_state(state["extra"][path])
        # Older checkpoints lack the details.
        details = state.get("attribute_details", {})
        self._module_attributes.restore(state["attributes"], details.get("model"))
        leaves = self._leaves()
        if "left_gradients" in state:
            # Gradients made while the objects were built belong to steps that the saved trial has taken.
            for leaf in leaves.values():
                leaf.grad = None
        for name, gradient in state.get("left_gradients", {}).items():
            if name in leaves:
                leaves[name].grad = torch.zeros_like(leaves[name]) if gradient is None else gradient.clone()
        self._restore_schedule(state)
        for index, group in enumerate(self.optimizer.param_groups):
            self._restore_group(group, state["groups"][index], state["made_for"]["groups"][index])
        self.optimizer.state.update(state["optimizer_other"])
        self._optimizer_attributes.restore(state["optimizer_attributes"], details.get("optimizer"))

    def _leaves(self) -> dict[str, Tensor]:
        """Return the tensors that may have a gradient between two steps: parameters, and tensors in plain attributes."""
        tensors = dict(self.module.named_parameters()) | tensor_attributes(self.module)
        return {name: tensor for name, tensor in tensors.items() if tensor.is_leaf}

    def restore_frozen(self, state: Mapping[str, Any]) -> None:
        """Freeze the parameters frozen in the saved state.

        The trial restores the flags only once there is a plan, because memory is also planned for the parameters that train
        at the beginning (`thaw`). Nothing is frozen if the task now trains other parameters from the beginning.
        """
        if state["made_for"]["trained"] == self._description["trained"]:
            self._train_only(state["trained"])

    @contextmanager
    def frozen(self, state: dict[str, Any]) -> Iterator[None]:
        """Freeze the saved parameters inside the context, before there is a plan.

        On leaving, the present flags are recorded in the state, and the parameters train again as before.
        """
        self.restore_frozen(state)
        yield
        state["trained"] = [name for name, tensor in self.module.named_parameters() if tensor.requires_grad]
        self.thaw(state)

    def thaw(self, state: Mapping[str, Any]) -> None:
        """Let all parameters require gradients for which memory has to be planned.

        These are the parameters that train at the beginning, and those that have begun to train since.
        """
        if state["made_for"]["trained"] == self._description["trained"]:
            self._train_only([*self._description["trained"], *state["trained"]])

    def _train_only(self, names: Iterable[str]) -> None:
        trained = set(names)
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in trained)

    def _restore_schedule(self, state: Mapping[str, Any]) -> None:
        schedule_as_built = state["made_for"]["schedule"]
        if self.scheduler is None or state["made_for"]["scheduler"] != self._description["scheduler"]:
            # Another class of scheduler starts from its beginning.
            return
        # A scheduler's functions are not saved, so the rebuilt scheduler contributes its own.
        fresh = self.scheduler.state_dict()
        self.scheduler.load_state_dict(
            fresh | merged(state["schedule"], schedule_as_built, schedule_of(self.scheduler))
        )

    @staticmethod
    def _restore_group(group: dict[str, Any], saved: Mapping[str, Any], built: Mapping[str, Any]) -> None:
        """Restore the options of a group; an option changed by the task keeps the new value.

        A changed learning rate is scaled by the scheduler's factor so far.
        """
        options_as_rebuilt = hyperparameters(group)
        options: dict[str, Any] = merged(dict(saved), dict(built), options_as_rebuilt)
        if (
            not isinstance(options.get("lr"), Tensor)
            and options_as_rebuilt.get("lr") != built.get("lr")
            and built.get("lr")
        ):
            options["lr"] = (
                options_as_rebuilt["lr"]
                if saved["lr"] == built["lr"]
                else options_as_rebuilt["lr"] * (saved["lr"] / built["lr"])
            )
        for key, value in options.items():
            current_value = group.get(key)
            if isinstance(value, Tensor) and isinstance(current_value, Tensor) and value.shape == current_value.shape:
                # In place, because a scheduler may hold the very tensor.
                current_value.copy_(value)
            else:
                group[key] = value


def _classes(module: nn.Module) -> dict[str, type]:
    """Return the class of each module by path; a lazy module's is the class that its first forward gives it."""
    return {path: getattr(part, "cls_to_become", None) or type(part) for path, part in module.named_modules()}


def encoded(
    module: nn.Module, parts: Mapping[str, Any], shared: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Encode a trial's state as JSON values, and its tensors, uncopied, by name.

    Args:
        module: module whose parameters and buffers are among the tensors.
        parts: the rest of the state.
        shared: digests of parameters in a shared base, by name; their bytes are left out.

    Raises:
        CheckpointError: a value that no checkpoint can hold; the message names the value.
    """
    tensors = {_WEIGHT + name: tensor for name, tensor in named_state(module) if name not in shared}
    facts = {}
    for name, value in {**parts, "shared": dict(shared)}.items():
        try:
            facts[name] = encode(value, name, tensors)
        except CheckpointError as error:
            if name != "feed":
                raise
            raise CheckpointError(
                f"{error}. The value belongs to a sampler, a loader or an IterableDataset of the trial: if it is data, derive "
                "its class from torch.utils.data.Dataset, so that trials share the value and no checkpoint has it; else "
                "give its owner state_dict() and load_state_dict()"
            ) from None
    return facts, tensors


def decoded(saved: CheckpointContent) -> dict[str, Any]:
    """Decode a trial's state from a checkpoint.

    Raises:
        CheckpointError: the checkpoint is not a checkpoint of a trial.
    """
    parts: dict[str, Any] = decode(dict(saved.facts), saved.tensors)
    parts["model"] = {n.removeprefix(_WEIGHT): tensor for n, tensor in saved.tensors.items() if n.startswith(_WEIGHT)}
    parts.setdefault("shared", {})
    missing_parts = {"made_for", "optimizer", "streams", "place"} - parts.keys()
    if missing_parts:
        raise CheckpointError(f"the checkpoint has no {min(missing_parts)!r}, so it is not a trial's checkpoint")
    return parts


def copy_weights(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Set all parameters and buffers of a module that is as its factory built it; `state` is a result of `decoded`.

    The module gets the buffers that training has added, replaced by others of another kind, or set to None.

    Raises:
        CheckpointError: the module has another base.
    """
    saved_tensors, shared = state["model"], state["shared"]
    check_base(module, shared)
    materialize(module, saved_tensors)
    named = dict(named_state(module))
    with torch.no_grad():
        for name, saved in saved_tensors.items():
            tensor = named.get(name)
            if tensor is not None and (tensor.shape, tensor.dtype) == (saved.shape, saved.dtype):
                # A tensor in a shared file would get bytes of its own by the write.
                if shared_source(tensor) is None or not same_bits(tensor.detach(), saved):
                    tensor.copy_(saved)
            else:
                _put_buffer(module, name, saved.clone(), is_persistent=name not in state.get("not_persistent", ()))
    for name in named.keys() - saved_tensors.keys() - shared.keys():
        _put_buffer(module, name, None)


def materialize(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give lazy parameters and buffers the shapes of tensors of the same names, as the first forward does."""
    for name, lazy in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(lazy) and name in tensors:
            lazy.materialize(tensors[name].shape)


def check_base(module: nn.Module, shared: Mapping[str, str]) -> None:
    """Check that a module has the base of a checkpoint; `shared` has the digests of the base's parameters, by name.

    Raises:
        CheckpointError: a parameter is missing, or has other bytes.
    """
    named = dict(module.named_parameters()) if shared else {}
    for name, digest in shared.items():
        parameter = named.get(name)
        source = None if parameter is None else shared_source(parameter)
        found = source.digest if source is not None else None if parameter is None else digest_of(parameter.detach())
        if found != digest:
            raise CheckpointError(
                f"the checkpoint is of another base: parameter {name!r} of the base has digest {digest} in the checkpoint, and "
                f"the one that model= builds {'is missing' if found is None else f'has {found}'}; build the base from which "
                "the trial was trained"
            )


def _put_buffer(module: nn.Module, name: str, tensor: Tensor | None, *, is_persistent: bool = True) -> None:
    path, _, own_name = name.rpartition(".")
    owner = module.get_submodule(path)
    if own_name in owner._buffers:  # noqa: SLF001 - an assignment could run code of the user's
        owner._buffers[own_name] = tensor  # noqa: SLF001
    else:
        owner.register_buffer(own_name, tensor, persistent=is_persistent)


def end_laziness(module: nn.Module) -> None:
    """Make ordinary modules of the lazy ones whose tensors all have shapes, as a forward does; their attributes follow."""
    lazy = [part for part in module.modules() if isinstance(part, LazyModuleMixin)]
    for part in lazy:
        if hasattr(part, "_initialize_hook") and not part.has_uninitialized_params():
            for name in ("_initialize_hook", "_load_hook"):
                getattr(part, name).remove()
                delattr(part, name)
            if part.cls_to_become is not None:
                part.__class__ = part.cls_to_become


def place_after(state: Mapping[str, Any], found: list[Change]) -> DataPosition:
    """Return the place where a trial resumes; a pass under way restarts if a change affects the pass."""
    place = DataPosition(**state["place"])
    if place.batches and not place.is_over and any(is_of_the_pass(change) for change in found):
        return DataPosition(epoch=place.epoch)
    return place


def with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module wherever `get_extra_state` is overridden."""
    for path, submodule in module.named_modules():
        if type(submodule).get_extra_state is not nn.Module.get_extra_state:
            yield path, submodule
