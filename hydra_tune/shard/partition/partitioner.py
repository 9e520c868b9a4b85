"""Chooses the cuts: HYDRA's Algorithm 1 over the positions allowed by the graph.

The algorithm is greedy: a shard takes as many nodes as fit the device beside the reserved buffer; the smallest device
decides for all devices. Differs from the paper: a candidate is measured on fake tensors instead of run until failure;
cuts between blocks of the model come before cuts inside a block; among the last cuts that fit, the cut with the fewest
crossing bytes is taken, because crossing bytes travel twice per step; and a model that fits whole becomes a single shard
without a buffer. `ShardPartitionPlanner` (`partition_planner.py`) runs the algorithm on each captured step, once for each tried
place of the updates and size of the buffer. `executor.py` and `pool/runtime/settings.py` take `NumShards` from here. The module
must not choose the buffer, and cuts only at positions that `GraphAnalysis` allows. The module takes no lock: a `PlanLibrary`
(`plan_cache.py`) cuts under its own lock, and only a forecast asks for the `least_budget` of a plan later.

Note: candidates. A bisection from the middle of the remaining nodes would ask mostly about candidates that are far too
large and therefore slow to measure. `_CandidatePilot` measures candidates from the shortest on, and stops at the first
candidate that is too large; `ShardPartitioner` interpolates between known candidates. Like a bisection, both assume
that a longer shard needs no less memory.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import ceil
from typing import Literal

from hydra_tune.errors import BudgetError, ConfigError
from hydra_tune.quantities import format_bytes, format_bytes_up
from hydra_tune.shard.analysis.graph_analysis import GraphAnalysis
from hydra_tune.shard.cost.pilot import ShardCost, ShardPilot
from hydra_tune.shard.operators.split_modules import ColumnSplitEmbedding, RowSplitEmbedding, SplitLinear

NumShards = int | Literal["layer", "tuned"] | None

_BACK_OFF = 0.6  # a cheaper cut keeps at least this share of the nodes that would fit
_NEAR = 12  # positions to each side among which a cut must have the fewest crossing bytes to be preferred
_WHOLE = {"torch.nn.modules.linear.Linear", "torch.nn.modules.sparse.Embedding"}
_CUT = {f"{kind.__module__}.{kind.__qualname__}" for kind in (SplitLinear, ColumnSplitEmbedding, RowSplitEmbedding)}
_UNEVEN = 1.25  # largest ratio of a piece to the mean
_PRECISION = 1000  # budgets are found to a per mille
_STRIDE = 4  # growth of the distance from the least conceivable budget
_AROUND = 4  # pieces to each side of a piece
_MOST_GUESSES = 6  # guesses before a bisection: memory may grow in leaps


class _DoesNotFitError(Exception):
    """A piece that cannot be cut further does not fit."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__(first, last)
        self.piece = (first, last)


