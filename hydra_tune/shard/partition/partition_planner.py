"""`ShardPartitionPlanner`: finds the start and end of a step's shards, for a budget and a place of the updates.

`PlanLibrary` (`plan_cache.py`) asks the planner for the cuts of a plan once a step has been captured and analysed, and
`shard/cost/step_estimate.py` for the cuts of a prediction. The planner must not run a step of the model. For
`optimizer_placement="auto"`, `packed` times steps of the optimizer on a stand-in, while `packed` shares the capture gate;
a prediction must not read a clock, and so calls `packed_for`. `benchmarks/halves.py` replaces `beside_copies` here.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from hydra_tune.errors import BudgetError
from hydra_tune.quantities import format_bytes
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.cost.compute_estimate import estimated_seconds
from hydra_tune.shard.cost.microbatch_search import whole_batch_layer
from hydra_tune.shard.cost.optimizer_placement import (
    OptimizerPlacementChoice,
    PlacementCandidate,
    choose_placement,
    update_seconds,
)
from hydra_tune.shard.cost.pilot import ShardCost, ShardPilot
from hydra_tune.shard.cost.traffic_model import StepAccessPattern
from hydra_tune.shard.partition.budget import ShardPlanConstraints
from hydra_tune.shard.partition.gradient_rules import GradientRules
from hydra_tune.shard.partition.partitioner import ShardPartitioner
from hydra_tune.shard.partition.plan import ShardPlan, build_plan
from hydra_tune.shard.partition.plan_request import CapturedStep, ShardPlanRequest, cuts_like
from hydra_tune.shard.partition.shard_size_search import beside_copies, choose_packing
from hydra_tune.task import TrainTask


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPartition:
    """Start and end of a step's shards, and the reasons; `pilot` measures for the chosen place of the updates."""

    pilot: ShardPilot
    partitioner: ShardPartitioner
    edges: list[int]
    buffer_bytes: int
    why: str | None = None
    placement_why: str | None = None


