"""Members of a `FusedPool` with stalled data loaders: `LoaderWatchdog` finds the members here, and gives them up.

`LoaderWatchdog` (`pool/faults/loader_watchdog.py`) asks `MemberLoaders` for the drawing members at each look, several
times a second; `FusedPool` (`fused_pool.py`) gives the watch a `MemberLoaders`. `MemberLoaders` looks jobs up under the
pool's lock, and a clock's lock comes after the pool's. The module must not know how a group computes.

Note: where members draw. A job in preparation draws its first batch on the preparer's thread, and is watched like any
trial in preparation. A job that another carrier compares in preparation draws on that carrier's preparer thread, which the
watch replaces. A joiner that the `building` thread has found draws on that thread, which is replaced if the loader never
returns. A member of a group draws on the thread that advances the group: the watch logs the loader and finally interrupts
the loader. A loader that hangs in a system call blocks its whole group.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from typing_extensions import override

from hydra_tune.pool.faults.loader_watchdog import DrawingMember, MemberLoaderSource
from hydra_tune.pool.fusion.fused_job import FusedJob
from hydra_tune.pool.fusion.job_table import FusedJobTable
from hydra_tune.pool.job import Job, Result
from hydra_tune.train.data.loader_clock import DrawClock


class JoinerSearcher(Protocol):
    """Search for joiners; see `GroupJobLauncher`."""

    def look_later(self) -> None:
        """Search, on another thread, for a job that could join a group."""


class MemberLoaders(MemberLoaderSource):
    """Loaders of the jobs of a `FusedPool`.

    Args:
        looking: called when the thread that searches for members has been given up.
    """

    def __init__(self, table: FusedJobTable, looking: JoinerSearcher) -> None:
        self._table = table
        self._looking = looking

    @override
    def clocks(self) -> Mapping[str, DrawClock]:
        with self._table.pool.changed:
            return {
                entry.carrier.key: entry.trial.clock
                for entry in self._table.entries.values()
                if entry.carrier is not None and entry.is_forming and entry.trial is not None
            }

    @override
    def drawing(self) -> Iterable[DrawingMember]:
        with self._table.pool.changed:
            entries = [entry for entry in self._table.entries.values() if not entry.is_forming]
        return [
            _DrawingFusedJob(entry, self._table, self._looking) for entry in entries if entry.seat or entry.candidate
        ]


class _DrawingFusedJob(DrawingMember):
    """A job that draws outside its own preparation."""

    def __init__(self, entry: FusedJob, table: FusedJobTable, looking: JoinerSearcher) -> None:
        self.job: Job = entry.job
        self._entry = entry
        self._table = table
        self._looking = looking

    @override
    def fails_with(self, error: BaseException) -> None:
        self._entry.loader_error = error

    @property
    @override
    def clock(self) -> DrawClock | None:
        member = self._entry.candidate or self._entry.trial
        return None if member is None else member.clock

    @property
    @override
    def is_stopped(self) -> bool:
        return self._entry.stop is not None

    @property
    @override
    def is_on_preparer(self) -> bool:
        clock = self.clock
        if clock is None or self._entry.candidate is None:
            return False
        return not self._table.building.is_at_work_on(clock.thread)

    def abandon(self) -> bool:
        """As of `DrawingMember`; a hanging joiner ends, and another thread continues the search for joiners."""
        entry, table, clock = self._entry, self._table, self.clock
        with table.pool.changed:
            is_joining = entry.seat is not None and entry.is_taken and not entry.is_seated and entry.candidate is None
            # `clock.abandon` comes last: it is the only check with an effect, and decides the race with a loader that
            # returns now.
            if clock is None or not is_joining or not table.building.is_at_work_on(clock.thread) or not clock.abandon():
                return False
            old_carrier = entry.carrier
        table.building.replace(clock.thread)
        table.over(entry, Result(status=entry.stop or "failed", error=None if entry.stop else entry.loader_error))
        if old_carrier is not None:
            old_carrier.cancel()
        self._looking.look_later()
        return True
