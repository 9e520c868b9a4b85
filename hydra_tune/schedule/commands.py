"""Commands of the scheduler.

After each call of `Scheduler.handle`, the driver carries the commands out in order, and later hands in the answers as events:
`pool/runtime/dispatcher.py` in a pool, `pool/dry_run/executor.py` in a forecast, `simulate/engine/simulator.py` in a
simulation, and `simulate/recorded/replay.py` in a replay. `journal.py` writes and reads commands. A command is a plain
value, which a driver must not change.
"""

from dataclasses import dataclass
from typing import NamedTuple

from hydra_tune.schedule.units import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Prepare a job now; answered by `JobAdmitted` or `JobRejected`."""

    job: str


class Run(NamedTuple):
    """Run the job's unit on the device now; answered by `UnitFinished` or `UnitFailed`, or by the device's `DeviceLost`."""

    job: str
    device: str
    unit: Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class EndBurst:
    """End the job's burst on the device after the present step, because another job waits for the device.

    Answered only by the unit's own end, as for `Run`. The command has no effect if the unit ends by itself in the
    meantime.
    """

    job: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Give back all memory of a job that is over, with no unit running. The scheduler has forgotten the job: no answer."""

    job: str


Command = Admit | Run | EndBurst | Release
"""Everything that `Scheduler.handle` returns."""
