"""Horizontal fusion in a pool: jobs whose trials may be one group are run as one.

Note: carriers. For each job that is submitted here the pool is given one of its own, its carrier. When a carrier is prepared
it takes along all jobs that wait and have the same fusion key; their carriers are stopped, and it runs the group. A carrier
that finds nobody, or whose trial cannot be fused, runs its own job's trial as ever. Either way what becomes of a carrier is
passed on to the jobs that it carries.

Note: late joiners. While a group has room, a job of its key needs no carrier: its trial is built and begun beside the group, on
the preparer's thread or on one of ours, and comes to the group between two steps (`fusion_group.py`). One that is paused leaves
the group with its state, and comes back as a joiner, or is given another carrier.

Note: the lock is the pool's. What the pool is asked to do in answer to an event is asked without it.
"""

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra_tune.checkpoint.saved import Saved
from hydra_tune.devices.device import Device
from hydra_tune.errors import CheckpointError, HydraTuneError, OutOfMemoryError, UnfusableError
from hydra_tune.fusion.chooser import Chooser, steps_of
from hydra_tune.fusion.group import GroupTrial
from hydra_tune.fusion.key import fusion_key
from hydra_tune.fusion.member import Member, Wanted
from hydra_tune.fusion.plans import GroupPlans, layout_of, room_for
from hydra_tune.memory.host import HostTier
from hydra_tune.memory.pressure import NotRepeatableError
from hydra_tune.memory.tenant import Tenant
from hydra_tune.pool.checkpoints import Origin, TrialKeeper
from hydra_tune.pool.faults import first_line, is_not_its_own
from hydra_tune.pool.fusion_entry import CarrierEvents, Entry
from hydra_tune.pool.fusion_group import LiveGroup, tell
from hydra_tune.pool.job import OVER, EventStream, Failed, Finished, Job, PoolEvent, Progress, Reported, Result
from hydra_tune.pool.later import Later
from hydra_tune.pool.pool import Pool, paused_within_a_step
from hydra_tune.pool.record import forget_locals, progress_of, progress_without_trial
from hydra_tune.shard.library import PlanLibrary
from hydra_tune.task import TrainTask
from hydra_tune.train.capture import Beginning
from hydra_tune.train.helpers import Helpers
from hydra_tune.train.shared_times import SharedTimes
from hydra_tune.train.trial import Report, Trial

_LOGGER = logging.getLogger("hydra_tune.fusion")
_SETTLED_SECONDS = 0.05  # without a new job, before a group is closed
_PATIENCE_SECONDS = 1.0


class _Absent(Trial):
    """In the place of a trial that a group has got meanwhile: nothing of it runs here."""

    def advance(self) -> None:
        """It is over."""
        self.outcome = "cancelled"


