"""Short texts of numbers and parameters, common to the live view, the lines and the tables.

`screen.py`, `plain_lines.py`, `summary.py` and the `hydra-tune` commands format values here; writers of JSON, such as
`observe/event_log/line_format.py`, pass values through `plain` first, and `observe/event_log/run_state.py` undoes `plain`.
The module must not import torch, so that `hydra-tune list` answers at once.
"""

import math
from collections.abc import Mapping
from typing import Any

from hydra_tune.observe.live.snapshot import TrialView


def number(value: float | None) -> str:
    """Format a metric with five significant digits; `-` without a value."""
    return "-" if value is None else f"{value:.5g}"


def params(values: Mapping[str, Any]) -> str:
    """Format parameters: `lr=0.001 width=64`."""
    return " ".join(f"{name}={param(value)}" for name, value in values.items())


def param(value: object) -> str:
    """Format one parameter: floats with four significant digits, other values as `str` does."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def epochs(done: int | None, planned: int | None) -> str:
    """Format epochs: `3/10`, or `-` if not known."""
    if done is None:
        return "-"
    return str(done) if planned is None else f"{done}/{planned}"


def plain(value: Any) -> Any:
    """Convert a value for JSON: NaN and infinities become the texts `nan`, `inf` and `-inf`."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    # A task that draws for itself may choose among classes, functions or numpy's numbers.
    return value if value is None or isinstance(value, str | int | float) else str(value)


def label(trial: TrialView) -> str:
    """Display name of a trial."""
    return trial.name or f"trial {trial.number}"
