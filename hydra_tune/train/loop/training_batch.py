"""A batch of an optimizer step as units: forward, backward, and the updates of the trained parameters.

`OptimizerStep` (`optimizer_step.py`) makes a `TrainingBatch` for each batch or piece of a step, and yields the batch's
units to the pool. Batches that run together are of subclasses (`train/parallel/parallel_batch.py`), and so are the
batches of a fused group (`fusion/group/group_step.py`). `SingleTrial` (`train/single_trial.py`), `GroupExecutor`
(`fusion/group/group_executor.py`) and forecasts (`train/timing/fake_trial.py`) make the `BatchPart`s. The module must not
decide when an optimizer step ends, nor on which device a unit runs: the step says which batch is the last, and each unit is
given a device and a pager.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from hydra_tune.devices.device import Device
from hydra_tune.errors import BadLossError, TaskError
from hydra_tune.memory.block import Block, BlockTensorView
from hydra_tune.memory.block_release import drop
from hydra_tune.memory.lease import Lease
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.pressure import not_repeatable
from hydra_tune.shard.capture.batch import BatchLeaves
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.execute.chain import earlier_gradient_key, parameter_gradient_key
from hydra_tune.shard.partition.plan import Shard, ShardPlan
from hydra_tune.train.loop.batch_units import BatchUnits, PendingUnit, UpcomingUnit
from hydra_tune.train.loop.gradient_rules import GradientProcessor
from hydra_tune.train.rng.rng_streams import RandomStreams
from hydra_tune.train.state.model_state import STEP_BEGUN, ModelState
from hydra_tune.train.timing.unit_times import UnitTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUpdate:
    """Parameters updated by one unit, and the shard of the unit."""

    index: int
    shard: Shard
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPart:
    """A batch of an optimizer step, or a piece of a batch.

    Attributes:
        leaves: the batch or piece.
        share: fraction of the batch's samples in the piece.
        ends_batch: whether no further piece of the batch follows.
    """

    plan: ShardPlan
    times: UnitTimes
    leaves: BatchLeaves
    share: float = 1.0
    ends_batch: bool = True


class TrainingBatch(BatchUnits):
    """A batch of the step; after the units have run, `loss` holds the training loss."""

    loss: float

    def __init__(
        self, part: BatchPart, state: ModelState, streams: RandomStreams, device: Device, gradients: GradientProcessor
    ) -> None:
        super().__init__(part.plan, part.times, state, part.leaves, streams, device, gradients.objective(part.share))
        self._gradients = gradients
        self._updates_now = False
        self.completed: set[str] = set()

    @property
    def num_shards(self) -> int:
        """Number of shards in the plan."""
        return len(self._plan.shards)

    @property
    def trained(self) -> tuple[tuple[str, ...], ...]:
        """For each shard, the parameters whose gradients are complete after the shard's backward."""
        return tuple(shard.trained for shard in self._plan.shards)

    def units(self, *, is_last: bool) -> Iterator[PendingUnit]:
        """Yield the forwards of all shards but the last, then the backwards, last shard first, with updates where allowed."""
        for index in range(self.num_shards - 1):
            yield self.forward_unit(index)
        for index in reversed(range(self.num_shards)):
            yield from self.backward_units(index, is_last=is_last)

    def forward_unit(self, index: int) -> PendingUnit:
        """Return the forward of a shard; the last shard has none, because its backward unit runs the forward as well."""
        return self._shard_unit("forward", index, partial(self._forward, index))

    def backward_units(self, index: int, *, is_last: bool) -> Iterator[PendingUnit]:
        """Yield the backward of a shard, if the shard has one, and its update, if allowed now.

        Raises:
            TaskError: the loss does not depend on any trainable parameter.
            BadLossError: the loss is not finite.
        """
        shard = self._plan.shards[index]
        completes = is_last and self._gradients.has_two_phases
        self._updates_now = is_last and not completes
        if shard.has_backward:
            yield self._shard_unit("backward", index, partial(self._backward, index, completes))
        elif index == self.num_shards - 1:
            raise TaskError("the training loss does not depend on any parameter that requires gradients")
        else:
            self._chain.skip_backward(index)
        # The last shard's backward has just computed the loss, and no parameter has been updated yet.
        if index == self.num_shards - 1 and not math.isfinite(self.loss):
            raise BadLossError(f"the training loss is {self.loss}")
        if shard.trained and self._updates_now:
            yield self.update_unit(ShardUpdate(index=index, shard=shard, names=shard.trained))

    def _following(self, kind: str, index: int) -> list[UpcomingUnit]:
        shards, upcoming_units = self._plan.shards, []
        last_index = len(shards) - 1
        if kind not in ("forward", "backward", "update"):
            return []
        if kind == "forward":
            return [self._expected("forward" if index + 1 < last_index else "backward", index + 1)]
        if kind == "backward" and self._updates_now and shards[index].trained:
            update = self.expected_update(ShardUpdate(index=index, shard=shards[index], names=shards[index].trained))
            if update.workspace_bytes:
                # The unit under way is about to create the gradients, so the present blocks do not include them.
                update = replace(update, workspace_bytes=update.workspace_bytes + shards[index].cost.trained_bytes)
            upcoming_units.append(update)
        below = next((i for i in reversed(range(index)) if shards[i].has_backward), None)
        if below is not None:
            return [*upcoming_units, self._expected("backward", below)]
        return [*upcoming_units, self.expected_step()]

    def expected(self, kind: str, index: int) -> UpcomingUnit | None:
        """Return a forward or backward unit of this batch, as expected; None if the shard has no such unit."""
        runs = index < self.num_shards - 1 if kind == "forward" else self._plan.shards[index].has_backward
        return self._expected(kind, index) if runs else None

    def expected_step(self) -> UpcomingUnit:
        """Return the next batch's first unit, as expected."""
        return self._expected_batch("forward" if len(self._plan.shards) > 1 else "backward")

    def expected_update(self, update: ShardUpdate) -> UpcomingUnit:
        """Return an update, as expected."""
        return UpcomingUnit(
            kind="update",
            shard=update.index,
            seconds=self._times.of(("update", update.index)),
            blocks=partial(self._update_blocks, update.names),
            workspace_bytes=0 if update.shard.cost.updates_on_host else update.shard.cost.update_workspace,
        )

    def _update_blocks(self, names: tuple[str, ...]) -> list[Block]:
        if self._plan.updates_on_host:
            return []
        state = self._state
        return [*state.groups(names), *state.optimizer_groups(names), *self._gradient_blocks(names)]

    def updates(self) -> list[ShardUpdate]:
        """Return the updates of the batch's plan."""
        return [
            ShardUpdate(index=index, shard=shard, names=shard.trained)
            for index, shard in enumerate(self._plan.shards)
            if shard.trained
        ]

    def take_in(self, gradients: dict[str, BlockTensorView]) -> None:
        """Continue from the gradients of earlier batches, by parameter name."""
        self._store.take_in({earlier_gradient_key(name): value for name, value in gradients.items()})

    def give_away(self, names: Iterable[str]) -> dict[str, BlockTensorView]:
        """Take all gradients out, by parameter name; an unused parameter contributes the gradient of earlier batches."""
        keys = {key: name for name in names for key in (parameter_gradient_key(name), earlier_gradient_key(name))}
        return {keys[key]: value for key, value in self._store.give_away(keys).items()}

    def hold(self, gradients: dict[str, BlockTensorView]) -> None:
        """Keep gradients, by parameter name, for the units that complete or update."""
        self._store.take_in({parameter_gradient_key(name): value for name, value in gradients.items()})

    def complete_unit(self, update: ShardUpdate) -> PendingUnit:
        """Return a unit to unscale gradients and take norms, where no backward unit could."""
        blocks = partial(self._gradient_blocks, update.names)
        run = partial(self._run_complete, update)
        return self._unit("complete", update.index, run, blocks, update.shard.cost.update_workspace, shard=update.shard)

    def _run_complete(self, update: ShardUpdate, device: Device, pager: Pager) -> float:
        del device
        start = time.perf_counter()
        with (
            pager.lease(self._gradient_blocks(update.names), update.shard.cost.update_workspace),
            GATE.shared(),
            not_repeatable("gradients were being unscaled in place"),
        ):
            waited_seconds = time.perf_counter() - start
            self._complete(update.names)
        return waited_seconds

    def _gradient_blocks(self, names: tuple[str, ...]) -> list[Block]:
        return self._store.blocks([parameter_gradient_key(name) for name in names], (), ())

    def update_unit(
        self, update: ShardUpdate, following: Callable[[], list[UpcomingUnit]] | None = None
    ) -> PendingUnit:
        """Return an update; `following` returns the next units, where the update is not part of its batch."""
        cost = update.shard.cost
        if cost.updates_on_host:
            return self._unit("update", update.index, partial(self._update_on_host, update), shard=update.shard)
        run, blocks = partial(self._run_update, update), partial(self._update_blocks, update.names)
        return self._unit("update", update.index, run, blocks, cost.update_workspace, following, update.shard)

    def _run_update(self, update: ShardUpdate, device: Device, pager: Pager) -> float:
        state, names, cost = self._state, update.names, update.shard.cost
        optimizer_groups = state.optimizer_groups(names)
        blocks = self._update_blocks(names)
        # The first update creates the optimizer's state, inside the workspace.
        workspace = cost.update_workspace if optimizer_groups else cost.first_update_workspace
        start = time.perf_counter()
        with pager.lease(blocks, workspace) as lease, not_repeatable(STEP_BEGUN):
            gradients = self._present(names)
            # Lock order: a GPU's generator before the gate. A holder of the generator's turn may wait for the gate.
            with state.around_step(device), GATE.shared():
                waited_seconds = time.perf_counter() - start
                state.update(names, gradients, self._gradients)
            # These references would keep the gradients' memory alive after their blocks are dropped.
            gradients.clear()
            keys = [parameter_gradient_key(name) for name in names]
            self._leased(lease, partial(self._store.drop_all, keys))
            state.adopt_optimizer_state(names, device, lease)
        return waited_seconds

    def _update_on_host(self, update: ShardUpdate, device: Device, pager: Pager) -> float:
        """Start an update on the host; return the seconds of the gradients' way to the host."""
        start = time.perf_counter()
        keys = {name: parameter_gradient_key(name) for name in update.names}
        host_gradients = {name: self._store.bring_home(key) for name, key in keys.items()}
        waited_seconds = time.perf_counter() - start
        gradients = {name: gradient for name, gradient in host_gradients.items() if gradient is not None}
        # Only `gradients` may refer to the tensors: the update empties it to free them.
        host_gradients.clear()
        over = partial(self._updated_on_host, self._store.give_away(keys.values()), pager, update.index)
        with not_repeatable(STEP_BEGUN):
            self._state.update_on_host(update.names, gradients, self._gradients, device, over)
        return waited_seconds

    def _updated_on_host(
        self, values: dict[str, BlockTensorView], pager: Pager, index: int, began_ns: int, ended_ns: int
    ) -> None:
        for value in values.values():
            drop(value.block)
        pager.updated(self._state.number, index, began_ns, ended_ns)

    @contextmanager
    def _lease(self, pager: Pager, names: tuple[str, ...], blocks: list[Block], workspace: int) -> Iterator[Lease]:
        """Lease blocks, with stand-ins for the parameters where an update on the host may be under way."""
        with super()._lease(pager, names, blocks, workspace) as lease:
            if self._plan.updates_on_host and not self._plan.eager:
                self._store.stand_ins = {**self._store.stand_ins, **self._state.stand_ins(names)}
            yield lease

    def _forward(self, index: int, device: Device) -> None:
        self._chain.forward(index, self._generator(device))

    def _backward(self, index: int, completes: bool, device: Device) -> None:
        shard = self._plan.shards[index]
        self._chain.backward(index, self._generator(device))
        for name in shard.trained:
            # Autograd may let the gradient of a parameter and the gradient of a value share memory. From here on sums, scaling
            # or the optimizer change the parameter's gradient, and an earlier shard has yet to read the value's gradient.
            self._store.set_apart(parameter_gradient_key(name))
        (name,) = self._plan.outputs
        if name in shard.losses:
            loss = self._store.get(name)
            assert loss is not None
            self._take_loss(loss)
            self._store.drop(name)
        if completes:
            self._complete(shard.trained)

    def _take_loss(self, loss: Tensor) -> None:
        """Read the loss, which the last shard's backward has computed."""
        self.loss = float(loss.item())

    def _complete(self, names: tuple[str, ...]) -> None:
        self._gradients.complete(self._state.optimized(self._present(names)))
        for name in self._present(names):
            self._store.changed(parameter_gradient_key(name))
        self.completed |= set(names)

    def _present(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        values = {name: self._store.get(parameter_gradient_key(name)) for name in names}
        return {name: gradient for name, gradient in values.items() if gradient is not None}
