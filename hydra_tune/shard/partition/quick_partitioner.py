"""`QuickPartitioner`: makes the same cuts as `ShardPartitioner` with fewer and shorter candidates to measure.

A bisection from the middle of the remaining nodes asks mostly about candidates that are far too large and therefore
slow to measure. `QuickPartitioner` measures candidates from the shortest on, and stops at the first candidate that is
too large. Like a bisection, the search assumes that a longer shard needs no less memory. `ShardPartitionPlanner`
(`partition_planner.py`) makes a `QuickPartitioner` for each tried size of the buffer, when a captured step is cut.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise, product

from hydra_tune.errors import BudgetError
from hydra_tune.shard.analysis.graph_analysis import GraphAnalysis
from hydra_tune.shard.cost.pilot import ShardCost, ShardPilot
from hydra_tune.shard.partition.partitioner import NumShards, ShardPartitioner

_PRECISION = 1000
_STRIDE = 4  # growth of the distance from the least conceivable budget
_AROUND = 4  # pieces to each side of a piece
_MOST_GUESSES = 6  # guesses before a bisection: memory may grow in leaps


class QuickPartitioner(ShardPartitioner):
    """Cuts a single captured step; arguments as of `ShardPartitioner`."""

    def __init__(
        self,
        pilot: ShardPilot,
        analysis: GraphAnalysis,
        num_nodes: int,
        *,
        budget_bytes: int,
        buffer_bytes: int,
        may_split_batches: bool = False,
    ) -> None:
        quick = pilot if isinstance(pilot, _QuickPilot) else _QuickPilot(pilot, analysis, num_nodes, budget_bytes)
        self._quick = quick
        super().__init__(
            quick,
            analysis,
            num_nodes,
            budget_bytes=budget_bytes,
            buffer_bytes=buffer_bytes,
            may_split_batches=may_split_batches,
        )

    def least_budget(self, num_shards: NumShards, peak_bytes: int) -> int:
        """Return the result of `smallest_budget` for a step already cut, in less time.

        Args:
            num_shards: `num_shards` of the existing cut.
            peak_bytes: largest needs of a unit of the existing cut.
        """
        high = min(self._budget, self._with_buffer(peak_bytes))
        low = min(high, self._with_buffer(self._least_room()))
        if self._would_do(low, num_shards, ()):
            return low
        above = 1 + low // _PRECISION
        while high - low > 1 + high // _PRECISION:
            # From below, with growing strides: small budgets mean short candidates, which are quick to measure.
            middle = min(low + above, (low + high) // 2)
            above *= _STRIDE
            if self._would_do(middle, num_shards, ()):
                high = middle
            else:
                low = middle
        return high

    def _furthest(self, first: int, cuts: list[int]) -> int | None:
        """Do the search of `ShardPartitioner` in fewer steps, by interpolating between known candidates."""
        # Candidates measured for other budgets narrow the search before this search measures any.
        low, high = -1, len(cuts)
        for end, peak_bytes in self._quick.peaks(first).items():
            if peak_bytes <= self._capacity:
                low = max(low, bisect_right(cuts, end) - 1)
            else:
                high = min(high, bisect_left(cuts, end))
        if low >= high:  # memory does not grow with nodes here, so interpolation would mislead
            return super()._furthest(first, cuts)
        guesses = 0
        while high - low > 1:
            middle = (low + high) // 2
            if guesses < _MOST_GUESSES:
                # Strictly between the bounds, so that even a bad guess narrows the search.
                middle = min(max(self._guess(first, cuts, middle), low + 1), high - 1)
                guesses += 1
            if self._fits(first, cuts[middle]):
                low = middle
            else:
                high = middle
        return cuts[low] if low >= 0 else None

    def _guess(self, first: int, cuts: list[int], otherwise: int) -> int:
        """Index of the last cut that is likely to fit."""
        measured = self._quick.peaks(first).items()
        under = max((candidate for candidate in measured if candidate[1] <= self._capacity), default=None)
        over = min((candidate for candidate in measured if candidate[1] > self._capacity), default=None)
        if under is None or over is None:
            return otherwise
        share = (self._capacity - under[1]) / (over[1] - under[1])
        return bisect_right(cuts, under[0] + share * (over[0] - under[0])) - 1

    def _with_buffer(self, peak_bytes: int) -> int:
        """Budget that leaves `peak_bytes` for a shard beside the buffer."""
        return -(-peak_bytes * self._budget // self._capacity) + 1

    def _least_room(self) -> int:
        """Lower bound for the needs of the largest shard of any cut: each piece between two cuts is part of some shard.

        A piece may need less together with its neighbours, so the least of the candidates around the piece counts.
        """
        edges = [0, *self._analysis.cuts, self._end]
        pieces = [(self._cost(first, last), index) for index, (first, last) in enumerate(pairwise(edges))]
        least, checked_costs = 0, set()
        for cost, index in sorted(pieces, key=lambda piece: -piece[0].peak_bytes):
            if cost.peak_bytes <= least:
                break
            if cost not in checked_costs:  # equal layers have equal costs
                checked_costs.add(cost)
                least = max(least, self._least_around(index, edges, least))
        return least

    def _least_around(self, index: int, edges: Sequence[int], enough: int) -> int:
        """Least needs of the candidates that extend this piece by a few pieces; `enough` if the least is smaller."""
        least = self._cost(edges[index], edges[index + 1]).peak_bytes
        for before, after in product(range(_AROUND + 1), repeat=2):
            if index >= before and index + 1 + after < len(edges):
                least = min(least, self._cost(edges[index - before], edges[index + 1 + after]).peak_bytes)
            # Another piece has already proved that a cut needs `enough`, so a smaller figure decides nothing.
            if least <= enough:
                return enough
        return least

    def _would_do(self, budget_bytes: int, num_shards: NumShards, boundaries: Sequence[int]) -> bool:
        capacity = budget_bytes * self._capacity // self._budget
        # All attempts share the measured candidates, so an attempt measures only candidates that are new.
        pilot = self._quick.within(budget_bytes, self._analysis)
        attempt = BudgetProbePartitioner(
            pilot, self._analysis, self._end, budget_bytes=budget_bytes, buffer_bytes=budget_bytes - capacity
        )
        try:
            attempt.partition(num_shards, boundaries)
        except BudgetError:
            return False
        return True


class BudgetProbePartitioner(QuickPartitioner):
    """A partitioner for trying budgets, with short errors."""

    def smallest_budget(self, num_shards: NumShards = None, boundaries: Sequence[int] = ()) -> int:
        """Return 0: the caller is itself searching for the smallest budget."""
        del num_shards, boundaries
        return 0

    def _refusal(self, first: int, last: int, enough: int) -> BudgetError:
        return BudgetError(f"nodes {first} to {last - 1} do not fit", enough_bytes=enough)


class _QuickPilot(ShardPilot):
    """Measures candidates from the shortest on, and none beyond a candidate over the limit.

    Args:
        pilot: measures candidates and keeps the results.
        analysis: positions where candidates may end.
        num_nodes: number of nodes of the graph.
        limit_bytes: largest needs that a caller asks about.
        too_large: known candidates over some limit, by first node.
        peaks: needs of all measured candidates, by first and last node.
    """

    def __init__(
        self,
        pilot: ShardPilot,
        analysis: GraphAnalysis,
        num_nodes: int,
        limit_bytes: int,
        too_large: "dict[int, list[tuple[int, ShardCost]]] | None" = None,
        peaks: dict[int, dict[int, int]] | None = None,
    ) -> None:
        self._pilot = pilot
        self._cuts = analysis.cuts
        self._whole = (0, num_nodes)
        self._limit_bytes = limit_bytes
        # By first node: last nodes and costs of candidates over some limit.
        self._too_large = {} if too_large is None else too_large
        self._peaks = {} if peaks is None else peaks

    def within(self, limit_bytes: int, analysis: GraphAnalysis) -> "_QuickPilot":
        """Return a pilot with another limit that shares all results."""
        return _QuickPilot(self._pilot, analysis, self._whole[1], limit_bytes, self._too_large, self._peaks)

    def peaks(self, first: int) -> Mapping[int, int]:
        """Needs of the measured candidates from `first`, by last node."""
        return self._peaks.get(first, {})

    def cost(self, first: int, last: int) -> ShardCost:
        """Cost of a candidate, or of a shorter candidate that is over the limit already."""
        # Every caller asks for the whole graph, and the pilot measures the whole graph only once; not if the parameters
        # alone are too large.
        if (first, last) == self._whole and self._pilot.least_bytes(first, last) <= self._limit_bytes:
            return self._pilot.cost(first, last)
        large_candidates = self._too_large.setdefault(first, [])
        for end, cost in large_candidates:
            # The list is shared with pilots of other limits, so the limit of this pilot has to be compared anew.
            if end <= last and cost.peak_bytes > self._limit_bytes:
                return cost
        for end in self._ends(first, last):
            cost = self._pilot.cost(first, end)
            self._peaks.setdefault(first, {})[end] = cost.peak_bytes
            if cost.peak_bytes > self._limit_bytes:
                large_candidates.append((end, cost))
                break
        return cost

    def _ends(self, first: int, last: int) -> list[int]:
        """Ends of candidates up to `last`, each about twice as far as the one before."""
        inside = self._cuts[bisect_left(self._cuts, first + 1) : bisect_left(self._cuts, last)]
        ends, reach = [], 1
        while reach <= len(inside):
            ends.append(inside[reach - 1])
            reach *= 2
        return [*ends, last]
