"""The pool: the interface for drivers, and the assembly of all parts of a running pool.

`ExecutorSettings.open_pool` (`pool/runtime/settings.py`) makes the `Pool` at the first use of an executor.
`HydraExecutor` (`hydra_tune/executor.py`) submits jobs to the pool; with fusion, `GroupJobLauncher`
(`pool/fusion/group_jobs.py`) submits carriers of jobs instead, and `FusedPool` (`pool/fusion/fused_pool.py`) passes requests
of drivers on to the carriers. `LiveGroup` (`pool/fusion/live_group.py`) asks the pool for host memory and for a carrier's
turn, and `FusedJobTable` (`pool/fusion/job_table.py`) ends fused jobs through the pool. `Job` (`pool/job.py`) passes a
driver's requests on. The pool must not decide which unit runs when: `hydra_tune.schedule` does.

Note: threads. Each device has a worker, and the worker runs units (`pool/runtime/worker.py`) and has a thread that hands
results over beside the next units. A preparer builds and captures models in sequence (`pool/runtime/preparer.py`). A
watcher looks after slow loaders (`pool/faults/loader_watchdog.py`). Drivers submit and answer from threads of their own.
All threads hand events to the state machine under a single lock, and pass the resulting commands on
(`pool/runtime/dispatcher.py`). Only one thread at a time advances a job's trial: at first the preparer, then the thread
of the only running unit or, where batches run side by side, the thread of their last unit, and at the end the thread
that gives the trial's memory back. `JobState.turn` keeps a driver that saves a waiting trial apart from all of them.

Note: the lock. A thread with the lock (`Pool.changed`) must not run a trial's code, close a trial, or take a block's lock;
the end of `shutdown`, with no other thread left, is the exception. Methods that decide hold Ctrl-C and SIGTERM back,
because half a decision would leave the scheduler's state wrong.
"""

import contextlib
import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch

from hydra_tune.checkpoint.every import CheckpointInterval
from hydra_tune.checkpoint.saved import CheckpointContent
from hydra_tune.devices.device import Device
from hydra_tune.devices.hardware.discovery import device_kind
from hydra_tune.errors import CheckpointError, ConfigError, HydraTuneError
from hydra_tune.fusion.runtime.profiling_device import ProfilingDevice
from hydra_tune.interrupts import hold_interrupts
from hydra_tune.loop_task import LoopTask
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.memory.pager import Pager
from hydra_tune.observe.event_log.line_format import CARRIER
from hydra_tune.observe.event_log.writer import EventLog
from hydra_tune.pool.checkpointing.writer import PoolCheckpointWriter, StartCheckpointSource, TrialCheckpointer
from hydra_tune.pool.devices.device_failure import DeviceLossHandler
from hydra_tune.pool.devices.device_reservation import DeviceReservations
from hydra_tune.pool.devices.host_admission import disk_stats
from hydra_tune.pool.devices.idle_devices import PoolDeviceLender
from hydra_tune.pool.dry_run.fusion_report import FusionForecaster
from hydra_tune.pool.dry_run.report import CachedForecast, PoolForecast, forecast
from hydra_tune.pool.dry_run.simulator_profile import planned_profile
from hydra_tune.pool.faults.loader_watchdog import LoaderWaitLimits, LoaderWatchdog
from hydra_tune.pool.faults.retry import FaultRecovery, JobRetryAccount
from hydra_tune.pool.fusion.fusion_hint import FusionAdvisor
from hydra_tune.pool.job import OVER, EventStream, Job, JobProgress, Result
from hydra_tune.pool.runtime.dispatcher import JobDispatcher
from hydra_tune.pool.runtime.job_state import JobState, granted_bytes, progress_without_trial
from hydra_tune.pool.runtime.preparer import JobPreparer
from hydra_tune.pool.runtime.recorder import PoolRecorder
from hydra_tune.pool.runtime.worker import RESUME, Instrument, Worker
from hydra_tune.pool.stats import PoolStats, log_stats
from hydra_tune.pool.views.job_logging import log_retry
from hydra_tune.quantities import format_bytes
from hydra_tune.schedule import (
    DeviceAdded,
    JobPaused,
    JobResumed,
    JobStopped,
    JobSubmitted,
    JobUnpaused,
    Policy,
    PriorityChanged,
)
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.shard.python_state.state_guard import PythonStateUndo
from hydra_tune.simulate.recorded.recording import Recording
from hydra_tune.task import TrainTask
from hydra_tune.train.checkpoint.trial_checkpoint import StartCheckpoint
from hydra_tune.train.own_loop.loop_trial import LoopTrial
from hydra_tune.train.single_trial import SingleTrial
from hydra_tune.train.trial import Trial