class ShardPartitioner:
    """Cuts a captured step for a given capacity.

    Args:
        analysis: positions of allowed cuts, and bytes that cross.
        num_nodes: number of nodes of the graph.
        budget_bytes: memory of the smallest device.
        buffer_bytes: part of the memory to keep free beside a running shard, for the next shard.
        may_split_batches: whether the task could still split its batches, as a remedy to mention.
        explains: whether a refusal has to name the remedies and a sufficient budget, which takes time to find.
    """

    def __init__(
        self,
        pilot: ShardPilot,
        analysis: GraphAnalysis,
        num_nodes: int,
        *,
        budget_bytes: int,
        buffer_bytes: int,
        may_split_batches: bool = False,
        explains: bool = True,
    ) -> None:
        self._may_split_batches = may_split_batches
        self._explains = explains
        self._pilot = (
            pilot if isinstance(pilot, _CandidatePilot) else _CandidatePilot(pilot, analysis, num_nodes, budget_bytes)
        )
        self._analysis = analysis
        self._end = num_nodes
        self._budget = budget_bytes
        self._capacity = budget_bytes - buffer_bytes
        self._good = _good_cuts(analysis)

    def partition(self, num_shards: NumShards = None, boundaries: Sequence[int] = ()) -> list[int]:
        """Return the positions where shards start and end: `[0, ..., num_nodes]`.

        Args:
            num_shards: None for shards as large as fit; a number for as many shards, or more if the shards do not fit;
                "layer" for a shard per layer, with each allowed cut where the module changes; "tuned" as None, as a start for
                `choose_packing`.
            boundaries: positions of mandatory cuts, e.g. the cuts of another capture of the same model.

        Raises:
            BudgetError: a part that cannot be cut further does not fit; if the partitioner explains, the message names a
                sufficient budget.
            ConfigError: `num_shards` is not from 1 to the number of possible shards.
        """
        try:
            return self._partition(num_shards, boundaries)
        except _DoesNotFitError as error:
            first, last = error.piece
            if not self._explains:
                raise BudgetError(f"nodes {first} to {last - 1} do not fit", enough_bytes=0) from None
            raise self._refusal(first, last, self.smallest_budget(num_shards, boundaries)) from None

    def packed(self, most_bytes: int) -> list[int] | None:
        """Partition into shards that fit and need at most `most_bytes` each; None if some part cannot be cut so small."""
        capacity, self._capacity = self._capacity, min(most_bytes, self._capacity)
        try:
            return [0, *self._fill(0, self._end)]
        except _DoesNotFitError:
            return None
        finally:
            self._capacity = capacity

    def smallest_budget(self, num_shards: NumShards = None, boundaries: Sequence[int] = ()) -> int:
        """Smallest budget in bytes that allows a cut, found to a per mille.

        The pieces between all allowed cuts give a sufficient budget. Longer pieces may need less, if values are made
        and used within a piece, so the search tries the cutting itself with smaller budgets.
        """
        edges = [0, *self._analysis.cuts, self._end]
        worst = max(self._cost(first, last).peak_bytes for first, last in pairwise(edges))
        # Scaled up, because the buffer takes the same share of any budget.
        low, high = 0, -(-worst * self._budget // self._capacity) + 1
        while high - low > 1 + high // _PRECISION:
            middle = (low + high) // 2
            if self._would_do(middle, num_shards, boundaries):
                high = middle
            else:
                low = middle
        return high

    def least_budget(self, num_shards: NumShards, peak_bytes: int) -> int:
        """Return about the result of `smallest_budget`, without boundaries, for a step already cut, in less time."""
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

    def _would_do(self, budget_bytes: int, num_shards: NumShards, boundaries: Sequence[int]) -> bool:
        # The buffer is a fixed share of the budget, so the share applies to the smaller budget as well.
        capacity = budget_bytes * self._capacity // self._budget
        # All attempts share the measured candidates, so an attempt measures only candidates that are new.
        pilot = self._pilot.within(budget_bytes, self._analysis)
        attempt = ShardPartitioner(
            pilot, self._analysis, self._end, budget_bytes=budget_bytes, buffer_bytes=budget_bytes - capacity
        )
        try:
            attempt._partition(num_shards, boundaries)
        except _DoesNotFitError:
            return False
        return True

    def _partition(self, num_shards: NumShards, boundaries: Sequence[int]) -> list[int]:
        boundary_edges = sorted({0, *boundaries, self._end})
        self._pilot.expect(boundary_edges[1:-1])
        if num_shards == "tuned":
            num_shards = None
        # The whole budget counts here, not the capacity: a model in one shard needs no buffer for a next shard.
        if num_shards is None and len(boundary_edges) == 2 and self._cost(0, self._end).peak_bytes <= self._budget:  # noqa: PLR2004
            return boundary_edges
        if num_shards == "layer":
            boundary_edges = sorted({*boundary_edges, *self._layer_starts()})
        elif num_shards is not None:
            boundary_edges = sorted({*boundary_edges, *self._balanced(num_shards)})
            self._pilot.expect(boundary_edges[1:-1])
        edges = [0]
        for first, last in pairwise(boundary_edges):
            edges += self._fill(first, last)
        return edges

    def _cost(self, first: int, last: int) -> ShardCost:
        return self._pilot.cost(first, last)

    def _fits(self, first: int, last: int) -> bool:
        return self._cost(first, last).peak_bytes <= self._capacity

    def _fill(self, first: int, last: int) -> list[int]:
        """Ends of greedy shards from `first` to `last`."""
        ends = []
        while first < last:
            first = self._next_end(first, last)
            ends.append(first)
        return ends

    def _next_end(self, first: int, last: int) -> int:
        if self._fits(first, last):
            return last
        # Cuts between blocks of the model come first; cuts inside a block only where nothing else fits.
        for cuts in (self._good, self._analysis.cuts):
            inside = [cut for cut in cuts if first < cut < last]
            furthest = self._furthest(first, inside)
            if furthest is not None:
                return self._cheapest(first, furthest, inside)
        # The shortest shard that could start here is too large.
        edges = [cut for cut in self._analysis.cuts if first < cut] or [self._end]
        raise _DoesNotFitError(first, min(edges[0], last))

    def _furthest(self, first: int, cuts: list[int]) -> int | None:
        """Last of the cuts up to which a shard from `first` fits, by interpolation between known candidates."""
        # Candidates measured for other budgets narrow the search before this search measures any.
        low, high, guesses = -1, len(cuts), 0
        for end, peak_bytes in self._pilot.peaks(first).items():
            if peak_bytes <= self._capacity:
                low = max(low, bisect_right(cuts, end) - 1)
            else:
                high = min(high, bisect_left(cuts, end))
        if low >= high:  # memory does not grow with nodes here, so interpolation would mislead: a bisection
            low, high, guesses = -1, len(cuts), _MOST_GUESSES
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
        measured = self._pilot.peaks(first).items()
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
        """Likely lower bound for the needs of the largest shard of any cut: each piece between two cuts is part of a shard.

        A piece may need less together with its neighbours, so the least of the candidates around the piece counts, up to
        `_AROUND` pieces away.
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

    def _cheapest(self, first: int, furthest: int, cuts: list[int]) -> int:
        """Cut with the fewest crossing bytes among the last cuts that fit; the furthest cut among equals."""
        least = first + _BACK_OFF * (furthest - first)
        crossing = self._analysis.crossing_bytes
        near = sorted((cut for cut in cuts if least <= cut <= furthest), key=lambda cut: (crossing[cut], -cut))
        # Checked again: memory need not grow with the number of nodes, so a shorter shard may fail to fit.
        return next((cut for cut in near if self._fits(first, cut)), furthest)

    def _balanced(self, num_shards: int) -> list[int]:
        """Return `num_shards - 1` cuts at about equal distance."""
        cuts = self._analysis.cuts
        if num_shards < 1 or num_shards - 1 > len(cuts):
            raise ConfigError(f"num_shards must be from 1 to {len(cuts) + 1} for this model, not {num_shards}")
        chosen: list[int] = []
        for index in range(1, num_shards):
            target = self._end * index / num_shards
            spare = len(cuts) - (num_shards - 1 - index)  # leave one cut for each shard still to come
            start = cuts.index(chosen[-1]) + 1 if chosen else 0
            pool = cuts[start:spare]
            # Cuts between blocks count only near the target, so that the shards stay about equal.
            good = [cut for cut in pool if cut in self._good and abs(cut - target) < self._end / num_shards / 2]
            chosen.append(min(good or pool, key=lambda cut, target=target: abs(cut - target)))  # type: ignore[misc]
        return chosen

    def _layer_starts(self) -> list[int]:
        """Allowed cuts at the start of a layer."""
        layers = self._analysis.layers
        starts = [p for p in range(1, self._end) if layers[p] != layers[p - 1] and layers[p]]
        allowed = set(self._analysis.cuts)
        return [position for position in starts if position in allowed]

    def _refusal(self, first: int, last: int, enough: int) -> BudgetError:
        edges = [0, *self._analysis.cuts, self._end]
        pieces = _in_pieces(self._analysis, [(span, self._cost(*span)) for span in pairwise(edges)], self._capacity)
        if not pieces and self._may_split_batches:
            pieces = "have batches split (split_batches='auto'), "
        return BudgetError(
            f"{self._name(first, last)} needs {format_bytes(self._cost(first, last).peak_bytes)} at once, but a shard may take "
            f"{format_bytes(self._capacity)}: the smallest device has a budget of {format_bytes(self._budget)}, of which "
            f"{format_bytes(self._budget - self._capacity)} are kept for loading; lower batch_size, {pieces}or raise "
            f"device_memory to at least {format_bytes_up(enough)}",
            enough_bytes=enough,
        )

    def _name(self, first: int, last: int) -> str:
        layer = self._analysis.layers[first] or "the model's top level"
        return f"layer {layer!r} (nodes {first} to {last - 1})"


class _CandidatePilot(ShardPilot):
    """Measures candidates from the shortest on, and none beyond a candidate over the limit, apart from expected candidates.

    Of the base, only `cost` works here; other facts come from the pilot given.

    Args:
        pilot: measures candidates and keeps the results.
        analysis: positions where candidates may end.
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
        too_large: dict[int, list[tuple[int, ShardCost]]] | None = None,
        peaks: dict[int, dict[int, int]] | None = None,
    ) -> None:
        self._pilot = pilot
        self._cuts = analysis.cuts
        self._end = num_nodes
        # Every caller asks for the whole graph.
        self._expected = {(0, num_nodes)}
        self._limit_bytes = limit_bytes
        # By first node: last nodes and costs of candidates over some limit.
        self._too_large = {} if too_large is None else too_large
        self._peaks = {} if peaks is None else peaks

    def within(self, limit_bytes: int, analysis: GraphAnalysis) -> "_CandidatePilot":
        """Return a pilot with another limit that shares all results."""
        return _CandidatePilot(self._pilot, analysis, self._end, limit_bytes, self._too_large, self._peaks)

    def expect(self, boundaries: Sequence[int]) -> None:
        """Measure the candidates between boundaries at once: the same cuts served another capture of the model."""
        self._expected.update(pairwise([0, *boundaries, self._end]))

    def peaks(self, first: int) -> Mapping[int, int]:
        """Needs of the measured candidates from `first`, by last node."""
        return self._peaks.get(first, {})

    def cost(self, first: int, last: int) -> ShardCost:
        """Cost of a candidate, or of a shorter candidate that is over the limit already."""
        # The pilot measures a candidate only once; none whose parameters alone are too large.
        if (first, last) in self._expected and self._pilot.least_bytes(first, last) <= self._limit_bytes:
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


