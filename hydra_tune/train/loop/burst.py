"""`BurstRunner`: many steps of a trial's own code as one unit, under a single lease on all of the trial's state.

For a small model, a step takes less time than the work around a unit. So a trial with its own code keeps a device for
about 50 ms: the trial takes a single lease, and the scheduler handles a single unit. A burst ends at a report that waits
for an answer, or between two steps: after its time, once its end is requested, or where a capture waits. A burst also
ends where the lease has ended during a draw, and with the program's part that runs in bursts.
`OwnCodeTrial` (`train/own_code_trial.py`) makes the runner, also for a loop of the user's own
(`train/own_loop/loop_trial.py`), and `WholeModelRunner` (`direct.py`) or `LoopUnitMemory` (`train/own_loop/unit_memory.py`) are
the `BurstSteps`. `Trial.advance` (`train/trial.py`) returns the next burst as a unit, and a worker
(`pool/runtime/worker.py`) runs the burst, and so the trial's program, on the worker's thread. The pool tells bursts from
other units by `BURST`.

Note: loaders. A burst draws batches itself. A slow loader would keep the device from other trials as well, so the
thread that watches loaders (`pool/faults/loader_watchdog.py`) ends the lease on the burst's behalf (`leave_device`,
then `end_lease`), during the draw only. The burst notices when the batch arrives, and trains on the batch once the
trial has a device again.

Note: locks. The burst takes the turn of a GPU's generator before the capture gate, and leaves the gate while a loader's
worker processes draw (`waiting`).
"""

import enum
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from hydra_tune.devices.device import Device
from hydra_tune.memory.block import Block
from hydra_tune.memory.lease import Lease
from hydra_tune.memory.link_meter import bytes_per_second
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.pressure import not_repeatable
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.train.loop.batch_units import PendingUnit, UpcomingUnit
from hydra_tune.train.rng.rng_streams import RandomStreams
from hydra_tune.train.state.model_state import ModelState
from hydra_tune.train.timing.unit_times import UnitTimes

BURST = "burst"
# The work around a burst takes about 0.6 ms with cold caches: 1% of the burst.
BURST_SECONDS = 0.05
# Largest share of a turn with a device that loading the trial's state may take.
_LOAD_SHARE = 0.1


class BurstMark(enum.Enum):
    """Marks of a trial's program between units, beside units and reports."""

    BEGINS = "begins"
    """The program runs in bursts from here on."""
    FOLLOWED = "followed"
    """A followed step is over and may have made lasting state; the burst continues."""
    STEP = "step"
    """A step is over: a burst may end here."""
    NO_DEVICE = "no device"
    """The lease ended during a draw: the burst ends here."""
    LEAVES = "leaves"
    """The program consists of shard units from here on."""


def nobody_asks() -> bool:
    """Return False, where nobody requests an end of the burst."""
    return False


def no_report_passes(item: object) -> bool:
    """Return False: every report ends its burst."""
    del item
    return False


class BurstSteps(Protocol):
    """Runs the steps of a burst.

    Attributes:
        workspace_bytes: largest room beside the state needed by the steps so far.
        passes_gate: whether the burst passes the gate of captures for the steps; else the steps do so themselves.
    """

    workspace_bytes: int
    passes_gate: bool

    def held(self, lease: Lease, device: Device) -> AbstractContextManager[None]:
        """Set the lease and the device under which the steps inside the context run."""


