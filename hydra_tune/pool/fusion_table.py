"""The jobs of a `Fusion` that are not over, and the groups that are under way.

Note: the lock is the pool's. What the pool is asked to do in answer to an event is asked without it.
"""

from collections.abc import Hashable

from hydra_tune.pool.fusion_entry import Entry
from hydra_tune.pool.fusion_group import LiveGroup
from hydra_tune.pool.job import Failed, Finished, Result
from hydra_tune.pool.later import Later
from hydra_tune.pool.pool import Pool
from hydra_tune.train.drawing import GivenUp


class FusionTable:
    """All that is known of them.

    Args:
        pool: runs them.

    Attributes:
        entries: the jobs, by their keys, in the order in which they were submitted.
        groups: by the key of their carrier.
        limits: members of a group, by its key, where memory has run out under more.
        building: a thread on which members and plans are made beside the pool's.
        timer: a thread on which the pool is asked for what must not be asked under the lock, now or later.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.entries: dict[str, Entry] = {}
        self.groups: dict[str, LiveGroup] = {}
        self.limits: dict[Hashable, int] = {}
        self.building, self.timer = Later("hydra-members"), Later("hydra-groups")

    def free(self) -> list[Entry]:
        """Jobs that a group may take."""
        with self.pool.changed:
            return [one for one in self.entries.values() if one.is_free]

    def group_of(self, entry: Entry) -> LiveGroup | None:
        """The group that a job has a place in, or is promised one."""
        return None if entry.carrier is None else self.groups.get(entry.carrier.key)

    def group_for(self, entry: Entry, *, grows: bool) -> LiveGroup | None:
        """A group that a job may come to, rather one with a vacant place. Under the lock."""
        found = [one for one in self.groups.values() if one.admits(entry) and one.has_room(grows=grows)]
        return next((one for one in found if one.has_room(grows=False)), found[0] if found else None)

    def over(self, entry: Entry, result: Result) -> None:
        """End a job, if it has not ended."""
        job = entry.job
        with self.pool.changed:
            if self.entries.pop(job.key, None) is None:
                return
        if isinstance(result.error, GivenUp) and entry.loader_error is not None:
            result.error = entry.loader_error
        member = entry.trial
        planned_by = entry.result(result)
        if member is not None and (member.clock.is_abandoned or (entry.seat is not None and entry.seat.status is None)):
            member.close(keep=False)
            member.clock.released()
        with self.pool.changed:
            job.end(planned_by)
            self.pool.changed.notify_all()
        if job.events is not None:
            job.events.put(Failed(job, result) if result.status == "failed" else Finished(job, result))

    def close(self) -> None:
        """The pool is about to end; nobody carries a job any more."""
        self.building.close()
        self.timer.close()
        with self.pool.changed:
            left = list(self.entries.values())
        for entry in left:
            self.over(entry, Result(status="cancelled"))
