"""Predicts the cost of a step for `microbatch_search.py`, without a clock, and without running a step that can be cut.

`PlanLibrary.foresee` (`shard/partition/plan_cache.py`) asks for a prediction for each number of pieces that
`microbatch_search.py` tries.
"""

from hydra_tune.errors import BudgetError
from hydra_tune.shard.cost.activation_policy import chosen, keeping, seconds_of
from hydra_tune.shard.cost.compute_estimate import estimated_seconds
from hydra_tune.shard.cost.microbatch_search import StepCostEstimate
from hydra_tune.shard.cost.traffic_model import step_traffic
from hydra_tune.shard.partition.partition_planner import ShardPartition, ShardPartitionPlanner
from hydra_tune.shard.partition.plan import ShardPlan, build_plan
from hydra_tune.shard.partition.plan_request import CapturedStep, ShardPlanRequest
from hydra_tune.task import TrainTask


def foreseen(packer: ShardPartitionPlanner, request: ShardPlanRequest, step: CapturedStep) -> StepCostEstimate:
    """Predict the cost of a step cut into shards, alone on its device.

    Raises:
        BudgetError: the step does not fit.
    """
    budget, task = packer.budget, request.task
    partition = _packed(packer, request, step)
    plan = build_plan(step.captured, step.analysis, partition.pilot, partition.edges)
    room, link = budget.room(partition.buffer_bytes), budget.link()
    kept = plan if task.compile else keeping(plan, partition.pilot, task.activations, room)
    estimates = estimated_seconds(partition.pilot, plan, kept)
    if task.activations == "auto":
        kept = chosen(plan, kept, *estimates, link, room)
    habits = packer.habits(task, kept)
    traffic = step_traffic([shard.cost for shard in kept.shards], budget.budget_bytes, habits)
    seconds = None
    if link is not None:
        units = seconds_of(kept, *estimates)
        computing = habits.num_batches * (sum(units.forward[:-1]) + sum(units.backward))
        copying = link.seconds(traffic.nbytes, traffic.copies)
        # Copies hide behind computation only where blocks are sent ahead.
        seconds = max(computing, copying) if habits.sends_ahead else computing + copying
    return StepCostEstimate(
        num_shards=len(kept.shards),
        peak_bytes=kept.peak_bytes,
        step_bytes=traffic.nbytes,
        seconds=seconds,
        holds_for_all=not step.answers,
    )


def foreseen_whole(packer: ShardPartitionPlanner, task: TrainTask, plan: ShardPlan) -> StepCostEstimate:
    """Predict the cost of a step of a model that runs whole, with activations spilled within its units if the plan spills."""
    (cost,) = (shard.cost for shard in plan.shards)
    habits = packer.habits(task, plan)
    traffic = step_traffic([cost], packer.budget.budget_bytes, habits)
    return StepCostEstimate(
        num_shards=1,
        peak_bytes=cost.peak_bytes,
        step_bytes=traffic.nbytes + 2 * cost.spilled_bytes * habits.num_batches,
        seconds=None,
        holds_for_all=False,  # the user's code may do anything with another batch
    )


def _packed(packer: ShardPartitionPlanner, request: ShardPlanRequest, step: CapturedStep) -> ShardPartition:
    """Cut for the budget's placement.

    For "auto", whose choice would use a clock, cut for the device, or for the host if nothing fits.
    """
    placement = packer.budget.optimizer_placement
    try:
        return packer.packed_for(request, step, updates_on_host=placement == "host")
    except BudgetError:
        if placement != "auto":
            raise
        return packer.packed_for(request, step, updates_on_host=True)