def _good_cuts(analysis: GraphAnalysis) -> list[int]:
    """Cuts with the fewest crossing bytes in their neighbourhood: between blocks rather than inside blocks."""
    crossing = analysis.crossing_bytes
    return [
        cut
        for cut in analysis.cuts
        if crossing[cut] <= min(crossing[max(1, cut - _NEAR) : min(len(crossing) - 1, cut + _NEAR + 1)])
    ]


def _in_pieces(analysis: GraphAnalysis, parts: Sequence[tuple[tuple[int, int], ShardCost]], capacity_bytes: int) -> str:
    """Return the remedy as text for a message, or "" if operators other than those of `split_operators` do not fit.

    The number of pieces is a guess from the cost of the whole operator; real pieces are measured once a task asks for
    pieces.
    """
    pieces_by_operator: dict[tuple[str, str], int] = {}
    for (first, last), cost in parts:
        if cost.peak_bytes <= capacity_bytes:
            continue
        operators = [p for p in range(first, last) if cost.state_bytes and analysis.classes[p] in _WHOLE | _CUT]
        count = _pieces(cost, capacity_bytes)
        # Pieces of weights would not help here, so the message must not promise that they do.
        if not operators or not count:
            return ""
        for position in operators:
            layer = analysis.layers[position].partition("@")[0]  # export numbers the calls of a module after "@"
            kind = (layer, analysis.classes[position])
            pieces_by_operator[kind] = max(pieces_by_operator.get(kind, 0), count)
    if not pieces_by_operator:
        return ""
    count = max(pieces_by_operator.values())  # tied operators need the same number
    whole = {layer: count for layer, kind in pieces_by_operator if kind in _WHOLE}
    if len(whole) < len(pieces_by_operator):
        return "cut more pieces by split_operators, "
    return f"train the weights in pieces (split_operators={whole}), "


def _pieces(cost: ShardCost, capacity_bytes: int) -> int:
    """Number of pieces that would fit; 0 if the operator's inputs leave no room for any piece."""
    beside = 2 * cost.value_bytes  # values and their gradients
    room = capacity_bytes - beside
    return ceil((cost.peak_bytes - beside) / room * _UNEVEN) if room > 0 else 0
