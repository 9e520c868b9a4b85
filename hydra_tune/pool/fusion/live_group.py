"""A running group in a pool: its members, joiners, and leavers.

Drivers' requests arrive on any thread, and only mark slots and entries and wake a waiting group. The group's trial asks
its `GroupDelegate`, the `LiveGroup`, between two steps for joiners, and reports members that have ended or left; a pair
of groups does so through a `PairSide` (`fusion/runtime/pair_side.py`). `GroupJobLauncher` (`group_jobs.py`) makes a
`LiveGroup` when a carrier in preparation has found the members, and sends joiners. `FusedPool` (`fused_pool.py`) and
`GroupEndHandler` (`group_completion.py`) wake the group. The module must not know how a group computes.

Note: `entries` and `arrivals` change under the pool's lock; some reads come without the lock. Methods of `GroupDelegate`
run on the thread that advances the group, which must not wait for the `building` or `timer` thread; `stays` also runs on
the `building` thread.
"""

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from hydra_tune.errors import BudgetError, UnfusableError
from hydra_tune.fusion.group.group_trial import GroupTrial
from hydra_tune.fusion.group.member import MemberBatchRequest, MemberTrial
from hydra_tune.fusion.group.membership import PATIENCE_SECONDS
from hydra_tune.fusion.group.slot import GroupSlot
from hydra_tune.fusion.matching.fusion_key import FusionKey
from hydra_tune.fusion.runtime.pair_trial import PairTrial
from hydra_tune.fusion.runtime.plan_autotuner import AutotuneResult
from hydra_tune.pool.faults.task_thread import BackgroundCallQueue
from hydra_tune.pool.fusion.fused_job import FusedJob
from hydra_tune.pool.job import Job, Reported
from hydra_tune.pool.pool import Pool
from hydra_tune.pool.views.job_logging import log_measured
from hydra_tune.train.trial import PendingReport

_LOGGER = logging.getLogger(__name__)
_FUSION_LOGGER = logging.getLogger("hydra_tune.fusion")


