"""Choice of a plan for a benchmark: run the best few members of a portfolio, correct the model, and plan again.

A pool chooses among planned steps while it trains (`hydra_tune/fusion/runtime/plan_autotuner.py`). A benchmark has no
trial to train meanwhile, so it measures each member by itself, with the same corrections of the model.

    settled(planner, num_trials, measure).member
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from hydra_tune.planner.search.autotune import TOLERANCE, MeasuredPlan, ProfileCorrection, fitted, key_of
from hydra_tune.planner.search.portfolio import Planner, Portfolio, PortfolioPlan

MOST = 5
"""Most candidates measured in a round, beside the fastest candidates of other kinds (`contenders`)."""

Measure = Callable[[Sequence[PortfolioPlan]], Sequence[float]]
"""Returns the seconds of a step of each member; the members take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSelection:
    """Result of the choice.

    Attributes:
        trials: all members that ran, the fastest first.
        portfolio: as planned last.
        corrections: in order, each followed by a new portfolio.
    """

    trials: tuple[MeasuredPlan, ...]
    portfolio: Portfolio
    corrections: tuple[ProfileCorrection, ...]

    @property
    def member(self) -> PortfolioPlan:
        """The fastest member."""
        return self.trials[0].member


def settled(
    planner: Planner, num_trials: int, measure: Measure, *, most: int = MOST, max_corrections: int = 1
) -> PlanSelection:
    """Return the fastest plan of some trials, by measured steps.

    Args:
        planner: of the device.
        num_trials: of a single architecture.
        measure: runs members, all of which fit. The fastest member so far runs again beside new members, for
            comparison.
        most: number of members to run in a round, as of `contenders`.
        max_corrections: how often the trials are planned again.

    Raises:
        BudgetError: no plan fits.
    """
    known: dict[Hashable, MeasuredPlan] = {}
    corrections: list[ProfileCorrection] = []
    while True:
        portfolio = planner.portfolio(num_trials)
        _ = portfolio.best  # raises, if none fits
        known = {key: replace(trial, member=planner.told(trial.member)) for key, trial in known.items()}
        chosen = contenders(portfolio, most)
        _run([one for one in chosen if key_of(one) not in known], known, measure)
        ran = [known[key_of(one)] for one in chosen]
        if len(corrections) == max_corrections or not any(_is_off(trial) for trial in ran):
            trials = sorted(known.values(), key=lambda trial: trial.seconds)
            return PlanSelection(trials=tuple(trials), portfolio=portfolio, corrections=tuple(corrections))
        corrections.append(fitted(list(known.values())))
        planner = planner.corrected(corrections[-1].array)


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


def _run(fresh: Sequence[PortfolioPlan], known: dict[Hashable, MeasuredPlan], measure: Measure) -> None:
    """Measure members that have not run yet, together with the fastest so far.

    The machine may have changed its speed since the earlier rounds. The repeated member gives the ratio of the speeds.
    """
    if not fresh:
        return
    best = min(known.values(), key=lambda trial: trial.seconds, default=None)
    found = list(measure([*fresh, *([] if best is None else [best.member])]))
    speed = 1.0 if best is None else best.seconds / found[-1]
    known |= {
        key_of(one): MeasuredPlan(member=one, seconds=seconds * speed)
        for one, seconds in zip(fresh, found, strict=False)
    }


def _partition(member: PortfolioPlan) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(part.sizes for part in member.parts))


def _moves_nothing(member: PortfolioPlan) -> bool:
    return not any(one.swaps or one.recomputes for part in member.parts for one in part.schedule.decisions)


def _has_no_swaps(member: PortfolioPlan) -> bool:
    return not any(one.swaps for part in member.parts for one in part.schedule.decisions)


def _is_off(trial: MeasuredPlan) -> bool:
    """Whether the measured time differs from the prediction by more than the tolerance."""
    return abs(trial.seconds / trial.member.seconds - 1) > TOLERANCE
