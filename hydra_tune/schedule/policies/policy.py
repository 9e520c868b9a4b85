"""`Policy`: chooses which job an idle device works on next.

The scheduler (`schedule/machine.py`) asks the policy for each unit of a job that has no other running unit, when the
device is free and not earlier: bytes may have been prefetched, but no choice was made. Only a selection with `bound_to`
(`early.py`) chooses earlier. `PriorityLevels` (`schedule/levels.py`) fills and asks the selections of the scheduler, and
those of `NextJobPredictor` (`schedule/ahead.py`), whose predictions bind nobody. A policy needs no lock, because all calls
come under the driver's lock or from its only thread.

Note: two ways to write a policy. `Policy` is a single method that receives every eligible job on each call. A single
method is enough for a few hundred jobs. `IncrementalPolicy` makes a `Selection`. A selection hears of each job that
becomes eligible or ceases to be, and so can keep the jobs in order: the cost of a choice need not grow with the number
of jobs. All policies in `POLICIES` (`registry.py`) are incremental, and offer `choose`, too.

Note: priorities. `PriorityLevels` never asks for a job of lower priority while a job of higher priority is eligible, as
each level has a selection of its own (`schedule/levels.py`), so no policy needs to look at priorities.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from hydra_tune.schedule.units import Unit


class JobView(NamedTuple):
    """An eligible job: a unit is ready, none of the job's units runs, and the job is not stopped, waiting or paused.

    For a prediction, `Scheduler.view_after` makes such a view of a running job, as of the end of its unit.

    Args:
        job: name of the job.
        order: place in the order of submission; unique, the earliest job has the smallest.
        unit: the unit that would run.
        remaining_seconds: predicted time of all remaining units, `unit` included.
        step_seconds: predicted time of a training step.
        shard_device: the device that holds the parameters of `unit.shard`; None if no device does.
        priority: higher goes first.
        done_seconds: time of the finished units, on a device of speed 1.
        turn: number of units started by the scheduler up to and including this job's last unit; 0 before the job's
            first unit.
        last_device: device of the job's last unit; None before the first unit, or if that device is lost.
        last_on_base: the job's last unit with a `base`; None if there was none.
    """

    job: str
    order: int
    unit: Unit
    remaining_seconds: float
    step_seconds: float
    shard_device: str | None
    priority: int = 0
    done_seconds: float = 0.0
    turn: int = 0
    last_device: str | None = None
    last_on_base: Unit | None = None


@runtime_checkable
class Policy(Protocol):
    """Chooses among eligible jobs. Any object with this method is a policy.

    Example, shortest unit first::

        class ShortestUnitFirst:
            def choose(self, device, candidates):
                return min(candidates, key=lambda view: (view.unit.seconds, view.order))

    Break ties by `order`, so that equal events give equal schedules.
    """

    def choose(self, device: str, candidates: Sequence[JobView]) -> JobView:
        """Choose the next job of `device`.

        The policy chooses a job, not a place: the scheduler may start the unit on another idle device (`Scheduler._place`), and
        then asks about `device` again. For a prediction, `device` is busy, the jobs claimed by other devices' buffers are no
        candidates, and the running job is a candidate as of the end of its unit.

        Args:
            device: an idle device.
            candidates: every eligible job of the highest level (`schedule/levels.py`), at least one, in no particular
                order. Under staggered admission, the jobs beyond the front are left out while the front has an eligible job.

        Returns:
            One of `candidates`.
        """
        ...


class Selection(Protocol):
    """The eligible jobs of a level of a scheduler or predictor, in any structure that makes the choice quick.

    A class with an attribute `holds_only_jobs` that is true says that an empty selection is like a new one; `PriorityLevels`
    may then drop the empty selection of a level.
    """

    def add(self, view: JobView) -> None:
        """Add a job that has become eligible, or has a new view after `remove` of the old view."""
        ...

    def remove(self, view: JobView) -> None:
        """Remove a job that is no longer eligible, that changes its level, or whose view is out of date.

        Args:
            view: the object given to `add`.
        """
        ...

    def choose(self, device: str) -> JobView:
        """Choose the next job of `device`; the scheduler then calls `remove` with the choice, and a predictor need not.

        Returns:
            One of the views added and not removed; there is at least one.
        """
        ...


@runtime_checkable
class SpeedAware(Protocol):
    """A `Selection` with this additional method hears of the devices' speeds."""

    def set_speed(self, device: str, speed: float) -> None:
        """Handle a device that was added, changed its speed, or was lost.

        Args:
            device: the device.
            speed: 1 is nominal, 0.5 takes twice as long, 0 is lost.
        """
        ...


@runtime_checkable
class BindsEarly(Protocol):
    """A `Selection` with this additional method chooses a device's next job before the device is free."""

    def bound_to(self, device: str) -> str | None:
        """Return the job already bound to a device.

        Returns:
            The job's name, if the job is eligible; None if no job is bound.
        """
        ...


class IncrementalPolicy(ABC):
    """A policy that keeps the eligible jobs in order as they come and go. Subclasses implement `start`.

    The policy object holds options only; all mutable state is in the selections, one for each level of each scheduler
    and predictor. So the same policy object may serve several schedulers.
    """

    @abstractmethod
    def start(self) -> Selection:
        """Make an empty selection."""

    def choose(self, device: str, candidates: Sequence[JobView]) -> JobView:
        """Choose from scratch, like a `Policy`: ask a new selection that holds just the candidates."""
        selection = self.start()
        # In submission order, so that a selection's tie-breaks and draws do not depend on the caller's order.
        for view in sorted(candidates, key=lambda view: view.order):
            selection.add(view)
        return selection.choose(device)


class ScanSelection:
    """The selection of a single-method policy: passes every job on each call."""

    holds_only_jobs = True

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._views: dict[str, JobView] = {}

    def add(self, view: JobView) -> None:
        """Add the job."""
        self._views[view.job] = view

    def remove(self, view: JobView) -> None:
        """Remove the job."""
        del self._views[view.job]

    def choose(self, device: str) -> JobView:
        """Ask the policy."""
        return self._policy.choose(device, tuple(self._views.values()))


def start_selection(policy: Policy) -> Selection:
    """Make an empty selection for either kind of policy."""
    return policy.start() if isinstance(policy, IncrementalPolicy) else ScanSelection(policy)
