"""`Teams`: data-parallel batches of a model that no device has room for: several batches a device, shard by shard.

A team is a run of neighbouring batches. All of them go through a shard before the next one is loaded, forward and backward
alike, so a step loads each shard twice for each team, however many batches it has. Forward, teams do not know of each other. In
the backward a team begins with a shard when the teams before it are through, and goes on from the sums that they leave: so
nobody's gradients wait for others on the host, and each team is one shard behind the one before it. The last team updates each
shard right after its backward.

The last team works on the trial's parameters, which it updates, and the others on copies: so no original is where an update
does not need it. Parameters moved in a step by N teams: 2N|W| loaded and |W| written back; Harmony (Li et al.), in which each
device updates a replica of its own, has 3N|W|.
"""

from collections.abc import Hashable, Sequence

from hydra_tune.memory.block import Value
from hydra_tune.train.lane import Lane
from hydra_tune.train.queues import Queued
from hydra_tune.train.replicas import Replicas


class Teams(Queued):
    """Batches under way, in teams.

    Args:
        lanes, earlier, replicas, updates: see `Queued`.
        count: how many teams, of sizes that differ by one at most.
    """

    def __init__(
        self, lanes: Sequence[Lane], earlier: dict[str, Value], replicas: Replicas, *, count: int, updates: bool
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
        for lane, team in zip(lanes, teams, strict=True):
            lane.takes_copies = team < count - 1

    def _queue_of(self, rank: int, shard: int) -> Hashable:
        del shard
        return self._teams[rank]

    def _is_free(self, kind: str) -> bool:
        return kind == "forward"  # which leaves nothing to the next batch

    def _size(self, queue: Hashable) -> int:
        return sum(team == queue for team in self._teams)
