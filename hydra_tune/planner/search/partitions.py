"""Sub-array constructor: the fastest way to divide trials into sub-arrays, of which some run in turn, as pairs.

Source: §3.2 of the paper, step 1. Differs: the paper lists four partitions of eight trials, with an even number of
sub-arrays, in pairs of the closest iteration times. Here a sub-array may also run by itself, so the number may be odd,
and any two sub-arrays may be a pair: the time of its plan decides. Planning all parts takes too long, so the search
names only parts that may belong to the fastest partition.

`Planner.portfolio` (`portfolio.py`) searches for `figures.py`, and `compared` (`fusion/runtime/planned_group_size.py`)
searches before the pool forms a group. The search must not plan: its caller plans each part, and reports the seconds or
the refusal. The search must not know groups or devices, and has no lock: a search belongs to one thread.
"""

from collections.abc import Callable
from math import inf

Part = tuple[int, ...]
"""Trials of a sub-array, or of two sub-arrays that run in turn, the larger first."""


class PartitionSearch:
    """The partition with the least seconds, found by planning as few parts as possible.

        search = PartitionSearch(8, operator_seconds)
        while (part := search.next) is not None:
            search.planned(part, seconds_of_a_step(part))  # or search.refused(part), where no plan fits
        search.best, search.seconds

    A part without a plan counts with the time of its operators. While the partition that is fastest by these numbers
    has such a part, and is faster than the best known time by `least_saving`, the part is planned. A part that does not
    fit rules out parts that need as much memory, and parts that probably do: memory is about in proportion to the size.

    Args:
        at_least: size of a sub-array -> seconds that the operators of a step take; infinite for a size that is not
            wanted. May change during the search.
        least_saving: share of the best known time by which another partition has to be faster to be looked at.

    Attributes:
        below: seconds of the best way known otherwise; partitions that are not faster are not looked at.
    """

    def __init__(self, num_trials: int, at_least: Callable[[int], float], *, least_saving: float = 0.0) -> None:
        self.below = inf
        self._num_trials, self._at_least, self._least_saving = num_trials, at_least, least_saving
        self._known: dict[Part, float] = {}
        self._refused: dict[Part, float] = {}  # sizes of which share are out of the question, too

    @property
    def next(self) -> Part | None:
        """The next part to plan; None when the fastest partition is known."""
        seconds, parts = cheapest(self._num_trials, self._expected)
        if seconds >= (1 - self._least_saving) * min(self.seconds, self.below):
            return None
        return next((part for part in parts if part not in self._known), None)

    def planned(self, part: Part, seconds: float) -> None:
        """Note the predicted seconds of a part's step."""
        self._known[part] = seconds

    def refused(self, part: Part, share: float = 1.0) -> None:
        """Note that a part does not fit; `share` is the present memory over the memory that the part needs, 1 if unknown."""
        self._known[part] = inf
        # Halfway between the size that would fit and the size that does not, as proportions mislead.
        self._refused[part] = (1 + share) / 2

    @property
    def seconds(self) -> float:
        """Seconds of a step of all trials in the best partition of known parts; infinity without such a partition."""
        return cheapest(self._num_trials, self._planned)[0]

    @property
    def best(self) -> tuple[Part, ...]:
        """The best partition of known parts, the largest part first; empty without such a partition."""
        return cheapest(self._num_trials, self._planned)[1]

    def _planned(self, part: Part) -> float:
        return self._known.get(part, inf)

    def _expected(self, part: Part) -> float:
        if part in self._known:
            return self._known[part]
        if any(_needs_as_much(part, other, share) for other, share in self._refused.items()):
            return inf
        return sum(map(self._at_least, part))


def cheapest(num_trials: int, seconds: Callable[[Part], float]) -> tuple[float, tuple[Part, ...]]:
    """Return the least seconds in which parts can run all trials, and the parts; infinity and no parts if none can.

    `seconds` is infinite for parts that must not be.
    """
    parts = [min(_parts_of(total), key=seconds) for total in range(1, num_trials + 1)]
    costs = [seconds(part) for part in parts]
    # Least seconds, number of parts and parts, by the number of trials. Of equally fast partitions, that of fewer parts.
    least: list[tuple[float, int, tuple[Part, ...]]] = [(0.0, 0, ())]
    for count in range(1, num_trials + 1):
        ways = ((least[count - total], parts[total - 1], costs[total - 1]) for total in range(count, 0, -1))
        sums = ((rest[0] + cost, rest[1] + 1, (part, *rest[2])) for rest, part, cost in ways)
        least.append(min(sums, key=lambda way: way[:2]))
    fastest, _, chosen = least[num_trials]
    if fastest == inf:
        return inf, ()
    return fastest, tuple(sorted(chosen, key=lambda part: (-sum(part), part)))


def _parts_of(total: int) -> list[Part]:
    """Return the parts of so many trials: pairs first, the most even pair before the others, then the single sub-array."""
    pairs = [(total - small, small) for small in range(total // 2, 0, -1)]
    return [*pairs, (total,)]


def _needs_as_much(part: Part, other: Part, share: float) -> bool:
    """Return whether a part needs at least as much memory as a share of another part does."""
    is_as_large = part[0] >= share * other[0]
    return is_as_large and (len(other) == 1 or (len(part) > 1 and sum(part) >= share * sum(other)))
