"""How the batches that members of a group want are computed together: stacked, as units; each is given what comes of it."""

import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

from hydra_tune.devices.device import Device
from hydra_tune.fusion.attendance import go_on
from hydra_tune.fusion.batches import StackedBatches
from hydra_tune.fusion.kinds import wanted_of
from hydra_tune.fusion.measured import Ways
from hydra_tune.fusion.member import Wanted
from hydra_tune.fusion.optimizers import StackedOptimizer
from hydra_tune.fusion.pair_round import Half
from hydra_tune.fusion.places import Places
from hydra_tune.fusion.planned_round import PlannedRound, PlannedSteps
from hydra_tune.fusion.rounds import Round, Rules
from hydra_tune.fusion.seat import Seat
from hydra_tune.fusion.steps import GroupEvaluation, GroupStep
from hydra_tune.fusion.tails import Rows
from hydra_tune.shard.batch import Leaves
from hydra_tune.train.state import ModelState
from hydra_tune.train.step import PendingUnit
from hydra_tune.train.training_batch import Part

_UNKNOWN = 0  # batches of a step of which none is known to be the last before it has run


class Computing:
    """Computes for the members of one group.

    Args:
        places: theirs.
        device: any device of the pool, for host memory.

    Attributes:
        rows: who has which results, of the plan that runs; None where all have all.
        round: the one under way, if any.
    """

    def __init__(self, places: Places, device: Device) -> None:
        self._places = places
        self._device = device
        self.rows: Rows | None = None
        self.round: Round | None = None

    def batches_of(self, bucket: Sequence[Seat], like: Wanted | None) -> StackedBatches:
        """The members' batches; a member that rests computes on somebody else's."""
        wanted = {id(seat): wanted_of(seat) for seat in bucket}
        first = wanted_of(bucket[0])
        return StackedBatches([wanted.get(id(seat), first) for seat in self._places.seats], like)

    def go_round(
        self,
        bucket: Sequence[Seat],
        part: Part,
        batches: StackedBatches,
        resting: Collection[int],
        like: Wanted | None,
        planned: Ways[PlannedSteps] | None = None,
        *,
        is_all: bool = True,
    ) -> Generator[PendingUnit, None, int]:
        """A unit of several steps, planned or not, in which the members go on if these are all; returns how many."""
        given = self._of_round(bucket, part, batches, resting, like, is_all=is_all)
        self.round = going = Round(*given) if planned is None else PlannedRound(*given, planned)
        try:
            yield going.unit()
        finally:
            self.round = None
        return going.steps

    def half(
        self,
        bucket: Sequence[Seat],
        part: Part,
        batches: StackedBatches,
        resting: Collection[int],
        *,
        is_all: bool,
    ) -> Half:
        """The same to be run in turn with another group's."""
        return Half(*self._of_round(bucket, part, batches, resting, None, is_all=is_all))

    def _of_round(
        self,
        bucket: Sequence[Seat],
        part: Part,
        batches: StackedBatches,
        resting: Collection[int],
        like: Wanted | None,
        *,
        is_all: bool,
    ) -> tuple[Rules, StackedBatches, Leaves, Callable[[Sequence[Any]], None], Callable[[], StackedBatches | None]]:
        """The arguments of a `Round`."""
        state = self._places.state
        assert state is not None
        alike = [wanted_of(bucket[0])] if like is None else [wanted_of(seat) for seat in bucket]
        rules = Rules(
            plan=part.plan,
            times=part.times,
            state=state,
            streams=self._places.streams,
            gradients=self._places.gradients,
            resting=resting,
        )

        def next_batches() -> StackedBatches | None:
            if not is_all or any(seat.stop is not None or seat.is_paused for seat in bucket):
                return None
            for seat in bucket:
                go_on(seat)
                seat.is_ahead = True
            if not all(any(_wants_alike(seat, one) for one in alike) for seat in bucket):
                return None
            for seat in bucket:
                seat.is_ahead = False
            return self.batches_of(bucket, like)

        def settle(made: Sequence[Any]) -> None:
            if part.plan.mode == "train":
                self._take_losses(made, resting)
            else:
                self._take_values(made, resting)

        return rules, batches, part.leaves, settle, next_batches

    def step(self, part: Part, state: ModelState, resting: Collection[int]) -> Generator[PendingUnit, None, None]:
        """A step of the members that do not rest."""
        step = GroupStep(1, state, self._places.streams, self._device, self._places.gradients)
        step.resting = tuple(resting)
        try:
            yield from step.batch(part)
            yield from step.finish()
            self._take_losses([step.member_losses], resting)
        finally:
            step.close()

    def accumulated(
        self,
        members: Sequence[Seat],
        prepare: Callable[[Sequence[Seat]], tuple[Sequence[Seat], Part, Collection[int]]],
        advance: Callable[[Seat], None],
    ) -> Generator[PendingUnit, None, None]:
        """A step of several batches of each of some members, which begin it together.

        In between each goes on to its next batch, or is over; those that then want another kind of batch are computed by
        themselves. The update is made when each has had all of its batches, or as many as its data had left.

        Args:
            members: who want their first batch.
            prepare: given those that want a batch, who of them are computed next, what, and which places rest meanwhile.
            advance: has a member go on.
        """
        places, step = self._places, None
        left = {id(seat): seat.member.task.accumulate for seat in members}
        try:
            while going := [seat for seat in members if left[id(seat)] and isinstance(seat.wants, Wanted)]:
                together, part, resting = prepare(going)
                if step is None:
                    assert places.state is not None
                    step = GroupStep(_UNKNOWN, places.state, places.streams, self._device, places.gradients)
                holding = {id(seat) for seat in members if seat.status is None} - {id(seat) for seat in together}
                step.resting = tuple(resting)
                step.holding = [index for index, seat in enumerate(places.seats) if id(seat) in holding]
                yield from step.batch(part)
                self._take_losses([step.member_losses], resting)
                for seat in together:
                    left[id(seat)] -= 1
                    if left[id(seat)]:
                        advance(seat)
            good = [seat for seat in members if seat.status is None and all(map(math.isfinite, seat.member.results))]
            if step is not None and good:
                yield from self._updated(step, good)
        finally:
            if step is not None:
                step.close()

    def _updated(self, step: GroupStep, members: Sequence[Seat]) -> Generator[PendingUnit, None, None]:
        """The end of a step whose batches have run, for these members."""
        taking_part = {id(seat) for seat in members}
        active = [id(seat) in taking_part for seat in self._places.seats]
        state = self._places.state
        assert state is not None
        assert isinstance(state.optimizer, StackedOptimizer), "not a group's state"
        self._places.streams.active = state.optimizer.active = active
        yield from step.finish()

    def evaluated(self, part: Part, state: ModelState, resting: Collection[int]) -> Generator[PendingUnit, None, None]:
        """An evaluated batch of each member that does not rest."""
        evaluation = GroupEvaluation(part.plan, part.times, state, part.leaves, self._places.streams, self._device)
        evaluation.resting = tuple(resting)
        try:
            yield from evaluation.units()
        finally:
            evaluation.close()
        self._take_values([evaluation.values], resting)

    def _take_losses(self, steps: Sequence[Sequence[float]], resting: Collection[int]) -> None:
        for index, losses in enumerate(zip(*steps, strict=True)):
            if index not in resting:
                self._places.seats[index].member.results = losses

    def _take_values(self, steps: Sequence[Mapping[str, Sequence[float]]], resting: Collection[int]) -> None:
        for index, seat in enumerate(self._places.seats):
            if index not in resting:
                own = None if self.rows is None else self.rows.names(index)
                seat.member.results = [
                    {name: values[index] for name, values in step.items() if own is None or name in own}
                    for step in steps
                ]


def are_padded(bucket: Sequence[Seat]) -> bool:
    """Whether the batches of members that are computed together are of several sizes."""
    first = wanted_of(bucket[0]).leaves
    now = (wanted_of(seat).leaves for seat in bucket)
    return any(leaves is not first and leaves.signature != first.signature for leaves in now)


def _wants_alike(seat: Seat, first: Wanted) -> bool:
    """Whether a member wants the next batch of the kind that the first wanted."""
    now = seat.wants
    if not isinstance(now, Wanted) or now.mode != first.mode:
        return False
    return now.leaves is first.leaves or now.leaves.signature == first.leaves.signature
