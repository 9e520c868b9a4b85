"""`Policy`: which job an idle device works on next.

A policy is asked once for every unit, at the moment the device is free and not before: bytes may have been sent ahead,
but no choice has. It sees only what `JobView` shows and holds no record of the schedule, so that the same object can
drive a real pool and a simulated one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hydra_tune.schedule.units import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """An eligible job: it has a ready unit, none of its units runs, and it is neither stopped nor waiting.

    Args:
        job: its name.
        order: its place in the order of submission; unique, the earliest is the smallest.
        unit: what would run.
        remaining_seconds: predicted time of all its units, `unit` included.
        step_seconds: predicted time of one training step.
        shard_device: the device that holds the parameters of `unit.shard`; None if none does.
    """

    job: str
    order: int
    unit: Unit
    remaining_seconds: float
    step_seconds: float
    shard_device: str | None


@runtime_checkable
class Policy(Protocol):
    """Chooses among eligible jobs. Anything with this one method will do.

    Example, shortest unit first:

        class ShortestUnitFirst:
            def choose(self, device, candidates):
                return min(candidates, key=lambda view: (view.unit.seconds, view.order))

    Break ties by `order`, so that the same events give the same schedule.
    """

    def choose(self, device: str, candidates: Sequence[JobView]) -> JobView:
        """Choose what `device` does next.

        The choice is a job, not yet a place: where the chosen job's shard is on another device that is idle too, the
        unit goes there, and this device is asked about again.

        Args:
            device: an idle device.
            candidates: every eligible job, at least one, in no particular order.

        Returns:
            One of `candidates`.
        """
        ...
