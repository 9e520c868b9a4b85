"""Predicts the bytes moved between a device and the host in an optimizer step, from the pilot's costs of the shards.

The module simulates a trial alone on its device for a few steps: the blocks needed by each unit, the victims spilled in
the pager's order, and the blocks sent ahead meanwhile. Several batches of a step go through each shard together or one
after the other, as in training (`train/parallel/batch_grouping.py`). A simulated block holds all of a shard's tensors
of a kind. While a step is planned, `shard/partition/shard_size_search.py` (cuts), `optimizer_placement.py` (places of
the updates) and `step_estimate.py` (numbers of pieces) ask for the prediction, with the `StepAccessPattern` of
`shard/partition/partition_planner.py`. While a step runs, `train/parallel/batch_grouping.py` asks `is_worth_grouping`.

Note: the orders copy `memory/pager.py` and `memory/prefetch.py`, which this module must not import; a change there
needs a change here. `tests/integration/test_packing.py` compares the prediction with a rehearsal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hydra_tune.shard.cost.pilot import ShardCost

_WARM_STEPS = 2  # steps until a step moves the same bytes as the step before
_SENT_UNITS = 2  # units for which a block sent ahead is the last victim
_STATE = ("parameters", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """Traffic of a step.

    Attributes:
        nbytes: bytes copied to and from the device, without the batches and constants themselves.
        copies: number of block copies, likewise.
        units: number of forward, backward and update units of the step.
    """

    nbytes: int
    copies: int
    units: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAccessPattern:
    """Use of the shards by a step, beyond the shards' costs.

    Attributes:
        waits: whether every update waits for all gradients.
        sends_ahead: whether the next blocks are sent to the device during computation.
        num_batches: number of batches, or pieces of batches, in a step.
        may_group: whether the batches may go through each shard together, if worthwhile (`is_worth_grouping`).
    """

    waits: bool = False
    sends_ahead: bool = True
    num_batches: int = 1
    may_group: bool = False


PlayedBlock = tuple[str, int, int]
"""Kind of the block, shard, and batch of the step (0 for blocks shared by all batches)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficUnit:
    """Inputs and results of a unit.

    Attributes:
        needs: blocks that must be on the device, if they exist by then.
        workspace_bytes: workspace while the unit runs.
        is_update: whether the unit is an update.
        makes: blocks created on the device.
        changes: blocks changed, so that only the device has the right bytes.
        copied_home: blocks that the host needs: gradients for an update on the host.
        drops: blocks no longer needed.
    """

    needs: tuple[PlayedBlock, ...]
    workspace_bytes: int = 0
    is_update: bool = False
    makes: tuple[PlayedBlock, ...] = ()
    changes: tuple[PlayedBlock, ...] = ()
    copied_home: tuple[PlayedBlock, ...] = ()
    drops: tuple[PlayedBlock, ...] = ()


def step_traffic(costs: Sequence[ShardCost], budget_bytes: int, habits: StepAccessPattern | None = None) -> StepTraffic:
    """Traffic of a step of these shards on an otherwise unused device.

    Args:
        costs: costs of the shards in forward order; each shard must fit the device.
        budget_bytes: budget of the device.
        habits: use of the shards; by default each shard is updated right after its backward.
    """
    habits = habits or StepAccessPattern()
    return played(list(units_of(costs, habits)), sizes_of(costs, habits.num_batches), budget_bytes, habits)


