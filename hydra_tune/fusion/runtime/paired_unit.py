"""`PairRound`: steps of two groups in turn in a single unit; each backward is merged with the other group's forward.

`PairTrial` (`pair_trial.py`) makes a `PairRound` whenever both groups are about to make steps that can run in turn, of the
halves that `GroupExecutor` (`fusion/group/group_executor.py`) has made for the groups' offers (`pair_offer.py`). A single
thread at a time runs a pair, so no lock is taken for the halves.

Note: ends of a unit. A unit begins with a lone forward (the prologue) and ends with a lone backward (the epilogue), so
no step is open between units: members report, are evaluated, saved, stopped, join and leave there. Inside a unit each
group's members advance to their next batches after their own step, while the other group's step is still open. If a
group cannot continue, the other group finishes the step it has begun, and the unit ends.

Note: length. A unit ends where a round ends (`fusion/group/multi_step_unit.py`), but `SECONDS` do not count before a few
steps of each group, because the half steps at both ends of a unit are merged with nothing.

Note: locks. A segment takes the generator's turn first and the capture gate second, as everywhere. A lone forward can be
repeated after a failure, and a segment with a backward cannot.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from hydra_tune.devices.device import Device
from hydra_tune.fusion.group.group_step import leave_out_bad
from hydra_tune.fusion.group.multi_step_unit import SECONDS, GroupRound
from hydra_tune.fusion.runtime.plan_autotuner import StepPlanAutotuner
from hydra_tune.fusion.runtime.planned_executor import DeviceStepRunner
from hydra_tune.fusion.runtime.step_arguments import StepStateBinding
from hydra_tune.fusion.runtime.step_planner import PlannedStep
from hydra_tune.memory.block import Block
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.pressure import not_repeatable
from hydra_tune.planner.ir.plan_state import ScheduleSegment
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.execute.compute import ShardOperands
from hydra_tune.train.loop.batch_units import PendingUnit, UpcomingUnit
from hydra_tune.train.state.model_state import STEP_BEGUN
from hydra_tune.train.timing.unit_times import UnitTimes

_LEAST_STEPS = 4  # steps of each group in a unit, unless its members stop earlier


class PairRoundHalf(GroupRound):
    """The steps of one of the two groups; arguments are as of `GroupRound`."""

    _losses: Sequence[float] = ()

    @property
    def has_batch(self) -> bool:
        """Whether there is a batch for the next forward."""
        return self._batches is not None

    @property
    def blocks(self) -> list[Block]:
        """Blocks of parameters, buffers and optimizer state."""
        return self._blocks()

    def drawing(self, device: Device) -> AbstractContextManager[object]:
        """Return the context of the next forward's draws; on a GPU the context holds the default generator.

        Enter the context before the capture gate.
        """
        return self._drawing(device)

    @contextmanager
    def computing(self, state: StepStateBinding, device: Device) -> Iterator[None]:
        """Surround the next forward, after `drawing`; a failed forward leaves no trace."""
        rules, graph = self._rules, self._rules.shard.graph
        assert self._batches is not None, "members have batches"
        tensors = self._batches.leaves(len(self._made)).tensors
        operands = ShardOperands(
            state=[rules.state.tensors[name] for name in graph.state],
            constants=[rules.plan.constants[name] for name in graph.constants],
            inputs=[tensors[index] for index in graph.inputs],
            live_in=(),
        )
        del tensors
        # A failed forward must leave the streams as they were: the repeated unit draws the same numbers.
        mark = rules.streams.mark() if graph.stochastic else None
        try:
            state.begin(operands, device.torch_device)
            with self._buffers_kept():
                yield
        except BaseException:
            if mark is not None:
                rules.streams.go_back(mark)
            state.forget()
            raise

    def has_computed(self, losses: Sequence[float]) -> None:
        """Take the losses of the members after the forward has run."""
        self._losses = losses
        self._rules.state.touched(self._rules.shard.graph.written_state)
        leave_out_bad(self._rules.state.optimizer, losses)

    def has_stepped(self, *, goes_on: bool) -> None:
        """Finish the step after its backward and update have run."""
        rules, losses = self._rules, self._losses
        rules.gradients.next_step()
        self._made.append(losses)
        self.steps += 1
        # A member whose loss is not finite fails, so its loop has to run before the next step.
        goes_on &= all(math.isfinite(loss) for index, loss in enumerate(losses) if index not in rules.resting)
        if goes_on and self._batches is not None and len(self._made) < len(self._batches):
            return
        results, self._made = self._made, []
        self._settle(results)
        self._batches = self._go_on() if goes_on else None


class PairStepRunner(DeviceStepRunner):
    """The planned steps of two groups, run repeatedly."""

    def __init__(self, planned: PlannedStep, states: tuple[StepStateBinding, StepStateBinding]) -> None:
        self.states = first, second = states
        argument_sources = [lambda: first.given, lambda: second.given]
        super().__init__(planned, argument_sources, lambda side, number: states[side].draw(number))

    def run(self, backward: int | None, forward: int | None) -> list[float]:
        """Run a backward merged with a forward, or either alone; return the losses of the forward's members."""
        return self.segment(ScheduleSegment(backward, forward))


