"""Numbers as a line of small bars: `▁▂▄▆█`.

`screen.py` draws a trial's reports so far with `sparkline`, in each picture of a running sweep. The module knows no trials,
only numbers.
"""

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_MIDDLE = _BARS[3]
_NAN, _UP, _DOWN = "×", "↑", "↓"  # noqa: RUF001 - a cross is what is meant


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the course of some numbers, scaled from the smallest to the largest.

    Args:
        values: the numbers, in order.
        width: most characters; more values are thinned to one for each of `width` equal stretches, the last value included.

    Returns:
        One character for each value: a bar, `×` for NaN, `↑` and `↓` for the infinities. Equal values are half high.
    """  # noqa: RUF002
    if width < 1:
        return ""
    count = len(values)
    if count > width:
        values = [values[(index + 1) * count // width - 1] for index in range(width)]
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_bar(value, low, high) for value in values)


def _bar(value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return _NAN
    if math.isinf(value):
        return _UP if value > 0 else _DOWN
    # Halved, because the distance between two large numbers may overflow a float.
    span = high / 2 - low / 2
    if span <= 0:
        return _MIDDLE
    return _BARS[min(len(_BARS) - 1, int((value / 2 - low / 2) / span * len(_BARS)))]
