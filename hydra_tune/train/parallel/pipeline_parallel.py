"""`PipelineParallelStep`: batches of an optimizer step side by side, with a home device for each shard.

Batches travel from device to device: a device is at first the home of some of the shards, and runs their units for all batches
while free. A parameter's gradients are summed on the device of its shard. `OptimizerStep` (`train/loop/optimizer_step.py`)
makes the parallel step when the batches drawn ahead are due, if `step_strategy.py` has chosen homes, and asks `may_pipeline`
and `goes_with` which batches may join; `JobState` (`pool/runtime/job_state.py`) asks for due units.

The shards of a home form a queue (`ordered_queues.py`). Moving a shard costs a copy of parameters and sums, so a unit leaves
its home only where the home has other work; the next step asks for devices again.

Note: exactness. The forward units of a shard run in the order of the batches, and so do the backward units. So a buffer
overwritten by a forward (BatchNorm's statistics) goes through the same values as in a plain loop, as long as a single
shard uses the buffer. A recompute starts from the saved buffers of its own forward unit, as always.

Note: no deadlock. A home never waits for batches for ever, because all queues order shards alike: among shards with
missing batches, the first in the order misses no batch held back by another queue.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

from hydra_tune.memory.block import BlockTensorView, TensorBlock
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.train.parallel.ordered_queues import QueuedParallelStep
from hydra_tune.train.parallel.parallel_batch import ParallelBatch
from hydra_tune.train.state.model_state import ModelState
from hydra_tune.train.state.replicas import ParameterReplicas


def groups_of_one_shard(plan: ShardPlan, state: ModelState) -> set[TensorBlock]:
    """Return the groups of parameters and buffers used by a single shard of the plan."""
    uses = Counter(group for shard in plan.shards for group in state.groups(shard.graph.state))
    return {group for group, count in uses.items() if count == 1}


def may_pipeline(plan: ShardPlan, state: ModelState) -> bool:
    """Whether pipelined batches of a step give the same bits as batches one after the other."""
    written_names = [name for shard in plan.shards for name in shard.graph.written_state]
    # Batches reach the homes at different times: a buffer written by a shard and used by another would have another
    # batch's value.
    return plan.may_be_pipelined and groups_of_one_shard(plan, state).issuperset(state.groups(written_names))


def goes_with(plan: ShardPlan, other: ShardPlan) -> bool:
    """Whether batches of both plans may share a pipeline: their shards use and train the same parameters."""
    return plan is other or _signature(plan) == _signature(other)


def _signature(plan: ShardPlan) -> list[tuple[object, ...]]:
    return [
        (set(shard.graph.state), shard.graph.written_state, shard.trained, shard.shared_gradients, shard.has_backward)
        for shard in plan.shards
    ]


class PipelineParallelStep(QueuedParallelStep):
    """Batches under way, with a home for each shard.

    Args:
        homes: the device of each shard at first.
    """

    def __init__(
        self,
        lanes: Sequence[ParallelBatch],
        earlier: dict[str, BlockTensorView],
        width: int,
        replicas: ParameterReplicas,
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
