"""Table of a `FusedPool`: the jobs that are not over, and the running groups.

`FusedPool` (`fused_pool.py`) enters each job at the submission, `GroupJobLauncher` (`group_jobs.py`) enters each group
that forms, and `GroupEndHandler` (`group_completion.py`) removes groups that end. `GroupMatcher` (`group_matcher.py`)
looks for jobs here, and `MemberLoaders` (`group_loaders.py`) for members that draw. `Pool` calls `close` at its
shutdown (`Pool.at_close`). The module must not know how a group computes.

Note: the table uses the pool's lock. In reaction to an event, carriers are resumed and submitted without the lock, on
the `timer` thread. Only `FusedJobTable.over` ends a job. `over` closes the job's trial after releasing the lock, and so
must be called without the lock, because a close runs users' code.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from hydra_tune.pool.faults.task_thread import BackgroundCallQueue
from hydra_tune.pool.fusion.fused_job import FusedJob
from hydra_tune.pool.fusion.live_group import LiveGroup
from hydra_tune.pool.job import Failed, Finished, Result
from hydra_tune.pool.pool import Pool
from hydra_tune.train.data.loader_clock import LoaderInterrupt


@dataclass(frozen=True, slots=True)
class GroupSizeLimit:
    """The largest number of members for a kind of trial, with the reason; at most 1: trials of the kind run alone."""

    most: int
    why: str


class FusedJobTable:
    """Live jobs and groups.

    Attributes:
        entries: the jobs by key, in the order of submission.
        groups: running groups by their carrier's key.
        limits: limits of later groups by fusion key, where larger groups have ended before their members.
        building: thread that builds joiners and plans, and times smaller groups, beside the pool's preparer.
        timer: thread for calls into the pool that must not be made under the lock, now or later.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.entries: dict[str, FusedJob] = {}
        self.groups: dict[str, LiveGroup] = {}
        self.limits: dict[Hashable, GroupSizeLimit] = {}
        self.building, self.timer = BackgroundCallQueue("hydra-members"), BackgroundCallQueue("hydra-groups")

    def free(self) -> list[FusedJob]:
        """Jobs that a group may take."""
        with self.pool.changed:
            return [entry for entry in self.entries.values() if entry.is_free]

    def group_of(self, entry: FusedJob) -> LiveGroup | None:
        """Return the group in which a job has, or is promised, a slot."""
        return None if entry.carrier is None else self.groups.get(entry.carrier.key)

    def is_undecided(self, entry: FusedJob) -> bool:
        """Return whether another carrier compares a job, or has taken the job and not yet formed a group. Under the lock."""
        return entry.is_building or (entry.is_taken and self.group_of(entry) is None)

    def group_for(self, entry: FusedJob, *, grows: bool) -> LiveGroup | None:
        """Return a group that a job may join, preferably one with a vacant slot. Under the lock."""
        open_groups = [group for group in self.groups.values() if group.admits(entry) and group.has_room(grows=grows)]
        return next(
            (group for group in open_groups if group.has_room(grows=False)), open_groups[0] if open_groups else None
        )

    def over(self, entry: FusedJob, result: Result) -> None:
        """End a job, unless the job has ended already."""
        job = entry.job
        with self.pool.changed:
            if self.entries.pop(job.key, None) is None:
                return
        # Without the lock, because closing a trial runs the user's code. Only this call has the entry now.
        if isinstance(result.error, LoaderInterrupt) and entry.loader_error is not None:
            result.error = entry.loader_error
        member = entry.trial
        full_result = entry.result(result)
        # A member whose slot has ended was closed by its group, and a member without a slot is closed with its carrier.
        if member is not None and (member.clock.is_abandoned or (entry.seat is not None and entry.seat.status is None)):
            member.close(keep=False)
            member.clock.released()
        self.pool.end(job, full_result)
        if job.events is not None:
            job.events.put(Failed(job, result) if result.status == "failed" else Finished(job, result))

    def close(self) -> None:
        """Stop both threads and cancel the remaining jobs; called shortly before the pool ends."""
        self.building.close()
        self.timer.close()
        with self.pool.changed:
            live_entries = list(self.entries.values())
        for entry in live_entries:
            self.over(entry, Result(status="cancelled"))
