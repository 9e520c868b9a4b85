"""`ShardedLRTF`: longest remaining time first, and among near-equals the one whose shard is at hand."""

from collections import defaultdict
from dataclasses import dataclass

from hydra_tune.schedule.heap import ViewHeap
from hydra_tune.schedule.policy import IncrementalPolicy, JobView, Selection


@dataclass(frozen=True)
class ShardedLRTF(IncrementalPolicy):
    """The job with the longest remaining time, within a slack that saves transfers.

    Among the candidates whose remaining time is within `slack` of the longest, the first of: a job whose next shard is
    on this device; one whose next shard is on no device; one whose next shard is on another device. Within each of
    these the longest, then the earliest submitted. The slack is one training step of the longest job.

    Without transfers the makespan stays within one unit and the slack of the bound of `makespan_bound`.

    Source:
        HYDRA (Nagrecha and Kumar), section 5.3 with Algorithm 2, "Sharded-LRTF"; `LRTFPaper` is that.

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

    def start(self) -> Selection:
        """Make an empty selection."""
        return _LRTFSelection()


class _LRTFSelection:
    """Jobs by remaining time, all together and by the place of their next shard: each question is the top of a heap."""

    def __init__(self) -> None:
        self._all = ViewHeap()
        self._at: defaultdict[str | None, ViewHeap] = defaultdict(ViewHeap)

    def add(self, view: JobView) -> None:
        """Put the job where it belongs by length and place."""
        self._all.add(-view.remaining_seconds, view)
        self._at[view.shard_device].add(-view.remaining_seconds, view)

    def remove(self, view: JobView) -> None:
        """Take the job out."""
        self._all.remove(view)
        self._at[view.shard_device].remove(view)

    def choose(self, device: str) -> JobView:
        """Choose by slack, place, remaining time and order of submission."""
        longest = self._all.first()
        assert longest is not None
        least_seconds = longest.remaining_seconds - longest.step_seconds
        for place in (device, None):
            heap = self._at.get(place)
            view = heap.first() if heap is not None else None
            if view is not None and view.remaining_seconds >= least_seconds:
                return view
        return longest  # all that are within the slack are elsewhere, and the longest is one of them
