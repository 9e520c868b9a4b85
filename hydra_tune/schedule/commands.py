"""What the scheduler wants done. Whoever drives it carries these out, in order, and answers with events."""

from dataclasses import dataclass
from typing import NamedTuple

from hydra_tune.schedule.units import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Prepare this job now; answered by `JobAdmitted` or `JobRejected`."""

    job: str


class Run(NamedTuple):
    """Run the job's unit on the device now; answered by `UnitFinished` or `UnitFailed`.

    A tuple, because one is made for every unit.
    """

    job: str
    device: str
    unit: Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class EndBurst:
    """Have the job's unit, which is made of steps, end after the step that runs: another job waits for the device.

    Answered by the unit's `UnitFinished`, as ever. Nothing is lost where the unit ends by itself meanwhile.
    """

    job: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The job is over and nothing of it runs: give all of its memory back. The scheduler has forgotten it."""

    job: str


Command = Admit | Run | EndBurst | Release
"""Everything `Scheduler.handle` returns."""
