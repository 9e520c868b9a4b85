"""The dispatcher of a pool: feeds the scheduler with events, carries out the commands, and ends jobs.

`Pool` (`pool/pool.py`) hands events to the state machine here at a driver's request, `Worker` (`worker.py`) after a
unit, `JobPreparer` (`preparer.py`) when a job is ready, `LoaderWatchdog` (`pool/faults/loader_watchdog.py`) when a job
waits for data, and `DeviceLossHandler` (`pool/devices/device_failure.py`) when a device is lost: all under a single
lock. The dispatcher passes the resulting commands on: units go to the workers' inboxes, admitted jobs to the preparer's
queue.

Note: order. The memory of an ended job is given back after the lock is released (`release_all`), because closing a trial
copies weights and runs the user's code. A block's lock may be held on entry to `moved`, which takes no lock, and to a
callback of `failure`, which takes the pool's lock only to start another thread, which ends the job. So no thread with the
pool's lock may wait for a block's lock. The dispatcher must not know how a unit runs or how a model is prepared.
"""

import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from hydra_tune.errors import HydraTuneError, first_line
from hydra_tune.observe.event_log.writer import EventLog
from hydra_tune.pool.devices.next_units import NextUnitPredictor
from hydra_tune.pool.faults.retry import FaultRecovery
from hydra_tune.pool.fusion.fusion_hint import FusionAdvisor
from hydra_tune.pool.job import Failed, Finished, Job, Reported, Result
from hydra_tune.pool.runtime.job_state import JobState, NextAction
from hydra_tune.pool.runtime.recorder import PoolRecorder
from hydra_tune.pool.views.job_logging import log_decision, log_end, log_retry
from hydra_tune.schedule import (
    Admit,
    Command,
    DeviceAdded,
    DeviceLost,
    EndBurst,
    Event,
    JobPaused,
    JobRejected,
    JobResumed,
    JobStopped,
    JobSubmitted,
    Policy,
    Run,
    Scheduler,
    ShardMoved,
    Unit,
    UnitFailed,
    UnitFinished,
)
from hydra_tune.supervision.marks import at_work
from hydra_tune.train.data.loader_clock import DrawClock
from hydra_tune.train.trial import PendingReport


class DeviceLossProbe:
    """Message that asks a worker to check whether the worker's device is lost."""


PROBE = DeviceLossProbe()


