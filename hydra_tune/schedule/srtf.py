"""`SRTF`: shortest remaining time first. What an operating system would do for short waits."""

from dataclasses import dataclass

from hydra_tune.schedule.heap import Smallest
from hydra_tune.schedule.policy import IncrementalPolicy, Selection


@dataclass(frozen=True)
class SRTF(IncrementalPolicy):
    """The eligible job with the shortest remaining time, then the earliest submitted.

    Results come as early as they can on average; the longest jobs are left to run side by side at the end, and where
    they are fewer than the devices, devices stand idle.
    """

    def start(self) -> Selection:
        """Make an empty selection."""
        return Smallest(lambda view: view.remaining_seconds)
