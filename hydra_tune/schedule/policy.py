"""`Policy`: which job an idle device works on next.

A policy is asked once for every unit, at the moment the device is free and not before: bytes may have been sent ahead,
but no choice has. It sees only what `JobView` shows, so that the same policy can drive a real pool and a simulated one.

Note: two ways to write one. `Policy` is a single method that is given every eligible job, each time: enough for a few
hundred jobs, and the clearest statement of what is chosen. `IncrementalPolicy` makes a `Selection`, which is told of each
job that becomes eligible and of each that is no longer, and so can keep them in order: its choice need not cost more with
more jobs. All policies of this package are of the second kind, and `choose` of the first comes with it.

Note: priorities. Jobs of a lower priority are kept from a policy as long as there are eligible ones of a higher
(`schedule/levels.py`); no policy needs to look at them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from hydra_tune.schedule.units import Unit


class JobView(NamedTuple):
    """An eligible job: it has a ready unit, none of its units runs, and it is not stopped, waiting or paused.

    A tuple, because one is made for every unit.

    Args:
        job: its name.
        order: its place in the order of submission; unique, the earliest is the smallest.
        unit: what would run.
        remaining_seconds: predicted time of all its units, `unit` included.
        step_seconds: predicted time of one training step.
        shard_device: the device that holds the parameters of `unit.shard`; None if none does.
        priority: higher goes first.
        done_seconds: time that its finished units took, on a device of speed 1.
        turn: how many units had been started when its last one was, that one included; 0 if none of its units was yet.
        last_device: the device of its last unit; None if none was started yet, or if that device is lost.
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


@runtime_checkable
class Policy(Protocol):
    """Chooses among eligible jobs. Anything with this one method will do.

    Example, shortest unit first:

        class ShortestUnitFirst:
            def choose(self, device, candidates):
                return min(candidates, key=lambda view: (view.unit.seconds, view.order))

    Break ties by `order`, so that the same events give the same schedule.
    """

    def choose(self, device: str, candidates: Sequence[JobView]) -> JobView:
        """Choose what `device` does next.

        The choice is a job, not yet a place: where the chosen job's shard is on another device that is idle too, the
        unit goes there, and this device is asked about again.

        Args:
            device: an idle device.
            candidates: every eligible job of the highest priority, at least one, in no particular order.

        Returns:
            One of `candidates`.
        """
        ...


class Selection(Protocol):
    """The eligible jobs of one priority in one scheduler, in whatever structure makes the choice quick."""

    def add(self, view: JobView) -> None:
        """A job has become eligible, or is so with a new view after `remove` of the old one."""
        ...

    def remove(self, view: JobView) -> None:
        """A job is no longer eligible: it runs now, was stopped or paused.

        Args:
            view: the object that was given to `add`.
        """
        ...

    def choose(self, device: str) -> JobView:
        """Choose what `device` does next; `remove` of the choice follows.

        Args:
            device: an idle device.

        Returns:
            One of the views that were added and not removed; there is at least one.
        """
        ...


@runtime_checkable
class SpeedAware(Protocol):
    """A `Selection` with this method as well is told how fast devices are."""

    def set_speed(self, device: str, speed: float) -> None:
        """A device was added, has changed its speed, or is lost.

        Args:
            device: the device.
            speed: 1 is nominal, 0.5 takes twice as long, 0 is lost.
        """
        ...


@runtime_checkable
class BindsEarly(Protocol):
    """A `Selection` with this method as well chooses what follows on a device before the device is free."""

    def bound_to(self, device: str) -> str | None:
        """The job chosen for a device already.

        Args:
            device: the device.

        Returns:
            The job's name, if it is eligible; None if none is chosen.
        """
        ...


class IncrementalPolicy(ABC):
    """A policy that keeps the eligible jobs in order as they come and go. Subclass it and write `start`.

    The policy itself holds options only; what changes is in the selections it starts, one for each scheduler and
    priority. So one policy object may be given to several schedulers.
    """

    @abstractmethod
    def start(self) -> Selection:
        """Make an empty selection."""

    def choose(self, device: str, candidates: Sequence[JobView]) -> JobView:
        """Choose from scratch, as a `Policy` does: what a selection chooses that was told of just these jobs."""
        selection = self.start()
        for view in sorted(candidates, key=lambda view: view.order):
            selection.add(view)
        return selection.choose(device)


class Scan:
    """The selection of a one-method policy: shows it every job, every time."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._views: dict[str, JobView] = {}

    def add(self, view: JobView) -> None:
        """Keep the job."""
        self._views[view.job] = view

    def remove(self, view: JobView) -> None:
        """Let go of the job."""
        del self._views[view.job]

    def choose(self, device: str) -> JobView:
        """Ask the policy."""
        return self._policy.choose(device, tuple(self._views.values()))


def start_selection(policy: Policy) -> Selection:
    """Make an empty selection of either kind of policy."""
    return policy.start() if isinstance(policy, IncrementalPolicy) else Scan(policy)
