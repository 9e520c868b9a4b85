"""What a trial asks of the pool when devices have nothing to do."""

from dataclasses import dataclass
from typing import Protocol

from hydra_tune.shard.plan import Plan
from hydra_tune.train.ways import GROUPED, PIPELINED, Offer

AHEAD = 4  # batches drawn for each that may be under way: between two rounds devices wait for each other


class Helpers(Protocol):
    """What a trial asks of the pool it is in."""

    def offer(self) -> Offer | None:
        """The devices that could work on the step that begins; None if no device could help."""

    def ask(self, way: str, nbytes: int, most: int) -> int:
        """How many batches may be under way at once in the step that begins, as far as the host has room for them.

        Args:
            way: how the trial would run it.
            nbytes: host memory that each batch beyond the first needs.
            most: how many it could make use of.
        """

    def leave(self) -> None:
        """The step's batches have run; what was asked for is not needed any more."""

    def decline(self, way: str) -> None:
        """After `leave`, before anything has run: the step runs on one device, and not this way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How the batches of one optimizer step run.

    Attributes:
        way: one of `ways.WAYS`.
        width: how many batches may be under way at once; 1: one after the other.
        plan: whose batches were thought of.
        homes: where they are pipelined, the device of each shard.
        is_dealt: where they are pipelined, whether a device goes on with the shard it has at hand.
        teams: where they are data-parallel, how many runs of batches go through each shard together; 0: each is by itself.
    """

    way: str
    width: int
    plan: Plan
    homes: tuple[str, ...] = ()
    is_dealt: bool = False
    teams: int = 0

    @property
    def drawn_for_each(self) -> int:
        """Batches drawn for each that may be under way."""
        return 1 if self.way == GROUPED or self.teams or self.is_dealt else AHEAD


def lane_bytes(plan: Plan, way: str, *, together: bool = False) -> int:
    """Host memory that one more batch under way may need: what is kept between its units, and batches drawn ahead.

    In a pipeline, in teams and in a group, all batches together have one set of gradients of parameters. Those that go through
    each shard `together`, as in a group, are all that is drawn.
    """
    costs = [shard.cost for shard in plan.shards]
    is_together = way == GROUPED or together
    drawn = 0 if is_together else drawn_bytes(plan, AHEAD)
    gradients = 0 if way == PIPELINED or is_together else sum(cost.trained_bytes for cost in costs)
    return sum(cost.value_bytes + cost.handed_bytes + cost.kept_bytes for cost in costs) + gradients + drawn


def drawn_bytes(plan: Plan, for_each: int) -> int:
    """As much of it as is for batches drawn ahead, which stay on the host."""
    return for_each * max(shard.cost.value_bytes for shard in plan.shards)
