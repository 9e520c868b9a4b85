"""Choice of a plan for a benchmark: run the best few members of a portfolio, and take the fastest.

A pool chooses among planned steps while it trains (`hydra_tune/fusion/runtime/plan_autotuner.py`). A benchmark has no
trial to train meanwhile, so it measures each member by itself.

    settled(planner, num_trials, measure)
"""

from collections.abc import Callable, Hashable, Sequence

from hydra_tune.planner.search.autotune import key_of
from hydra_tune.planner.search.portfolio import Planner, Portfolio, PortfolioPlan

MOST = 5
"""Most candidates measured, beside the fastest candidates of other kinds (`contenders`)."""

Measure = Callable[[Sequence[PortfolioPlan]], Sequence[float]]
"""Returns the seconds of a step of each member; the members take turns."""


def settled(planner: Planner, num_trials: int, measure: Measure, *, most: int = MOST) -> PortfolioPlan:
    """Return the fastest plan of some trials, by measured steps.

    Args:
        planner: of the device.
        num_trials: of a single architecture.
        measure: runs members, all of which fit.
        most: number of members to run, as of `contenders`.

    Raises:
        BudgetError: no plan fits.
    """
    portfolio = planner.portfolio(num_trials)
    _ = portfolio.best  # raises, if none fits
    chosen = contenders(portfolio, most)
    seconds = measure(chosen)
    return chosen[min(range(len(chosen)), key=seconds.__getitem__)]


def contenders(portfolio: Portfolio, most: int = MOST) -> list[PortfolioPlan]:
    """Return the members worth measuring, the fastest by prediction first.

    Of members that do the same, only the first is returned. A disturbed profile misjudges all members with its
    sub-arrays alike, so each partition is represented.

    Args:
        portfolio: of plans.
        most: number of fastest members; beside these come the fastest of each other partition, the fastest without
            swaps, and the fastest that moves nothing.
    """
    different: dict[Hashable, PortfolioPlan] = {}
    for one in portfolio.members:
        if one.fits:
            different.setdefault(key_of(one), one)
    each = list(different.values())
    found = each[:most]
    for one in each[most:]:
        kinds = [kind for kind in (_partition, _has_no_swaps, _moves_nothing) if kind(one)]
        if any(kind(one) not in map(kind, found) for kind in kinds):
            found.append(one)
    return found


def _partition(member: PortfolioPlan) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(part.sizes for part in member.parts))


def _moves_nothing(member: PortfolioPlan) -> bool:
    return not any(one.swaps or one.recomputes for part in member.parts for one in part.schedule.decisions)


def _has_no_swaps(member: PortfolioPlan) -> bool:
    return not any(one.swaps for part in member.parts for one in part.schedule.decisions)
