"""Ends of carriers and group members, and the consequences for the jobs.

A job ends with its carrier or slot, begins again after a fault of the system, or continues in a smaller group or alone:
after memory has run out, after an error of a step of several trials, or where planned steps have proved slower. A
carrier's event stream (`fused_job.py`) calls `GroupEndHandler` at each report and at the carrier's end; `LiveGroup`
(`live_group.py`) does so when a member ends or leaves, and when joiners find no slot. `GroupJobLauncher`
(`group_jobs.py`) owns the handler, and calls `carrier_over` where a group could not be made; `FusedPool`
(`fused_pool.py`) and `GroupJobLauncher` have `go_on` called when a driver answers, stops or unpauses a job without a
carrier. The module must not know how a group computes.

Note: reports arrive under the pool's lock, ends mostly without. So carriers are resumed and submitted on the `timer`
thread of `FusedJobTable`. A job of an ended group either ends or gets a new carrier, never both.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from typing_extensions import override

from hydra_tune.errors import GroupBatchError, OutOfMemoryError, first_line
from hydra_tune.memory.pressure import NotRepeatableError
from hydra_tune.pool.faults.retry import is_not_its_own
from hydra_tune.pool.fusion.fused_job import FusedJob, GroupJobListener
from hydra_tune.pool.fusion.job_table import FusedJobTable, GroupSizeLimit
from hydra_tune.pool.fusion.live_group import GroupMemberListener, LiveGroup, tell
from hydra_tune.pool.job import PoolEvent, Reported, Result
from hydra_tune.pool.runtime.job_state import forget_locals
from hydra_tune.train.checkpoint.trial_checkpoint import StartCheckpoint
from hydra_tune.train.trial import PendingReport

_LOGGER = logging.getLogger("hydra_tune.fusion")


class GroupJobSource(Protocol):
    """Source of carriers for jobs; see `GroupJobLauncher`."""

    def carry_anew(self, entry: FusedJob) -> None:
        """Submit another carrier for a job that keeps its state; or end the job if its driver has asked for an end."""

    def look_later(self) -> None:
        """Search, on another thread, for a job that could join a group."""


class GroupEndHandler(GroupJobListener, GroupMemberListener):
    """Handles the events of carriers, and the ends of members."""

    def __init__(self, table: FusedJobTable, carrying: GroupJobSource) -> None:
        self._table = table
        self._carrying = carrying

    def told(self, entry: FusedJob, event: PoolEvent) -> None:
        """Handle an event of the carrier that was made for a job."""
        with self._table.pool.changed:
            group = self._table.groups.get(event.job.key)
            if isinstance(event, Reported):
                if group is not None:
                    group.wake()
                elif not tell(entry, PendingReport(step=event.step, metrics=event.metrics)):
                    # On the timer's thread: the event arrives under the pool's lock, under which the pool must not be
                    # called.
                    self._table.timer.do(event.job.proceed)
                return
            self._table.groups.pop(event.job.key, None)
            if group is not None:
                # Set under the same lock as the lists are emptied, so no job can come to the group afterwards.
                group.is_over = True
                members, joiners = list(group.entries), list(group.arrivals)
                group.entries, group.arrivals = [], []
            elif entry.carrier is event.job and not entry.is_taken:
                members, joiners = [entry], []
            # An earlier carrier of a job that another carrier runs now.
            else:
                return
        if group is None or not self._goes_on(group, members, event.result):
            for member in members:
                self.carrier_over(member, event.result)
        if joiners:
            self._table.timer.do(partial(self.send_back, joiners))

    def _goes_on(self, group: LiveGroup, members: Sequence[FusedJob], result: Result) -> bool:
        """Let the members of an ended group go on in smaller groups, if its end is not theirs; return whether they do."""
        error = result.error
        if isinstance(error, OutOfMemoryError):
            self._ran_out(group, members, error)
        elif isinstance(error, GroupBatchError):
            _LOGGER.warning("%s; the %d trials go on by themselves", error, len(members))
            self._go_on_in(group, members, GroupSizeLimit(1, str(error)), is_undone=True)
        elif group.goes_back_to and result.status == "completed":
            limit = GroupSizeLimit(group.goes_back_to, "planned steps of a larger group have proved slower")
            self._go_on_in(group, members, limit, is_undone=True)
        elif error is not None and not is_not_its_own(error) and not self._table.pool.is_closed:
            # Any of the members may have caused the error, such as one with a label out of range. Alone, that member
            # fails, and the others do not.
            why = f"a step of {len(members)} trials together failed ({first_line(error)})"
            _LOGGER.warning("%s; they go on by themselves, from their last checkpoints or from their beginning", why)
            self._go_on_in(group, members, GroupSizeLimit(1, why), is_undone=False)
        else:
            return False
        return True

    def carrier_over(self, entry: FusedJob, result: Result) -> None:
        """Handle the end of a job's carrier, or a carrier's failure to take the job."""
        error = result.error
        if result.status == "failed" and is_not_its_own(error) and entry.stop is None:
            assert error is not None
            if len(entry.faults) < entry.max_retries:
                # The carrier itself never retries (its `max_retries` is 0): a group has no checkpoints, its members
                # have.
                self._begin_again(entry, error)
                return
            if entry.faults:
                error.add_note(
                    f"the trial was begun again {len(entry.faults)} times before, as often as max_retries allows"
                )
        # Without a slot the carrier has run the job's trial alone, so its result is the job's.
        if entry.seat is None:
            self._table.over(entry, result)
        else:
            self._table.over(entry, Result(status=entry.stop or result.status, error=None if entry.stop else error))

    def _ran_out(self, group: LiveGroup, entries: Sequence[FusedJob], error: OutOfMemoryError) -> None:
        """Split a group that ran out of device memory.

        The members continue in groups of at most half the size, in the end alone; from planned steps in groups that fit
        without a plan, if these are larger.

        If the failed unit was the first of its step and could be undone, the members continue where they were.
        Otherwise the members begin again from their last saved states, and end with the same results.
        """
        size, limit = len(group.trial.seats), group.smaller_size
        how = f"in groups of {limit} at most" if limit > 1 else "by themselves"
        _LOGGER.warning("a group of %d trials ran out of memory, and its trials go on %s: %s", size, how, error)
        is_undone = limit > 0 and not isinstance(error.__cause__, NotRepeatableError)
        size_limit = GroupSizeLimit(limit, f"a group of {size} trials ran out of memory")
        self._go_on_in(group, entries, size_limit, is_undone=is_undone)

    def _go_on_in(
        self, group: LiveGroup, entries: Sequence[FusedJob], limit: GroupSizeLimit, *, is_undone: bool
    ) -> None:
        """Let the members of an ended group continue in smaller groups.

        With `is_undone`, members handed back by the group continue where they were; all others begin from the last
        saved state.
        """
        with self._table.pool.changed:
            self._table.limits[group.key] = limit
        for entry in entries:
            if is_undone and entry.seat is not None and entry.seat.is_handed_back:
                # The old plan of sizes is void: the job's next carrier looks for at most that many members.
                with self._table.pool.changed:
                    entry.most, entry.each, entry.kept = limit.most, 0, 0
                    self.seat_left(entry)
            else:
                self._begin_from(entry, self._table.pool.last_saved(entry))

    def _begin_again(self, entry: FusedJob, error: BaseException) -> None:
        begin = self._table.pool.begin_again(entry, error)
        entry.faults = (*entry.faults, first_line(error))
        self._begin_from(entry, begin)

    def _begin_from(self, entry: FusedJob, begin: Callable[[], StartCheckpoint | None]) -> None:
        member = entry.trial
        if member is not None:
            member.close(keep=False)
        with self._table.pool.changed:
            entry.begin = begin
            if entry.keeper is not None:
                entry.keeper.begin_again()
            entry.begin_anew()
            entry.job.enter("queued")
        # On the timer's thread, because an event may arrive under the pool's lock.
        self._table.timer.do(partial(self._carrying.carry_anew, entry))

    @override
    def send_back(self, entries: Sequence[FusedJob]) -> None:
        for entry in entries:
            self._carrying.carry_anew(entry)

    def seat_over(self, group: LiveGroup, entry: FusedJob) -> None:
        """As of `GroupMemberListener`; on the thread that advances the group."""
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
        # The result owns the weights now; the slot lives as long as the group's trial and would keep the weights alive.
        seat.module, seat.optimizer = None, None
        self._table.over(entry, result)
        self._carrying.look_later()

    @override
    def seat_left(self, entry: FusedJob) -> None:
        entry.is_seated, entry.is_taken, entry.carrier = False, False, None
        self._table.timer.do(partial(self.go_on, entry))
        self._table.timer.do(self._carrying.look_later)

    def go_on(self, entry: FusedJob) -> None:
        """Give a job that has left its group a new carrier, if its driver wants the job to go on or to end.

        Also called right after the job has left, because the driver's request may have come in between.
        """
        with self._table.pool.changed:
            is_aside = entry.seat is not None and not (entry.is_seated or entry.is_taken) and entry.carrier is None
            if not is_aside or (entry.stop is None and (entry.job.paused or entry.job.state == "waiting")):
                return
        self._carrying.carry_anew(entry)
