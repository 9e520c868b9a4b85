"""A group that is under way in a pool: whom it has, who comes, and who goes."""

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from hydra_tune.errors import BudgetError, UnfusableError
from hydra_tune.fusion.attendance import PATIENCE_SECONDS
from hydra_tune.fusion.group import GroupTrial
from hydra_tune.fusion.key import FusionKey
from hydra_tune.fusion.measured import Measured
from hydra_tune.fusion.member import Member, Wanted
from hydra_tune.fusion.pair import PairTrial
from hydra_tune.fusion.seat import Seat
from hydra_tune.pool.fusion_entry import Entry
from hydra_tune.pool.job import Job, Reported
from hydra_tune.pool.later import Later
from hydra_tune.pool.lifecycle import log_measured
from hydra_tune.pool.pool import Pool
from hydra_tune.train.trial import Report

_LOGGER = logging.getLogger(__name__)
_FUSION_LOGGER = logging.getLogger("hydra_tune.fusion")


class Keeping(Protocol):
    """What a group tells of its members."""

    def seat_over(self, group: "LiveGroup", entry: Entry) -> None:
        """A member has ended."""

    def seat_left(self, entry: Entry) -> None:
        """A paused member has left. Under the lock."""

    def send_back(self, entries: Sequence[Entry]) -> None:
        """Members that have been promised a place get none, and go on elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplanned:
    """Groups that need no plan, for members whose planned steps prove slower.

    Attributes:
        size: members of each.
        seconds: times a step of such a group now, given one of the members and its batch.
    """

    size: int
    seconds: Callable[[Member, Wanted], float]


class LiveGroup:
    """A group, and the jobs that it has or is about to have; its trial's `Desk`.

    Args:
        pool: runs it.
        carrier: the pool's job that it is.
        key: the fusion key of its members.
        most: members that there may be.
        keeping: told of its members.
        building: makes plans for other sizes.
        timer: has the group go on when it has waited for long enough.
        unplanned: what its planned steps are held against where they prove slower than predicted; None: nothing is.

    Attributes:
        trial: its own, once there is one.
        entries: its members that are not over.
        arrivals: members that come as soon as there is room.
        is_over: whether nobody may come any more.
        goes_back_to: members of the groups that its own go on in, without a plan, when it has ended; 0: they go on nowhere.
    """

    trial: GroupTrial | PairTrial

    def __init__(
        self,
        pool: Pool,
        carrier: Job,
        key: Hashable,
        most: int,
        keeping: Keeping,
        building: Later,
        timer: Later,
        unplanned: Unplanned | None = None,
    ) -> None:
        self._pool = pool
        self.carrier = carrier
        self.key = key
        self.most = most
        self.entries: list[Entry] = []
        self.arrivals: list[Entry] = []
        self.is_over = False
        self.goes_back_to = 0
        self._keeping = keeping
        self._building = building
        self._timer = timer
        self._unplanned = unplanned
        self._ready: set[int] = set()
        self._asked: set[int] = set()

    def has_room(self, *, grows: bool) -> bool:
        """Whether one more may come, into a vacant place or, if it grows, a new one. Under the pool's lock."""
        if self.is_over or not hasattr(self, "trial"):
            return False
        places = self.most if grows else len(self.trial.seats)
        return len(self.entries) + len(self.arrivals) < places

    def admits(self, entry: Entry) -> bool:
        """Whether a job may come, as far as that is known before it is built. Under the pool's lock."""
        if entry.key is None:
            return True
        if (
            entry.key != self.key
            or not isinstance(entry.key, FusionKey)
            or not self.trial.knows(entry.key.architecture)
        ):
            return False
        return entry.trial is None or self.trial.admits(entry.trial)

    def come(self, entry: Entry) -> None:
        """A job's member is to have a place as soon as it can. Under the pool's lock."""
        entry.is_taken = True
        entry.carrier = self.carrier
        entry.sit()
        self.arrivals.append(entry)
        self.wake()

    def wake(self) -> None:
        """Have the group go on if it waits and has something to do, now or when it has waited for long enough."""
        self._timer.do(self._check)

    def wake_in_time(self) -> None:
        """The same, when it has waited for long enough only."""
        self._timer.do(self._check, PATIENCE_SECONDS)

    def _check(self) -> None:
        with self._pool.changed:
            if self.is_over or self.carrier.state != "waiting":
                return
            is_due = bool(self.arrivals) or self.trial.is_due
        self._answer_savers()
        if is_due:
            self.carrier.proceed()
        elif self.trial.is_held or any(seat.is_answered for seat in self.trial.seats if seat.status is None):
            self.wake_in_time()

    def _answer_savers(self) -> None:
        """Save members that wait for answers, where somebody has asked for that."""
        with self._pool.turn_of(self.carrier) as is_waiting:
            if is_waiting:
                self._save_asked()

    def _save_asked(self) -> None:
        for entry in list(self.entries):
            member, keeper = entry.trial, entry.keeper
            if keeper is not None and member is not None and entry.is_seated and member.may_be_saved:
                keeper.answer(member)

    # The group's desk.

    def ended(self, seat: Seat) -> None:
        """As of `Desk`."""
        with self._pool.changed:
            entry = self._entry_of(seat)
            self.entries.remove(entry)
            entry.is_seated = False
        self._keeping.seat_over(self, entry)

    def reported(self, seat: Seat) -> None:
        """As of `Desk`."""
        report = seat.wants
        assert isinstance(report, Report)
        with self._pool.changed:
            entry = self._entry_of(seat)
            if not tell(entry, report):
                seat.is_answered = True

    def left(self, seat: Seat) -> None:
        """As of `Desk`."""
        with self._pool.changed:
            entry = self._entry_of(seat)
            self.entries.remove(entry)
            self._keeping.seat_left(entry)

    def waiting(self) -> int:
        """As of `Desk`."""
        return len(self.arrivals)

    def joining(self, free: int, *, ends: bool) -> Sequence[Seat]:
        """As of `Desk`."""
        self._save_asked_beside()
        if not self.arrivals and not ends:
            return ()
        with self._pool.changed:
            coming, self.arrivals = self.arrivals[:free], self.arrivals[free:]
            for entry in coming:
                entry.is_seated = True
                if entry.job.state != "waiting":
                    entry.job.enter("running")
            self.entries += coming
            self.is_over = ends and not coming
        if coming:
            _LOGGER.info("%d trials join a group: %s", len(coming), ", ".join(one.job.name for one in coming))
        return [entry.sit() for entry in coming]

    def _save_asked_beside(self) -> None:
        """The same as `_save_asked` while others of the group go on; on the thread that has it go on."""
        for entry in self.entries:
            if entry.job.state == "waiting" and entry.keeper is not None and entry.keeper.is_asked:
                member = entry.trial
                if member is not None and member.may_be_saved:
                    entry.keeper.answer(member)

    def make_ready(self, size: int) -> bool:
        """As of `Desk`."""
        if size in self._ready:
            return True
        if size not in self._asked:
            self._asked.add(size)
            self._building.do(partial(self._prepare, size))
        return False

    def _prepare(self, size: int) -> None:
        now, state = len(self.trial.seats), self.trial.state
        more = 0 if state is None else math.ceil(state.nbytes * (size - now) / now)
        if more > 0 and not self._pool.take_host(self.carrier, more):
            self.stays(now, "there is no host memory for them")
            return
        try:
            self.trial.make_ready(size)
        except (BudgetError, UnfusableError) as error:
            self.stays(now, f"no plan of them fits a device: {error}")
            return
        self._ready.add(size)
        self.wake()

    def stays(self, size: int, why: str) -> None:
        """As of `PairDesk`; who was to have such a place goes on elsewhere."""
        _LOGGER.info("a group of %d trials has no more: %s", size, why)
        with self._pool.changed:
            self.most = self.trial.most = size
            late, self.arrivals = self.arrivals, []
        if late:
            self._timer.do(partial(self._keeping.send_back, late))

    def measured(self, found: Measured, like: Wanted) -> None:
        """As of `Desk`."""
        _FUSION_LOGGER.info("measured: %s", found.told)
        log_measured(self._pool.log, self.carrier.key, found)
        if self._unplanned is not None and found.is_slower:
            self._building.do(partial(self._compare, self._unplanned, found, like))

    def _compare(self, unplanned: Unplanned, found: Measured, like: Wanted) -> None:
        """Have the group end, and its members go on in groups that need no plan, where these are faster."""
        with self._pool.changed:
            member = next((one.trial for one in self.entries if one.trial is not None), None)
        if member is None or self.trial.goes_back:
            return
        try:
            each = unplanned.seconds(member, like) / unplanned.size
        except Exception:  # the steps that there are go on
            _FUSION_LOGGER.info("steps that need no plan cannot be timed beside planned ones", exc_info=True)
            return
        if found.seconds_each > each:
            self.goes_back_to, self.trial.goes_back = unplanned.size, True
        _FUSION_LOGGER.info(
            "planned steps of %s %s: one takes %.3g ms for each trial, and one without a plan, of %d, %.3g ms",
            " + ".join(map(str, found.sizes)),
            "prove slower and are given up" if self.trial.goes_back else "go on",
            found.seconds_each * 1e3,
            unplanned.size,
            each * 1e3,
        )

    def _entry_of(self, seat: Seat) -> Entry:
        return next(one for one in self.entries if one.seat is seat)


def tell(entry: Entry, report: Report) -> bool:
    """Tell a job's driver of a report; False: nobody waits for an answer. Under the pool's lock."""
    job = entry.job
    if job.events is None or not entry.told.takes(report):
        return False
    job.enter("waiting")
    if entry.told.tell(report):
        job.events.put(Reported(job, report.step, dict(report.metrics)))
    return True
