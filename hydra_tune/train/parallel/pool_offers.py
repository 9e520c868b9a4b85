"""Requests of a trial to the pool for idle devices.

Before an optimizer step of several batches, `SingleTrial` (`train/single_trial.py`) asks through `arrange`
(`step_strategy.py`) for devices to help, and for the number of batches under way at once; `JobDeviceLender`
(`pool/devices/idle_devices.py`) answers under the pool's lock. `OptimizerStep` (`train/loop/optimizer_step.py`) follows the
`StepStrategy`. A rehearsal (`train/timing/fake_trial.py`) makes a strategy of its own, and a measurement
(`train/timing/step_timing.py`) has a lender of its own.

Note: order. `arrange` calls `offer` and `ask`, and `SingleTrial` calls `leave` after the batches. Where the host has no
room for the batches drawn ahead, `SingleTrial` calls `leave` and `decline` at once.
"""

from dataclasses import dataclass
from typing import Protocol

from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.train.parallel.cost_model import GROUPED, PIPELINED, DeviceOffer

# Batches drawn for each batch under way: between two rounds devices wait for each other, so rounds should be long.
AHEAD = 4


class DeviceLender(Protocol):
    """Interface of the pool for a trial with steps to split."""

    def offer(self) -> DeviceOffer | None:
        """Return the devices for the next step; None if no device could help."""

    def ask(self, way: str, nbytes: int, most: int) -> int:
        """Grant a number of batches under way at once in the next step, limited by room on the host.

        Args:
            way: intended way of the step.
            nbytes: host memory for each batch beyond the first, in bytes.
            most: largest useful number of batches.
        """

    def leave(self) -> None:
        """Give back the grant, once the step's batches have run, or before `decline`."""

    def decline(self, way: str) -> None:
        """Decline the way, after `leave` and before any unit: the step runs on a single device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStrategy:
    """Arrangement of the batches of an optimizer step.

    Attributes:
        way: one of `cost_model.WAYS`.
        width: largest number of batches under way at once.
        homes: the device of each shard, where the step is pipelined.
        is_dealt: whether a device of a pipelined step stays with its present shard.
        teams: for a data-parallel step, the number of teams that go through each shard together; 0: each batch runs by
            itself.
    """

    way: str
    width: int
    plan: ShardPlan
    homes: tuple[str, ...] = ()
    is_dealt: bool = False
    teams: int = 0

    @property
    def drawn_for_each(self) -> int:
        """Batches drawn for each batch under way."""
        return 1 if self.way == GROUPED or self.teams or self.is_dealt else AHEAD


def lane_bytes(plan: ShardPlan, way: str, *, together: bool = False) -> int:
    """Return the host memory for another batch under way, in bytes: values, gradients, and batches drawn ahead.

    In a pipeline, in teams and in a group, all batches share a single set of gradients of parameters. Batches going
    through each shard `together`, as in a group, are the only batches drawn.
    """
    costs = [shard.cost for shard in plan.shards]
    is_together = way == GROUPED or together
    ahead_bytes = 0 if is_together else drawn_bytes(plan, AHEAD)
    gradients = 0 if way == PIPELINED or is_together else sum(cost.trained_bytes for cost in costs)
    return sum(cost.value_bytes + cost.handed_bytes + cost.kept_bytes for cost in costs) + gradients + ahead_bytes


def drawn_bytes(plan: ShardPlan, for_each: int) -> int:
    """Return the bytes of the batches drawn ahead for a batch under way, which stay on the host."""
    return for_each * max(shard.cost.value_bytes for shard in plan.shards)
