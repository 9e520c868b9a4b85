"""Which trials go to which pool: by the compute that each pool still has to do. Pure Python; plays in simulations too.

Longest remaining first, as within a pool: of the trials of the pool that would end last, the one goes to the pool that would
end first whose going has the later of the two end soonest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

_GAIN = 0.05
"""Part of the longest pool's time that a move has to save: estimates are not better."""


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
        """When it would end: its work shared by its devices, or its longest trial, which one device has at a time."""
        return max(sum(self.trials.values()) / self.num_devices, max(self.trials.values(), default=0.0))

    def without(self, key: str) -> "Work":
        """The same, once a trial has left."""
        return Work(num_devices=self.num_devices, trials={k: v for k, v in self.trials.items() if k != key})

    def with_one(self, key: str, seconds: float) -> "Work":
        """The same, once a trial has come."""
        return Work(num_devices=self.num_devices, trials={**self.trials, key: seconds})


def least_busy(pools: Mapping[str, Work], seconds: float, *, near: str | None = None) -> str:
    """The pool in which a new trial would end first.

    Args:
        pools: by name; at least one.
        seconds: that the trial has to compute.
        near: the pool of the node that asks, which has it where others are no better.
    """

    def end(name: str) -> tuple[float, int, bool, str]:
        work = pools[name]
        share = (sum(work.trials.values()) + seconds) / work.num_devices
        return share, len(work.trials), name != near, name

    return min(pools, key=end)


def moves(pools: Mapping[str, Work], move_seconds: float) -> dict[str, str]:
    """Trials that should leave their pools now, and the pools that they should go to.

    Args:
        pools: by name.
        move_seconds: what it costs to move a trial that has begun.
    """
    now = dict(pools)
    found: dict[str, str] = {}
    while len(now) > 1:
        step = _best_move(now, move_seconds, found)
        if step is None:
            break
        key, source, target = step
        now[target] = now[target].with_one(key, now[source].trials[key])
        now[source] = Work(
            num_devices=now[source].num_devices,
            trials=now[source].without(key).trials,
            started=now[source].started,
        )
        found[key] = target
    return found


def _best_move(pools: Mapping[str, Work], move_seconds: float, moved: Mapping[str, str]) -> tuple[str, str, str] | None:
    source = max(pools, key=lambda name: (pools[name].seconds, name))
    target = min(pools, key=lambda name: (sum(pools[name].trials.values()) / pools[name].num_devices, name))
    if source == target:
        return None
    busy, idle = pools[source], pools[target]
    best: tuple[float, bool, float, str] | None = None
    for key, seconds in busy.trials.items():
        cost = move_seconds if key in busy.started else 0.0
        if key in moved or (busy.num_devices >= len(busy.trials) and sum(idle.trials.values()) > 0):
            continue
        later = max(busy.without(key).seconds, idle.with_one(key, seconds + cost).seconds)
        if later < busy.seconds * (1 - _GAIN) and (best is None or (later, key in busy.started, -seconds, key) < best):
            best = (later, key in busy.started, -seconds, key)
    return None if best is None else (best[3], source, target)
