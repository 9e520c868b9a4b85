"""`Front`: the jobs in flight by age, and which of them go first under staggered admission.

Note: staggered admission. Of the jobs in flight, as many as there are devices are the *front*: those of the highest
priority, and of one priority those submitted first. A device takes a unit of the front if one is ready, else of another
job. So the oldest run to their ends while the others only fill gaps, and no device idles for it. Of all rules that keep
every device busy this has the first k jobs end the earliest, for every k, where jobs are equally long: a job cannot be
faster than one device, and nothing is spent on a job that does not end next. That is what makes early stopping work that
compares with jobs that have ended. The policy chooses within the front, and within the rest.
"""

import difflib
from bisect import bisect_left, insort

from hydra_tune.errors import ConfigError

ADMISSIONS = ("eager", "staggered")
"""What `admission` may be; the first is the default everywhere."""

Age = tuple[int, int, str]
"""Negative priority, order of submission, job: the smallest is the oldest."""


def check_admission(admission: object) -> None:
    """Refuse what is no admission.

    Raises:
        ConfigError: not one of `ADMISSIONS`.
    """
    if admission not in ADMISSIONS:
        expected = " or ".join(map(repr, ADMISSIONS))
        raise ConfigError(f"admission must be {expected}, not {admission!r}{_did_you_mean(admission)}")


def _did_you_mean(admission: object) -> str:
    close = difflib.get_close_matches(admission.lower(), ADMISSIONS, n=1) if isinstance(admission, str) else []
    return f"; did you mean {close[0]!r}?" if close else ""


class Front:
    """The ages of the jobs in flight, of which the first `size` are the front.

    Each change moves at most one job across its border, and returns it: whoever keeps the jobs tells that one.
    """

    def __init__(self) -> None:
        self._ages: list[Age] = []
        self._size = 0

    @property
    def jobs(self) -> list[str]:
        """The front, the oldest first."""
        return [job for _, _, job in self._ages[: self._size]]

    def holds(self, age: Age) -> bool:
        """Whether a job in flight is in the front."""
        return bisect_left(self._ages, age) < self._size

    def join(self, age: Age) -> str | None:
        """A job is in flight now.

        Returns:
            The job that it has put out of the front, if any.
        """
        insort(self._ages, age)
        return self._at(self._size) if self.holds(age) else None

    def leave(self, age: Age) -> str | None:
        """A job is no longer in flight.

        Returns:
            The job that comes into the front in its place, if any.
        """
        was_in_front = self.holds(age)
        del self._ages[bisect_left(self._ages, age)]
        return self._at(self._size - 1) if was_in_front else None

    def resize(self, by: int) -> str | None:
        """There is a device more (1) or less (-1).

        Returns:
            The job that comes into the front, or leaves it, if any.
        """
        border = min(self._size, self._size + by)
        self._size += by
        return self._at(border)

    def _at(self, index: int) -> str | None:
        return self._ages[index][2] if index < len(self._ages) else None
