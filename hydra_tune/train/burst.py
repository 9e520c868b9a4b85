"""`Burst`: many steps of a trial's own code as one unit, under one lease on all of its state.

A unit of a small model's step would take less time than what is done around a unit. So a trial that runs its own code is given
its device for about 50 ms: it takes one lease, and the scheduler hears of it once. A burst ends between two steps, at a report,
or as soon as somebody asks for its end.

Note: loaders. A burst draws its batches itself. A loader that keeps it waiting keeps the device from others, too; so whoever
looks after loaders (`pool/loaders.py`) ends the lease for it (`leave_device`), while the draw is under way and nothing else is.
The burst finds that out when the batch is there, and goes on with the batch when the trial has a device again.
"""

import enum
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from hydra_tune.devices.device import Device
from hydra_tune.errors import BudgetError
from hydra_tune.memory.block import Block
from hydra_tune.memory.lease import Lease
from hydra_tune.memory.meter import bytes_per_second
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.pressure import not_repeatable
from hydra_tune.shard.gate import GATE
from hydra_tune.train.clock import UnitTimes
from hydra_tune.train.direct import Direct
from hydra_tune.train.state import ModelState
from hydra_tune.train.step import Expected, PendingUnit
from hydra_tune.train.streams import RandomStreams

BURST = "burst"
BURST_SECONDS = 0.05  # what is done around a burst takes about 0.6 ms with the caches cold: 1% of this
_LOAD_SHARE = 0.1  # of the time that a trial has its device at once, which loading its state may take


class Mark(enum.Enum):
    """What a trial's program says between units, beside units and reports."""

    BEGINS = "begins"
    """From here on it runs in bursts."""
    FOLLOWED = "followed"
    """A step was followed, and may have made state that stays; the burst goes on."""
    STEP = "step"
    """A step is over: a burst may end here."""
    NO_DEVICE = "no device"
    """The lease was ended while a batch was drawn: the burst ends here."""
    LEAVES = "leaves"
    """From here on it is made of shard units."""


def nobody_asks() -> bool:
    """Nobody wants the burst to end."""
    return False


class Bursts:
    """The bursts of one trial.

    Args:
        program: the trial's, which runs its own code between two marks.
        direct: runs its steps.
        state: its long-lived tensors.
        streams: its random streams.

    Attributes:
        is_asked_to_end: whether somebody wants the present burst to end; asked after each step.
        due: what the program has said last, if that is for others.
        has_due: whether it has.
        has_device: whether the lease of the burst under way is held.
        turn_seconds: for how long the trial had better have its device at once.
    """

    def __init__(self, program: Iterator[Any], direct: Direct, state: ModelState, streams: RandomStreams) -> None:
        self.is_asked_to_end: Callable[[], bool] = nobody_asks
        self.due: Any = None
        self.has_due = False
        self.has_device = False
        self.turn_seconds = BURST_SECONDS
        self._program = program
        self._direct = direct
        self._state = state
        self._streams = streams
        self._lease: Lease | None = None
        self._gate: AbstractContextManager[None] | None = None  # passed, while it is
        self._times = UnitTimes({})

    def unit(self) -> PendingUnit:
        """The next burst."""
        return PendingUnit(
            kind=BURST,
            shard=0,
            seconds=BURST_SECONDS,
            run=self._run,
            times=self._times,
            key=(BURST, 0),
            blocks=self._blocks,
            workspace_bytes=self._direct.workspace_bytes,
            following=self._following,
        )

    def leave_device(self) -> None:
        """The burst under way, whose draw keeps it waiting, is not to go on. On any thread, while the draw cannot end."""
        self.has_device = False

    def end_lease(self) -> None:
        """Give back what a burst holds that is not to go on. On any thread."""
        lease = self._lease
        if lease is not None and not self.has_device:
            lease.end()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for a loader's workers: captures need not wait for it."""
        has_passed = self._gate is not None
        self._leave_gate()
        try:
            yield
        finally:
            if has_passed:
                self._pass_gate()

    def _blocks(self) -> list[Block]:
        return self._state.own_code_blocks()

    def _following(self) -> list[Expected]:
        return [
            Expected(
                kind=BURST,
                shard=0,
                seconds=BURST_SECONDS,
                blocks=self._blocks,
                workspace_bytes=self._direct.workspace_bytes,
            )
        ]

    def _run(self, device: Device, pager: Pager) -> float:
        """Run steps; returns seconds spent waiting for the state."""
        start = time.perf_counter()
        with (
            pager.lease(self._blocks(), self._direct.workspace_bytes) as lease,
            not_repeatable("the user's own code was running"),
        ):
            waited = time.perf_counter() - start
            for block in self._blocks():
                block.dirty = True  # from now on, for the user's code may write anywhere
            self._lease, self.has_device = lease, True
            try:
                with self._direct.held(lease, device), self._surroundings(device):
                    self._steps(lease, device)
                if self.has_device:
                    self._state.refresh(lease, device)
            except BudgetError as error:
                if type(error) is not BudgetError:
                    raise
                told = str(error).replace("a shard unit needs", "a step of the trial's own code needs")
                raise BudgetError(told, enough_bytes=error.enough_bytes) from error
            finally:
                self._lease, self.has_device = None, False
        self._note_pace(pager)
        return waited

    def _steps(self, lease: Lease, device: Device) -> None:
        """Until the time is up, or there is a reason to end before."""
        end = time.perf_counter() + BURST_SECONDS
        for said in self._program:
            if said is Mark.FOLLOWED:
                self._state.refresh(lease, device)
                lease.have(self._direct.workspace_bytes)
            elif said is Mark.STEP:
                if time.perf_counter() >= end or self.is_asked_to_end() or GATE.is_wanted:
                    return
                lease.pause()
            elif said is Mark.NO_DEVICE:
                return
            else:
                self.due, self.has_due = said, True
                return
        self.due, self.has_due = None, True

    def _surroundings(self, device: Device) -> ExitStack:
        """The trial's random streams, and no capture beside its code."""
        stack = ExitStack()
        stack.enter_context(self._streams.everything())
        if not device.shares_generator:
            stack.enter_context(self._streams.drawing(device, keep=True))
        stack.callback(self._leave_gate)
        self._pass_gate()
        return stack

    def _pass_gate(self) -> None:
        self._gate = GATE.shared()
        self._gate.__enter__()

    def _leave_gate(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.__exit__(None, None, None)

    def _note_pace(self, pager: Pager) -> None:
        """Where not all fits, a trial keeps its device for long enough that loading its state is a small part of the time."""
        seconds = BURST_SECONDS
        if pager.is_short:
            loading = 2 * self._state.nbytes / bytes_per_second([pager.link])
            seconds = max(seconds, loading / _LOAD_SHARE)
        self.turn_seconds = seconds
