"""One optimizer step as units: the forward and backward of its batches, and the updates.

Note: several batches. One after the other where little else is known; shard by shard where the host has room for their values
(`train/grouped.py`), so that a shard is loaded once for all of them; side by side where other devices have nothing to do
(`train/spread.py`). The result is the same.

Note: the order. Where nothing has to be known of all gradients first, a shard is updated right after its last backward, while
parameters and gradients are on the device. Otherwise, and for what an epoch leaves over, the updates come after all backward
units, from the first shard on, whose parameters and gradients were the last on the device.
"""

import math
from collections.abc import Iterator

from hydra_tune.devices.device import Device
from hydra_tune.memory.block import Value
from hydra_tune.shard.plan import Plan
from hydra_tune.train.gradients import Gradients
from hydra_tune.train.grouped import shard_by_shard
from hydra_tune.train.helpers import AHEAD
from hydra_tune.train.lane import DrawnBatch, Lane
from hydra_tune.train.replicas import Replicas
from hydra_tune.train.spread import Spread
from hydra_tune.train.state import ModelState
from hydra_tune.train.step import PendingUnit
from hydra_tune.train.streams import RandomStreams
from hydra_tune.train.training_batch import Part, TrainingBatch, Update


class OptimizerStep:
    """The batches that make one optimizer step, and the step itself.

    Args:
        accumulate: how many batches make a step.
        state: the trial's long-lived tensors.
        streams: the trial's random streams.
        device: any device of the pool, for host memory.
        gradients: the trial's rules for gradients.
        width: how many of its batches may be under way at once, on several devices.
        group: how many of its batches may go through each shard together, if they are not side by side.
    """

    def __init__(
        self,
        accumulate: int,
        state: ModelState,
        streams: RandomStreams,
        device: Device,
        gradients: Gradients,
        width: int = 1,
        group: int = 1,
    ) -> None:
        self._accumulate = accumulate
        self._state = state
        self._streams = streams
        self._device = device
        self._gradients = gradients
        self._held: dict[str, Value] = {}
        self._updates: dict[str, Update] = {}
        self._batch: TrainingBatch | None = None
        self._drawn: list[DrawnBatch] = []
        self._drawn_batches = 0
        self._replicas = Replicas(state)
        self._spread: Spread | None = None
        self._grouped: list[DrawnBatch] = []
        self.width = width
        self.group = group
        self.count = 0
        self.loss = math.nan
        self.losses: list[float] = []

    @property
    def is_full(self) -> bool:
        """Whether all batches of the step have run."""
        return self.count == self._accumulate

    def keeps(self, plan: Plan) -> bool:
        """Whether batches of this plan may be kept, to run together."""
        if self.width > 1:
            return plan.may_run_beside
        return self.group > 1 and plan.may_be_grouped

    def goes_with(self, plan: Plan) -> bool:
        """Whether a batch of this plan may run together with those kept by now."""
        trained = tuple(shard.trained for shard in plan.shards)
        return self.width > 1 or all(batch.trained == trained for batch in self._drawn)

    def draw_ahead(self, part: Part, draws: int) -> None:
        """Keep a batch, to be run with the next ones by `together`.

        Args:
            part: the batch or piece; of a plan to which `keeps` and `goes_with` say yes.
            draws: by how much the batch moves the torch stream, which is moved here.
        """
        streams = self._streams.fork()
        self._streams.skip(draws)
        end = self._streams.position() if part.plan.is_stochastic else None
        drawn: DrawnBatch
        if self.width > 1:
            drawn = Lane(part, self._state, streams, end, self._device, self._gradients, self._replicas)
        else:
            drawn = DrawnBatch(part, self._state, streams, end, self._device, self._gradients)
        self._drawn_batches += part.ends_batch
        self._drawn.append(drawn)
        for update in drawn.updates():
            self._updates |= dict.fromkeys(update.names, update)

    @property
    def has_drawn_enough(self) -> bool:
        """Whether the batches kept should be run now."""
        most = AHEAD * self.width if self.width > 1 else self.group
        return self._drawn_batches == self._accumulate - self.count or len(self._drawn) == most

    def together(self) -> Iterator[PendingUnit | Spread]:
        """Run the batches that were kept, if any; afterwards `losses` has their training losses.

        Raises:
            BadLossError: as for `batch`.
        """
        batches, self._drawn = self._drawn, []
        self.losses = []
        if not batches:
            return
        self._let_go()
        held, self._held = self._held, {}
        if self.width > 1:
            yield from self._side_by_side([batch for batch in batches if isinstance(batch, Lane)], held)
        else:
            yield from self._shard_by_shard(batches, held)
        self._batch = batches[-1]
        self.count += self._drawn_batches
        self._drawn_batches = 0
        self.losses = [batch.loss for batch in batches]

    def _side_by_side(self, lanes: list[Lane], held: dict[str, Value]) -> Iterator[Spread]:
        self._spread = spread = Spread(lanes, list(self._updates), held, self.width, self._replicas)
        yield spread
        sums = spread.result()
        self._spread = None
        lanes[-1].hold(sums)

    def _shard_by_shard(self, batches: list[DrawnBatch], held: dict[str, Value]) -> Iterator[PendingUnit]:
        self._grouped = batches
        batches[0].take_in(held)
        self._batch = None
        yield from shard_by_shard(batches, is_last=self.count + self._drawn_batches == self._accumulate)
        for batch in batches:
            batch.check_draws()
        last = batches[-1]
        for batch in batches[:-1]:
            last.take_in(batch.give_away(self._updates))  # of parameters that no batch of the group has used
            batch.clear()
        self._grouped = []

    def batch(self, part: Part) -> Iterator[PendingUnit]:
        """The units of one more batch or piece; afterwards `loss` is its training loss.

        Raises:
            BadLossError: the loss is not finite; nothing more of the step must run.
        """
        self._let_go()
        batch = TrainingBatch(part, self._state, self._streams, self._device, self._gradients)
        self._batch = batch
        batch.take_in(self._held)
        self._held = {}
        for update in batch.updates():
            self._updates |= dict.fromkeys(update.names, update)
        yield from batch.units(is_last=part.ends_batch and self.count + 1 == self._accumulate)
        self.count += part.ends_batch
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
        for batch in (*self._drawn, *self._grouped):
            batch.clear()
        if self._spread is not None:
            self._spread.close()
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

    def _waiting(self, names: set[str]) -> list[Update]:
        """The updates of these parameters, by shard."""
        found: dict[tuple[int, int], Update] = {}
        for name in sorted(names):
            update = self._updates[name]
            found.setdefault((update.index, id(update.shard)), update)
        return [
            Update(index=u.index, shard=u.shard, names=tuple(n for n in u.names if n in names))
            for _, u in sorted(found.items(), key=lambda item: item[0][0])
        ]
