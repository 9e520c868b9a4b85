"""A trial's long-lived tensors as groups: parameters, buffers and optimizer state of each shard.

`OwnCodeTrial` (`train/own_code_trial.py`) makes a `ModelState` for the plan of a trial, `GroupTrial`
(`fusion/group/group_trial.py`) for the stacked model of a group, and `TrialRehearsal` (`train/timing/fake_trial.py`) for a
forecast. Each unit (`train/loop/batch_units.py`) gets the groups of its shard from the `ModelState`; update units
(`train/loop/training_batch.py`, `fusion/group/multi_step_unit.py`) call `update`, and `OptimizerStep`
(`train/loop/optimizer_step.py`) calls `end_step`. Planned steps of groups (`fusion/runtime/step_arguments.py`) change the
tensors themselves, and call `touched`. `TensorGroups` (`tensor_groups.py`) has the groups, and the rules of threads and locks;
this module adds the optimizer's steps and state, and the user's own code. The module must not know the order of units.

Note: the user's own code. Where units run the user's own step, parameters, buffers and optimizer state form a group each.
The user's code may replace any of the tensors, add tensors, and create optimizer state at any time, so a burst
(`train/loop/burst.py`) calls `refresh`, which checks whether the groups still hold the present tensors. Where the device
computes with the host's own tensors, the groups are loose (`memory/block.py`): none of the user's tensors moves before
something else needs the room.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hydra_tune.devices.device import Device
from hydra_tune.errors import TaskError
from hydra_tune.memory.block import BlockKind, TensorBlock
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.memory.lease import Lease
from hydra_tune.memory.pressure import not_repeatable
from hydra_tune.memory.trial_context import TrialMemoryContext
from hydra_tune.shard.analysis.module_mutation import check_state, check_still_frozen
from hydra_tune.shard.capture.step_capture import named_state, state_specs
from hydra_tune.shard.cost.update_pilot import keeps_gradients, zeroes_by_gradients, zeroes_more_than_gradients
from hydra_tune.shard.partition.plan import Shard, ShardPlan
from hydra_tune.shard.partition.subgraph import ShardGraph
from hydra_tune.shard.python_state.code_names import mentioned_names
from hydra_tune.shard.verify.separable_optimizers import check_separable, has_overlap
from hydra_tune.train.loop.gradient_rules import GradientProcessor
from hydra_tune.train.state.tensor_groups import TensorGroups, check_storages

# Key of the optimizer state's single group, where units run the user's own code.
_ALL = ("all",)

STEP_BEGUN = "the optimizer's step had begun, which changes parameters and state in place"
"""The reason for not repeating an update."""


class ModelState(TensorGroups):
    """Parameters, buffers and optimizer state of a trial.

    Args:
        module, plan, device, host, tenant, before, runs_own_code, may_share: as of `TensorGroups`.
        optimizer: the trial's optimizer.
        is_separable: whether the optimizer is known to step each parameter by itself; else an optimizer that steps
            parameters apart is checked.

    Attributes:
        recomputed: graphs of shards whose activations are no longer kept, because memory has run out.
        around_step: returns the context manager entered around each step of the optimizer; called with the device of
            the step, None on the host.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        plan: ShardPlan,
        device: Device,
        host: HostTier | None = None,
        tenant: TrialMemoryContext | None = None,
        before: "ModelState | None" = None,
        *,
        runs_own_code: bool = False,
        is_separable: bool = False,
        may_share: bool = False,
    ) -> None:
        super().__init__(module, plan, device, host, tenant, before, runs_own_code=runs_own_code, may_share=may_share)
        self.recomputed = list[ShardGraph]()
        self.around_step: Callable[[Device | None], AbstractContextManager[object]] = nullcontext
        self.optimizer = optimizer
        self._frozen = {
            name: tensor
            for name, tensor in self.tensors.items()
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        }
        self._names = names = {id(tensor): name for name, tensor in self.tensors.items()}
        self._in_order = _in_order(optimizer)
        # In the module's order. Lazy parameters have no name yet.
        self._optimized = tuple(map(names.__getitem__, filter(set(self._in_order).__contains__, names)))
        self._keeps_gradients = not runs_own_code and keeps_gradients(optimizer)
        # Parameters of the optimizer that have had a gradient, and those that have one in the present step.
        self._ever_stepped: set[str] = set()
        self._stepped: set[str] = set()
        # `PlanLibrary.prepare` has checked the optimizer for a plan of several shards.
        self._is_separable = is_separable or len(plan.shards) > 1
        if not runs_own_code:
            for name in self._optimized:
                # Zeros that the user's own `zero_grad` has left; a shard's update would step them too.
                if self.tensors[name].grad is not None:
                    self._ever_stepped.add(name)
                    self.tensors[name].grad = None
        self._adopted: dict[tuple[str, str], Tensor] = {}
        # Tensors in common may lie in another trial's buffer, so a shared storage is no mistake there.
        shared_ids = self.readers.in_common(list(self.tensors.values()))
        private_tensors = {name: tensor for name, tensor in self.tensors.items() if id(tensor) not in shared_ids}
        check_storages(private_tensors, may_share=self._is_loose)
        try:
            self._build(plan, device)
        except BaseException:
            # The groups built so far already count on the host's ledger.
            self.drop()
            raise
        if before is not None and before.watcher is not None:
            self.watch(before.watcher)

    def activations_of(self, shard: Shard) -> str:
        """Return how the activations of a shard are handled now: as planned, or "recompute" once memory has run out."""
        return "recompute" if any(graph is shard.graph for graph in self.recomputed) else shard.activations

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of a parameter or buffer."""
        return self._names[id(tensor)]

    def optimized(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Select the values of the optimizer's parameters, in the module's order."""
        return {name: values[name] for name in self._optimized if name in values}

    def check(self, *, may_thaw: bool = False) -> None:
        """Check the module after the user's own code has run.

        Args:
            may_thaw: whether frozen parameters may begin to train, because the code has run between two steps.

        Raises:
            TaskError: the code has added, removed or replaced parameters or buffers, or trains a frozen parameter.
        """
        check_state(self.tensors, self.module)
        self._own_again(self.shared.lost(self.tensors))
        self._collect(self._blocks(), "the model's forward")
        if may_thaw:
            self.check_optimized()
        else:
            self.check_frozen()

    def check_frozen(self) -> None:
        """Refuse, by a `TaskError`, a step if a frozen parameter trains now, or the optimizer has other parameters."""
        check_still_frozen(self._frozen)
        self.check_optimized()

    @property
    def has_thawed(self) -> bool:
        """Whether a parameter requires gradients that did not when the state was made."""
        return any(tensor.requires_grad for tensor in self._frozen.values())

    def check_optimized(self) -> None:
        """Refuse, by a `TaskError`, a step of an optimizer that has other parameters now."""
        if _in_order(self.optimizer) != self._in_order:
            raise TaskError(
                "the optimizer got other parameters after the trial began, which the memory plan cannot follow; give all "
                "parameters to the optimizer when optimizer= returns, with a rate of 0 for those that train later"
            )

    def update(self, names: tuple[str, ...], gradients: dict[str, Tensor], rules: GradientProcessor) -> None:
        """Take one optimizer step for some parameters; the optimizer skips all others, which have no gradient.

        For every optimizer with a per-parameter update, the result equals, to the last bit, a single step over all
        parameters.
        """
        self._step(gradients, rules)
        self.touched(name for name in names if name in gradients)
        for group in self.optimizer_groups(names):
            group.dirty = True

    def _step(self, gradients: dict[str, Tensor], rules: GradientProcessor) -> None:
        if self._stepped and not self._is_separable:
            # A parameter that the last batch has not used is stepped by itself, after those that it has used.
            need = "the batches of one optimizer step train different parameters, which are stepped one set after the other"
            check_separable(self.optimizer, dict(self.module.named_parameters()), state_specs(self.module), need)
            self._is_separable = True
        self._stepped |= gradients.keys()
        for name, gradient in gradients.items():
            self.tensors[name].grad = gradient
        try:
            if clipped := [self.tensors[name] for name in self.optimized(gradients)]:
                in_groups = (self._names[each] for each in self._in_order if each in self._names)
                rules.clip(clipped, [*in_groups] if rules.clips_by_groups else self._optimized)
            self.optimizer.step()
            self._collect([*self.groups(gradients), *self.optimizer_groups(tuple(gradients))], "the optimizer's step")
        finally:
            for name in gradients:
                # Even after an error: a left-over gradient would be applied by the next shard's update.
                self.tensors[name].grad = None

    @functools.cached_property
    def has_own_zero_grad(self) -> bool:
        """Whether the optimizer needs a call of `zero_grad` after each step.

        Raises:
            TaskError: `zero_grad` reads gradients.
        """
        if not zeroes_more_than_gradients(self.optimizer):
            return False
        if zeroes_by_gradients(self.optimizer):
            raise TaskError(
                f"zero_grad() of {type(self.optimizer).__name__} reads .grad, and a model that is cut has no gradients left "
                "after its step; read the gradients in step(), or raise device_memory until the trial runs as it is"
            )
        return True

    def zero_grad(self) -> None:
        """Call the user's own `zero_grad`, which may count, where a plain loop calls it; the gradients are None already."""
        code = getattr(self.optimizer.zero_grad, "__code__", None)
        # By its names, as of a scheduler: bringing the whole model home for each step takes long.
        is_harmless = code is not None and mentioned_names(code).isdisjoint({"params", "state"})
        with nullcontext() if is_harmless else self.writing():
            self.optimizer.zero_grad()

    def end_step(self) -> None:
        """Refuse a step in which a plain loop would update parameters without a gradient, from zeros of earlier steps.

        Raises:
            TaskError: the optimizer's `zero_grad` leaves gradients, and a parameter has had one in an earlier step alone.
        """
        stepped, self._stepped = self._stepped, set()
        if not self._keeps_gradients:
            return
        self._ever_stepped |= stepped
        missing = next((name for name in self._optimized if name in self._ever_stepped - stepped), None)
        if missing is not None:
            raise TaskError(
                f"{type(self.optimizer).__name__}.zero_grad() leaves zeros as gradients, and {missing!r} got no gradient in a "
                "step: a plain loop steps such a parameter all the same, and a trial that is cut or runs whole cannot; have "
                "zero_grad() leave None, as Optimizer.zero_grad() does, use all parameters in each step, or raise "
                "device_memory until the trial runs as it is"
            )

    def _collect(self, groups: Iterable[TensorBlock], whose: str) -> None:
        """Copy tensors back into the groups, where the user's code has given tensors other memory (`p.data = ...`).

        Raises:
            TaskError: a tensor has another shape or dtype now.
        """
        for group in groups:
            for tensor in group.collect():
                name = self._names.get(id(tensor))
                subject = "a tensor of its state" if name is None else repr(name)
                raise TaskError(
                    f"{whose} has given {subject} another shape or dtype ({tuple(tensor.shape)}, {tensor.dtype}), which the "
                    "memory plan of a trial that is cut cannot follow; keep both as they are when model= returns, and convert "
                    "the result instead"
                )

    def update_on_host(
        self,
        names: tuple[str, ...],
        gradients: dict[str, Tensor],
        rules: GradientProcessor,
        device: Device,
        over: Callable[[int, int], None],
    ) -> None:
        """Start an update on the host, for parameters with optimizer state that never leaves the host.

        The device copies of the parameters are given up.

        Args:
            names: the parameters.
            gradients: on the host; emptied when the update is over.
            rules: rules for the gradients.
            device: the device beside which the update runs.
            over: as of `HostUpdateQueue.start`.
        """
        step = functools.partial(self._step_on_host, gradients, rules)
        self._host_updates.start(device, self.groups(names), step, over)

    def _step_on_host(self, gradients: dict[str, Tensor], rules: GradientProcessor) -> None:
        try:
            with not_repeatable(STEP_BEGUN), self.around_step(None):
                self._step(gradients, rules)
        finally:
            gradients.clear()

    def stand_ins(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return stand-ins for the trainable parameters among the names: separate tensors in the same memory.

        A backward leaves gradients on the stand-ins, so no step of the optimizer applies a gradient too early.
        """
        tensors = {name: self.tensors[name] for name in names}
        return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items() if tensor.requires_grad}

    def adopt_optimizer_state(self, names: tuple[str, ...], device: Device, lease: Lease) -> None:
        """Move state tensors that the optimizer has just created into a group on the host, on the device's copy thread.

        Where a new tensor stands in the place of an adopted tensor of the same shape and dtype, the adopted tensor takes
        the new values and its place again. A group with a tensor whose place was taken by another shape or dtype leaves
        the lease; the group's other tensors join the new group.
        """
        fresh: dict[tuple[str, str], Tensor] = {}
        replaced: dict[tuple[str, str], Tensor] = {}
        for name in names:
            entries = self.optimizer.state.get(self.tensors[name], {})
            for key, value in entries.items():
                earlier_tensor = self._adopted.get((name, key))
                # The cheapest test first: it holds at every step but the first.
                if earlier_tensor is value:
                    continue
                if not isinstance(value, Tensor) or value.device.type != device.torch_device.type:
                    # Plain numbers, and the host-side step counters of GPU optimizers.
                    continue
                if earlier_tensor is not None and _alike(earlier_tensor, value):
                    # An optimizer that makes new state at each step: its place in the group is taken already.
                    replaced[name, key] = value
                else:
                    fresh[name, key] = value
        if replaced:
            self._copy_into_place(replaced, fresh)
        if not fresh:
            return
        self._check_apart(dict.fromkeys(name for name, _ in fresh))
        # The new tensors are copied on another thread, so the kernels that fill them must have ended.
        device.synchronize()
        outdated = {id(self._adopted.pop(place)) for place in fresh if place in self._adopted}
        stale_groups = [
            group
            for group in self.optimizer_groups(names)
            if outdated and not outdated.isdisjoint(map(id, group.tensors))
        ]
        moving = {id(tensor) for group in stale_groups for tensor in group.tensors}
        fresh |= {place: tensor for place, tensor in self._adopted.items() if id(tensor) in moving}
        self._group_optimizer_state(names, fresh, device)
        for members, groups in self._optimizer_groups.items():
            self._optimizer_groups[members] = [group for group in groups if group not in stale_groups]
        for group in stale_groups:
            lease.exchange(group, None)

    def _copy_into_place(self, replaced: dict[tuple[str, str], Tensor], fresh: dict[tuple[str, str], Tensor]) -> None:
        """Copy new state into the tensors that are in groups already."""
        places = {self._adopted[place].data_ptr() for place in replaced}
        for state in (replaced, fresh):
            for (name, key), value in state.items():
                # Some optimizers hand tensors on from key to key, and a copy below would overwrite such a tensor.
                if value.layout is torch.strided and value.data_ptr() in places:
                    state[name, key] = self.optimizer.state[self.tensors[name]][key] = value.clone()
        for (name, key), value in replaced.items():
            earlier_tensor = self._adopted[name, key]
            earlier_tensor.copy_(value)
            self.optimizer.state[self.tensors[name]][key] = earlier_tensor

    def _check_apart(self, names: Iterable[str]) -> None:
        """Refuse optimizer state on memory of other state or of its parameter: the groups would hold copies apart.

        Raises:
            TaskError: two tensors share memory.
        """
        for name in names:
            entries = self.optimizer.state.get(self.tensors[name], {})
            values = entries.values() if isinstance(entries, Mapping) else ()
            if has_overlap([self.tensors[name], *(value for value in values if isinstance(value, Tensor))]):
                raise TaskError(
                    f"{type(self.optimizer).__name__} keeps tensors in the state of {name!r} that share memory with each other "
                    "or with the parameter, and would come apart where the state moves; keep each of them in memory of its "
                    "own (.clone()), and make views where they are used"
                )

    def adopt_saved(self, saved: Mapping[str, Mapping[str, Any]], device: Device) -> None:
        """Adopt optimizer state from a checkpoint, in groups on the host unless the state never leaves the host.

        Args:
            saved: state by parameter name and key, on the host.
            device: any device of the pool.
        """
        for name, entries in saved.items():
            self.optimizer.state[self.tensors[name]] = {**self.optimizer.state.get(self.tensors[name], {}), **entries}
        self._put_in_places(saved)
        if self._runs_own_code:
            self._group_saved_state(saved, device)
            return
        shards = [shard for shard in self.layout.plan.shards if shard.trained]
        on_devices = [shard.trained for shard in shards if not shard.cost.updates_on_host]
        other_names = tuple(name for name in saved if not any(name in shard.trained for shard in shards))
        for names in (*on_devices, other_names):
            group_tensors = {
                (name, key): value
                for name in names
                for key, value in self.optimizer.state.get(self.tensors[name], {}).items()
                if isinstance(value, Tensor)
                and (name, key) not in self._adopted
                and (device.torch_device.type == "cpu" or not self._stays_on_host(name, key))
            }
            if group_tensors:
                self._group_optimizer_state(names, group_tensors, device)

    def _put_in_places(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Write state into the tensors of the groups that held such state before, as of a member that has left a group."""
        values: dict[int, Tensor] = {}
        for name, entries in saved.items():
            for key, value in entries.items():
                earlier_tensor = self._adopted.pop((name, key), None)
                if earlier_tensor is None or not isinstance(value, Tensor):
                    continue
                if (earlier_tensor.shape, earlier_tensor.dtype) == (value.shape, value.dtype):
                    values[id(earlier_tensor)] = value
                    self._adopted[name, key] = self.optimizer.state[self.tensors[name]][key] = earlier_tensor

        def write(tensor: Tensor) -> None:
            if id(tensor) in values:
                tensor.copy_(values[id(tensor)])

        if values:
            self.rewrite(write)

    def _group_optimizer_state(
        self, names: tuple[str, ...], state: dict[tuple[str, str], Tensor], device: Device
    ) -> None:
        """Put new state of the parameters `names`, by parameter name and key, into a group of its own."""
        # Key by key, parallel to the parameters: some optimizers then treat the tensors of a key as one.
        state = dict(sorted(state.items(), key=lambda item: item[0][1]))
        group = self._new_group(BlockKind.OPTIMIZER, list(state.values()), device)
        self._adopted.update(state)
        self._optimizer_groups.setdefault(names, []).append(group)

    def adopt_made(self, device: Device) -> None:
        """Adopt optimizer state that a constructor has created on the host (Adagrad's, up to torch 2.11).

        On a CPU device `adopt_optimizer_state`, or `refresh`, groups the state after a step.
        """
        if device.torch_device.type != "cpu":
            self.adopt_saved({name: entries for name, entries in self.optimizer_state().items() if entries}, device)

    def _stays_on_host(self, name: str, key: str) -> bool:
        """Whether a state tensor stays on the host, as in `Optimizer.load_state_dict`.

        Step counters stay on the host beside a GPU, unless kernels of the GPU read the counters (`capturable`,
        `fused`).
        """
        tensor = self.tensors[name]
        group = next(g for g in self.optimizer.param_groups if any(p is tensor for p in g["params"]))
        return key == "step" and not (group.get("capturable") or group.get("fused"))

    def _group_saved_state(self, names: Iterable[str], device: Device) -> None:
        """Move optimizer state on the host into the single group maintained by `refresh`."""
        by_key: dict[str, list[Tensor]] = {}
        for name in names:
            for key, value in self.optimizer.state[self.tensors[name]].items():
                is_moved = device.torch_device.type == "cpu" or not self._stays_on_host(name, key)
                if isinstance(value, Tensor) and is_moved:
                    by_key.setdefault(key, []).append(value)
        tensors = [tensor for tensors in by_key.values() for tensor in tensors]
        if tensors:
            self._optimizer_groups = {_ALL: [self._new_group(BlockKind.OPTIMIZER, tensors, device)]}

    def refresh(self, lease: Lease, device: Device) -> None:
        """Make the groups hold the present tensors, after the user's own code has run under a lease on all groups.

        New groups join the lease. New tensors lie on the device.

        Raises:
            BudgetError: the present tensors do not fit the device.
        """
        self.tensors = dict(named_state(self.module))
        self._names = {id(tensor): name for name, tensor in self.tensors.items()}
        self.shared.part_with(self.shared.lost(self.tensors))
        parts: dict[BlockKind, list[Tensor]] = {BlockKind.PARAMETERS: [], BlockKind.BUFFERS: []}
        for name, tensor in self.tensors.items():
            if name in self.shared:
                continue
            parts[BlockKind.PARAMETERS if isinstance(tensor, nn.Parameter) else BlockKind.BUFFERS].append(tensor)
        present_groups = dict.fromkeys(self._group_of.values())
        for kind, tensors in parts.items():
            group = next((group for group in present_groups if group.kind is kind), None)
            renewed = self._renewed(group, kind, tensors, lease, device)
            if renewed is not None:
                renewed.dirty = True
                self._group_of = {
                    name: other_group for name, other_group in self._group_of.items() if other_group is not group
                }
                self._group_of.update({self._names[id(tensor)]: renewed for tensor in tensors})
        groups = self._optimizer_groups.get(_ALL)
        state = self._renewed(
            groups[0] if groups else None, BlockKind.OPTIMIZER, optimizer_tensors(self.optimizer, device), lease, device
        )
        if state is not None:
            state.dirty = True
            self._optimizer_groups = {_ALL: [state]}

    def _renewed(
        self, group: TensorBlock | None, kind: BlockKind, tensors: list[Tensor], lease: Lease, device: Device
    ) -> TensorBlock | None:
        """Return a group of exactly the given tensors: the present group if unchanged, else a new group instead."""
        if group is None and not tensors:
            return None
        is_same = (
            group is not None and len(group.tensors) == len(tensors) and all(map(operator.is_, group.tensors, tensors))
        )
        is_held = group is not None and group.is_buffer_shared()
        if group is not None and is_same:
            if not group.strays():
                # Where nothing has to move, the tensors stay in the buffer for good, and so with those who hold the buffer.
                if not (is_held and self._is_loose):
                    return group
            # The code may have exchanged the memory of a tensor for that of a copy of its own, and then holds the buffer.
            elif not (self._is_loose or is_held or group.collect()):
                return group
        if self._is_loose:
            if group is not None and not group.is_loose and not is_held:
                # The buffer of the old group goes with the group, so tensors that lie in the buffer first get memory of
                # their own.
                kept_ids = set(map(id, group.tensors)) - set(map(id, group.strays()))
                kept_tensors = [tensor for tensor in tensors if id(tensor) in kept_ids]
                self.readers.point(kept_tensors, [tensor.detach().clone() for tensor in kept_tensors])
            fresh = TensorBlock(kind, tensors, device, self.readers, is_loose=True)
            fresh.owner, fresh.tenant = self.number, self.tenant
        else:
            device.synchronize()
            if kind is BlockKind.OPTIMIZER:
                self._check_apart(self.tensors)
            fresh = self._new_group(kind, tensors, device)
        # The next step of the same unit needs the new group on the device.
        lease.exchange(group, fresh)
        if kind is BlockKind.PARAMETERS:
            # A trial with its own code has a single shard.
            fresh.shard = 0
            fresh.on_moved = None if group is None else group.on_moved
        return fresh

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state by parameter name, for `adopt_saved`."""
        named = {id(tensor): name for name, tensor in named_state(self.module)}
        return {named[id(p)]: dict(entries) for p, entries in self.optimizer.state.items() if id(p) in named}

    @contextmanager
    def writing(self) -> Iterator[None]:
        """As `whole`, for the user's own code between two steps, which may write any of the tensors.

        Raises:
            TaskError: as of `check`.
        """
        with self.whole():
            yield
            self._own_again(self.shared.lost(self.tensors, is_thorough=True))
            self.check(may_thaw=True)
            for block in self._blocks():
                with block.lock:
                    if block.tier is not None:
                        block.tier.written(block)


def optimizer_tensors(optimizer: Optimizer, device: Device) -> list[Tensor]:
    """Return the tensors of an optimizer's state on the device's kind of memory, ordered key by key."""
    kind = device.torch_device.type
    by_key: dict[object, list[Tensor]] = {}
    for entries in optimizer.state.values():
        for key, value in entries.items() if isinstance(entries, Mapping) else ():
            if isinstance(value, Tensor) and value.device.type == kind and value.layout is torch.strided:
                by_key.setdefault(key, []).append(value)
    return [tensor for tensors in by_key.values() for tensor in tensors]


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _in_order(optimizer: Optimizer) -> list[int]:
    """Return the identities of an optimizer's parameters, group by group."""
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def check_optimizer(optimizer: Optimizer, module: nn.Module) -> None:
    """Refuse, by a `TaskError`, LBFGS and an optimizer of a parameter that is not the module's."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TaskError(
            "LBFGS evaluates the model several times within a step and couples all parameters, so it cannot be stepped "
            "shard by shard; use an optimizer whose update is per parameter"
        )
    module_ids = {id(parameter) for parameter in module.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in module_ids:
                raise TaskError(
                    f"the optimizer holds a tensor of shape {tuple(parameter.shape)} that is not a parameter of the "
                    "module that model= builds; build it inside the module"
                )
