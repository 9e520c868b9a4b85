"""The pool: drives the scheduler's state machine with real devices.

Note: threads. One worker a device runs units; one preparer builds and captures models, one at a time; drivers submit and answer
from threads of their own. All of them hand events to the state machine under one lock, and pass on what it commands: units go
to the workers' inboxes, jobs to the preparer's; memory is given back after the lock is free. A job's trial is touched by one
thread at a time: by that of the only unit under way or, where batches run side by side, by that of the last of their units.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hydra_tune.devices.device import Device
from hydra_tune.errors import HydraTuneError
from hydra_tune.interrupts import hold_interrupts
from hydra_tune.memory.host import HostTier
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.prefetch import Need, Prefetch
from hydra_tune.observe.turns import current_turn
from hydra_tune.pool.ahead import NextUnits
from hydra_tune.pool.forecast import Forecast, forecast
from hydra_tune.pool.job import EventStream, Failed, Finished, Job, Progress, Reported, Result
from hydra_tune.pool.lending import JobHelpers, Lender
from hydra_tune.pool.planned import planned_profile
from hydra_tune.pool.record import Following, Record, progress_without_trial, unit_of
from hydra_tune.pool.recorder import Recorder
from hydra_tune.pool.room import disk_stats, has_room
from hydra_tune.pool.stats import DeviceStats, PoolStats
from hydra_tune.schedule import (
    Admit,
    Command,
    DeviceAdded,
    Event,
    JobAdmitted,
    JobPaused,
    JobRejected,
    JobResumed,
    JobStopped,
    JobSubmitted,
    JobUnpaused,
    Policy,
    PriorityChanged,
    Run,
    Scheduler,
    ShardMoved,
    Unit,
    UnitFailed,
    UnitFinished,
)
from hydra_tune.shard.library import PlanLibrary
from hydra_tune.simulate.recording import Recording
from hydra_tune.task import TrainTask
from hydra_tune.train.step import PendingUnit
from hydra_tune.train.trial import Report, Trial, run_unit

Instrument = Callable[[], AbstractContextManager[Any]]

_RESUME = Unit(kind="resume", shard=0, seconds=0.0)  # a trial goes on after a report: its own code, no shard unit


@dataclass(slots=True)
class _DeviceCount:
    busy_seconds: float = 0.0
    units: int = 0


class Pool:
    """Trains jobs on devices.

    Args:
        devices: opened devices; closed at shutdown.
        library: makes plans for the smallest of them.
        policy: see `hydra_tune.schedule`.
        max_concurrent: jobs admitted at once.
        host_bytes: host memory for the state of all admitted jobs.
        instrument: returns a context manager, entered on the worker thread around every unit.
        admission: see `Scheduler`.
        recorder: keeps what happens; None: nothing is kept.
        only_way: the only way in which steps are split, for tests and measurements; None: the fastest.
        host: sends to disk what is beyond `host_bytes`; None: the host has to have room for all.
        sends_ahead: whether what a device does next is sent to it while it computes.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        library: PlanLibrary,
        policy: Policy,
        *,
        max_concurrent: int,
        host_bytes: int,
        instrument: Instrument | None,
        admission: str = "eager",
        recorder: Recorder | None = None,
        only_way: str | None = None,
        host: HostTier | None = None,
        sends_ahead: bool = True,
    ) -> None:
        self._host = host
        self._recorder = recorder
        self._library = library
        self._host_bytes = host_bytes
        self._instrument = instrument
        self._policy, self._max_concurrent, self._admission = policy, max_concurrent, admission
        self._scheduler = Scheduler(policy=policy, max_concurrent=max_concurrent, admission=admission)
        self._changed = threading.Condition()
        self._records: dict[str, Record] = {}
        self._moves: deque[tuple[str, int, str | None]] = deque()
        self._to_release: deque[Record] = deque()
        self._numbers = itertools.count()
        self._closed = False
        self._ended = False
        self._error: BaseException | None = None
        self._abandoned: list[Record] = []
        self._failing: list[threading.Thread] = []
        self._started = time.perf_counter()
        self._scheduler_seconds = 0.0
        self._units_saved = 0
        self._devices = {device.name: device for device in devices}
        self._pagers = {device.name: Pager(device, host) for device in devices}
        self._next_units: NextUnits | None = None
        self._prefetches: dict[str, Prefetch] = {}
        if sends_ahead:
            self._next_units = NextUnits(policy, self._scheduler, self._devices, self._records, self._changed)
            self._prefetches = {name: Prefetch(pager) for name, pager in self._pagers.items()}
        self._lender = Lender(
            self._devices,
            self._pagers,
            self._records,
            self._scheduler,
            capacity_bytes=lambda: host_bytes if host is None else host.capacity_bytes,
            only_way=only_way,
            changed=self._changed,
        )
        self._counts = {device.name: _DeviceCount() for device in devices}
        self._inboxes: dict[str, queue.SimpleQueue[tuple[Record, Unit] | None]] = {
            device.name: queue.SimpleQueue() for device in devices
        }
        self._to_prepare: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._intraop_threads = torch.get_num_threads()
        self._threads = [
            threading.Thread(target=self._work, args=(name,), name=f"hydra-{name}", daemon=True)
            for name in self._devices
        ]
        self._threads.append(threading.Thread(target=self._prepare_all, name="hydra-prepare", daemon=True))
        for thread in self._threads:
            thread.start()
        self._tell(*(DeviceAdded(device=name) for name in self._devices))

    # Called by drivers.

    @hold_interrupts()
    def submit(self, task: TrainTask, name: str | None, events: EventStream | None, *, priority: int = 0) -> Job:
        """Queue a task."""
        with self._changed:
            if self._closed:
                message = "the executor is shut down" if self._error is None else f"the pool has broken: {self._error}"
                raise HydraTuneError(f"{message}; make a new HydraExecutor") from self._error
            number = next(self._numbers)
            key = f"{number}:{name or 'job'}"
            job = Job(key=key, name=name or f"job {number}", task=task, pool=self, events=events)
            self._records[key] = Record(job, partial(self._fail_beside, key))
            try:
                self._decide(JobSubmitted(job=key, priority=priority))
            except BaseException:
                self._records.pop(key, None)
                raise
        self._release_all()
        return job

    @hold_interrupts()
    def proceed(self, job: Job) -> None:
        """Let a job that waits at a report go on."""
        with self._changed:
            record = self._records.get(job.key)
            if record is None or job.state != "waiting" or record.outcome is not None:
                return
            assert record.trial is not None
            job.enter("running")
            resumed = JobResumed(job=job.key, unit=_RESUME, remaining_seconds=record.trial.remaining_seconds)
            self._decide(resumed)
        self._release_all()

    @hold_interrupts()
    def stop(self, job: Job, status: str) -> None:
        """End a job; one that is over already stays as it is."""
        with self._changed:
            record = self._records.get(job.key)
            if record is None or record.outcome is not None:
                return
            record.outcome = status
            record.tenant.stop()
            self._decide(JobStopped(job=job.key))
            self._changed.notify_all()
        self._release_all()

    @hold_interrupts()
    def pause(self, job: Job, *, paused: bool) -> None:
        """Hold a job back, or let it go on; one that is over stays as it is."""
        with self._changed:
            if self._is_alive(job):
                job.hold(paused=paused)
                self._decide(JobPaused(job=job.key) if paused else JobUnpaused(job=job.key))
        self._release_all()

    @hold_interrupts()
    def prioritize(self, job: Job, priority: int) -> None:
        """Give a job another priority; one that is over stays as it is."""
        with self._changed:
            if self._is_alive(job):
                self._decide(PriorityChanged(job=job.key, priority=priority))
        self._release_all()

    def _is_alive(self, job: Job) -> bool:
        record = self._records.get(job.key)
        return record is not None and record.outcome is None

    @hold_interrupts()
    def progress(self, job: Job) -> Progress:
        """How far a job is."""
        with self._changed:
            record = self._records.get(job.key)
            return progress_without_trial(job) if record is None else record.progress()

    @hold_interrupts()
    def stats(self) -> PoolStats:
        """Figures since the pool began."""
        with self._changed:
            devices = {
                name: DeviceStats(
                    budget_bytes=device.budget_bytes,
                    peak_bytes=self._pagers[name].ledger.peak_bytes,
                    resident_bytes=self._pagers[name].resident_bytes,
                    busy_seconds=self._counts[name].busy_seconds,
                    bytes_in_by_kind={kind.value: count for kind, count in self._pagers[name].bytes_in.items()},
                    bytes_out_by_kind={kind.value: count for kind, count in self._pagers[name].bytes_out.items()},
                    units=self._counts[name].units,
                    bytes_ahead=self._pagers[name].bytes_ahead,
                    bytes_in_vain=self._pagers[name].bytes_in_vain,
                    waiting_seconds=self._pagers[name].waiting_ns / 1e9,
                    copying_seconds=self._pagers[name].copying_ns / 1e9,
                )
                for name, device in self._devices.items()
            }
            return PoolStats(
                devices=devices,
                units_run=sum(count.units for count in self._counts.values()),
                units_saved=self._units_saved,
                elapsed_seconds=time.perf_counter() - self._started,
                scheduler_seconds=self._scheduler_seconds,
                steps_by_way=dict(self._lender.steps_by_way),
                disk=None if self._host is None else disk_stats(self._host),
            )

    @hold_interrupts()
    def recording(self) -> Recording:
        """What was recorded; best asked for when nothing runs any more.

        Raises:
            HydraTuneError: nothing was.
        """
        if self._recorder is None:
            raise HydraTuneError("this pool records nothing; make it with HydraExecutor(record=True)")
        with self._changed:
            return self._recorder.recording()

    def profile(
        self, tasks: Mapping[str, TrainTask], *, max_concurrent: int, bandwidth: float | None, steps: int | None
    ) -> dict[str, Any]:
        """What tasks would need; see `planned_profile`. They are no jobs of the pool."""
        return planned_profile(
            tasks,
            self._library,
            list(self._devices.values()),
            max_concurrent=max_concurrent,
            bandwidth=bandwidth,
            steps=steps,
        )

    def plan(self, tasks: Mapping[str, TrainTask]) -> Forecast:
        """What tasks would do together; see `forecast`. They are no jobs of the pool."""
        return forecast(
            tasks,
            self._library.budget,
            list(self._devices.values()),
            self._policy,
            max_concurrent=self._max_concurrent,
            admission=self._admission,
            sends_ahead=self._next_units is not None,
        )

    def shutdown(self) -> None:
        """Cancel what is not over, wait for the running units, end all threads. May be called again."""
        if threading.current_thread() in self._threads:
            raise HydraTuneError(
                "shutdown() was called by a trial's own code; a pool cannot wait for itself: call it elsewhere"
            )
        with hold_interrupts(), self._changed:
            self._closed = True
            jobs = [record.job for record in self._records.values()]
        for job in jobs:
            with contextlib.suppress(HydraTuneError):  # the pool may break down now, which ends all jobs as well
                self.stop(job, "cancelled")
        self._release_all()
        for job in jobs:
            job.result()
        for inbox in self._inboxes.values():
            inbox.put(None)
        self._to_prepare.put(None)
        for thread in (*self._threads, *self._failing):
            thread.join()
        with hold_interrupts(), self._changed:
            if not self._ended:
                self._close()
                self._ended = True

    def _close(self) -> None:
        for record in self._abandoned:
            record.outcome = "cancelled"
            record.finish()
        if self._host is not None:
            self._host.close()
        for device in self._devices.values():
            device.close()
        torch.set_num_threads(self._intraop_threads)

    # The state machine.

    def _tell(self, *events: Event) -> None:
        with self._changed:
            self._decide(*events)
        self._release_all()

    def _decide(self, *events: Event) -> None:
        """Hand events to the machine and carry out what it commands. Under the lock.

        Raises:
            HydraTuneError: the pool has broken down before.
        """
        if self._error is not None:
            raise HydraTuneError(f"the pool has stopped after an error: {self._error}") from self._error
        start, now = time.thread_time(), time.perf_counter_ns()
        moves = self._shard_moves(events)
        try:
            commands = self._scheduler.handle(*moves, *events)
        except BaseException as error:
            self._break(error)
            raise
        if self._next_units is not None:
            self._next_units.decided((*moves, *events), commands)
        self._scheduler_seconds += time.thread_time() - start
        if self._recorder is not None:
            self._recorder.decided(now, [*moves, *events], commands)
        for command in commands:
            self._carry_out(command)

    def _shard_moves(self, events: tuple[Event, ...]) -> list[ShardMoved]:
        """Loads and spills since the last call, as far as they are about a unit that a device may be given now."""
        concerned: dict[str, Record] = {}
        with contextlib.suppress(IndexError):
            while True:
                key, shard, device = self._moves.popleft()
                if key in self._records:
                    concerned[key] = self._records[key]
                    concerned[key].places[shard] = device
        for event in events:
            if isinstance(event, UnitFinished) and event.job in self._records:
                concerned[event.job] = self._records[event.job]
        told = [(key, record.news()) for key, record in concerned.items()]
        return [ShardMoved(job=key, shard=news[0], device=news[1]) for key, news in told if news is not None]

    def _carry_out(self, command: Command) -> None:
        """Under the lock, where a command is no more than a word to another thread."""
        record = self._records[command.job]
        if isinstance(command, Run):
            self._inboxes[command.device].put((record, command.unit))
        elif isinstance(command, Admit):
            record.job.enter("preparing")
            self._to_prepare.put(record)
        else:
            record.is_released = True
            self._to_release.append(record)

    def _release_all(self) -> None:
        """Not under the lock: give back the memory of jobs that are over, whichever thread's event ended them."""
        with contextlib.suppress(IndexError):
            while True:
                self._release(self._to_release.popleft())

    # The preparer.

    def _prepare_all(self) -> None:
        torch.set_num_threads(1)
        with self._breaking():
            while (record := self._to_prepare.get()) is not None:
                with record.tenant.at_work():
                    self._prepare(record)
                del record  # or the last job's model would live until the next one comes

    def _prepare(self, record: Record) -> None:
        """Build, capture and cut a job's model, and wait until the host has room for its state."""
        job = record.job
        try:
            if record.outcome is not None:
                self._tell(JobRejected(job=job.key))
                return
            device = next(iter(self._devices.values()))
            helpers = JobHelpers(self._lender, record)
            trial = Trial(job.task, self._library, device, helpers, self._host, record.tenant)
            record.trial = trial
            unit = record.advance(report_is_free=True)
            if trial.state is not None:
                trial.state.watch(lambda shard, device: self._moves.append((job.key, shard, device)))
            self._await_host_memory(record)
        except BaseException as error:  # noqa: BLE001 - whatever a trial's code raises ends that trial alone
            self._fail(record, error, JobRejected(job=job.key))
            return
        assert isinstance(unit, PendingUnit | None), "a first step has one unit at a time"
        if unit is None:
            self._stop_completed(record)
            self._tell(JobRejected(job=job.key))
            return
        with self._changed:
            job.enter("running")
            self._decide(
                JobAdmitted(
                    job=job.key,
                    unit=unit_of(unit),
                    remaining_seconds=trial.remaining_seconds,
                    step_seconds=trial.step_seconds,
                )
            )
        self._release_all()

    def _await_host_memory(self, record: Record) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    record.outcome is not None or has_room(record, self._records.values(), self._host_bytes, self._host)
                )
            )
        assert record.trial is not None
        record.trial.reserve_host()

    # The workers.

    def _work(self, name: str) -> None:
        device = self._devices[name]
        with self._breaking(), device.worker():
            while (item := self._inboxes[name].get()) is not None:
                with self._turn(item[0], name):
                    self._run(*item, device)
                del item  # or the last job's model would live until the next one comes

    @contextlib.contextmanager
    def _turn(self, record: Record, device: str) -> Iterator[None]:
        recorder = self._recorder
        recorded = contextlib.nullcontext() if recorder is None else recorder.turn(record.job.key, device)
        with recorded, record.tenant.at_work():
            yield

    def _run(self, record: Record, unit: Unit, device: Device) -> None:
        """Run a unit and go on to the job's next one."""
        job = record.job
        assert record.trial is not None
        trial = record.trial
        seconds = 0.0
        following: Following | None = None
        try:
            if unit.kind != _RESUME.kind:
                seconds = self._run_pending(record, trial, unit, device)
            following = self._go_on(record, unit, device)
            while _is_update(following.step, unit.shard):
                # Just in time, while parameters and gradients are here: a backward's update is no decision of its own.
                seconds += self._run_pending(record, trial, unit, device)
                following = self._go_on(record, unit, device)
        except BaseException as error:  # noqa: BLE001 - whatever a trial's code raises ends that trial alone
            following = None  # the error's traceback keeps this frame, and a unit keeps its trial
            self._fail(record, error, UnitFailed(job=job.key, device=device.name))
            return
        if following.is_end and record.outcome is None:
            self._stop_completed(record)
        self._finish_unit(record, device, seconds, following)

    def _go_on(self, record: Record, unit: Unit, device: Device) -> Following:
        if record.outcome is not None:
            return Following()
        return record.go_on(unit, device.name, report_is_free=record.job.events is None)

    def _run_pending(self, record: Record, trial: Trial, unit: Unit, device: Device) -> float:
        pending = record.take(unit)
        prefetch = self._prefetches.get(device.name)
        if prefetch is not None:
            prefetch.asks = lambda: self._next_needs(record, pending, device.name)
        try:
            seconds = self._timed_unit(pending, device)
        finally:
            if prefetch is not None:
                prefetch.asks = None
        trial.finished(pending, seconds)
        return seconds

    def _next_needs(self, record: Record, pending: PendingUnit, device: str) -> list[Need]:
        """What comes after a unit that begins to compute now; a question to the scheduler, and counted as such."""
        assert self._next_units is not None
        start = time.thread_time()
        found = self._next_units.needs(record, pending, device)
        taken = time.thread_time() - start
        with self._changed:
            self._scheduler_seconds += taken
        return found

    def _timed_unit(self, pending: PendingUnit, device: Device) -> float:
        start, turn = time.perf_counter(), current_turn()
        try:
            with contextlib.nullcontext() if turn is None else turn.unit(pending.kind, pending.shard):
                return run_unit(pending, device, self._pagers[device.name], self._instrument)
        finally:
            count = self._counts[device.name]
            count.units += 1
            count.busy_seconds += time.perf_counter() - start

    def _finish_unit(
        self,
        record: Record,
        device: Device,
        seconds: float,
        following: Following,
    ) -> None:
        job, trial = record.job, record.trial
        assert trial is not None
        report = following.step if isinstance(following.step, Report) else None
        units = following.units
        with self._changed:
            if report is not None and record.outcome is None:
                job.enter("waiting")
            done = UnitFinished(
                job=job.key,
                device=device.name,
                seconds=seconds,
                unit=units[0] if units else None,
                remaining_seconds=trial.remaining_seconds,
                step_seconds=trial.step_seconds,
                others=units[1:],
            )
            if report is not None and job.events is not None:
                # Under the lock: a job that is cancelled meanwhile must not be over before its report is out.
                job.events.put(Reported(job, report.step, report.metrics))
            self._decide(done)
        self._release_all()

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Around a thread's life: an error of the pool itself, or of a policy, fails all jobs and leaves none waiting."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - it goes into every job's result
            self._break(error)

    def _break(self, error: BaseException) -> None:
        with self._changed:
            self._closed = True
            self._error = self._error or error
            records = list(self._records.values())
            self._records.clear()
            self._abandoned += records  # their units may still run: their memory is given back at shutdown
            self._changed.notify_all()
        for record in records:
            result = Result(status="failed", error=error)
            record.job.end(result)
            if record.job.events is not None:
                record.job.events.put(Failed(record.job, result))

    # Ends.

    def _stop_completed(self, record: Record) -> None:
        """The job has no further unit: it ends with the unit that is finishing now."""
        with self._changed:
            if record.outcome is None:
                assert record.trial is not None
                record.outcome = record.trial.outcome
                self._decide(JobStopped(job=record.job.key))
        self._release_all()

    def _fail(self, record: Record, error: BaseException, event: Event) -> None:
        with self._changed:
            record.fail(error)
            self._decide(event)
        self._release_all()

    def _fail_beside(self, key: str, error: BaseException) -> None:
        """Bytes of a job could not be kept, as another's unit has found. That unit holds a block, so a thread ends the job."""
        thread = threading.Thread(target=self._end_failed, args=(key, error), name="hydra-fail", daemon=True)
        with self._changed:  # or a shutdown could come between the two, and wait for a thread that has not begun
            self._failing.append(thread)
            thread.start()

    def _end_failed(self, key: str, error: BaseException) -> None:
        with contextlib.suppress(HydraTuneError):  # the pool has broken down, which ends all jobs as well
            with self._changed:
                record = self._records.get(key)
                if record is None or record.outcome is not None:
                    return
                record.fail(error)
                self._decide(JobStopped(job=key))
                self._changed.notify_all()
            self._release_all()

    def _release(self, record: Record) -> None:
        """The job is over and nothing of it runs: give its memory back and say so."""
        result = Result(status="failed", error=HydraTuneError("interrupted while the job's memory was given back"))
        try:
            recorded = contextlib.nullcontext() if self._recorder is None else self._recorder.release(record.job.key)
            with recorded, record.tenant.at_work():
                result = record.finish()
        finally:
            # Whatever happens, Ctrl-C in a driver's thread included: a job that is over must say so.
            self._say_over(record.job, result)

    def _say_over(self, job: Job, result: Result) -> None:
        with self._changed:
            if self._records.pop(job.key, None) is None:
                return  # the pool has broken down meanwhile, and has said so
            self._units_saved += result.units_saved
            job.end(result)
            self._changed.notify_all()
        if job.events is not None:
            job.events.put(Failed(job, result) if result.status == "failed" else Finished(job, result))


def _is_update(step: PendingUnit | Report | None, shard: int) -> bool:
    return isinstance(step, PendingUnit) and (step.kind, step.shard) == ("update", shard)
