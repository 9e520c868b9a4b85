"""`PairRound`: steps of two groups in turn, as one unit: the backward of one merged with the forward of the other.

Note: the ends of a pair. A unit begins with a first forward (the prologue) and ends with a last backward (the epilogue), so
that between two units nothing of a step is left: members report, are evaluated, saved and stopped there, and come and go.
Within it each group's members go on to their next batches when their own step is made, while the other group's is still
open. Where one of the two goes no further, the other makes the step that it has begun, and the unit is over.

Note: how long. It ends where a round does (`rounds.py`), but not before some steps of each: of so many steps of two groups,
one half each is merged with nothing.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor

from hydra_tune.devices.device import Device
from hydra_tune.fusion.measured import Ways
from hydra_tune.fusion.planned import PlannedStep
from hydra_tune.fusion.planned_device import StepsOnDevice
from hydra_tune.fusion.planned_state import StepState
from hydra_tune.fusion.planner.schedule import Segment
from hydra_tune.fusion.rounds import SECONDS, Round
from hydra_tune.fusion.steps import leave_out_bad
from hydra_tune.memory.block import Block
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.pressure import not_repeatable
from hydra_tune.shard.compute import Operands
from hydra_tune.shard.gate import GATE
from hydra_tune.train.clock import UnitTimes
from hydra_tune.train.state import STEP_BEGUN
from hydra_tune.train.step import Expected, PendingUnit

_LEAST_STEPS = 4  # of each group in a unit, unless its members go no further


class Half(Round):
    """The steps of one of the two groups; arguments are as of `Round`."""

    _losses: Sequence[float] = ()

    @property
    def has_batch(self) -> bool:
        """Whether there is a batch that its next forward is for."""
        return self._batches is not None

    @property
    def blocks(self) -> list[Block]:
        """Of its parameters, buffers and optimizer state."""
        return self._blocks()

    def drawing(self, device: Device) -> AbstractContextManager[object]:
        """Around its next forward, and around the capture gate: on a GPU it is the group's turn with the generator."""
        return self._drawing(device)

    @contextmanager
    def computing(self, state: StepState, device: Device) -> Iterator[None]:
        """Around its next forward, while it draws; what has failed there leaves no trace.

        Args:
            state: the group's, as the step's arguments.
            device: which computes.
        """
        rules, graph = self._rules, self._rules.shard.graph
        assert self._batches is not None, "members have batches"
        tensors = self._batches.leaves(len(self._made)).tensors
        operands = Operands(
            state=[rules.state.tensors[name] for name in graph.state],
            constants=[rules.plan.constants[name] for name in graph.constants],
            inputs=[tensors[index] for index in graph.inputs],
            live_in=(),
        )
        del tensors
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
        """Its forward has run, and gave these losses of its members."""
        self._losses = losses
        self._rules.state.touched(self._rules.shard.graph.written_state)
        leave_out_bad(self._rules.state.optimizer, losses)

    def has_stepped(self, *, goes_on: bool) -> None:
        """Its backward has run, and its members are updated.

        Args:
            goes_on: whether they may make a further step.
        """
        rules, losses = self._rules, self._losses
        rules.gradients.next_step()
        self._made.append(losses)
        self.steps += 1
        goes_on &= all(math.isfinite(loss) for index, loss in enumerate(losses) if index not in rules.resting)
        if goes_on and self._batches is not None and len(self._made) < len(self._batches):
            return
        made, self._made = self._made, []
        self._settle(made)
        self._batches = self._go_on() if goes_on else None


class PairedSteps:
    """The planned steps of two groups, again and again.

    Args:
        planned: the steps.
        states: of both groups, as the steps' arguments.
    """

    def __init__(self, planned: PlannedStep, states: tuple[StepState, StepState]) -> None:
        self.planned = planned
        self.states = first, second = states
        given = [lambda: first.given, lambda: second.given]
        self._steps = StepsOnDevice(planned, given, lambda side, number: states[side].draw(number))

    def close(self) -> None:
        """End the copying."""
        self._steps.close()

    @property
    def seconds(self) -> float:
        """That their steps have taken so far."""
        return self._steps.seconds

    def on(self, device: Device) -> None:
        """As of `StepsOnDevice`."""
        self._steps.on(device)

    def run(self, backward: int | None, forward: int | None) -> list[float]:
        """The backward of one and the forward of the other, or one of these alone; the losses of the latter's members."""
        found: list[Tensor] = []
        self._steps.run.segment(Segment(backward, forward), lambda _side, _number, losses: found.append(losses))
        losses: list[float] = found[0].tolist() if found else []
        return losses


class PairRound:
    """Steps of both groups in one unit.

    Args:
        halves: theirs.
        ways: run them.
    """

    def __init__(self, halves: tuple[Half, Half], ways: Ways[PairedSteps]) -> None:
        self._halves = halves
        self._ways, self._steps = ways, ways.current
        self._began_seconds = self._steps.seconds
        self._workspace_bytes = self._steps.planned.workspace_bytes

    def measured(self) -> None:
        """It has run."""
        steps = sum(half.steps for half in self._halves) / 2
        if steps:
            self._ways.took((self._steps.seconds - self._began_seconds) / steps)

    @property
    def shares(self) -> tuple[float, float]:
        """What of the unit's time was either group's, by what their steps are predicted to take."""
        arrays = self._steps.planned.part.schedule.arrays
        first, second = (max(array.seconds, 1e-9) * one.steps for array, one in zip(arrays, self._halves, strict=True))
        whole = first + second
        return (first / whole, second / whole) if whole else (0.5, 0.5)

    def unit(self) -> PendingUnit:
        """All of it."""
        seconds = max(_LEAST_STEPS * self._steps.planned.part.times.seconds, SECONDS)
        expected = Expected(
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
        with drawing, GATE.shared(), torch.no_grad(), ExitStack() as around:
            if backward is not None:
                around.enter_context(not_repeatable(STEP_BEGUN))
                around.enter_context(states[backward].updating())
            if forward is not None:
                around.enter_context(self._halves[forward].computing(states[forward], device))
            losses = self._steps.run(backward, forward)
        if forward is not None:
            self._halves[forward].has_computed(losses)

    def _first(self) -> int | None:
        """Whose forward is the prologue."""
        return next((side for side, half in enumerate(self._halves) if half.has_batch), None)

    def _next(self, begun: int | None) -> int | None:
        """Whose forward goes with the backward of a step that has begun: the other's, if it has a batch."""
        if begun is None:
            return None
        return 1 - begun if self._halves[1 - begun].has_batch else None

    def _goes_on(self, side: int, until: float) -> bool:
        """Whether a group whose step is made may go on to another."""
        if not self._halves[1 - side].has_batch:
            return False
        return time.perf_counter() < until or self._halves[side].steps + 1 < _LEAST_STEPS
