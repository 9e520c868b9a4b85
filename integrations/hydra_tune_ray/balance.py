"""Which trials go to which pool: by the compute that each pool still has to do. Pure Python; plays in simulations too.

Longest remaining first, as within a pool: of the trials of the pool that would end last, the one goes to the pool that would
end first whose going has the later of the two end soonest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_UNEVEN = 0.05
"""Part of its time by which the busiest pool has to be busier than the idlest: estimates are not better."""

_GAIN = 0.2
"""Part of a trial's time that its move has to save."""


@dataclass(slots=True, kw_only=True)
class Work:
    """What a pool has to do.

    Attributes:
        num_devices: its devices.
        trials: seconds that each of its trials still has to compute, by key.
        started: keys of trials that have a state, which has to be moved along.
    """

    num_devices: int
    trials: dict[str, float]
    started: set[str] = field(default_factory=set)

    @property
    def seconds(self) -> float:
        """Work for each of its devices."""
        return sum(self.trials.values()) / self.num_devices


def least_busy(pools: Mapping[str, Work], seconds: float, *, near: str | None = None) -> str:
    """The pool in which a new trial would end first.

    Args:
        pools: by name; at least one.
        seconds: that the trial has to compute.
        near: the pool of the node that asks, which has it where others are no better.
    """

    def end(name: str) -> tuple[float, int, bool, str]:
        work = pools[name]
        return work.seconds + seconds / work.num_devices, len(work.trials), name != near, name

    return min(pools, key=end)


def moves(pools: Mapping[str, Work], move_seconds: float) -> dict[str, str]:
    """Trials that should leave their pools now, and the pools that they should go to.

    Args:
        pools: by name.
        move_seconds: what it costs to move a trial that has begun.
    """
    now = {name: replace(work, trials=dict(work.trials)) for name, work in pools.items()}
    found: dict[str, str] = {}
    while (step := _best_move(now, move_seconds, found)) is not None:
        key, source, target = step
        now[target].trials[key] = now[source].trials.pop(key)
        found[key] = target
    return found


def _best_move(pools: Mapping[str, Work], move_seconds: float, moved: Mapping[str, str]) -> tuple[str, str, str] | None:
    source = max(pools, key=lambda name: (pools[name].seconds, name))
    target = min(pools, key=lambda name: (pools[name].seconds, name))
    busy, idle = pools[source], pools[target]
    full, empty = busy.seconds, idle.seconds
    if len(busy.trials) <= busy.num_devices or full - empty < _UNEVEN * full:
        return None  # each has a device to itself already, or it is as even as can be told
    best: tuple[float, bool, float, str] | None = None
    for key, seconds in busy.trials.items():
        cost = move_seconds if key in busy.started else 0.0
        later = max(full - seconds / busy.num_devices, empty + (seconds + cost) / idle.num_devices)
        rank = (later, key in busy.started, -seconds, key)
        if key not in moved and full - later > max(cost, _GAIN * seconds / busy.num_devices):
            best = rank if best is None else min(best, rank)
    return None if best is None else (best[3], source, target)
