"""`PlannedSizeChoice`: the compared ways to train trials that exceed a device's memory together, and the chosen way.

Plain values without tensors, for the log, the event log and tables. `GroupMatcher` (`pool/fusion/group_matcher.py`) asks
`PlannedSizeChooser` (`planned_group_size.py`) for the choice before a group is formed, and has `pool/views/job_logging.py`
write the choice to the event log. `pool/dry_run/fusion_report.py` makes a choice for `HydraExecutor.plan(probe=True)`, and
`cli/dry_run/plan_table.py` prints `told`. The module compares nothing: the planner predicts the seconds and bytes.
"""

from collections import Counter
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
        enough_bytes: memory of a device with which there would be a plan; None if unknown, or if there is a plan.
        operator_seconds: profiled seconds of the operators of each group, with everything kept; () if not profiled.
    """

    name: str
    sizes: tuple[int, ...]
    how: str = ""
    seconds: float | None = None
    peak_bytes: int | None = None
    is_chosen: bool = False
    why_not: str = ""
    enough_bytes: int | None = None
    operator_seconds: tuple[float, ...] = ()

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
    """The compared ways, with the chosen ways marked.

    Attributes:
        ways: the unplanned way first, then the planned ways in the order of planning.
        parts: the ways of the jobs that the trials form, one after the other; trials that are left over after these
            have no way yet.
    """

    ways: tuple[PlannedSizeOption, ...]
    parts: tuple[PlannedSizeOption, ...]

    @property
    def told(self) -> tuple[str, ...]:
        """A description of every way, with its numbers, and of the partition into several jobs."""
        lines = [f"{way}{', which is chosen' if way.is_chosen else ''}" for way in self.ways]
        if len(self.parts) > 1:
            counts = Counter(" + ".join(map(str, part.sizes)) for part in self.parts)
            jobs = ", ".join(f"{count} x ({sizes})" for sizes, count in counts.items())
            seconds = sum(part.seconds or 0.0 for part in self.parts)
            lines.append(f"jobs of {jobs}: a step of all takes {seconds * 1e3:.3g} ms")
        return tuple(lines)

    @property
    def chosen(self) -> PlannedSizeOption:
        """The way of the first job."""
        return self.parts[0]

    @property
    def size(self) -> int:
        """Number of trials in the first job."""
        return self.chosen.trials

    @property
    def each(self) -> int:
        """Members of a group of the first job; of the larger group in a pair."""
        return max(self.chosen.sizes)

    def rests(self, num_trials: int) -> dict[int, "PlannedSizeChoice"]:
        """Return the choices for the trials that are left over when jobs have been formed, by the number of trials."""
        choices: dict[int, PlannedSizeChoice] = {}
        for place in range(1, len(self.parts)):
            num_trials -= self.parts[place - 1].trials
            choices[num_trials] = replace(self, parts=self.parts[place:])
        return choices


def chosen_of(ways: Sequence[PlannedSizeOption], *parts: PlannedSizeOption) -> PlannedSizeChoice:
    """Return a choice with some of the ways marked."""
    chosen = {(part.name, part.sizes) for part in parts}
    return PlannedSizeChoice(
        ways=tuple(replace(way, is_chosen=(way.name, way.sizes) in chosen) for way in ways),
        parts=tuple(replace(part, is_chosen=True) for part in parts),
    )
