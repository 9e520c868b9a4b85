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

    *At hand* is a job whose next shard is on this device or on none. If the longest of these is shorter than the longest of
    all by more than the slack, that one is taken from the device that has it. If not, the first of: the job that ran last on
    this device, if it is at hand and within the slack of the longest at hand; one whose next shard is here, within half the
    slack of that; the longest whose next shard is on no device. Within each of these the longest, then the earliest submitted.

    What runs is shorter than the longest by twice the slack at most. Without transfers the makespan stayed within one unit and
    the slack of the bound of `makespan_bound` in all random schedules that were tried.

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
          Half the slack for all others makes it change to one that can go on for some time.
        * How long it goes on is measured against the jobs at hand, not against those of other devices. Devices go through
          their jobs at their own pace; one that is ahead of the others by half the slack would change jobs twice as often as
          they do, and move twice their bytes.
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
        here, nowhere = self._first(self._at.get(device)), self._first(self._at.get(None))
        last = self._first(self._ran_on.get(device))
        if last is not None and last.shard_device not in (device, None):
            last = None
        at_hand = max((view.remaining_seconds for view in (here, nowhere) if view is not None), default=None)
        if at_hand is None or at_hand < longest.remaining_seconds - slack_seconds:
            return longest
        if last is not None and last.remaining_seconds >= at_hand - slack_seconds:
            return last
        if here is not None and here.remaining_seconds >= at_hand - slack_seconds / 2:
            return here
        assert nowhere is not None
        return nowhere

    def _push(self, view: JobView) -> None:
        self._num_pushed += 1
        self._num_added += 1  # entries never compare by view, which has no order
        _, order, _, remaining_seconds, _, shard_device, _, _, turn, last_device = view
        entry = (-remaining_seconds, order, self._num_added, view)
        heappush(self._all, entry)
        heappush(self._at[shard_device], entry)
        if last_device is not None:
            heappush(self._ran_on[last_device], (-turn, order, self._num_added, view))

    def _first(self, heap: list[_Entry] | None) -> JobView | None:
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
