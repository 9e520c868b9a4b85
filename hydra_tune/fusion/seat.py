"""A member's place in a group, and whom a group asks and tells about its places."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from hydra_tune.fusion.measured import Measured
from hydra_tune.fusion.member import Member, NoMore, Wanted
from hydra_tune.train.trial import Report


class Seat:
    """A member's place in a group.

    Args:
        member: who has it.
        waits: whether its reports wait for an answer.

    Attributes:
        wants: what the member wants next; None before it has begun, and when it is over.
        is_ahead: whether it has gone on to that within a unit, and what comes of it has not been seen to.
        waits_until: how long those that are answered wait for it, by the monotonic clock; None until its report is passed on.
        is_answered: whether that report has been answered.
        most_together: the most members, itself counted, that its group had when it was computed.
        is_paused: whether the member is to leave, to come back later; may be set at any time, on any thread.
        is_handed_back: whether the group has ended without it, and its member can go on elsewhere from where it was.
        stop: how it is to end, "pruned" or "cancelled", if it is; may be set at any time, on any thread.
        status: how it has ended; None while it has not.
        error: why it has failed.
        module, optimizer: of a member that has completed, with its weights and state.
    """

    def __init__(self, member: Member, *, waits: bool) -> None:
        self.member = member
        self.waits = waits
        self.wants: Wanted | NoMore | Report | None = None
        self.is_ahead = False
        self.waits_until: float | None = None
        self.is_answered = False
        self.most_together = 1
        self.is_paused = False
        self.is_handed_back = False
        self.stop: str | None = None
        self.status: str | None = None
        self.error: BaseException | None = None
        self.module: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for an answer."""
        return self.status is None and self.stop is None and isinstance(self.wants, Report) and not self.is_answered

    def go_on(self) -> None:
        """Have the member run its own code up to what it wants next.

        Raises:
            BaseException: whatever that code raises.
        """
        self.wants, self.waits_until, self.is_answered = self.member.go_on(), None, False


def vacant(like: Seat) -> Seat:
    """A place that nobody has, computed as `like` is, and masked."""
    seat = Seat(like.member, waits=False)
    seat.status = "vacant"
    return seat


class Desk(Protocol):
    """Whom a group asks and tells about its places, on the thread that has the group go on."""

    def ended(self, seat: Seat) -> None:
        """A member is over."""

    def reported(self, seat: Seat) -> None:
        """A member has reported; sets `is_answered`, now or later, on any thread."""

    def left(self, seat: Seat) -> None:
        """A member that is paused has left with its state; it may come back, to this group or another."""

    def waiting(self) -> int:
        """How many members would come if there were places for them."""

    def joining(self, free: int, *, ends: bool) -> Sequence[Seat]:
        """Members that come now.

        Args:
            free: places that nobody has.
            ends: whether the group is over unless somebody comes.
        """

    def make_ready(self, size: int) -> bool:
        """Whether the group's plans for another size are ready; if not, they are being made meanwhile."""

    def measured(self, found: Measured, like: Wanted) -> None:
        """Planned steps, of batches like these, have proved to take so long."""


class ClosedDesk(Desk):
    """Of a group that nobody comes to, and whose members are of no interest to others."""

    def ended(self, seat: Seat) -> None:
        """As of `Desk`."""

    def reported(self, seat: Seat) -> None:
        """As of `Desk`; the group goes on."""
        seat.is_answered = True

    def left(self, seat: Seat) -> None:
        """As of `Desk`."""

    def waiting(self) -> int:
        """Nobody."""
        return 0

    def joining(self, free: int, *, ends: bool) -> Sequence[Seat]:
        """Nobody."""
        del free, ends
        return ()

    def make_ready(self, size: int) -> bool:
        """The size stays."""
        del size
        return False

    def measured(self, found: Measured, like: Wanted) -> None:
        """As of `Desk`."""
