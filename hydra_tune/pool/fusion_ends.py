"""What becomes of carriers, and of members of groups, and what that is for their jobs."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from hydra_tune.errors import OutOfMemoryError, first_line
from hydra_tune.memory.pressure import NotRepeatableError
from hydra_tune.pool.faults import is_not_its_own
from hydra_tune.pool.fusion_entry import Carried, Entry
from hydra_tune.pool.fusion_group import Keeping, LiveGroup, tell
from hydra_tune.pool.fusion_table import FusionTable
from hydra_tune.pool.job import PoolEvent, Reported, Result
from hydra_tune.pool.record import forget_locals
from hydra_tune.train.capture import Beginning
from hydra_tune.train.trial import Report

_LOGGER = logging.getLogger("hydra_tune.fusion")


class Carrying(Protocol):
    """Who gives jobs their carriers."""

    def carry_anew(self, entry: Entry) -> None:
        """Give a job another carrier, with what it has; or end it, if that is wanted."""

    def look_later(self) -> None:
        """Look for somebody who could join a group."""


class Ends(Carried, Keeping):
    """Is told of them.

    Args:
        table: the jobs.
        carrying: gives another carrier to those that go on.
    """

    def __init__(self, table: FusionTable, carrying: Carrying) -> None:
        self._table = table
        self._carrying = carrying

    def told(self, entry: Entry, event: PoolEvent) -> None:
        """Something has become of the carrier that was made for a job."""
        with self._table.pool.changed:
            group = self._table.groups.get(event.job.key)
            if isinstance(event, Reported):
                if group is not None:
                    group.wake()
                elif not tell(entry, Report(step=event.step, metrics=event.metrics)):
                    self._table.timer.do(event.job.proceed)
                return
            self._table.groups.pop(event.job.key, None)
            if group is not None:
                group.is_over = True
                together, late = list(group.entries), list(group.arrivals)
                group.entries, group.arrivals = [], []
            elif entry.carrier is event.job and not entry.is_taken:
                together, late = [entry], []
            else:
                return
        if group is not None and isinstance(event.result.error, OutOfMemoryError):
            self._ran_out(group, together, event.result.error)
            together = []
        elif group is not None and group.goes_back_to and event.result.status == "completed":
            self._go_on_in(group, together, group.goes_back_to, is_undone=True)
            together = []
        for one in together:
            self.carrier_over(one, event.result)
        if late:
            self._table.timer.do(partial(self.send_back, late))

    def carrier_over(self, entry: Entry, result: Result) -> None:
        """The carrier of a job has ended with it, or has failed to take it."""
        error = result.error
        if result.status == "failed" and is_not_its_own(error) and entry.stop is None:
            assert error is not None
            if len(entry.faults) < entry.max_retries:
                self._begin_again(entry, error)
                return
            if entry.faults:
                error.add_note(f"the trial was begun again {len(entry.faults)} times before: max_retries")
        if entry.seat is None:
            self._table.over(entry, result)
        else:
            self._table.over(entry, Result(status=entry.stop or result.status, error=None if entry.stop else error))

    def _ran_out(self, group: LiveGroup, entries: Sequence[Entry], error: OutOfMemoryError) -> None:
        """A device had no memory for a group: its members go on in smaller ones, in the end by themselves.

        They go on where they were, if the unit that ran out was the first of its step and could be undone. Else they begin
        again from what they have saved last, and are the same when they are there.
        """
        size = len(group.trial.seats)
        limit = size // 2
        how = f"in groups of {limit} at most" if limit > 1 else "by themselves"
        _LOGGER.warning("a group of %d trials ran out of memory, and its trials go on %s: %s", size, how, error)
        is_undone = limit > 0 and not isinstance(error.__cause__, NotRepeatableError)
        self._go_on_in(group, entries, limit, is_undone=is_undone)

    def _go_on_in(self, group: LiveGroup, entries: Sequence[Entry], limit: int, *, is_undone: bool) -> None:
        """A group has ended, and its members go on in groups of so many at most: where they were, if the group could end so."""
        with self._table.pool.changed:
            self._table.limits[group.key] = limit
        for entry in entries:
            if is_undone and entry.seat is not None and entry.seat.is_handed_back:
                with self._table.pool.changed:
                    entry.most, entry.each, entry.kept = limit, 0, 0
                    self.seat_left(entry)
            else:
                self._begin_from(entry, self._table.pool.last_saved(entry))

    def _begin_again(self, entry: Entry, error: BaseException) -> None:
        """A job begins once more, from what it has saved last."""
        begin = self._table.pool.begin_again(entry, error)
        entry.faults = (*entry.faults, first_line(error))
        self._begin_from(entry, begin)

    def _begin_from(self, entry: Entry, begin: Callable[[], Beginning | None]) -> None:
        member = entry.trial
        if member is not None:
            member.close(keep=False)
        with self._table.pool.changed:
            entry.begin = begin
            if entry.keeper is not None:
                entry.keeper.begin_again()
            entry.begin_anew()
            entry.job.enter("queued")
        self._table.timer.do(partial(self._carrying.carry_anew, entry))

    def send_back(self, entries: Sequence[Entry]) -> None:
        """As of `Keeping`."""
        for entry in entries:
            self._carrying.carry_anew(entry)

    def seat_over(self, group: LiveGroup, entry: Entry) -> None:
        """As of `Keeping`; on the thread that has the group go on."""
        seat, trial = entry.seat, group.trial
        assert seat is not None
        assert seat.status is not None
        forget_locals(seat.error)
        if seat.status == "failed" and is_not_its_own(seat.error) and len(entry.faults) < entry.max_retries:
            assert seat.error is not None
            self._begin_again(entry, seat.error)
            return
        result = Result(
            status=seat.status,
            error=seat.error,
            activations=trial.activations,
            optimizer_placement=trial.optimizer_placement,
            group_size=seat.most_together,
        )
        result.keep(seat.module, seat.optimizer)
        seat.module, seat.optimizer = None, None
        self._table.over(entry, result)
        self._carrying.look_later()

    def seat_left(self, entry: Entry) -> None:
        """As of `Keeping`."""
        entry.is_seated, entry.is_taken, entry.carrier = False, False, None
        self._table.timer.do(partial(self.go_on, entry))
        self._table.timer.do(self._carrying.look_later)

    def go_on(self, entry: Entry) -> None:
        """Somebody wants a job that has left its group to go on, or to end, or did so while it left."""
        with self._table.pool.changed:
            is_aside = entry.seat is not None and not entry.is_seated and entry.carrier is None
            if not is_aside or (entry.stop is None and (entry.job.paused or entry.job.state == "waiting")):
                return
        self._carrying.carry_anew(entry)
