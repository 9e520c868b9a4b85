"""`Queued`: batches side by side whose units stand in queues, each of which has one unit due at a time.

A queue is near the device on which the last of its units ran. So no unit waits for that device while another could have it:
when a unit is due, nothing else of its queue runs, and the device is either idle, and takes it, or works for another job for
who knows how long. Then whichever device is free takes the unit, what it needs follows, and that is where the queue is then.

Note: what makes it exact. Of the units of one shard, those that leave something to the next batch run in the order of the
batches, and no two of them are under way at once. A parameter's sum of gradients is such a thing: the backward unit of a batch
adds to the sum that the batch before has left. All that is a matter of what is due, never of which device is free when: units
may run on any device, at any time, and give the same bits.

Note: order within a queue. Where all shards that a queue uses fit its device, the oldest batch goes first, so a batch goes
backward as soon as it can, and few are under way. Where they do not fit, a queue goes on with the shard that it has at hand
until all its batches have been there, so that each shard is loaded once for all their forward units and once for all their
backward units (Harmony's input batch grouping). Where it has to wait for a batch, it waits: a batch that went on alone, shard
after shard, would have the others' shards taken off the device and loaded again. It is so only with all batches under way at
once, for a batch that has not started yet may never come.

Note: updates. Where the step ends with these batches and nothing has to be known of all gradients first, a shard is updated
right after its last backward unit, which has parameters and sums at hand. Nobody reads these parameters any more: all batches
have had their backward there, so they have had all forwards, and the backward of every later shard; a parameter is updated
with the first shard that uses it. All losses are known by then. The updates are units of the last batch, so no two of them run
at once. But other batches' backward units of earlier shards run meanwhile, and their gradients must not be seen by the
optimizer's step, which takes whatever parameter has one: so units of a lane compute on stand-ins for the parameters
(`Replicas`).
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from hydra_tune.errors import BadLossError
from hydra_tune.memory.block import Value
from hydra_tune.train.lane import Lane
from hydra_tune.train.replicas import Replicas
from hydra_tune.train.spread import LaneUnit, Spread
from hydra_tune.train.step import PendingUnit


@dataclass(slots=True)
class _Queue:
    """Units of which one is due at a time."""

    near: str | None
    is_busy: bool = False
    at_hand: tuple[str, int] | None = None  # kind and shard of its last unit; an update belongs to its backward


class Queued(Spread):
    """Batches under way, their units in queues.

    Args:
        lanes, earlier, width, replicas: see `Spread`; the lanes' plans go with each other.
        queues: names of the queues, in the order in which they are asked, and the device that each is near at first.
        goes_on_with_shard: whether a queue prefers the shard that it has at hand to the oldest batch.
        updates: whether shards are updated, because the step ends with these batches.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        earlier: dict[str, Value],
        width: int,
        replicas: Replicas,
        *,
        queues: Iterable[tuple[Hashable, str | None]],
        goes_on_with_shard: bool,
        updates: bool,
    ) -> None:
        super().__init__(lanes, earlier, width, replicas)
        self._queues = {name: _Queue(near) for name, near in queues}
        self._goes_on_with_shard = goes_on_with_shard
        self._waits_for_batches = goes_on_with_shard and width >= len(lanes)
        self._updating = len(lanes) - 1 if updates else None  # the batch whose units are followed by updates
        self._programs: list[Iterator[PendingUnit]] = [
            lane.units(is_last=rank == self._updating) for rank, lane in enumerate(lanes)
        ]
        self._next: dict[int, PendingUnit] = {}  # by batch: what it does next, due or not
        self._running: dict[int, PendingUnit] = {}
        self._run: Counter[tuple[str, int]] = Counter()  # batches that have run a unit, by kind and shard
        self._run_here: Counter[tuple[Hashable, str, int]] = Counter()  # by queue as well
        self._started = 0
        self._over: set[int] = set()

    @abstractmethod
    def _queue_of(self, rank: int, shard: int) -> Hashable:
        """The queue of a batch's units of a shard."""

    @abstractmethod
    def _is_free(self, kind: str) -> bool:
        """Whether forward or backward units may run before those of earlier batches."""

    @abstractmethod
    def _size(self, queue: Hashable) -> int:
        """The batches whose units of a shard stand in a queue that has the shard."""

    def _first(self) -> list[LaneUnit]:
        while self._started < min(self._end, len(self._over) + self._width):
            self._started += 1
            self._advance(self._started - 1)
        return [found for name in self._queues if (found := self._due(name)) is not None]

    def _after(self, rank: int, device: str) -> list[LaneUnit]:
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
        """Find out what a batch does next."""
        lane = self._lanes[rank]
        try:
            pending = next(self._programs[rank], None)
        except BadLossError as error:  # batches come to their losses in order, so none before has a bad one
            self._end, self._error = rank, error
            self._next.clear()
            return
        if pending is not None:
            self._next[rank] = pending
            return
        lane.check_draws()
        lane.clear()
        self._over.add(rank)

    def _due(self, name: Hashable) -> LaneUnit | None:
        """The next unit of a queue, if it has none under way and one may run."""
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
            self._lanes[rank].take_in({name: self._sum.pop(name) for name in names if name in self._sum})
        return LaneUnit(rank=rank, pending=unit, near=queue.near)

    def _urgency(self, rank: int, queue: _Queue) -> tuple[bool, bool, int]:
        """What is least goes first: updates, which make room, then what a device has at hand, then the oldest batch."""
        unit = self._next[rank]
        return unit.kind != "update", self._goes_on_with_shard and (unit.kind, unit.shard) != queue.at_hand, rank

    def _waits(self, rank: int, name: Hashable) -> bool:
        """Whether a queue rather does nothing than go on to another shard, because batches are to come to the one at hand."""
        unit, at_hand = self._next[rank], self._queues[name].at_hand
        if not self._waits_for_batches or at_hand is None or unit.kind == "update":
            return False
        return (unit.kind, unit.shard) != at_hand and self._run_here[name, *at_hand] < self._size(name)

    def _may_run(self, rank: int) -> bool:
        """Whether the batches before have run what this one runs next; an update comes after the last one's backward."""
        unit = self._next[rank]
        return unit.kind == "update" or self._is_free(unit.kind) or self._run[unit.kind, unit.shard] == rank

    def _take_sums(self, rank: int, shard: int) -> None:
        """A backward unit has run: its sums are for the next batch."""
        lane = self._lanes[rank]
        self._sum |= lane.give_away(lane.trained[shard])
