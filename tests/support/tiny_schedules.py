"""The best schedule of a tiny instance by trying all, and the best there is if jobs may be cut anywhere. Exact."""

import itertools
from collections.abc import Sequence
from fractions import Fraction


def best_makespan(chains: Sequence[Sequence[int]], speeds: Sequence[int]) -> Fraction:
    """The optimum of chains of units, tried in every order on every device; a unit takes its length / speed.

    Each unit starts as soon as its chain and its device are free. Some order of this kind is optimal, since starting
    a unit earlier on the same device delays nothing.
    """
    best = sum((Fraction(unit, max(speeds)) for chain in chains for unit in chain), Fraction())

    def place(taken: tuple[int, ...], chain_free: tuple[Fraction, ...], device_free: tuple[Fraction, ...]) -> None:
        nonlocal best
        latest = max((*chain_free, Fraction()))
        if latest >= best:
            return
        if all(count == len(chain) for count, chain in zip(taken, chains, strict=True)):
            best = latest
            return
        for c, chain in enumerate(chains):
            if taken[c] == len(chain):
                continue
            for d, speed in enumerate(speeds):
                if (device_free[d], speed) in zip(device_free[:d], speeds[:d], strict=True):
                    continue  # the same as a device already tried
                end = max(chain_free[c], device_free[d]) + Fraction(chain[taken[c]], speed)
                place(replaced(taken, c, taken[c] + 1), replaced(chain_free, c, end), replaced(device_free, d, end))

    place((0,) * len(chains), (Fraction(),) * len(chains), (Fraction(),) * len(speeds))
    return best


def replaced(values: tuple, index: int, value: object) -> tuple:
    """The tuple with one value exchanged."""
    return (*values[:index], value, *values[index + 1 :])


def level_makespan(jobs: Sequence[int], speeds: Sequence[int]) -> Fraction:
    """The makespan of Horvath, Lam and Sethi's level algorithm, which cuts jobs anywhere, as often as it likes.

    The jobs with the most work left get the fastest devices; jobs with equally much share theirs evenly.
    """
    fastest = sorted(speeds, reverse=True)
    left, now = [Fraction(job) for job in jobs if job], Fraction()
    while left:
        levels = sorted(set(left), reverse=True)
        rates, first = [], 0
        for level in levels:
            count = left.count(level)
            rates.append(Fraction(sum(fastest[first : first + count]), count))
            first += count
        waits = [levels[-1] / rates[-1]] if rates[-1] else []
        for (upper, lower), (fast, slow) in zip(itertools.pairwise(levels), itertools.pairwise(rates), strict=True):
            if fast > slow:
                waits.append((upper - lower) / (fast - slow))
        wait = min(waits)
        now += wait
        after = dict(zip(levels, (level - rate * wait for level, rate in zip(levels, rates, strict=True)), strict=True))
        left = [after[level] for level in left if after[level]]
    return now
