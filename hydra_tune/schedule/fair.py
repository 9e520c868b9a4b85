"""`Fair`: all jobs advance together."""

from dataclasses import dataclass

from hydra_tune.schedule.heap import Smallest
from hydra_tune.schedule.policy import IncrementalPolicy, JobView, Selection


@dataclass(frozen=True)
class Fair(IncrementalPolicy):
    """The eligible job of which the least fraction of its time is done, then the earliest submitted.

    Jobs that are submitted together come to their halves and to their ends together, whatever their lengths; like the
    longest remaining time first, it leaves no long job for the end.
    """

    def start(self) -> Selection:
        """Make an empty selection."""
        return Smallest(fraction_done)


def fraction_done(view: JobView) -> float:
    """The part of a job's time that is done, from 0 to 1; 0 where what is left is unknown, 1 where nothing is."""
    if view.remaining_seconds <= 0:
        return 1.0
    return view.done_seconds / (view.done_seconds + view.remaining_seconds)