class BurstRunner:
    """The bursts of a trial.

    Args:
        program: the trial's program, running the user's code between two marks.
        direct: runs the trial's steps.

    Attributes:
        is_asked_to_end: returns whether an end of the present burst is requested; asked between steps.
        passes_report: returns whether a value of the program is a report that needs no answer, and notes the report; the
            burst then continues.
        due: last value of the program, if meant for others.
        has_due: whether `due` holds such a value.
        has_device: whether the burst under way holds its lease.
        turn_seconds: recommended seconds of a turn with a device.
    """

    def __init__(self, program: Iterator[Any], direct: BurstSteps, state: ModelState, streams: RandomStreams) -> None:
        self.is_asked_to_end: Callable[[], bool] = nobody_asks
        self.passes_report: Callable[[object], bool] = no_report_passes
        self.due: Any = None
        self.has_due = False
        self.has_device = False
        self.turn_seconds = BURST_SECONDS
        self._program = program
        self._direct = direct
        self._state = state
        self._streams = streams
        self._lease: Lease | None = None
        # The capture gate, while the burst has passed it.
        self._gate: AbstractContextManager[None] | None = None
        self._times = UnitTimes({})

    def unit(self) -> PendingUnit:
        """Return the next burst."""
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
        """Mark the waiting burst as without a device. Callable on any thread while the draw cannot end."""
        self.has_device = False

    def end_lease(self) -> None:
        """Give back the lease of a burst after `leave_device`. Callable on any thread."""
        # A local copy: the burst's own thread may reset the attribute between the test and the call.
        lease = self._lease
        if lease is not None and not self.has_device:
            lease.end()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave the capture gate inside the context, so captures need not wait for a loader's workers."""
        has_passed = self._gate is not None
        self._leave_gate()
        try:
            yield
        finally:
            if has_passed:
                self._pass_gate()

    def _blocks(self) -> list[Block]:
        return self._state.own_code_blocks()

    def _following(self) -> list[UpcomingUnit]:
        return [
            UpcomingUnit(
                kind=BURST,
                shard=0,
                seconds=BURST_SECONDS,
                blocks=self._blocks,
                workspace_bytes=self._direct.workspace_bytes,
            )
        ]

    def _run(self, device: Device, pager: Pager) -> float:
        """Run steps; return the seconds spent waiting for the state."""
        start = time.perf_counter()
        with (
            pager.lease(self._blocks(), self._direct.workspace_bytes) as lease,
            not_repeatable("the user's own code was running"),
        ):
            waited_seconds = time.perf_counter() - start
            for block in self._blocks():
                # Dirty before the first step: the user's code may write anywhere, and the lease may end in the middle
                # of the burst.
                block.dirty = True
            self._lease, self.has_device = lease, True
            try:
                with self._state.shared.pointed(pager):
                    with self._direct.held(lease, device), self._surroundings(device):
                        self._steps(lease, device)
                    # A burst without its lease has no room for new groups; the next burst refreshes them.
                    if self.has_device:
                        self._state.refresh(lease, device)
            finally:
                self._lease, self.has_device = None, False
        self._note_pace(pager)
        return waited_seconds

    def _steps(self, lease: Lease, device: Device) -> None:
        end = time.perf_counter() + BURST_SECONDS
        for item in self._program:
            if item is BurstMark.FOLLOWED:
                self._state.refresh(lease, device)
                lease.have(self._direct.workspace_bytes)
            elif item is BurstMark.STEP:
                # A waiting capture needs all trials out of the gate, so the burst ends early for it.
                if time.perf_counter() >= end or self.is_asked_to_end() or GATE.is_wanted:
                    return
                lease.pause()
            elif item is BurstMark.NO_DEVICE:
                return
            elif not self.passes_report(item):
                self.due, self.has_due = item, True
                return
        self.due, self.has_due = None, True

    def _surroundings(self, device: Device) -> ExitStack:
        """Return the context of the trial's code: its random streams, and no concurrent capture."""
        stack = ExitStack()
        stack.enter_context(self._streams.everything())
        if not device.shares_generator:
            stack.enter_context(self._streams.drawing(device, keep=True))
        # Registered before the gate is passed; `_leave_gate` does nothing if the burst has left the gate in between.
        stack.callback(self._leave_gate)
        if self._direct.passes_gate:
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
        """Set the length of the trial's turn: where memory is short, loading the state must be a small part of the turn."""
        seconds = BURST_SECONDS
        if pager.is_short:
            loading = 2 * self._state.nbytes / bytes_per_second([pager.link])
            seconds = max(seconds, loading / _LOAD_SHARE)
        self.turn_seconds = seconds
