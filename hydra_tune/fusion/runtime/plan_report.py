"""`PlannedSizeChoice`: the compared ways to train trials that exceed a device's memory together, and the chosen way.

Plain values without tensors, for the log, the event log and tables. `PlannedSizeChooser` (`planned_group_size.py`)
makes the choice before a group is formed; `pool/dry_run/fusion_report.py` makes a choice for
`HydraExecutor.plan(probe=True)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydra_tune.quantities import format_bytes, format_short_seconds

KEPT = "fits, one after another"
WHOLE = "one group"
PAIR = "two in turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSizeOption:
    """A way to train the trials.

    Attributes:
        name: `KEPT`: groups that fit unplanned, one after another; `WHOLE`: a group with planned steps; `PAIR`: two
            groups with planned steps in turn.
        sizes: members of every group on the device at once.
        how: the planner's strategy, by name in the portfolio; "" where nothing is planned.
        seconds: predicted seconds of a step of all groups; None without a plan.
        peak_bytes: predicted peak memory; None without a plan.
        is_chosen: whether the way is chosen.
        why_not: why there is no plan; "" if there is a plan.
        enough_bytes: memory of a device with which there would be a plan; None if unknown, or if there is a plan.
    """

    name: str
    sizes: tuple[int, ...]
    how: str = ""
    seconds: float | None = None
    peak_bytes: int | None = None
    is_chosen: bool = False
    why_not: str = ""
    enough_bytes: int | None = None

    @property
    def trials(self) -> int:
        """Number of trials on the device at once."""
        return sum(self.sizes)

    @property
    def seconds_each(self) -> float:
        """Predicted seconds of a step per trial; infinity without a plan."""
        return float("inf") if self.seconds is None else self.seconds / self.trials

    def __str__(self) -> str:
        sizes = " + ".join(map(str, self.sizes))
        if self.seconds is None or self.peak_bytes is None:
            return f"{self.name} ({sizes}): {self.why_not}"
        strategy = f", {self.how}" if self.how else ""
        return (
            f"{self.name} ({sizes}{strategy}): a step takes {format_short_seconds(self.seconds)}, "
            f"{format_short_seconds(self.seconds_each)} for each, and {format_bytes(self.peak_bytes)} at once"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSizeChoice:
    """The compared ways, with the chosen way marked.

    Attributes:
        ways: the unplanned way first, then the planned ways in the order of planning.
    """

    ways: tuple[PlannedSizeOption, ...]

    @property
    def told(self) -> tuple[str, ...]:
        """A description of every way, with its numbers."""
        return tuple(f"{way}{', which is chosen' if way.is_chosen else ''}" for way in self.ways)

    @property
    def chosen(self) -> PlannedSizeOption:
        """The chosen way."""
        return next(way for way in self.ways if way.is_chosen)

    @property
    def size(self) -> int:
        """Number of trials in a job."""
        return self.chosen.trials

    @property
    def each(self) -> int:
        """Members of a group; of the larger group in a pair."""
        return max(self.chosen.sizes)


def chosen_of(ways: Sequence[PlannedSizeOption], chosen: PlannedSizeOption) -> PlannedSizeChoice:
    """Return a choice with one of the ways marked.

    Args:
        ways: the unplanned way first.
        chosen: the chosen way.
    """
    return PlannedSizeChoice(ways=tuple(replace(way, is_chosen=way is chosen) for way in ways))
