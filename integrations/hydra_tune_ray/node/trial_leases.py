"""Trials held by a pool: each trial's job, last message, and lease.

`LeasedTrialTable` runs in the event loop of the pool's actor and waits for no thread, except shortly for the lock of the
executor. `NodePool` (`node_pool.py`) calls the table at each message of a client and at each heartbeat, and moves blocking
work to other threads. Only `_EventLoopStream.put` runs in the threads of jobs, and hands each event to the loop.

Note: leases. A trial's client renews the lease at least every third of `lease_seconds`; the pool cancels a trial after
a whole lease without renewal. A client that ends in order tells the pool so, and the driver's `PoolCallback` speaks for
clients that could not.
"""

import asyncio
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from hydra_tune.checkpoint.saved import CheckpointContent
from hydra_tune.errors import HydraTuneError
from hydra_tune.pool.job import EventStream, Job, PoolEvent, Reported, Result
from hydra_tune_ray.messages import (
    BeginRequest,
    EndOutcome,
    MoveOutcome,
    Outcome,
    PoolLoadReport,
    ReportOutcome,
    WaitingOutcome,
)
from hydra_tune_ray.node.nodes import DeviceNode

_NOT_BEGUN = ("queued", "preparing")
_LEAVING = 1
"""Priority of a trial that is to leave."""


@dataclass(slots=True, kw_only=True, eq=False)
class LeasedTrial:
    """One trial of the pool.

    Attributes:
        request: the client's request.
        expires: time at which the lease ends, by `time.monotonic()`.
        number: number of reports made so far.
        folder: key of the request that began the job, which names the folder of the files to resume from.
        job: the pool's job; None: being built.
        at_end: future of the last state, filled when the job completes; None: no copy is made
            (`NodePoolRuntime.copy_at_end`).
        said: last message of the job; None: no message since the last report was answered.
        target: name of the pool that the trial is to move to.
        leaving: background task that copies the trial for the move to `target`.
        changed: set at each new message, and when the trial is to leave.
    """

    request: BeginRequest
    expires: float
    number: int
    folder: str
    job: Job | None = None
    at_end: "Future[CheckpointContent] | None" = None
    said: ReportOutcome | EndOutcome | None = None
    target: str | None = None
    leaving: asyncio.Task[Outcome] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_begun(self) -> bool:
        """Whether the trial has state that a move must take along."""
        return self.job is not None and self.job.state not in _NOT_BEGUN

    @property
    def leaves(self) -> bool:
        """Whether the trial can move now: while waiting at a report, or before the beginning."""
        if self.target is None or self.job is None:
            return False
        # `number` counts on from earlier attempts: equal to the request's, the trial has made no report here.
        is_untouched = self.number == self.request.number and self.job.state == "queued"
        return isinstance(self.said, ReportOutcome) or (self.said is None and is_untouched)

    def send_to(self, pool: str) -> None:
        """Mark the trial for a move to another pool, at its next report; a raised priority brings the report sooner."""
        self.target = pool
        self.changed.set()
        if self.job is not None and self.job.state != "queued":  # a queued job can leave at once
            self.job.set_priority(_LEAVING)

    def stay(self) -> None:
        """Cancel the move and restore the usual priority."""
        self.target = self.leaving = None
        if self.job is not None:
            self.job.set_priority(0)

    def left(self) -> tuple[float | None, float | None]:
        """Seconds of compute and epochs that the trial still has to run; each None where not known yet."""
        if self.job is None:
            return None, None
        progress = self.job.progress
        if progress.num_steps is None:  # not begun, or data without a length, counted only by drawing an epoch
            is_resumed = self.request.files is not None  # the epoch of the checkpoint is not known here
            return None, None if is_resumed else float(progress.epochs - progress.epoch)
        share_done = progress.step / progress.num_steps if progress.num_steps else 1.0
        return progress.remaining_seconds, progress.epochs * (1.0 - share_done)

    def hear(self, event: PoolEvent) -> None:
        """Take a message of the job: count a report, or note the end."""
        if isinstance(event, Reported):
            self.number += 1
            self.said = ReportOutcome(
                number=self.number, step=event.step, metrics=dict(event.metrics), is_last=_is_last(event)
            )
            # Saving at the last report reads the waiting job itself; a second copy at the end would waste host memory.
            if self.said.is_last and self.at_end is not None:
                self.at_end.cancel()
        else:
            self.said = over(event.result)
        self.changed.set()


