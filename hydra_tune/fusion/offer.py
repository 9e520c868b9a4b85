"""`Offer`: steps that one group would make next, for whoever can run them in turn with another group's."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hydra_tune.devices.device import Device
from hydra_tune.fusion.member import Wanted
from hydra_tune.fusion.pair_round import Half
from hydra_tune.fusion.planned import PlannedStep, Stack
from hydra_tune.fusion.planned_state import StepState, stack_now
from hydra_tune.fusion.steps import GroupGradients
from hydra_tune.shard.library import Prepared
from hydra_tune.train.state import ModelState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offer:
    """Of one group.

    Attributes:
        half: the steps.
        prepared: the group's plan for them.
        wanted: the batches of one of its members.
        state: the group's.
        inputs: a stacked batch, of which only the geometry counts.
        gradients: the group's rules for them.
        steps_done: of the member that is furthest behind.
    """

    half: Half
    prepared: Prepared
    wanted: Wanted
    state: ModelState
    inputs: Sequence[Tensor]
    gradients: GroupGradients
    steps_done: int

    @property
    def kind(self) -> Hashable:
        """Of the batches."""
        return self.wanted.leaves.signature

    @property
    def stack(self) -> Stack:
        """What is planned.

        Raises:
            UnfusableError: no steps of such groups are planned; with the reason.
        """
        return stack_now(self.prepared, self.state, self.inputs, self.gradients)

    def state_of(self, planned: PlannedStep, side: int, device: Device) -> StepState:
        """The group's state, as arguments of one of two planned steps."""
        return StepState(planned.graphs[side], self.state, self.stack, device, self.gradients)
