"""`SlotTable`: the slots of a group, their occupants, and the stacked state.

`GroupTrial` (`group_trial.py`) makes the table, changes its size, and keeps the stacked state and plans there.
`MemberCoordinator` (`membership.py`) lets members in and out between two steps; `GroupExecutor` (`group_executor.py`) reads
the slots to stack batches and to hand out results; `MemberComparison` (`member_comparison.py`) copies a member out. The table
has no lock: no unit of the group may run during a copy.

Note: joining and leaving. A group has a number of slots. Between two steps a member that has ended or is paused gives
its slot to another member (`put_in`). The new member begins or continues its training, at whatever step the others are.
A member joins and leaves by copying between the stack and its own module and optimizer. To change the number of slots
(`resize_policy.py`), all members leave and join a new stack.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from hydra_tune.devices.device import Device
from hydra_tune.fusion.group.group_rng import GroupStreams
from hydra_tune.fusion.group.group_step import GroupGradients
from hydra_tune.fusion.group.slot import GroupSlot, vacant
from hydra_tune.fusion.group.stacked_state import hand_out, put_in, rows_of
from hydra_tune.fusion.matching.plan_diff import MemberDifferences
from hydra_tune.shard.partition.plan_cache import PreparedPlan
from hydra_tune.train.state.model_state import ModelState


@dataclass(frozen=True, slots=True, eq=False)
class GroupPart:
    """Slots that are computed at once: all, or in an evaluation fewer where a device has no room for all.

    Attributes:
        slots: the slots, which are neighbours.
    """

    slots: range
    prepared: PreparedPlan
    differences: MemberDifferences


class SlotTable:
    """The slots of a group.

    Args:
        device: any device of the pool, for host memory.

    Attributes:
        seats: the slots, by index in the stack.
        state: the stacked state; None before the first step.
        stacked: by a member's plan and whether batches are padded: the parts of the group that are computed at once.
    """

    def __init__(self, seats: Sequence[GroupSlot], device: Device) -> None:
        self.state: ModelState | None = None
        self.stacked: dict[tuple[PreparedPlan, bool], tuple[GroupPart, ...]] = {}
        self._device = device
        self._sit(seats)

    def _sit(self, seats: Sequence[GroupSlot]) -> None:
        self.seats = list(seats)
        self.streams = GroupStreams([seat.member.streams for seat in seats])
        self.gradients = GroupGradients([(seat.member.task, seat.member.gradient_rules) for seat in seats])

    @property
    def live(self) -> list[GroupSlot]:
        """Slots of members that have not ended."""
        return [seat for seat in self.seats if seat.status is None]

    @property
    def vacant(self) -> list[int]:
        """Indices of slots whose members have ended or left."""
        return [index for index, seat in enumerate(self.seats) if seat.status is not None]

    def part(self, slots: range) -> "SlotTable":
        """Return a table of some slots, with streams and gradient rules of its own, to evaluate on rows of the same state."""
        part = SlotTable(self.seats[slots.start : slots.stop], self._device)
        assert self.state is not None
        part.state = rows_of(self.state, slots.start, slots.stop)
        return part

    def welcome(self, seat: GroupSlot) -> None:
        """Mark a member as part of the group, once its state is in the stack, or before there is a stack."""
        seat.is_handed_back = False
        seat.member.is_fused = True
        seat.member.num_shards = 0 if self.state is None else len(self.state.layout.plan.shards)
        seat.member.fetch = partial(self.hand_out, seat)

    def give(self, index: int, seat: GroupSlot) -> None:
        """Give a slot to another member, without copying its state into the stack yet."""
        self.seats[index] = seat
        self.streams.replace(index, seat.member.streams)
        self.gradients.replace(index, seat.member.task, seat.member.gradient_rules)
        # Stacked plans depend on the members' dropout probabilities and losses.
        self.stacked.clear()

    def put_in(self, index: int) -> None:
        """Copy a member's own module and optimizer into the stack."""
        if self.state is not None:
            put_in(self.state, index, *self.seats[index].member.built(), self._device)

    def leave(self, seat: GroupSlot) -> None:
        """Let a member leave with its state."""
        self.hand_out(seat)
        # From now on the member's own module and optimizer hold its state.
        seat.member.fetch = None
        self.seats[self.seats.index(seat)] = vacant(seat)

    def hand_out(self, seat: GroupSlot) -> None:
        """Copy a member's part of the stack to the member's own module and optimizer."""
        if self.state is not None:
            hand_out(self.state, self.seats.index(seat), *seat.member.built())

    def resize(self, size: int) -> None:
        """Change the number of slots; the state moves to the members, and the old stack is dropped.

        The caller makes the new stack. At least one member must be live, for which vacant slots stand.
        """
        live = self.live
        if self.state is not None:
            for seat in live:
                self.hand_out(seat)
            self.state.drop()
        self._sit([*live, *(vacant(live[0]) for _ in range(size - len(live)))])
        self.stacked.clear()
