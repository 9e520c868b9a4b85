"""Decide how many trials compute together, from measured step times. Plain numbers in, a choice out; no tensors.

`GroupSizeChooser` (`group_size_chooser.py`) asks `next_size` before each measurement and `chosen_size` after the last
measurement; `pool/dry_run/fusion_report.py` does the same for `HydraExecutor.plan(probe=True)`. `GroupMatcher`
(`pool/fusion/group_matcher.py`) asks for `LEAST_GAIN` of planned steps, too, where a device has room for a single trial only.
The module must not run steps: the callers measure.

Note: order of the measurements. Timing a group costs a few steps of all its members: little if the group gains, and
much if not. So the first size is the largest size with a worst-case cost within a small share of the remaining work. If a
size gains, larger sizes follow, since their cost can now be predicted. If a first size below `_LARGE` does not gain, the
next larger size follows. Otherwise smaller sizes follow as long as the gains grow, and larger sizes if a line through the
measurements predicts a gain. Nothing follows where a group of at least `_LARGE` gains less than `_HOPELESS_GAIN`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hydra_tune.quantities import format_short_seconds

LEAST_GAIN = 1.2
"""Least speedup for which "auto" fuses trials."""

COST_SHARE = 0.02
"""Share of the remaining work that measurements may cost while nothing indicates a gain."""

_HOPE_SHARE = 0.1  # share of the expected saving that measurements may cost in addition
_PROBE_STEPS = 4  # steps that timing a group takes, about; see `group_timing.py`
_WORST_GAIN = 0.6  # pessimistic gain of an untimed group
_LARGE, _HOPELESS_GAIN = 8, 0.8  # if so large a group gains less, no size will gain enough
_TRACE_STEPS = 20  # cost of tracing a group, in untraced steps of the group


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionStepTimes:
    """Measured step times.

    Attributes:
        drawing_seconds: drawing a batch from a trial's own data, which every trial does separately in either case.
        group_seconds: a step of a group with all its members, by number of members.
    """

    alone_seconds: float
    drawing_seconds: float = 0.0
    group_seconds: Mapping[int, float] = field(default_factory=dict)

    def seconds(self, size: int) -> float | None:
        """Return the seconds of a group's step: measured, or interpolated between two measured sizes; else None."""
        if size in self.group_seconds:
            return self.group_seconds[size]
        below = max((timed_size for timed_size in self.group_seconds if timed_size < size), default=None)
        above = min((timed_size for timed_size in self.group_seconds if timed_size > size), default=None)
        if below is None or above is None:
            return None
        return self._on_line(below, above, size)

    def gain(self, size: int) -> float | None:
        """Return the speedup of a trial's step in a group of the given size; None without data."""
        seconds = self.seconds(size)
        return None if seconds is None else self._gain(size, seconds)

    def expected_gain(self, size: int) -> float | None:
        """Return the speedup extrapolated to a larger size, by a line through the largest two measured sizes."""
        if len(self.group_seconds) < 2:  # noqa: PLR2004 - points of a line
            return None
        below, above = sorted(self.group_seconds)[-2:]
        return self._gain(size, self._on_line(below, above, size))

    def with_size(self, size: int, seconds: float) -> "FusionStepTimes":
        """Return the timing extended by a group size."""
        return FusionStepTimes(
            alone_seconds=self.alone_seconds,
            drawing_seconds=self.drawing_seconds,
            group_seconds={**self.group_seconds, size: seconds},
        )

    def _gain(self, size: int, seconds: float) -> float:
        # Members of a group draw their own batches one after another, so drawing counts fully for each.
        return (self.alone_seconds + self.drawing_seconds) / (max(seconds, 1e-9) / size + self.drawing_seconds)

    def _on_line(self, below: int, above: int, size: int) -> float:
        first, last = self.group_seconds[below], self.group_seconds[above]
        return first + (last - first) * (size - below) / (above - below)


def sizes(most: int) -> list[int]:
    """Return candidate group sizes, largest first: all trials, and smaller powers of two."""
    return [most, *(2**power for power in range((most - 1).bit_length() - 1, 0, -1))] if most > 1 else []


