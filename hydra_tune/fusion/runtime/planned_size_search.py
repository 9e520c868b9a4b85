"""Which sizes of planned groups are tried, in which order, and how long planning may take. Plain numbers, no tensors.

`compared` (`planned_group_size.py`) plans the steps of each size that `PlannedSizeSearch` names where users insist on large
groups, and otherwise of each size that `PartitionSearch` (`planner/search/partitions.py`) names, as long as `PlanningBudget`
allows. Each comparison makes a search and a budget of its own, so the module has no lock. The module must not plan a step.

Note: order of the sizes. Where users insist on large groups, the largest size that has a plan is wanted. Memory grows
with the size, so a size that has no plan rules out all larger sizes. As many trials as wait come first, at most twice
as many as a group may have. A refused size names the memory that it lacks, and the next size is in proportion to that
memory. Where the proportion misleads, the sizes in between are halved.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

COST_SHARE = 0.02
"""Share of the remaining work that planning may take while nothing is found."""

LEAST_SAVING = 0.02
"""Share of the known time that another partition has to promise to save; profiles are no more exact."""

_HOPE_SHARE = 0.1  # share of the expected saving that planning may take once a faster way is known
_INSISTING_SECONDS = 10.0  # that planning may take in any case where users insist on large groups, once a plan is known
_MOST_REFUSED = 3  # sizes in a row, before sizes are halved
_FIRST_TRY = 2.0  # expected seconds of the first try, over those for tracing and profiling a group that fits


class PlannedSizeSearch:
    """The sizes to try, one after the other.

    Args:
        room: largest size that needs no plan.
    """

    def __init__(self, room: int, most: int) -> None:
        self._largest, self._least_refused = room, most + 1  # sizes in between are unknown
        self._guess: int | None = most
        self._num_refused = 0  # since the last size that had a plan

    @property
    def next(self) -> int | None:
        """The next size; None when the largest size that has a plan is known."""
        low, high = self._largest, self._least_refused
        if high - low <= 1:
            return None
        return (low + high) // 2 if self._guess is None else min(max(self._guess, low + 1), high - 1)

    def tried(self, size: int, share: float) -> None:
        """Note the result of a try.

        Args:
            size: as of `next`.
            share: memory that there is over the memory that the size needs; at least 1 if there is a plan, 0 if unknown.
        """
        if share >= 1:
            # If the proportion was right, the next size is refused, which ends the search.
            self._guess = size + 1 if self._num_refused else None
            self._largest, self._num_refused = size, 0
        else:
            self._least_refused, self._num_refused = size, self._num_refused + 1
            is_proportional = share > 0 and self._num_refused < _MOST_REFUSED
            self._guess = int(size * share) if is_proportional else None


class PlanningBudget:
    """Limits the time of planning; the time is the CPU time of the calling thread.

    Args:
        work_seconds: expected seconds of the remaining steps without planned steps, on each device.
        insists: whether a size that has a plan is wanted at any price.
    """

    def __init__(self, work_seconds: float, look_seconds: float, *, insists: bool) -> None:
        self._work_seconds, self._insists = work_seconds, insists
        self._spent_seconds, self._longest_seconds = look_seconds, _FIRST_TRY * look_seconds

    def allows(self, gain: float | None) -> bool:
        """Return whether another way may be planned.

        Args:
            gain: speedup for each trial of the best way so far; None if there is only the way without a plan.
        """
        return self._spent_seconds + self._longest_seconds <= self._limit_seconds(gain)

    def _limit_seconds(self, gain: float | None) -> float:
        if self._insists:
            return float("inf") if gain is None else max(_INSISTING_SECONDS, _HOPE_SHARE * self._work_seconds)
        saved_seconds = 0.0 if gain is None else self._work_seconds * (1 - 1 / gain)
        return max(COST_SHARE * self._work_seconds, _HOPE_SHARE * saved_seconds)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time of a try."""
        began = time.thread_time()
        try:
            yield
        finally:
            seconds = time.thread_time() - began
            self._spent_seconds += seconds
            self._longest_seconds = max(self._longest_seconds, seconds)
