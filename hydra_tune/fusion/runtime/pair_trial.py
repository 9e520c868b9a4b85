"""`PairTrial`: two groups of the same kind as a single trial, whose planned steps run in turn, merged by the planner.

Each of the two groups is an ordinary group, with its own slots, state, plans and evaluations; members report, are
stopped and saved, leave and join there. `PairTrial` advances both groups. When both are about to make training steps on
the same kind of batch, the steps form a single unit (`paired_unit.py`). All other work runs separately, so every member
gets the same bits as in its group alone. `GroupJobLauncher` (`pool/fusion/group_jobs.py`) makes a `PairTrial` when the
members found for a job are to train as two groups in turn, and `LiveGroup` (`pool/fusion/live_group.py`) treats the
pair like a group. The module must not decide on swaps: the planner does.

Note: threads. A single thread at a time advances the pair. Other threads may set `goes_back` and `most`, call `make_ready`, and
ask `is_due`, `is_held`, `admits` or `knows`, as of `GroupTrial`.

Note: staying together. A group that is about to train waits while the other has other work to do. While the other waits
for answers to reports, the group waits no longer than members of a group wait for each other. If the groups want
batches of different kinds, or their steps cannot be planned in turn, the group that is behind goes first.

Note: end of a group. When a group has ended, its state is released, and the other group continues alone. Merged steps are
bound to the states of both groups, so the steps are closed before either state.

Note: going back. A pair that must end before its members do ends at a moment when both groups are about to make steps
in turn and neither has begun.
"""

import logging
import time
from collections.abc import Hashable
from itertools import product

from typing_extensions import override

from hydra_tune.devices.device import Device
from hydra_tune.errors import BudgetError, UnfusableError
from hydra_tune.fusion.group.group_trial import GroupTrial
from hydra_tune.fusion.group.member import MemberTrial
from hydra_tune.fusion.group.slot import GroupSlot
from hydra_tune.fusion.runtime.pair_side import PairDelegate, PairSide
from hydra_tune.fusion.runtime.paired_unit import PairRound, PairStepRunner
from hydra_tune.fusion.runtime.plan_autotuner import StepPlanAutotuner, drop_stale
from hydra_tune.fusion.runtime.step_planner import StepPlanner
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.memory.trial_context import TrialMemoryContext
from hydra_tune.shard.partition.plan_cache import PlanLibrary, PreparedPlan
from hydra_tune.train.loop.batch_units import PendingUnit
from hydra_tune.train.trial import PendingReport, Trial

_LOGGER = logging.getLogger("hydra_tune.fusion")


