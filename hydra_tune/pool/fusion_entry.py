"""A job that may be computed together with others, and who carries it."""

from collections.abc import Callable, Hashable
from typing import Protocol

from hydra_tune.fusion.member import Member
from hydra_tune.fusion.seat import Seat
from hydra_tune.pool.checkpoints import TrialKeeper
from hydra_tune.pool.job import OVER, EventStream, Job, PoolEvent, Result
from hydra_tune.pool.record import Told
from hydra_tune.train.capture import Beginning


class Entry:
    """A job, and who carries it.

    Args:
        job: as the driver has it.
        keeper: saves its trial.
        begin: gives what its trial goes on from, if anything.
        priority: of its carrier.
        max_retries: how often it may begin again after faults that are not its own.

    Attributes:
        carrier: the pool's job that runs it, by itself or in a group; None while there is none.
        ticket: that of its carrier: one that was given another meanwhile carries nobody.
        stop: how the driver wants it to end, if it does.
        trial: its own, once built.
        key: its fusion key, once known.
        seat: its place in a group, or that it has left; None while it has had none.
        is_seated: whether it has that place now.
        is_taken: whether another job's carrier has it, or is about to.
        is_building: whether it is being built for a group that has room.
        is_forming: whether its carrier looks for others.
        most: how many like it may be a group, or two that take turns; 0: it has not been looked at.
        each: members of one group then, of the larger of two; 0: as many as `most`.
        kept: how many fit as they are, in whose groups they go on where planned steps prove slower; 0: they do not.
        told: the last report that the driver has been told of.
        faults: those that it has had.
        candidate: its trial while it is compared with another job's.
        loader_error: what it fails with if its loader is interrupted.
    """

    def __init__(
        self, job: Job, keeper: TrialKeeper, begin: Callable[[], Beginning | None], priority: int, max_retries: int
    ) -> None:
        self.job = job
        self.keeper: TrialKeeper | None = keeper
        self.begin = begin
        self.priority = priority
        self.max_retries = max_retries
        self.told = Told()
        self.ticket: object = None
        self.faults: tuple[str, ...] = ()
        self.key: Hashable | None = None
        self.stop: str | None = None
        self.begin_anew()

    def begin_anew(self) -> None:
        """Nobody carries it, and nothing of it has been built."""
        self.carrier: Job | None = None
        self.most = 0
        self.each = 0
        self.kept = 0
        self.trial: Member | None = None
        self.candidate: Member | None = None
        self.loader_error: BaseException | None = None
        self.seat: Seat | None = None
        self.is_seated = False
        self.is_taken = False
        self.is_building = False
        self.is_forming = False

    @property
    def is_free(self) -> bool:
        """Whether a group may take it."""
        return (
            not self.is_taken
            and not self.is_forming
            and not self.is_building
            and self.carrier is not None
            and (self.trial is None or (self.seat is not None and not self.is_seated))
            and self.stop is None
            and self.job.state not in OVER
            and not self.job.paused
        )

    def sit(self) -> Seat:
        """The place that it is to have, with what the driver has asked for by now."""
        if self.seat is None:
            assert self.trial is not None
            self.seat = Seat(self.trial, waits=self.job.events is not None)
        self.seat.stop, self.seat.is_paused = self.stop, self.job.paused
        return self.seat

    def result(self, result: Result) -> Result:
        """What the pool says of its carrier, with what is its own."""
        member = self.trial
        if member is not None and self.seat is not None:
            planned = member.units_planned
            result.metrics, result.history = member.metrics, member.history
            result.num_shards, result.units_run = member.num_shards, member.units_run
            result.compute_seconds, result.split_batches = member.compute_seconds, member.split_batches
            if result.status in ("pruned", "cancelled") and planned is not None:
                result.units_saved = max(0, planned - member.units_run)
        result.faults = self.faults
        if self.keeper is not None:
            self.keeper.close(result.status)
            if self.keeper.has_any:
                result.checkpoint = self.keeper.path
        return result


class Carried(Protocol):
    """Who is told what becomes of carriers."""

    def told(self, entry: Entry, event: PoolEvent) -> None:
        """Something has become of the carrier that was made for a job."""


class CarrierEvents(EventStream):
    """Passes on what becomes of a carrier."""

    def __init__(self, carried: Carried, entry: Entry) -> None:
        super().__init__()
        self.put = lambda event: carried.told(entry, event)
        self._entry = entry

    @property
    def waits(self) -> bool:
        """A group reports only where somebody waits for an answer."""
        return self._entry.seat is not None or self._entry.job.events is not None
