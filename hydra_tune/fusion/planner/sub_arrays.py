"""The sub-array constructor: into which sub-arrays the trials of a device may be divided, and which of them make pairs.

Source: §3.2 of the paper, step 1. Differs: the paper lists four partitions of eight trials, in which pairs are of
equal size. Its rule, an even number of sub-arrays, admits twelve, and all are tried, as far as they can be better
than the best one known. Pairs may join sub-arrays of different architectures, which is the paper's future work. A
single trial is a pair without a partner.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class SubArray:
    """Trials fused into one.

    Attributes:
        architecture: what they have in common.
        size: how many they are.
    """

    architecture: str
    size: int


@dataclass(frozen=True, slots=True)
class Pair:
    """Sub-arrays that are run in turn: the backward of one with the forward of the other.

    Attributes:
        first: one of them.
        second: the other; None for one that is left over.
    """

    first: SubArray
    second: SubArray | None

    @property
    def sub_arrays(self) -> tuple[SubArray, ...]:
        """One or two."""
        return (self.first,) if self.second is None else (self.first, self.second)


def partitions(num_trials: int) -> Iterator[tuple[int, ...]]:
    """The sizes of an even number of sub-arrays of so many trials, largest first; of one trial, the trial alone.

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
    """Sub-arrays of several architectures; an even number of them in all wherever there are two trials or more.

    Args:
        trials: how many there are, by architecture.

    Raises:
        ValueError: an architecture without trials.
    """
    if any(count < 1 for count in trials.values()):
        raise ValueError(f"every architecture needs a trial; there are {dict(trials)}")
    each = [[(name, parts) for parts in _parts(count, count)] for name, count in trials.items()]
    alone = sum(trials.values()) == 1
    for combination in itertools.product(*each):
        found = tuple(SubArray(name, size) for name, parts in combination for size in parts)
        if len(found) % 2 == 0 or alone:
            yield found


def pairs(sub_arrays: Sequence[SubArray], seconds: Callable[[SubArray], float]) -> list[Pair]:
    """Pair the sub-arrays whose iterations take the closest times; of an odd number, the one that fits worst stays alone.

    Args:
        sub_arrays: of one partition.
        seconds: what an iteration of a sub-array takes.
    """
    in_order = sorted(sub_arrays, key=lambda one: (seconds(one), one))
    if len(in_order) % 2 == 0:
        return [Pair(a, b) for a, b in zip(in_order[::2], in_order[1::2], strict=True)]
    # Neighbours in order are the closest pairs, so whoever is left out has an even number on either side.
    ways = [(in_order[:at] + in_order[at + 1 :], in_order[at]) for at in range(0, len(in_order), 2)]
    rest, left = min(ways, key=lambda way: _apart(way[0], seconds))
    return [*pairs(rest, seconds), Pair(left, None)]


def within(
    num_trials: int, seconds: Callable[[int], float], best_seconds: Callable[[], float]
) -> Iterator[tuple[int, ...]]:
    """Partitions that may be faster than the best one known when they come; others are left out unseen.

    A partition takes at least what its sub-arrays compute, one after the other. Sub-arrays are added largest first,
    so that a beginning which takes too long already ends all partitions that begin so.

    Args:
        num_trials: to divide.
        seconds: what the operators of an iteration take in a sub-array of this size.
        best_seconds: what the best one known takes; asked again and again.
    """
    if num_trials == 1:
        if seconds(1) < best_seconds():
            yield (1,)
        return
    each = [min(seconds(size) / size for size in range(1, largest + 1)) for largest in range(1, num_trials + 1)]

    def added(parts: tuple[int, ...], rest: int, so_far: float) -> Iterator[tuple[int, ...]]:
        if not rest:
            if len(parts) % 2 == 0:
                yield parts
            return
        for size in range(min(rest, parts[-1] if parts else num_trials - 1), 0, -1):
            at_least = so_far + seconds(size) + (rest - size) * each[size - 1]
            if at_least < best_seconds():
                yield from added((*parts, size), rest - size, so_far + seconds(size))

    yield from added((), num_trials, 0.0)


def _parts(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    if not total:
        yield ()
        return
    for size in range(min(total, largest), 0, -1):
        for rest in _parts(total - size, size):
            yield (size, *rest)


def _apart(sub_arrays: Sequence[SubArray], seconds: Callable[[SubArray], float]) -> float:
    return sum(seconds(sub_arrays[at + 1]) - seconds(sub_arrays[at]) for at in range(0, len(sub_arrays), 2))
