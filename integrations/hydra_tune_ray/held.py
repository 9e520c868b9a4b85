"""The trials that a pool has: their jobs, what they have said last, and until when they live without a sign of their client.

Runs in the event loop of a pool's actor. What blocks is done by whoever calls this, in other threads.

Note: leases. A trial's client says at least every third of `lease_seconds` that it lives; a trial whose client has not for the
whole of it is cancelled. A client that ends in order says so, and a driver's `PoolCallback` says it for those that could not.
"""

import asyncio
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from hydra_tune.checkpoint.saved import Saved
from hydra_tune.errors import HydraTuneError
from hydra_tune.pool.job import EventStream, Job, PoolEvent, Reported, Result
from hydra_tune_ray.messages import Begin, Load, Moved, Outcome, Over, Report, Waiting
from hydra_tune_ray.nodes import DeviceNode

_NOT_BEGUN = ("queued", "preparing")
_LEAVING = 1
"""Priority of a trial that is to leave."""


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """One trial.

    Attributes:
        request: as it was begun.
        expires: when it ends without a sign of life, by `time.monotonic()`.
        number: reports that it has made.
        job: of the pool; None: it is being made.
        at_end: its last state, once it has completed; None: it waits at its last report until it has been saved.
        said: what it has said last; None: nothing since its last report was answered.
        target: the name of the pool that it is to leave for.
        leaving: copies it, to leave for `target`.
        changed: set when it says something, or is to leave.
    """

    request: Begin
    expires: float
    number: int
    job: Job | None = None
    at_end: "Future[Saved] | None" = None
    said: Report | Over | None = None
    target: str | None = None
    leaving: asyncio.Task[Outcome] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_begun(self) -> bool:
        """Whether there is a state of it that a move has to take along."""
        return self.job is not None and self.job.state not in _NOT_BEGUN

    @property
    def leaves(self) -> bool:
        """Whether it can leave for another pool now: it waits for the answer to a report, or has not begun."""
        if self.target is None or self.job is None:
            return False
        is_untouched = self.number == self.request.number and self.job.state == "queued"
        return isinstance(self.said, Report) or (self.said is None and is_untouched)

    def send_to(self, pool: str) -> None:
        """It is to leave as soon as it can: it comes to its next report before the others."""
        self.target = pool
        self.changed.set()
        if self.job is not None and self.job.state != "queued":  # which leaves at once
            self.job.set_priority(_LEAVING)

    def stay(self) -> None:
        """It is not to leave, after all."""
        self.target = self.leaving = None
        if self.job is not None:
            self.job.set_priority(0)

    def left(self) -> tuple[float | None, float | None]:
        """Seconds of compute and epochs that it still has to come; None where that is not known yet."""
        if self.job is None:
            return None, None
        progress = self.job.progress
        if progress.num_steps is None:  # not begun, or of data that has to be drawn once to be counted
            is_resumed = self.request.files is not None  # from nobody knows which epoch
            return None, None if is_resumed else float(progress.epochs - progress.epoch)
        done = progress.step / progress.num_steps if progress.num_steps else 1.0
        return progress.remaining_seconds, progress.epochs * (1.0 - done)

    def hear(self, event: PoolEvent) -> None:
        """Its job has said something."""
        if isinstance(event, Reported):
            self.number += 1
            self.said = Report(
                number=self.number, step=event.step, metrics=dict(event.metrics), is_last=_is_last(event)
            )
            if self.said.is_last and self.at_end is not None:
                self.at_end.cancel()
        else:
            self.said = over(event.result)
        self.changed.set()


