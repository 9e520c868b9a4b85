"""`TensorGroups`: a trial's parameters, buffers and optimizer state in groups that move between host and devices.

`ModelState` (`model_state.py`) derives from `TensorGroups`, and adds the optimizer's steps. Units
(`train/loop/batch_units.py`, `train/loop/training_batch.py`) take their blocks from here. Checkpoints
(`train/checkpoint/snapshot.py`) copy the tensors (`copy_out`) or read the tensors in place (`aliases`), and fused groups
(`fusion/group/stacked_state.py`) read and `rewrite` the tensors. At a trial's end, and before a state of another layout,
`Trial` (`train/trial.py`) and `OwnCodeTrial` (`train/own_code_trial.py`) take the tensors back (`hand_over`).

Note: ownership, for captured steps. A parameter that other trials share is in no group. Any other parameter or buffer
used by a single shard lies in the group of the shard. A parameter or buffer shared by several shards has a separate group,
so a unit loads no unneeded tensors. Parameters and buffers lie in separate groups: a forward unit overwrites buffers only,
so clean parameters need no write-back. Optimizer state is grouped by the shard whose unit updates the parameters, and
exists from the first update, from a checkpoint, or from the optimizer's constructor on. Unused tensors are in no group.

Note: threads and locks. The groups change only on the thread that runs the trial; a prefetch, on another thread, may ask
for blocks meanwhile. A method here holds the lock of one block at a time, because devices take room from other groups.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hydra_tune.devices.device import Device
from hydra_tune.errors import TaskError
from hydra_tune.memory.block import Block, BlockKind, TensorBlock, lay_out, storage_identity
from hydra_tune.memory.block_release import bring_home, drop
from hydra_tune.memory.deferred_free import TrialTensorReaders
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.memory.trial_context import TrialMemoryContext
from hydra_tune.shard.capture.step_capture import named_state
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.shard.partition.plan_request import TrialStateLayout
from hydra_tune.train.claims import note_lost
from hydra_tune.train.state.host_optimizer import HostUpdateQueue
from hydra_tune.train.state.shared_state import SharedTensors

_NUMBERS = itertools.count()


class TensorGroups:
    """The groups of a trial's tensors; `ModelState` decides when the groups are made and changed.

    Args:
        module: the trial's module, on the host.
        plan: decides the groups, for later plans too; `adopt_state` adds groups for further tensors.
        device: any device of the pool, for host memory and alignment.
        host: counts the groups' host copies; None: the host has room for all.
        tenant: the trial, for `host`.
        before: the trial's earlier state, replaced by this state; its number and watcher carry over.
        runs_own_code: whether units run the user's own step on the module; `refresh` then follows the changes.
        may_share: whether frozen parameters in a shared file share the copies of other trials.

    Attributes:
        shared: the parameters that other trials have as well.
        number: number of the trial, for its blocks.
        readers: readers of parameters, buffers and optimizer state between units.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: ShardPlan,
        device: Device,
        host: HostTier | None,
        tenant: TrialMemoryContext | None,
        before: "TensorGroups | None",
        *,
        runs_own_code: bool,
        may_share: bool,
    ) -> None:
        self._host, self._device = host, device
        self._runs_own_code = runs_own_code
        self._is_loose = runs_own_code and device.keeps_tensors
        self.tenant = tenant
        self.number: int = next(_NUMBERS) if before is None else before.number
        self.watcher: Callable[[int, str | None], None] | None = None
        self.readers = TrialTensorReaders()
        self.module = module
        self.tensors: Mapping[str, Tensor] = dict(named_state(module))
        self.shared = SharedTensors(
            self.tensors if may_share else {},
            {name for shard in plan.shards for name in shard.graph.written_state},
            self.number,
            device.alignment,
            runs_own_code=plan.eager,
        )
        owners = {name: shards[0] for name, shards in plan.used_state().items() if len(shards) == 1}
        self.layout = TrialStateLayout(plan=plan, owners=owners)
        self._group_of: dict[str, TensorBlock] = {}
        self._optimizer_groups: dict[tuple[str, ...], list[TensorBlock]] = {}
        self._host_updates = HostUpdateQueue()

    def groups(self, names: Iterable[str]) -> list[TensorBlock]:
        """Return the groups of the named parameters and buffers."""
        return list(dict.fromkeys(self._group_of[name] for name in names if name not in self.shared))

    def blocks(self, names: Sequence[str]) -> list[Block]:
        """Return the blocks of the named parameters and buffers: groups, and shared parameters."""
        return [*self.groups(names), *self.shared.blocks(names)]

    def optimizer_groups(self, names: tuple[str, ...]) -> list[TensorBlock]:
        """Return the groups of the named parameters' optimizer state; none before there is such state."""
        matching_groups: list[TensorBlock] = []
        # A copy of the items: a prefetch asks for the blocks of coming units from another thread while an update adds a
        # group.
        for members, groups in list(self._optimizer_groups.items()):
            if not set(members).isdisjoint(names):
                matching_groups += groups
        return matching_groups

    def touched(self, names: Iterable[str]) -> None:
        """Mark the groups of the named parameters and buffers as dirty, because the device copies have changed."""
        for group in self.groups(names):
            group.dirty = True

    def settle(self) -> None:
        """Wait until all updates on the host are over; raise the error of a failed update."""
        self._host_updates.wait()

    def own_code_blocks(self) -> list[Block]:
        """Return the blocks needed on the device by a unit with the user's own code."""
        return [*self._blocks(), *self.shared.blocks()]

    def rewrite(self, write: Callable[[Tensor], None]) -> None:
        """Change tensors of the state on the host, group by group; no unit of the trial may run meanwhile.

        Args:
            write: called with each parameter, buffer and tensor of the optimizer's state; changes the tensor in place,
                or leaves it.
        """
        self.settle()
        written_ids: set[int] = set()
        with torch.no_grad():
            for block in self._blocks():
                with block.lock:
                    bring_home(block)
                    for tensor in block.tensors:
                        write(tensor)
                        written_ids.add(id(tensor))
                    if block.tier is not None:
                        block.tier.written(block)
            # Tensors that no shard uses are in no block.
            for tensor in self.tensors.values():
                if id(tensor) not in written_ids:
                    write(tensor)

    def copy_out(self, targets: Mapping[int, Tensor]) -> None:
        """Copy tensors of the groups to the host from wherever they are; no unit of the trial may run meanwhile.

        Args:
            targets: destination by `id` of a tensor; other `id`s are ignored.
        """
        for block in self._blocks():
            # One lock at a time: devices may take the room of all other groups while a group is copied.
            with block.lock:
                for tensor in block.tensors:
                    if id(tensor) in targets:
                        targets[id(tensor)].copy_(tensor.detach())

    def aliases(self) -> dict[int, Tensor]:
        """Return an alias of each tensor of the groups, by `id`; the aliased bytes do not change until a unit runs."""
        aliases_by_id: dict[int, Tensor] = {}
        for block in self._blocks():
            with block.lock:
                aliases_by_id |= {id(tensor): tensor.detach() for tensor in block.tensors}
        return aliases_by_id

    def bring_home(self) -> None:
        """Bring all groups to the host."""
        self.settle()
        for block in self._blocks():
            bring_home(block)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Keep all groups on the host inside the context, even beyond the host's budget."""
        self.settle()
        blocks = self._blocks()
        with nullcontext() if self._host is None else self._host.whole(blocks):
            self.bring_home()
            yield

    def leave_devices(self) -> bool:
        """Bring home what has memory of its own on a device, so that `hand_over` works on the host alone.

        Returns:
            Whether the groups are home; False: there is a host tier, which may lack the room for all groups at once.
        """
        if self._host is not None:
            return False
        self.settle()
        for block in self._blocks():
            # The tensors of a loose block are on the host already, and a write-back would copy them.
            if not block.is_loose:
                bring_home(block)
        return True

    def hand_over(self, *, is_result: bool = False) -> None:
        """Bring all groups to the host and give each tensor memory of its own; the caller owns the tensors from now on.

        Groups are handed over in turn, so the host holds one group twice at most.

        Args:
            is_result: whether the trial is over. Otherwise shared memory stays shared, so the next `ModelState` can
                refuse the tensors.
        """
        self.settle()
        self.shared.leave()
        storages = Counter(
            storage_identity(tensor) for block in self._blocks() if block.is_loose for tensor in block.tensors
        )
        shared = {storage for storage, count in storages.items() if count > 1}
        for block in self._blocks():
            # Tensors of a loose block have memory of their own already, except for those that share memory.
            if block.is_loose:
                if is_result:
                    with block.lock:
                        block.own_memory(shared)
                drop(block)
                continue
            with nullcontext() if self._host is None else self._host.whole([block]), block.lock:
                bring_home(block)
                block.let_go()
                drop(block)

    def drop(self) -> None:
        """Give up all device and host copies; the module must not be used afterwards."""
        self._host_updates.wait_quietly()
        self.shared.leave()
        for block in self._blocks():
            has_parameters = block.kind is BlockKind.PARAMETERS and not block.is_loose
            parameters = [p for p in block.tensors if isinstance(p, nn.Parameter)] if has_parameters else []
            drop(block)
            note_lost(p for p in parameters if p.requires_grad)

    def watch(self, moved: Callable[[int, str | None], None]) -> None:
        """Call `moved(shard, device)` when parameters of a shard reach a device, or leave their device (None)."""
        self.watcher = moved
        for group in dict.fromkeys(self._group_of.values()):
            if group.shard is not None:
                group.on_moved = functools.partial(moved, group.shard)

    @property
    def nbytes(self) -> int:
        """Bytes of all groups on the host, without shared parameters."""
        return sum(block.nbytes for block in self._blocks())

    def _blocks(self) -> list[TensorBlock]:
        optimizer = [group for groups in self._optimizer_groups.values() for group in groups]
        return [*dict.fromkeys(self._group_of.values()), *optimizer]

    def _new_group(self, kind: BlockKind, tensors: Sequence[Tensor], device: Device) -> TensorBlock:
        nbytes = lay_out(tensors, device.alignment)[1]
        # A host tier counts a loose group only from its first move on.
        if self._host is None or self._is_loose:
            is_loose = self._is_loose
            group = device.on_host(
                functools.partial(TensorBlock, kind, tensors, device, self.readers, is_loose=is_loose)
            )
            group.owner, group.tenant = self.number, self.tenant
            return group
        self._host.take(nbytes)
        try:
            group = device.on_host(functools.partial(TensorBlock, kind, tensors, device, self.readers))
        except BaseException:
            # The room was taken above, and no group will ever give it back.
            self._host.ledger.give_back(nbytes)
            raise
        group.owner, group.tenant = self.number, self.tenant
        self._host.enter(group)
        return group

    def _build(self, plan: ShardPlan, device: Device) -> None:
        members: dict[tuple[BlockKind, object], list[str]] = {}
        for name in plan.used_state():
            if name in self.shared:
                continue
            kind = BlockKind.PARAMETERS if isinstance(self.tensors[name], nn.Parameter) else BlockKind.BUFFERS
            members.setdefault((kind, self.layout.owners.get(name, name)), []).append(name)
        for (kind, owner), names in members.items():
            group = self._new_group(kind, [self.tensors[name] for name in names], device)
            if kind is BlockKind.PARAMETERS and isinstance(owner, int):
                group.shard = owner
            self._group_of.update(dict.fromkeys(names, group))

    def adopt_state(self, names: Sequence[str], device: Device) -> None:
        """Group parameters and buffers that the first plan did not use and a later plan does."""
        self._group([name for name in names if name not in self._group_of and name not in self.shared], device)

    def _group(self, new_names: Sequence[str], device: Device) -> None:
        for kind, members in (
            (BlockKind.PARAMETERS, [n for n in new_names if isinstance(self.tensors[n], nn.Parameter)]),
            (BlockKind.BUFFERS, [n for n in new_names if not isinstance(self.tensors[n], nn.Parameter)]),
        ):
            if members:
                tensors = [self.tensors[name] for name in members]
                group = self._new_group(kind, tensors, device)
                self._group_of.update(dict.fromkeys(members, group))

    def _own_again(self, names: Sequence[str]) -> None:
        """Give the trial groups of its own for parameters that are shared no more."""
        # In this order: a prefetch, on another thread, finds each parameter in one place at least.
        self._group(names, self._device)
        self.shared.part_with(names)


def check_storages(tensors: dict[str, Tensor], *, may_share: bool) -> None:
    """Refuse distinct tensors that share memory, unless sharing is allowed: flat blocks would tear the tensors apart."""
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise TaskError(
                f"{name!r} of the model is sparse, which cannot be spilled; keep it dense, and make it sparse in forward"
            )
        if may_share or not tensor.numel():
            continue
        owner = names.setdefault(tensor.untyped_storage()._cdata, name)  # noqa: SLF001 - the storage's identity
        if owner != name:
            raise TaskError(
                f"{owner!r} and {name!r} of the model share memory but are different tensors; to tie them, let both names "
                "hold the same Parameter, otherwise .clone() one"
            )