class LeasedTrialTable:
    """All trials of a pool, by key; `next_of` waits `answer_seconds` at most."""

    def __init__(self, answer_seconds: float) -> None:
        self._answer_seconds = answer_seconds
        self._by_key: dict[str, LeasedTrial] = {}
        self._moved: dict[str, tuple[MoveOutcome, float]] = {}

    def __iter__(self) -> Iterator[LeasedTrial]:
        # A copy, so that callers may remove trials while they iterate.
        return iter(tuple(self._by_key.values()))

    def get(self, key: str) -> LeasedTrial | None:
        """Return the trial with this key, if held here."""
        return self._by_key.get(key)

    def add(self, request: BeginRequest) -> tuple[LeasedTrial, EventStream]:
        """Add a new trial; the caller makes its job, with the returned stream."""
        expires = time.monotonic() + request.lease_seconds
        trial = LeasedTrial(request=request, expires=expires, number=request.number, folder=request.key)
        self._by_key[request.key] = trial
        return trial, _EventLoopStream(asyncio.get_running_loop(), trial.hear)

    def hand_on(self, held: LeasedTrial, request: BeginRequest) -> None:
        """Hand a waiting trial over to another client, state and all."""
        self.remove(held)
        held.request = request
        self._by_key[request.key] = held
        self.renew(held)

    def remove(self, held: LeasedTrial) -> None:
        """Forget a trial."""
        # The key may belong to a newer attempt by now.
        if self._by_key.get(held.request.key) is held:
            del self._by_key[held.request.key]

    def leave(self, held: LeasedTrial, moved: MoveOutcome, seconds: float) -> MoveOutcome:
        """Note a trial's move to another pool.

        The forwarding address stays valid for `seconds`: a client may ask again, because answers get lost.
        """
        self.remove(held)
        self._moved[held.request.key] = moved, time.monotonic() + seconds
        return moved

    def moved(self, key: str) -> MoveOutcome | None:
        """Forwarding address of a trial that has left recently, or None."""
        entry = self._moved.get(key)
        return None if entry is None else entry[0]

    def renew(self, held: LeasedTrial) -> None:
        """Renew the lease: the client lives."""
        held.expires = time.monotonic() + held.request.lease_seconds

    def expired(self, stopped_seconds: float = 0.0) -> list[LeasedTrial]:
        """Return the trials with expired leases, and drop outdated forwarding addresses.

        Args:
            stopped_seconds: seconds in which this process did not run and could hear no client; every lease is extended
                by as much.
        """
        now = time.monotonic()
        for trial in self:
            trial.expires += stopped_seconds
        self._moved = {key: (outcome, until) for key, (outcome, until) in self._moved.items() if until > now}
        return [trial for trial in self if trial.expires < now]

    async def next_of(self, held: LeasedTrial) -> ReportOutcome | EndOutcome | WaitingOutcome | None:
        """Wait for the trial's next message, at most as long as an answer may take; None: the trial can leave."""
        deadline = time.monotonic() + self._answer_seconds
        while held.said is None:
            if held.leaves:
                return None
            # Clear before waiting, with no await between the check and here: a message in between would be lost.
            held.changed.clear()
            try:
                await asyncio.wait_for(held.changed.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return WaitingOutcome()
        return held.said

    def load(self, node: DeviceNode) -> PoolLoadReport:
        """Describe the pool's remaining work, for the directory."""
        unfinished = [trial for trial in self if not _is_done(trial)]
        remaining = {trial.request.key: trial.left() for trial in unfinished}
        staying_keys = [trial.request.key for trial in unfinished if trial.target is None]
        return PoolLoadReport(
            node=node,
            trials={key: remaining[key][0] for key in staying_keys},
            started=frozenset(trial.request.key for trial in unfinished if trial.target is None and trial.has_begun),
            leaving={
                trial.request.key: (trial.target, remaining[trial.request.key][0])
                for trial in unfinished
                if trial.target is not None
            },
            epochs={key: epochs for key, (_, epochs) in remaining.items() if epochs is not None},
        )


class _EventLoopStream(EventStream):
    """A stream that forwards events from the job's thread to an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, hear: Callable[[PoolEvent], None]) -> None:
        super().__init__()

        def put(event: PoolEvent) -> None:
            # At interpreter exit jobs may still end after the loop has closed.
            if not loop.is_closed():
                loop.call_soon_threadsafe(partial(hear, event))

        # In place of the queue's own method: events go straight to the loop, and nothing reads the queue.
        self.put = put


def _is_last(event: Reported) -> bool:
    task, progress = event.job.task, event.job.progress
    if task.report_every == "epoch":
        return event.step == task.epochs - 1
    return progress.num_steps is not None and event.step >= progress.num_steps


def _is_done(held: LeasedTrial) -> bool:
    return isinstance(held.said, EndOutcome) or (isinstance(held.said, ReportOutcome) and held.said.is_last)


def over(result: Result) -> EndOutcome:
    """Describe the end of a job for a client, with the error as text: a client may lack the error's class."""
    error = "" if result.error is None else told(result.error)
    return EndOutcome(status=result.status, error=error, metrics=dict(result.metrics))


def told(error: BaseException) -> str:
    """Error as text: class and message for errors of hydra-tune, with the traceback for all others."""
    if isinstance(error, HydraTuneError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error)).strip()
