"""`Unit`: a shard unit as the scheduler sees it.

A unit says which kind of work runs on which shard, and about how long. The scheduler never interprets a unit's kind;
the meaning of a kind is up to the driver. `unit_of` (`pool/devices/next_units.py`) makes a `Unit` of each due unit of a
trial, and `JobState` (`pool/runtime/job_state.py`) adds `rank` and `near` where units run side by side. `RESUME`
(`pool/runtime/worker.py`) stands for a trial's own code after a report, and `simulate/` makes the units of simulated trials.
The scheduler hands the same `Unit` back in a `Run` (`commands.py`). `journal.py` writes every field, so a renamed field makes
old recordings unreadable.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A piece of a job's work on a device, never interrupted; only a burst may end early, between two of its steps.

    Args:
        kind: kind of work: `"forward"`, `"backward"`, `"update"`, `"evaluate"`, ...; passed on, never interpreted.
        shard: the shard whose parameters the unit needs, from 0.
        seconds: predicted time, without transfers.
        rank: among a job's ready units, the lowest rank goes first.
        near: the preferred device, which has the unit's inputs or is home to its shard; None if there is none, or none
            is known. The unit runs there if that device is idle when the unit is assigned.
        may_end_early: whether the unit consists of steps, and ends after the next step on the scheduler's request.
        base: the frozen parameters that the unit shares with other jobs' units; None if the unit shares none.
        base_position: the first place of `base` that the unit reads; units at nearby places share most of what they read.
    """

    kind: str
    shard: int
    seconds: float
    rank: int = 0
    near: str | None = None
    may_end_early: bool = False
    base: str | None = None
    base_position: int = 0