def played(
    units: Sequence[TrafficUnit], sizes: dict[PlayedBlock, int], budget_bytes: int, habits: StepAccessPattern
) -> StepTraffic:
    """Traffic of a step of these units in the steady state."""
    device = _TrafficSimulator(sizes, budget_bytes)
    before = (0, 0)
    for _ in range(_WARM_STEPS + 1):
        # Taken anew before each step: only the last step counts, after the steps that fill the device.
        before = (device.moved_bytes, device.copies)
        for number, unit in enumerate(units):
            # The next step follows at once, hence the modulo. As in the pool, an update that follows a backward is sent
            # ahead together with the unit behind the update.
            coming = [units[(number + ahead) % len(units)] for ahead in (1, 2)]
            with_update = coming if coming[0].is_update and not unit.is_update and not habits.waits else coming[:1]
            device.run(unit, with_update if habits.sends_ahead else ())
    return StepTraffic(nbytes=device.moved_bytes - before[0], copies=device.copies - before[1], units=len(units))


def is_worth_grouping(costs: Sequence[ShardCost]) -> bool:
    """Whether a batch in a group moves fewer bytes than a batch run alone, on a device with no room to spare.

    Run alone, a batch loads all parameters twice and moves the sums of gradients once each way. In a group, its values
    come back once more, and its gradients of values and kept activations go and come.
    """
    if len(costs) == 1:
        return False
    parameters = sum(cost.state_bytes for cost in costs)
    gradients = sum(cost.trained_bytes for cost in costs)
    values = sum(cost.value_bytes + 2 * (cost.handed_bytes + cost.kept_bytes) for cost in costs)
    return values < 2 * parameters + 2 * gradients


def sizes_of(costs: Sequence[ShardCost], num_batches: int) -> dict[PlayedBlock, int]:
    """Bytes of each shard's blocks."""
    sizes: dict[PlayedBlock, int] = {}
    for index, cost in enumerate(costs):
        sizes["parameters", index, 0] = cost.state_bytes
        sizes["optimizer", index, 0] = 0 if cost.updates_on_host else cost.optimizer_bytes
        sizes["gradients", index, 0] = cost.trained_bytes
        for batch in range(num_batches):
            sizes["inputs", index, batch] = cost.input_bytes
            sizes["values", index, batch] = cost.value_bytes - cost.input_bytes
            sizes["handed", index, batch] = cost.handed_bytes
            sizes["activations", index, batch] = cost.kept_bytes
    return sizes


def units_of(costs: Sequence[ShardCost], habits: StepAccessPattern) -> Iterator[TrafficUnit]:
    """Yield forward units, backward units and updates, in order."""
    last, batches = len(costs) - 1, range(habits.num_batches)
    groups: Sequence[Sequence[int]] = [[batch] for batch in batches]
    if habits.may_group and is_worth_grouping(costs):
        groups = [batches]
    for group in groups:
        for index in range(last):
            yield from (_forward(costs[index], index, batch) for batch in group)
        for index in range(last, -1, -1):
            yield from (_backward(costs[index], index, batch) for batch in group[:-1])
            # A group's batches are released after all of its backward units.
            over = [("inputs", shard, batch) for shard in range(last + 1) for batch in group] if index == 0 else []
            yield _backward(costs[index], index, group[-1], over)
            if not habits.waits and group[-1] == batches[-1]:
                yield _update(costs[index], index)
    if habits.waits:
        yield from (_update(cost, index) for index, cost in enumerate(costs))


def _forward(cost: ShardCost, index: int, batch: int) -> TrafficUnit:
    return TrafficUnit(
        needs=(("parameters", index, 0), ("values", index, batch), ("inputs", index, batch)),
        workspace_bytes=cost.forward_workspace,
        makes=(("values", index + 1, batch), ("activations", index, batch)),
    )


def _backward(cost: ShardCost, index: int, batch: int, over: Sequence[PlayedBlock] = ()) -> TrafficUnit:
    """Make a backward unit; `over` lists further blocks no longer needed after the unit."""
    own_blocks: tuple[PlayedBlock, ...] = (
        ("values", index, batch),
        ("activations", index, batch),
        ("handed", index, batch),
    )
    gradient_block: tuple[PlayedBlock, ...] = (("gradients", index, 0),)
    handed_on: tuple[PlayedBlock, ...] = (("handed", index - 1, batch),) if index else ()
    is_first = batch == 0  # later batches add to the gradients of the first batch
    return TrafficUnit(
        needs=(("parameters", index, 0), *own_blocks, ("inputs", index, batch), *(() if is_first else gradient_block)),
        workspace_bytes=cost.backward_workspace,
        makes=(*gradient_block, *handed_on) if is_first else handed_on,
        changes=() if is_first else gradient_block,
        drops=(*own_blocks, *over),
    )


