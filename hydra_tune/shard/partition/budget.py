"""`ShardPlanConstraints`: the constraints of plans.

`budget_of` (`pool/runtime/cut_budget.py`) makes the constraints when a pool opens. `ShardPartitionPlanner`
(`partition_planner.py`) follows the constraints in each cut, `PlanLibrary` (`plan_cache.py`) when a plan is made and checked,
and `shard/execute/eager_plan.py` asks them whether the user's own code fits. The constraints stay as they are for the pool's
life: plans of equal keys are shared under them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hydra_tune.devices.hardware.link import LinkCostModel
from hydra_tune.shard.cost.activation_policy import ActivationBudget
from hydra_tune.shard.cost.optimizer_placement import MachineSpeeds, OptimizerPlacement
from hydra_tune.shard.partition.partitioner import NumShards

_BUFFERS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4)  # fractions of a device's memory, for "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlanConstraints:
    """Constraints of plans: memory of the devices and the host, and options of the pool.

    Args:
        budget_bytes: memory of the smallest device.
        buffer_fraction: part of the memory kept free beside a running shard; nothing is kept free if the whole model
            fits. "auto": the smallest buffer tried that holds the parameters of any shard, so that all next blocks can be
            sent ahead.
        alignment: bytes to which the devices align allocations.
        num_shards: see `ShardPartitioner.partition`.
        optimizer_placement: place of optimizer state and updates; "auto": see `shard/cost/optimizer_placement.py`.
        speeds: speeds of the machine, for "auto" and for measured choices of activations.
        trials: trials in flight for each device.
        host_bytes: host memory for each trial in flight; None: unlimited.
        has_link: whether copies take time of their own, beside computation: to a GPU, or over a simulated link.
        link: speed of the devices' copies, if comparable with seconds measured on the host.
        checks_sample: whether all plans are checked by numbers (`shard/verify/value_numbering.py`) first, and then may be
            checked with a few samples of the batch (`shard/verify/sample_check.py`), as in a pool without CPU devices.
            Otherwise plans of long steps alone are checked by numbers.
        counts_draws: whether a batch draws the same number of random numbers on each device, so that later batches can
            draw first.
        uses_foreach: whether some device's updates take the temporaries of `foreach` operators by default (see
            `shard/cost/update_pilot.py`).
        host_threads: intra-op threads for checking plans; only the time of a check depends on the number.
    """

    budget_bytes: int
    buffer_fraction: float | Literal["auto"]
    alignment: int
    num_shards: NumShards = None
    optimizer_placement: OptimizerPlacement | Literal["auto"] = "device"
    speeds: Callable[[], MachineSpeeds] | None = None
    trials: int = 1
    host_bytes: int | None = None
    has_link: bool = False
    link: Callable[[], LinkCostModel | None] = lambda: None
    checks_sample: bool = False
    counts_draws: bool = True
    uses_foreach: bool = False
    host_threads: int = 1

    @property
    def buffers(self) -> tuple[int, ...]:
        """Candidate sizes in bytes of the buffer beside a running shard, in ascending order."""
        fractions = _BUFFERS if self.buffer_fraction == "auto" else (self.buffer_fraction,)
        return tuple(int(self.budget_bytes * fraction) for fraction in fractions)

    @property
    def sends_ahead(self) -> bool:
        """Whether the next blocks are sent to a device during computation."""
        return self.buffer_fraction != 0

    def room(self, buffer_bytes: int) -> ActivationBudget:
        """Room for keeping activations, beside a buffer."""
        # Capacity is the limit of a single unit; kept activations may wait in the buffer as well, hence the whole
        # budget.
        return ActivationBudget(
            capacity_bytes=self.budget_bytes - buffer_bytes,
            budget_bytes=self.budget_bytes,
            trials=self.trials,
            host_bytes=self.host_bytes,
        )
