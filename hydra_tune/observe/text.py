"""Numbers and parameters as short text, the same in the live view, the lines and the tables."""

import math
from collections.abc import Mapping
from typing import Any

from hydra_tune.observe.snapshot import TrialView


def number(value: float | None) -> str:
    """A metric with five digits that count, `-` if there is none."""
    return "-" if value is None else f"{value:.5g}"


def params(values: Mapping[str, Any]) -> str:
    """`lr=0.001 width=64`."""
    return " ".join(f"{name}={param(value)}" for name, value in values.items())


def param(value: object) -> str:
    """One parameter: real numbers with four digits that count, everything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def epochs(done: int | None, planned: int | None) -> str:
    """`3/10`, or `-` if not known."""
    if done is None:
        return "-"
    return str(done) if planned is None else f"{done}/{planned}"


def plain(value: Any) -> Any:
    """A value for JSON, which lacks NaN and infinity: they become the texts `nan`, `inf` and `-inf`."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    return value


def label(trial: TrialView) -> str:
    """What a trial is called."""
    return trial.name or f"trial {trial.number}"
