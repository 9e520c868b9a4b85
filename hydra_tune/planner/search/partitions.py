"""Sub-array constructor: the ways to divide a device's trials into sub-arrays, and to pair the sub-arrays.

Source: §3.2 of the paper, step 1. Differs: the paper lists four partitions of eight trials, with pairs of equal size.
The paper's rule, an even number of sub-arrays, admits twelve. The planner tries all admitted partitions, as far as they
can beat the best known partition. Pairs may join sub-arrays of different architectures, which is the paper's future
work. A single trial is a pair without a partner.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class SubArray:
    """Trials fused into a single model.

    Attributes:
        architecture: common to the trials.
        size: number of trials.
    """

    architecture: str
    size: int


@dataclass(frozen=True, slots=True)
class SubArrayPair:
    """Sub-arrays that run in turn: the backward of one with the forward of the other.

    Attributes:
        first: a sub-array.
        second: its partner; None for a sub-array without a partner.
    """

    first: SubArray
    second: SubArray | None

    @property
    def sub_arrays(self) -> tuple[SubArray, ...]:
        """The sub-arrays of the pair, 1 or 2."""
        return (self.first,) if self.second is None else (self.first, self.second)


def partitions(num_trials: int) -> Iterator[tuple[int, ...]]:
    """Yield the sizes of sub-arrays, largest first, for each division of the trials into an even number of sub-arrays.

    A single trial is yielded alone, as `(1,)`.

    Raises:
        ValueError: fewer than one trial.
    """
    if num_trials < 1:
        raise ValueError(f"there are {num_trials} trials to divide into sub-arrays; at least 1 is needed")
    if num_trials == 1:
        yield (1,)
        return
    for parts in _parts(num_trials, num_trials):
        if len(parts) % 2 == 0:
            yield parts


def mixed_partitions(trials: Mapping[str, int]) -> Iterator[tuple[SubArray, ...]]:
    """Yield divisions of trials of several architectures into sub-arrays.

    The number of sub-arrays is even wherever there are two trials or more.

    Args:
        trials: number of trials, by architecture.

    Raises:
        ValueError: an architecture without trials.
    """
    if any(count < 1 for count in trials.values()):
        raise ValueError(f"every architecture needs a trial; there are {dict(trials)}")
    choices = [[(name, parts) for parts in _parts(count, count)] for name, count in trials.items()]
    is_single = sum(trials.values()) == 1
    for combination in itertools.product(*choices):
        sub_arrays = tuple(SubArray(name, size) for name, parts in combination for size in parts)
        if len(sub_arrays) % 2 == 0 or is_single:
            yield sub_arrays


def pairs(sub_arrays: Sequence[SubArray], seconds: Callable[[SubArray], float]) -> list[SubArrayPair]:
    """Pair the sub-arrays whose iterations take the closest times.

    Of an odd number of sub-arrays, the sub-array that fits worst stays without a partner.

    Args:
        sub_arrays: of a single partition.
        seconds: sub-array -> seconds of an iteration.
    """
    in_order = sorted(sub_arrays, key=lambda sub_array: (seconds(sub_array), sub_array))
    if len(in_order) % 2 == 0:
        return [SubArrayPair(a, b) for a, b in zip(in_order[::2], in_order[1::2], strict=True)]
    # Neighbours in order are the closest pairs, so the sub-array left out has an even number of others on either side.
    ways = [(in_order[:at] + in_order[at + 1 :], in_order[at]) for at in range(0, len(in_order), 2)]
    paired_arrays, leftover = min(ways, key=lambda way: _apart(way[0], seconds))
    return [*pairs(paired_arrays, seconds), SubArrayPair(leftover, None)]


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


def _parts(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    if not total:
        yield ()
        return
    for size in range(min(total, largest), 0, -1):
        for smaller_parts in _parts(total - size, size):
            yield (size, *smaller_parts)


def _apart(sub_arrays: Sequence[SubArray], seconds: Callable[[SubArray], float]) -> float:
    return sum(seconds(sub_arrays[at + 1]) - seconds(sub_arrays[at]) for at in range(0, len(sub_arrays), 2))
