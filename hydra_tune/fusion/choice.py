"""How many trials are computed together, by what steps were seen to take: timings in, a choice out. Knows no tensors.

Note: how sizes are tried. To time a group costs some steps of all of its members, which is little where a group gains and
much where it does not. So no size is timed whose cost, at the worst, is beyond a small share of the work that is to come. The
largest such size is first. Where it gains, larger ones follow, whose cost can be told by now; where it does not, the
next smaller one does, as long as that is better, and larger ones if a line through what was seen says that they will gain.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

LEAST_GAIN = 1.2
"""What trials have to gain by it, to be computed together where that is left to the pool."""

COST_SHARE = 0.02
"""Of the work to come, that finding out may take where nothing speaks for a gain."""

_HOPE_SHARE = 0.1  # of what is expected to be saved, beyond that
_PROBE_STEPS = 4  # of a group, to time it; see `probe.py`
_WORST_GAIN = 0.6  # expected of what has not been timed
_LARGE, _HOPELESS_GAIN = 8, 0.8  # where so many gain no more than that, no size will gain
_TRACE_STEPS = 20  # of a group that is not traced yet, which to trace it takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What steps take.

    Attributes:
        alone_seconds: a step of one trial.
        drawing_seconds: to draw a batch of its own data, which every trial does for itself either way.
        group_seconds: a step of a group of all its members, by their number.
    """

    alone_seconds: float
    drawing_seconds: float = 0.0
    group_seconds: Mapping[int, float] = field(default_factory=dict)

    def seconds(self, size: int) -> float | None:
        """A step of so many together: as seen, or between two sizes that were; None where nothing tells."""
        if size in self.group_seconds:
            return self.group_seconds[size]
        below = max((known for known in self.group_seconds if known < size), default=None)
        above = min((known for known in self.group_seconds if known > size), default=None)
        if below is None or above is None:
            return None
        return self._on_line(below, above, size)

    def gain(self, size: int) -> float | None:
        """How many times faster a step of a trial is in a group of so many; None where nothing tells."""
        seconds = self.seconds(size)
        return None if seconds is None else self._gain(size, seconds)

    def expected_gain(self, size: int) -> float | None:
        """The same of a size beyond those seen, by a line through the largest two of them."""
        if len(self.group_seconds) < 2:  # noqa: PLR2004 - points of a line
            return None
        below, above = sorted(self.group_seconds)[-2:]
        return self._gain(size, self._on_line(below, above, size))

    def with_size(self, size: int, seconds: float) -> "Timing":
        """The same, with a group of so many."""
        return Timing(
            alone_seconds=self.alone_seconds,
            drawing_seconds=self.drawing_seconds,
            group_seconds={**self.group_seconds, size: seconds},
        )

    def _gain(self, size: int, seconds: float) -> float:
        return (self.alone_seconds + self.drawing_seconds) / (max(seconds, 1e-9) / size + self.drawing_seconds)

    def _on_line(self, below: int, above: int, size: int) -> float:
        first, last = self.group_seconds[below], self.group_seconds[above]
        return first + (last - first) * (size - below) / (above - below)


def sizes(most: int) -> list[int]:
    """Sizes of groups to choose from, the largest first: as many as there are, and the powers of two below."""
    return [most, *(2**power for power in range((most - 1).bit_length() - 1, 0, -1))] if most > 1 else []


def chosen_size(timing: Timing, most: int, num_steps: float) -> int:
    """The most trials that gain by being computed together; 1 where none do.

    Args:
        timing: what steps take.
        most: trials that there are, and have room.
        num_steps: optimizer steps that all of them together have to go, which have to make up for what a group costs at first.
    """
    for size in sizes(most):
        gain, seconds = timing.gain(size), timing.seconds(size)
        if gain is None or seconds is None or gain < LEAST_GAIN:
            continue
        saved = num_steps * (timing.alone_seconds + timing.drawing_seconds) * (1 - 1 / gain)
        if saved > _TRACE_STEPS * seconds:
            return size
    return 1


def next_size(timing: Timing, most: int, total_seconds: float, spent_seconds: float = 0.0) -> int | None:
    """Which size to time next; None where it is known which one to choose, or where finding out would cost too much.

    Args:
        timing: what is known.
        most: trials that there are, and have room.
        total_seconds: what all of them together would take alone.
        spent_seconds: what finding out has taken so far.
    """
    left = COST_SHARE * total_seconds - spent_seconds
    known = [size for size in sizes(most) if timing.gain(size) is not None]
    others = [size for size in sizes(most) if size not in known]
    if not known:
        return next((size for size in others if _worst_cost(timing, size) <= left), None)
    largest, least = known[0], known[-1]
    cost = _PROBE_STEPS * (timing.seconds(largest) or 0.0) / largest  # for each member
    gains = [timing.gain(size) or 0.0 for size in known]
    larger = [size for size in others if size > largest]
    if max(gains) >= LEAST_GAIN:
        hope = _hope(total_seconds, gains[0])
        return next((size for size in larger if cost * size <= left + hope), None) if gains[0] >= LEAST_GAIN else None
    if largest >= _LARGE and gains[0] < _HOPELESS_GAIN:
        return None
    if len(known) == 1 and largest < _LARGE and larger:
        return larger[-1] if cost * larger[-1] <= left else None
    smaller = next((size for size in others if size < least), None)
    if smaller is not None and (len(known) == 1 or gains[-1] > gains[-2]):
        return smaller if cost * smaller <= left else None
    return next((size for size in larger if cost * size <= left + _expected_hope(timing, size, total_seconds)), None)


def _expected_hope(timing: Timing, size: int, total_seconds: float) -> float:
    """As `_hope`, by a line through what was seen; where that says that there is no gain, nothing may be spent."""
    gain = timing.expected_gain(size) or 0.0
    return _hope(total_seconds, gain) if gain >= LEAST_GAIN else float("-inf")


def _hope(total_seconds: float, gain: float) -> float:
    """What may be spent beyond the share where there is reason to expect a gain."""
    return _HOPE_SHARE * total_seconds * max(0.0, 1 - 1 / gain)


def _worst_cost(timing: Timing, size: int) -> float:
    """Seconds that timing a size may take, of which nothing is known but that a larger group takes longer."""
    seconds = [known for count, known in timing.group_seconds.items() if count > size]
    return _PROBE_STEPS * min(timing.alone_seconds / _WORST_GAIN * size, *seconds, float("inf"))


def why(timing: Timing, size: int, most: int) -> str:
    """A choice in words, with its numbers."""
    seen = ", ".join(
        f"{count} together {seconds / count * 1e3:.3g} ms each ({timing.gain(count):.2f}x)"
        for count, seconds in sorted(timing.group_seconds.items())
    )
    alone = f"a step takes {timing.alone_seconds * 1e3:.3g} ms alone, {seen or 'and no group was timed'}"
    drawn = f", beside {timing.drawing_seconds * 1e3:.3g} ms for drawing a batch"
    if size > 1:
        return f"{size} of {most} are computed together: {alone}{drawn}"
    return f"computed together they would not gain {LEAST_GAIN}x: {alone}{drawn}"
