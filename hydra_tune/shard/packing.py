"""Where to cut so that a step moves the fewest bytes: how many nodes to pack into a shard.

HYDRA's rule packs as much into a shard as fits the device. The larger a shard, the more room its units take from what could
have stayed on the device until it is needed again. So shards are packed to a series of smaller sizes as well, a step of each
cut is played through (`traffic.py`), and the cut that moves least is taken.

Only what the pilot knows is asked, and no clock: the same task on the same budget is cut in the same places every time. How
long a step takes is another matter. More shards mean more units, and a smaller last shard, the only one whose forward is never
computed again; on fast links that can cost more than the bytes are worth (docs/memory.md).

Source: task packing and the tuner of Harmony (Li et al., section 3). Differs: batches are as large as the task says, for
other sizes give other numbers; and a shard is one pack for forward and backward, for larger packs of the forward alone would
move no fewer bytes under a pager that lets parameters stay (docs/memory.md has figures).
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hydra_tune.quantities import format_bytes
from hydra_tune.shard.pilot import ShardCost
from hydra_tune.shard.traffic import Habits, step_traffic

CHOICES = logging.getLogger(__name__)
"""Told each choice that is made, at the level INFO."""

_NEXT_SIZE = 0.8  # of the largest shard of one cut, for those of the next
_MOST_CUTS = 8  # that are tried: each has its shards measured
_NEAR = 1.03  # of the least bytes: then fewer shards are better
_WORTH = 0.97  # of the bytes of the largest shards: above it, they stay

Measure = Callable[[int, int], ShardCost]
"""First and last position of a shard -> what it costs."""
Pack = Callable[[int], Sequence[int] | None]
"""Bytes that a shard may take -> where shards start and end; None if some part cannot be made so small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """One way to cut a step.

    Attributes:
        edges: where shards start and end.
        peak_bytes: the most that one of their units needs.
        step_bytes: what a step is expected to move, to the device and from it.
    """

    edges: tuple[int, ...]
    peak_bytes: int
    step_bytes: int

    @property
    def num_shards(self) -> int:
        """How many."""
        return len(self.edges) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The cut that was chosen, and those it was chosen from.

    Attributes:
        packing: the chosen one.
        tried: all of them; shards as large as the device allows come first.
    """

    packing: Packing
    tried: tuple[Packing, ...]

    @property
    def reason(self) -> str:
        """A sentence for people."""
        largest, chosen = self.tried[0], self.packing
        counts = ", ".join(f"{one.num_shards}: {format_bytes(one.step_bytes)}" for one in self.tried)
        if chosen is largest:
            saved = "the largest that fit; smaller ones would not move fewer bytes"
        else:
            saved = (
                f"a step moves about {format_bytes(chosen.step_bytes)}, and {format_bytes(largest.step_bytes)} with "
                f"{largest.num_shards} of up to {format_bytes(largest.peak_bytes)}"
            )
        return f"{chosen.num_shards} shards of up to {format_bytes(chosen.peak_bytes)}: {saved} (tried {counts})"


def choose_packing(
    largest: Sequence[int], pack: Pack, measure: Measure, budget_bytes: int, habits: Habits | None = None
) -> Choice:
    """The cut with which a step moves the fewest bytes; of those that move about as few, the one with the fewest shards.

    It is never one that is expected to move more than the shards of `largest`, which stay where little is to be had.

    Args:
        largest: the edges of shards as large as the device allows.
        pack: cuts into shards of some size; the size of `largest` is the most that it is asked for.
        measure: what a shard costs, with whatever activations it will keep.
        budget_bytes: of the device.
        habits: how a step uses its shards.
    """

    def packing(edges: Sequence[int]) -> Packing:
        costs = [measure(first, last) for first, last in pairwise(edges)]
        return Packing(
            edges=tuple(edges),
            peak_bytes=max(cost.peak_bytes for cost in costs),
            step_bytes=step_traffic(costs, budget_bytes, habits).nbytes,
        )

    tried = [packing(largest)]
    tried += _smaller(tried[0], pack, packing)
    least = min(one.step_bytes for one in tried)
    near = [one for one in tried if one.step_bytes <= least * _NEAR]
    best = min(near, key=lambda one: (one.num_shards, one.step_bytes, one.peak_bytes))
    if best.step_bytes > tried[0].step_bytes * _WORTH:
        best = tried[0]
    return Choice(packing=best, tried=tuple(tried))


def _smaller(largest: Packing, pack: Pack, packing: Callable[[Sequence[int]], Packing]) -> Iterator[Packing]:
    """Cuts into ever smaller shards, until some part cannot be cut further."""
    seen, size = {largest.edges}, largest.peak_bytes
    for _ in range(_MOST_CUTS):
        size = int(size * _NEXT_SIZE)
        edges = pack(size)
        if edges is None:
            return
        if tuple(edges) in seen:
            continue
        seen.add(tuple(edges))
        found = packing(edges)
        yield found
        size = min(size, found.peak_bytes)
