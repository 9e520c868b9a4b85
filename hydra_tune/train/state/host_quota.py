"""`HostMemoryQuota`: a trial's share of host memory that cannot go to disk, where there is a disk.

`Trial` (`train/trial.py`) makes the `HostMemoryQuota` and leaves it when closed. `JobPreparer` (`pool/runtime/preparer.py`)
reserves the share before a trial's first unit, and `TrialPlanCache` (`train/loop/plan_cache.py`) asks for more with each
further plan. `SingleTrial` (`train/single_trial.py`) does so for batches drawn ahead, and `OwnCodeTrial`
(`train/own_code_trial.py`) for values kept for `finish=`. `TrialFigures` (`train/trial_figures.py`) tells the pool the bytes of
a trial to be admitted. The module must not move bytes, and takes no lock: the `HostTier` (`memory/host/host_tier.py`) does.
"""

from collections.abc import Iterable

from hydra_tune.errors import BudgetError
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.memory.trial_context import TrialMemoryContext
from hydra_tune.quantities import format_bytes
from hydra_tune.shard.partition.plan import ShardPlan


def fixed_bytes(plan: ShardPlan) -> int:
    """Return the bytes of a plan's units that cannot go to disk: spilled activations of whole units."""
    return sum(shard.cost.spilled_bytes for shard in plan.shards)


def largest_bytes(plan: ShardPlan) -> int:
    """Return the bytes of a plan's largest possible block: everything of one kind in a shard's unit."""
    costs = [shard.cost for shard in plan.shards]
    return max(max(c.state_bytes, c.optimizer_bytes, c.value_bytes, c.gradient_bytes, c.trained_bytes) for c in costs)


class HostMemoryQuota:
    """A trial's share of the host memory that cannot go to disk; without `host`, there is room for all.

    Args:
        tenant: the trial, for `host`.
    """

    def __init__(self, host: HostTier | None, tenant: TrialMemoryContext | None) -> None:
        self._host = None if tenant is None else host
        self._tenant = tenant

    def check(self, plan: ShardPlan) -> None:
        """Refuse a plan with a block that could never be on the host.

        Raises:
            BudgetError: the block is too large.
        """
        if self._host is not None:
            self._host.check(largest_bytes(plan))

    def take(self) -> None:
        """Reserve the memory with which the trial was admitted, until `leave`."""
        if self._host is not None and self._tenant is not None:
            self._host.reserve(self._tenant)

    def change(self, plans: Iterable[ShardPlan], extra_bytes: int = 0) -> bool:
        """Reserve room for the fixed bytes of the plans and for `extra_bytes` more; return False if there is no room."""
        if self._host is None or self._tenant is None:
            return True
        all_plans = list(plans)
        fixed, largest = max(map(fixed_bytes, all_plans)) + extra_bytes, max(map(largest_bytes, all_plans))
        has_room = self._host.admit(self._tenant, fixed, largest)
        if has_room:
            self._host.reserve(self._tenant)
        return has_room

    def require(self, plans: Iterable[ShardPlan], further: ShardPlan) -> None:
        """Reserve room for a further plan, of another kind of batch.

        Raises:
            BudgetError: there is no room.
        """
        if not self.change([*plans, further]):
            need = fixed_bytes(further) + largest_bytes(further)
            raise BudgetError(
                f"another kind of batch needs {format_bytes(need)} of host memory at once, which is not free beside what other "
                "trials keep there; raise host_memory, or run fewer trials at a time (max_concurrent)"
            )

    def leave(self) -> None:
        """Give back the reserved memory."""
        if self._host is not None and self._tenant is not None:
            self._host.leave(self._tenant)
