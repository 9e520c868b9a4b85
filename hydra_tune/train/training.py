"""One optimizer step as units: the forward and backward of its batches, and the updates.

Note: the order. Where nothing has to be known of all gradients first, a shard is updated right after its last backward, while
parameters and gradients are on the device. Otherwise, and for what an epoch leaves over, the updates come after all backward
units, from the first shard on, whose parameters and gradients were the last on the device.
"""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from hydra_tune.devices.device import Device
from hydra_tune.errors import BadLossError, TaskError
from hydra_tune.memory.block import Value
from hydra_tune.memory.pager import Pager
from hydra_tune.shard.batch import Leaves
from hydra_tune.shard.chain import earlier_gradient_key, parameter_gradient_key
from hydra_tune.shard.gate import GATE
from hydra_tune.shard.plan import Plan, Shard
from hydra_tune.train.clock import UnitTimes
from hydra_tune.train.gradients import Gradients
from hydra_tune.train.state import ModelState
from hydra_tune.train.step import PendingUnit, Step
from hydra_tune.train.streams import RandomStreams


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """Parameters that are updated by one unit, and the shard whose unit that is."""

    index: int
    shard: Shard
    names: tuple[str, ...]


class _TrainingBatch(Step):
    """One of the step's batches. After its units have run, `loss` is its training loss."""

    loss: float

    def __init__(
        self,
        plan: Plan,
        times: UnitTimes,
        state: ModelState,
        leaves: Leaves,
        streams: RandomStreams,
        device: Device,
        gradients: Gradients,
    ) -> None:
        super().__init__(plan, times, state, leaves, streams, device, gradients.objective())
        self._gradients = gradients
        self.completed: set[str] = set()

    def units(self, *, is_last: bool) -> Iterator[PendingUnit]:
        """The batch's units in order: forward to the last shard, then backward shard by shard, each updated if it may be."""
        shards = self._plan.shards
        completes = is_last and self._gradients.has_two_phases
        for index in range(len(shards) - 1):
            yield self._shard_unit("forward", index, lambda device, i=index: self._chain.forward(i, device.generator))  # type: ignore[misc]
        for index in reversed(range(len(shards))):
            if shards[index].has_backward:
                yield self._shard_unit("backward", index, lambda device, i=index: self._backward(i, device, completes))  # type: ignore[misc]
            elif index == len(shards) - 1:
                raise TaskError("the training loss does not depend on any parameter that requires gradients")
            else:
                self._chain.skip_backward(index)
            if index == len(shards) - 1 and not math.isfinite(self.loss):
                raise BadLossError(f"the training loss is {self.loss}")
            if shards[index].trained and is_last and not completes:
                yield self.update_unit(_Update(index=index, shard=shards[index], names=shards[index].trained))

    def updates(self) -> list[_Update]:
        """The updates that the batch's plan has."""
        return [
            _Update(index=index, shard=shard, names=shard.trained)
            for index, shard in enumerate(self._plan.shards)
            if shard.trained
        ]

    def take_in(self, gradients: dict[str, Value]) -> None:
        """Go on from the gradients of earlier batches, by parameter name."""
        self._store.take_in({earlier_gradient_key(name): value for name, value in gradients.items()})

    def give_away(self, names: Iterable[str]) -> dict[str, Value]:
        """Take all gradients out, by parameter name; a parameter that this batch did not use has those of earlier ones."""
        found: dict[str, Value] = {}
        for name in names:
            for key in (parameter_gradient_key(name), earlier_gradient_key(name)):
                for value in self._store.give_away([key]).values():
                    found[name] = value
        return found

    def hold(self, gradients: dict[str, Value]) -> None:
        """Keep gradients to complete or update with."""
        self._store.take_in({parameter_gradient_key(name): value for name, value in gradients.items()})

    def complete_unit(self, update: _Update) -> PendingUnit:
        """Unscale gradients and take their norms, where no backward unit could."""
        keys = [parameter_gradient_key(name) for name in update.names]

        def run(device: Device, pager: Pager) -> float:
            del device
            workspace = update.shard.cost.update_workspace
            start = time.perf_counter()
            with pager.lease(self._store.blocks(keys, (), ()), workspace), GATE.shared():
                waited = time.perf_counter() - start
                self._complete(update.names)
            return waited

        return self._unit("complete", update.index, run)

    def update_unit(self, update: _Update) -> PendingUnit:
        """Let the optimizer step for some parameters."""
        names, cost = update.names, update.shard.cost
        keys = [parameter_gradient_key(name) for name in names]

        def run(device: Device, pager: Pager) -> float:
            state = self._state
            optimizer_groups = state.optimizer_groups(names)
            blocks = state.groups(names) + optimizer_groups + self._store.blocks(keys, (), ())
            workspace = cost.update_workspace if optimizer_groups else cost.first_update_workspace
            start = time.perf_counter()
            with pager.lease(blocks, workspace):
                gradients = self._present(names)
                with GATE.shared():
                    waited = time.perf_counter() - start
                    state.update(names, gradients, self._gradients)
                gradients.clear()
                for key in keys:
                    self._store.drop(key)
                state.adopt_optimizer_state(names, device)
            return waited

        return self._unit("update", update.index, run)

    def _backward(self, index: int, device: Device, completes: bool) -> None:
        shard = self._plan.shards[index]
        self._chain.backward(index, device.generator)
        (name,) = self._plan.outputs
        if name in shard.losses:
            loss = self._store.get(name)
            assert loss is not None
            self.loss = float(loss.item())
            self._store.drop(name)
        if completes:
            self._complete(shard.trained)

    def _complete(self, names: tuple[str, ...]) -> None:
        self._gradients.complete(self._state.optimized(self._present(names)))
        for name in self._present(names):
            self._store.changed(parameter_gradient_key(name))
        self.completed |= set(names)

    def _present(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        found = {name: self._store.get(parameter_gradient_key(name)) for name in names}
        return {name: gradient for name, gradient in found.items() if gradient is not None}


class OptimizerStep:
    """The batches that make one optimizer step, and the step itself.

    Args:
        accumulate: how many batches make a step.
        state: the trial's long-lived tensors.
        streams: the trial's random streams.
        device: any device of the pool, for host memory.
        gradients: the trial's rules for gradients.
    """

    def __init__(
        self, accumulate: int, state: ModelState, streams: RandomStreams, device: Device, gradients: Gradients
    ) -> None:
        self._accumulate = accumulate
        self._state = state
        self._streams = streams
        self._device = device
        self._gradients = gradients
        self._held: dict[str, Value] = {}
        self._updates: dict[str, _Update] = {}
        self._batch: _TrainingBatch | None = None
        self.count = 0
        self.loss = math.nan

    @property
    def is_full(self) -> bool:
        """Whether all batches of the step have run."""
        return self.count == self._accumulate

    def batch(self, plan: Plan, times: UnitTimes, leaves: Leaves) -> Iterator[PendingUnit]:
        """The units of one more batch; afterwards `loss` is its training loss.

        Raises:
            BadLossError: the loss is not finite; nothing more of the step must run.
        """
        self._let_go()
        batch = _TrainingBatch(plan, times, self._state, leaves, self._streams, self._device, self._gradients)
        self._batch = batch
        batch.take_in(self._held)
        self._held = {}
        for update in batch.updates():
            self._updates |= dict.fromkeys(update.names, update)
        yield from batch.units(is_last=self.count + 1 == self._accumulate)
        self.count += 1
        self.loss = batch.loss

    def finish(self) -> Iterator[PendingUnit]:
        """The units that are left once no further batch comes: updates that had to wait, or had no batch to come with."""
        batch = self._batch
        assert batch is not None, "a step has at least one batch"
        gradients = batch.give_away(self._updates)
        batch.hold(gradients)
        if self._gradients.has_two_phases:
            for update in self._waiting(set(gradients) - batch.completed):
                yield batch.complete_unit(update)
        if not self._gradients.skips_update:
            for update in self._waiting(set(gradients)):
                yield batch.update_unit(update)
        self._gradients.next_step()

    def close(self) -> None:
        """Give up all of the step's values."""
        self._let_go()
        if self._held and self._batch is not None:
            self._batch.hold(self._held)
            self._held = {}
            self._batch.clear()

    def _let_go(self) -> None:
        """The last batch's values go, its gradients stay."""
        if self._batch is not None:
            self._held |= self._batch.give_away(self._updates)
            self._batch.close()

    def _waiting(self, names: set[str]) -> list[_Update]:
        """The updates of these parameters, by shard."""
        found: dict[tuple[int, int], _Update] = {}
        for name in sorted(names):
            update = self._updates[name]
            found.setdefault((update.index, id(update.shard)), update)
        return [
            _Update(index=u.index, shard=u.shard, names=tuple(n for n in u.names if n in names))
            for _, u in sorted(found.items(), key=lambda item: item[0][0])
        ]
