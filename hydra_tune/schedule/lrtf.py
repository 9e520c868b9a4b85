"""`ShardedLRTF`: longest remaining time first, and among near-equals the one whose shard is at hand."""

from collections.abc import Sequence

from hydra_tune.schedule.policy import JobView

_HERE, _NOWHERE, _ELSEWHERE = range(3)


class ShardedLRTF:
    """The job with the longest remaining time, within a slack that saves transfers.

    Among the candidates whose remaining time is within `slack` of the longest, the first of: a job whose next shard is
    on this device; one whose next shard is on no device; one whose next shard is on another device. Within each of
    these the longest, then the earliest submitted. The slack is one training step of the longest job.

    Without transfers the makespan stays within one unit and the slack of the bound of `makespan_bound`.

    Source:
        HYDRA (Nagrecha and Kumar), section 5.3 with Algorithm 2, "Sharded-LRTF".

    Differs:
        * The slack. Algorithm 2 takes the longest, always; with it, shards of near-equal jobs chase each other over the
          devices. One step late costs the makespan at most that step, and where all state fits the devices together
          units travel to their shard and almost nothing is loaded.
        * Late binding. The paper chooses for the buffer, while another unit still computes, and among "Idle Models";
          there the longest job, being the one that runs, is passed over again and again. Here the choice is made when
          the device is free, and the job that just ran on it is a candidate like any other.
        * Remaining times are given, from the pilot and then as measured, where Algorithm 2 multiplies minibatches by
          the time of one.
    """

    def choose(self, device: str, candidates: Sequence[JobView]) -> JobView:
        """Choose by slack, place, remaining time and order of submission."""
        longest = max(candidates, key=lambda view: (view.remaining_seconds, -view.order))
        least_seconds = longest.remaining_seconds - longest.step_seconds

        def rank(view: JobView) -> tuple[int, float, int]:
            place = _HERE if view.shard_device == device else _NOWHERE if view.shard_device is None else _ELSEWHERE
            return place, -view.remaining_seconds, view.order

        return min([view for view in candidates if view.remaining_seconds >= least_seconds], key=rank)
