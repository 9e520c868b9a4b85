"""The core of a pool: what the scheduler is told, what it commands, and how jobs end.

Drivers, workers and the preparer hand their events to the state machine here, under one lock, and what it commands is passed
on from here: units go to the workers' inboxes, jobs to the preparer's. Memory is given back after the lock is free. Knows
nothing of how a unit is run, or a model prepared.
"""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from hydra_tune.errors import HydraTuneError, first_line
from hydra_tune.observe.eventlog import EventLog
from hydra_tune.pool.ahead import NextUnits
from hydra_tune.pool.faults import Faults
from hydra_tune.pool.hints import FusionHint
from hydra_tune.pool.job import Failed, Finished, Job, Reported, Result
from hydra_tune.pool.lifecycle import log_decision, log_end, log_retry
from hydra_tune.pool.record import Following, Record
from hydra_tune.pool.recorder import Recorder
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
from hydra_tune.train.drawing import DrawClock
from hydra_tune.train.trial import Report


class Probe:
    """Has a worker look whether its device is lost."""


PROBE = Probe()


class Core:
    """Decides, carries out, and lets jobs end.

    Args:
        policy, max_concurrent, admission: of the scheduler; see `Scheduler`.
        devices: their names.
        recorder: keeps what happens; None: nothing is kept.
        sends_ahead: whether anybody asks what a device does next.
        log: is told what becomes of jobs; None: nobody is.
        faults: says which failed jobs begin again; None: none does.

    Attributes:
        changed: the lock that everything here is under; notified when a job ends or memory is given back.
        records: the jobs that are not over, by name.
        next_units: says what a device does next; None: nobody asks.
        inboxes: by device, the units that its worker is to run; None ends it, `PROBE` has it look after the device.
        to_prepare: jobs that are admitted; None ends the preparer.
        leaving: devices that go as soon as their unit is over.
        gone: devices that have gone; what is said to be there is on its way home.
        is_closed: whether no job is taken any more.
        error: what the pool has broken down with.
        abandoned: jobs that it has broken down under; their memory is given back at shutdown.
        failing: threads that end jobs whose bytes could not be kept.
        units_saved: that pruned and cancelled jobs would still have run.
        hint: says that trials had better be fused; None: nobody does.
        log: as given; told of units and copies by those that run and make them.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_concurrent: int,
        admission: str,
        devices: Sequence[str],
        recorder: Recorder | None,
        sends_ahead: bool,
        log: EventLog | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.log = log
        self._faults = faults
        self.scheduler = Scheduler(policy=policy, max_concurrent=max_concurrent, admission=admission)
        self.changed = threading.Condition()
        self.records: dict[str, Record] = {}
        self.inboxes: dict[str, queue.SimpleQueue[tuple[Record, Unit] | Probe | None]] = {
            name: queue.SimpleQueue() for name in devices
        }
        self.to_prepare: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self.hint: FusionHint | None = None
        self.next_units: NextUnits | None = None
        if sends_ahead:
            self.next_units = NextUnits(policy, self.scheduler, devices, self.records, self.changed)
        self.leaving: set[str] = set()
        self.gone: set[str] = set()
        self.is_closed = False
        self.error: BaseException | None = None
        self.abandoned: list[Record] = []
        self.failing: list[threading.Thread] = []
        self.units_saved = 0
        self._recorder = recorder
        self._deciding_seconds = 0.0
        self._moves: deque[tuple[str, int, str | None]] = deque()
        self._to_release: deque[Record] = deque()

    @property
    def scheduler_seconds(self) -> float:
        """CPU time spent deciding what runs, and what is likely to run next."""
        return self._deciding_seconds + (0.0 if self.next_units is None else self.next_units.seconds)

    # The state machine.

    def tell(self, *events: Event) -> None:
        """Hand events to the machine, and carry out what it commands.

        Raises:
            HydraTuneError: the pool has broken down before.
        """
        with self.changed:
            self.decide(*events)
        self.release_all()

    def decide(self, *events: Event) -> None:
        """The same under the lock; when it is free `release_all` has to follow.

        Raises:
            HydraTuneError: the pool has broken down before.
        """
        if self.error is not None:
            raise HydraTuneError(f"the pool has stopped after an error: {self.error}") from self.error
        start, now = time.thread_time(), time.perf_counter_ns()
        events += self._departures(events)
        moves = self._shard_moves(events)
        try:
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
        """A device is there, or there again, and its worker about to begin. Under the lock, as `decide`."""
        self.gone.discard(name)
        self.inboxes[name] = queue.SimpleQueue()
        if self.next_units is not None:
            self.next_units.added(name)
        self.decide(DeviceAdded(device=name))

    def remove_device(self, name: str) -> None:
        """Let a device go, at once or after the unit that runs there. Under the lock, as `decide`."""
        if name in self.scheduler.idle_devices:
            self.decide(DeviceLost(device=name))
        else:
            self.leaving.add(name)
            self.records[self.scheduler.running[name]].has_to_end_burst = True

    def _departures(self, events: tuple[Event, ...]) -> tuple[Event, ...]:
        """Of devices that are to go, and whose unit is over with these events: before they get another."""
        done = [event.device for event in events if isinstance(event, UnitFinished | UnitFailed)]
        return tuple(DeviceLost(device=name) for name in done if name in self.leaving)

    def _let_go(self, device: str) -> None:
        self.leaving.discard(device)
        self.gone.add(device)
        if self.next_units is not None:
            self.next_units.lost(device)
        self.inboxes[device].put(None)

    def moved(self, key: str, shard: int, device: str | None) -> None:
        """A shard of a job has been loaded, or has left a device (None). On any thread, under a block's lock."""
        self._moves.append((key, shard, device))

    def release_all(self) -> None:
        """Not under the lock: give back the memory of jobs that are over, whichever thread's event ended them."""
        with contextlib.suppress(IndexError):
            while True:
                self._release(self._to_release.popleft())

    def _shard_moves(self, events: tuple[Event, ...]) -> list[ShardMoved]:
        """Loads and spills since the last call, as far as they are about a unit that a device may be given now."""
        concerned: dict[str, Record] = {}
        with contextlib.suppress(IndexError):
            while True:
                key, shard, device = self._moves.popleft()
                if key in self.records:
                    concerned[key] = self.records[key]
                    concerned[key].places[shard] = None if device in self.gone else device
        for event in events:
            if isinstance(event, UnitFinished) and event.job in self.records:
                concerned[event.job] = self.records[event.job]
        for device in self.gone:
            for record in concerned.values():
                record.leave(device)
        told = [(key, record.news()) for key, record in concerned.items()]
        return [ShardMoved(job=key, shard=news[0], device=news[1]) for key, news in told if news is not None]

    def _carry_out(self, command: Command) -> None:
        """Under the lock, where a command is no more than a word to another thread."""
        record = self.records[command.job]
        if isinstance(command, Run):
            record.has_to_end_burst = False
            self.inboxes[command.device].put((record, command.unit))
        elif isinstance(command, EndBurst):
            record.has_to_end_burst = True
        elif isinstance(command, Admit):
            record.job.enter("preparing")
            self.to_prepare.put(record)
        else:
            record.is_released = True
            if not record.is_detached or record.is_abandoned:  # else by its thread, when that comes back
                self._to_release.append(record)

    def tell_of(self, record: Record, report: Report) -> None:
        """The job's driver, that it waits at a report. Under the lock, before the job can be over."""
        if record.job.events is not None and record.told_of.tell(report):
            record.job.events.put(Reported(record.job, report.step, report.metrics))

    # Ends.

    def stop_completed(self, record: Record) -> None:
        """The job has no further unit: it ends with the unit that is finishing now."""
        with self.changed:
            if record.outcome is None:
                assert record.trial is not None
                record.outcome = record.trial.outcome
                self.decide(JobStopped(job=record.job.key))
        self.release_all()

    def fail(self, record: Record, error: BaseException, event: Event) -> None:
        """The job's own code, or a unit of it, has raised; `event` is what the scheduler is told."""
        with self.changed:
            record.fail(error)
            self.decide(event)
        self.release_all()

    # Jobs whose thread waits for a loader, while their device has another worker.

    def detach(self, record: Record, device: str, seconds: float) -> None:
        """A job waits for its data, and its device does not any more. Under the lock, as `decide`."""
        assert record.trial is not None
        record.is_detached = True
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

    def came_back(self, record: Record, found: Following | BaseException) -> None:
        """A detached job's thread has its data, or an error; it ends after this."""
        with self.changed:
            if record.is_abandoned or self.error is not None:
                return
            record.is_detached = False
            if isinstance(found, BaseException):
                record.fail(found)
            if record.is_released:  # it was stopped meanwhile
                self._to_release.append(record)
            else:
                self._go_on(record, found)
        self.release_all()

    def _go_on(self, record: Record, found: Following | BaseException) -> None:
        job, trial = record.job, record.trial
        assert trial is not None
        if isinstance(found, Following) and isinstance(found.step, Report):
            job.enter("waiting")
            self.tell_of(record, found.step)
            return
        if isinstance(found, Following) and not found.is_end:
            units, seconds = found.units, trial.remaining_seconds
            self.decide(JobResumed(job=job.key, unit=units[0], remaining_seconds=seconds, others=units[1:]))
            return
        if record.outcome is None:
            record.outcome = trial.outcome
        self.decide(JobStopped(job=job.key))

    def abandon(self, record: Record, clock: DrawClock, error: BaseException, *, is_preparing: bool) -> bool:
        """Wait no longer for a detached job's thread, or one that prepares it. Under the lock, as `decide`.

        Args:
            record: the job.
            clock: of the draw that is waited for.
            error: what it fails with, unless it is over already.
            is_preparing: whether it has not run yet.

        Returns:
            Whether that was in time; False: the thread is back.
        """
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
        """What is to be called when bytes of a job could not be kept, as another's unit has found.

        That unit holds a block, so a thread of its own ends the job.
        """

        def fail_beside(error: BaseException) -> None:
            thread = threading.Thread(target=self._end_failed, args=(key, error), name="hydra-fail", daemon=True)
            with self.changed:  # or a shutdown could come between the two, and wait for a thread that has not begun
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

    def _release(self, record: Record) -> None:
        """The job is over and nothing of it runs: give its memory back and say so."""
        result = Result(status="failed", error=HydraTuneError("interrupted while the job's memory was given back"))
        try:
            recorded = contextlib.nullcontext() if self._recorder is None else self._recorder.release(record.job.key)
            with recorded, record.tenant.at_work():
                result = record.finish(None if self._faults is None else self._faults.may_begin_again)
        finally:
            # Whatever happens, Ctrl-C in a driver's thread included: a job that is over must say so.
            if not record.begins_again or not self._begin_again(record, result):
                self._say_over(record.job, result)

    def _begin_again(self, record: Record, result: Result) -> bool:
        """Submit a job once more, from what it has saved last; False: it has to end after all."""
        job, keeper, error = record.job, record.keeper, result.error
        assert self._faults is not None
        assert error is not None
        with self.changed:
            if self.is_closed or record.wanted_end is not None or self.records.pop(job.key, None) is None:
                result.status = record.wanted_end or ("cancelled" if self.is_closed else result.status)
                result.error = error if result.status == "failed" else None
                if keeper is not None:
                    keeper.close(result.status)
                return False
            log_retry(self.log, job.key, error)
            faults = (*record.faults, first_line(error))
            first_key = job.key.rpartition("~")[0] if record.faults else job.key
            job.key = f"{first_key}~{len(faults)}"
            begin = self._faults.beginning(record, error)
            if keeper is not None:
                keeper.begin_again()
            again = self.records[job.key] = Record(
                job,
                self.failure(job.key),
                self.log,
                keeper=keeper,
                begin=begin,
                max_retries=record.max_retries,
                faults=faults,
                repeats=record.told_of,
            )
            again.priority = record.priority
            job.enter("queued")
            held = [JobPaused(job=job.key)] if job.paused else []
            self.decide(JobSubmitted(job=job.key, priority=record.priority), *held)
            self.changed.notify_all()
        return True

    def _say_over(self, job: Job, result: Result) -> None:
        with self.changed:
            if self.records.pop(job.key, None) is None:
                return  # the pool has broken down meanwhile, and has said so
            self.units_saved += result.units_saved
            job.end(result)
            self._log_end(job, result)
            self.changed.notify_all()
        if job.events is not None:
            job.events.put(Failed(job, result) if result.status == "failed" else Finished(job, result))

    @contextlib.contextmanager
    def breaking(self) -> Iterator[None]:
        """Around a thread's life: an error of the pool itself, or of a policy, fails all jobs and leaves none waiting."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - it goes into every job's result
            self.break_down(error)

    def break_down(self, error: BaseException) -> None:
        """Fail all jobs and take no others."""
        with self.changed:
            self.is_closed = True
            self.error = self.error or error
            records = list(self.records.values())
            self.records.clear()
            self.abandoned += records  # their units may still run: their memory is given back at shutdown
            self.changed.notify_all()
        for record in records:
            result = Result(status="failed", error=error)
            record.job.end(result)
            self._log_end(record.job, result)
            if record.job.events is not None:
                record.job.events.put(Failed(record.job, result))

    def _log_end(self, job: Job, result: Result) -> None:
        if self.log is not None:
            log_end(self.log, job, result)
