"""`SRTF`: shortest remaining time first, the rule of operating systems for short waits.

`make_policy` (`registry.py`) makes this policy for the name `"srtf"`; `PriorityLevels` (`schedule/levels.py`) asks the
policy's selection for a job for each idle device. The policy must keep no state: the selection has all state, because one
policy may serve several schedulers.
"""

from dataclasses import dataclass

from hydra_tune.schedule.policies.heap import Smallest
from hydra_tune.schedule.policies.policy import IncrementalPolicy, Selection


@dataclass(frozen=True)
class SRTF(IncrementalPolicy):
    """The eligible job with the shortest remaining time, then the earliest submitted.

    Results come early on average. The longest jobs are left to run side by side at the end; if there are
    fewer of them than devices, devices idle.
    """

    def start(self) -> Selection:
        """Make an empty selection."""
        return Smallest(lambda view: view.remaining_seconds)
