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
    """

    kind: str
    shard: int
    seconds: float
