"""The gate between captures and computation.

`torch.export` changes the whole process while running in a thread. `torch.compiler.is_compiling()` is true everywhere,
so eager code that asks (optimizers, many models) takes other branches. And oneDNN is switched off, so convolutions in
other threads run other kernels, which round differently. Captures therefore run alone: all computation for a trial, the
trial's own code or a shard unit, passes the gate shared, and a capture passes the gate exclusively.

`captured_graph` (`shard/partition/trial_step.py`) takes the gate exclusively for each capture, and so do `PlanLibrary`
(`shard/partition/plan_cache.py`) for the measured run of a whole step and the first run of a compiled plan, the traces of
`fusion/` and `planner/`, and `packed` (`train/data/worker_parts.py`) for moving data to shared memory. The units of a batch
(`train/loop/batch_units.py`, `train/loop/training_batch.py`), fused units (`fusion/group/multi_step_unit.py`), a trial's own
code between units (`train/trial.py`) and `train_plain` (`train/loop/reference_loop.py`) take the gate shared. `HydraExecutor`
(`executor.py`), `Job` (`pool/job.py`) and whoever waits inside the gate do so in `left`. `own_build` (`train/building.py`)
keeps factories of models apart (`building`), and `own_default_dtype` (`train/default_dtype.py`) keeps steps away from a
change of the default dtype (`alone_inside`). `MemberTrial` (`fusion/group/member.py`) builds and draws a first batch in
`alone`, and undoes a build's changes in `exclusive`. `undisturbed` (`shard/verify/process_state.py`) keeps others out of a
plan check where the step reaches state that other trials share. Bursts (`train/loop/burst.py`) and user-written loops
(`train/own_loop/loop_trial.py`) end a turn early if `is_wanted`.

Note: a thread inside the gate waits for nothing that a capture may hold, such as the lock of a `PlanLibrary`, except
inside `left`; otherwise the capture and the thread would wait for each other for ever.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

_MOST_SECONDS_ALONE = 0.25  # a first batch that takes longer is drawn beside others


class _ModesOfThread(threading.local, torch._ops._ModeStackStateForPreDispatch):  # noqa: SLF001 - no public name
    """The modes of a capture, for each thread; torch has them once for all threads.

    To print a tensor, torch switches off all modes for a moment. On a thread that passes no gate, such as a user's, a
    printed tensor would take the modes of a capture on another thread away, and the capture would fail.
    """


def _part_modes_of_threads() -> None:
    modes = torch._ops.mode_stack_state_for_pre_dispatch()  # type: ignore[no-untyped-call]  # noqa: SLF001
    # Not while somebody else's capture has modes.
    if not isinstance(modes, _ModesOfThread) and not modes.count():
        torch._ops._mode_stack_state_for_pre_dispatch = _ModesOfThread()  # type: ignore[no-untyped-call]  # noqa: SLF001


@dataclass(eq=False)
class _BuildTurn:
    """A thread's turn to build; from `until` on, by `time.monotonic`, the next thread may take the turn away."""

    most_seconds: float
    until: float = math.inf


