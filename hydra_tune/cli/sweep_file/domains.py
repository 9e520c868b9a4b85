"""Domains of a sweep's parameters: a fixed value, a choice, or a range of whole or real numbers.

Domains are plain values, independent of the sweep file and of the tuner that draws from them. `distributions.py` makes
the domains when a sweep file is read, and `overrides.py` a constant for `--set`. `cli/dry_run/sampling.py` draws from the
domains for `hydra-tune plan` and `check`, `integrations/hydra_tune_optuna/sweep.py` for each trial of a sweep, and
`integrations/hydra_tune_ray/sweep.py` translates the domains for Ray. `reader.py`, the commands and the Optuna tuner count
a grid by `grid_size`. Steps and multiples are computed in decimal, so that a value is the number that the user would write.
The module must not know tuners or load torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDomain:
    """One of several values; a constant is a choice of one."""

    values: tuple[Scalar, ...]

    def grid(self) -> Sequence[Scalar]:
        """Every value, in order."""
        return self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class IntDomain:
    """A whole number from `low` to `high`, both included, in steps of `step` from `low`, or spread over magnitudes."""

    low: int
    high: int
    step: int = 1
    log: bool = False

    def grid(self) -> Sequence[Scalar]:
        """Every value, in order."""
        return range(self.low, self.high + 1, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatDomain:
    """A real number from `low` to `high`.

    Args:
        log: whether values spread over magnitudes.
        step: values are `low + i * step`; not with `log`.
        multiple: a drawn value is rounded to a multiple of this number; for `log`, where tuners know no step.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None
    multiple: float | None = None

    def grid(self) -> Sequence[Scalar] | None:
        """Every value, in order; None for a range without a step."""
        if self.step is None:
            return None
        # By way of text, because `Decimal(0.1)` has all the binary digits of 0.1, and 0.1 * 3 would miss 0.3.
        low, step = Decimal(str(self.low)), Decimal(str(self.step))
        count = int((Decimal(str(self.high)) - low) / step) + 1
        return _DecimalRange(low, step, count)

    def settle(self, drawn: float) -> float:
        """Value for the task: the nearest multiple of a drawn value within the range."""
        if self.multiple is None:
            return drawn
        # The limits need not be multiples, so the nearest multiple may lie outside.
        low, high = multiples_within(self.low, self.high, self.multiple)
        multiple = Decimal(str(self.multiple))
        return float(min(max(round(Decimal(str(drawn)) / multiple), low), high) * multiple)


class _DecimalRange(Sequence[Scalar]):
    """Lazy sequence of `low + i * step` for i below `count`, computed in decimal so that 0.1 * 3 is 0.3."""

    def __init__(self, low: Decimal, step: Decimal, count: int) -> None:
        self._low, self._step, self._count = low, step, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Scalar:  # type: ignore[override]  # no slices
        if not 0 <= index < self._count:
            raise IndexError(index)
        return float(self._low + index * self._step)


Domain = ChoiceDomain | IntDomain | FloatDomain


def multiples_within(low: float, high: float, multiple: float) -> tuple[int, int]:
    """First and last whole `i` with `low <= i * multiple <= high`; without any, the first is larger than the last."""
    unit = Decimal(str(multiple))
    # In decimal, because 0.3 / 0.1 is below 3 for floats, and the multiple 0.3 would be lost.
    first = (Decimal(str(low)) / unit).to_integral_value(ROUND_CEILING)
    last = (Decimal(str(high)) / unit).to_integral_value(ROUND_FLOOR)
    return int(first), int(last)


def grid_size(parameters: Mapping[str, Domain]) -> int:
    """Number of points of a grid; parameters without finitely many values do not count."""
    return math.prod(count for domain in parameters.values() if (count := grid_count(domain)) is not None)


def grid_count(domain: Domain) -> int | None:
    """Length of `domain.grid()`, also beyond what `len` can return; None for a range without a step."""
    match domain:
        case IntDomain():
            return (domain.high - domain.low) // domain.step + 1
        case FloatDomain():
            if domain.step is None:
                return None
            return int((Decimal(str(domain.high)) - Decimal(str(domain.low))) / Decimal(str(domain.step))) + 1
        case ChoiceDomain():
            return len(domain.values)
