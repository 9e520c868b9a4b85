"""Sub-array constructor: the ways to divide a device's trials into sub-arrays, and to pair the sub-arrays.

Source: §3.2 of the paper, step 1. Differs: the paper lists four partitions of eight trials, with pairs of equal size.
The paper's rule, an even number of sub-arrays, admits twelve. The planner tries all admitted partitions, as far as they
can beat the best known partition. A single trial is a pair without a partner. `Planner.portfolio` (`portfolio.py`) goes
through the partitions when all trials of a device are planned at once, for `hydra-tune plan --profile`.
"""

from collections.abc import Callable, Iterator, Sequence


def pairs(sizes: Sequence[int], seconds: Callable[[int], float]) -> list[tuple[int, ...]]:
    """Pair the sub-arrays whose iterations take the closest times; the sub-arrays of a pair run in turn.

    Of an odd number of sub-arrays, the sub-array that fits worst stays without a partner.

    Args:
        sizes: number of trials in each sub-array of a single partition.
        seconds: size of a sub-array -> seconds of an iteration.
    """
    in_order = sorted(sizes, key=lambda size: (seconds(size), size))
    if len(in_order) % 2 == 0:
        return list(zip(in_order[::2], in_order[1::2], strict=True))
    # Neighbours in order are the closest pairs, so the sub-array left out has an even number of others on either side.
    ways = [(in_order[:at] + in_order[at + 1 :], in_order[at]) for at in range(0, len(in_order), 2)]
    paired_sizes, leftover = min(ways, key=lambda way: _apart(way[0], seconds))
    return [*pairs(paired_sizes, seconds), (leftover,)]


def within(
    num_trials: int, seconds: Callable[[int], float], best_seconds: Callable[[], float]
) -> Iterator[tuple[int, ...]]:
    """Yield the partitions that may still beat the best known time when the search reaches them.

    A partition takes at least the compute time of its sub-arrays, one after the other. The search adds sub-arrays
    largest first, so a prefix that is too slow already rules out all partitions with the same prefix.

    Args:
        num_trials: to divide.
        seconds: size of a sub-array -> seconds that the operators of an iteration take.
        best_seconds: returns the best known time; called again for each prefix, since the time falls during the search.
    """
    if num_trials == 1:
        if seconds(1) < best_seconds():
            yield (1,)
        return
    # Least seconds per trial in sub-arrays of at most so many trials. Later parts are never larger than earlier ones,
    # so this bounds the rest of a partition from below.
    least_seconds = [
        min(seconds(size) / size for size in range(1, largest + 1)) for largest in range(1, num_trials + 1)
    ]

    def added(parts: tuple[int, ...], rest: int, so_far: float) -> Iterator[tuple[int, ...]]:
        """Yield partitions that begin with `parts`, which take `so_far` seconds, and divide `rest` more trials."""
        if not rest:
            if len(parts) % 2 == 0:
                yield parts
            return
        # The first part leaves a trial over: an even number of sub-arrays is at least two.
        for size in range(min(rest, parts[-1] if parts else num_trials - 1), 0, -1):
            at_least = so_far + seconds(size) + (rest - size) * least_seconds[size - 1]
            if at_least < best_seconds():
                yield from added((*parts, size), rest - size, so_far + seconds(size))

    yield from added((), num_trials, 0.0)


def _apart(sizes: Sequence[int], seconds: Callable[[int], float]) -> float:
    return sum(seconds(sizes[at + 1]) - seconds(sizes[at]) for at in range(0, len(sizes), 2))
