"""`Fifo`: first submitted, first served. The plain baseline beside Sharded-LRTF."""

from collections.abc import Sequence

from hydra_tune.schedule.policy import JobView


class Fifo:
    """The earliest submitted eligible job, wherever its shards are.

    Finishes the first jobs soonest, and leaves the last one to run alone at the end.
    """

    def choose(self, device: str, candidates: Sequence[JobView]) -> JobView:  # noqa: ARG002 - the policy's signature
        """Choose the candidate with the smallest `order`."""
        return min(candidates, key=lambda view: view.order)
