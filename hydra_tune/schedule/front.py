"""`AdmissionFront`: the staggered jobs in flight by age, and the jobs that go first under staggered admission.

`SchedulerState` (`state.py`) updates the front whenever a staggered job in flight or a device comes or goes, or such a
job changes its priority. With `admission="staggered"` every job is staggered, with `"auto"` the jobs that were submitted
so, with `"eager"` none. `Scheduler` (`machine.py`), `ExecutorSettings` (`pool/runtime/settings.py`) and `Scenario`
(`simulate/model.py`) call `check_admission`; `cli/commands/sweep.py` and `cli/commands/simulate.py` offer `ADMISSIONS`. The
module takes no lock, because the scheduler's caller holds one or is the only thread.

Note: staggered admission. The *front* consists of the oldest staggered jobs in flight, as many as there are devices, by
priority and then by submission. Jobs that are not staggered have the rank of the front. Within a priority, a device takes a
unit of an eligible job of the front if there is such a job, otherwise of another job. Further units of running jobs
(`Scheduler._lend`) heed no front. For jobs of equal length, among all rules that keep every device busy, this rule ends the
first k jobs earliest, for every k. Early stopping rules that compare with finished jobs depend on such early ends. The policy
chooses within the front, and within the rest.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

from hydra_tune.errors import ConfigError, with_hint

ADMISSIONS = ("auto", "eager", "staggered")
"""Values of `admission`; the first is the default of a pool. A simulation has no pruner, and takes the other two."""

Age = tuple[int, int, str]
"""Negative priority, order of submission, job: the smallest is the oldest."""


def check_admission(admission: object, known: Sequence[str] = ADMISSIONS) -> None:
    """Refuse an unknown admission.

    Raises:
        ConfigError: not one of `known`.
    """
    if admission not in known:
        *others, last = map(repr, known)
        expected = f"{', '.join(others)} or {last}"
        text = f"admission must be {expected}, not {admission!r}"
        raise ConfigError(with_hint(text, admission, known) if isinstance(admission, str) else text)


class AdmissionFront:
    """The ages of the staggered jobs in flight; the first `_size` jobs are the front.

    Each change moves at most one job across the border, besides the job that comes or goes. The change returns the moved
    job, so that the caller can update the job's level.

    Args:
        takes_all: whether every job is staggered, also one that was not submitted so.
    """

    def __init__(self, *, takes_all: bool = True) -> None:
        self.takes_all = takes_all
        self._ages: list[Age] = []
        self._size = 0

    @property
    def jobs(self) -> list[str]:
        """The front, the oldest job first."""
        return [job for _, _, job in self._ages[: self._size]]

    def holds(self, age: Age) -> bool:
        """Return whether a job in flight is in the front."""
        return bisect_left(self._ages, age) < self._size

    def join(self, age: Age) -> str | None:
        """Add a job that is in flight from now on.

        Returns:
            The job pushed out of the front, if any.
        """
        insort(self._ages, age)
        # The last job of the front moved by a place, and is now just beyond the border.
        return self._at(self._size) if self.holds(age) else None

    def leave(self, age: Age) -> str | None:
        """Remove a job that is no longer in flight.

        Returns:
            The job that moves up into the front, if any.
        """
        was_in_front = self.holds(age)
        del self._ages[bisect_left(self._ages, age)]
        # Later jobs moved up by a place, so the last place of the front holds the job that was just beyond the border.
        return self._at(self._size - 1) if was_in_front else None

    def resize(self, by: int) -> str | None:
        """Adapt the front to one more device (1) or one less (-1).

        Returns:
            The job that enters or leaves the front, if any.
        """
        # A growing front takes in the job at the old border, a shrinking front gives up the job at the new border.
        border = min(self._size, self._size + by)
        self._size += by
        return self._at(border)

    def _at(self, index: int) -> str | None:
        return self._ages[index][2] if index < len(self._ages) else None