class HeldTrials:
    """All trials of a pool.

    Args:
        answer_seconds: how long an answer may take.
    """

    def __init__(self, answer_seconds: float) -> None:
        self._answer_seconds = answer_seconds
        self._by_key: dict[str, Held] = {}
        self._moved: dict[str, tuple[Moved, float]] = {}

    def __iter__(self) -> Iterator[Held]:
        return iter(tuple(self._by_key.values()))

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: str) -> Held | None:
        """The trial of this key, if it is here."""
        return self._by_key.get(key)

    def add(self, request: Begin) -> tuple[Held, EventStream]:
        """A trial has come; its job is still to be made, with this stream."""
        held = Held(request=request, expires=time.monotonic() + request.lease_seconds, number=request.number)
        self._by_key[request.key] = held
        return held, _LoopEvents(asyncio.get_running_loop(), held.hear)

    def hand_on(self, held: Held, request: Begin) -> None:
        """Another client goes on with a trial, as it is."""
        self.remove(held)
        held.request = request
        self._by_key[request.key] = held
        self.renew(held)

    def remove(self, held: Held) -> None:
        """It is not this pool's any more."""
        if self._by_key.get(held.request.key) is held:
            del self._by_key[held.request.key]

    def leave(self, held: Held, moved: Moved, seconds: float) -> Moved:
        """It goes to another pool. Its client is told so as often as it asks within so many seconds: answers get lost."""
        self.remove(held)
        self._moved[held.request.key] = moved, time.monotonic() + seconds
        return moved

    def moved(self, key: str) -> Moved | None:
        """Where a trial has gone, if that was just now."""
        found = self._moved.get(key)
        return None if found is None else found[0]

    def renew(self, held: Held) -> None:
        """Its client lives."""
        held.expires = time.monotonic() + held.request.lease_seconds

    def expired(self, stopped_seconds: float = 0.0) -> list[Held]:
        """Those whose clients have not been heard of; and forgets where those have gone that have left long ago.

        Args:
            stopped_seconds: in which this process heard nobody, because it did not run; they do not count.
        """
        now = time.monotonic()
        for held in self:
            held.expires += stopped_seconds
        self._moved = {key: (moved, until) for key, (moved, until) in self._moved.items() if until > now}
        return [held for held in self if held.expires < now]

    async def next_of(self, held: Held) -> Report | Over | Waiting | None:
        """Wait for what a trial says next, as long as an answer may take; None: it can leave."""
        deadline = time.monotonic() + self._answer_seconds
        while held.said is None:
            if held.leaves:
                return None
            held.changed.clear()
            try:
                await asyncio.wait_for(held.changed.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return Waiting()
        return held.said

    def load(self, node: DeviceNode) -> Load:
        """What there is to do."""
        here = [held for held in self if not _is_done(held)]
        left = {held.request.key: held.left() for held in here}
        there = [held.request.key for held in here if held.target is None]
        return Load(
            node=node,
            trials={key: left[key][0] for key in there},
            started=frozenset(held.request.key for held in here if held.target is None and held.has_begun),
            leaving={
                held.request.key: (held.target, left[held.request.key][0]) for held in here if held.target is not None
            },
            epochs={key: epochs for key, (_, epochs) in left.items() if epochs is not None},
        )


class _LoopEvents(EventStream):
    """Hands events to an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, hear: Callable[[PoolEvent], None]) -> None:
        super().__init__()

        def put(event: PoolEvent) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(partial(hear, event))

        self.put = put


def _is_last(event: Reported) -> bool:
    task, progress = event.job.task, event.job.progress
    if task.report_every == "epoch":
        return event.step == task.epochs - 1
    return progress.num_steps is not None and event.step >= progress.num_steps


def _is_done(held: Held) -> bool:
    return isinstance(held.said, Over) or (isinstance(held.said, Report) and held.said.is_last)


def over(result: Result) -> Over:
    """How a job has ended, for a client that does not know what it has failed with."""
    error = "" if result.error is None else told(result.error)
    return Over(status=result.status, error=error, metrics=dict(result.metrics))


def told(error: BaseException) -> str:
    """An error as text: of our own what it says, of others where they were raised as well."""
    if isinstance(error, HydraTuneError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error)).strip()
