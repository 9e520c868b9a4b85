"""`BucketScheduler`: choose the members computed next, always members whose batches can be computed together.

`GroupTrial` (`group_trial.py`) asks `BucketScheduler` before each step, round or evaluated batch of a group, though not
between the batches of an accumulated step.

Members run out of phase: a member at the end of its epoch wants a smaller last batch or its metrics, while the others
are in the middle of an epoch. Such a batch takes as long for a single member as for all members, so the batch waits for
others that will soon want the same kind. While the batch waits, the slots of its members compute nothing useful.

The rule is the classic rent-or-buy strategy: a kind of batch runs as soon as its waiting members have lost as much as
all others would lose by running the batch now.

Note: the choice decides only when batches run together. No member's numbers may depend on the choice.
"""

from collections.abc import Hashable, Mapping, Sequence

from hydra_tune.fusion.compile.group_plan_cache import wanted_of
from hydra_tune.fusion.group.slot import GroupSlot


class BucketScheduler:
    """Chooses the bucket of members for every step of a group."""

    def __init__(self) -> None:
        self._lost: dict[Hashable, int] = {}

    def next(self, kinds: Mapping[Hashable, list[GroupSlot]]) -> list[GroupSlot]:
        """Return the members to compute now."""
        if len(kinds) == 1:
            self._lost.clear()
            return next(iter(kinds.values()))
        total = sum(len(seats) for seats in kinds.values())
        self._lost = {kind: self._lost.get(kind, 0) for kind in kinds}
        usual_kind = max(kinds, key=lambda kind: _rank(kinds[kind]))
        due_kinds = [kind for kind in kinds if kind != usual_kind and self._lost[kind] >= _loss(kinds[kind], total)]
        chosen_kind = max(due_kinds, key=self._lost.__getitem__, default=usual_kind)
        for kind, waiting in kinds.items():
            if kind != chosen_kind:
                self._lost[kind] += len(waiting)
        # A rare kind keeps its account until no member wants the kind, so its run of
        # batches (an evaluation) is not interrupted. Only the usual kind starts again.
        if chosen_kind == usual_kind:
            self._lost[usual_kind] = 0
        return kinds[chosen_kind]


def _rank(seats: Sequence[GroupSlot]) -> tuple[int, bool, int]:
    """Return the sort key of the usual kind: most members, then evaluations, then the members furthest behind."""
    least = min(seat.member.progress.steps for seat in seats)
    return len(seats), wanted_of(seats[0]).mode == "evaluate", -least


def _loss(seats: Sequence[GroupSlot], total: int) -> int:
    """Return the steps that the other members lose if the given kind runs now, to the end of a run of such batches."""
    run = 1
    if wanted_of(seats[0]).mode == "evaluate":
        run = max(seat.member.progress.validation_batches or 1 for seat in seats)
    return (total - len(seats)) * run
