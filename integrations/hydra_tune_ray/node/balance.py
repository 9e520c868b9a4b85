"""Load balancing: assigns trials to pools by the compute that each pool still has to do.

Pure Python: `benchmarks/ray_scale.py` simulates with the same code. The rule is longest remaining time first, as within
a pool: a trial moves from the pool that would end last to the pool that would end first. The chosen trial makes the later
of the two pools end soonest. `PoolDirectory` (`pool_directory.py`) chooses a pool when a trial begins or a node drains, and
asks for moves at the reports of pools. The module must not call Ray or read a clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_UNEVEN = 0.05
"""Share of time by which the busiest pool must exceed the idlest: estimates are no more accurate."""

_GAIN = 0.2
"""Share of a trial's time that a move must save."""


@dataclass(slots=True, kw_only=True)
class PoolBacklog:
    """Remaining work of a pool.

    Attributes:
        num_devices: number of devices.
        trials: remaining seconds of compute of each trial, by key.
        started: keys of the trials with state that must move along.
    """

    num_devices: int
    trials: dict[str, float]
    started: set[str] = field(default_factory=set)

    @property
    def seconds(self) -> float:
        """Seconds of work for each device."""
        return sum(self.trials.values()) / self.num_devices


def least_busy(pools: Mapping[str, PoolBacklog], seconds: float, *, near: str | None = None) -> str:
    """Choose the pool in which a new trial would end first; at a tie the pool with fewer trials, then the pool `near`."""

    def end(name: str) -> tuple[float, int, bool, str]:
        work = pools[name]
        return work.seconds + seconds / work.num_devices, len(work.trials), name != near, name

    return min(pools, key=end)


def moves(pools: Mapping[str, PoolBacklog], move_seconds: float) -> dict[str, str]:
    """Choose the trials that should move now, with their target pools; a begun trial's move costs `move_seconds`."""
    # Copies, because each move changes the balance for the next.
    backlogs = {name: replace(work, trials=dict(work.trials)) for name, work in pools.items()}
    targets: dict[str, str] = {}
    while (step := _best_move(backlogs, move_seconds, targets)) is not None:
        key, source, target = step
        backlogs[target].trials[key] = backlogs[source].trials.pop(key)
        targets[key] = target
    return targets


def _best_move(
    pools: Mapping[str, PoolBacklog], move_seconds: float, moved: Mapping[str, str]
) -> tuple[str, str, str] | None:
    source = max(pools, key=lambda name: (pools[name].seconds, name))
    target = min(pools, key=lambda name: (pools[name].seconds, name))
    busy, idle = pools[source], pools[target]
    full, empty = busy.seconds, idle.seconds
    if len(busy.trials) <= busy.num_devices or full - empty < _UNEVEN * full:
        return None  # each trial has its own device already, or the pools are as even as estimates can tell
    best: tuple[float, bool, float, str] | None = None
    for key, seconds in busy.trials.items():
        cost = move_seconds if key in busy.started else 0.0
        later = max(full - seconds / busy.num_devices, empty + (seconds + cost) / idle.num_devices)
        # At a tie a trial without state goes, which costs nothing to move, then the longest.
        rank = (later, key in busy.started, -seconds, key)
        # Each trial moves at most once a round, or two equal pools could pass a trial to and fro forever.
        if key not in moved and full - later > max(cost, _GAIN * seconds / busy.num_devices):
            best = rank if best is None else min(best, rank)
    return None if best is None else (best[3], source, target)
