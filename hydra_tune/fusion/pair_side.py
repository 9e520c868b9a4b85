"""`Side`: one of the two groups of a pair, and the desk that stands for the pair's own."""

import time
from collections.abc import Sequence
from typing import Protocol

from hydra_tune.fusion.attendance import PATIENCE_SECONDS
from hydra_tune.fusion.group import GroupTrial
from hydra_tune.fusion.measured import Measured
from hydra_tune.fusion.member import Wanted
from hydra_tune.fusion.seat import Desk, Seat
from hydra_tune.train.step import PendingUnit
from hydra_tune.train.trial import Report


class PairDesk(Desk, Protocol):
    """Whom both groups ask and tell."""

    def stays(self, size: int, why: str) -> None:
        """There are no more places than so many from now on."""


class Side(Desk):
    """One of the two groups, and its desk.

    Args:
        desk: that of both.

    Attributes:
        group: the group, once it is made.
        other: the other of the two.
        pending: the unit that is due.
        waits_until: how long the other group waits for its answers, by the monotonic clock; None while it needs none.
        is_over: whether it has ended.
    """

    group: GroupTrial
    other: "Side"

    def __init__(self, desk: PairDesk) -> None:
        self.pending: PendingUnit | None = None
        self.waits_until: float | None = None
        self.is_over = False
        self._desk = desk

    def go_on(self) -> None:
        """Have the group go on to the next unit that is due, if it can."""
        if self.pending is not None or self.is_over:
            return
        step = self.group.advance()
        if isinstance(step, Report):
            if self.waits_until is None:
                self.waits_until = time.monotonic() + PATIENCE_SECONDS
            return
        assert step is None or isinstance(step, PendingUnit), "groups take batches whole"
        self.waits_until, self.pending, self.is_over = None, step, step is None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for answers."""
        return self.waits_until is not None and not self.is_over

    # The group's desk.

    def ended(self, seat: Seat) -> None:
        """As of `Desk`."""
        self._desk.ended(seat)

    def reported(self, seat: Seat) -> None:
        """As of `Desk`."""
        self._desk.reported(seat)

    def left(self, seat: Seat) -> None:
        """As of `Desk`."""
        self._desk.left(seat)

    def waiting(self) -> int:
        """As of `Desk`."""
        return self._desk.waiting()

    def joining(self, free: int, *, ends: bool) -> Sequence[Seat]:
        """As of `Desk`."""
        return self._desk.joining(free, ends=ends and self.other.is_over)

    def make_ready(self, size: int) -> bool:
        """As of `Desk`; while there are two, each keeps its size."""
        return self.other.is_over and self._desk.make_ready(size)

    def measured(self, found: Measured, like: Wanted) -> None:
        """As of `Desk`."""
        self._desk.measured(found, like)
