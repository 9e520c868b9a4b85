"""`Unit`: one shard unit as the scheduler sees it.

What runs, on which shard, and about how long. The scheduler never looks inside: what a kind
means is the pool's business.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One indivisible piece of a job's work on one device.

    Args:
        kind: what is done: `"forward"`, `"backward"`, `"update"`, `"evaluate"`, ...; carried along, never interpreted.
        shard: the shard whose parameters it needs, from 0.
        seconds: how long it is predicted to take, without transfers.
        rank: of a job's ready units the one of the lowest rank goes first.
        near: the device that has what it works on, or is home to its shard; None if none has, or none is known to. It runs
            there if that one is idle when it gets a device.
        may_end_early: whether it is made of steps, and ends after the next of them when the scheduler asks for that.
    """

    kind: str
    shard: int
    seconds: float
    rank: int = 0
    near: str | None = None
    may_end_early: bool = False
