"""`PairSide`: a group of a pair, with a delegate that forwards to the pair's delegate.

`GroupJobLauncher` (`pool/fusion/group_jobs.py`) makes both sides with the pair. `PairTrial` (`pair_trial.py`) advances
both whenever the pool asks the pair for its next unit; a group calls its side, as delegate, between two steps.

Note: threads. A group calls its side on the thread that advances the pair, and other threads only read (`PairTrial.is_due`), so
a side needs no lock. A side must not decide who joins: the pair's delegate (`LiveGroup`, `pool/fusion/live_group.py`) does.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from typing_extensions import override

from hydra_tune.fusion.group.group_trial import GroupTrial
from hydra_tune.fusion.group.member import MemberBatchRequest
from hydra_tune.fusion.group.membership import PATIENCE_SECONDS
from hydra_tune.fusion.group.slot import GroupDelegate, GroupSlot
from hydra_tune.fusion.runtime.plan_autotuner import AutotuneResult
from hydra_tune.train.loop.batch_units import PendingUnit
from hydra_tune.train.trial import PendingReport


class PairDelegate(GroupDelegate, Protocol):
    """The delegate of both groups."""

    def stays(self, size: int, why: str) -> None:
        """Limit the number of slots to `size` from now on, for the given reason."""


class PairSide(GroupDelegate):
    """A group of a pair, and the group's delegate.

    Attributes:
        waits_until: deadline, by the monotonic clock, until which the other group waits for answers to this group; None
            while no answer is outstanding.
    """

    group: GroupTrial
    other: "PairSide"

    def __init__(self, desk: PairDelegate) -> None:
        self.pending: PendingUnit | None = None
        self.waits_until: float | None = None
        self.is_over = False
        self._desk = desk

    def go_on(self) -> None:
        """Advance the group to its next unit, if possible."""
        if self.pending is not None or self.is_over:
            return
        step = self.group.advance()
        if isinstance(step, PendingReport):
            # The deadline counts from the first of several waits, or the other group would wait on and on.
            if self.waits_until is None:
                self.waits_until = time.monotonic() + PATIENCE_SECONDS
            return
        assert step is None or isinstance(step, PendingUnit), "groups take batches whole"
        self.waits_until, self.pending, self.is_over = None, step, step is None

    @property
    def is_waiting(self) -> bool:
        """Whether the group waits for answers."""
        return self.waits_until is not None and not self.is_over

    # Delegate of the group.

    @override
    def ended(self, seat: GroupSlot) -> None:
        self._desk.ended(seat)

    @override
    def reported(self, seat: GroupSlot) -> None:
        self._desk.reported(seat)

    @override
    def left(self, seat: GroupSlot) -> None:
        self._desk.left(seat)

    @override
    def waiting(self) -> int:
        return self._desk.waiting()

    @override
    def joining(self, free: int, *, ends: bool) -> Sequence[GroupSlot]:
        # A group with no members ends the job only if the other group has ended too.
        return self._desk.joining(free, ends=ends and self.other.is_over)

    def make_ready(self, size: int) -> bool:
        """As of `GroupDelegate`; False while the other group runs, so each group of a pair keeps its size."""
        return self.other.is_over and self._desk.make_ready(size)

    @override
    def measured(self, found: AutotuneResult, like: MemberBatchRequest) -> None:
        self._desk.measured(found, like)
