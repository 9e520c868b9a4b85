"""Draws points of a sweep's space without a tuner: all of a small grid, or a few points spread evenly.

`run_plan` (`planning.py`) draws all points before the first configuration is planned; `run_check` (`checking.py`) draws
a single point. Equal seeds must give equal points: the draws come from a generator of their own, parameter by
parameter. The module must not ask a tuner.
"""

import itertools
import math
import random
from collections.abc import Mapping

from hydra_tune.cli.sweep_file.domains import ChoiceDomain, Domain, FloatDomain, IntDomain, Scalar, grid_count


def sample(parameters: Mapping[str, Domain], count: int, seed: int) -> list[dict[str, Scalar]]:
    """Draw points whose values are spread over each parameter's whole domain (a Latin hypercube)."""
    source = random.Random(seed)  # noqa: S311 - not for secrets
    columns = {name: _column(domain, count, source) for name, domain in parameters.items()}
    return [{name: column[number] for name, column in columns.items()} for number in range(count)]


def grid(parameters: Mapping[str, Domain]) -> list[dict[str, Scalar]]:
    """List every combination once; each parameter needs finitely many values."""
    columns = [domain.grid() or () for domain in parameters.values()]
    return [dict(zip(parameters, values, strict=True)) for values in itertools.product(*columns)]


def _column(domain: Domain, count: int, source: random.Random) -> list[Scalar]:
    """Draw one value from each of `count` equal parts of a domain, in random order."""
    places = [(number + source.random()) / count for number in range(count)]
    # In an order of its own for each parameter, or all parameters would rise together from point to point.
    source.shuffle(places)
    return [_at(domain, place) for place in places]


def _at(domain: Domain, place: float) -> Scalar:
    if isinstance(domain, ChoiceDomain):
        # `place` is below 1, so the index stays below the length.
        return domain.values[int(place * len(domain.values))]
    if isinstance(domain, IntDomain) and domain.log:
        # Powers of e and their rounding may end just outside the limits.
        return min(domain.high, max(domain.low, round(_between(domain.low, domain.high, place, log=True))))
    if isinstance(domain, FloatDomain) and domain.step is None:
        return domain.settle(_between(domain.low, domain.high, place, log=domain.log))
    values, count = domain.grid(), grid_count(domain)
    assert values is not None
    assert count is not None, "the range has steps"
    # For large counts the product may round up to the count.
    return values[min(count - 1, int(place * count))]


def _between(low: float, high: float, place: float, *, log: bool) -> float:
    if log:
        # exp(log(high)) may round to more than high.
        return min(high, math.exp(math.log(low) + place * (math.log(high) - math.log(low))))
    return low + place * (high - low)
