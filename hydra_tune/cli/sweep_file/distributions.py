"""Distributions of a sweep file, and their domains.

Names and meanings are those of Weights & Biases sweeps. A distribution that no tuner here can draw from is refused by
name, never replaced by a similar distribution. `sweep_model.py` calls `check_distribution` and `to_domain` when pydantic
validates a parameter of the file or a value of `--set`, and `to_domain` again when `reader.py` checks a grid and makes the
`SweepSpec`. The module must not know tuners or load torch.
"""

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from hydra_tune.cli.sweep_file.domains import ChoiceDomain, Domain, FloatDomain, IntDomain, multiples_within
from hydra_tune.errors import ConfigError, did_you_mean

_RANGE = ("min", "max")


def to_domain(given: Mapping[str, Any]) -> Domain:
    """Make the domain of one parameter from its written keys: `value`, `values`, `distribution`, `min`, `max`, `q`.

    Without `distribution`, `value` is a constant and `values` a choice; `min` and `max` give multiples of `q` where `q` is
    written, else whole numbers if both are whole, and real numbers otherwise.

    Raises:
        ConfigError: the keys contradict each other or describe nothing.
    """
    distribution = given.get("distribution") or _implied(given)
    check_distribution(distribution)
    needs, make = DISTRIBUTIONS[distribution]
    optional = {"q"} if "q_" in distribution else set()
    # `value: null` is a constant without a value; any other key with null is as good as missing.
    missing = [key for key in needs if key not in given or (given[key] is None and key != "value")]
    if missing:
        raise ConfigError(f"{distribution} needs {' and '.join(missing)}")
    for key in given:
        if key != "distribution" and key not in needs and key not in optional:
            raise ConfigError(
                f"{key} does not go with {distribution}, which takes {' and '.join((*needs, *sorted(optional)))}"
            )
    return make(given)


def check_distribution(name: str) -> None:
    """Refuse a name that is not in `DISTRIBUTIONS`, by a `ConfigError`."""
    if name not in DISTRIBUTIONS:
        hint = did_you_mean(name, DISTRIBUTIONS) or f"known are {', '.join(DISTRIBUTIONS)}"
        raise ConfigError(f"{name!r} is not supported; {hint}")


def _implied(given: Mapping[str, Any]) -> str:
    if "value" in given:
        return "constant"
    if "values" in given:
        return "categorical"
    if not any(key in given for key in _RANGE):
        raise ConfigError("needs value, values, or min and max")
    # Before the types of min and max, which `_q_uniform` looks at itself.
    if "q" in given:
        return "q_uniform"
    return "int_uniform" if all(isinstance(given.get(key, 0), int) for key in _RANGE) else "uniform"


def _constant(given: Mapping[str, Any]) -> Domain:
    return ChoiceDomain(values=(given["value"],))


def _categorical(given: Mapping[str, Any]) -> Domain:
    values = tuple(given["values"])
    for index, value in enumerate(values):
        # True == 1 in Python: a tuner that looks values up by == would confuse the two.
        if value in values[:index]:
            first = values[values.index(value)]
            also = f" (equal to {first!r})" if type(first) is not type(value) else ""
            raise ConfigError(f"values has {value!r} twice{also}")
    return ChoiceDomain(values=values)


def _int_uniform(given: Mapping[str, Any]) -> Domain:
    _whole(given, "int_uniform", instead="uniform")
    low, high = _ordered(given)
    return IntDomain(low=int(low), high=int(high))


def _uniform(given: Mapping[str, Any]) -> Domain:
    low, high = _ordered(given)
    return FloatDomain(low=float(low), high=float(high))


def _log_uniform_values(given: Mapping[str, Any]) -> Domain:
    low, high = _ordered(given)
    _positive(low)
    return FloatDomain(low=float(low), high=float(high), log=True)


def _log_uniform(given: Mapping[str, Any]) -> Domain:
    low, high = _powers(given)
    return FloatDomain(low=low, high=high, log=True)


def _q_uniform(given: Mapping[str, Any]) -> Domain:
    low, high = _ordered(given)
    multiple = given.get("q") or 1
    first, last = _multiples(low, high, multiple)
    if all(isinstance(number, int) for number in (low, high, multiple)):
        return IntDomain(low=first * multiple, high=last * multiple, step=multiple)
    # Decimal, because a float product such as 3 * 0.1 is not the multiple that the user wrote.
    unit = Decimal(str(multiple))
    return FloatDomain(low=float(first * unit), high=float(last * unit), step=float(multiple))


def _q_log_uniform_values(given: Mapping[str, Any]) -> Domain:
    low, high = _ordered(given)
    _positive(low)
    return _q_log(low, high, given.get("q") or 1)


def _q_log_uniform(given: Mapping[str, Any]) -> Domain:
    low, high = _powers(given)
    return _q_log(low, high, given.get("q") or 1)


def _q_log(low: float, high: float, multiple: float) -> Domain:
    first, last = _multiples(low, high, multiple)
    # Whole numbers on a log scale have to begin at 1 or above, as the logarithm of 0 is not finite.
    if multiple == 1 and isinstance(multiple, int) and first >= 1:
        return IntDomain(low=first, high=last, log=True)
    return FloatDomain(low=float(low), high=float(high), log=True, multiple=float(multiple))


def _ordered(given: Mapping[str, Any]) -> tuple[Any, Any]:
    low, high = given["min"], given["max"]
    if not low < high:
        raise ConfigError(f"min ({low}) must be < max ({high})")
    return low, high


def _whole(given: Mapping[str, Any], name: str, *, instead: str) -> None:
    for key in _RANGE:
        if not isinstance(given[key], int):
            raise ConfigError(f"{key} ({given[key]}) must be a whole number for {name}; for real numbers use {instead}")


def _positive(low: float) -> None:
    if low <= 0:
        raise ConfigError(f"min ({low}) must be > 0 on a log scale")


def _powers(given: Mapping[str, Any]) -> tuple[float, float]:
    low, high = _ordered(given)
    try:
        # `exp` raises where its result is too large, and gives 0 where it is too small.
        powers = math.exp(low), math.exp(high)
    except OverflowError:
        powers = 0.0, math.inf
    if powers[0] == 0.0 or math.isinf(powers[1]):
        raise ConfigError(
            f"e**min to e**max (min {low}, max {high}) is outside the numbers of a computer; "
            f"for limits that are not exponents use log_uniform_values"
        )
    return powers


def _multiples(low: float, high: float, multiple: float) -> tuple[int, int]:
    first, last = multiples_within(low, high, multiple)
    if first > last:
        raise ConfigError(f"there is no multiple of q ({multiple}) from {low} to {high}")
    return first, last


DISTRIBUTIONS: Mapping[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Domain]]] = {
    "constant": (("value",), _constant),
    "categorical": (("values",), _categorical),
    "int_uniform": (_RANGE, _int_uniform),
    "uniform": (_RANGE, _uniform),
    "q_uniform": (_RANGE, _q_uniform),
    "log_uniform": (_RANGE, _log_uniform),
    "log_uniform_values": (_RANGE, _log_uniform_values),
    "q_log_uniform": (_RANGE, _q_log_uniform),
    "q_log_uniform_values": (_RANGE, _q_log_uniform_values),
}
"""For each distribution name: the required keys, and the function that builds the domain."""