class PairTrial(Trial):
    """Two running groups.

    Args:
        sides: both sides; the first group is at least as large as the second.
        device: any device of the pool, for host memory.
        desk: the delegate of the pair; each group asks its side instead.
    """

    hands_back = False
    goes_back = False

    def __init__(
        self,
        sides: tuple[PairSide, PairSide],
        groups: tuple[GroupTrial, GroupTrial],
        library: PlanLibrary,
        device: Device,
        desk: PairDelegate,
        planner: StepPlanner,
        host: HostTier | None = None,
        tenant: TrialMemoryContext | None = None,
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
        self._known: dict[tuple[PreparedPlan, PreparedPlan], StepPlanAutotuner[PairStepRunner]] = {}
        self._unplanned: set[Hashable] = set()
        self._running: list[tuple[PairSide, PendingUnit]] = []
        self._round: PairRound | None = None
        self._waits = 0

    # Interface to the pool.

    def advance(self) -> PendingUnit | PendingReport | None:
        """As of `Trial`."""
        self._running, self._round = [], None
        live_sides = self._live
        for side in live_sides:
            side.group.goes_back = self.goes_back  # takes effect only in a group that runs alone
            side.go_on()
        for side in live_sides:
            if side.is_over:
                self._end(side)
        self._show()
        return self._next()

    def _next(self) -> PendingUnit | PendingReport | None:
        due = [side for side in self._live if side.pending is not None]
        if not self._live:
            return None
        unpaired_side = next((side for side in due if side.group.offer is None), None)
        # Work that cannot run in turn (evaluations, steps of another
        # kind) goes first; the other group keeps its offer meanwhile.
        if unpaired_side is not None:
            return self._due(unpaired_side)
        if len(due) == len(self._live) == 2:  # noqa: PLR2004 - both
            return None if self.goes_back else self._both()
        if not due or self._is_patient:
            self._waits += 1
            return PendingReport(step=self._waits, metrics={})
        return self._by_itself(due[0])

    def _both(self) -> PendingUnit:
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

    def _steps(self) -> StepPlanAutotuner[PairStepRunner] | None:
        first, second = (side.group.offer for side in self._sides)
        assert first is not None
        assert second is not None
        key, like = (first.prepared, second.prepared), first.wanted
        if key in self._unplanned:
            return None
        if key not in self._known:
            drop_stale(self._known, set(product(*(side.group.plans for side in self._sides))))
            try:
                planned = self._planner.planned(first.stack, second.stack)
            except (UnfusableError, BudgetError) as error:
                _LOGGER.info("two groups of trials make their steps one after the other, not in turn: %s", error)
                # Not asked again: planning takes long, and the same steps would be refused again.
                self._unplanned.add(key)
                return None
            states = first.state_of(planned, 0, self._device), second.state_of(planned, 1, self._device)
            self._known[key] = StepPlanAutotuner(
                planned,
                lambda way: PairStepRunner(way, states),
                self._planner.replanned,
                lambda result: self._desk.measured(result, like),
            )
        return self._known[key]

    def _due(self, side: PairSide) -> PendingUnit:
        unit, side.pending = side.pending, None
        assert unit is not None
        self._running = [(side, unit)]
        return unit

    def _by_itself(self, side: PairSide) -> PendingUnit:
        side.pending = None
        side.go_on()  # the group sees that its offer was not run, and yields an ordinary unit
        return self._due(side)

    def finished(self, unit: PendingUnit, seconds: float) -> None:
        """As of `Trial`; divides the time of a merged unit between the groups."""
        with self._lock:
            self.compute_seconds += seconds
            self.units_run += self.units_in(unit)
        shares = (1.0,) if self._round is None else self._round.shares
        for (side, group_unit), share in zip(self._running, shares, strict=True):
            side.group.finished(group_unit, seconds * share)
        if self._round is not None:
            self._round.measured()

    @override
    def units_in(self, unit: PendingUnit) -> int:
        del unit
        return sum(side.group.units_in(group_unit) for side, group_unit in self._running)

    def close(self, *, keep: bool) -> None:
        """As of `Trial`; hands unfinished members back, or closes them."""
        self.state = None
        # Merged steps are bound to the states of both groups, so they go before either state.
        drop_stale(self._known, ())
        for side in self._live:
            side.group.hands_back = self.hands_back
            side.group.close(keep=False)
        super().close(keep=keep)

    # Groups and slots.

    @property
    def _live(self) -> list[PairSide]:
        return [side for side in self._sides if not side.is_over]

    @property
    def _is_patient(self) -> bool:
        waiting = [side.waits_until for side in self._live if side.is_waiting and side.waits_until is not None]
        return bool(waiting) and time.monotonic() < min(waiting)

    def _end(self, side: PairSide) -> None:
        """Close a group that has ended; the other continues alone."""
        drop_stale(self._known, ())
        watcher = None if side.group.state is None else side.group.state.watcher
        side.group.close(keep=False)
        if side.other.is_over:
            return
        remaining_group = side.other.group
        remaining_group.takes_turns = False
        if remaining_group.state is not None:
            # Observers watch the state of the first group, so hand the watcher over.
            if watcher is not None and remaining_group.state.watcher is None:
                remaining_group.state.watch(watcher)
            self._share.change([remaining_group.state.layout.plan])
        # The pending unit only makes sense in turn with the ended
        # group, so ask the remaining group for an ordinary unit.
        if side.other.pending is not None and remaining_group.offer is not None:
            side.other.pending = None
            side.other.go_on()
        self._desk.stays(len(remaining_group.seats), "the group that took turns with it has ended")
        _LOGGER.info(
            "a group of %d trials goes on by itself: the other of its pair has ended", len(remaining_group.seats)
        )

    def _show(self) -> None:
        shown = next((side.group for side in self._live), None)
        self.state = None if shown is None else shown.state
        if shown is not None:
            self.num_shards, self.optimizer_placement = shown.num_shards, shown.optimizer_placement

    @property
    def groups(self) -> list[GroupTrial]:
        """The groups that have not ended."""
        return [side.group for side in self._live]

    @property
    def seats(self) -> list[GroupSlot]:
        """The members, by slot, first group first."""
        return [seat for group in self.groups for seat in group.seats]

    @property
    def most(self) -> int:
        """Largest number of slots."""
        return sum(group.most for group in self.groups)

    @most.setter
    def most(self, most: int) -> None:
        for group in self.groups:
            group.most = min(group.most, most)

    @property
    def is_due(self) -> bool:
        """As of `GroupTrial`.

        If both groups wait, or if one could continue, the groups continue together, unless the other takes too long.
        """
        waiting = [side for side in self._live if side.is_waiting]
        due = [side for side in waiting if side.group.is_due]
        if len(due) == len(waiting):
            return True
        return (bool(due) or self.is_held) and not self._is_patient

    @property
    def is_held(self) -> bool:
        """Whether a group could continue but waits for the other."""
        return any(side.pending is not None for side in self._live)

    def admits(self, member: MemberTrial) -> bool:
        """Return whether a new member would leave the bits of the present members unchanged."""
        return all(group.admits(member) for group in self.groups)

    def knows(self, architecture: Hashable) -> bool:
        """As of `GroupTrial`."""
        return all(group.knows(architecture) for group in self.groups)

    def make_ready(self, size: int) -> None:
        """As of `GroupTrial`; while both groups run, each keeps its size."""
        if len(self.groups) == 1:
            self.groups[0].make_ready(size)

    # Figures for the scheduler and the host tier.

    @property
    def remaining_seconds(self) -> float:
        """Expected seconds of compute left, summed over the groups, because their steps alternate."""
        return sum(group.remaining_seconds for group in self.groups)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of each group, summed over the groups."""
        return sum(group.step_seconds for group in self.groups)

    @property
    def alike(self) -> str | None:
        """As of `Trial`."""
        names = [group.alike for group in self.groups]
        return None if None in names else " and ".join(str(name) for name in names)

    @property
    def units_planned(self) -> int | None:
        """None: unknown, as of `GroupTrial`."""
        return None

    @property
    def host_bytes(self) -> int:
        """As of `Trial`, plus the host copies of swapped tensors."""
        return sum(group.host_bytes for group in self.groups) + self._swapped_bytes

    @property
    def fixed_host_bytes(self) -> int:
        """As of `Trial`; host copies of swapped tensors never move to disk."""
        return sum(group.fixed_host_bytes for group in self.groups) + self._swapped_bytes

    @property
    def largest_host_bytes(self) -> int:
        """As of `Trial`."""
        return max((group.largest_host_bytes for group in self.groups), default=0)

    @property
    def _swapped_bytes(self) -> int:
        return sum(ways.host_bytes for ways in self._known.values())


def _steps_done(side: PairSide) -> int:
    assert side.group.offer is not None
    return side.group.offer.steps_done
