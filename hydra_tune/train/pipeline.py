"""`Pipeline`: batches of one optimizer step side by side, each shard at home on one device.

Parameters stay where they are and the batches pass by: a device has some of the shards, and runs the units of these for every
batch. What travels is what crosses the cuts between devices. A parameter's gradients are summed where its shard is.

The shards of one home make a queue (`queues.py`). Moving a shard costs its parameters and its sums, and so a device is never
given the unit of a home that is about to be free; the next step asks anew what devices there are.

Note: what makes it exact. The forward units of a shard run in the order of the batches, and so do its backward units. So a
buffer that a forward overwrites (BatchNorm's statistics) goes through the same values as in a plain loop, as long as only one
shard uses it; and a recompute starts from the buffers that its own forward unit has saved, as ever.

Note: a home that waits for batches does not wait for ever, because all queues have their shards in one order: of those at which
batches are missing, the one that comes first misses none that another queue holds back.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

from hydra_tune.memory.block import Group, Value
from hydra_tune.shard.plan import Plan
from hydra_tune.train.lane import Lane
from hydra_tune.train.queues import Queued
from hydra_tune.train.replicas import Replicas
from hydra_tune.train.state import ModelState


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


class Pipeline(Queued):
    """Batches under way, each shard of them on one device.

    Args:
        lanes, earlier, width, replicas, goes_on_with_shard, updates: see `Queued`.
        homes: the device of each shard.
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
        super().__init__(
            lanes,
            earlier,
            width,
            replicas,
            queues=[(home, home) for home in homes],
            goes_on_with_shard=goes_on_with_shard,
            updates=updates,
        )
        self._homes = tuple(homes)

    def _queue_of(self, rank: int, shard: int) -> Hashable:
        del rank
        return self._homes[shard]

    def _is_free(self, kind: str) -> bool:
        del kind
        return False

    def _size(self, queue: Hashable) -> int:
        del queue
        return len(self._lanes)