def _update(cost: ShardCost, index: int) -> TrafficUnit:
    gradients = ("gradients", index, 0)
    if cost.updates_on_host:
        # The update changes the parameters on the host, so a copy on the device is stale.
        return TrafficUnit(
            needs=(), is_update=True, copied_home=(gradients,), drops=(gradients, ("parameters", index, 0))
        )
    state: tuple[PlayedBlock, ...] = (("parameters", index, 0), ("optimizer", index, 0)) if cost.trained_bytes else ()
    return TrafficUnit(
        needs=(*state, gradients),
        is_update=True,
        workspace_bytes=cost.update_workspace if state else 0,
        changes=state,
        drops=(gradients,),
    )


class _TrafficSimulator:
    """Simulated content of a device, and the copies made so far."""

    def __init__(self, sizes: dict[PlayedBlock, int], budget_bytes: int) -> None:
        self._sizes = sizes
        self._budget = budget_bytes
        self._resident: dict[PlayedBlock, bool] = {}  # -> whether dirty; least recently used first
        self._away: set[PlayedBlock] = set()  # blocks other than state that have been written back
        self._leaving: set[PlayedBlock] = set()  # written back ahead; leave first
        self._sent: dict[PlayedBlock, int] = {}  # sent ahead and not used yet -> value of `_now` at that time
        self._free_bytes = budget_bytes
        self._now = 0
        self.moved_bytes = 0
        self.copies = 0

    def run(self, unit: TrafficUnit, following: Sequence[TrafficUnit]) -> None:
        """Load the needs of a unit, send the needs of the following units ahead, and apply the results of the unit."""
        self._now += 1
        pinned = self._existing(unit)
        for block in pinned:
            self._leaving.discard(block)
            self._sent.pop(block, None)
        missing = [block for block in pinned if block not in self._resident]
        self._make_room(sum(map(self._size, missing)) + unit.workspace_bytes, pinned)
        for block in missing:
            self._load(block)
        for block in pinned:
            # To the end of the dict, as the most recently used block.
            self._resident[block] = self._resident.pop(block)
        self._free_bytes -= unit.workspace_bytes
        # Between the two changes of the free bytes: blocks are sent while the unit holds its workspace.
        if following:
            self._send(following, pinned)
        self._free_bytes += unit.workspace_bytes
        self._apply(unit)

    def _apply(self, unit: TrafficUnit) -> None:
        """Apply the results of a unit."""
        for block in unit.makes:
            self._add(block, dirty=True)
        for block in unit.changes:
            if self._size(block):
                self._resident[block] = True
        for block in unit.copied_home:
            if block in self._resident:
                self._write_back(block)
        for block in unit.drops:
            self._drop(block)

    def _existing(self, unit: TrafficUnit) -> list[PlayedBlock]:
        """Needs of a unit that exist by now: state and batches always, values once made."""
        return [
            block
            for block in unit.needs
            if self._size(block) > 0 and (_is_always_there(block) or block in self._resident or block in self._away)
        ]

    def _size(self, block: PlayedBlock) -> int:
        return self._sizes[block]

    def _make_room(self, nbytes: int, pinned: Sequence[PlayedBlock]) -> None:
        for victim in self._victims(pinned):
            if nbytes <= self._free_bytes:
                return
            self._write_back(victim)
            self._remove(victim)

    def _victims(self, kept: Sequence[PlayedBlock]) -> list[PlayedBlock]:
        """Victims in the pager's order.

        First leaving blocks, then optimizer state, most recent first, then the rest, least recent first, and last the
        blocks sent ahead for the present units.
        """
        free = [block for block in self._resident if block not in kept]
        sent_blocks = [block for block, sent in self._sent.items() if self._now - sent <= _SENT_UNITS]
        leaving = [block for block in free if block in self._leaving]
        free = [block for block in free if block not in self._leaving and block not in sent_blocks]
        optimizer_blocks = [block for block in free if block[0] == "optimizer"]
        other_blocks = [block for block in free if block[0] != "optimizer"]
        return [
            *leaving,
            *reversed(optimizer_blocks),
            *other_blocks,
            *(block for block in sent_blocks if block not in kept),
        ]

    def _send(self, following: Sequence[TrafficUnit], pinned: Sequence[PlayedBlock]) -> None:
        """Imitate `memory/prefetch.py` while a unit computes; a block written back for room gives its room the next time."""
        wanted = [block for unit in following for block in self._existing(unit)]
        kept = [*pinned, *wanted]
        room, owed = self._budget, 0
        for unit in following:
            needs = self._existing(unit)
            for block in needs:
                room -= self._size(block)
                # As in `BlockPrefetcher.send`: a block without room beside earlier needs would be spilled again at once.
                if room < 0:
                    break
                if block in self._resident:
                    continue
                if not self._find_room(self._size(block), owed, kept):
                    owed += self._size(block)
                    continue
                self._load(block)
                self._sent[block] = self._now
            room = min(room, self._budget - sum(map(self._size, needs)) - unit.workspace_bytes)
        self._shed(max(unit.workspace_bytes for unit in following) + owed, kept, drops=False)

    def _find_room(self, nbytes: int, owed: int, kept: Sequence[PlayedBlock]) -> bool:
        # As in the prefetcher, no victim leaves unless all victims together make enough room.
        if nbytes > self._free_bytes and nbytes + owed - self._free_bytes <= sum(map(self._size, self._victims(kept))):
            self._shed(nbytes + owed, kept, drops=True)
        return nbytes <= self._free_bytes

    def _shed(self, nbytes: int, kept: Sequence[PlayedBlock], *, drops: bool) -> None:
        """Start the write-backs for `nbytes` of room; with `drops`, clean blocks leave at once."""
        short = nbytes - self._free_bytes
        for victim in self._victims(kept):
            if short <= 0:
                return
            # A block just sent must not make room for the next block sent beside the same unit.
            if self._sent.get(victim) == self._now:
                continue
            short -= self._size(victim)
            if self._resident[victim]:
                self._write_back(victim)
                self._leaving.add(victim)
            elif drops and victim not in self._leaving:
                self._remove(victim)

    def _write_back(self, block: PlayedBlock) -> None:
        if self._resident[block]:
            self._move(block)
            self._resident[block] = False
        # State exists on the host from the start, a value only after a spill.
        if block[0] not in _STATE:
            self._away.add(block)

    def _drop(self, block: PlayedBlock) -> None:
        """Remove a block no longer needed."""
        if block in self._resident:
            self._remove(block)
        self._away.discard(block)

    def _load(self, block: PlayedBlock) -> None:
        if block[0] != "inputs":  # batches come whatever the cut
            self._move(block)
        self._add(block, dirty=False)

    def _add(self, block: PlayedBlock, *, dirty: bool) -> None:
        if self._size(block):
            self._resident[block] = dirty
            self._free_bytes -= self._size(block)

    def _remove(self, block: PlayedBlock) -> None:
        del self._resident[block]
        self._leaving.discard(block)
        self._sent.pop(block, None)
        self._free_bytes += self._size(block)

    def _move(self, block: PlayedBlock) -> None:
        self.moved_bytes += self._size(block)
        self.copies += 1


def _is_always_there(block: PlayedBlock) -> bool:
    return block[0] in _STATE or block[0] == "inputs"
