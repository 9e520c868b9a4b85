"""`Fair`: all jobs advance together.

`make_policy` (`registry.py`) makes this policy for the name `"fair"`; `PriorityLevels` (`schedule/levels.py`) asks the
policy's selection for a job for each idle device. The policy must keep no state: the selection has all state, because one
policy may serve several schedulers.
"""

from dataclasses import dataclass

from hydra_tune.schedule.policies.heap import Smallest
from hydra_tune.schedule.policies.policy import IncrementalPolicy, JobView, Selection


@dataclass(frozen=True)
class Fair(IncrementalPolicy):
    """The eligible job with the smallest fraction of its time done, then the earliest submitted.

    Jobs submitted together reach their halves and their ends nearly together, whatever their lengths.
    """

    def start(self) -> Selection:
        """Make an empty selection."""
        return Smallest(fraction_done)


def fraction_done(view: JobView) -> float:
    """Fraction of a job's time that is done, from 0 to 1; 0 if the remaining time is unknown, 1 if nothing remains."""
    # Also keeps the division below from 0 / 0. An unknown remaining time is infinite, and gives 0.
    if view.remaining_seconds <= 0:
        return 1.0
    return view.done_seconds / (view.done_seconds + view.remaining_seconds)