class CaptureGate:
    """A lock shared by many threads or held by a single thread; a thread that waits for `exclusive` or `alone` goes first.

    A thread inside `shared` may enter `shared` or `alone`, which add nothing to the present `shared`, but not `exclusive`. A
    thread inside `alone` may enter `exclusive`, too, and is outside the gate while the thread waits there. A thread inside
    `exclusive` must not enter the gate again.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._sharing = 0
        self._is_exclusive = False
        self._waiting = 0
        self._forgotten: set[int] = set()  # threads inside `shared` not expected to leave
        self._lone_thread: int | None = None  # the thread inside `shared` that keeps others out
        self._lone_until = 0.0
        self._turns: deque[_BuildTurn] = deque()  # of `building`, in order of arrival; the first is under way
        self._here = threading.local()

    @property
    def is_wanted(self) -> bool:
        """Whether a thread waits for computations to end, for a capture or to be alone."""
        return self._waiting > 0

    def forget(self, thread: int) -> None:
        """Stop waiting for a thread inside `shared` that computes no more and is not expected to leave.

        The caller (`DrawClock`, `train/data/loader_clock.py`) must be sure that the thread is inside, and calls once: the
        count of the threads inside would otherwise never be 0 again.
        """
        with self._condition:
            self._forgotten.add(thread)
            self._sharing -= 1
            self._let_others_in(thread)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Context for computations."""
        if getattr(self._here, "is_inside", False):
            yield  # a wait for a capture, which waits for this thread, would never end
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Context for waits, which may be waits for a capture: outside `shared` and `building`, if the thread is inside."""
        has_turn = getattr(self._here, "turn", None) is not None
        if has_turn:
            self._end_build()
        try:
            with self._outside():
                yield
        finally:
            if has_turn:
                self._begin_build(math.inf)

    @contextmanager
    def _outside(self) -> Iterator[None]:
        if not getattr(self._here, "is_inside", False):
            yield
            return
        self._leave()
        try:
            yield
        finally:
            self._enter()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Context for a capture; a thread inside `alone` lets others in from then on."""
        with self.left() if getattr(self._here, "may_leave", False) else nullcontext():
            with self._condition:
                self._wait_until_free()
                self._is_exclusive = True
            try:
                _part_modes_of_threads()
                yield
            finally:
                with self._condition:
                    self._is_exclusive = False
                    self._condition.notify_all()

    @contextmanager
    def alone(self, most_seconds: float = _MOST_SECONDS_ALONE) -> Iterator[Callable[[], bool]]:
        """Context as of `shared` that begins once nobody else is inside, and keeps others out for at most `most_seconds`.

        Yields:
            A function that says whether the thread has been alone so far.
        """
        if getattr(self._here, "is_inside", False):
            yield lambda: False
            return
        with self._condition:
            self._wait_until_free()
            self._sharing += 1
            thread = self._lone_thread = threading.get_ident()
            self._lone_until = time.monotonic() + most_seconds
        could_leave = getattr(self._here, "may_leave", False)  # within `alone_inside` of a thread that was alone before
        self._here.is_inside = self._here.may_leave = True
        try:
            yield lambda: self._lone_thread == thread
        finally:
            self._here.may_leave = could_leave
            self._leave()

    @contextmanager
    def alone_inside(self) -> Iterator[None]:
        """Context as of `alone`, without an end, also for a thread inside, which first lets the others come in and leave."""
        with self._outside(), self.alone(math.inf):
            yield

    @contextmanager
    def building(self, most_seconds: float = math.inf) -> Iterator[None]:
        """Context in which one thread at a time builds a model; after `most_seconds` the next thread may enter.

        Libraries that load a model replace functions, and the default dtype, of the whole process for that time. Of two
        threads, the second would note and put back the replacements of the first, for good.
        """
        if getattr(self._here, "turn", None) is not None:
            yield
            return
        self._begin_build(most_seconds)
        try:
            yield
        finally:
            self._end_build()

    def _begin_build(self, most_seconds: float) -> None:
        turn = self._here.turn = _BuildTurn(most_seconds)
        try:
            with self._condition:
                self._turns.append(turn)
                is_begun = self._is_turn_of(turn)
            if not is_begun:
                with self._outside(), self._condition:
                    while not self._is_turn_of(turn):
                        self._condition.wait(_MOST_SECONDS_ALONE)
        except BaseException:  # Ctrl-C may end the wait
            self._end_build()
            raise

    def _is_turn_of(self, turn: _BuildTurn) -> bool:
        while self._turns[0] is not turn and time.monotonic() >= self._turns[0].until:
            self._turns.popleft()
        if self._turns[0] is not turn:
            return False
        turn.until = time.monotonic() + turn.most_seconds
        return True

    def _end_build(self) -> None:
        turn, self._here.turn = self._here.turn, None
        with self._condition:
            if turn in self._turns:  # the next thread has taken away a turn that took too long
                self._turns.remove(turn)
                self._condition.notify_all()

    def _wait_until_free(self) -> None:
        # Counted before the wait, so that no further computation enters `shared`.
        self._waiting += 1
        try:
            self._condition.wait_for(lambda: not self._is_exclusive and not self._sharing)
        finally:  # Ctrl-C may end the wait
            self._waiting -= 1
            self._condition.notify_all()

    def _enter(self) -> None:
        with self._condition:
            # Waiting captures go first: a steady stream of units would otherwise keep a capture out for ever. The wait has
            # an end because a lone thread tells nobody that its time is over.
            while not self._condition.wait_for(self._may_share, _MOST_SECONDS_ALONE):
                pass
            self._lone_thread = None
            self._sharing += 1
        self._here.is_inside = True

    def _may_share(self) -> bool:
        is_kept_out = self._lone_thread is not None and time.monotonic() < self._lone_until
        return not self._is_exclusive and not self._waiting and not is_kept_out

    def _let_others_in(self, thread: int) -> None:
        if self._lone_thread == thread:
            self._lone_thread = None
        self._condition.notify_all()

    def _leave(self) -> None:
        if not self._here.is_inside:  # Ctrl-C has ended the wait of `left` to enter again
            return
        self._here.is_inside = False
        with self._condition:
            thread = threading.get_ident()
            if thread in self._forgotten:
                # The thread came back after all; `forget` has given back its share already.
                self._forgotten.discard(thread)
            else:
                self._sharing -= 1
                self._let_others_in(thread)


GATE = CaptureGate()  # one per process, like the flag guarded by the gate
