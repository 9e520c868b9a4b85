"""`Pipeline`: batches of one optimizer step side by side, each shard at home on one device.

Parameters stay where they are and the batches pass by: a device has some of the shards, and runs the units of these for every
batch. What travels is what crosses the cuts between devices. A parameter's gradients are summed where its shard is.

Note: what makes it exact. The forward units of a shard run in the order of the batches, and so do its backward units; a
backward unit is not due before that of the batch before it has run, because it adds to the sum that this one leaves. No two
units of one shard are under way at once. All that is a matter of what is due, never of which device is free when: units may run
on any device, at any time, and give the same bits. So a buffer that a forward overwrites (BatchNorm's statistics) goes through
the same values as in a plain loop, as long as only one shard uses it; and a recompute starts from the buffers that its own
forward unit has saved, as ever.

Note: homes. The shards of one home make a queue, of which one unit is due at a time; it is to run near where the last one of
its queue ran. So no unit waits for its home while another device could have it: when a unit is due, nothing else of its queue
runs, and its home is either idle, and takes it, or works for another job for who knows how long. Then whichever device is free
takes the unit, the parameters follow it, and that is the queue's home from now on. A device is never given the unit of a home
that is about to be free: moving a shard costs its parameters and its sums, and the next step asks anew what devices there are.

Note: order within a queue. Where all shards of a home fit its device, the oldest batch goes first, so a batch goes backward
as soon as it can, and few are under way. Where they do not fit, a queue goes on with the shard that it has at hand until all
batches have been there, so that each shard is loaded once for all forward units and once for all backward units (Harmony's
input batch grouping). Where it has to wait for a batch, it waits: a batch that went on alone, shard after shard, would have
the others' shards taken off the device and loaded again. That ends, because all queues have their shards in one order: of
those at which batches are missing, the one that comes first misses none that another queue holds back. It is so only with all
batches under way at once.

Note: updates. Where the step ends with these batches and nothing has to be known of all gradients first, a shard is updated
right after its last backward unit, by its home, which has parameters and sums at hand. Nobody reads these parameters any more:
all batches have had their backward there, so they have had all forwards, and the backward of every later shard; a parameter is
updated with the first shard that uses it. All losses are known by then. The updates are units of the last batch, so no two of
them run at once. But other batches' backward units of earlier shards run meanwhile, and their gradients must not be seen by
the optimizer's step, which takes whatever parameter has one: so units of a lane compute on stand-ins for the parameters
(`Replicas`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hydra_tune.errors import BadLossError
from hydra_tune.memory.block import Group, Value
from hydra_tune.shard.plan import Plan
from hydra_tune.train.lane import Lane
from hydra_tune.train.replicas import Replicas
from hydra_tune.train.spread import LaneUnit, Spread
from hydra_tune.train.state import ModelState
from hydra_tune.train.step import PendingUnit


def groups_of_one_shard(plan: Plan, state: ModelState) -> set[Group]:
    """Parameters and buffers that no two shards of a plan use."""
    uses = Counter(group for shard in plan.shards for group in state.groups(shard.graph.state))
    return {group for group, count in uses.items() if count == 1}


def may_pipeline(plan: Plan, state: ModelState) -> bool:
    """Whether the batches of a step can be pipelined and give the bits that they give one after the other."""
    written = [name for shard in plan.shards for name in shard.graph.written_state]
    return plan.may_be_pipelined and groups_of_one_shard(plan, state).issuperset(state.groups(written))


def goes_with(plan: Plan, other: Plan) -> bool:
    """Whether batches of both plans may be in one pipeline: their shards use and train the same."""
    return plan is other or _signature(plan) == _signature(other)


def _signature(plan: Plan) -> list[tuple[object, ...]]:
    return [
        (set(shard.graph.state), shard.graph.written_state, shard.trained, shard.shared_gradients, shard.has_backward)
        for shard in plan.shards
    ]


@dataclass(slots=True)
class _Queue:
    """The units of the shards of one home."""

    near: str
    is_busy: bool = False
    at_hand: tuple[str, int] | None = None  # kind and shard of its last unit; an update belongs to its backward


class Pipeline(Spread):
    """Batches under way, each shard of them on one device.

    Args:
        lanes, earlier, width, replicas: see `Spread`; the lanes' plans go with each other.
        homes: the device of each shard.
        goes_on_with_shard: whether a device prefers the shard that it has at hand to the oldest batch.
        updates: whether shards are updated, because the step ends with these batches.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        earlier: dict[str, Value],
        width: int,
        replicas: Replicas,
        *,
        homes: Sequence[str],
        goes_on_with_shard: bool,
        updates: bool,
    ) -> None:
        super().__init__(lanes, earlier, width, replicas)
        self._homes = tuple(homes)
        self._queues = {home: _Queue(home) for home in homes}
        self._goes_on_with_shard = goes_on_with_shard
        self._waits_for_batches = goes_on_with_shard and width >= len(lanes)
        self._updating = len(lanes) - 1 if updates else None  # the batch whose units are followed by updates
        self._programs: list[Iterator[PendingUnit]] = [
            lane.units(is_last=rank == self._updating) for rank, lane in enumerate(lanes)
        ]
        self._next: dict[int, PendingUnit] = {}  # by batch: what it does next, due or not
        self._running: dict[int, PendingUnit] = {}
        self._run: Counter[tuple[str, int]] = Counter()  # batches that have run a unit, by kind and shard
        self._started = 0
        self._over: set[int] = set()

    def _first(self) -> list[LaneUnit]:
        while self._started < min(self._end, len(self._over) + self._width):
            self._started += 1
            self._advance(self._started - 1)
        return [found for home in self._queues if (found := self._due(home)) is not None]

    def _after(self, rank: int, device: str) -> list[LaneUnit]:
        unit = self._running.pop(rank)
        queue = self._queues[self._homes[unit.shard]]
        queue.is_busy, queue.near = False, device
        queue.at_hand = ("backward" if unit.kind == "update" else unit.kind, unit.shard)
        self._run[unit.kind, unit.shard] += 1
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

    def _due(self, home: str) -> LaneUnit | None:
        """The next unit of a home, if it has none under way and one may run."""
        queue = self._queues[home]
        if queue.is_busy or self._error is not None:
            return None
        ranks = [rank for rank, unit in self._next.items() if self._homes[unit.shard] == home and self._may_run(rank)]
        if not ranks:
            return None
        rank = min(ranks, key=lambda rank: self._urgency(rank, queue))
        if self._waits(rank, queue):
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

    def _waits(self, rank: int, queue: _Queue) -> bool:
        """Whether a home rather does nothing than go on to another shard, because batches are to come to the one at hand."""
        unit = self._next[rank]
        if not self._waits_for_batches or queue.at_hand is None or unit.kind == "update":
            return False
        return (unit.kind, unit.shard) != queue.at_hand and self._run[queue.at_hand] < len(self._lanes)

    def _may_run(self, rank: int) -> bool:
        """Whether the batches before have run what this one runs next; an update comes after the last one's backward."""
        unit = self._next[rank]
        return unit.kind == "update" or self._run[unit.kind, unit.shard] == rank

    def _take_sums(self, rank: int, shard: int) -> None:
        """A backward unit has run: its sums are for the next batch."""
        lane = self._lanes[rank]
        self._sum |= lane.give_away(lane.trained[shard])
