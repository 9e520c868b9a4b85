"""When batches of one optimizer step should run side by side on several devices."""

from typing import Protocol

from hydra_tune.shard.plan import Plan
from hydra_tune.train.clock import UnitTimes

_COPIED_BYTES_PER_SECOND = 2e9  # a careful guess: what copies cost is only to be small beside what is saved
AHEAD = 4  # batches drawn for each that may be under way: between two rounds devices wait for each other


class Helpers(Protocol):
    """What a trial asks of the pool it is in."""

    def ask(self, nbytes: int) -> int:
        """How many batches may be under way at once in the step that begins; 1 if no device could help.

        Args:
            nbytes: host memory that each batch beyond the first needs.
        """

    def leave(self) -> None:
        """The step's batches have run; what was asked for is not needed any more."""


def lane_bytes(plan: Plan) -> int:
    """Host memory that one more batch under way may need: what is kept between its units, and batches drawn ahead."""
    costs = [shard.cost for shard in plan.shards]
    drawn = max(cost.value_bytes for cost in costs)
    between = sum(cost.value_bytes + cost.gradient_bytes + cost.trained_bytes + cost.kept_bytes for cost in costs)
    return between + AHEAD * drawn


def is_worth_it(plan: Plan, times: UnitTimes, count: int) -> bool:
    """Whether two devices would save more, of a step of so many batches, than their copies cost.

    Parameters go to the host and to the other device in each step, and each batch's gradients to where they are summed.
    """
    batch = sum(times.of((kind, index)) for kind in ("forward", "backward") for index in range(len(plan.shards)))
    parameters = sum(shard.cost.state_bytes for shard in plan.shards)
    gradients = sum(shard.cost.trained_bytes for shard in plan.shards)
    copied = 2 * parameters + 2 * gradients * (count // 2)
    return batch * (count // 2) > copied / _COPIED_BYTES_PER_SECOND