class Fusion:
    """Takes jobs for a pool, and has it run them in groups.

    Args:
        pool: runs them.
        library: the pool's.
        most: members of a group.
        chooser: says whether trials gain by it; None: all are fused that can be.
        backend: of `torch.compile`, which steps of groups are compiled with, if any.
    """

    def __init__(
        self, pool: Pool, library: PlanLibrary, most: int, chooser: Chooser | None = None, backend: str | None = None
    ) -> None:
        self._pool = pool
        self._plans = GroupPlans(library, backend)
        self._library = library
        self._most = most
        self._chooser = chooser
        self._entries: dict[str, Entry] = {}
        self._groups: dict[str, LiveGroup] = {}  # by the key of their carrier
        self._limits: dict[Hashable, int] = {}  # members of a group, by its key, where memory has run out under more
        self._numbers = 0
        self._last_submitted = 0.0
        self._building, self._timer = Later("hydra-members"), Later("hydra-groups")
        pool.at_close.append(self._close)

    def submit(
        self,
        task: TrainTask,
        name: str | None,
        events: EventStream | None,
        *,
        priority: int,
        origin: Origin | None = None,
        labels: Mapping[str, Any] | None = None,
        saved_as: str | None = None,
        max_retries: int = 0,
    ) -> Job:
        """Queue a task; as `Pool.submit`."""
        saving, origin = self._pool.checkpoints, origin or Origin()
        with self._pool.changed:
            number, self._numbers = self._numbers, self._numbers + 1
            shown = name or f"job {number}"
            job = Job(key=f"member {number}:{shown}", name=shown, task=task, pool=self, events=events)
            folder = saving.place(saved_as or shown, origin.folder)
            keeper = TrialKeeper(saving, shown, folder, dict(labels or {}))
            entry = Entry(job, keeper, origin.beginning, priority, max_retries)
            self._entries[job.key] = entry
        try:
            self._carry(entry)
        except BaseException:
            with self._pool.changed:
                del self._entries[job.key]
            saving.leave(folder)
            raise
        self._look_later()
        return job

    def _carry(self, entry: Entry) -> None:
        """Give a job a carrier."""
        with self._pool.changed:
            ticket = entry.ticket = object()
        carrier = self._pool.submit(
            entry.job.task,
            entry.job.name,
            CarrierEvents(self, entry),
            priority=entry.priority,
            make_trial=partial(self._make, entry, ticket),
            is_saved=False,
        )
        with self._pool.changed:
            entry.carrier = entry.carrier or carrier
            self._last_submitted = time.monotonic()
            self._pool.changed.notify_all()

    # Preparing.

    def _make(
        self,
        entry: Entry,
        ticket: object,
        task: TrainTask,
        library: PlanLibrary,
        device: Device,
        helpers: Helpers | None,
        host: HostTier | None,
        tenant: Tenant | None,
        times: SharedTimes | None,
        **_: Any,
    ) -> Trial:
        """A group's trial, or the job's own; on the preparer's thread."""
        with self._pool.changed:
            self._pool.changed.wait_for(
                lambda: entry.ticket is not ticket or (entry.carrier is not None and not entry.is_building)
            )
            if entry.ticket is not ticket or entry.is_taken or entry.job.key not in self._entries:
                return _Absent(task, library, device)
            entry.is_forming = True
            entry.job.enter("preparing")
        others: list[Entry] = []
        is_absent = False
        try:
            if entry.trial is None:
                entry.trial = self._built(entry, device, helpers, host, tenant, times)
            wanted = None
            if not entry.most:
                entry.most, wanted = self._fusable(entry, entry.trial, device)
            is_absent = self._joins(entry)
            if not is_absent:
                others = self._others(entry, wanted, device)
        except UnfusableError as error:
            _LOGGER.info("%s is not fused: %s", entry.job.name, error)
        except BaseException:
            self._forget(entry)
            raise
        finally:
            with self._pool.changed:
                entry.is_forming = False
        if is_absent:
            return _Absent(task, library, device)
        assert entry.trial is not None
        if entry.seat is None and not others:
            return self._alone(entry, entry.trial)
        return self._formed(entry, others, device, host, tenant, times)

    def _built(self, entry: Entry, device: Device, *beside: Any) -> Member:
        """A job's trial, built, with what it goes on from."""
        keeper = entry.keeper
        if keeper is not None:
            keeper.open()
        beginning = entry.begin()
        if keeper is not None and beginning is not None:
            keeper.goes_on_from(beginning.saved.path)
        member = Member(entry.job.task, self._library, device, *beside, beginning=beginning, keeper=keeper)
        try:
            entry.key = key = fusion_key(entry.job.task, *member.built())
            member.architecture = key.architecture
        except UnfusableError as error:
            entry.key = error
        except BaseException:
            member.close(keep=False)
            raise
        return member

    def _forget(self, entry: Entry) -> None:
        """Something has been raised while a job's trial was made."""
        member, entry.trial = entry.trial, None
        if member is not None:
            member.close(keep=False)

    def _alone(self, entry: Entry, member: Member) -> Trial:
        with self._pool.changed:
            entry.job.enter("running")
            stop, carrier = entry.stop, entry.carrier
        if stop is not None and carrier is not None:
            self._pool.stop(carrier, stop)
        return member

    def _formed(
        self,
        entry: Entry,
        others: Sequence[Entry],
        device: Device,
        host: HostTier | None,
        tenant: Tenant | None,
        times: SharedTimes | None,
    ) -> GroupTrial:
        """A group of those that a carrier has found."""
        together = [entry, *others]
        _LOGGER.info("%d trials are fused: %s", len(together), ", ".join(one.job.name for one in together))
        with self._pool.changed:
            assert entry.carrier is not None
            group = LiveGroup(self._pool, entry.carrier, entry.key, entry.most, self, self._building, self._timer)
            group.entries = together
            seats = [one.sit() for one in together]
            own = [one.carrier for one in others]
            for one in together:
                one.carrier, one.is_seated = entry.carrier, True
                if one.job.state != "waiting":
                    one.job.enter("running")
            group.trial = GroupTrial(
                seats, self._plans, self._library, device, group, host, tenant, times, most=entry.most
            )
            group.trial.hands_back = True
            self._groups[entry.carrier.key] = group
        for carrier in own:
            if carrier is not None:
                carrier.cancel()
        return group.trial

    def _others(self, entry: Entry, wanted: Wanted | None, device: Device) -> list[Entry]:
        """Those that are computed together with a job.

        Args:
            entry: the job.
            wanted: its first batch; None for one that has begun in a group.
            device: any device of the pool.

        Raises:
            UnfusableError: nobody is.
        """
        member = entry.trial
        assert member is not None
        if self._chooser is None or wanted is None or entry.seat is not None:
            return self._take(entry, device)
        kind, steps = (entry.key, wanted.leaves.signature, device.torch_device.type), steps_of(member)
        self._chooser.refuse(kind, steps * min(entry.most, 1 + len(self._waiting())))
        taken = self._take(entry, device)
        if not taken:
            return taken
        all_steps = [steps, *(steps_of(one.trial) for one in taken if one.trial is not None)]
        choice = self._chooser.choose(kind, member, wanted, device, all_steps, entry.most)
        self._leave(taken[choice.size - 1 :])
        if choice.size == 1:
            raise UnfusableError(choice.why)
        if choice.size < min(len(all_steps), entry.most):
            entry.most = choice.size  # more of them would gain less, those that come later as well
        return taken[: choice.size - 1]

    def _leave(self, taken: Sequence[Entry]) -> None:
        """Have jobs that were taken wait again."""
        for entry in taken:
            with self._pool.changed:
                entry.is_taken = False
                stop, carrier = entry.stop, entry.carrier
                has_begun = entry.seat is not None
            if not has_begun:
                self._forget(entry)
            if stop is not None and carrier is not None:
                self._pool.stop(carrier, stop)

    def _waiting(self) -> list[Entry]:
        with self._pool.changed:
            return [one for one in self._entries.values() if one.is_free]

    def _fusable(self, entry: Entry, member: Member, device: Device) -> tuple[int, Wanted]:
        """How many like a trial a device has room for, and its first batch.

        Raises:
            UnfusableError: it cannot be fused.
        """
        if isinstance(entry.key, UnfusableError):
            raise entry.key
        wanted = member.peek()
        prepared = self._plans.of_member(member, wanted["train"])
        self._plans.stacked(prepared, self._most)
        most = room_for(prepared, device, self._pool.budget_bytes, self._limits.get(entry.key, self._most))
        if "evaluate" in wanted:
            evaluated = self._plans.of_member(member, wanted["evaluate"], layout_of(prepared))
            self._plans.stacked(evaluated, self._most)
        return most, wanted["train"]

    def _take(self, entry: Entry, device: Device) -> list[Entry]:
        """Jobs that wait and have the key of another, built; nobody else takes them any more."""
        began = time.monotonic()
        while (
            time.monotonic() - self._last_submitted < _SETTLED_SECONDS and time.monotonic() - began < _PATIENCE_SECONDS
        ):
            time.sleep(_SETTLED_SECONDS / 10)
        taken: list[Entry] = []
        for one in self._waiting():
            if len(taken) == entry.most - 1:
                break
            if one.key in (None, entry.key) and self._takes(one, entry.key, entry.trial, device):
                taken.append(one)
        return taken

    def _takes(self, entry: Entry, key: Hashable, first: Member | None, device: Device) -> bool:
        """Build a job's trial, and take it if it has this key and is like the first, if that is not to be known already."""
        with self._pool.changed:
            if not entry.is_free:
                return False
            entry.is_building = True
        member: Member | None = entry.trial
        try:
            if member is None:
                member = self._built(entry, device)
        except BaseException:  # noqa: BLE001 - it comes up again where the job's own carrier builds it
            entry.key = object()
        is_alike = entry.key == key and (first is None or self._is_alike(entry, first, member, device))
        with self._pool.changed:
            entry.is_building = False
            is_taken = is_alike and entry.is_free
            if is_taken:
                entry.is_taken, entry.trial = True, member
            self._pool.changed.notify_all()
        if not is_taken and member is not None and entry.trial is None:
            member.close(keep=False)
        return is_taken

    def _is_alike(self, entry: Entry, first: Member, member: Member | None, device: Device) -> bool:
        """Whether a trial of the key of another may be of one group with it."""
        if member is None:
            return False
        try:
            self._plans.check_alike(first, member, may_draw=device.shares_generator)
        except UnfusableError as error:
            _LOGGER.info("%s is not computed with those of its kind: %s", entry.job.name, error)
            return False
        except Exception:  # noqa: BLE001 - it comes up again where the trial runs
            return False
        return True

    # Joining.

    def _joins(self, entry: Entry) -> bool:
        """Have a job that is being prepared come to a group that has room; False: there is none."""
        with self._pool.changed:
            grows = len(self._pool.device_names) <= len(self._groups)
            if self._group_for(entry, grows=grows) is None:
                return False
        self._begin(entry)
        with self._pool.changed:
            group = self._group_for(entry, grows=grows)
            if group is not None:
                group.come(entry)
        return group is not None

    def _group_for(self, entry: Entry, *, grows: bool) -> LiveGroup | None:
        found = [one for one in self._groups.values() if one.admits(entry) and one.has_room(grows=grows)]
        return next((one for one in found if one.has_room(grows=False)), found[0] if found else None)

    @staticmethod
    def _begin(entry: Entry) -> None:
        """Have a trial run its own code up to its first batch, which is what a group computes."""
        if entry.seat is None:
            seat = entry.sit()
            seat.member.is_fused = True
            try:
                seat.go_on()
            except BaseException:
                entry.seat = None
                raise

    def _look_later(self) -> None:
        with self._pool.changed:
            if any(one.has_room(grows=True) for one in self._groups.values()):
                self._building.do(self._look)

    def _look(self) -> None:
        """Find somebody who waits for a group that has room; on a thread of ours."""
        while True:
            with self._pool.changed:
                found = next(
                    (
                        (group, one)
                        for group in self._groups.values()
                        for one in self._entries.values()
                        if one.is_free and group.has_room(grows=True) and group.admits(one)
                    ),
                    None,
                )
            if found is None:
                return
            group, entry = found
            if self._takes(entry, group.key, None, group.trial.any_device):
                self._send_to(entry)

    def _send_to(self, entry: Entry) -> None:
        """Have a job that is taken come to a group; or back to its carrier, if there is none any more."""
        own, error = entry.carrier, None
        try:
            self._begin(entry)
        except BaseException as raised:  # noqa: BLE001 - it ends the job, as it would where its carrier had begun it
            error = raised
        with self._pool.changed:
            group = None if error is not None else self._group_for(entry, grows=True)
            if group is not None:
                group.come(entry)
        if error is not None:
            self._forget(entry)
            self._over(entry, Result(status="failed", error=error))
        elif group is None:
            self._carry_anew(entry)
        if own is not None:
            own.cancel()

    def send_back(self, entries: Sequence[Entry]) -> None:
        """As of `Keeping`."""
        for entry in entries:
            self._carry_anew(entry)

    def _carry_anew(self, entry: Entry) -> None:
        """Give a job another carrier, with what it has; or end it, if that is wanted."""
        with self._pool.changed:
            if entry.job.key not in self._entries:
                return
            entry.carrier, entry.is_taken = None, False
            stop = entry.stop
        if stop is not None:
            self._over(entry, Result(status=stop))
            return
        try:
            self._carry(entry)
        except HydraTuneError:  # the pool ends
            self._over(entry, Result(status="cancelled"))
        if entry.job.paused:
            self.pause(entry.job, paused=True)

    # What becomes of them.

    def told(self, entry: Entry, event: PoolEvent) -> None:
        """Something has become of the carrier that was made for a job."""
        with self._pool.changed:
            group = self._groups.get(event.job.key)
            if isinstance(event, Reported):
                if group is not None:
                    group.wake()
                elif not tell(entry, Report(step=event.step, metrics=event.metrics)):
                    self._timer.do(event.job.proceed)
                return
            self._groups.pop(event.job.key, None)
            if group is not None:
                group.is_over = True
                together, late = list(group.entries), list(group.arrivals)
                group.entries, group.arrivals = [], []
            elif entry.carrier is event.job and not entry.is_taken:
                together, late = [entry], []
            else:
                return
        if group is not None and isinstance(event.result.error, OutOfMemoryError):
            self._ran_out(group, together, event.result.error)
            together = []
        for one in together:
            self._carrier_over(one, event.result)
        if late:
            self._timer.do(partial(self.send_back, late))

    def _carrier_over(self, entry: Entry, result: Result) -> None:
        """The carrier of a job has ended with it."""
        error = result.error
        if result.status == "failed" and is_not_its_own(error) and entry.stop is None:
            assert error is not None
            if len(entry.faults) < entry.max_retries:
                self._begin_again(entry, error)
                return
            if entry.faults:
                error.add_note(f"the trial was begun again {len(entry.faults)} times before: max_retries")
        if entry.seat is None:
            self._over(entry, result)
        else:
            self._over(entry, Result(status=entry.stop or result.status, error=None if entry.stop else error))

    def _ran_out(self, group: LiveGroup, entries: Sequence[Entry], error: OutOfMemoryError) -> None:
        """A device had no memory for a group: its members go on in smaller ones, in the end by themselves.

        They go on where they were, if the unit that ran out was the first of its step and could be undone. Else they begin
        again from what they have saved last, and are the same when they are there.
        """
        size = len(group.trial.seats)
        with self._pool.changed:
            limit = self._limits[group.key] = size // 2
        how = f"in groups of {limit} at most" if limit > 1 else "by themselves"
        _LOGGER.warning("a group of %d trials ran out of memory, and its trials go on %s: %s", size, how, error)
        is_undone = limit > 0 and not isinstance(error.__cause__, NotRepeatableError)
        for entry in entries:
            if is_undone and entry.seat is not None and entry.seat.is_handed_back:
                with self._pool.changed:
                    entry.is_seated, entry.most = False, limit
                self._timer.do(partial(self._carry_anew, entry))
            else:
                self._begin_from(entry, self._pool.last_saved(entry))

    def _begin_again(self, entry: Entry, error: BaseException) -> None:
        """A job begins once more, from what it has saved last."""
        begin = self._pool.begin_again(entry, error)
        entry.faults = (*entry.faults, first_line(error))
        self._begin_from(entry, begin)

    def _begin_from(self, entry: Entry, begin: Callable[[], Beginning | None]) -> None:
        member = entry.trial
        if member is not None:
            member.close(keep=False)
        with self._pool.changed:
            entry.begin = begin
            if entry.keeper is not None:
                entry.keeper.begin_again()
            entry.begin_anew()
            entry.job.enter("queued")
        self._timer.do(partial(self._carry_anew, entry))

    def seat_over(self, group: LiveGroup, entry: Entry) -> None:
        """As of `Keeping`; on the thread that has the group go on."""
        seat, trial = entry.seat, group.trial
        assert seat is not None
        assert seat.status is not None
        forget_locals(seat.error)
        if seat.status == "failed" and is_not_its_own(seat.error) and len(entry.faults) < entry.max_retries:
            assert seat.error is not None
            self._begin_again(entry, seat.error)
            return
        result = Result(
            status=seat.status,
            error=seat.error,
            activations=trial.activations,
            optimizer_placement=trial.optimizer_placement,
            group_size=seat.most_together,
        )
        result.keep(seat.module, seat.optimizer)
        seat.module, seat.optimizer = None, None
        self._over(entry, result)
        self._look_later()

    def seat_left(self, entry: Entry) -> None:
        """As of `Keeping`."""
        entry.is_seated, entry.is_taken, entry.carrier = False, False, None
        self._timer.do(partial(self._goes_on, entry))
        self._timer.do(self._look_later)

    def _goes_on(self, entry: Entry) -> None:
        """Somebody wants a job that has left its group to go on, or to end, or did so while it left."""
        with self._pool.changed:
            is_aside = entry.seat is not None and not entry.is_seated and entry.carrier is None
            if not is_aside or (entry.stop is None and (entry.job.paused or entry.job.state == "waiting")):
                return
        self._carry_anew(entry)

    def _over(self, entry: Entry, result: Result) -> None:
        job = entry.job
        with self._pool.changed:
            if self._entries.pop(job.key, None) is None:
                return
        member = entry.trial
        if entry.seat is not None and entry.seat.status is None and member is not None:
            planned_by = entry.result(result)
            member.close(keep=False)
        else:
            planned_by = entry.result(result)
        with self._pool.changed:
            job.end(planned_by)
            self._pool.changed.notify_all()
        if job.events is not None:
            job.events.put(Failed(job, result) if result.status == "failed" else Finished(job, result))

    def _close(self) -> None:
        """The pool is about to end; nobody carries a job any more."""
        self._building.close()
        self._timer.close()
        with self._pool.changed:
            left = list(self._entries.values())
        for entry in left:
            self._over(entry, Result(status="cancelled"))

    # What drivers ask of their jobs.

    def proceed(self, job: Job) -> None:
        """Let a job that waits at a report go on."""
        with self._pool.changed:
            entry = self._entries.get(job.key)
            if entry is None:
                return
            entry.told.is_answered = True
            if job.state != "waiting":
                return
            job.enter("running")
            seat, carrier, group = entry.seat, entry.carrier, self._group_of(entry)
            if seat is not None:
                seat.is_answered = True
            is_due = group is not None and group.trial.is_due
        if carrier is not None and (seat is None or is_due):
            carrier.proceed()
        elif group is not None:
            group.wake_in_time()
        elif carrier is None:
            self._timer.do(partial(self._goes_on, entry))

    def stop(self, job: Job, status: str) -> None:
        """End a job as "pruned" or "cancelled"."""
        with self._pool.changed:
            entry = self._entries.get(job.key)
            if entry is None:
                return
            entry.stop = entry.stop or status
            if entry.seat is not None:
                entry.seat.stop = entry.stop
            group, carrier = self._group_of(entry), entry.carrier
            is_own = not (entry.is_seated or entry.is_taken or entry.is_forming)
        if group is not None:
            if group.carrier.state == "waiting":
                group.carrier.proceed()
        elif carrier is not None and is_own:
            self._pool.stop(carrier, status)
        elif carrier is None:
            self._timer.do(partial(self._goes_on, entry))

    def _group_of(self, entry: Entry) -> LiveGroup | None:
        """The group that a job has a place in, or is promised one."""
        return None if entry.carrier is None else self._groups.get(entry.carrier.key)

    def pause(self, job: Job, *, paused: bool) -> None:
        """Hold a job back, or let it go on; one of a group leaves it meanwhile."""
        with self._pool.changed:
            entry = self._entries.get(job.key)
            if entry is None:
                return
            job.hold(paused=paused)
            group, carrier = self._group_of(entry), entry.carrier
            if entry.seat is not None:
                entry.seat.is_paused = paused
        if group is not None:
            group.wake()
        elif carrier is not None:
            self._pool.pause(carrier, paused=paused)
        else:
            self._timer.do(partial(self._goes_on, entry))

    def prioritize(self, job: Job, priority: int) -> None:
        """Give a job, and those that it is computed with, another priority."""
        with self._pool.changed:
            entry = self._entries.get(job.key)
            carrier = None if entry is None else entry.carrier
            if entry is not None:
                entry.priority = priority
        if carrier is not None:
            self._pool.prioritize(carrier, priority)

    def progress(self, job: Job) -> Progress:
        """How far a job is."""
        with self._pool.changed:
            entry = self._entries.get(job.key)
            if entry is None or entry.trial is None:
                return progress_without_trial(job)
            group = self._group_of(entry)
            return replace(progress_of(job, entry.trial), group_size=1 if group is None else len(group.entries))

    def jobs(self) -> list[Job]:
        """Those that are not over, in the order in which they were submitted."""
        with self._pool.changed:
            return [entry.job for entry in self._entries.values()]

    # Checkpoints.

    def save(self, job: Job) -> "Future[Path]":
        """As of `Pool`."""
        future = self.ask_to_save(job)
        self.answer(job, future)
        return future

    def ask_to_save(self, job: Job) -> "Future[Path]":
        """As of `Pool`."""
        if self._pool.checkpoints.root is None or job.state in OVER:
            return self._pool.ask_to_save(job)
        return self._keeper_of(job).save()

    def copy(self, job: Job) -> "Future[Saved]":
        """As of `Pool`."""
        future = self._keeper_of(job).copy()
        self.answer(job, future)
        return future

    def answer(self, job: Job, waiting_for: "Future[Any] | None" = None) -> None:
        """As of `Pool`."""
        with self._pool.changed:
            entry = self._entries.get(job.key)
            if entry is None or entry.keeper is None:
                return
            group, carrier, member = self._group_of(entry), entry.carrier, entry.trial
        if group is not None:
            group.wake()
        elif carrier is not None and entry.seat is None:
            self._pool.answer(carrier, waiting_for, entry.keeper)
        elif member is not None and member.may_be_saved:
            entry.keeper.answer(member)
        elif job.paused:
            raise paused_within_a_step(job)

    def _keeper_of(self, job: Job) -> TrialKeeper:
        with self._pool.changed:
            entry = self._entries.get(job.key)
        if entry is None or entry.keeper is None:
            raise CheckpointError(f"{job.name!r} is over ({job.state})")
        return entry.keeper
