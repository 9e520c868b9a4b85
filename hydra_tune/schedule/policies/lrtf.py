"""`ShardedLRTF`: longest remaining time first; among jobs of nearly equal length, a job with a resident shard.

`make_policy` (`registry.py`) makes this policy for the name `"lrtf"`, the default; `PriorityLevels`
(`schedule/levels.py`) asks the policy's selection for a job for each idle device. `RepetitionSkipper`
(`simulate/engine/repeats.py`) relies on a policy that remembers no choice and compares only differences of remaining times. All
state is in the selection, because one policy may serve several schedulers.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush

from hydra_tune.errors import ConfigError
from hydra_tune.schedule.policies.policy import IncrementalPolicy, JobView, Selection

_Entry = tuple[float, int, int, JobView]
_SPARE = 64  # heaps with fewer dead entries are not worth clearing


@dataclass(frozen=True, kw_only=True)
class ShardedLRTF(IncrementalPolicy):
    """The job with the longest remaining time, within a slack that saves transfers.

    A job is *at hand* if its next shard is on this device or on none. If the longest job of all exceeds the longest job
    at hand by more than the slack, this device takes over the longest job from its present device. Otherwise the device
    takes the first of the following candidates that exists:

    1. the job that ran last on this device, if it is at hand and within the slack of the longest job at hand;
    2. a job whose next shard is here, within half the slack of the longest job at hand;
    3. the longest job whose next shard is on no device.

    Within rules 2 and 3, the longest job comes first, then the earliest submitted. Without a frozen base, the chosen job is
    shorter than the longest by at most twice the slack. Jobs on one frozen base go in a wavefront, as below. Without
    transfers, the makespan stayed within one unit plus the slack of the bound of `makespan_bound` in all random schedules
    tried.

    Args:
        slack_steps: the slack, in training steps of the longest job.

    Raises:
        ConfigError: a slack that is negative or not finite.

    Source:
        HYDRA (Nagrecha and Kumar), section 5.3 with Algorithm 2, "Sharded-LRTF"; `LRTFPaper` implements the original.

    Differs:
        * Slack. Algorithm 2 always takes the longest job, so shards of nearly equal jobs chase each other over the
          devices. A delay of some steps costs the makespan at most those steps. Where all state fits the devices
          together, units then travel to their shards and almost nothing is loaded.
        * Staying with a job. A device goes on with its job until the slack is used up. The longest job at hand would be
          another job after every unit: the device would go through all of them in turn, and never hold the next shard.
          Half the slack for all other jobs lets a device change only to a job that can go on for some time.
        * Measure of the slack. The slack counts against the jobs at hand, not against other devices' jobs. Devices go
          through their jobs at their own pace. A device ahead of the others by half the slack would otherwise change
          jobs twice as often as the others, and move twice the bytes.
        * Wavefronts. Jobs on one frozen base (`Unit.base`) need the same parameters at the same place of their models, so
          a load of these parameters may serve all of them. A device whose last job has a base takes, among the jobs on
          this base, first the jobs that last ran here or have not run, then the job whose unit reads nothing of the base, then
          the job with the nearest unit, and the longest of equals. So the jobs go through their models side by side, forward
          and backward, and a job at another place joins as the others pass there. The device leaves the base when the longest
          of all jobs exceeds the longest on the base by more than the slack.
        * Late binding. The paper chooses for the buffer while another unit still computes, among "Idle Models"; the
          longest job is usually running then, and is passed over again and again. Here the choice falls when the device
          is free, and the job that just ran is a candidate like any other.
        * Remaining times come from the pilot and then from measurements, where Algorithm 2 multiplies the number of
          minibatches by the time of one.
    """

    slack_steps: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.slack_steps < math.inf:
            raise ConfigError(f"slack_steps must be a finite number from 0, not {self.slack_steps}")

    def start(self) -> Selection:
        """Make an empty selection."""
        return _LRTFSelection(self.slack_steps)


def _base_of(view: JobView) -> str | None:
    """Return the base of a job's next unit, else of its last unit that had a base."""
    return view.unit.base or (None if view.last_on_base is None else view.last_on_base.base)


class _LRTFSelection:
    """Jobs by remaining time, all together and by the place of their next shard, and by turn on their last device.

    The top of a heap answers each question, but for wavefronts, which look at all jobs of a base. All heaps share a table
    of live views, and remove lazily, like `ViewHeap`.
    """

    holds_only_jobs = True

    def __init__(self, slack_steps: float) -> None:
        self._slack_steps = slack_steps
        self._on_base: dict[str, dict[str, JobView]] = {}
        self._live: dict[str, JobView] = {}
        self._num_added = 0
        self._clear()

    def add(self, view: JobView) -> None:
        """Add the job to the heaps by length, by place and by last device."""
        self._live[view.job] = view
        base = _base_of(view)
        if base is not None:
            self._on_base.setdefault(base, {})[view.job] = view
        self._push(view)

    def remove(self, view: JobView) -> None:
        """Remove the job."""
        del self._live[view.job]
        base = _base_of(view)
        if base is not None:
            del self._on_base[base][view.job]
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
        if self._on_base and last is not None:
            nearest = self._nearest(last, device, longest.remaining_seconds - slack_seconds)
            if nearest is not None:
                return nearest
        # The job that ran here last has its next shard on another device, so it is not at hand.
        if last is not None and last.shard_device not in (device, None):
            last = None
        at_hand = max((view.remaining_seconds for view in (here, nowhere) if view is not None), default=None)
        # Nothing at hand is long enough, so the longest job comes over from its present device.
        if at_hand is None or at_hand < longest.remaining_seconds - slack_seconds:
            return longest
        # Rules 1, 2 and 3 of `ShardedLRTF`.
        if last is not None and last.remaining_seconds >= at_hand - slack_seconds:
            return last
        if here is not None and here.remaining_seconds >= at_hand - slack_seconds / 2:
            return here
        # `here` is missing or shorter than `at_hand`, so the longest job at hand is on no device.
        assert nowhere is not None
        return nowhere

    def _nearest(self, last: JobView, device: str, least_seconds: float) -> JobView | None:
        """Return the next job of the wavefront of the job that ran last on a device.

        None without a wavefront, or if all of its jobs are shorter than `least_seconds`.
        """
        if last.last_on_base is None or last.last_on_base.base is None:
            return None
        views = self._on_base.get(last.last_on_base.base)
        if not views or max(view.remaining_seconds for view in views.values()) < least_seconds:
            return None
        position = last.last_on_base.base_position

        def order(view: JobView) -> tuple[bool, int, float, int]:
            # A unit that reads nothing of the base, as after a report, goes first: its job then catches up.
            distance = abs(view.unit.base_position - position) if view.unit.base is not None else -1
            return view.last_device not in (device, None), distance, -view.remaining_seconds, view.order

        return min(views.values(), key=order)

    def _push(self, view: JobView) -> None:
        self._num_pushed += 1
        self._num_added += 1  # breaks all ties, because views cannot be compared
        _, order, _, remaining_seconds, _, shard_device, _, _, turn, last_device, _ = view
        entry = (-remaining_seconds, order, self._num_added, view)
        heappush(self._all, entry)
        heappush(self._at[shard_device], entry)
        if last_device is not None:
            # Ordered by turn, so the top is the job that ran last on the device.
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
