"""`GroupedDataParallelStep`: data-parallel batches, several for each device, of a model that is too large for a device.

A team is a run of neighbouring batches. All batches of a team go through a shard before the next shard is loaded, forward
and backward alike, whatever the number of batches. In the forward, teams are independent. In the backward, a team begins a
shard when the earlier teams have finished the shard, and continues from their sums, at least one shard behind the team
before. `OptimizerStep` (`train/loop/optimizer_step.py`) makes the parallel step when the batches drawn ahead are due, if
`step_strategy.py` has chosen teams; `JobState` (`pool/runtime/job_state.py`) asks for due units (see `ordered_queues.py`,
whose order of sums gives the bits of batches one after the other). A queue has no device at first.

The last team updates the trial's parameters. The other teams read copies of parameters that are not on their devices, so
the originals come to the device of the updates. Parameters moved in a step by N teams: 2N|W| loaded and |W| written back;
Harmony (Li et al.), where each device updates a replica, moves 3N|W|.
"""

from collections.abc import Hashable, Sequence

from hydra_tune.memory.block import BlockTensorView
from hydra_tune.train.parallel.ordered_queues import QueuedParallelStep
from hydra_tune.train.parallel.parallel_batch import ParallelBatch
from hydra_tune.train.state.replicas import ParameterReplicas


class GroupedDataParallelStep(QueuedParallelStep):
    """Batches under way, in teams.

    Args:
        count: number of teams; sizes of teams differ by at most 1.
    """

    def __init__(
        self,
        lanes: Sequence[ParallelBatch],
        earlier: dict[str, BlockTensorView],
        replicas: ParameterReplicas,
        *,
        count: int,
        updates: bool,
    ) -> None:
        count = min(count, len(lanes))
        teams = [rank * count // len(lanes) for rank in range(len(lanes))]
        super().__init__(
            lanes,
            earlier,
            len(lanes),
            replicas,
            queues=[(team, None) for team in range(count)],
            goes_on_with_shard=True,
            updates=updates,
        )
        self._teams = teams
        # The last team updates the parameters, so the originals are left to its device.
        for lane, team in zip(lanes, teams, strict=True):
            lane.takes_copies = team < count - 1

    def _queue_of(self, rank: int, shard: int) -> Hashable:
        del shard
        return self._teams[rank]

    def _is_free(self, kind: str) -> bool:
        # A forward leaves nothing to the next batch, so forwards need no order between teams.
        return kind == "forward"

    def _size(self, queue: Hashable) -> int:
        return sum(team == queue for team in self._teams)
