"""The places of a group: who has which, and the state that is stacked for them.

Note: places. A group has so many places, and between two steps a member that is over, or paused, leaves its own to another one,
that begins its training, or goes on with it, while the others are in the middle of theirs (`put_in`). A place that nobody takes
is masked. What passes between a group and a member that comes or goes is the member's own module and optimizer; and where a
group has more or fewer places from now on (`sizes.py`), all of its members go, and come to a new stack.
"""

from collections.abc import Sequence
from functools import partial

from hydra_tune.devices.device import Device
from hydra_tune.fusion.likeness import Likeness
from hydra_tune.fusion.seat import Seat, vacant
from hydra_tune.fusion.stack import hand_out, put_in
from hydra_tune.fusion.steps import GroupGradients
from hydra_tune.fusion.streams import GroupStreams
from hydra_tune.shard.library import Prepared
from hydra_tune.train.state import ModelState


class Places:
    """Those of one group.

    Args:
        seats: the members.
        device: any device of the pool, for host memory.

    Attributes:
        seats: by place.
        streams: the members' random streams.
        gradients: the rules for their gradients.
        state: theirs, stacked; None before the first step.
        stacked: by a member's plan and whether batches are padded: that plan for these members, and what is each one's own.
    """

    def __init__(self, seats: Sequence[Seat], device: Device) -> None:
        self.state: ModelState | None = None
        self.stacked: dict[tuple[Prepared, bool], tuple[Prepared, Likeness]] = {}
        self._device = device
        self._sit(seats)

    def _sit(self, seats: Sequence[Seat]) -> None:
        self.seats = list(seats)
        self.streams = GroupStreams([seat.member.streams for seat in seats])
        self.gradients = GroupGradients([seat.member.task for seat in seats])

    @property
    def live(self) -> list[Seat]:
        """Of members that are not over."""
        return [seat for seat in self.seats if seat.status is None]

    @property
    def vacant(self) -> list[int]:
        """Places that nobody has."""
        return [index for index, seat in enumerate(self.seats) if seat.status is not None]

    def welcome(self, seat: Seat) -> None:
        """A member has a place, and its state is there."""
        seat.is_handed_back = False
        seat.member.is_fused = True
        seat.member.num_shards = 0 if self.state is None else len(self.state.layout.plan.shards)
        seat.member.fetch = partial(self.hand_out, seat)

    def give(self, index: int, seat: Seat) -> None:
        """A place is another member's from now on; what it goes on from is not in the stack yet."""
        self.seats[index] = seat
        self.streams.replace(index, seat.member.streams)
        self.gradients.replace(index, seat.member.task)
        self.stacked.clear()

    def put_in(self, index: int) -> None:
        """Have the stack be as the member's own module and optimizer are."""
        if self.state is not None:
            put_in(self.state, index, *self.seats[index].member.built(), self._device)

    def leave(self, seat: Seat) -> None:
        """A member goes, with its state."""
        self.hand_out(seat)
        seat.member.fetch = None
        self.seats[self.seats.index(seat)] = vacant(seat)

    def hand_out(self, seat: Seat) -> None:
        """Have a member's own module and optimizer be as its part of the group's state is."""
        if self.state is not None:
            hand_out(self.state, self.seats.index(seat), *seat.member.built())

    def resize(self, size: int) -> None:
        """Have more or fewer places; the state has gone to the members, and its tensors are gone."""
        live = self.live
        if self.state is not None:
            for seat in live:
                self.hand_out(seat)
            self.state.drop()
        self._sit([*live, *(vacant(live[0]) for _ in range(size - len(live)))])
        self.stacked.clear()
