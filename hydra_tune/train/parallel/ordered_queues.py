"""`QueuedParallelStep`: batches side by side with their units in queues; each queue has at most one unit due at a time.

`OptimizerStep` (`train/loop/optimizer_step.py`) makes the subclasses, in `grouped_data_parallel.py` and `pipeline_parallel.py`.
`JobState` (`pool/runtime/job_state.py`) asks for due units at the start of the step, and whenever a unit of the step has run.
The hooks of the subclasses run under the step's lock (`parallel_step.py`).

A queue is near the device of its last unit. When a unit is due, nothing else of its queue runs, and the near device is
either idle and takes the unit, or has other work for an unknown time. Then another free device takes the unit, the unit's
blocks follow, and the queue is near the new device.

Note: exactness. Units of a shard that leave something to the next batch run in the order of the batches, never two at
once. A parameter's sum of gradients is an example: the backward unit of a batch adds to the sum left by the batch
before. So units may run on any device at any time, and give the same bits.

Note: order within a queue. Where all shards of a queue fit its device, the oldest batch goes first, so a batch goes
backward as early as possible. Where the shards do not fit, a queue stays with its present shard, so a shard is loaded once
for all forward units and once for all backward units (Harmony's input batch grouping). Such a queue also waits for missing
batches, so all batches of such a step are under way at once: an unstarted batch would never come.

Note: updates. Where the step ends with these batches, and no rule needs all gradients first, a shard is updated right after
its last backward unit. No unit reads the updated parameters any more: all batches have had their backward there, and a
parameter is updated with the first shard that uses it. All losses are known by then. The updates are units of the last
batch, so no two updates run at once. Meanwhile other batches run backward units of earlier shards. The optimizer's step
takes every parameter with a gradient and must not see the gradients of other batches, so units of a lane compute on
stand-ins for the parameters (`ParameterReplicas`).
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from hydra_tune.errors import BadLossError
from hydra_tune.memory.block import BlockTensorView
from hydra_tune.train.loop.batch_units import PendingUnit
from hydra_tune.train.parallel.parallel_batch import ParallelBatch
from hydra_tune.train.parallel.parallel_step import ParallelStep, ParallelUnit
from hydra_tune.train.state.replicas import ParameterReplicas


@dataclass(slots=True)
class _ParallelUnitQueue:
    """Units of which at most one is due at a time."""

    near: str | None
    is_busy: bool = False
    # Kind and shard of the last unit; an update counts as its backward.
    at_hand: tuple[str, int] | None = None


class QueuedParallelStep(ParallelStep):
    """Batches under way, with their units in queues.

    Args:
        lanes: see `ParallelStep`; their plans share parameters shard by shard (`goes_with`).
        queues: names of the queues in asking order, each with its near device at first.
        goes_on_with_shard: whether a queue prefers its present shard to the oldest batch.
        updates: whether shards are updated, because the step ends with these batches.
    """

    def __init__(
        self,
        lanes: Sequence[ParallelBatch],
        earlier: dict[str, BlockTensorView],
        width: int,
        replicas: ParameterReplicas,
        *,
        queues: Iterable[tuple[Hashable, str | None]],
        goes_on_with_shard: bool,
        updates: bool,
    ) -> None:
        super().__init__(lanes, earlier, width, replicas)
        self._queues = {name: _ParallelUnitQueue(near) for name, near in queues}
        self._goes_on_with_shard = goes_on_with_shard
        # The batch whose backward units are followed by updates.
        self._updating = len(lanes) - 1 if updates else None
        self._programs: list[Iterator[PendingUnit]] = [
            lane.units(is_last=rank == self._updating) for rank, lane in enumerate(lanes)
        ]
        # Next unit of each batch, due or not.
        self._next: dict[int, PendingUnit] = {}
        self._running: dict[int, PendingUnit] = {}
        # Number of batches that have run a unit, by kind and shard.
        self._run: Counter[tuple[str, int]] = Counter()
        # The same, by queue as well.
        self._run_here: Counter[tuple[Hashable, str, int]] = Counter()
        self._started = 0
        self._over: set[int] = set()

    @abstractmethod
    def _queue_of(self, rank: int, shard: int) -> Hashable:
        """Return the queue of a batch's units of a shard."""

    @abstractmethod
    def _is_free(self, kind: str) -> bool:
        """Whether forward or backward units may run before the units of earlier batches."""

    @abstractmethod
    def _size(self, queue: Hashable) -> int:
        """Return the number of batches whose units of a shard go through a queue, the same for each shard of the queue."""

    def _first(self) -> list[ParallelUnit]:
        while self._started < min(self._end, len(self._over) + self._width):
            self._started += 1
            self._advance(self._started - 1)
        return [due_unit for name in self._queues if (due_unit := self._due(name)) is not None]

    def _after(self, rank: int, device: str) -> list[ParallelUnit]:
        unit = self._running.pop(rank)
        name = self._queue_of(rank, unit.shard)
        queue = self._queues[name]
        queue.is_busy, queue.near = False, device
        queue.at_hand = ("backward" if unit.kind == "update" else unit.kind, unit.shard)
        self._run[unit.kind, unit.shard] += 1
        self._run_here[name, unit.kind, unit.shard] += 1
        if unit.kind == "backward" and rank != self._updating:
            self._take_sums(rank, unit.shard)
        self._advance(rank)
        return self._first()

    def _advance(self, rank: int) -> None:
        """Determine the next unit of a batch."""
        lane = self._lanes[rank]
        try:
            pending = next(self._programs[rank], None)
        # The losses come in the order of the batches, so no earlier batch has a bad loss.
        except BadLossError as error:
            self._end, self._error = rank, error
            self._next.clear()
            return
        if pending is not None:
            self._next[rank] = pending
            return
        lane.check_draws()
        lane.clear()
        self._over.add(rank)

    def _due(self, name: Hashable) -> ParallelUnit | None:
        """Return the next unit of a queue, if no unit of the queue is under way and a unit may run."""
        queue = self._queues[name]
        if queue.is_busy or self._error is not None:
            return None
        ranks = [
            rank
            for rank, unit in self._next.items()
            if self._queue_of(rank, unit.shard) == name and self._may_run(rank)
        ]
        if not ranks:
            return None
        rank = min(ranks, key=lambda rank: self._urgency(rank, queue))
        if self._waits(rank, name):
            return None
        unit = self._running[rank] = self._next.pop(rank)
        queue.is_busy = True
        if unit.kind == "backward":
            names = self._lanes[rank].trained[unit.shard]
            # The sums of earlier batches enter before the unit runs, so the backward adds to them in the order of the
            # batches.
            self._lanes[rank].take_in({name: self._sum.pop(name) for name in names if name in self._sum})
        return ParallelUnit(rank=rank, pending=unit, near=queue.near)

    def _urgency(self, rank: int, queue: _ParallelUnitQueue) -> tuple[bool, bool, int]:
        """Return a sort key, the most urgent unit first.

        Updates go first because they free memory, then units of the queue's present shard, then the oldest batch.
        """
        unit = self._next[rank]
        return unit.kind != "update", self._goes_on_with_shard and (unit.kind, unit.shard) != queue.at_hand, rank

    def _waits(self, rank: int, name: Hashable) -> bool:
        """Whether a queue stays idle instead of switching shards, because its present shard still misses batches."""
        unit, at_hand = self._next[rank], self._queues[name].at_hand
        if not self._goes_on_with_shard or at_hand is None or unit.kind == "update":
            return False
        return (unit.kind, unit.shard) != at_hand and self._run_here[name, *at_hand] < self._size(name)

    def _may_run(self, rank: int) -> bool:
        """Whether the batch's next unit need not wait for earlier batches any longer."""
        unit = self._next[rank]
        return unit.kind == "update" or self._is_free(unit.kind) or self._run[unit.kind, unit.shard] == rank

    def _take_sums(self, rank: int, shard: int) -> None:
        """Take the sums of a finished backward unit, for the next batch."""
        lane = self._lanes[rank]
        self._sum |= lane.give_away(lane.trained[shard])
