"""`HydraExecutor`: the public interface of the pool.

The executor checks options, starts the pool at first use, turns each `TrainTask` into a `Job`, and routes most calls to
the fusion layer, to the pool, or to the isolated process that runs the pool. Training itself happens on the pool's
threads; a caller thread submits, waits, copies a job's state, plans, reads figures, and reads, writes and removes
checkpoints. The module must not know any tuner. People import `HydraExecutor` from `hydra_tune`; `hydra-tune sweep`
(`cli/run/sweep_run.py`), `hydra-tune check` (`cli/dry_run/checking.py`) and `hydra-tune plan` (`cli/dry_run/planning.py`)
make executors, and each Ray pool makes one executor (`integrations/hydra_tune_ray/node/pool_runtime.py`). Studies of
`hydra_tune_optuna` and searches of `hydra_tune_transformers` call an executor given by the user. With `isolate=True`,
`isolation/child.py` calls a copy of the executor in the pool's process.

Note: locks. `_lock` guards only the start of the pool and the setting of `_is_shut_down`, because several threads may share
an executor and make the first call at once. No call holds `_lock` while user code runs or a unit is awaited. A pool belongs to
the process of the first use: a forked process may neither use nor end the pool. Methods that wait for a trial or a plan leave
the capture gate (`GATE.left`), because a trial's own code may call such a method while a job has to be captured.
"""

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, overload

from hydra_tune.checkpoint.folder import CheckpointFolder, generations, load_checkpoint
from hydra_tune.checkpoint.naming import folder_name
from hydra_tune.checkpoint.saved import CheckpointContent
from hydra_tune.devices.hardware.discovery import open_device, parse_bandwidth
from hydra_tune.errors import CheckpointError, ConfigError, HydraTuneError, TrialsFailed, did_you_mean
from hydra_tune.interrupts import ends_in_order, hold_interrupts, is_interrupt
from hydra_tune.isolation.parent import THERE_IS, IsolatedPoolClient
from hydra_tune.loop_task import LoopTask, refuse_loops
from hydra_tune.observe.live.snapshot import Goal
from hydra_tune.paths import absolute_path
from hydra_tune.pool.checkpointing.lookup import (
    CheckpointSummary,
    check_checkpoint,
    find_checkpoint,
    remove_checkpoint,
    remove_or_log,
)
from hydra_tune.pool.checkpointing.suspend import suspend
from hydra_tune.pool.checkpointing.writer import StartCheckpointSource
from hydra_tune.pool.dry_run.report import PoolForecast
from hydra_tune.pool.faults.retry import check_retries
from hydra_tune.pool.fusion.fused_pool import FusedPool
from hydra_tune.pool.job import OVER, EventStream, Job, Result, check_priority
from hydra_tune.pool.pool import Pool
from hydra_tune.pool.runtime.option_checks import check_count, check_flag, members_of_group
from hydra_tune.pool.runtime.settings import ExecutorSettings
from hydra_tune.pool.stats import PoolStats
from hydra_tune.pool.views.live import shown
from hydra_tune.pool.views.live_snapshot import SweepMonitor
from hydra_tune.quantities import parse_seconds
from hydra_tune.schedule import Policy
from hydra_tune.shapes_only import refuse_shapes_only
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.partition.partitioner import NumShards
from hydra_tune.simulate.recorded.recording import Recording
from hydra_tune.task import Precision, TrainTask
from hydra_tune.train.data import loader_workers
from hydra_tune.train.own_loop.handle import Loop

_MOST_PROFILED = 8  # trials, where profile=True gives no number
_NO_CHECKPOINTS = "this executor has no checkpoints; make it with HydraExecutor(checkpoint_dir=...)"

OnError = Literal["raise", "return"]
"""Values of `on_error` in `HydraExecutor.run`."""