def chosen_size(timing: FusionStepTimes, most: int, num_steps: float) -> int:
    """Return the largest candidate size (`sizes`) that gains enough by computing together; 1 if no size does.

    Args:
        timing: measured step times.
        most: number of trials available, limited by memory.
        num_steps: remaining optimizer steps of all trials together, which must pay for the start-up cost of a group.
    """
    for size in sizes(most):
        gain, seconds = timing.gain(size), timing.seconds(size)
        if gain is None or seconds is None or gain < LEAST_GAIN:
            continue
        saved = num_steps * (timing.alone_seconds + timing.drawing_seconds) * (1 - 1 / gain)
        if saved > _TRACE_STEPS * seconds:
            return size
    return 1


def next_size(timing: FusionStepTimes, most: int, total_seconds: float, spent_seconds: float = 0.0) -> int | None:
    """Return the next size to time; None if the choice is clear, or timing would cost too much."""
    seconds_left = COST_SHARE * total_seconds - spent_seconds
    timed_sizes = [size for size in sizes(most) if timing.gain(size) is not None]
    untimed_sizes = [size for size in sizes(most) if size not in timed_sizes]
    if not timed_sizes:
        return next((size for size in untimed_sizes if _worst_cost(timing, size) <= seconds_left), None)
    largest, least = timed_sizes[0], timed_sizes[-1]
    cost = _PROBE_STEPS * (timing.seconds(largest) or 0.0) / largest  # for each member
    gains = [timing.gain(size) or 0.0 for size in timed_sizes]
    larger = [size for size in untimed_sizes if size > largest]
    # A size that gains is known. Only a larger size can be better, and only if the largest known size still gains.
    if max(gains) >= LEAST_GAIN:
        hope = _hope(total_seconds, gains[0])
        return (
            next((size for size in larger if cost * size <= seconds_left + hope), None)
            if gains[0] >= LEAST_GAIN
            else None
        )
    if largest >= _LARGE and gains[0] < _HOPELESS_GAIN:
        return None
    # A single group below `_LARGE` members rules out no larger group.
    if len(timed_sizes) == 1 and largest < _LARGE and larger:
        return larger[-1] if cost * larger[-1] <= seconds_left else None
    smaller = next((size for size in untimed_sizes if size < least), None)
    if smaller is not None and (len(timed_sizes) == 1 or gains[-1] > gains[-2]):
        return smaller if cost * smaller <= seconds_left else None
    return next(
        (size for size in larger if cost * size <= seconds_left + _expected_hope(timing, size, total_seconds)), None
    )


def _expected_hope(timing: FusionStepTimes, size: int, total_seconds: float) -> float:
    """Return `_hope` for an extrapolated gain; negative infinity, so that nothing is spent, if no gain is expected."""
    gain = timing.expected_gain(size) or 0.0
    return _hope(total_seconds, gain) if gain >= LEAST_GAIN else float("-inf")


def _hope(total_seconds: float, gain: float) -> float:
    """Return the seconds that measurements may take beyond the regular share, where a gain is expected."""
    return _HOPE_SHARE * total_seconds * max(0.0, 1 - 1 / gain)


def _worst_cost(timing: FusionStepTimes, size: int) -> float:
    """Return the worst-case seconds of timing a size: by `_WORST_GAIN`, and no more than a larger timed group takes."""
    seconds = [step_seconds for count, step_seconds in timing.group_seconds.items() if count > size]
    return _PROBE_STEPS * min(timing.alone_seconds / _WORST_GAIN * size, *seconds, float("inf"))


def why(timing: FusionStepTimes, size: int, most: int) -> str:
    """Describe a choice in words, with its numbers."""
    groups_text = ", ".join(
        f"{count} together {format_short_seconds(seconds / count)} each ({timing.gain(count):.2f}x)"
        for count, seconds in sorted(timing.group_seconds.items())
    )
    alone_text = (
        f"a step takes {format_short_seconds(timing.alone_seconds)} alone, {groups_text or 'and no group was timed'}"
    )
    drawing_text = f", beside {format_short_seconds(timing.drawing_seconds)} for drawing a batch"
    if size > 1:
        return f"{size} of {most} are computed together: {alone_text}{drawing_text}"
    return f"computed together they would not gain {LEAST_GAIN}x: {alone_text}{drawing_text}"
