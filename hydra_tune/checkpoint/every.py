"""How often trials are saved, as it is written: in programs, sweep files and on the command line."""

import re
from dataclasses import dataclass

from hydra_tune.errors import ConfigError

_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_EVERY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|m|min|h)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """How often a trial is saved beside its reports; one of the two, or neither.

    Attributes:
        steps: optimizer steps from one to the next.
        seconds: the same, in seconds.
    """

    steps: int | None = None
    seconds: float | None = None


def parse_every(text: object) -> Every:
    """Read `checkpoint_every`: None, a number of optimizer steps, or a time such as "30s", "5min" or "1h".

    Raises:
        ConfigError: none of these.
    """
    if text is None:
        return Every()
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return Every(steps=text)
    found = _EVERY.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None or float(found[1]) <= 0:
        raise ConfigError(
            f"checkpoint_every must be a number of optimizer steps, or a time such as '30s', '5min' or '1h', not {text!r}"
        )
    return Every(seconds=float(found[1]) * _SECONDS[found[2]])