class ShardPartitionPlanner:
    """Cuts steps into shards."""

    def __init__(self, budget: ShardPlanConstraints) -> None:
        self.budget = budget

    def packed(self, request: ShardPlanRequest, step: CapturedStep) -> ShardPartition:
        """Cut the step into shards, for the place where updates run.

        Raises:
            BudgetError: a part that cannot be cut further does not fit.
        """
        like, placement = request.like, self.budget.optimizer_placement
        if like is not None:  # the optimizer state already has its place
            return self.packed_for(request, step, updates_on_host=like.plan.updates_on_host)
        if placement != "auto" or request.mode != "train":
            return self.packed_for(request, step, updates_on_host=placement == "host")
        on_device = None
        with suppress(BudgetError):
            on_device = self.packed_for(request, step, updates_on_host=False)
        # Not suppressed: updates on the host take no room on the device, so nothing fits if this cut does not.
        on_host = self.packed_for(request, step, updates_on_host=True)
        choice = self._placement(request, step, on_device, on_host)
        partition = on_host if choice.place == "host" or on_device is None else on_device
        return replace(partition, placement_why=choice.reason)

    def packed_for(self, request: ShardPlanRequest, step: CapturedStep, *, updates_on_host: bool) -> ShardPartition:
        """Cut with the smallest buffer that suffices, else with the largest buffer that allows a cut.

        A buffer suffices that holds each shard's parameters, or that leaves the step in a single shard.

        Raises:
            BudgetError: as of `packed`.
        """
        pilot = step.pilot.placed(updates_on_host=updates_on_host)
        best: ShardPartition | None = None
        # In ascending order: a larger buffer holds larger shards, but leaves less room for each.
        for buffer_bytes in self.budget.buffers:
            try:
                partition = self._packed_beside(request, step, pilot, buffer_bytes)
            except BudgetError:
                # No larger buffer can allow a cut either.
                if best is None:
                    raise
                break
            best, largest = partition, max(pilot.cost(*span).state_bytes for span in pairwise(partition.edges))
            if len(partition.edges) == 2 or largest <= buffer_bytes:  # noqa: PLR2004 - one shard needs no buffer
                break
        assert best is not None, "there is a buffer to try"
        is_choice = self.budget.buffer_fraction == "auto" and request.like is None
        return _told_of_buffer(best, self.budget.budget_bytes) if is_choice else best

    def _packed_beside(
        self, request: ShardPlanRequest, step: CapturedStep, pilot: ShardPilot, buffer_bytes: int
    ) -> ShardPartition:
        captured, analysis = step.captured, step.analysis
        is_whole = request.mode == "train" and request.task.split_batches == 1
        partitioner = ShardPartitioner(
            pilot,
            analysis,
            len(captured.nodes),
            budget_bytes=self.budget.budget_bytes,
            buffer_bytes=buffer_bytes,
            may_split_batches=is_whole and whole_batch_layer(request.model) is None,
            explains=not request.only_asks,
        )
        packed = partial(ShardPartition, pilot=pilot, partitioner=partitioner, buffer_bytes=buffer_bytes)
        if request.like is not None:
            # The first plan has grouped the trial's state by shard, so further plans must follow the same cuts.
            return packed(edges=partitioner.partition(None, cuts_like(captured, analysis, request.like)))
        edges = partitioner.partition(self.budget.num_shards)
        is_free = self.budget.num_shards == "tuned" or (self.budget.num_shards is None and self.budget.has_link)
        if request.mode != "train" or not is_free:
            return packed(edges=edges)
        plan = build_plan(captured, analysis, pilot, edges)
        measure = self._measure(request.task, pilot, edges[-1], buffer_bytes)
        habits = self.habits(request.task, plan)
        if self.budget.num_shards is None:
            return packed(edges=beside_copies(edges, partitioner.packed, measure, self.budget.budget_bytes, habits))
        choice = choose_packing(edges, partitioner.packed, measure, self.budget.budget_bytes, habits)
        is_at_rest = choice.packing.num_shards == 1 and not choice.packing.step_bytes
        return packed(edges=list(choice.packing.edges), why=None if is_at_rest else choice.reason)

    def _placement(
        self, request: ShardPlanRequest, step: CapturedStep, on_device: ShardPartition | None, on_host: ShardPartition
    ) -> OptimizerPlacementChoice:
        """Choose the place of the updates with the shorter expected step."""
        assert self.budget.speeds is not None, "auto comes with the speeds of the machine"
        speeds = self.budget.speeds()

        def plan_of(packed: ShardPartition) -> ShardPlan:
            return build_plan(step.captured, step.analysis, packed.pilot, packed.edges)

        def cut(packed: ShardPartition) -> PlacementCandidate:
            measure = self._measure(request.task, packed.pilot, packed.edges[-1], packed.buffer_bytes)
            plan = plan_of(packed)
            return PlacementCandidate(
                costs=[measure(first, last) for first, last in pairwise(packed.edges)],
                seconds=estimated_seconds(packed.pilot, plan, plan)[0] if speeds.is_host else None,
            )

        # The measurement steps an optimizer, and optimizers ask `torch.compiler.is_compiling()`, which captures change.
        with GATE.shared():
            rate = update_seconds(request.optimizer, list(request.model.parameters()))
        return choose_placement(
            None if on_device is None else cut(on_device),
            cut(on_host),
            self.budget.budget_bytes,
            self.habits(request.task, plan_of(on_host)),
            speeds,
            rate,
        )

    def habits(self, task: TrainTask, plan: ShardPlan) -> StepAccessPattern:
        """Return the use of shards by a step of a task; `plan` is a possible plan of the step."""
        counted = self.budget.counts_draws or not plan.is_stochastic
        return StepAccessPattern(
            waits=GradientRules.of(task).has_two_phases,
            sends_ahead=self.budget.sends_ahead,
            num_batches=task.accumulate * task.num_pieces,
            may_group=counted and plan.may_be_pipelined,
        )

    def _measure(
        self, task: TrainTask, pilot: ShardPilot, end: int, buffer_bytes: int
    ) -> Callable[[int, int], ShardCost]:
        """Return a function for the cost of a shard, with the activations that the shard is expected to keep."""
        room = self.budget.room(buffer_bytes)
        # "auto" keeps most activations if units and copies can be compared before a run, as on CPU devices behind a link.
        may_keep = task.activations == "auto" and not self.budget.checks_sample and self.budget.link() is not None
        keeps = task.activations in ("keep", "spill") or may_keep

        def measure(first: int, last: int) -> ShardCost:
            # The last shard has no forward unit that could keep anything, and compiled graphs keep nothing.
            kept = pilot.cost_keeping(first, last) if keeps and last < end and task.compile is None else None
            return pilot.cost(first, last) if kept is None or kept.peak_bytes > room.capacity_bytes else kept

        return measure


def _told_of_buffer(packed: ShardPartition, budget_bytes: int) -> ShardPartition:
    """Add a sentence about the buffer, if there is a buffer."""
    if len(packed.edges) == 2:  # noqa: PLR2004 - one shard has none
        return packed
    largest_state_bytes = max(packed.pilot.cost(*span).state_bytes for span in pairwise(packed.edges))
    sentence = (
        f"{format_bytes(packed.buffer_bytes)} ({packed.buffer_bytes / budget_bytes:.0%} of the device) are kept for loading, "
        f"and the largest shard's parameters take {format_bytes(largest_state_bytes)}"
    )
    return replace(packed, why=sentence if packed.why is None else f"{packed.why}; {sentence}")