T = TypeVar("T")

_ANSWER_SECONDS = 5.0  # for another thread to answer a report
_LOOK_SECONDS = 0.1  # between checks during a wait for an end that may never come


class Pool:
    """Trains jobs on devices.

    Args:
        devices: opened devices; the pool closes the devices at shutdown.
        library: makes plans for the smallest device.
        host_bytes: host memory in bytes for the state of all admitted jobs.
        instrument: returns a context manager; a worker enters the context manager around every unit.
        recorder: records decisions and units; None: nothing is recorded.
        host: host tier that sends state beyond `host_bytes` to disk; None: the host has to hold all state.
        sends_ahead: whether a device prefetches blocks of the next unit during compute.
        log: receives all events and is closed at shutdown; None: no log.
        checkpoints: where and how often jobs are saved; None: states are only copied in memory, on request.
        loader_times: how long the pool waits for data loaders.

    Attributes:
        at_close: functions called at shutdown, after all jobs have ended.
        changed: the pool's lock, held during every decision; notified of changes that threads wait for, such as the end of
            a job.
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
        admission: str = "auto",
        recorder: PoolRecorder | None = None,
        host: HostTier | None = None,
        sends_ahead: bool = True,
        log: EventLog | None = None,
        checkpoints: PoolCheckpointWriter | None = None,
        loader_times: LoaderWaitLimits | None = None,
    ) -> None:
        self._host, self._host_bytes = host, host_bytes
        self.checkpoints = checkpoints or PoolCheckpointWriter(None, CheckpointInterval(), host)
        self.log = log
        self._recorder = recorder
        self._library = library
        self._policy, self._max_concurrent, self._admission = policy, max_concurrent, admission
        self._sends_ahead = sends_ahead
        self._numbers = itertools.count()
        self._architectures: dict[Hashable, int] = {}
        self._fusions = FusionForecaster(self._library.budget.budget_bytes, self.alone_on)
        self._forecasts: dict[Hashable, CachedForecast] = {}
        self._ended = False
        self.at_close: list[Callable[[], None]] = []
        self._started = time.perf_counter()
        self._devices = {device.name: device for device in devices}
        self._faults = FaultRecovery(self._devices, self.checkpoints, log)
        self._core = core = JobDispatcher(
            policy,
            max_concurrent=max_concurrent,
            admission=admission,
            devices=list(self._devices),
            recorder=recorder,
            sends_ahead=sends_ahead,
            log=log,
            faults=self._faults,
        )
        self.changed, self._records = core.changed, core.records
        self._pagers = {device.name: self._pager(device) for device in devices}
        if host is not None:
            host.disk.log = log
        self._lender = PoolDeviceLender(
            self._devices,
            self._pagers,
            core.records,
            core.scheduler,
            capacity_bytes=lambda: host_bytes if host is None else host.capacity_bytes,
            changed=core.changed,
        )
        self._losses = DeviceLossHandler(core, self._devices, self._pagers, self._lost, self._faults)
        self._borrowing = DeviceReservations(self._devices, self._pagers, lambda: core.gone | core.leaving)
        self._lost_devices: set[str] = set()
        self._instrument = instrument
        self._workers = {name: self._worker(device) for name, device in self._devices.items()}
        # Serves a preparer still under way when no device is left; the pool has broken down then.
        self._first = devices[0]
        self._preparer = JobPreparer(core, library, self._living_device, self._lender, host, host_bytes)
        self._intraop_threads = torch.get_num_threads()
        self._worker_threads: dict[str, threading.Thread] = {}
        self._threads: list[threading.Thread] = []  # beside the devices' present workers
        self.loaders = LoaderWatchdog(
            core,
            loader_times or LoaderWaitLimits(),
            self._replace_worker,
            self._replace_preparer,
            leaves_devices=recorder is None,
        )
        self._start()

    def _start(self) -> None:
        for name in self._workers:
            self._start_worker(name)
        self._start_preparer()
        self._watching = threading.Thread(target=self.loaders.work, name="hydra-loaders", daemon=True)
        self._watching.start()
        self._core.tell(*(DeviceAdded(device=name) for name in self._devices))

    def _pager(self, device: Device) -> Pager:
        pager = Pager(device, self._host)
        pager.log = self.log
        return pager

    def _worker(self, device: Device) -> Worker:
        pager, turn = self._pagers[device.name], self._borrowing.turn(device.name)
        return Worker(self._core, device, pager, self._instrument, self._recorder, self._losses, turn)

    def _start_worker(self, name: str) -> None:
        thread = threading.Thread(target=self._workers[name].work, name=f"hydra-{name}", daemon=True)
        thread.start()
        self._worker_threads[name] = thread

    def _start_preparer(self) -> None:
        thread = threading.Thread(target=self._preparer.work, name="hydra-prepare", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _replace_worker(self, name: str) -> None:
        """Start a second thread of the worker of a device whose present thread waits for a loader; under the lock.

        The present thread ends after the wait.
        """
        # Ended threads leave the list, which would grow with every stalled loader otherwise.
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(self._worker_threads[name])
        self._start_worker(name)

    def _replace_preparer(self, thread: int) -> None:
        """Start a second thread of the preparer, once for each given thread that waits for a loader; under the lock."""
        if self._preparer.replace(thread):
            self._start_preparer()

    def hint_at_fusion(self) -> None:
        """Have workers log a hint, at most once, when trials as a fused group may be several times faster."""
        self._core.hint = FusionAdvisor()

    @property
    def is_closed(self) -> bool:
        """Whether the pool refuses new jobs: it is shut down, or has broken."""
        return self._core.is_closed

    @property
    def budget_bytes(self) -> int:
        """Device memory in bytes for which models are cut."""
        return self._library.budget.budget_bytes

    @property
    def stands(self) -> tuple[ProfilingDevice, ...]:
        """Devices for profiling steps, as of `DeviceReservations`."""
        return self._borrowing.stands

    def alone_on(self, device: Device) -> contextlib.AbstractContextManager[object]:
        """Return a context for work on a device outside units.

        No unit runs on the device within the context, unless the device is the host.
        """
        return contextlib.nullcontext() if device.is_host else self._borrowing.borrowed(device)

    def end(self, job: Job, result: Result) -> None:
        """End a fused job, whose carriers alone are jobs of this pool."""
        self._core.end(job, result)

    def begin_again(self, retried: JobRetryAccount, error: BaseException) -> "Callable[[], StartCheckpoint | None]":
        """Return the function that reads the state for a retry, as of `FaultRecovery.beginning`; logs the retry."""
        log_retry(self.log, retried.job.key, error)
        return self._faults.beginning(retried, error)

    def last_saved(self, retried: JobRetryAccount) -> "Callable[[], StartCheckpoint | None]":
        """Return the function that reads the last saved state, like `begin_again` but without a log line."""
        return self._faults.last_saved(retried)

    def take_host(self, job: Job, nbytes: int) -> bool:
        """Grant a job further host memory if enough is free; always refuse where a disk extends the host memory."""
        with self.changed:
            record = self._records.get(job.key)
            taken_bytes = granted_bytes(self._records.values())
            if record is None or self._host is not None or taken_bytes + nbytes > self._host_bytes:
                return False
            record.host_bytes += nbytes
            return True

    def give_host(self, job: Job, nbytes: int) -> None:
        """Take back host memory granted by `take_host`."""
        with self.changed:
            record = self._records.get(job.key)
            if record is not None:
                record.host_bytes -= nbytes
                # The preparer may be waiting for host memory for the next job.
                self.changed.notify_all()

    @contextlib.contextmanager
    def turn_of(self, job: Job) -> Iterator[bool]:
        """Hold a job at its report for the time of the context; yield whether the job waits at a report."""
        record = self._record_of(job)
        # Never blocks: the holder may spend a long time in the user's data code.
        if record is None or not record.turn.acquire(blocking=False):
            yield False
            return
        try:
            yield job.state == "waiting"
        finally:
            record.turn.release()

    def folder_of(self, job: Job) -> Path | None:
        """Return the checkpoint folder, existing or future, of a job that is not over; None: the job has no folder."""
        record = self._record_of(job)
        return None if record is None or record.keeper is None else record.keeper.path

    @property
    def device_names(self) -> tuple[str, ...]:
        """Names of the devices open to units."""
        return tuple(name for name in self._devices if name not in self._core.gone | self._core.leaving)

    # Interrupts wait in every call that decides: Ctrl-C inside the scheduler would leave half a decision.
    @hold_interrupts()
    def add_device(self, name: str, opened: Callable[[], Device]) -> None:
        """Add a device to the pool; see `HydraExecutor.add_device`.

        Args:
            name: name of the device.
            opened: opens the device; called only if the pool has no usable device of the name.
        """
        core = self._core
        with self.changed:
            self._check_change("add_device")
            worker = self._worker_threads.get(name)
            # Two threads of a device's worker would use the device's pager at the same time. A lost device's may hang for ever.
            is_ending = worker is not None and worker.is_alive() and name not in self._lost_devices
            if name in self.device_names or name in core.leaving or is_ending:
                raise ConfigError(f"{name!r} is in the pool already; its devices are {', '.join(self.device_names)}")
            # A lost device may work again, once opened anew. A removed device is still open, with its pager and worker.
            if name in self._lost_devices and name in self._devices:
                self._devices.pop(name).close()
            if name not in self._devices:
                device = opened()
                try:
                    self._check_fits(device)
                except ConfigError:
                    device.close()
                    raise
                self._devices[name] = device
                self._pagers[name] = self._pager(device)
                self._workers[name] = self._worker(device)
            # Only now: if the device could not be opened, a later call has to know of the loss.
            self._lost_devices.discard(name)
            core.add_device(name)
            self._start_worker(name)
            self._tell_of(name, "added")
        core.release_all()

    def remove_device(self, name: str) -> None:
        """Remove a device: no further unit runs on the device; see `HydraExecutor.remove_device`."""
        core = self._core
        with hold_interrupts():
            with self.changed:
                self._check_change("remove_device")
                names = self.device_names
                if name not in names:
                    raise ConfigError(f"{name!r} is not in the pool; its devices are {', '.join(names)}")
                if len(names) == 1:
                    raise ConfigError(
                        f"{name!r} is the pool's only device; add another one first, or shut the executor down"
                    )
                core.remove_device(name)
                self._tell_of(name, "removed")
            core.release_all()
        # Joined without the lock, because the worker needs the lock to end; and open to Ctrl-C, because the worker's unit
        # may run for long.
        while name not in self.device_names and (thread := self._worker_threads[name]).is_alive():
            # Looked up again each time: the thread changes if a loader stalls the worker, or the device is added anew.
            thread.join(_LOOK_SECONDS)

    def _lost(self, name: str) -> None:
        """Note the loss of a device; called under the lock by `DeviceLossHandler`."""
        self._lost_devices.add(name)
        self._tell_of(name, "lost")

    def _living_device(self) -> Device:
        """Return any working device, for allocating host memory."""
        return next((device for name, device in self._devices.items() if name not in self._core.gone), self._first)

    def refuse_own_code(self, what: str) -> None:
        """Refuse a call by a trial's own code, on a thread of the pool, that would wait for the pool."""
        own_threads = (record.trial.own_thread for record in list(self._records.values()) if record.trial is not None)
        if threading.current_thread() in (*self._all_threads, *self._core.releasing, *own_threads):
            raise HydraTuneError(
                f"{what}() was called by a trial's own code, on a thread of the pool, and the pool would wait for itself; call "
                "it from another thread, or train within a trial with train_plain"
            )

    def _check_change(self, what: str) -> None:
        self.refuse_own_code(what)
        if self._core.is_closed:
            raise HydraTuneError("the executor is shut down; make a new HydraExecutor")
        if self._recorder is not None:
            raise HydraTuneError("a recorded run keeps its devices; make the HydraExecutor without record=True")

    def _check_fits(self, device: Device) -> None:
        budget = self._library.budget
        if device.budget_bytes < budget.budget_bytes:
            raise ConfigError(
                f"{device.name!r} has {format_bytes(device.budget_bytes)}, but the pool's models are cut for devices of "
                f"{format_bytes(budget.budget_bytes)}; give it as much, or start another HydraExecutor with less device_memory"
            )
        # Where random draws are counted ahead, all devices have to draw alike, and so be of the same kind.
        kinds = {device_kind(other) for other in self._devices.values()} if budget.counts_draws else set()
        if budget.alignment % device.alignment or kinds - {device_kind(device)}:
            raise ConfigError(
                f"{device.name!r} is of another kind than {', '.join(self.device_names)}; start another HydraExecutor for it"
            )

    def _tell_of(self, name: str, what: str) -> None:
        if self.log is not None:
            self.log.device(name, self._devices[name].budget_bytes, what)

    @property
    def _all_threads(self) -> list[threading.Thread]:
        return [*self._worker_threads.values(), *self._threads, self._watching]

    @hold_interrupts()
    def submit(
        self,
        task: TrainTask,
        name: str | None,
        events: EventStream | None,
        *,
        priority: int = 0,
        staggered: bool = False,
        origin: StartCheckpointSource | None = None,
        labels: Mapping[str, Any] | None = None,
        saved_as: str | None = None,
        max_retries: int = 0,
        make_trial: Callable[..., Trial] | None = None,
        is_carrier: bool = False,
    ) -> Job:
        """Queue a task.

        `make_trial` is as of `JobState`. A carrier of fused jobs (`GroupJobLauncher`) has no keeper, and is no trial in the
        figures: its jobs are.
        """
        core, origin = self._core, origin or StartCheckpointSource()
        with self.changed:
            if core.is_closed:
                message = "the executor is shut down" if core.error is None else f"the pool has broken: {core.error}"
                raise HydraTuneError(f"{message}; make a new HydraExecutor") from core.error
            # Names of jobs may repeat, but keys must not (`schedule/events.py`).
            number = next(self._numbers)
            key = f"{CARRIER if is_carrier else ''}{number}:{name or 'job'}"
            job = Job(key=key, name=name or f"job {number}", task=task, pool=self, events=events)
            folder = None if is_carrier else self.checkpoints.place(saved_as or job.name, origin.folder)
            keeper = None if is_carrier else TrialCheckpointer(self.checkpoints, job.name, folder, dict(labels or {}))
            # Entered before the decision, because an `Admit` command looks the record up at once.
            self._records[key] = record = JobState(
                job,
                core.failure(key),
                self.log,
                keeper=keeper,
                begin=origin.beginning,
                max_retries=max_retries,
                make_trial=make_trial or (LoopTrial if isinstance(task, LoopTask) else SingleTrial),
                is_carrier=is_carrier,
            )
            record.priority, record.staggered = priority, staggered
            try:
                core.decide(JobSubmitted(job=key, priority=priority, staggered=staggered))
            except BaseException:
                # A breakdown inside `decide` has emptied the table already.
                self._records.pop(key, None)
                self.checkpoints.leave(folder)
                raise
        core.release_all()
        return job

    @hold_interrupts()
    def proceed(self, job: Job) -> None:
        """Resume a job waiting at a report."""
        with self.changed:
            record = self._records.get(job.key)
            if record is not None:
                record.told_of.is_answered = True
            if record is None or job.state != "waiting" or record.outcome is not None:
                return
            job.enter("running")
            # No new remaining time: the report already carried the job's remaining time, and by now other trials may
            # have measured other times for the same steps.
            self._core.decide(JobResumed(job=job.key, unit=RESUME, remaining_seconds=None))
        self._core.release_all()

    @hold_interrupts()
    def stop(self, job: Job, status: str) -> None:
        """End a job; a job that is already over keeps its outcome."""
        with self.changed:
            record = self._records.get(job.key)
            if record is None or record.outcome is not None:
                if record is not None and record.outcome == "failed":
                    record.wanted_end = status  # should it begin again
                return
            record.outcome = status
            # Nothing may wait for room on behalf of the job any more, neither in a memory tier nor on the preparer's
            # thread, which `notify_all` below wakes.
            record.tenant.stop()
            self._core.decide(JobStopped(job=job.key))
            self.changed.notify_all()
        self._core.release_all()

    @hold_interrupts()
    def pause(self, job: Job, *, paused: bool) -> None:
        """Pause or unpause a job; no effect on a job that is over."""
        with self.changed:
            self.hold(job, paused=paused)
        self._core.release_all()

    def hold(self, job: Job, *, paused: bool) -> None:
        """Pause or unpause a job, as `pause` does; for callers with the lock, which hold interrupts back on the main thread."""
        if job.state not in OVER:
            # Held even while the job's run has just failed: a retry reads the pause when the job is submitted again.
            job.hold(paused=paused)
        if self._is_alive(job):
            self._core.decide(JobPaused(job=job.key) if paused else JobUnpaused(job=job.key))

    @hold_interrupts()
    def prioritize(self, job: Job, priority: int) -> None:
        """Change a job's priority; no effect on a job that is over."""
        with self.changed:
            record = self._records.get(job.key)
            if record is not None:
                record.priority = priority  # a retry takes the priority over
            if self._is_alive(job):
                self._core.decide(PriorityChanged(job=job.key, priority=priority))
        self._core.release_all()

    def save(self, job: Job, until: float = math.inf) -> "Future[Path]":
        """Save a job between two steps; the call itself returns by `until`, in seconds of `time.monotonic`."""
        if job.state not in OVER:
            self.refuse_own_code("checkpoint")
        future = self.ask_to_save(job)
        self.answer(job, future, until=until)
        return future

    def ask_to_save(self, job: Job) -> "Future[Path]":
        """Request a checkpoint at the end of the present step.

        A job waiting at a report is saved only when `answer` is called.
        """
        if self.checkpoints.root is None:
            raise CheckpointError("this pool saves no checkpoints; make it with HydraExecutor(checkpoint_dir=...)")
        if job.state in OVER:
            folder = job.result().checkpoint
            if folder is None:
                raise CheckpointError(f"{job.name!r} is over ({job.state}) and was never saved")
            # The last checkpoint may still be in the writer thread's queue.
            self.checkpoints.flush()
            future: Future[Path] = Future()
            future.set_result(folder)
            return future
        return self._asked(job, TrialCheckpointer.save)

    def copy(self, job: Job) -> "Future[CheckpointContent]":
        """Copy a job's state between two steps."""
        future = self._asked(job, TrialCheckpointer.copy)
        self.answer(job, future)
        return future

    def copy_at_end(self, job: Job) -> "Future[CheckpointContent]":
        """Copy a job's last state at completion."""
        return self._asked(job, TrialCheckpointer.copy_at_end)

    def _asked(self, job: Job, ask: "Callable[[TrialCheckpointer], Future[T]]") -> "Future[T]":
        record = self._record_of(job)
        if record is None or record.keeper is None:
            raise CheckpointError(f"{job.name!r} is over ({job.state})")
        return ask(record.keeper)

    def answer(
        self,
        job: Job,
        waiting_for: "Future[Any] | None" = None,
        keeper: TrialCheckpointer | None = None,
        *,
        until: float = math.inf,
    ) -> None:
        """Serve pending save requests now, if the job stands between two steps and is not on the way to the next step.

        Args:
            job: the job.
            waiting_for: the requested copy or checkpoint. While the job is on the way to the next step, which includes
                reading data, the call waits until the request is done. None: return at once, and the caller asks again.
            keeper: keeper of a job saved elsewhere; None: the job's own keeper.
            until: time of `time.monotonic` at which the wait ends.

        Raises:
            CheckpointError: the job is paused within a step, or waits at a report where it cannot be saved.
        """
        record = self._record_of(job)
        keeper = keeper or (None if record is None else record.keeper)
        if record is None or keeper is None or not _has_turn(record, waiting_for, until):
            return
        try:
            trial = record.trial
            # Otherwise the trial itself serves the request, at the end of its step.
            may_be_saved = trial is not None and trial.may_be_saved
            if trial is not None and may_be_saved:
                keeper.answer(trial)
        finally:
            record.turn.release()
        if not may_be_saved:
            refuse_saving(job, waiting_for, until)

    def _record_of(self, job: Job) -> JobState | None:
        with hold_interrupts(), self.changed:
            return self._records.get(job.key)

    def _is_alive(self, job: Job) -> bool:
        record = self._records.get(job.key)
        return record is not None and record.outcome is None

    @hold_interrupts()
    def progress(self, job: Job) -> JobProgress:
        """Progress of a job."""
        with self.changed:
            record = self._records.get(job.key)
            return progress_without_trial(job) if record is None else record.progress()

    @hold_interrupts()
    def jobs(self) -> list[Job]:
        """Jobs that are not over, in the order of submission; a job that began again counts as submitted then."""
        with self.changed:
            return [record.job for record in self._records.values()]

    @hold_interrupts()
    def stats(self) -> PoolStats:
        """Statistics since the pool began."""
        with self.changed:
            return PoolStats(
                devices={name: worker.stats() for name, worker in self._workers.items()},
                units_run=sum(worker.units for worker in self._workers.values()),
                units_saved=self._core.units_saved,
                elapsed_seconds=time.perf_counter() - self._started,
                scheduler_seconds=self._core.scheduler_seconds,
                steps_by_way={way: count for way, count in self._lender.steps_by_way.items() if count},
                disk=None if self._host is None else disk_stats(self._host),
                event_log=None if self.log is None else log_stats(self.log),
            )

    @hold_interrupts()
    def recording(self) -> Recording:
        """Return the recording; complete only when nothing runs any more.

        Raises:
            HydraTuneError: the pool records nothing.
        """
        if self._recorder is None:
            raise HydraTuneError("this pool records nothing; make it with HydraExecutor(record=True)")
        with self.changed:
            return self._recorder.recording()

    def profile(
        self, tasks: Mapping[str, TrainTask], *, max_concurrent: int, bandwidth: float | None, steps: int | None
    ) -> dict[str, Any]:
        """Profile tasks without running jobs; see `planned_profile`."""
        with PythonStateUndo.of_tasks(*tasks.values()).undone(keeps_results=True):
            return planned_profile(
                tasks,
                self._library,
                list(self._devices.values()),
                max_concurrent=max_concurrent,
                bandwidth=bandwidth,
                steps=steps,
            )

    def plan(self, tasks: Mapping[str, TrainTask], *, group_size: int, probe: bool, profiled: int = 0) -> PoolForecast:
        """Forecast a joint run of tasks without running jobs; see `forecast`."""
        with PythonStateUndo.of_tasks(*tasks.values()).undone(keeps_results=True):
            return forecast(
                tasks,
                self._library,
                self._architectures,
                self._forecasts,
                functools.partial(self._fusions.of, most=group_size, probes=probe, profiled=profiled),
                list(self._devices.values()),
                self._policy,
                max_concurrent=self._max_concurrent,
                admission=self._admission,
                sends_ahead=self._sends_ahead,
            )

    def shutdown(self) -> None:
        """Cancel all live jobs, wait for the running units, end all threads; further calls have no effect.

        Threads that hang in a data loader are left behind.
        """
        core = self._core
        self.refuse_own_code("shutdown")
        with hold_interrupts(), self.changed:
            # Closed first: a job submitted later would be missing from the list, and nobody would end the job.
            core.is_closed = True
            jobs = [record.job for record in self._records.values()]
        for job in jobs:
            with contextlib.suppress(HydraTuneError):  # the pool may break down now, which ends all jobs as well
                self.stop(job, "cancelled")
        core.release_all()
        for job in jobs:
            job.result()
        for call in self.at_close:
            call()
        # All jobs have ended, so no unit follows the None in an inbox.
        for inbox in core.inboxes.values():
            inbox.put(None)
        core.to_prepare.put(None)
        self.loaders.close()
        self._watching.join()
        self.loaders.give_up_all()
        # A thread hanging in a data loader never ends by itself; as a daemon thread such a thread ends with the
        # process.
        for thread in (*self._all_threads, *core.failing):
            if not self.loaders.is_left_behind(thread):
                thread.join()
        with hold_interrupts(), self.changed:
            # Another call may have closed the pool during the joins.
            if not self._ended:
                self._close()
                self._ended = True

    def _close(self) -> None:
        # All workers have ended, so no unit uses these trials' memory any more.
        for record in self._core.abandoned:
            record.outcome = "cancelled"
            record.finish()
        # Before the host tier and the devices, because pending writes still read host memory.
        self.checkpoints.close()
        if self._host is not None:
            self._host.close()
        for device in self._devices.values():
            device.close()
        if self.log is not None:
            self.log.close()
        torch.set_num_threads(self._intraop_threads)


