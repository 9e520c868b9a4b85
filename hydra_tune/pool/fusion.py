"""Horizontal fusion in a pool: jobs whose trials may be one group are run as one.

Note: carriers. For each job that is submitted here the pool is given one of its own, its carrier. When a carrier is prepared
it takes along all jobs that wait and have the same fusion key; their carriers are stopped, and it runs the group. A carrier
that finds nobody, or whose trial cannot be fused, runs its own job's trial as ever. Either way what becomes of a carrier is
passed on to the jobs that it carries.

Note: the lock is the pool's. What the pool is asked to do in answer to an event is asked without it.
"""

import logging
import time
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra_tune.devices.device import Device
from hydra_tune.errors import CheckpointError, ConfigError, HydraTuneError, UnfusableError
from hydra_tune.fusion.chooser import Chooser, steps_of
from hydra_tune.fusion.group import GroupTrial, Seat
from hydra_tune.fusion.key import fusion_key
from hydra_tune.fusion.member import Member, Wanted
from hydra_tune.fusion.plans import GroupPlans, layout_of
from hydra_tune.memory.host import HostTier
from hydra_tune.memory.tenant import Tenant
from hydra_tune.pool.job import EventStream, Failed, Finished, Job, PoolEvent, Progress, Reported, Result
from hydra_tune.pool.pool import Pool
from hydra_tune.pool.record import forget_locals, progress_of, progress_without_trial
from hydra_tune.shard.library import PlanLibrary
from hydra_tune.task import TrainTask
from hydra_tune.train.helpers import Helpers
from hydra_tune.train.shared_times import SharedTimes
from hydra_tune.train.trial import Report, Trial

_LOGGER = logging.getLogger("hydra_tune.fusion")
_SETTLED_SECONDS = 0.05  # without a new job, before a group is closed
_PATIENCE_SECONDS = 1.0


