"""`ShardedLRTF`: longest remaining time first, and among near-equals the one whose shard is at hand."""

import math
from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush

from hydra_tune.errors import ConfigError
from hydra_tune.schedule.policy import IncrementalPolicy, JobView, Selection

_Entry = tuple[float, int, int, JobView]
_SPARE = 64  # below this many dead entries the heaps are not worth clearing


@dataclass(frozen=True, kw_only=True)
class ShardedLRTF(IncrementalPolicy):
    """The job with the longest remaining time, within a slack that saves transfers.

    The job that ran last on this device goes on, if its remaining time is within the slack of the longest and its next
    shard is here or on no device. If not, the first of: a job within half the slack of the longest whose next shard is here;
    one within half the slack whose next shard is on no device; one within the whole slack whose next shard is here; the
    longest. Within each of these the longest, then the earliest submitted.

    Without transfers the makespan stays within one unit and the slack of the bound of `makespan_bound`.

    Args:
        slack_steps: the slack, in training steps of the longest job.

    Raises:
        ConfigError: a slack that is negative or not finite.

    Source:
        HYDRA (Nagrecha and Kumar), section 5.3 with Algorithm 2, "Sharded-LRTF"; `LRTFPaper` is that.

    Differs:
        * The slack. Algorithm 2 takes the longest, always; with it, shards of near-equal jobs chase each other over the
          devices. Some steps late costs the makespan at most those steps, and where all state fits the devices together
          units travel to their shard and almost nothing is loaded.
        * A device goes on with its job until the slack is used up. The longest of those at hand would be another one
          after every unit, so that a device goes through all of them in turn, and what it holds is never what comes next.
          Half the slack for all others makes it change to one that can go on for some time. Only rather than take a job
          from another device it changes to any of its own within the slack: each device goes through its jobs at its own
          pace, so that the longest of one is often a step ahead of those of another, and not because either has more to do.
        * Late binding. The paper chooses for the buffer, while another unit still computes, and among "Idle Models";
          there the longest job, being the one that runs, is passed over again and again. Here the choice is made when
          the device is free, and the job that just ran on it is a candidate like any other.
        * Remaining times are given, from the pilot and then as measured, where Algorithm 2 multiplies minibatches by
          the time of one.
    """

    slack_steps: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.slack_steps < math.inf:
            raise ConfigError(f"slack_steps must be a finite number from 0, not {self.slack_steps}")

    def start(self) -> Selection:
        """Make an empty selection."""
        return _LRTFSelection(self.slack_steps)


class _LRTFSelection:
    """Jobs by remaining time, all together and by the place of their next shard, and by the device they ran on last.

    Each question is the top of a heap. The heaps share one table of what is in them, and forget lazily, as `ViewHeap`.
    """

    def __init__(self, slack_steps: float) -> None:
        self._slack_steps = slack_steps
        self._live: dict[str, JobView] = {}
        self._num_added = 0
        self._clear()

    def add(self, view: JobView) -> None:
        """Put the job where it belongs by length, by place and by last device."""
        self._live[view.job] = view
        self._push(view)

    def remove(self, view: JobView) -> None:
        """Take the job out."""
        del self._live[view.job]
        if self._num_pushed > 4 * len(self._live) + _SPARE:
            self._clear()
            for other in self._live.values():
                self._push(other)

    def choose(self, device: str) -> JobView:
        """Choose by slack, place, remaining time and order of submission."""
        longest = self._first(self._all)
        assert longest is not None
        slack_seconds = self._slack_steps * longest.step_seconds
        least_seconds = longest.remaining_seconds - slack_seconds
        heap = self._ran_on.get(device)
        view = self._first(heap) if heap else None
        if view is not None and view.remaining_seconds >= least_seconds and view.shard_device in (device, None):
            return view
        least_seconds += slack_seconds / 2
        for place in (device, None):
            heap = self._at.get(place)
            view = self._first(heap) if heap else None
            if view is not None and view.remaining_seconds >= least_seconds:
                return view
        # All others within half the slack are elsewhere, and the longest is one of them.
        heap = self._at.get(device)
        view = self._first(heap) if heap else None
        if view is not None and view.remaining_seconds >= longest.remaining_seconds - slack_seconds:
            return view
        return longest

    def _push(self, view: JobView) -> None:
        self._num_pushed += 1
        self._num_added += 1  # entries never compare by view, which has no order
        _, order, _, remaining_seconds, _, shard_device, _, _, turn, last_device = view
        entry = (-remaining_seconds, order, self._num_added, view)
        heappush(self._all, entry)
        heappush(self._at[shard_device], entry)
        if last_device is not None:
            heappush(self._ran_on[last_device], (-turn, order, self._num_added, view))

    def _first(self, heap: list[_Entry]) -> JobView | None:
        live = self._live
        while heap:
            view = heap[0][3]
            if live.get(view.job) is view:
                return view
            heappop(heap)
        return None

    def _clear(self) -> None:
        self._num_pushed = 0
        self._all: list[_Entry] = []
        self._at: defaultdict[str | None, list[_Entry]] = defaultdict(list)
        self._ran_on: defaultdict[str, list[_Entry]] = defaultdict(list)
