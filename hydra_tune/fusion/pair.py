"""`PairTrial`: two groups of one kind as one trial, whose steps are run in turn as the planner has merged them.

Each of the two is a group as any: it has places, state, plans and evaluations of its own, and its members report, are stopped
and saved, leave and come there. This is who has them go on. Where both are about to make training steps of one kind of batch,
these are one unit (`pair_round.py`); all else is run by itself, so that what a member comes to has the bits of its group alone.

Note: keeping together. A group that is about to train waits for the other while that has something else to do, and while it
waits for answers to reports for no longer than members of one group wait for each other. Of two that want batches of
different kinds the one that is behind goes first.

Note: one of the two. Where one group has ended, its state is given up, and the other goes on as a single group.

Note: going back. A pair that is to end before its members are over ends where both are about to make steps in turn, of which
neither has begun any.
"""

import logging
import time
from collections.abc import Hashable

from hydra_tune.devices.device import Device
from hydra_tune.errors import BudgetError, UnfusableError
from hydra_tune.fusion.group import GroupTrial
from hydra_tune.fusion.measured import Ways
from hydra_tune.fusion.member import Member
from hydra_tune.fusion.pair_round import PairedSteps, PairRound
from hydra_tune.fusion.pair_side import PairDesk, Side
from hydra_tune.fusion.planned import StepPlanner
from hydra_tune.fusion.seat import Seat
from hydra_tune.memory.host import HostTier
from hydra_tune.memory.tenant import Tenant
from hydra_tune.shard.library import PlanLibrary, Prepared
from hydra_tune.train.step import PendingUnit
from hydra_tune.train.trial import Report, Trial

_LOGGER = logging.getLogger("hydra_tune.fusion")


