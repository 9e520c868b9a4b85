"""What was chosen for trials of which a device has no room for all at once: the ways that were planned, and the one taken.

Plain values: for the log, the event log and tables. Knows no tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydra_tune.quantities import format_bytes

KEPT = "fits, one after another"
WHOLE = "one group"
PAIR = "two in turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWay:
    """One way to train them.

    Attributes:
        name: `KEPT`: groups that fit as they are, one after the other; `WHOLE`: one group with planned steps; `PAIR`: two
            groups whose planned steps take turns.
        sizes: members of each group that is on the device at once.
        how: what the planner decides, by its name in the portfolio; "" where nothing is planned.
        seconds: predicted of a step of all of these; None where there is no plan.
        peak_bytes: predicted; None where there is no plan.
        is_chosen: whether it is taken.
        why_not: why there is no plan; "" where there is.
    """

    name: str
    sizes: tuple[int, ...]
    how: str = ""
    seconds: float | None = None
    peak_bytes: int | None = None
    is_chosen: bool = False
    why_not: str = ""

    @property
    def trials(self) -> int:
        """How many are on the device at once."""
        return sum(self.sizes)

    @property
    def seconds_each(self) -> float:
        """Predicted of a step, for each of them; without end where there is no plan."""
        return float("inf") if self.seconds is None else self.seconds / self.trials

    def __str__(self) -> str:
        sizes = " + ".join(map(str, self.sizes))
        if self.seconds is None or self.peak_bytes is None:
            return f"{self.name} ({sizes}): {self.why_not}"
        how = f", {self.how}" if self.how else ""
        return (
            f"{self.name} ({sizes}{how}): a step takes {self.seconds * 1e3:.3g} ms, {self.seconds_each * 1e3:.3g} ms for "
            f"each, and {format_bytes(self.peak_bytes)} at once"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChoice:
    """The ways, and which is taken.

    Attributes:
        ways: the one that needs no plan first, then as they were planned.
    """

    ways: tuple[PlannedWay, ...]

    @property
    def told(self) -> tuple[str, ...]:
        """Each in words, with its numbers."""
        return tuple(f"{way}{', which is chosen' if way.is_chosen else ''}" for way in self.ways)

    @property
    def chosen(self) -> PlannedWay:
        """The one that is taken."""
        return next(way for way in self.ways if way.is_chosen)

    @property
    def size(self) -> int:
        """Trials that are one job."""
        return self.chosen.trials

    @property
    def each(self) -> int:
        """Members of a group, of the larger where there are two."""
        return max(self.chosen.sizes)


def chosen_of(ways: Sequence[PlannedWay], chosen: PlannedWay) -> PlannedChoice:
    """A choice of one of some ways.

    Args:
        ways: the one that needs no plan first.
        chosen: one of them.
    """
    return PlannedChoice(ways=tuple(replace(way, is_chosen=way is chosen) for way in ways))
