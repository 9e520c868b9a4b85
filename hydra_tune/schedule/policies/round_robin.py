"""`RoundRobin`: every job in turn.

`make_policy` (`registry.py`) makes this policy for the name `"round_robin"`; `PriorityLevels` (`schedule/levels.py`)
asks the policy's selection for a job for each idle device. The policy must keep no state: the selection has all state, because
one policy may serve several schedulers.
"""

from dataclasses import dataclass

from hydra_tune.schedule.policies.heap import Smallest
from hydra_tune.schedule.policies.policy import IncrementalPolicy, Selection


@dataclass(frozen=True)
class RoundRobin(IncrementalPolicy):
    """The eligible job whose last unit started longest ago.

    Jobs without a unit so far come first, in order of submission. On a single device, all jobs get equally many units while
    no job waits.
    """

    def start(self) -> Selection:
        """Make an empty selection."""
        return Smallest(lambda view: view.turn)