class HydraExecutor:
    """One shared pool of devices for training tasks.

    The pool starts at first use or on entering `with`, and ends at exit of the `with`, at `shutdown()`, or with the
    process. One executor can serve several studies, one after another or at once. Within a `with` block in the main
    thread, SIGTERM ends the program in order, as Ctrl-C does, unless the program has its own handler: the signal raises
    `hydra_tune.interrupts.Terminated`, a `SystemExit` with code 143. With a `checkpoint_dir`, both signals save the
    running jobs before the block ends.

    Args:
        devices: "auto" for every GPU, or for one CPU device per core on a machine without GPUs; "cuda", "cuda:0,1",
            "cpu:2"; "cuda:0,0" makes two devices of one GPU, each with `device_memory`.
        device_memory: memory that the pool may use on each device, e.g. "11GiB"; None: a GPU's free memory less a
            reserve; half of the free host memory for all CPU devices together.
        host_memory: host memory for the state of all trials in flight; None for 80% of the memory that is free at the
            start and not taken by CPU devices, and at least 20% of all free memory.
        spill_dir: a folder on disk for state beyond `host_memory`; None: trials wait until the host has room.
        policy: how the scheduler chooses shard units: "lrtf" (longest remaining time first), another name in
            `hydra_tune.schedule.POLICIES` or of an entry point in "hydra_tune.policies", or a `Policy`.
        buffer_fraction: part of each device's memory that a running shard leaves free, so that the next shards can be
            prefetched during its compute; 0 to below 1. A model that fits whole needs no buffer, and 0 turns
            prefetching off. "auto": the smallest buffer that holds the parameters of any shard.
        max_concurrent: trials in flight at once, of each study or search: two studies on one pool have twice as many.
            None for twice the number of devices. The pool begins no new trial while so many train. With `fusion` a
            fused group counts as one, and drivers ask for `max_concurrent` trials, or with None for enough trials to
            fill a group on each device.
        admission: "eager" lets all trials in flight advance as the policy chooses, in lock-step where trials are
            equally long; "staggered" runs the oldest trials first, as many as there are devices, and lets the others
            fill the gaps. Staggered trials end one after another, as pruners need that compare with completed trials.
            "auto": a search chooses by its pruner, and says so in the log; trials without a search advance eagerly.
            See docs/howto/pruning.md.
        num_shards: None cuts a model only if memory requires a cut, and behind a link, to a GPU for example, into shards
            of at most half the device, so that copies run beside units; a number sets a minimum; "layer" cuts at every
            layer; "tuned" cuts further where a step of a trial alone on its device then moves fewer bytes. More shards
            mean finer interleaving, more units, and more values that cross cuts.
        instrument: returns a context manager, entered on the worker thread around every unit (trackers, profilers).
        optimizer_placement: where optimizer state lives and updates run: "device" or "host". With "host" a step moves
            gradients down and parameters up, but no optimizer state, and updates overlap the device's next units.
            "auto": wherever the planner expects a shorter step, from measured speeds of copies and host memory; `plan`,
            the log and `Result.optimizer_placement` give the choice. The host's arithmetic rounds differently from a
            GPU's, so with "auto" on GPUs the last digits depend on the measurement; on CPU devices the numbers are the
            same for either placement.
        link_bandwidth: bandwidth to which copies to and from each CPU device are throttled, e.g. "200MB/s", to emulate
            a slow link; None: no throttling.
        record: keep the pool's events for `recording()`: some kilobytes of host memory for each unit run.
        event_log: a file of events, written while the pool runs and read by `hydra-tune trace`: units, copies and the
            lives of trials. An existing file is replaced; missing folders are made. None: no file.
        event_log_limit: size from which on units and copies are only counted in the event log, no longer listed, e.g.
            "50MB"; the lives of trials, with reports and ends, are always written. None: all are listed. At 1 GiB the log
            ends in any case. See docs/howto/trace.md.
        checkpoint_dir: a folder for the checkpoints of all trials, one subfolder each; made if missing. Each trial is
            saved at every report, and another process can resume the trials of a killed process bit for bit. None:
            nothing is saved.
        checkpoint_every: interval of additional checkpoints: a number of optimizer steps, or a time such as "30s".
        stop_seconds: how long a `with` block waits, after Ctrl-C or SIGTERM, for trials that are being saved; with a
            `checkpoint_dir`. A search outside a `with` block does so after Ctrl-C alone.
        loader_warning: how long a trial waits for a batch of its data loader before a warning names the loader and the
            place where the loader hangs: seconds, or a text such as "5min". See docs/howto/faults.md.
        loader_timeout: how long a trial waits for a batch before the trial fails and frees its place for other trials;
            None: the trial waits forever.
        max_retries: how often each trial may restart after faults of its environment: a lost device, a spill file that
            cannot be written or read, a killed worker process of a loader. The trial resumes from its last checkpoint,
            or from its beginning, with the same bits. See docs/howto/faults.md.
        fusion: "on" trains trials of one architecture together, on stacked tensors, as far as several wait at the same
            time: several times faster for small models, slower for large models. Fused numbers equal a plain loop's up
            to rounding, not to the last bit; trials that cannot be fused run alone. "auto": fuse only where a few
            steps, timed on copies first, show a gain. "off": never. See docs/howto/small-models.md.
        fusion_size: the most trials in a fused group.
        fusion_compile: name of a `torch.compile` backend, such as "inductor", for the steps of fused groups on CPU
            devices: each group size and kind of batch compiles once, in seconds to a minute. "cudagraphs": records the
            steps on GPUs as CUDA graphs. None: neither.
        fusion_planner: whether the planner may enlarge a fused group beyond the number of trials that fit a device, by
            swapping activations to the host or recomputing activations. "auto": where the planner predicts a gain over
            smaller groups, and as long as the larger group does not prove slower; "on": wherever a plan exists; "off":
            never. See docs/explanation/planner.md.
        isolate: whether the pool runs in its own process, so that a crash of a trial (a segmentation fault, an exit)
            ends only the pool's process. The executor restarts the process and resumes all trials from their
            checkpoints; a trial that has crashed the process twice fails with `TrialCrashedError`. Of the methods only
            `run`, `submit`, `loop`, `events`, `suspend`, `has_checkpoint` and `shutdown` are available then. See
            docs/howto/faults.md.
        plans_only: the executor serves only `plan` and `profile`. CPU devices of size `device_memory` stand in for
            devices that are missing or smaller, without taking the memory.

    Raises:
        ConfigError: an option that makes no sense, by name.
    """

    def __new__(cls, *_: object, **options: object) -> Self:  # noqa: D102 - for its errors alone
        # Checked here, before __init__, so that the error is a ConfigError and suggests an option.
        option_names = _options_of(cls)
        for name in options:
            if name not in option_names:
                # The fusion options were once called fuse, fuse_size and so on.
                hint = (
                    did_you_mean(name.replace("fuse", "fusion"), option_names) or f"known are {', '.join(option_names)}"
                )
                raise ConfigError(f"HydraExecutor has no option {name!r}; {hint}")
        return super().__new__(cls)

    def __init__(
        self,
        devices: str = "auto",
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        policy: str | Policy = "lrtf",
        buffer_fraction: float | Literal["auto"] = 0.15,
        max_concurrent: int | None = None,
        num_shards: NumShards = None,
        instrument: Callable[[], AbstractContextManager[Any]] | None = None,
        admission: Literal["auto", "eager", "staggered"] = "auto",
        link_bandwidth: str | int | None = None,
        record: bool = False,
        optimizer_placement: Literal["device", "host", "auto"] = "device",
        spill_dir: str | os.PathLike[str] | None = None,
        event_log: str | os.PathLike[str] | None = None,
        event_log_limit: str | int | None = "5MB",
        plans_only: bool = False,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: str | int | None = None,
        stop_seconds: str | float = 30.0,
        loader_warning: str | float = "60s",
        loader_timeout: str | float | None = "30min",
        max_retries: int = 1,
        fusion: Literal["off", "on", "auto"] = "off",
        fusion_size: int = 16,
        fusion_compile: str | None = None,
        fusion_planner: Literal["off", "on", "auto"] = "auto",
        isolate: bool = False,
    ) -> None:
        if loader_workers.is_worker_starting():
            raise ConfigError(
                "HydraExecutor is made while a new process imports the main script, as a DataLoader's workers do; put what "
                "the script does under if __name__ == '__main__':"
            )
        self._settings = ExecutorSettings(
            devices=devices,
            device_memory=device_memory,
            host_memory=host_memory,
            policy=policy,
            buffer_fraction=buffer_fraction,
            max_concurrent=max_concurrent,
            num_shards=num_shards,
            instrument=instrument,
            admission=admission,
            link_bandwidth=link_bandwidth,
            record=record,
            optimizer_placement=optimizer_placement,
            spill_dir=spill_dir,
            event_log=event_log,
            event_log_limit=event_log_limit,
            plans_only=plans_only,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
            loader_warning=loader_warning,
            loader_timeout=loader_timeout,
            max_retries=max_retries,
            fusion=fusion,
            fusion_size=fusion_size,
            fusion_compile=fusion_compile,
            fusion_planner=fusion_planner,
        )
        self._stop_seconds = parse_seconds(stop_seconds, what="stop_seconds")
        check_flag("isolate", isolate)
        self._isolated = IsolatedPoolClient(self._begin_isolated) if isolate else None
        if self._isolated is not None:
            self._settings.check_isolated()
            _shut_down_at_exit(self._isolated)
        # Signal handlers of a `with` block; closed last, so that Ctrl-C during shutdown still ends in order.
        self._signals = ExitStack()
        # Guards the start of the pool and the setting of `_is_shut_down`.
        self._lock = threading.Lock()
        self._pool: Pool | None = None
        self._fusion: FusedPool | None = None
        self._width = 0
        self._process: int | None = None  # with the pool's threads, from the first use on
        self._is_shut_down, self._watches = False, list[SweepMonitor]()

    @property
    def width(self) -> int:
        """Trials in flight that keep the devices busy.

        `max_concurrent` if given; else two for each device, or with fusion one full group for each device if that is
        more.
        """
        if not self._width:
            self._started()
        # Without max_concurrent, `_width` is two trials for each device: half of `_width` counts the devices.
        return self._settings.max_concurrent or max(self._width, self._settings.members * self._width // 2)

    @property
    def num_abreast(self) -> int:
        """Trials in flight that advance together: `width`, or with staggered admission at most the number of devices.

        Members of a fused group advance together under either admission.
        """
        if self._settings.admission != "staggered" or self._settings.members:
            return self.width
        return min(self.width, len(self.device_names))

    @property
    def num_abreast_alone(self) -> int:
        """`num_abreast` for trials that cannot be fused with each other, whatever `fusion` says."""
        if not self._width:
            self._started()
        num_in_flight = self._settings.max_concurrent or self._width
        return num_in_flight if self._settings.admission != "staggered" else min(num_in_flight, len(self.device_names))

    @property
    def admission(self) -> Literal["auto", "eager", "staggered"]:
        """The option of this name."""
        return self._settings.admission

    @property
    def fusion_size(self) -> int:
        """The most trials of a fused group; 0 with `fusion="off"`."""
        return self._settings.members

    @property
    def device_names(self) -> tuple[str, ...]:
        """Names of the pool's devices, e.g. `("cuda:0", "cuda:1")`."""
        return self._started().device_names if self._pool is None else self._pool.device_names

    @property
    def checkpoint_dir(self) -> Path | None:
        """The folder for checkpoints; None if nothing is saved."""
        return self._settings.saving[0]

    def submit(
        self,
        task: TrainTask,
        name: str | None = None,
        events: EventStream | None = None,
        *,
        priority: int = 0,
        staggered: bool = False,
        fusion_size: int | None = None,
        resume_from: str | os.PathLike[str] | None = None,
        resume: Literal["strict", "allow-changes"] = "strict",
        warm_start: str | os.PathLike[str] | None = None,
        labels: Mapping[str, Any] | None = None,
        saved_as: str | None = None,
        max_retries: int | None = None,
    ) -> Job:
        """Queue a task for training.

        Args:
            task: the task to train.
            name: for messages and tables.
            events: stream for the job's events; a job with a stream waits at each report for an answer.
            priority: jobs of a higher priority are admitted, and get devices, before all jobs of a lower priority, as
                with `Job.set_priority`.
            staggered: with `admission="auto"`, whether the job lets older staggered jobs go first, as many as there are
                devices.
            fusion_size: the most trials of a fused group that this job begins, if fewer than the executor's.
            resume_from: the folder of a trial's checkpoints; the job resumes from the last good checkpoint and ends as
                the saved trial would have. Earlier reports are in the result's history and send no events.
            resume: "strict" refuses a checkpoint of another task and names the differences; "allow-changes" resumes
                with the present task, where parameters and optimizer class are the same: see docs/howto/resume.md.
            warm_start: the folder of a trial's checkpoints; the job begins anew with the saved weights.
            labels: plain values saved with the job's checkpoints, for `find_checkpoint`.
            saved_as: name under which `find_checkpoint` finds the checkpoints; None: `name`.
            max_retries: overrides the executor's `max_retries` for this job; None: no override.

        Returns:
            The job, a handle to wait on, answer and cancel.

        Raises:
            ConfigError: not a task, a task whose data is `ShapesOnly`, an option that makes no sense, both `resume_from`
                and `warm_start`, or an executor made with `plans_only=True`; of a `LoopTask` also an executor with
                `fusion`, `num_shards` or `optimizer_placement="host"`.
            CheckpointError: the folder has no checkpoint. A damaged or unfit checkpoint fails the job instead.
            HydraTuneError: the executor is shut down.
        """
        if not isinstance(task, TrainTask):
            raise ConfigError(f"submit takes a TrainTask, not {type(task).__name__}")
        check_priority(priority)
        refuse_shapes_only(task)
        self._check_trains()
        if isinstance(task, LoopTask):
            self._settings.check_loops()
        if resume not in ("strict", "allow-changes"):
            raise ConfigError(f"resume must be 'strict' or 'allow-changes', not {resume!r}")
        if resume_from is not None and warm_start is not None:
            raise ConfigError("resume_from goes on with a trial, and warm_start begins one; give one of the two")
        retries = self._settings.max_retries if max_retries is None else check_retries(max_retries)
        if self._isolated is not None:
            return self._submit_isolated(
                task,
                name,
                events,
                priority=priority,
                staggered=staggered,
                resume_from=resume_from,
                resume=resume,
                warm_start=warm_start,
                labels=None if labels is None else dict(labels),
                saved_as=saved_as,
                max_retries=retries,
            )
        # The server of loader workers has to begin before this job makes a thread busy. Within `with`, the pool's threads
        # exist already, and wait.
        self._prepare_workers([task])
        pool, origin = self._started(), StartCheckpointSource()
        path = resume_from if warm_start is None else warm_start
        if path is not None:
            # Checkpoints are written in the background: wait for pending writes, or the newest would be missed.
            pool.checkpoints.flush()
            checkpoint_path = check_checkpoint(absolute_path(path))
            origin = StartCheckpointSource(
                path=checkpoint_path, allows_changes=resume != "strict", only_weights=warm_start is not None
            )
        if fusion_size is not None:
            members_of_group("on", fusion_size)
        # The fusion layer, where there is one, stands in front of the pool.
        submit = pool.submit if self._fusion is None else partial(self._fusion.submit, fusion_size=fusion_size)
        job = submit(
            task,
            name,
            events,
            priority=priority,
            staggered=staggered,
            origin=origin,
            labels=labels,
            saved_as=saved_as,
            max_retries=retries,
        )
        return self._watched(job)

    def loop(
        self,
        fn: Callable[[Loop], object],
        name: str | None = None,
        *,
        steps: int | None = None,
        metric: str | tuple[str, ...] = "value",
        precision: Precision = "float32",
        seed: int = 0,
        **options: Any,
    ) -> Job:
        """Queue a training loop of your own, which the pool calls as `fn(loop)` in a thread of its own.

        Args:
            fn: as of `LoopTask`, with the next four arguments.
            name: as of `submit`.
            steps: see `fn`.
            metric: see `fn`.
            precision: see `fn`.
            seed: see `fn`.
            options: further options of `submit`.

        Returns:
            The job, a handle to wait on, answer and cancel.

        Raises:
            TaskError: an argument that cannot be right.
            ConfigError: as of `submit`.
            HydraTuneError: as of `submit`.
        """
        task = LoopTask(fn, steps=steps, metric=metric, precision=precision, seed=seed)
        return self.submit(task, name, **options)

    def _submit_isolated(self, task: TrainTask, name: str | None, events: EventStream | None, **options: Any) -> Job:
        assert self._isolated is not None
        self._check_is_up()
        # Check here, in the caller: a missing checkpoint raises at submit, not later in the pool's process.
        for option in ("resume_from", "warm_start"):
            if options[option] is not None:
                options[option] = check_checkpoint(absolute_path(options[option]))
        return self._isolated.submit(task, name, events, options)

    def _begin_isolated(self, crashes: int) -> "tuple[HydraExecutor, Callable[[Job], Path | None]]":
        """Turn this copy, in the pool's process, into an ordinary executor."""
        # The copy shares no threads with the original, and a lock copied while held would stay held forever.
        self._isolated, self._lock, self._process = None, threading.Lock(), None
        self._settings.number_log(crashes)
        return self, self._started().folder_of

    def _check_trains(self) -> None:
        if self._settings.plans_only:
            raise ConfigError("this HydraExecutor was made with plans_only=True and trains nothing; make one without")

    def _watched(self, job: Job) -> Job:
        # Copied, for `live` may append or remove a watch on another thread meanwhile.
        for watch in tuple(self._watches):
            watch.add([job])
        return job

    # Own code of another pool's trial may call this method and others below that wait: a job may have to be captured meanwhile.
    @GATE.left()
    def clone(
        self,
        job: Job,
        changes: Mapping[str, Any] | None = None,
        name: str | None = None,
        events: EventStream | None = None,
        *,
        priority: int = 0,
    ) -> Job:
        """Begin a job with a copy of another job's state: weights, optimizer state, random streams, place in its data.

        Changed task arguments take effect from the copy on, and all other state continues: a changed `optimizer=` of
        the same class keeps the gathered optimizer state and takes the new options. See docs/howto/resume.md.

        Args:
            job: a job of this executor. A running job is copied after its present step, or at once where the job waits
                at a report; a finished job must have checkpoints.
            changes: arguments of `TrainTask` to replace.
            name: as of `submit`.
            events: as of `submit`.
            priority: as of `submit`.

        Returns:
            The new job, independent of the old job from then on.

        Raises:
            ConfigError: a name in `changes` that is no argument of `TrainTask`, a priority that is not an int, or an
                executor made with `plans_only=True` or `isolate=True`.
            TaskError: a task that cannot be trained as changed.
            CheckpointError: the job is over and has no checkpoint, ends meanwhile, cannot be saved where it waits, or has
                state that cannot be copied.
        """
        self._check_trains()
        pool = self._started()
        unknown = [key for key in changes or {} if key not in TrainTask.__dataclass_fields__]
        if unknown:
            raise ConfigError(f"TrainTask has no argument {unknown[0]!r} that could be changed")
        check_priority(priority)
        task = replace(job.task, **(changes or {}))
        self._prepare_workers([task])
        if job.state in OVER:
            path = job.result().checkpoint
            if path is None:
                raise CheckpointError(f"{job.name!r} is over ({job.state}) and has no checkpoint that could be cloned")
            pool.checkpoints.flush()
            origin = StartCheckpointSource(saved=load_checkpoint(path), allows_changes=True)
        else:
            # Waits for the end of the job's present step.
            origin = StartCheckpointSource(saved=(self._fusion or pool).copy(job).result(), allows_changes=True)
        return self._watched(
            (self._fusion or pool).submit(
                task, name, events, priority=priority, origin=origin, max_retries=self._settings.max_retries
            )
        )

    @GATE.left()
    def save_to(self, job: Job, folder: str | os.PathLike[str]) -> Path:
        """Write a checkpoint of a job to any folder, with or without a `checkpoint_dir`; the job continues.

        Args:
            job: a job of this executor that is not over. The state is copied in memory after the present step, or at
                once where the job waits at a report.
            folder: for the checkpoint alone; made if missing.

        Returns:
            The folder, for `submit(..., resume_from=...)`.

        Raises:
            CheckpointError: the job is over, ends meanwhile, cannot be saved where it waits, or has state that no checkpoint
                can hold; or the folder belongs to another trial.
            FileError: the system refuses.
        """
        pool = self._started()
        content = (self._fusion or pool).copy(job).result()
        checkpoint_folder = CheckpointFolder(absolute_path(folder))
        try:
            checkpoint_folder.write(content)
        finally:
            checkpoint_folder.close()
        return checkpoint_folder.path

    def copy_at_end(self, job: Job) -> "Future[CheckpointContent]":
        """Copy a job's last state in memory when the job has no more steps, with or without a `checkpoint_dir`.

        Args:
            job: a job of this executor that is not over.

        Returns:
            A future of the copy, done before the job is over; the copy holds host memory as long as the caller keeps
            the future. `CheckpointFolder.write` writes the copy. Call `cancel()` on a future that is no longer needed.
            The future fails with a `CheckpointError` if the job does not complete, or had nothing to train when it
            began.

        Raises:
            CheckpointError: the job is over.
        """
        return (self._fusion or self._started()).copy_at_end(job)

    def find_checkpoint(self, name: str) -> CheckpointSummary | None:
        """Find the last good checkpoint of a trial by name, whichever process has written the checkpoint.

        Args:
            name: the `saved_as` given to `submit`, or else the `name`.

        Returns:
            Path and labels of the checkpoint, for `submit(..., resume_from=found.path)`; None without a checkpoint.

        Raises:
            ConfigError: the executor has no `checkpoint_dir`.
            CheckpointError: every checkpoint of the trial is damaged.
        """
        return find_checkpoint(self._folder_of(name))

    def remove_checkpoint(self, name: str, *, waits: bool = True) -> None:
        """Remove all checkpoints of a trial by name, if any.

        Args:
            name: as of `find_checkpoint`.
            waits: whether to wait for the removal; otherwise errors are logged.

        Raises:
            ConfigError: the executor has no `checkpoint_dir`.
            CheckpointError: the trial is under way.
            FileError: the system refuses.
        """
        if waits:
            remove_checkpoint(self._folder_of(name))
        else:
            folder = self._folder_of(name, is_settled=False)
            # On the writer's thread, behind the trial's pending writes: a write after the removal would undo it.
            self._started().checkpoints.start(lambda: remove_or_log(folder))

    def has_checkpoint(self, name: str) -> bool:
        """Whether a trial has a checkpoint on disk now, whole or damaged; reads no checkpoint.

        Args:
            name: as of `find_checkpoint`.

        Raises:
            ConfigError: the executor has no `checkpoint_dir`.
            FileError: the folder cannot be read.
        """
        if self.checkpoint_dir is None:
            raise ConfigError(_NO_CHECKPOINTS)
        # Without `_folder_of`, which would start the pool and wait for pending writes.
        return bool(generations(self.checkpoint_dir / folder_name(name)))

    @GATE.left()
    def suspend(self, jobs: Iterable[Job] | None = None, *, seconds: float | None = None) -> None:
        """Save jobs and end them, so that this or another process can resume the jobs later.

        Each job is saved after its present step, or at once where the job waits at a report, and then cancelled. A job
        that has not begun is only cancelled: a checkpoint to resume from, if any, is on disk already. A failed write is
        logged, and the last good checkpoint stays. Does not wait for units still running at the end; `shutdown()` does.

        Args:
            jobs: of this executor; None: all.
            seconds: how long to wait for the saves; jobs not saved by then are cancelled. None: `stop_seconds`.

        Raises:
            ConfigError: the executor has no `checkpoint_dir`.
        """
        if self.checkpoint_dir is None:
            raise ConfigError(_NO_CHECKPOINTS)
        self._check_process()
        # Not `_started()`: a pool that has not started, or is shut down, has no job to save.
        pool, seconds = self._pool, self._stop_seconds if seconds is None else seconds
        if self._isolated is not None:
            self._isolated.suspend(jobs, seconds)
        if pool is not None:
            front = self._fusion or pool
            suspend(front, front.jobs() if jobs is None else jobs, seconds)

    def _folder_of(self, name: str, *, is_settled: bool = True) -> Path:
        pool = self._started()
        if pool.checkpoints.root is None:
            raise ConfigError(_NO_CHECKPOINTS)
        if is_settled:
            pool.checkpoints.flush()
        return pool.checkpoints.root / folder_name(name)

    @overload
    def run(self, tasks: TrainTask, *, on_error: OnError = "raise") -> Result: ...

    @overload
    def run(self, tasks: Iterable[TrainTask], *, on_error: OnError = "raise") -> list[Result]: ...

    def run(self, tasks: TrainTask | Iterable[TrainTask], *, on_error: OnError = "raise") -> Result | list[Result]:
        """Train tasks to their ends.

        A failure is logged at once, with its traceback, and the other trials continue.

        Args:
            tasks: any number of tasks, or a single task.
            on_error: "raise" raises `TrialsFailed` if a trial has failed; "return" returns the failed result among the
                others, with the error in `Result.error`.

        Returns:
            The results, in order; for a single task its result.

        Raises:
            TrialsFailed: trials have failed, and all have ended; its `results` holds the results of all trials.
            ConfigError: an item that is no task, or another `on_error`; nothing is trained then.
        """
        if on_error not in ("raise", "return"):
            raise ConfigError(f"on_error must be 'raise' or 'return', not {on_error!r}")
        results = self._run(_checked(tasks, "run"))
        if on_error == "raise" and any(result.status == "failed" for result in results):
            # The first trial's error as the cause, so that its traceback is printed, too.
            raise TrialsFailed(results) from next(result.error for result in results if result.status == "failed")
        return results[0] if isinstance(tasks, TrainTask) else results

    def _run(self, tasks: Iterable[TrainTask]) -> list[Result]:
        tasks = list(tasks)
        # Start the loaders' servers for all tasks first: afterwards the first job's threads are busy.
        self._prepare_workers(tasks)
        jobs: list[Job] = []
        try:
            for task in tasks:
                with hold_interrupts():  # Ctrl-C between the two would leave a job that nobody ends
                    jobs.append(self.submit(task))
            return [job.result() for job in jobs]
        except BaseException as error:
            # Save before the cancels below: a cancelled job has no state left to save.
            if is_interrupt(error) and self.checkpoint_dir is not None:
                self.suspend(jobs)
            # Whatever error ends the call, such as Ctrl-C: no job of this run may go on unseen.
            for job in jobs:
                job.cancel()
            raise

    def events(self) -> EventStream:
        """Open a new stream of events, for one driver, to be given to `submit(task, events=stream)`.

        Jobs submitted without a stream send no events.

        Raises:
            HydraTuneError: the executor is shut down.
        """
        if self._isolated is None:
            self._started()
        else:
            self._check_is_up()
        return EventStream()

    def stats(self) -> PoolStats:
        """Return the pool's figures since its start; also works after the `shutdown()` of a pool that has started."""
        self._check_process()
        # Read without `_started()`, which raises after a shutdown: figures may be read after the end.
        pool = self._pool
        return (pool or self._started()).stats()

    @contextmanager
    def live(self, *, goal: Goal = "minimize", name: str = "hydra-tune") -> Iterator[None]:
        """Show the pool's jobs, devices and estimated end until the block exits.

        On a terminal the view uses the terminal's second screen, as `hydra-tune sweep` does: output printed and logged
        meanwhile is shown below and printed again on standard error at the end. In a notebook the view appears below
        the cell, and stays. Elsewhere lines are printed: one for each finished job and one every half a minute. At the
        end, except in notebooks, the best jobs and the devices are printed.

        Args:
            goal: the direction in which the first of each task's metrics is better.
            name: title of the view.

        Raises:
            ConfigError: another goal.
            HydraTuneError: the executor is shut down.
        """
        if goal not in ("minimize", "maximize"):
            raise ConfigError(f"goal must be 'minimize' or 'maximize', not {goal!r}")
        pool = self._started()
        with shown(name, goal, pool.stats) as watch:
            # Before the earlier jobs are listed: a job submitted in between comes twice at most, which `add` notices,
            # and is never missed.
            self._watches.append(watch)
            try:
                # Jobs submitted before the block are shown as well.
                watch.add((self._fusion or pool).jobs())
                yield
            finally:
                self._watches.remove(watch)

    def recording(self) -> Recording:
        """Return the recording of the pool's inputs, decisions and events since the start; best after `shutdown()`.

        `recording().write(path)` writes a timeline for Perfetto and chrome://tracing.

        Raises:
            HydraTuneError: the executor was made without `record=True`, or shut down before the pool started.
        """
        pool = self._pool
        # As in `stats`: also after the end.
        return (pool or self._started()).recording()

    @GATE.left()
    def profile(
        self, tasks: TrainTask | Iterable[TrainTask], *, bandwidth: str | int | None = None, steps: int | None = None
    ) -> dict[str, Any]:
        """Profile a sweep of tasks for `hydra-tune simulate`; nothing is trained.

        Each model is built, captured, cut and run once on the host to measure times; the times are a CPU core's,
        whatever the devices are. Shards are cut as the pool would cut the model.

        Args:
            tasks: the trials.
            bandwidth: bytes a second at which each device loads, e.g. "12GB/s"; None: loads take no time.
            steps: optimizer steps of each; None: as many as its data has.

        Returns:
            The content of a profile, for `json.dump` or `hydra_tune.simulate.profile.parse_profile`.

        Raises:
            ConfigError: a `LoopTask`; a model that runs whole, for times of such a model are not known beforehand; or data
                without a length, without `steps`.
            HydraTuneError: a task that the pool would refuse.
        """
        check_count("steps", steps)
        tasks = _checked(tasks, "profile")
        refuse_loops(tasks, "profile")
        tasks_by_name = {f"trial{number}": task for number, task in enumerate(tasks)}
        bytes_per_second = parse_bandwidth(bandwidth, what="bandwidth")
        self._prepare_workers(tasks)
        return self._started().profile(
            tasks_by_name, bandwidth=bytes_per_second, steps=steps, max_concurrent=self.width
        )

    @GATE.left()
    def plan(
        self, tasks: TrainTask | Iterable[TrainTask], *, probe: bool = False, profile: bool | int = False
    ) -> PoolForecast:
        """Forecast how tasks would run in the pool together: shards, units, memory, and bytes moved in a step by kind.

        Each model is built, captured, cut and checked on the host with its first batch, as in `submit`; a model too
        large for the host is planned without being built, and not checked. For CPU devices a few steps of each model
        are timed, on a separate device and model. The scheduler and pagers of a run then rehearse some steps on tensors
        without bytes, on a virtual clock, and touch none of the pool's devices. Bytes are those of `stats()` for a step
        with all optimizer state in place; all trials are assumed to have equally many steps to go. Left out are
        evaluation, the shorter last batch of an epoch, the disk of `spill_dir`, and batches of a step that run side by
        side on idle devices.

        Args:
            tasks: the trials, at least one, or a single task.
            probe: time a few steps of fusable trials, alone and stacked, on copies, as `fusion="auto"` does; see
                docs/howto/plan.md.
            profile: run the step of each kind of trial operator by operator, alone and for up to `profile` fused
                trials, and report where memory goes and what savings would cost: `forecast.trials[0].fusion.figures`,
                or the reason for no figures (`why_no_figures`); see docs/explanation/planner.md. True: for as many as
                fill a group, up to 8.

        Returns:
            The forecast; of several tasks without those that cannot be planned, listed in `failed` with the error.

        Raises:
            BudgetError: a model that does not fit the devices; its `enough_bytes` is a sufficient budget.
            ConfigError: no tasks, a `LoopTask`, or a `profile` that is no number; a model that runs whole and whose code
                reads the values of its tensors; or a model too large to be built that runs whole or reads its weights
                during construction.
            TaskError: a task whose own code fails, as the code would in training; the original error is the cause.
            HydraTuneError: a task that the pool would refuse. Errors of a model or a task are raised only if no task can
                be planned.
        """
        tasks = _checked(tasks, "plan")
        refuse_loops(tasks, "plan")
        tasks_by_name = {f"trial{number}": task for number, task in enumerate(tasks)}
        if not tasks_by_name:
            raise ConfigError("there is no task to plan; give at least one")
        size = self._settings.fusion_size
        if not isinstance(profile, bool):
            check_count("profile", profile)
        num_profiled = min(size, _MOST_PROFILED) if profile is True else int(profile)
        self._prepare_workers(tasks)
        return self._started().plan(tasks_by_name, group_size=size, probe=probe, profiled=num_profiled)

    def add_device(self, name: str) -> None:
        """Add a device to the pool: a removed device, or a new one.

        `width` keeps its value; give `max_concurrent` to set the number of trials that all devices will share.

        Args:
            name: "cuda:1"; or "cpu:3", by any number that is free.

        Raises:
            ConfigError: no such device, a device already in the pool, or a device with less memory than models are cut
                for.
            HydraTuneError: the executor is shut down or records, or a trial's own code has called this method.
        """
        pool = self._started()
        # A new CPU device gets the budget of the others, for which models are cut already.
        budget = pool.budget_bytes
        pool.add_device(
            name,
            lambda: open_device(name, self._settings.device_memory, self._settings.link_bandwidth, cpu_budget=budget),
        )

    @GATE.left()
    def remove_device(self, name: str) -> None:
        """Remove a device from the pool; waits until the device's running unit is over and its memory is freed.

        Trial state on the device is spilled to the host, and the trials continue elsewhere with the same numbers.

        Args:
            name: as in `device_names`.

        Raises:
            ConfigError: no such device, or the only device.
            HydraTuneError: the executor is shut down or records, or a trial's own code has called this method.
        """
        self._started().remove_device(name)

    @GATE.left()
    def shutdown(self) -> None:
        """Cancel all unfinished jobs, wait for running units, and end all threads. May be called again.

        Does nothing in a process forked beside the pool, because files and jobs belong to the pool's process.

        Raises:
            HydraTuneError: a trial's own code has called this method.
        """
        if self._is_forked:
            return
        with self._lock:
            # The pool is read and the flag set under one lock, so that no pool can start after this point.
            pool = self._pool
            self._is_shut_down = True
        # Not under the lock: ending the pool waits for units, and their code may call the executor.
        if pool is not None:
            pool.shutdown()
        if self._isolated is not None:
            self._isolated.shutdown()
        # Last: the jobs' loader workers have ended with the pool.
        loader_workers.leave(self)

    def __enter__(self) -> Self:
        # First, so that a signal while the devices are opened ends the program in order, too.
        self._signals.enter_context(ends_in_order())
        try:
            if self._isolated is None:
                self._started()
            else:
                self._check_is_up()
        except BaseException:
            # Python does not call __exit__ after an error in __enter__.
            self._signals.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._signals:
            try:
                # Save first: the shutdown cancels every job.
                if is_interrupt(error) and self.checkpoint_dir is not None and not self._is_forked:
                    self.suspend()
            finally:
                self.shutdown()

    def _prepare_workers(self, tasks: Iterable[object]) -> None:
        handles = [handle for task in tasks if isinstance(task, TrainTask) for handle in (task.train, task.validate)]
        if not self._is_shut_down and self._isolated is None:
            loader_workers.prepare(self, *handles)

    def _check_is_up(self) -> None:
        if self._is_shut_down:
            raise HydraTuneError("the executor is shut down; make a new HydraExecutor")
        self._process = self._process or os.getpid()
        self._check_process()

    def _check_process(self) -> None:
        if self._is_forked:
            raise HydraTuneError(
                f"the executor's threads are in process {self._process}, and process {os.getpid()} was forked from that "
                "process without them; make a HydraExecutor in the forked process"
            )

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a fork of the process with the pool's threads."""
        return self._process not in (None, os.getpid())

    def _started(self) -> Pool:
        with self._lock:
            self._check_is_up()
            if self._isolated is not None:
                raise ConfigError(THERE_IS)
            if self._pool is None:
                # Under the lock, so that a second caller waits for this pool instead of opening the devices again.
                self._pool = self._start()
            return self._pool

    def _start(self) -> Pool:
        pool, self._fusion, self._width = self._settings.open_pool()
        _shut_down_at_exit(pool)
        return pool


def _options_of(cls: type[HydraExecutor]) -> list[str]:
    """Return the options that an executor class and its bases take by keyword."""
    by_keyword = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    # Subclasses may take options of their own, and pass all others on. `object`, whose `__init__` names no options, is last.
    initializers = [vars(kind)["__init__"] for kind in cls.__mro__[:-1] if "__init__" in vars(kind)]
    parameters = (parameter for maker in initializers for parameter in signature(maker).parameters.values())
    return list(dict.fromkeys(p.name for p in parameters if p.kind in by_keyword and p.name != "self"))


def _checked(tasks: TrainTask | Iterable[TrainTask], what: str) -> list[TrainTask]:
    """Return a task or tasks, the argument of the method `what`, as a list, every item checked."""
    if isinstance(tasks, TrainTask):
        return [tasks]
    if not isinstance(tasks, Iterable):
        raise ConfigError(f"{what} takes a TrainTask, or an iterable of them, not {type(tasks).__name__}")
    tasks_list = list(tasks)
    for number, task in enumerate(tasks_list):
        if not isinstance(task, TrainTask):
            raise ConfigError(
                f"{what} takes TrainTasks, and item {number} is {type(task).__name__}; nothing was trained"
            )
    return tasks_list


def _shut_down_at_exit(pool: Pool | IsolatedPoolClient) -> None:
    """Shut the pool down before the interpreter ends: threads that still run torch then can crash the process."""
    # Weak, so that this handler does not keep a forgotten pool, and its memory, until the process ends.
    reference, process = weakref.ref(pool), os.getpid()

    def shut_down() -> None:
        live_pool = reference()
        # A forked process has none of the pool's threads, and would wait for jobs and remove files of this process.
        if live_pool is not None and os.getpid() == process:
            live_pool.shutdown()

    atexit.register(shut_down)
