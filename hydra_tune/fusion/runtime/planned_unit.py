"""Run a group's planned steps: rounds as in `fusion/group/multi_step_unit.py`, with steps that stay within a device's memory.

`GroupTrial` (`fusion/group/group_trial.py`) asks `PlannedStepCache` before each unit of steps of a group with a
planner, and to make plans for another size; `GroupExecutor` (`fusion/group/group_executor.py`) makes a `PlannedRound` where the
step is planned. The module must not decide on swaps: the planner does.

Note: planned steps are bound to the group's state. `GroupTrial` calls `clear` before a new state is made, when the members'
own code has changed what the plans have baked in, and at the end of the group.

Note: threads. The thread that advances the group makes all calls, except that any thread may call `make_ready`. `steps` and
`make_ready` may plan for seconds, so their callers may hold neither the pool's lock nor the capture gate.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from hydra_tune.devices.device import Device
from hydra_tune.errors import BudgetError, OutOfMemoryError, UnfusableError
from hydra_tune.fusion.group.batched_inputs import StackedBatches
from hydra_tune.fusion.group.group_step import GroupGradients, leave_out_bad
from hydra_tune.fusion.group.member import MemberBatchRequest
from hydra_tune.fusion.group.multi_step_unit import GroupRound, RoundContext
from hydra_tune.fusion.runtime.plan_autotuner import AutotuneResult, StepPlanAutotuner, drop_stale
from hydra_tune.fusion.runtime.planned_executor import DeviceStepRunner
from hydra_tune.fusion.runtime.step_arguments import StepStateBinding, stack_now
from hydra_tune.fusion.runtime.step_planner import OWN_LOSSES, PlannedStep, StepPlanner, check_values, stack_of
from hydra_tune.memory.pressure import not_repeatable
from hydra_tune.quantities import format_bytes
from hydra_tune.shard.capture.batch import BatchLeaves
from hydra_tune.shard.execute.compute import ShardOperands
from hydra_tune.shard.partition.plan_cache import PreparedPlan
from hydra_tune.train.state.model_state import STEP_BEGUN, ModelState


class GroupStepRunner(DeviceStepRunner):
    """Runs a planned step repeatedly on the state of a group."""

    def __init__(self, planned: PlannedStep, state: StepStateBinding) -> None:
        self._state = state
        # Lambdas, because every step replaces the dictionary of arguments.
        super().__init__(planned, [lambda: state.given], lambda _side, number: state.draw(number))

    def forward(self, operands: ShardOperands) -> list[float]:
        """Return the losses of all members; a failed forward leaves nothing on the device."""
        forward, _ = self.planned.part.schedule.segments
        try:
            self._state.begin(operands, self.place)
            return self.segment(forward)  # the losses decide which members take the step
        except BaseException:
            self._state.forget()
            raise

    def backward(self) -> None:
        """Run backward and update, for the active members of the optimizer."""
        _, backward = self.planned.part.schedule.segments
        with self._state.updating():
            self.segment(backward)


class PlannedRound(GroupRound):
    """A round of planned steps."""

    def __init__(
        self,
        rules: RoundContext,
        batches: StackedBatches,
        leaves: BatchLeaves,
        settle: Callable[[list[Any]], None],
        go_on: Callable[[], StackedBatches | None],
        ways: StepPlanAutotuner[GroupStepRunner],
    ) -> None:
        super().__init__(rules, batches, leaves, settle, go_on)
        self._ways, self._planned = ways, ways.current
        self._began_seconds = self._planned.seconds
        self._workspace_bytes = self._planned.planned.workspace_bytes

    @override
    def measured(self, seconds: float) -> None:
        super().measured(seconds)
        if self.steps:
            self._ways.took((self._planned.seconds - self._began_seconds) / self.steps)

    @override
    def _sent(self, tensors: Sequence[Tensor], device: Device) -> list[Tensor]:
        del device  # a planned step sends them itself, and drops them when the plan says so
        return list(tensors)

    def _trained(self, operands: ShardOperands, device: Device) -> list[float]:
        """As of `GroupRound`; a failed forward leaves no trace."""
        self._planned.on(device)
        rules, is_stochastic = self._rules, self._rules.shard.graph.stochastic
        mark = rules.streams.mark() if is_stochastic else None
        with torch.no_grad(), self._buffers_kept():
            try:
                losses = self._planned.forward(operands)
            except BaseException:
                if mark is not None:
                    rules.streams.go_back(mark)
                raise
        rules.state.touched(rules.shard.graph.written_state)
        leave_out_bad(rules.state.optimizer, losses)
        # A failed forward can run again from the mark. The backward overwrites
        # parameters as it goes, so out of memory there cannot be retried.
        with not_repeatable(STEP_BEGUN), torch.no_grad():
            self._planned.backward()
        rules.gradients.next_step()
        return losses


class PlannedStepCache:
    """The planned steps of a group, by plan.

    Args:
        device: any device of the pool, for host memory.
    """

    def __init__(
        self, planner: StepPlanner, device: Device, tell: Callable[[AutotuneResult, MemberBatchRequest], None]
    ) -> None:
        self._planner, self._device, self._tell = planner, device, tell
        self._known: dict[PreparedPlan, StepPlanAutotuner[GroupStepRunner]] = {}

    @property
    def host_bytes(self) -> int:
        """Host memory for swapped tensors, in bytes."""
        return sum(ways.host_bytes for ways in self._known.values())

    def steps(
        self,
        prepared: PreparedPlan,
        state: ModelState,
        inputs: Sequence[Tensor],
        gradients: GroupGradients,
        like: MemberBatchRequest,
        present: Collection[PreparedPlan],
        *,
        is_one_loss: bool,
    ) -> StepPlanAutotuner[GroupStepRunner] | None:
        """Return the planned steps of a plan; None for an evaluation, and where the plain step fits the device.

        Where steps are planned anew, steps of plans that are not `present` in the group any more are dropped.

        Raises:
            OutOfMemoryError: the step does not fit, planned or unplanned.
        """
        if prepared.plan.mode != "train" or self._planner.fits(prepared):
            return None
        if prepared not in self._known:
            drop_stale(self._known, present)
            try:
                if not is_one_loss:  # a member with another loss has joined
                    raise UnfusableError(OWN_LOSSES)  # noqa: TRY301 - handled below like any other reason
                self._known[prepared] = self._made(prepared, state, inputs, gradients, like)
            # The pool answers out of memory by a split into smaller groups.
            except UnfusableError as error:
                raise OutOfMemoryError(
                    f"a step of a group needs {format_bytes(prepared.plan.peak_bytes)} at once and cannot be planned: {error}",
                    enough_bytes=prepared.plan.peak_bytes,
                ) from error
            except BudgetError as error:
                raise OutOfMemoryError(str(error), enough_bytes=error.enough_bytes) from error
        return self._known[prepared]

    def make_ready(
        self,
        prepared: PreparedPlan,
        built: Sequence[tuple[nn.Module, Optimizer]],
        inputs: Sequence[Tensor],
        *,
        is_clipped: bool,
    ) -> None:
        """Plan a step for another number of members, if the step needs a plan; any thread may call.

        Raises:
            UnfusableError, BudgetError: as of `StepPlanner.planned`.
        """
        if prepared.plan.mode == "train" and not self._planner.fits(prepared):
            self._planner.planned(stack_of(prepared, built, inputs, is_clipped=is_clipped))

    def clear(self) -> None:
        """Drop all steps, because the group's state is replaced or gone."""
        drop_stale(self._known, ())

    def _made(
        self,
        prepared: PreparedPlan,
        state: ModelState,
        inputs: Sequence[Tensor],
        gradients: GroupGradients,
        like: MemberBatchRequest,
    ) -> StepPlanAutotuner[GroupStepRunner]:
        check_values(prepared)
        stack = stack_now(prepared, state, inputs, gradients)
        planned = self._planner.planned(stack)
        binding = StepStateBinding(planned.graphs[0], state, stack, self._device, gradients)
        return StepPlanAutotuner(
            planned,
            lambda way: GroupStepRunner(way, binding),
            self._planner.replanned,
            lambda result: self._tell(result, like),
        )
