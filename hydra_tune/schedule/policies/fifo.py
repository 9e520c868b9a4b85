"""`Fifo`: first submitted, first served. The plain baseline beside Sharded-LRTF.

`make_policy` (`registry.py`) makes this policy for the name `"fifo"`; `PriorityLevels` (`schedule/levels.py`) asks the
policy's selection for a job for each idle device. `RepetitionSkipper` (`simulate/engine/repeats.py`) relies on a policy that
remembers no choice and looks at no times. The selection has all state, because one policy may serve several schedulers.
"""

from dataclasses import dataclass

from hydra_tune.schedule.policies.heap import Smallest
from hydra_tune.schedule.policies.policy import IncrementalPolicy, Selection


@dataclass(frozen=True)
class Fifo(IncrementalPolicy):
    """The earliest submitted eligible job, wherever its shards are.

    The first jobs finish as soon as possible, and the last job may run alone at the end.
    """

    def start(self) -> Selection:
        """Make an empty selection."""
        return Smallest(lambda view: view.order)