def refuse_saving(job: Job, waiting_for: "Future[Any] | None", until: float) -> None:
    """Refuse to save a job that somebody else has to let go on first; arguments as of `Pool.answer`."""
    if job.paused and job.state != "waiting":
        raise CheckpointError(
            f"{job.name!r} is paused within a step, and a job can be saved only between two steps; unpause() it first"
        )
    # Another thread may be about to answer the report, but not the caller's, if that thread answers the reports.
    last_step, patience = -1, 0.0
    while waiting_for is not None and job.state == "waiting" and not waiting_for.done() and time.monotonic() < until:
        if (step := job.progress.step) != last_step:
            last_step, patience = step, time.monotonic() + _ANSWER_SECONDS
        elif time.monotonic() > patience:
            raise CheckpointError(
                f"{job.name!r} waits at a report from which it could not be resumed: within a pass whose data cannot be drawn "
                "again from the middle, or at loop.step(may_resume=False). Answer the report first, and save the job later, or "
                "report where it can be resumed, as with report_every='epoch'"
            )
        time.sleep(_LOOK_SECONDS)


def _has_turn(record: JobState, waiting_for: "Future[Any] | None", until: float) -> bool:
    """Acquire the job's turn; wait only while `waiting_for` is pending, and until a time."""
    if waiting_for is None:
        return record.turn.acquire(blocking=False)
    while not record.turn.acquire(timeout=max(0.0, min(_LOOK_SECONDS, until - time.monotonic()))):
        if time.monotonic() >= until:
            return False
        if waiting_for.done():  # the job is over, but its thread may hang in a loader and keep the turn for ever
            return False
    return True
