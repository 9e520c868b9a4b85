"""Chooses the size of the shards: so that a step moves the fewest bytes, or so that copies run beside units.

HYDRA's rule packs as many nodes into a shard as fit the device. But the larger a shard, the more room its units take
from blocks that could have stayed on the device until their next use. `choose_packing` therefore packs shards of a series of
smaller sizes as well, simulates a step of each cut (`shard/cost/traffic_model.py`), and takes the cut that moves about the
fewest bytes. If `num_shards="tuned"`, `ShardPartitionPlanner` (`partition_planner.py`) calls `choose_packing` after
cutting the first training step of a trial into the largest shards. By default the planner calls `beside_copies` instead, if
copies cross a link. The module must not run a unit.

The choice reads the pilot's costs and no clock, so equal costs give equal cuts.

Source: task packing and the tuner of Harmony (Li et al., section 3). Differs: batches are as large as the task says,
because other sizes give other numbers; and a shard is a single pack for forward and backward, because larger packs of
the forward alone would move no fewer bytes under a pager that lets parameters stay (counted by `benchmarks/forward_packs.py`).
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from hydra_tune.quantities import format_bytes
from hydra_tune.shard.cost.pilot import ShardCost
from hydra_tune.shard.cost.traffic_model import StepAccessPattern, step_traffic

CHOICES = logging.getLogger(__name__)
"""Receives choices of how a step is cut or run, at the level INFO, from `plan_cache.py` and from trials (`train/`)."""

_NEXT_SIZE = 0.8  # factor from the largest shard of a cut to the shards of the next cut
_MOST_CUTS = 8  # limit of smaller sizes to try: the shards of each cut must be measured
_NEAR = 1.03  # within this factor of the least bytes, fewer shards are better
_SHARES = (0.5, 0.6, 0.7, 0.8)  # of a device's memory, for the largest unit beside copies
_MOST_MORE = 1.25  # times the bytes moved with the largest shards, which smaller shards may move
_WORTH = 0.97  # share of the bytes moved with the largest shards; the largest shards stay unless a cut is below

Measure = Callable[[int, int], ShardCost]
"""Returns the cost of a shard from its first and last position."""
Pack = Callable[[int], Sequence[int] | None]
"""Returns where shards start and end, given the most bytes of a shard; None if some part cannot be made so small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPartitionCandidate:
    """A way to cut a step.

    Attributes:
        edges: positions where shards start and end.
        peak_bytes: largest needs of a unit.
        step_bytes: bytes that a step is expected to move to and from the device.
    """

    edges: tuple[int, ...]
    peak_bytes: int
    step_bytes: int

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.edges) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPartitionChoice:
    """The chosen cut, and all cuts considered.

    Attributes:
        tried: all cuts; the cut with the largest shards comes first.
    """

    packing: ShardPartitionCandidate
    tried: tuple[ShardPartitionCandidate, ...]

    @property
    def reason(self) -> str:
        """Sentence for the user."""
        largest, chosen = self.tried[0], self.packing
        counts = ", ".join(f"{candidate.num_shards}: {format_bytes(candidate.step_bytes)}" for candidate in self.tried)
        if chosen is largest:
            gain_text = "the largest that fit; smaller ones would not move fewer bytes"
        else:
            gain_text = (
                f"a step moves about {format_bytes(chosen.step_bytes)}, and {format_bytes(largest.step_bytes)} with "
                f"{largest.num_shards} of up to {format_bytes(largest.peak_bytes)}"
            )
        return f"{chosen.num_shards} shards of up to {format_bytes(chosen.peak_bytes)}: {gain_text} (tried {counts})"


def choose_packing(
    largest: Sequence[int], pack: Pack, measure: Measure, budget_bytes: int, habits: StepAccessPattern | None = None
) -> ShardPartitionChoice:
    """Choose the cut with the least traffic; of cuts with about the least, the cut with the fewest shards.

    The chosen cut never moves more than the shards of `largest`, which stay if little can be saved. `largest` has the
    edges of shards as large as the device allows; `pack` cuts into shards of a given size, at most the size of
    `largest`.
    """
    packing = partial(_candidate, measure=measure, budget_bytes=budget_bytes, habits=habits)
    candidates = [packing(largest)]
    if candidates[0].step_bytes:  # also of a single shard, whose optimizer state may have to leave for its activations
        candidates += _smaller(candidates[0], pack, packing)
    least = min(candidate.step_bytes for candidate in candidates)
    near = [candidate for candidate in candidates if candidate.step_bytes <= least * _NEAR]
    best = min(near, key=lambda candidate: (candidate.num_shards, candidate.step_bytes, candidate.peak_bytes))
    if best.step_bytes > candidates[0].step_bytes * _WORTH:
        best = candidates[0]
    return ShardPartitionChoice(packing=best, tried=tuple(candidates))


def beside_copies(
    largest: Sequence[int], pack: Pack, measure: Measure, budget_bytes: int, habits: StepAccessPattern | None = None
) -> list[int]:
    """Choose smaller shards than the largest that fit, if a step moves bytes.

    A unit that fills the device leaves no room for the next unit's blocks, so that copies and units take turns. Beside
    a unit of half the device, the blocks of the last unit leave while those of the next one come. Arguments are as of
    `choose_packing`.

    Returns:
        The edges of shards of at most half the device, or of the next larger share into which every part can be cut and
        which moves no more than a quarter above the bytes of `largest`; else `largest`.
    """
    packing = partial(_candidate, measure=measure, budget_bytes=budget_bytes, habits=habits)
    moved_bytes = packing(largest).step_bytes
    cuts = (pack(int(budget_bytes * share)) for share in _SHARES) if moved_bytes else ()
    smaller = (packing(edges) for edges in cuts if edges is not None)
    fitting = (candidate.edges for candidate in smaller if candidate.step_bytes <= moved_bytes * _MOST_MORE)
    return list(next(fitting, largest))


def _candidate(
    edges: Sequence[int], *, measure: Measure, budget_bytes: int, habits: StepAccessPattern | None
) -> ShardPartitionCandidate:
    costs = [measure(first, last) for first, last in pairwise(edges)]
    return ShardPartitionCandidate(
        edges=tuple(edges),
        peak_bytes=max(cost.peak_bytes for cost in costs),
        step_bytes=step_traffic(costs, budget_bytes, habits).nbytes,
    )


def _smaller(
    largest: ShardPartitionCandidate, pack: Pack, packing: Callable[[Sequence[int]], ShardPartitionCandidate]
) -> Iterator[ShardPartitionCandidate]:
    """Yield cuts into ever smaller shards, until some part cannot be cut further or `_MOST_CUTS` sizes were tried."""
    tried_edges, size = {largest.edges}, largest.peak_bytes
    for _ in range(_MOST_CUTS):
        size = int(size * _NEXT_SIZE)
        edges = pack(size)
        if edges is None:
            return
        if tuple(edges) in tried_edges:
            continue
        tried_edges.add(tuple(edges))
        candidate = packing(edges)
        yield candidate
        # The shards may be smaller than asked for, and the next cut has to differ from this cut.
        size = min(size, candidate.peak_bytes)
