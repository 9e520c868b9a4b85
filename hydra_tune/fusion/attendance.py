"""What members do between two steps of their group: go on, report and are answered, end, leave and come.

Note: lock-step. Each member says which batch it wants computed next, and those that want the same kind of batch are computed
together (`buckets.py`). A member that has reported rests until it is answered; the group waits where all of them do.
"""

import time
from collections.abc import Callable, Generator

from hydra_tune.fusion.member import Wanted
from hydra_tune.fusion.places import Places
from hydra_tune.fusion.seat import Desk, Seat
from hydra_tune.train.trial import Report

PATIENCE_SECONDS = 0.05
"""For which members that are answered wait for those that have reported with them."""


class Attendance:
    """Sees to the members of one group.

    Args:
        places: theirs.
        desk: asked and told about the places, on the thread that has the group go on.
        resize: has more or fewer places, if that is due and prepared.
    """

    def __init__(self, places: Places, desk: Desk, resize: Callable[[], None]) -> None:
        self._places = places
        self._desk = desk
        self._resize = resize
        self._waits = 0

    def settled(self) -> Generator[Report, None, None]:
        """Go on when a member wants a batch computed, or nobody is left."""
        while True:
            self._attend()
            if not self._places.live or any(isinstance(seat.wants, Wanted) for seat in self._places.live):
                return
            self._waits += 1
            yield Report(step=self._waits, metrics={})

    def _attend(self) -> None:
        """Between two steps: members end, leave and report, those that are answered go on, and others come."""
        for seat in self._places.live:
            self._attend_to(seat)
        self._resize()
        free = self._places.vacant
        coming = self._desk.joining(len(free), ends=not self._places.live)
        for index, seat in zip(free, coming, strict=False):
            self._take_in(index, seat)
            self._attend_to(seat)
        if self._answers_are_in:
            for seat in self._places.live:
                if isinstance(seat.wants, Report) and seat.is_answered:
                    self.advance(seat)
                    self._attend_to(seat)

    def _attend_to(self, seat: Seat) -> None:
        """Have a member go on until it wants a batch, or waits for an answer."""
        while seat.status is None:
            if seat.stop is not None:
                self._end(seat, seat.stop)
            elif seat.is_paused:
                self._leave(seat)
                return
            elif seat.wants is None or (isinstance(seat.wants, Report) and not seat.waits):
                self.advance(seat)
            else:
                if isinstance(seat.wants, Report) and seat.waits_until is None:
                    seat.waits_until = time.monotonic() + PATIENCE_SECONDS
                    self._desk.reported(seat)
                return

    @property
    def _answers_are_in(self) -> bool:
        """Whether members that are answered go on now: those that report together go on together, unless it takes long."""
        waiting = [seat.waits_until for seat in self._places.live if seat.is_waiting and seat.waits_until is not None]
        return not waiting or time.monotonic() >= min(waiting)

    @property
    def is_due(self) -> bool:
        """Whether a group that waits has something to do; may be asked on any thread."""
        live = self._places.live
        answered = any(isinstance(seat.wants, Report) and seat.is_answered for seat in live)
        return any(seat.stop is not None or seat.is_paused for seat in live) or (answered and self._answers_are_in)

    def advance(self, seat: Seat) -> None:
        """Have a member go on to what it wants next, or end it."""
        if seat.stop is not None:
            self._end(seat, seat.stop)
            return
        if not seat.is_ahead:
            go_on(seat)
        seat.is_ahead = False
        if seat.error is not None:
            self._end(seat, "failed")
        elif seat.wants is None:
            self._end(seat, seat.member.outcome)

    def _end(self, seat: Seat, status: str) -> None:
        member = seat.member
        if status == "completed":
            self._places.hand_out(seat)
            seat.module, seat.optimizer = member.built()
        seat.status, seat.wants = status, None
        try:
            member.close(keep=False)
        except Exception as error:  # noqa: BLE001 - the user's data iterator may fail when it is closed
            seat.status, seat.error, seat.module, seat.optimizer = "failed", error, None, None
        self._desk.ended(seat)

    def _take_in(self, index: int, seat: Seat) -> None:
        """Give a place to a member that comes."""
        self._places.give(index, seat)
        seat.member.is_fused = True
        try:
            if seat.wants is None:  # what it goes on from is in its own module and optimizer then
                seat.go_on()
        except BaseException as error:  # noqa: BLE001 - as in `go_on`
            seat.error = error
            self._end(seat, "failed")
            return
        self._places.put_in(index)
        self._places.welcome(seat)

    def _leave(self, seat: Seat) -> None:
        """A member goes, with its state."""
        self._places.leave(seat)
        self._desk.left(seat)


def go_on(seat: Seat) -> None:
    """Run a member's own code until it wants something else."""
    try:
        seat.go_on()
    except BaseException as error:  # noqa: BLE001 - whatever a trial's code raises ends that trial alone
        seat.wants, seat.error = None, error