class PairRound:
    """Steps of both groups in a single unit."""

    def __init__(self, halves: tuple[PairRoundHalf, PairRoundHalf], ways: StepPlanAutotuner[PairStepRunner]) -> None:
        self._halves = halves
        self._ways, self._steps = ways, ways.current
        self._began_seconds = self._steps.seconds
        self._workspace_bytes = self._steps.planned.workspace_bytes

    def measured(self) -> None:
        """Report the measured time of the steps, after the unit has run."""
        # A planned step is a step of each group.
        steps = sum(half.steps for half in self._halves) / 2
        if steps:
            self._ways.took((self._steps.seconds - self._began_seconds) / steps)

    @property
    def shares(self) -> tuple[float, float]:
        """Each group's share of the unit's time, in proportion to the predicted times of the steps."""
        arrays = self._steps.planned.part.schedule.arrays
        first_seconds, second_seconds = (
            max(array.seconds, 1e-9) * half.steps for array, half in zip(arrays, self._halves, strict=True)
        )
        total_seconds = first_seconds + second_seconds
        return (first_seconds / total_seconds, second_seconds / total_seconds) if total_seconds else (0.5, 0.5)

    def unit(self) -> PendingUnit:
        """Return the unit."""
        seconds = max(_LEAST_STEPS * self._steps.planned.part.times.seconds, SECONDS)
        expected = UpcomingUnit(
            kind="backward", shard=0, seconds=seconds, blocks=self._blocks, workspace_bytes=self._workspace_bytes
        )
        return PendingUnit(
            kind="backward",
            shard=0,
            seconds=seconds,
            run=self._run,
            times=UnitTimes({}),
            key=("pair", 0),
            blocks=self._blocks,
            workspace_bytes=self._workspace_bytes,
            following=lambda: [expected],
        )

    def _blocks(self) -> list[Block]:
        return [block for half in self._halves for block in half.blocks]

    def _run(self, device: Device, pager: Pager) -> float:
        start = time.perf_counter()
        with pager.lease(self._blocks(), self._workspace_bytes):
            waited = time.perf_counter() - start
            until = start + waited + SECONDS
            self._steps.on(device)
            backward: int | None = None
            forward = self._first()
            while backward is not None or forward is not None:
                self._segment(backward, forward, device)
                if backward is not None:
                    self._halves[backward].has_stepped(goes_on=self._goes_on(backward, until))
                backward, forward = forward, self._next(forward)
        return waited

    def _segment(self, backward: int | None, forward: int | None, device: Device) -> None:
        states = self._steps.states
        drawing = nullcontext() if forward is None else self._halves[forward].drawing(device)
        # Lock order: the generator's turn before the capture gate, everywhere.
        # Otherwise a waiting capture, a thread inside the gate that waits for the
        # turn, and the turn's holder that waits for the gate would block each other.
        with drawing, GATE.shared(), torch.no_grad(), ExitStack() as around:
            if backward is not None:
                # The merged backward updates parameters in place, so a segment
                # with a backward cannot be repeated; a lone forward can.
                around.enter_context(not_repeatable(STEP_BEGUN))
                around.enter_context(states[backward].updating())
            if forward is not None:
                around.enter_context(self._halves[forward].computing(states[forward], device))
            losses = self._steps.run(backward, forward)
        if forward is not None:
            self._halves[forward].has_computed(losses)

    def _first(self) -> int | None:
        return next((side for side, half in enumerate(self._halves) if half.has_batch), None)

    def _next(self, begun: int | None) -> int | None:
        """Return the group whose forward accompanies the begun step's backward: the other group, if it has a batch."""
        if begun is None:
            return None
        return 1 - begun if self._halves[1 - begun].has_batch else None

    def _goes_on(self, side: int, until: float) -> bool:
        if not self._halves[1 - side].has_batch:
            return False
        # The step that ends here is not counted yet.
        return time.perf_counter() < until or self._halves[side].steps + 1 < _LEAST_STEPS