class _Entry:
    """A job, and who carries it.

    Attributes:
        job: as the driver has it.
        carrier: the pool's job that runs it, by itself or in a group.
        stop: how the driver wants it to end, if it does.
        trial: its own, once built.
        key: its fusion key, once known.
        seat: its place in a group; None while it has none.
        is_taken: whether another job's carrier has it, or is about to.
        is_forming: whether its carrier looks for others.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.carrier: Job | None = None
        self.stop: str | None = None
        self.trial: Member | None = None
        self.key: Hashable | None = None
        self.seat: Seat | None = None
        self.is_taken = False
        self.is_forming = False

    @property
    def is_free(self) -> bool:
        """Whether a group may take it."""
        job = self.job
        return (
            not self.is_taken and self.trial is None and self.stop is None and job.state == "queued" and not job.paused
        )

    @property
    def is_shared(self) -> bool:
        """Whether its carrier carries others too, or may be about to."""
        return self.seat is not None or self.is_taken or self.is_forming


class _CarrierEvents(EventStream):
    """Passes on what becomes of a carrier."""

    def __init__(self, fusion: "Fusion", entry: _Entry) -> None:
        super().__init__()
        self.put = partial(fusion.told, entry)
        self._entry = entry

    @property
    def waits(self) -> bool:
        """A group reports only where somebody waits for an answer."""
        return self._entry.seat is not None or self._entry.job.events is not None


class Fusion:
    """Takes jobs for a pool, and has it run them in groups.

    Args:
        pool: runs them.
        library: the pool's.
        most: members of a group.
        chooser: says whether trials gain by it; None: all are fused that can be.
    """

    def __init__(self, pool: Pool, library: PlanLibrary, most: int, chooser: Chooser | None = None) -> None:
        self._pool = pool
        self._plans = GroupPlans(library)
        self._library = library
        self._most = most
        self._chooser = chooser
        self._entries: dict[str, _Entry] = {}
        self._groups: dict[str, list[_Entry]] = {}  # by the key of their carrier
        self._numbers = 0
        self._last_submitted = 0.0

    def submit(self, task: TrainTask, name: str | None, events: EventStream | None, *, priority: int) -> Job:
        """Queue a task."""
        with self._pool.changed:
            number, self._numbers = self._numbers, self._numbers + 1
            shown = name or f"job {number}"
            job = Job(key=f"member {number}:{shown}", name=shown, task=task, pool=self, events=events)
            entry = _Entry(job)
            self._entries[job.key] = entry
            self._last_submitted = time.monotonic()
        try:
            carrier = self._pool.submit(
                task, shown, _CarrierEvents(self, entry), priority=priority, make_trial=partial(self._make, entry)
            )
        except BaseException:
            with self._pool.changed:
                del self._entries[job.key]
            raise
        with self._pool.changed:
            entry.carrier = entry.carrier or carrier
            self._pool.changed.notify_all()
        return job

    # Preparing.

    def _make(
        self,
        entry: _Entry,
        task: TrainTask,
        library: PlanLibrary,
        device: Device,
        helpers: Helpers | None,
        host: HostTier | None,
        tenant: Tenant | None,
        times: SharedTimes | None,
        **begun: Any,
    ) -> Trial:
        """A group's trial, or the job's own; on the preparer's thread."""
        member = Member(task, library, device, helpers, host, tenant, times, **begun)
        with self._pool.changed:
            self._pool.changed.wait_for(lambda: entry.carrier is not None)
            entry.trial, entry.is_forming = member, True
            entry.job.enter("preparing")
        others: list[_Entry] = []
        try:
            others = self._others(entry, member, device)
        except UnfusableError as error:
            _LOGGER.info("%s is not fused: %s", entry.job.name, error)
        finally:
            stop = self._formed(entry, others)
        if not others:
            if stop is not None and entry.carrier is not None:
                self._pool.stop(entry.carrier, stop)
            return member
        _LOGGER.info("%d trials are fused: %s", len(others) + 1, ", ".join(one.job.name for one in (entry, *others)))
        seats = [one.seat for one in (entry, *others) if one.seat is not None]
        group = GroupTrial(
            seats, self._plans, library, device, lambda seat: self._seat_over(group, seat), host, tenant, times
        )
        return group

    def _formed(self, entry: _Entry, others: list[_Entry]) -> str | None:
        """A carrier has found those that it takes along; returns how its own job is to end, if it is."""
        with self._pool.changed:
            entry.is_forming = False
            together = (entry, *others) if others else ()
            own = [one.carrier for one in others]
            for one in together:
                assert one.trial is not None
                one.seat = Seat(one.trial, waits=one.job.events is not None)
                one.seat.stop = one.stop
                one.carrier = entry.carrier
            entry.job.enter("running")
            for one in others:
                one.job.enter("running")
            if entry.carrier is not None and together:
                self._groups[entry.carrier.key] = list(together)
        for carrier in own:
            if carrier is not None:
                carrier.cancel()
        return entry.stop

    def _others(self, entry: _Entry, member: Member, device: Device) -> list[_Entry]:
        """Those that are computed together with a job.

        Raises:
            UnfusableError: nobody is.
        """
        key, most, wanted = self._fusable(entry, member, device)
        if self._chooser is None:
            return self._take(key, most - 1, device)
        kind, steps = (key, wanted.leaves.signature, device.torch_device.type), steps_of(member)
        self._chooser.refuse(kind, steps * min(most, 1 + len(self._waiting())))
        taken = self._take(key, most - 1, device)
        if not taken:
            return taken
        all_steps = [steps, *(steps_of(one.trial) for one in taken if one.trial is not None)]
        choice = self._chooser.choose(kind, member, wanted, device, all_steps, most)
        self._leave(taken[choice.size - 1 :])
        if choice.size == 1:
            raise UnfusableError(choice.why)
        return taken[: choice.size - 1]

    def _leave(self, taken: list[_Entry]) -> None:
        """Have jobs that were taken wait again."""
        for entry in taken:
            with self._pool.changed:
                trial, entry.trial, entry.is_taken = entry.trial, None, False
                stop, carrier = entry.stop, entry.carrier
            if trial is not None:
                trial.close(keep=False)
            if stop is not None and carrier is not None:
                self._pool.stop(carrier, stop)

    def _waiting(self) -> list[_Entry]:
        with self._pool.changed:
            return [one for one in self._entries.values() if one.is_free and one.carrier is not None]

    def _fusable(self, entry: _Entry, member: Member, device: Device) -> tuple[Hashable, int, Wanted]:
        """A trial's key, how many like it a device has room for, and its first batch.

        Raises:
            UnfusableError: it cannot be fused.
        """
        key = entry.key = fusion_key(entry.job.task, *member.built())
        wanted = member.peek()
        prepared = self._plans.of_member(member, wanted["train"])
        self._plans.stacked(prepared, self._most)
        if prepared.plan.is_stochastic and not device.shares_generator:
            raise UnfusableError(
                "it draws random numbers, and those of several trials are told apart on CPU devices only"
            )
        most = min(self._most, self._pool.budget_bytes // prepared.plan.peak_bytes)
        if most < 2:  # noqa: PLR2004
            raise UnfusableError("a device has no room for two of its kind at once")
        if "evaluate" in wanted:
            evaluated = self._plans.of_member(member, wanted["evaluate"], layout_of(prepared))
            self._plans.stacked(evaluated, self._most)
        return key, most, wanted["train"]

    def _take(self, key: Hashable, most: int, device: Device) -> list[_Entry]:
        """Jobs that wait and have this key, built; nobody else takes them any more."""
        began = time.monotonic()
        while (
            time.monotonic() - self._last_submitted < _SETTLED_SECONDS and time.monotonic() - began < _PATIENCE_SECONDS
        ):
            time.sleep(_SETTLED_SECONDS / 10)
        taken: list[_Entry] = []
        for entry in self._waiting():
            if len(taken) == most:
                break
            if entry.key in (None, key) and self._takes(entry, key, device):
                taken.append(entry)
        return taken

    def _takes(self, entry: _Entry, key: Hashable, device: Device) -> bool:
        """Build a job's trial, and take it if it has this key."""
        member = Member(entry.job.task, self._library, device)
        try:
            entry.key = fusion_key(entry.job.task, *member.built())
        except BaseException:  # noqa: BLE001 - it comes up again where the job's own carrier builds it
            entry.key = object()
        with self._pool.changed:
            is_taken = entry.key == key and entry.is_free
            if is_taken:
                entry.is_taken, entry.trial = True, member
        if not is_taken:
            member.close(keep=False)
        return is_taken

    # What becomes of them.

    def told(self, entry: _Entry, event: PoolEvent) -> None:
        """Something has become of the carrier that was made for a job."""
        with self._pool.changed:
            members = self._groups.get(event.job.key)
            if isinstance(event, Reported):
                self._pass_on(entry, members, event)
                return
            self._groups.pop(event.job.key, None)
        if members is not None:
            for one in members:
                self._over(one.job, Result(status=event.result.status, error=event.result.error))
        elif not entry.is_taken:
            self._over(entry.job, event.result)

    @staticmethod
    def _pass_on(entry: _Entry, members: list[_Entry] | None, event: Reported) -> None:
        if members is None:
            _report(entry.job, event.step, event.metrics)
            return
        for one in members:
            seat = one.seat
            if seat is not None and seat.is_waiting and isinstance(seat.wants, Report):
                _report(one.job, seat.wants.step, seat.wants.metrics)

    def _seat_over(self, group: GroupTrial, seat: Seat) -> None:
        """A member of a group has ended; on the thread that has the group go on."""
        member, planned = seat.member, seat.member.units_planned
        assert seat.status is not None
        forget_locals(seat.error)
        is_stopped = seat.status in ("pruned", "cancelled") and planned is not None
        result = Result(
            status=seat.status,
            error=seat.error,
            metrics=member.metrics,
            history=member.history,
            num_shards=group.num_shards,
            activations=group.activations,
            optimizer_placement=group.optimizer_placement,
            split_batches=member.split_batches,
            units_run=member.units_run,
            units_saved=max(0, planned - member.units_run) if is_stopped and planned is not None else 0,
            compute_seconds=member.compute_seconds,
            group_size=len(group.seats),
        )
        result.keep(seat.module, seat.optimizer)
        seat.module, seat.optimizer = None, None
        with self._pool.changed:
            entry = next(one for one in self._entries.values() if one.seat is seat)
        self._over(entry.job, result)

    def _over(self, job: Job, result: Result) -> None:
        with self._pool.changed:
            if self._entries.pop(job.key, None) is None:
                return
            job.end(result)
            self._pool.changed.notify_all()
        if job.events is not None:
            job.events.put(Failed(job, result) if result.status == "failed" else Finished(job, result))

    # What drivers ask of their jobs.

    def proceed(self, job: Job) -> None:
        """Let a job that waits at a report go on."""
        with self._pool.changed:
            entry = self._entries.get(job.key)
            if entry is None or job.state != "waiting" or entry.carrier is None:
                return
            job.enter("running")
            if entry.seat is not None:
                entry.seat.is_answered = True
            goes_on = self._is_answered(entry)
        if goes_on:
            entry.carrier.proceed()

    def stop(self, job: Job, status: str) -> None:
        """End a job as "pruned" or "cancelled"."""
        with self._pool.changed:
            entry = self._entries.get(job.key)
            if entry is None or entry.carrier is None:
                return
            entry.stop = entry.stop or status
            if entry.seat is not None:
                entry.seat.stop = entry.seat.stop or status
            is_shared = entry.is_shared
            goes_on = entry.seat is not None and self._is_answered(entry)
        if goes_on:
            entry.carrier.proceed()
        elif not is_shared:
            self._pool.stop(entry.carrier, status)

    def _is_answered(self, entry: _Entry) -> bool:
        """Whether nobody of those that a job is carried with waits any more."""
        assert entry.carrier is not None
        members = self._groups.get(entry.carrier.key, [])
        return not any(one.seat is not None and one.seat.waits and one.seat.is_waiting for one in members)

    def pause(self, job: Job, *, paused: bool) -> None:
        """Hold a job back, or let it go on; one of a group cannot be held back by itself.

        Raises:
            HydraTuneError: it is one of a group.
        """
        with self._pool.changed:
            entry = self._entries.get(job.key)
            if entry is None or entry.carrier is None:
                return
            if entry.is_shared:
                raise HydraTuneError(
                    f"{job.name!r} is computed together with other trials and cannot be paused by itself; train it with "
                    "fusion='off'"
                )
            job.hold(paused=paused)
        self._pool.pause(entry.carrier, paused=paused)

    def prioritize(self, job: Job, priority: int) -> None:
        """Give a job, and those that it is computed with, another priority."""
        with self._pool.changed:
            entry = self._entries.get(job.key)
        if entry is not None and entry.carrier is not None:
            self._pool.prioritize(entry.carrier, priority)

    def progress(self, job: Job) -> Progress:
        """How far a job is."""
        with self._pool.changed:
            entry = self._entries.get(job.key)
            if entry is None or entry.trial is None:
                return progress_without_trial(job)
            carrier = entry.carrier
            members = [] if carrier is None else self._groups.get(carrier.key, [])
            return replace(progress_of(job, entry.trial), group_size=max(1, len(members)))

    def save(self, job: Job) -> "Future[Path]":
        """Refused.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(f"{job.name!r} may be one of a fused group, which saves no checkpoints; use fusion='off'")


def members_of_group(fusion: object, most: object, checkpoint_dir: object) -> int:
    """How many trials a group may have by these options of the executor; 0 where there are no groups.

    Raises:
        ConfigError: by name.
    """
    if fusion not in ("off", "on", "auto"):
        raise ConfigError(f"fusion must be 'off', 'on' or 'auto', not {fusion!r}")
    if isinstance(most, bool) or not isinstance(most, int) or most < 2:  # noqa: PLR2004 - a group
        raise ConfigError(f"fusion_size must be a whole number of at least 2, not {most!r}")
    if fusion != "off" and checkpoint_dir is not None:
        raise ConfigError(f"fused trials save no checkpoints; give checkpoint_dir, or fusion={fusion!r}, and not both")
    return 0 if fusion == "off" else most


def _report(job: Job, step: int, metrics: dict[str, float]) -> None:
    if job.events is not None:
        job.enter("waiting")
        job.events.put(Reported(job, step, dict(metrics)))
