"""One optimizer step as units: the forward and backward of its batches, and the updates.

Note: the order. Where nothing has to be known of all gradients first, a shard is updated right after its last backward, while
parameters and gradients are on the device. Otherwise, and for what an epoch leaves over, the updates come after all backward
units, from the first shard on, whose parameters and gradients were the last on the device.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial

from hydra_tune.devices.device import Device
from hydra_tune.memory.block import Value
from hydra_tune.train.gradients import Gradients
from hydra_tune.train.helpers import AHEAD
from hydra_tune.train.lane import Lane
from hydra_tune.train.replicas import Replicas
from hydra_tune.train.spread import Spread
from hydra_tune.train.state import ModelState
from hydra_tune.train.step import Expected, PendingUnit
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
        width: how many of its batches may be under way at once.
    """

    def __init__(
        self,
        accumulate: int,
        state: ModelState,
        streams: RandomStreams,
        device: Device,
        gradients: Gradients,
        width: int = 1,
    ) -> None:
        self._accumulate = accumulate
        self._state = state
        self._streams = streams
        self._device = device
        self._gradients = gradients
        self._held: dict[str, Value] = {}
        self._updates: dict[str, Update] = {}
        self._batch: TrainingBatch | None = None
        self._drawn: list[Lane] = []
        self._drawn_batches = 0
        self._replicas = Replicas(state)
        self._spread: Spread | None = None
        self.width = width
        self.count = 0
        self.loss = math.nan
        self.losses: list[float] = []

    @property
    def is_full(self) -> bool:
        """Whether all batches of the step have run."""
        return self.count == self._accumulate

    def draw_ahead(self, part: Part, draws: int) -> None:
        """Keep a batch, to be run beside the next ones by `together`.

        Args:
            part: the batch or piece; its plan may run beside others.
            draws: by how much the batch moves the torch stream, which is moved here.
        """
        streams = self._streams.fork()
        self._streams.skip(draws)
        end = self._streams.position() if part.plan.is_stochastic else None
        lane = Lane(part, self._state, streams, end, self._device, self._gradients, self._replicas)
        self._drawn_batches += part.ends_batch
        self._drawn.append(lane)
        for update in lane.updates():
            self._updates |= dict.fromkeys(update.names, update)

    @property
    def has_drawn_enough(self) -> bool:
        """Whether the batches kept should be run now."""
        return self._drawn_batches == self._accumulate - self.count or len(self._drawn) == AHEAD * self.width

    def together(self) -> Iterator[Spread]:
        """Run the batches that were kept, if any; afterwards `losses` has their training losses.

        Raises:
            BadLossError: as for `batch`.
        """
        lanes, self._drawn = self._drawn, []
        self.losses = []
        if not lanes:
            return
        self._let_go()
        held, self._held = self._held, {}
        self._spread = spread = Spread(lanes, list(self._updates), held, self.width, self._replicas)
        yield spread
        sums = spread.result()
        self._spread, self._batch = None, lanes[-1]
        self._batch.hold(sums)
        self.count += self._drawn_batches
        self._drawn_batches = 0
        self.losses = [lane.loss for lane in lanes]

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
            updates = self._waiting(set(gradients))
            for number, update in enumerate(updates):
                yield batch.update_unit(update, partial(self._after_update, batch, updates[number + 1 :]))
        self._gradients.next_step()

    @staticmethod
    def _after_update(batch: TrainingBatch, left: Sequence[Update]) -> list[Expected]:
        return [batch.expected_update(left[0]) if left else batch.expected_step()]

    def close(self) -> None:
        """Give up all of the step's values."""
        for lane in self._drawn:
            lane.clear()
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
