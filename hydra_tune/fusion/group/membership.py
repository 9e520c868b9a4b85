"""`MemberCoordinator`: advance the members of a group between two steps.

Between steps members continue to their next batch, report and receive answers, end, leave, and join. `GroupTrial`
(`group_trial.py`) calls `settled` before each step, round or evaluated batch, and `advance` for every computed member
afterwards. `GroupExecutor` (`group_executor.py`) calls `advance` between the batches of a step of several batches, and
`go_on` inside the unit of a round. `LiveGroup` (`pool/fusion/live_group.py`) and `PairSide` (`fusion/runtime/pair_side.py`)
wait for `PATIENCE_SECONDS` too. The module must not know how batches are computed.

Note: lock-step. Every member names the batch to compute next, and members with the same kind of batch compute together
(`batch_bucketing.py`). A member whose reports are answered (`GroupSlot.waits`) rests from a report until the answer
arrives. The group waits only when all members rest.

Note: order. Members end and leave first, then the stack changes its size, then new members join, and answered members
continue last. An error of a member's code is stored in the slot and ends only this member. Other threads only set flags
of a slot (`stop`, `is_paused`, `is_answered`), and may ask `is_due`; there is no lock.
"""

import time
from collections.abc import Callable, Generator

from hydra_tune.errors import TaskError
from hydra_tune.fusion.group.member import MemberBatchRequest
from hydra_tune.fusion.group.slot import GroupDelegate, GroupSlot
from hydra_tune.fusion.group.slot_table import SlotTable
from hydra_tune.train.trial import PendingReport

PATIENCE_SECONDS = 0.05
"""Longest wait of answered members for the other members of their report."""


class MemberCoordinator:
    """Advances the members of a group.

    Args:
        desk: receives events and answers questions about the slots, on the thread that advances the group.
        resize: changes the number of slots, if a change is due and prepared.
        compare: may compare captured steps with eager steps, where a member is about to report; raises a `TaskError` if
            the steps of this member differ.
    """

    def __init__(
        self,
        places: SlotTable,
        desk: GroupDelegate,
        resize: Callable[[], None],
        compare: Callable[[GroupSlot], None],
    ) -> None:
        self._places = places
        self._compare = compare
        self._desk = desk
        self._resize = resize
        self._waits = 0

    def settled(self) -> Generator[PendingReport, None, None]:
        """Advance the members until at least one wants a batch computed, or none is left."""
        while True:
            self._attend()
            if not self._places.live or any(isinstance(seat.wants, MemberBatchRequest) for seat in self._places.live):
                return
            self._waits += 1
            # A report without metrics tells the pool that the group waits.
            yield PendingReport(step=self._waits, metrics={})

    def _attend(self) -> None:
        """Process everything due between two steps."""
        # First, because members that end or leave make room for those that join.
        for seat in self._places.live:
            self._attend_to(seat)
        # Resize before asking for new members: a larger stack has vacant slots to offer.
        self._resize()
        free = self._places.vacant
        new_seats = self._desk.joining(len(free), ends=not self._places.live)
        for index, seat in zip(free, new_seats, strict=False):
            self._take_in(index, seat)
            self._attend_to(seat)
        if self._answers_are_in:
            for seat in self._places.live:
                if isinstance(seat.wants, PendingReport) and seat.is_answered:
                    self.advance(seat)
                    self._attend_to(seat)

    def _attend_to(self, seat: GroupSlot) -> None:
        """Advance a member until it wants a batch or waits for an answer."""
        while seat.status is None:
            if seat.stop is not None:
                self._end(seat, seat.stop)
            elif seat.is_paused:
                self._leave(seat)
                return
            elif isinstance(seat.wants, PendingReport) and seat.waits_until is None and not self._is_right(seat):
                self._end(seat, "failed")
            elif seat.wants is None or (isinstance(seat.wants, PendingReport) and not seat.waits):
                self.advance(seat)
            else:
                if isinstance(seat.wants, PendingReport) and seat.waits_until is None:
                    seat.waits_until = time.monotonic() + PATIENCE_SECONDS
                    self._desk.reported(seat)
                return

    def _is_right(self, seat: GroupSlot) -> bool:
        try:
            self._compare(seat)
        except TaskError as error:
            seat.error = error
        return seat.error is None

    @property
    def _answers_are_in(self) -> bool:
        """Whether answered members continue now.

        Members that report together also continue together, and so stay in the same batches. After `PATIENCE_SECONDS`
        answered members no longer wait for the others.
        """
        waiting = [seat.waits_until for seat in self._places.live if seat.is_waiting and seat.waits_until is not None]
        return not waiting or time.monotonic() >= min(waiting)

    @property
    def is_due(self) -> bool:
        """Whether a waiting group has work to do; any thread may ask."""
        live = self._places.live
        answered = any(isinstance(seat.wants, PendingReport) and seat.is_answered for seat in live)
        return any(seat.stop is not None or seat.is_paused for seat in live) or (answered and self._answers_are_in)

    def advance(self, seat: GroupSlot) -> None:
        """Advance a member to its next request, or end the member."""
        if seat.stop is not None:
            self._end(seat, seat.stop)
            return
        # A round has already run this member's code to the next request; running the code again would skip a batch.
        if not seat.is_ahead:
            go_on(seat)
        seat.is_ahead = False
        if seat.error is not None:
            self._end(seat, "failed")
        elif seat.wants is None:
            self._end(seat, seat.member.outcome)

    def _end(self, seat: GroupSlot, status: str) -> None:
        member = seat.member
        if status == "completed":
            self._places.hand_out(seat)
            seat.module, seat.optimizer = member.built()
        seat.status, seat.wants = status, None
        try:
            member.close(keep=False)
        except Exception as error:  # noqa: BLE001 - closing the user's data iterator may fail
            seat.status, seat.error, seat.module, seat.optimizer = "failed", error, None, None
        self._desk.ended(seat)

    def _take_in(self, index: int, seat: GroupSlot) -> None:
        self._places.give(index, seat)
        seat.member.is_fused = True
        try:
            if seat.wants is None:  # the first `go_on` builds or restores the module and optimizer that `put_in` copies
                seat.go_on()
        except BaseException as error:  # noqa: BLE001 - as in `go_on`
            seat.error = error
            self._end(seat, "failed")
            return
        self._places.put_in(index)
        self._places.welcome(seat)

    def _leave(self, seat: GroupSlot) -> None:
        self._places.leave(seat)
        self._desk.left(seat)


def go_on(seat: GroupSlot) -> None:
    """Run a member's own code up to its next request; store an error instead of raising."""
    try:
        seat.go_on()
    except BaseException as error:  # noqa: BLE001 - an error in a trial's code ends only the trial
        seat.wants, seat.error = None, error
