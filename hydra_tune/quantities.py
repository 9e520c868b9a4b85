"""Parsing and formatting of bytes and seconds.

The module handles only text and numbers and knows nothing of tensors or devices. `ExecutorSettings`
(`pool/runtime/settings.py`), with the modules that check options for `ExecutorSettings`, and `HydraExecutor`
(`executor.py`) parse sizes and times among the options of a new executor. `TrainTask` (`task.py`) and
`shard/operators/operator_splitting.py` parse `split_operators`, and `cli/sweep_file/sweep_model.py` and
`cli/commands/` check the sizes and times of sweep files and of the command line. Messages and tables format bytes and
seconds here. The module must not import torch or numpy, because `hydra_tune.simulate`, which imports the module, must
not.
"""

import math
import re
from fractions import Fraction

from hydra_tune.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_BYTES = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|m|min|h)")
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_LEAST_TENTH = 0.05  # seconds; less would show as 0.0s
_MINUTE = 60
_HOUR = 3600
_DAY = 86400


def parse_bytes(text: str | int, *, what: str = "memory") -> int:
    """Read a number of bytes such as `"11GiB"`, `"1.5 GB"`, `"4096"` or a plain int.

    A bare number is bytes; `what` names the option in a message.

    Returns:
        Whole bytes, rounded down.

    Raises:
        ConfigError: not a positive size.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise ConfigError(f"{what} must be a size such as '11GiB' or a number of bytes, not {text!r}")
    if isinstance(text, int):
        size = text
    else:
        match = _BYTES.fullmatch(text)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ConfigError(f"{what} must be a size such as '11GiB', '800 MB' or '4096', not {text!r}")
        size = int(Fraction(match[1]) * unit)  # exact: a float would lose bytes
    if size <= 0:
        raise ConfigError(f"{what} must be more than 0 bytes, not {text!r}")
    return size


def format_bytes(size: float) -> str:
    """Format bytes for reading: `512 B`, `1.5 KiB`, `9.1 GiB`."""
    value, sign = abs(float(size)), "-" if size < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:  # noqa: PLR2004 - the step between binary units
            return f"{sign}{value:.0f} {unit}" if unit == "B" else f"{sign}{value:.1f} {unit}"
        value /= 1024
    return f"{sign}{value:.1f} TiB"


def format_bytes_up(size: float) -> str:
    """Round whole bytes up to a text that `parse_bytes` reads back as at least `size`: for "raise X to at least ..."."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        # From ten units on, a tenth of a unit adds at most 1%.
        if size >= 10 * factor:
            # Integer arithmetic: a float could round down, and the advice to the user would not be enough.
            tenths = -(-int(size) * 10 // factor)
            return f"{tenths // 10}.{tenths % 10}{unit}"
    return f"{int(size)}B"


def format_short_seconds(seconds: float) -> str:
    """Format a short duration, such as a step, with three digits: `1.25 s`, `12.3 ms`, `0.045 ms`."""
    # From half a millisecond below a second on, three digits of milliseconds would be `1e+03`.
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"  # noqa: PLR2004


def parse_seconds(value: object, *, what: str) -> float:
    """Read a duration: a number of seconds, or a text such as "30s", "5min" or "1h".

    `what` names the option in a message.

    Returns:
        Seconds.

    Raises:
        ConfigError: another value, or a duration not above 0.
    """
    seconds = 0.0
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())) is not None:
        seconds = float(match[1]) * _SECONDS[match[2]]
    # Any other value has left 0, and NaN compares false.
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{what} must be a time above 0, in seconds or as '30s', '5min' or '1h', not {value!r}")
    return seconds


def format_seconds(seconds: float) -> str:
    """Format seconds for reading: `12.3 ms`, `0.4s`, `12s`, `3m05s`, `2h10m`, `3d4h`."""
    if 0 < seconds < _LEAST_TENTH:
        return format_short_seconds(seconds)
    if seconds < 10:  # noqa: PLR2004 - below this tenths matter
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole}s"
    if whole < _HOUR:
        return f"{whole // _MINUTE}m{whole % _MINUTE:02d}s"
    if whole < _DAY:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE:02d}m"
    return f"{whole // _DAY}d{whole % _DAY // _HOUR}h"
