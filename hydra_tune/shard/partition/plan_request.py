"""`ShardPlanRequest`: the question for a plan, and existing knowledge about the step; requests with equal keys share a plan.

`PlanLibrary` (`plan_cache.py`) makes a request in each call of `prepare` and `foresee`, and
`train/loop/microbatch_choice.py` makes a request for the key of an earlier choice. `ShardPartitionPlanner`
(`partition_planner.py`), `trial_step.py` and `shard/cost/step_estimate.py` read requests. The module must not run a unit.

Note: trials of one key share a plan without a comparison with the eager step. So each fact of a trial that decides its
plan, or whether the plan is right, must enter `key_of`, or be checked for each trial (by `PlanLibrary.prepare` for the
optimizer, else by `train/loop/plan_cache.py` and `fusion/group/member.py`).
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hydra_tune.errors import CaptureError
from hydra_tune.shard.analysis.graph_analysis import GraphAnalysis
from hydra_tune.shard.capture import batch as batches
from hydra_tune.shard.capture.fingerprint import architecture_key, optimizer_key
from hydra_tune.shard.capture.guards import BatchValueGuard
from hydra_tune.shard.capture.step_capture import CapturedStepGraph, StateSpec
from hydra_tune.shard.capture.value_replay import Answer
from hydra_tune.shard.cost.pilot import ShardPilot
from hydra_tune.shard.partition.gradient_rules import GradientRules
from hydra_tune.shard.partition.plan import ShardPlan, operators
from hydra_tune.shard.python_state.state_guard import PythonStateGuard
from hydra_tune.shard.verify.step_outcome import StepEffects
from hydra_tune.task import TrainTask


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStateLayout:
    """Existing cut of a trial's state: made by the trial's first plan, followed by further plans.

    `TensorGroups` (`train/state/tensor_groups.py`) makes the layout of a trial, and `fusion/compile/batched_plan_cache.py`
    that of a member of a group.

    Attributes:
        owners: parameter or buffer -> index of the only shard that uses the tensor.
    """

    plan: ShardPlan
    owners: dict[str, int]

    def groups(self, specs: dict[str, StateSpec]) -> dict[str, frozenset[str]]:
        """Each owned name -> all names loaded together with the name."""
        members: dict[tuple[int, bool], set[str]] = {}
        for name, owner in self.owners.items():
            # Parameters and buffers of a shard lie in separate blocks.
            members.setdefault((owner, specs[name].is_parameter), set()).add(name)
        return {name: frozenset(names) for names in members.values() for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """A captured step: the graph, the answers given to its Python, the allowed cuts, and the needs of its parts."""

    captured: CapturedStepGraph
    answers: list[Answer]
    analysis: GraphAnalysis
    pilot: ShardPilot


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlanRequest:
    """A request for the plan of a kind of batch of a trial; arguments as of `PlanLibrary.prepare`."""

    task: TrainTask
    model: nn.Module
    optimizer: torch.optim.Optimizer
    leaves: batches.BatchLeaves
    batch: Any
    mode: str
    like: TrialStateLayout | None
    only_asks: bool = False  # only a prediction is wanted; no user reads a refusal
    foreseen: CapturedStep | None = None  # the measured step, if measured before
    guards: list[BatchValueGuard] = field(default_factory=list)
    effects: StepEffects = field(default_factory=StepEffects)  # of the eager step; filled by the check

    @property
    def guard(self) -> BatchValueGuard | None:
        """The guard of the eager run, if there was an eager run."""
        return self.guards[0] if self.guards else None


def key_of(request: ShardPlanRequest) -> Hashable | None:
    """Return a key; requests with equal keys share a plan. None: the step holds values that no key can compare.

    Raises:
        TaskError: as of `PythonStateGuard`.
    """
    task, like = request.task, request.like
    architecture = architecture_key(task, request.model)
    if architecture is None:
        return None
    places = batches.places_of(request.batch)
    try:
        # The Python values that a guard of the step sees and `architecture_key` does not.
        architecture = (architecture, PythonStateGuard(task, request.model, request.mode, inputs=places).digest)
    except CaptureError:
        return None
    tail = None
    # An evaluation uses no optimizer and no gradients, so trials that differ only in these share its plan.
    if request.mode == "train":
        tail = (optimizer_key(request.optimizer), GradientRules.of(task), task.num_pieces, task.activations)
    layout = None
    if like is not None:
        layout = (like.plan.mode, like.plan.cuts, like.plan.updates_on_host, frozenset(like.owners.items()))
    return (architecture, request.mode, request.leaves.signature, tail, layout)


def cuts_like(captured: CapturedStepGraph, analysis: GraphAnalysis, like: TrialStateLayout) -> list[int]:
    """Cuts for a further capture: at the same nodes if the operators are the same and allow the cuts, else by parameters."""
    if operators(captured) == like.plan.operators and set(like.plan.cuts) <= set(analysis.cuts):
        return list(like.plan.cuts)
    return _owner_cuts(captured, analysis, like.owners)


def _owner_cuts(captured: CapturedStepGraph, analysis: GraphAnalysis, owners: dict[str, int]) -> list[int]:
    """Cuts at the last allowed place before the first use of each further shard's own parameters."""
    positions = {node: position for position, node in enumerate(captured.nodes)}
    reached, cuts = 0, []
    allowed = analysis.cuts
    for node in captured.nodes:
        used = (captured.state.get(argument.name) for argument in node.all_input_nodes)
        owner = max((owners[name] for name in used if name is not None and name in owners), default=0)
        # Only the first use of a further shard's state begins a shard; a later use of earlier state begins none.
        if owner > reached:
            reached = owner
            cuts_before = [cut for cut in allowed if cut <= positions[node]]
            cuts += cuts_before[-1:]
    return sorted(set(cuts))