class PairTrial(Trial):
    """Two groups under way.

    Args:
        sides: both; the first is no smaller than the second.
        groups: theirs.
        library: where plans come from.
        device: any device of the pool, for host memory.
        desk: that of both.
        planner: plans their steps.
        host, tenant: as of `Trial`.

    Attributes:
        hands_back, goes_back: as of `GroupTrial`.
    """

    hands_back = False
    goes_back = False

    def __init__(
        self,
        sides: tuple[Side, Side],
        groups: tuple[GroupTrial, GroupTrial],
        library: PlanLibrary,
        device: Device,
        desk: PairDesk,
        planner: StepPlanner,
        host: HostTier | None = None,
        tenant: Tenant | None = None,
    ) -> None:
        super().__init__(groups[0].task, library, device, None, host, tenant)
        self._sides = first, second = sides
        first.group, second.group = groups
        first.other, second.other = second, first
        second.group.beside = first.group
        for group in groups:
            group.takes_turns = True
        self._desk = desk
        self._planner = planner
        self._known: dict[tuple[Prepared, Prepared], Ways[PairedSteps]] = {}
        self._unplanned: set[Hashable] = set()
        self._running: list[tuple[Side, PendingUnit]] = []
        self._round: PairRound | None = None
        self._waits = 0

    # What the pool runs.

    def advance(self) -> PendingUnit | Report | None:
        """As of `Trial`."""
        self._running, self._round = [], None
        going = self._live
        for side in going:
            side.group.goes_back = self.goes_back  # which it does if it is the only one
            side.go_on()
        for side in going:
            if side.is_over:
                self._end(side)
        self._show()
        return self._next()

    def _next(self) -> PendingUnit | Report | None:
        due = [side for side in self._live if side.pending is not None]
        if not self._live:
            return None
        alone = next((side for side in due if side.group.offer is None), None)
        if alone is not None:
            return self._due(alone)
        if len(due) == len(self._live) == 2:  # noqa: PLR2004 - both
            return None if self.goes_back else self._both()
        if not due or self._is_patient:
            self._waits += 1
            return Report(step=self._waits, metrics={})
        return self._by_itself(due[0])

    def _both(self) -> PendingUnit:
        """Both are about to make steps."""
        sides = self._sides
        first, second = (side.group.offer for side in sides)
        assert first is not None
        assert second is not None
        if first.kind != second.kind:
            return self._by_itself(min(sides, key=_steps_done))
        steps = self._steps()
        if steps is None:
            return self._by_itself(min(sides, key=_steps_done))
        for side, offer in zip(sides, (first, second), strict=True):
            side.group.takes_part(offer)
            assert side.pending is not None
            self._running.append((side, side.pending))
            side.pending = None
        self._round = PairRound((first.half, second.half), steps)
        return self._round.unit()

    def _steps(self) -> Ways[PairedSteps] | None:
        """Who runs the steps that both offer; None where they cannot be run in turn."""
        first, second = (side.group.offer for side in self._sides)
        assert first is not None
        assert second is not None
        key, like = (first.prepared, second.prepared), first.wanted
        if key in self._unplanned:
            return None
        if key not in self._known:
            try:
                planned = self._planner.planned(first.stack, second.stack)
            except (UnfusableError, BudgetError) as error:
                _LOGGER.info("two groups of trials make their steps one after the other, not in turn: %s", error)
                self._unplanned.add(key)
                return None
            states = first.state_of(planned, 0, self._device), second.state_of(planned, 1, self._device)
            self._known[key] = Ways(
                planned,
                lambda one: PairedSteps(one, states),
                self._planner.replanned,
                lambda found: self._desk.measured(found, like),
            )
        return self._known[key]

    def _due(self, side: Side) -> PendingUnit:
        unit, side.pending = side.pending, None
        assert unit is not None
        self._running = [(side, unit)]
        return unit

    def _by_itself(self, side: Side) -> PendingUnit:
        """The steps that a group offers, run without the other's."""
        side.pending = None
        side.go_on()  # what it offered has not been run, which it finds now
        return self._due(side)

    def finished(self, unit: PendingUnit, seconds: float) -> None:
        """As of `Trial`; of steps in turn each group has its share."""
        del unit
        with self._lock:
            self.compute_seconds += seconds
            self.units_run += 1
        shares = (1.0,) if self._round is None else self._round.shares
        for (side, own), share in zip(self._running, shares, strict=True):
            side.group.finished(own, seconds * share)
        if self._round is not None:
            self._round.measured()

    def close(self, *, keep: bool) -> None:
        """As of `Trial`; members that are not over are handed back, or closed."""
        self.state = None
        self._let_go_of_steps()
        for side in self._live:
            side.group.hands_back = self.hands_back
            side.group.close(keep=False)
        super().close(keep=keep)

    # What it is made of.

    @property
    def _live(self) -> list[Side]:
        return [side for side in self._sides if not side.is_over]

    @property
    def _is_patient(self) -> bool:
        """Whether a group that could go on still waits for the other."""
        waiting = [side.waits_until for side in self._live if side.is_waiting and side.waits_until is not None]
        return bool(waiting) and time.monotonic() < min(waiting)

    def _end(self, side: Side) -> None:
        """A group is over; the other goes on by itself."""
        self._let_go_of_steps()
        watcher = None if side.group.state is None else side.group.state.watcher
        side.group.close(keep=False)
        if side.other.is_over:
            return
        left = side.other.group
        left.takes_turns = False
        if left.state is not None:
            if watcher is not None and left.state.watcher is None:
                left.state.watch(watcher)
            self._share.change([left.state.layout.plan])
        if side.other.pending is not None and left.offer is not None:
            side.other.pending = None
            side.other.go_on()
        self._desk.stays(len(left.seats), "the group that took turns with it has ended")
        _LOGGER.info("a group of %d trials goes on by itself: the other of its pair has ended", len(left.seats))

    def _let_go_of_steps(self) -> None:
        for ways in self._known.values():
            ways.close()
        self._known.clear()

    def _show(self) -> None:
        """What others look at is that of the first group that there is."""
        shown = next((side.group for side in self._live), None)
        self.state = None if shown is None else shown.state
        if shown is not None:
            self.num_shards, self.optimizer_placement = shown.num_shards, shown.optimizer_placement

    @property
    def groups(self) -> list[GroupTrial]:
        """Those that are not over."""
        return [side.group for side in self._live]

    @property
    def seats(self) -> list[Seat]:
        """The members, by place, those of the first group before those of the second."""
        return [seat for group in self.groups for seat in group.seats]

    @property
    def any_device(self) -> Device:
        """Any device of the pool, for host memory."""
        return self._device

    @property
    def most(self) -> int:
        """Places that there may be."""
        return sum(group.most for group in self.groups)

    @most.setter
    def most(self, most: int) -> None:
        for group in self.groups:
            group.most = min(group.most, most)

    @property
    def is_due(self) -> bool:
        """As of `GroupTrial`; where both wait, or one could go on, they go on together unless it takes long."""
        waiting = [side for side in self._live if side.is_waiting]
        due = [side for side in waiting if side.group.is_due]
        if len(due) == len(waiting):
            return True
        return (bool(due) or self.is_held) and not self._is_patient

    @property
    def is_held(self) -> bool:
        """Whether a group could go on, and waits for the other."""
        return any(side.pending is not None for side in self._live)

    def admits(self, member: Member) -> bool:
        """Whether a member that comes leaves the others' bits alone."""
        return all(group.admits(member) for group in self.groups)

    def knows(self, architecture: Hashable) -> bool:
        """As of `GroupTrial`."""
        return all(group.knows(architecture) for group in self.groups)

    def make_ready(self, size: int) -> None:
        """As of `GroupTrial`; while there are two, each keeps its size."""
        if len(self.groups) == 1:
            self.groups[0].make_ready(size)

    # What the scheduler and the host's memory are told.

    @property
    def remaining_seconds(self) -> float:
        """What the member that ends last has before it: its own steps, and those of the other group meanwhile."""
        return sum(group.remaining_seconds for group in self.groups)

    @property
    def step_seconds(self) -> float:
        """Seconds of one step of each."""
        return sum(group.step_seconds for group in self.groups)

    @property
    def alike(self) -> str | None:
        """As of `Trial`."""
        names = [group.alike for group in self.groups]
        return None if None in names else " and ".join(str(name) for name in names)

    @property
    def units_planned(self) -> int | None:
        """Not known, as of `GroupTrial`."""
        return None

    @property
    def host_bytes(self) -> int:
        """As of `Trial`, with the copies of what is swapped."""
        return sum(group.host_bytes for group in self.groups) + self._swapped_bytes

    @property
    def fixed_host_bytes(self) -> int:
        """As of `Trial`; these copies never go to disk."""
        return sum(group.fixed_host_bytes for group in self.groups) + self._swapped_bytes

    @property
    def largest_host_bytes(self) -> int:
        """As of `Trial`."""
        return max((group.largest_host_bytes for group in self.groups), default=0)

    @property
    def _swapped_bytes(self) -> int:
        return sum(ways.host_bytes for ways in self._known.values())


def _steps_done(side: Side) -> int:
    assert side.group.offer is not None
    return side.group.offer.steps_done