class JobDispatcher:
    """Decides, carries out commands, and ends jobs.

    Args:
        policy, max_concurrent, admission: arguments of the scheduler; see `Scheduler`.
        recorder: records decisions; None: nothing is recorded.
        sends_ahead: whether workers prefetch, and so ask for a device's next units.
        log: receives the fate of jobs; None: no log.
        faults: decides which failed jobs begin again; None: no job begins again.

    Attributes:
        changed: the pool's lock, for the state here except queues, `given_up` and `releasing`; notified when a job ends,
            stops or begins again, when a device is lost, and when memory is given back.
        records: records of the jobs that are not over, by key.
        next_units: predicts a device's next units; None without prefetch.
        inboxes: queue of units by device; None ends the worker, `PROBE` makes the worker check the device.
        to_prepare: admitted jobs; None ends the preparer.
        leaving: devices that leave the pool after their running unit.
        gone: devices that have left or are lost; a shard recorded there counts as on no device.
        given_up: lost devices that hold no block any more.
        is_closed: whether the pool refuses new jobs: since a shutdown or a breakdown.
        error: the error that broke the pool down.
        abandoned: jobs that were live at the breakdown; their memory is given back at shutdown.
        failing: threads ending jobs whose bytes could not be kept.
        releasing: threads of the workers that hand results over beside the units.
        units_saved: units that pruned and cancelled trials would still have run.
        hint: suggests fusing trials; None: no suggestions.
        log: as given; workers and pagers write units and copies to the same log.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_concurrent: int,
        admission: str,
        devices: Sequence[str],
        recorder: PoolRecorder | None,
        sends_ahead: bool,
        log: EventLog | None = None,
        faults: FaultRecovery | None = None,
    ) -> None:
        self.log = log
        self._faults = faults
        self.scheduler = Scheduler(policy=policy, max_concurrent=max_concurrent, admission=admission)
        # Reentrant (`Condition` uses an `RLock`): `decide` may have to break the pool down while it holds the lock.
        self.changed = threading.Condition()
        self.records: dict[str, JobState] = {}
        self.inboxes: dict[str, queue.SimpleQueue[tuple[JobState, Unit] | DeviceLossProbe | None]] = {
            name: queue.SimpleQueue() for name in devices
        }
        self.to_prepare: queue.SimpleQueue[JobState | None] = queue.SimpleQueue()
        self.hint: FusionAdvisor | None = None
        self.next_units: NextUnitPredictor | None = None
        if sends_ahead:
            self.next_units = NextUnitPredictor(policy, self.scheduler, devices, self.records, self.changed)
        self.leaving: set[str] = set()
        self.gone: set[str] = set()
        self.given_up: set[str] = set()  # lost devices that hold no block any more
        self.is_closed = False
        self.error: BaseException | None = None
        self.abandoned: list[JobState] = []
        self.failing: list[threading.Thread] = []
        self.releasing = weakref.WeakSet[threading.Thread]()
        self.units_saved = 0
        self._recorder = recorder
        self._deciding_seconds = 0.0
        self._moves: deque[tuple[str, int, str | None]] = deque()
        self._to_release: deque[JobState] = deque()

    @property
    def scheduler_seconds(self) -> float:
        """CPU time in seconds spent on decisions and on predicting the next units."""
        return self._deciding_seconds + (0.0 if self.next_units is None else self.next_units.seconds)

    # The state machine.

    def tell(self, *events: Event) -> None:
        """Hand events to the state machine, and carry out the commands.

        Raises:
            HydraTuneError: the pool has broken down before.
        """
        with self.changed:
            self.decide(*events)
        self.release_all()

    def decide(self, *events: Event) -> None:
        """Do the work of `tell` under the lock; the caller calls `release_all` after releasing the lock.

        Raises:
            HydraTuneError: the pool has broken down before.
        """
        if self.error is not None:
            raise HydraTuneError(f"the pool has stopped after an error: {self.error}") from self.error
        # CPU time of this thread: wall time would count the turns of other threads with the interpreter lock.
        start, now = time.thread_time(), time.perf_counter_ns()
        events += self._departures(events)
        moves = self._shard_moves(events)
        try:
            # Moves come first: the scheduler prefers a job whose shard is resident, and has to know the places before a
            # choice.
            commands = self.scheduler.handle(*moves, *events)
        except BaseException as error:
            self.break_down(error)
            raise
        if self.next_units is not None:
            self.next_units.decided((*moves, *events), commands)
        self._deciding_seconds += time.thread_time() - start
        if self._recorder is not None:
            self._recorder.decided(now, [*moves, *events], commands)
        if self.log is not None:
            log_decision(self.log, now, events, commands)
        for event in events:
            if isinstance(event, DeviceLost):
                self._let_go(event.device)
        for command in commands:
            self._carry_out(command)

    def add_device(self, name: str) -> None:
        """Add a new or returning device shortly before the device's worker starts; under the lock, like `decide`."""
        self.gone.discard(name)
        self.given_up.discard(name)
        # A new queue, because the worker of a lost device ends without reading the None in its inbox.
        self.inboxes[name] = queue.SimpleQueue()
        if self.next_units is not None:
            self.next_units.added(name)
        self.decide(DeviceAdded(device=name))

    def remove_device(self, name: str) -> None:
        """Remove a device at once, or after the device's running unit; under the lock, like `decide`."""
        if name in self.scheduler.idle_devices:
            self.decide(DeviceLost(device=name))
        else:
            self.leaving.add(name)
            # Only a burst can end early, between two of its steps; any other unit runs to its end.
            self.records[self.scheduler.running[name]].has_to_end_burst = True

    def _departures(self, events: tuple[Event, ...]) -> tuple[Event, ...]:
        """Return `DeviceLost` for each leaving device whose unit ends with the given events.

        The scheduler handles the loss in the same call, so the device gets no further unit.
        """
        freed_devices = [event.device for event in events if isinstance(event, UnitFinished | UnitFailed)]
        return tuple(DeviceLost(device=name) for name in freed_devices if name in self.leaving)

    def _let_go(self, device: str) -> None:
        self.leaving.discard(device)
        self.gone.add(device)
        if self.next_units is not None:
            self.next_units.lost(device)
        # The device's worker reads the None after its present unit, and gives the device's blocks back itself.
        self.inboxes[device].put(None)

    def moved(self, key: str, shard: int, device: str | None) -> None:
        """Note a shard's load to a device, or a shard's eviction (None); called on any thread, under a block's lock."""
        # Takes no lock, because the caller holds a block's lock and a second lock could deadlock; `append` is atomic.
        self._moves.append((key, shard, device))

    def release_all(self, release: Callable[[JobState], None] | None = None) -> None:
        """Give back the memory of ended jobs, whichever thread's event ended the jobs; never called under the lock.

        Args:
            release: sees to it that some thread calls `release` for a job; None: this thread does.
        """
        with contextlib.suppress(IndexError):
            while True:
                # `popleft` is atomic, so threads that release at the same time each take different records.
                (release or self.release)(self._to_release.popleft())

    def _shard_moves(self, events: tuple[Event, ...]) -> list[ShardMoved]:
        """Return loads and spills since the last call that concern a unit the scheduler may assign now."""
        jobs_to_check: dict[str, JobState] = {}
        with contextlib.suppress(IndexError):
            # Until empty, by the error: other threads append meanwhile, so a length read before says little.
            while True:
                key, shard, device = self._moves.popleft()
                # The queue may still hold moves of jobs that are over.
                if key in self.records:
                    jobs_to_check[key] = self.records[key]
                    jobs_to_check[key].places[shard] = None if device in self.gone else device
        # A finished unit makes another shard the next one, whose place may have changed long ago.
        for event in events:
            if isinstance(event, UnitFinished) and event.job in self.records:
                jobs_to_check[event.job] = self.records[event.job]
        # The scheduler refuses a shard's place on a device that has left.
        for device in self.gone:
            for record in jobs_to_check.values():
                record.leave(device)
        updates = [(key, record.news()) for key, record in jobs_to_check.items()]
        return [ShardMoved(job=key, shard=news[0], device=news[1]) for key, news in updates if news is not None]

    def _carry_out(self, command: Command) -> None:
        """Pass a command on; under the lock, every command is only a message to another thread."""
        record = self.records[command.job]
        if isinstance(command, Run):
            # An `EndBurst` was for the last burst only.
            record.has_to_end_burst = False
            self.inboxes[command.device].put((record, command.unit))
        elif isinstance(command, EndBurst):
            record.has_to_end_burst = True
        elif isinstance(command, Admit):
            record.job.enter("preparing")
            self.to_prepare.put(record)
        else:
            # A `Release`. A detached thread still runs the trial's code, and queues the job itself in `came_back`.
            record.is_released = True
            if not record.is_detached or record.is_abandoned:
                self._to_release.append(record)

    def tell_of(self, record: JobState, report: PendingReport) -> None:
        """Announce a report to the job's driver, once; under the lock, before the job can be over."""
        if record.job.events is not None and record.told_of.tell(report):
            record.job.events.put(Reported(record.job, report.step, report.metrics))

    # Ends.

    def stop_completed(self, record: JobState) -> None:
        """End a job that has no further unit, just before the caller reports the end of the last unit or of the preparation."""
        with self.changed:
            if record.outcome is None:
                assert record.trial is not None
                record.outcome = record.trial.outcome
                self.decide(JobStopped(job=record.job.key))
        self.release_all()

    def fail(self, record: JobState, error: BaseException, event: Event) -> None:
        """End a job after an error of a unit or of the job's own code; `event` informs the scheduler."""
        # A trial's own code may have put an error of its own in the place of the device's.
        self._end_if_all_lost()
        with self.changed:
            record.fail(error)
            self.decide(event)
        self.release_all()

    # Jobs whose thread waits for a loader, while their device has another worker.

    def detach(self, record: JobState, device: str, seconds: float) -> None:
        """Free the device of a job waiting for data; under the lock, like `decide`."""
        assert record.trial is not None
        record.is_detached, record.detached_ns = True, time.perf_counter_ns()
        # A next trial, which may be admitted now, may train the same model, and this draw may be the end of the data.
        record.trial.set_ending(is_ending=True)
        self.decide(
            UnitFinished(
                job=record.job.key,
                device=device,
                seconds=seconds,
                unit=None,
                remaining_seconds=record.trial.remaining_seconds,
                step_seconds=record.trial.step_seconds,
                alike=record.trial.alike,
            )
        )

    def came_back(self, record: JobState, found: NextAction | BaseException) -> None:
        """Accept the data or the error of a detached job's thread; the thread ends afterwards."""
        with self.changed:
            # The job has ended without this thread, so there is nothing left to report.
            if record.is_abandoned or self.error is not None:
                return
            record.is_detached = False
            if isinstance(found, BaseException):
                record.fail(found)
            if record.is_released:  # a driver has stopped the job meanwhile
                self._to_release.append(record)
            else:
                self._go_on(record, found)
        self.release_all()

    def _go_on(self, record: JobState, found: NextAction | BaseException) -> None:
        job, trial = record.job, record.trial
        assert trial is not None
        # Set anew where the trial is over, because a claim that waited in vain has set this back.
        trial.set_ending(is_ending=not isinstance(found, NextAction) or found.is_end)
        if isinstance(found, NextAction) and isinstance(found.step, PendingReport):
            job.enter("waiting")
            self.tell_of(record, found.step)
            return
        if isinstance(found, NextAction) and not found.is_end:
            units, seconds = found.units, trial.remaining_seconds
            self.decide(JobResumed(job=job.key, unit=units[0], remaining_seconds=seconds, others=units[1:]))
            return
        if record.outcome is None:
            record.outcome = trial.outcome
        self.decide(JobStopped(job=job.key))

    def abandon(self, record: JobState, clock: DrawClock, error: BaseException, *, is_preparing: bool) -> bool:
        """Give up waiting for the thread of a detached or preparing job; under the lock, like `decide`.

        Args:
            record: the job.
            clock: clock of the awaited draw.
            error: error of the job, unless the job is already over.
            is_preparing: whether the job is still in preparation.

        Returns:
            Whether the thread was still waiting; False: the thread has come back.
        """
        # Decides the race with a loader that returns now: either the draw is over, or its thread is given up.
        if not clock.abandon():
            return False
        record.is_abandoned = True
        record.fail(error)
        if is_preparing:
            self.decide(JobRejected(job=record.job.key))
        elif record.is_released:
            self._to_release.append(record)
        else:
            self.decide(JobStopped(job=record.job.key))
        return True

    def failure(self, key: str) -> Callable[[BaseException], None]:
        """Return the callback for a failure to keep bytes of a job, found by a unit of another job.

        The failing unit holds a block, so a separate thread ends the job.
        """

        def fail_beside(error: BaseException) -> None:
            thread = threading.Thread(target=self._end_failed, args=(key, error), name="hydra-fail", daemon=True)
            with self.changed:  # else a shutdown in between would join an unstarted thread
                self.failing.append(thread)
                thread.start()

        return fail_beside

    def _end_failed(self, key: str, error: BaseException) -> None:
        with contextlib.suppress(HydraTuneError):  # the pool has broken down, which ends all jobs as well
            with self.changed:
                record = self.records.get(key)
                if record is None or record.outcome is not None:
                    return
                record.fail(error)
                self.decide(JobStopped(job=key))
                self.changed.notify_all()
            self.release_all()

    def release(self, record: JobState) -> None:
        """Give back the memory of an ended job without running units, and announce the end or submit the job again."""
        # The job's result if an interrupt prevents `finish` from returning one.
        result = Result(status="failed", error=HydraTuneError("interrupted while the job's memory was given back"))
        try:
            recording = contextlib.nullcontext() if self._recorder is None else self._recorder.release(record.job.key)
            with recording, record.tenant.at_work():
                result = record.finish(None if self._faults is None else self._faults.may_begin_again)
        finally:
            # Runs even after Ctrl-C in a driver's thread: callers of `Job.result` would wait for ever for a job without
            # an end.
            if not record.begins_again or not self._begin_again(record, result):
                self._say_over(record, result)

    def _begin_again(self, record: JobState, result: Result) -> bool:
        """Submit a job again from the last saved state; return False if the job has to end after all."""
        job, keeper, error = record.job, record.keeper, result.error
        assert self._faults is not None
        assert error is not None
        with self.changed:
            if self.is_closed or record.wanted_end is not None or self.records.pop(job.key, None) is None:
                result.status = record.wanted_end or ("cancelled" if self.is_closed else result.status)
                result.error = error if result.status == "failed" else None
                # `finish` has left the keeper open for a retry.
                if keeper is not None:
                    keeper.close(result.status)
                return False
            log_retry(self.log, job.key, error)
            faults = (*record.faults, first_line(error))
            # A new key, because no name of a job may be used twice (`schedule/events.py`).
            first_key = job.key.rpartition("~")[0] if record.faults else job.key
            job.key = f"{first_key}~{len(faults)}"
            begin = self._faults.beginning(record, error)
            if keeper is not None:
                keeper.begin_again()
            retry = self.records[job.key] = JobState(
                job,
                self.failure(job.key),
                self.log,
                keeper=keeper,
                begin=begin,
                max_retries=record.max_retries,
                faults=faults,
                repeats=record.told_of,
                make_trial=record.make_trial,
                is_carrier=record.is_carrier,
            )
            retry.priority, retry.staggered = record.priority, record.staggered
            job.enter("queued")
            # The scheduler has forgotten the old key, and with it the pause.
            pauses = [JobPaused(job=job.key)] if job.paused else []
            again = JobSubmitted(job=job.key, priority=record.priority, staggered=record.staggered)
            self.decide(again, *pauses)
            self.changed.notify_all()
        return True

    def end(self, job: Job, result: Result, *, is_carrier: bool = False) -> None:
        """End a job; a carrier's saved units do not count, because its trials end as jobs of their own."""
        with self.changed:
            self.units_saved += 0 if is_carrier else result.units_saved
            job.end(result)
            self._log_end(job, result)
            self.changed.notify_all()

    def _say_over(self, record: JobState, result: Result) -> None:
        with self.changed:
            if self.records.pop(record.key, None) is None:
                return  # the pool has broken down meanwhile, and has announced the end
            job = record.job
            self.end(job, result, is_carrier=record.is_carrier)
        # Without the lock: for a carrier of fused jobs, `put` runs `GroupEndHandler.told`, which may run users' code.
        if job.events is not None:
            job.events.put(Failed(job, result) if result.status == "failed" else Finished(job, result))

    @contextlib.contextmanager
    def breaking(self) -> Iterator[None]:
        """Wrap a thread's life: an error of the pool or of a policy fails all jobs, so no job waits for ever."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - it goes into every job's result
            self.break_down(error)

    @contextlib.contextmanager
    def preparing(self, job: Job) -> Iterator[None]:
        """Mark the code of a job that runs outside units, and notice a loss of all devices while the mark is there."""
        with at_work(job.name):
            try:
                yield
            except Exception:
                self._end_if_all_lost()
                raise

    def _end_if_all_lost(self) -> None:
        if self._faults is not None:
            self._faults.end_if_all_lost()

    def break_down(self, error: BaseException) -> None:
        """Fail all jobs and refuse new jobs; on any thread, perhaps under the lock (`decide`)."""
        self._end_if_all_lost()
        with self.changed:
            self.is_closed = True
            # The first error is the cause; later errors are mostly consequences.
            self.error = self.error or error
            records = list(self.records.values())
            self.records.clear()
            self.abandoned += records  # their units may still run: their memory is given back at shutdown
            self.changed.notify_all()
        for record in records:
            result = Result(status="failed", error=error)
            record.job.end(result)
            if record.keeper is not None:
                record.keeper.refuse()
            self._log_end(record.job, result)
            if record.job.events is not None:
                record.job.events.put(Failed(record.job, result))

    def _log_end(self, job: Job, result: Result) -> None:
        if self.log is not None:
            log_end(self.log, job, result)