class GroupMemberListener(Protocol):
    """Receiver of a group's news about members; see `GroupEndHandler`."""

    def seat_over(self, group: "LiveGroup", entry: FusedJob) -> None:
        """Handle a member that has ended."""

    def seat_left(self, entry: FusedJob) -> None:
        """Handle a paused member that has left; under the lock."""

    def send_back(self, entries: Sequence[FusedJob]) -> None:
        """Give new carriers to jobs whose promised slots will not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallerGroupFallback:
    """Alternative to planned steps: smaller groups that need no plan.

    Attributes:
        seconds: measures a step of such a group now, given a member and a batch of the member.
        is_compared: whether such groups take over where planned steps prove slower.
    """

    size: int
    seconds: Callable[[MemberTrial, MemberBatchRequest], float]
    is_compared: bool


class LiveGroup:
    """A group with its present and future members; the `GroupDelegate` of the group's trial.

    Args:
        carrier: the pool's job that runs the group.
        key: the fusion key of all members.
        building: thread that makes plans for other sizes, and times smaller groups.
        timer: thread that calls the pool, to wake the group and to send joiners back.
        unplanned: alternative to planned steps; None: the group needs no plan.

    Attributes:
        entries: members that are not over and have not left.
        arrivals: members that join as soon as there is room, and a plan for so many members.
        is_over: whether no job can join any more.
        goes_back_to: size of the unplanned groups in which the members continue after the end of this group; 0: the
            group does not fall back.
    """

    trial: GroupTrial | PairTrial

    def __init__(
        self,
        pool: Pool,
        carrier: Job,
        key: Hashable,
        most: int,
        keeping: GroupMemberListener,
        building: BackgroundCallQueue,
        timer: BackgroundCallQueue,
        unplanned: SmallerGroupFallback | None = None,
    ) -> None:
        self._pool = pool
        self.carrier = carrier
        self.key = key
        self.most = most
        self.entries: list[FusedJob] = []
        self.arrivals: list[FusedJob] = []
        self.is_over = False
        self.goes_back_to = 0
        self._keeping = keeping
        self._building = building
        self._timer = timer
        self._unplanned = unplanned
        self._ready: set[int] = set()
        self._asked: set[int] = set()
        self._granted_size = (
            0  # the largest number of slots that host memory has been granted for, beside the present ones
        )

    @property
    def smaller_size(self) -> int:
        """Size of the groups in which the members continue after memory has run out: half of the size, or as many as fit."""
        size = len(self.trial.seats)
        fitting = 0 if self._unplanned is None or self._unplanned.size >= size else self._unplanned.size
        return max(size // 2, fitting)

    def has_room(self, *, grows: bool) -> bool:
        """Return whether another member may join, in a vacant slot or, if `grows`, a new slot. Under the pool's lock."""
        if self.is_over or not hasattr(self, "trial"):
            return False
        places = self.most if grows else len(self.trial.seats)
        return len(self.entries) + len(self.arrivals) < places

    def admits(self, entry: FusedJob) -> bool:
        """Return whether a job may join, as far as is known before its trial is built. Under the pool's lock."""
        if entry.key is None:
            return True
        if (
            entry.key != self.key
            or not isinstance(entry.key, FusionKey)
            or not self.trial.knows(entry.key.architecture)
        ):
            return False
        return entry.trial is None or self.trial.admits(entry.trial)

    def come(self, entry: FusedJob) -> None:
        """Promise a job the next possible slot. Under the pool's lock."""
        entry.is_taken = True
        entry.carrier = self.carrier
        entry.sit()
        self.arrivals.append(entry)
        self.wake()

    def wake(self) -> None:
        """Let a waiting group go on if there is something to do, now or at the end of its patience."""
        # The timer's thread calls the pool, because callers may hold the pool's lock.
        self._timer.do(self._check)

    def wake_in_time(self) -> None:
        """Let a waiting group go on at the end of its patience only."""
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
        """Save waiting members on request."""
        # The carrier's turn keeps the group from going on while its members' states are copied.
        with self._pool.turn_of(self.carrier) as is_waiting:
            if is_waiting:
                self._save_asked()

    def _save_asked(self) -> None:
        for entry in list(self.entries):
            member, keeper = entry.trial, entry.keeper
            if keeper is not None and member is not None and entry.is_seated and member.may_be_saved:
                keeper.answer(member)

    # Methods of `GroupDelegate`.

    def ended(self, seat: GroupSlot) -> None:
        """As of `GroupDelegate`."""
        with self._pool.changed:
            entry = self._entry_of(seat)
            self.entries.remove(entry)
            entry.is_seated = False
        self._keeping.seat_over(self, entry)

    def reported(self, seat: GroupSlot) -> None:
        """As of `GroupDelegate`."""
        report = seat.wants
        assert isinstance(report, PendingReport)
        with self._pool.changed:
            entry = self._entry_of(seat)
            if not tell(entry, report):
                seat.is_answered = True

    def left(self, seat: GroupSlot) -> None:
        """As of `GroupDelegate`."""
        with self._pool.changed:
            entry = self._entry_of(seat)
            self.entries.remove(entry)
            self._keeping.seat_left(entry)

    def waiting(self) -> int:
        """As of `GroupDelegate`."""
        return len(self.arrivals)

    def joining(self, free: int, *, ends: bool) -> Sequence[GroupSlot]:
        """As of `GroupDelegate`."""
        self._save_asked_beside()
        # The common case, once a step: without the lock, for a job that arrives now joins after the next step.
        if not self.arrivals and not ends:
            return ()
        with self._pool.changed:
            joiners, self.arrivals = self.arrivals[:free], self.arrivals[free:]
            for entry in joiners:
                entry.is_seated = True
                if entry.job.state != "waiting":
                    entry.enter("running")
            self.entries += joiners
            # Decided under the lock: a job that arrives a moment later has to find the group over.
            self.is_over = ends and not joiners
        if joiners:
            _LOGGER.info("%d trials join a group: %s", len(joiners), ", ".join(joiner.job.name for joiner in joiners))
        return [entry.sit() for entry in joiners]

    def _save_asked_beside(self) -> None:
        """Save waiting members on request while others of the group go on; on the thread that advances the group."""
        for entry in self.entries:
            if entry.job.state == "waiting" and entry.keeper is not None and entry.keeper.is_asked:
                member = entry.trial
                if member is not None and member.may_be_saved:
                    entry.keeper.answer(member)

    def make_ready(self, size: int) -> bool:
        """As of `GroupDelegate`."""
        if size in self._ready:
            return True
        if size not in self._asked:
            self._asked.add(size)
            self._building.do(partial(self._prepare, size))
        return False

    def _prepare(self, size: int) -> None:
        # The stacked state grows by one member's share for each further slot.
        present_size, state = len(self.trial.seats), self.trial.state
        further_slots = max(0, size - max(present_size, self._granted_size))
        further_bytes = 0 if state is None else math.ceil(state.nbytes * further_slots / present_size)
        if further_bytes > 0 and not self._pool.take_host(self.carrier, further_bytes):
            self.stays(present_size, "the host has no memory for a larger group")
            return
        try:
            self.trial.make_ready(size)
        except Exception as error:
            self._pool.give_host(self.carrier, further_bytes)
            if not isinstance(error, BudgetError | UnfusableError):
                self.stays(present_size, f"no plan of a larger group can be made: {error}")
                raise  # to the log of the `building` thread
            self.stays(present_size, f"no plan of a larger group fits a device: {error}")
            return
        self._granted_size = max(size, self._granted_size)
        self._ready.add(size)
        self.wake()

    def stays(self, size: int, why: str) -> None:
        """As of `PairDelegate`; jobs promised a further slot continue elsewhere."""
        _LOGGER.info("a group of %d trials takes no more members: %s", size, why)
        with self._pool.changed:
            self.most = self.trial.most = size
            promised_entries, self.arrivals = self.arrivals, []
        if promised_entries:
            self._timer.do(partial(self._keeping.send_back, promised_entries))

    def measured(self, found: AutotuneResult, like: MemberBatchRequest) -> None:
        """As of `GroupDelegate`."""
        _FUSION_LOGGER.info("measured: %s", found.told)
        log_measured(self._pool.log, self.carrier.key, found)
        if self._unplanned is not None and self._unplanned.is_compared and found.is_slower:
            # On the `building` thread: a measurement takes a while, and the group goes on meanwhile.
            self._building.do(partial(self._compare, self._unplanned, found, like))

    def _compare(self, unplanned: SmallerGroupFallback, found: AutotuneResult, like: MemberBatchRequest) -> None:
        """End the group if smaller groups without a plan are faster; the members continue in such groups."""
        with self._pool.changed:
            member = next((entry.trial for entry in self.entries if entry.trial is not None), None)
        if member is None or self.trial.goes_back:
            return
        try:
            seconds_each = unplanned.seconds(member, like) / unplanned.size
        except Exception:  # without a comparison, planned steps go on
            _FUSION_LOGGER.info("steps that need no plan cannot be timed beside planned ones", exc_info=True)
            return
        if found.seconds_each > seconds_each:
            # The size first: the group may end as soon as its trial sees the flag.
            self.goes_back_to, self.trial.goes_back = unplanned.size, True
        _FUSION_LOGGER.info(
            "planned steps of %s %s: one takes %.3g ms for each trial, and one without a plan, of %d, %.3g ms",
            " + ".join(map(str, found.sizes)),
            "prove slower and are given up" if self.trial.goes_back else "go on",
            found.seconds_each * 1e3,
            unplanned.size,
            seconds_each * 1e3,
        )

    def _entry_of(self, seat: GroupSlot) -> FusedJob:
        return next(entry for entry in self.entries if entry.seat is seat)


def tell(entry: FusedJob, report: PendingReport) -> bool:
    """Announce a report to a job's driver; return False if no answer is expected. Under the pool's lock."""
    job = entry.job
    if job.events is None or not entry.told.takes(report):
        return False
    job.enter("waiting")
    if entry.told.tell(report):
        job.events.put(Reported(job, report.step, dict(report.metrics)))
    return True
