"""`PairingOffer`: the next steps of a group, offered to a pair that can run them in turn with another group's steps.

`GroupTrial` (`fusion/group/group_trial.py`) of a pair makes an offer before each unit of training steps that can run in turn,
and `PairTrial` (`pair_trial.py`) runs or declines the offer, on the thread that advances the pair. An offer is bound to the
group's present state, and ends when the group advances.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hydra_tune.devices.device import Device
from hydra_tune.fusion.group.group_step import GroupGradients
from hydra_tune.fusion.group.member import MemberBatchRequest
from hydra_tune.fusion.runtime.paired_unit import PairRoundHalf
from hydra_tune.fusion.runtime.step_arguments import StepStateBinding, stack_now
from hydra_tune.fusion.runtime.step_planner import PlannedStep, StackedStepSpec
from hydra_tune.shard.partition.plan_cache import PreparedPlan
from hydra_tune.train.state.model_state import ModelState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairingOffer:
    """The offered steps of a group.

    Attributes:
        wanted: a member's batches.
        inputs: a stacked batch; only the geometry counts.
        steps_done: steps of the member furthest behind.
    """

    half: PairRoundHalf
    prepared: PreparedPlan
    wanted: MemberBatchRequest
    state: ModelState
    inputs: Sequence[Tensor]
    gradients: GroupGradients
    steps_done: int

    @property
    def kind(self) -> Hashable:
        """The kind of the batches."""
        return self.wanted.leaves.signature

    @property
    def stack(self) -> StackedStepSpec:
        """The stack to plan for.

        Raises:
            UnfusableError: no steps are planned for such groups; the message gives the reason.
        """
        return stack_now(self.prepared, self.state, self.inputs, self.gradients)

    def state_of(self, planned: PlannedStep, side: int, device: Device) -> StepStateBinding:
        """Return the group's state as arguments of one side of a planned step."""
        return StepStateBinding(planned.graphs[side], self.state, self.stack, device, self.gradients)
