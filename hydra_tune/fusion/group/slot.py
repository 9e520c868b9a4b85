"""`GroupSlot`: a member in its slot, with requests and end; `GroupDelegate`: the interface to the owner of a group.

`FusedJob` (`pool/fusion/fused_job.py`) makes a job's slot for a group, `FusionBenchmark`
(`fusion/matching/group_timing.py`) makes slots to time groups, and `SlotTable` (`slot_table.py`) fills vacant slots.
`MemberCoordinator` (`membership.py`) calls the delegate when a member ends, waits with a report or leaves, and when a
member may join. `GroupTrial` (`group_trial.py`) asks the delegate about the size, and has measured times passed to the
delegate. The delegate is `LiveGroup` (`pool/fusion/live_group.py`); for a group of a pair a `PairSide`
(`fusion/runtime/pair_side.py`), which asks `LiveGroup`; where steps are timed, a `ClosedGroupDelegate`.

Note: threads. A slot has no lock: only `is_paused`, `stop` and `is_answered` may be set on other threads than the thread
that advances the group. `FusedPool` (`pool/fusion/fused_pool.py`) and `GroupJobLauncher` (`pool/fusion/group_jobs.py`) set
these flags under the pool's lock.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from typing_extensions import override

from hydra_tune.fusion.group.member import MemberBatchRequest, MemberTrial, PartialStepRequest
from hydra_tune.fusion.runtime.plan_autotuner import AutotuneResult
from hydra_tune.train.trial import PendingReport


class GroupSlot:
    """A slot of a group: its member, the member's requests, and the member's end.

    Args:
        waits: whether the member's reports wait for an answer.

    Attributes:
        wants: the member's next request; None before the member has begun, and after the member has ended.
        is_ahead: whether the member already advanced to `wants` inside a unit, and the group has yet to act on the
            request.
        waits_until: deadline, by the monotonic clock, until which answered members wait for the answer to this member's
            report; None until the report is passed on.
        most_together: largest number of members, including the member, in the group during any of the member's
            computations.
        is_paused: whether the member is to leave and return later.
        is_handed_back: whether the group ended before the member did, so the member can continue elsewhere from its
            present state.
        stop: requested end, "pruned" or "cancelled"; None without a request.
        status: how the member ended; None while the member runs; "vacant" for a vacant slot.
        module, optimizer: set for a completed member, with its final weights and state.
    """

    def __init__(self, member: MemberTrial, *, waits: bool) -> None:
        self.member = member
        self.waits = waits
        self.wants: MemberBatchRequest | PartialStepRequest | PendingReport | None = None
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
        """Whether the member waits for an answer to a report."""
        return (
            self.status is None and self.stop is None and isinstance(self.wants, PendingReport) and not self.is_answered
        )

    def go_on(self) -> None:
        """Run the member's own code up to its next request.

        Raises:
            BaseException: any error of the member's code.
        """
        self.wants, self.waits_until, self.is_answered = self.member.go_on(), None, False


def vacant(like: GroupSlot) -> GroupSlot:
    """Return a vacant slot: computed like `like`, and masked.

    The vacant slot names the member of `like`, which may meanwhile train in another slot or outside the group. So
    nothing may draw from, write to or count for a member through a slot that is not active.
    """
    # The slot still computes, so it needs a member for the stacked module, streams and rules.
    seat = GroupSlot(like.member, waits=False)
    seat.status = "vacant"
    return seat


class GroupDelegate(Protocol):
    """Interface that a group calls about its slots, on the thread that advances the group."""

    def ended(self, seat: GroupSlot) -> None:
        """A member has ended."""

    def reported(self, seat: GroupSlot) -> None:
        """A member whose reports wait has reported; the delegate sets `is_answered`, now or later, on any thread."""

    def left(self, seat: GroupSlot) -> None:
        """A paused member has left with its state; the member may return to the same group or join another."""

    def waiting(self) -> int:
        """Return the number of members that would join if there were vacant slots."""

    def joining(self, free: int, *, ends: bool) -> Sequence[GroupSlot]:
        """Return members that join now; with `ends`, the group ends unless a member joins."""

    def make_ready(self, size: int) -> bool:
        """Return whether the group's plans for another size are ready.

        Otherwise start making the plans in the background.
        """

    def measured(self, found: AutotuneResult, like: MemberBatchRequest) -> None:
        """Receive the measured times of planned steps, for batches like `like`."""


class ClosedGroupDelegate(GroupDelegate):
    """Delegate of a group that no member joins and no observer watches."""

    @override
    def ended(self, seat: GroupSlot) -> None: ...

    @override
    def reported(self, seat: GroupSlot) -> None: ...

    @override
    def left(self, seat: GroupSlot) -> None: ...

    def waiting(self) -> int:
        """Return 0: no member waits."""
        return 0

    def joining(self, free: int, *, ends: bool) -> Sequence[GroupSlot]:
        """Return no members."""
        del free, ends
        return ()

    def make_ready(self, size: int) -> bool:
        """Return False: the size never changes."""
        del size
        return False

    @override
    def measured(self, found: AutotuneResult, like: MemberBatchRequest) -> None: ...
