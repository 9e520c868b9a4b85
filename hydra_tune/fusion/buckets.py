"""Which members of a group are computed next: those that want the same kind of batch.

Members are out of phase: one is at the end of its epoch and wants a last, smaller batch, or its metrics, while others are in
the middle of theirs. Such a batch takes as long for one member as for all, so it waits for others that will want the same.
While it waits, its members' places are computed for nothing. Both is a loss in places times steps, and which is smaller is not
known before; a kind of batch is computed as soon as its members have lost as much by waiting as all others lose if they are
computed now. That loses at most twice what it had to, nobody waits for ever, and members that have met once end their epochs
together.
"""

from collections.abc import Hashable, Mapping, Sequence

from hydra_tune.fusion.kinds import wanted_of
from hydra_tune.fusion.seat import Seat


class Buckets:
    """Chooses, step by step, for one group.

    Attributes:
        member_steps: batches computed, of all members.
        full_member_steps: those of them that were computed with all members that wanted anything computed.
        place_steps: places computed, taken or not.
    """

    def __init__(self) -> None:
        self.member_steps = 0
        self.full_member_steps = 0
        self.place_steps = 0
        self._lost: dict[Hashable, int] = {}

    def next(self, kinds: Mapping[Hashable, list[Seat]]) -> list[Seat]:
        """Members that are computed now, of those who want a batch.

        Args:
            kinds: by what they want.
        """
        if len(kinds) == 1:
            self._lost.clear()
            return next(iter(kinds.values()))
        total = sum(len(seats) for seats in kinds.values())
        self._lost = {kind: self._lost.get(kind, 0) for kind in kinds}
        usual = max(kinds, key=lambda kind: _rank(kinds[kind]))
        due = [kind for kind in kinds if kind != usual and self._lost[kind] >= _loss(kinds[kind], total)]
        chosen = max(due, key=self._lost.__getitem__, default=usual)
        for kind, waiting in kinds.items():
            if kind != chosen:
                self._lost[kind] += len(waiting)
        if chosen == usual:
            self._lost[usual] = 0
        return kinds[chosen]

    def computed(self, count: int, wanting: int, places: int) -> None:
        """A batch of so many members, of those who wanted one, in so many places."""
        self.member_steps += count
        self.full_member_steps += count if count == wanting else 0
        self.place_steps += places


def _rank(seats: Sequence[Seat]) -> tuple[int, bool, int]:
    """The most members; of two kinds that as many want evaluations go first, and then those that are most behind."""
    least = min(seat.member.progress.steps for seat in seats)
    return len(seats), wanted_of(seats[0]).mode == "evaluate", -least


def _loss(seats: Sequence[Seat], total: int) -> int:
    """Steps of the others that are lost if these are computed now, to the end of their run of such batches."""
    run = 1
    if wanted_of(seats[0]).mode == "evaluate":
        run = max(seat.member.progress.validation_batches or 1 for seat in seats)
    return (total - len(seats)) * run
