"""`HydraExecutor`: the pool's public face."""

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from inspect import Parameter, signature
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, overload

from hydra_tune.checkpoint.folder import CheckpointFolder, generations, load_checkpoint
from hydra_tune.checkpoint.naming import folder_name
from hydra_tune.checkpoint.saved import Saved
from hydra_tune.devices.discovery import open_device, parse_bandwidth
from hydra_tune.errors import CheckpointError, ConfigError, HydraTuneError, TrialsFailed, did_you_mean
from hydra_tune.interrupts import ends_in_order, is_interrupt
from hydra_tune.isolation.parent import THERE_IS, Isolated
from hydra_tune.observe.snapshot import Goal
from hydra_tune.pool.checkpoints import Origin
from hydra_tune.pool.faults import check_retries
from hydra_tune.pool.forecast import Forecast
from hydra_tune.pool.found import FoundCheckpoint, check_checkpoint, find_checkpoint, remove_checkpoint, remove_or_log
from hydra_tune.pool.fusion import Fusion
from hydra_tune.pool.job import OVER, EventStream, Job, Result, check_priority
from hydra_tune.pool.live import shown
from hydra_tune.pool.options import check_count, check_flag
from hydra_tune.pool.pool import Pool
from hydra_tune.pool.settings import Settings
from hydra_tune.pool.stats import PoolStats
from hydra_tune.pool.suspending import suspend
from hydra_tune.pool.watch import Watch
from hydra_tune.quantities import parse_seconds
from hydra_tune.schedule import Policy
from hydra_tune.shapes_only import refuse_shapes_only
from hydra_tune.shard.partition import NumShards
from hydra_tune.simulate.recording import Recording
from hydra_tune.task import TrainTask
from hydra_tune.train import workers

_HOST_SHARE = 0.8  # of the free host memory, where host_memory is not given
_MOST_PROFILED = 8  # trials, where nobody says how many
_NO_CHECKPOINTS = "this executor has no checkpoints; make it with HydraExecutor(checkpoint_dir=...)"

OnError = Literal["raise", "return"]
"""As of `HydraExecutor.run`."""


class HydraExecutor:
    """One shared pool of devices that trains tasks.

    Starts at first use, or on entering `with`; ends at exit of the `with`, at `shutdown()`, or with the process. It can
    serve several studies, one after another or at once. Within a `with` block in the main thread, SIGTERM ends the program in
    order, as Ctrl-C does, unless the program has a handler of its own: it raises `hydra_tune.interrupts.Terminated`, a
    `SystemExit` of code 143. With a `checkpoint_dir` both have the jobs under way saved before the block ends.

    Args:
        devices: "auto" for every GPU, or one CPU device per core where there is none; "cuda", "cuda:0,1", "cpu:2"; "cuda:0,0"
            makes two devices of one GPU, each with `device_memory`.
        device_memory: memory the pool may use on each device, e.g. "11GiB"; None for what is free, less a reserve.
        host_memory: host memory for the state of all trials in flight; None for 80% of what is free at the start.
        spill_dir: a folder on disk for what goes beyond `host_memory`; None: trials wait until the host has room for them.
        policy: how shard units are chosen: "lrtf" (longest remaining time first), another name in
            `hydra_tune.schedule.POLICIES` or of an entry point in "hydra_tune.policies", or a `Policy`.
        buffer_fraction: part of each device's memory that a shard leaves free for others, to which the next shards are sent
            while it computes; 0 to below 1. Nothing is kept where the whole model fits; with 0 nothing is sent ahead. "auto":
            as little as the parameters of any shard need.
        max_concurrent: trials in flight at once; None for twice the number of devices. With `fusion` a group counts as one, and
            drivers ask for as many trials as this says, or where it is None for as many as fill a group on each device.
        admission: "eager" lets all trials in flight advance as the policy says, in lock-step where they are equally long;
            "staggered" has the oldest go first, as many as there are devices, and the others fill the gaps: trials end
            one after another, which is what pruners need that compare with trials that have completed.
        num_shards: None cuts a model only as far as memory asks; a number cuts at least so often; "layer" cuts at every
            layer; "tuned" cuts further where a step of a trial that is alone on its device then moves fewer bytes. More shards
            mean finer interleaving, more units, and more values that cross cuts.
        instrument: returns a context manager, entered on the worker thread around every unit (trackers, profilers).
        optimizer_placement: where optimizer state is and updates are made: on the "device", or on the "host", where state
            stays: then a step moves the gradients down and the parameters up, and no optimizer state, and updates go on
            beside the device's next units. "auto": wherever a step of the plan is expected to take less time, by measured
            speeds of copies and of the host's memory; `plan`, the log and `Result.optimizer_placement` say where that was.
            On GPUs the host's arithmetic rounds differently from theirs, so that with "auto" last digits depend on what was
            measured; on CPU devices the numbers are the same wherever updates are made.
        link_bandwidth: what copies to and from each CPU device are slowed down to, e.g. "200MB/s", to see what a slow link
            would do; None: as fast as they are.
        record: keep what happens for `recording()`: some kilobytes of host memory for each unit run.
        event_log: a file for what happens, written while the pool runs, which `hydra-tune trace` reads: units, copies, what
            becomes of trials. Replaced if it is there; missing folders are made. None: none is written.
        event_log_limit: the size at which units and copies are left out of that file, and counted instead, e.g. "50MB"; what
            becomes of trials, their reports and ends included, is always written. None for no limit. See docs/trace.md.
        checkpoint_dir: a folder for the checkpoints of all trials, a folder each; made if it is not there. Each trial is saved
            at its reports, and what a killed process leaves another goes on from, bit for bit. None: nothing is saved.
        checkpoint_every: how often trials are saved beside that: a number of optimizer steps, or a time such as "30s".
        stop_seconds: how long, after Ctrl-C or SIGTERM in a `with` block or a search, trials that are being saved are waited
            for; with a `checkpoint_dir`.
        loader_warning: how long a trial waits for a batch of its data loader until a warning names the loader, and says where
            it hangs: seconds, or a text such as "5min". See docs/faults.md.
        loader_timeout: likewise, until the trial fails, so that it keeps nothing from the others any more; None: it waits for
            ever.
        max_retries: how often each trial may begin again after faults that are not its own: a lost device, a spill file that
            cannot be written or read, a loader's worker process that was killed. It goes on from its last checkpoint, or from
            its beginning, with the same bits. See docs/faults.md.
        fusion: "on" computes trials of one architecture together, stacked, as far as they wait at the same time: several times
            faster where models are small, slower where they are large. Numbers are then those of a plain loop up to rounding,
            no longer to the last bit; what cannot be fused runs as ever. "auto": only where that gains, by a few steps that are
            timed on copies first. "off": never. See docs/fusion.md.
        fusion_size: the most trials that are computed together.
        fusion_compile: name of a `torch.compile` backend, such as "inductor", that the steps of groups are compiled with, once
            for each size of a group and kind of batch; it takes from seconds to a minute each. None: they are not.
        fusion_planner: "auto" has trials of which fewer fit a device than could be a group be computed together all the same,
            with activations swapped to the host or computed again as planned, where that is predicted to be faster than smaller
            groups, and for as long as it does not prove slower; "on" wherever it can be planned; "off" never. See
            docs/planner.md.
        isolate: whether the pool runs in a process of its own, so that a crash of a trial (a segmentation fault, an exit) ends
            nothing but that process, which is begun again, and all trials with it, from their checkpoints; one that has ended
            it twice fails, with `TrialCrashedError`. Then only `run`, `submit`, `events` and `suspend` are there. See
            docs/faults.md.
        plans_only: only `plan` and `profile` are asked for. Devices that are not there, or not as large as `device_memory`, are
            then stood for by as many CPU devices of that memory, which take none of it.

    Raises:
        ConfigError: an option that makes no sense, by name.
    """

    def __new__(cls, *_: object, **options: object) -> Self:  # noqa: D102 - for its errors alone
        known = _options_of(cls)
        for name in options:
            if name not in known:
                hint = did_you_mean(name.replace("fuse", "fusion"), known) or f"known are {', '.join(known)}"
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
        admission: Literal["eager", "staggered"] = "eager",
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
        if workers.is_worker_starting():
            raise ConfigError(
                "HydraExecutor is made while a new process imports the main script, as a DataLoader's workers do; put what "
                "the script does under if __name__ == '__main__':"
            )
        self._settings = Settings(
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
        self._isolated = Isolated(self._begin_isolated) if isolate else None
        if self._isolated is not None:
            self._settings.check_isolated()
            _shut_down_at_exit(self._isolated)
        self._signals = ExitStack()
        self._lock = threading.Lock()
        self._pool: Pool | None = None
        self._fusion: Fusion | None = None
        self._width = 0
        self._is_shut_down, self._watches = False, list[Watch]()
        self._only_way: str | None = None  # in which steps are split; set by tests and measurements before the start

    @property
    def width(self) -> int:
        """Trials in flight that keep the devices busy: `max_concurrent`; or two for each device, or a group, if more."""
        if not self._width:
            self._started()
        return self._settings.max_concurrent or max(self._width, self._settings.members * self._width // 2)

    @property
    def num_abreast(self) -> int:
        """Trials in flight that advance together: `width`, or with staggered admission no more than there are devices.

        Members of a group advance together whatever the admission is.
        """
        if self._settings.admission == "eager" or self._settings.members:
            return self.width
        return min(self.width, len(self.device_names))

    @property
    def num_abreast_alone(self) -> int:
        """The same where no two trials can be computed together, whatever `fusion` says."""
        if not self._width:
            self._started()
        flying = self._settings.max_concurrent or self._width
        return flying if self._settings.admission == "eager" else min(flying, len(self.device_names))

    @property
    def fusion_size(self) -> int:
        """The most trials that are computed together; 0 with `fusion="off"`."""
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
        resume_from: str | os.PathLike[str] | None = None,
        resume: Literal["strict", "allow-changes"] = "strict",
        warm_start: str | os.PathLike[str] | None = None,
        labels: Mapping[str, Any] | None = None,
        saved_as: str | None = None,
        max_retries: int | None = None,
    ) -> Job:
        """Queue a task.

        Args:
            task: what to train.
            name: for messages and tables.
            events: where the job's events go; such a job waits at each report until it is answered.
            priority: jobs of a higher one are admitted, and get devices, before all of a lower one, as with
                `Job.set_priority`.
            resume_from: the folder of a trial's checkpoints, to go on from the last good one: the job ends as that trial
                would have. Reports made before it are in the result's history, and no events.
            resume: "strict" refuses a checkpoint of another task, with what differs; "allow-changes" goes on with the task as
                it is now, where parameters and optimizer class are the same: see docs/checkpoints.md.
            warm_start: the folder of a trial's checkpoints, to begin anew with its weights.
            labels: plain values that are saved with the job's checkpoints, for `find_checkpoint`.
            saved_as: what `find_checkpoint` finds them by; None: `name`.
            max_retries: as of the executor, for this job; None: as there.

        Raises:
            ConfigError: not a task, a task whose data is `ShapesOnly`, a priority that is not an int, two checkpoints to go on
                from, or an executor that only plans.
            CheckpointError: there is no checkpoint in the folder. What is wrong with one fails the job.
            HydraTuneError: the executor is shut down.
        """
        if not isinstance(task, TrainTask):
            raise ConfigError(f"submit takes a TrainTask, not {type(task).__name__}")
        check_priority(priority)
        refuse_shapes_only(task)
        self._check_trains()
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
                resume_from=resume_from,
                resume=resume,
                warm_start=warm_start,
                labels=None if labels is None else dict(labels),
                saved_as=saved_as,
                max_retries=retries,
            )
        self._prepare_workers([task])
        pool, origin = self._started(), Origin()
        path = resume_from if warm_start is None else warm_start
        if path is not None:
            pool.checkpoints.flush()
            found = check_checkpoint(Path(path).absolute())
            origin = Origin(path=found, allows_changes=resume != "strict", only_weights=warm_start is not None)
        job = (self._fusion or pool).submit(
            task,
            name,
            events,
            priority=priority,
            origin=origin,
            labels=labels,
            saved_as=saved_as,
            max_retries=retries,
        )
        return self._watched(job)

    def _submit_isolated(self, task: TrainTask, name: str | None, events: EventStream | None, **options: Any) -> Job:
        assert self._isolated is not None
        self._check_is_up()
        for option in ("resume_from", "warm_start"):
            if options[option] is not None:
                options[option] = check_checkpoint(Path(options[option]).absolute())
        return self._isolated.submit(task, name, events, options)

    def _begin_isolated(self, crashes: int) -> "tuple[HydraExecutor, Callable[[Job], Path | None]]":
        """In the pool's process, of which this is a copy: be an executor as any other."""
        self._isolated, self._lock = None, threading.Lock()
        self._settings.number_log(crashes)
        return self, self._started().folder_of

    def _check_trains(self) -> None:
        if self._settings.plans_only:
            raise ConfigError("this HydraExecutor was made with plans_only=True and trains nothing; make one without")

    def _watched(self, job: Job) -> Job:
        for watch in tuple(self._watches):
            watch.add([job])
        return job

    def clone(
        self,
        job: Job,
        changes: Mapping[str, Any] | None = None,
        name: str | None = None,
        events: EventStream | None = None,
        *,
        priority: int = 0,
    ) -> Job:
        """Begin a job with another job's state: weights, optimizer state, random streams, and place in its data.

        What of the task is changed is new from here on, and the rest goes on: with another `optimizer=` of the same class, the
        state that the old one has gathered, and the new one's options. See docs/checkpoints.md.

        Args:
            job: a job of this executor. One that is under way is copied when its present step is over, or as it is if it waits
                at a report; one that is over must have checkpoints.
            changes: arguments of `TrainTask` that are to be others.
            name: as of `submit`.
            events: as of `submit`.
            priority: as of `submit`.

        Returns:
            The new job, which no longer needs the old one.

        Raises:
            ConfigError: an argument that `TrainTask` has not.
            TaskError: a task that cannot be trained as changed.
            CheckpointError: the job is over and has no checkpoint, ends meanwhile, is paused within a step, or has something
                that cannot be copied.
        """
        self._check_trains()
        pool = self._started()
        unknown = [key for key in changes or {} if key not in TrainTask.__dataclass_fields__]
        if unknown:
            raise ConfigError(f"TrainTask has no argument {unknown[0]!r} that could be changed")
        check_priority(priority)
        task = replace(job.task, **(changes or {}))
        if job.state in OVER:
            path = job.result().checkpoint
            if path is None:
                raise CheckpointError(f"{job.name!r} is over ({job.state}) and has no checkpoint that could be cloned")
            pool.checkpoints.flush()
            origin = Origin(saved=load_checkpoint(path), allows_changes=True)
        else:
            origin = Origin(saved=(self._fusion or pool).copy(job).result(), allows_changes=True)
        return self._watched(
            (self._fusion or pool).submit(
                task, name, events, priority=priority, origin=origin, max_retries=self._settings.max_retries
            )
        )

    def save_to(self, job: Job, folder: str | os.PathLike[str]) -> Path:
        """Write a checkpoint of a job to any folder, with or without a `checkpoint_dir`; the job goes on.

        Args:
            job: a job of this executor that is not over. It is copied in memory when its present step is over, or as it is if
                it waits at a report.
            folder: for the checkpoint alone; made if it is not there.

        Returns:
            The folder, for `submit(..., resume_from=...)`.

        Raises:
            CheckpointError: the job is over, ends meanwhile, is paused within a step, or has something that no checkpoint can
                hold; or another trial has the folder.
            FileError: the system refuses.
        """
        pool = self._started()
        saved = (self._fusion or pool).copy(job).result()
        kept = CheckpointFolder(Path(folder).absolute())
        try:
            kept.write(saved)
        finally:
            kept.close()
        return kept.path

    def copy_at_end(self, job: Job) -> "Future[Saved]":
        """Have a job's last state copied in memory when it has nothing to do any more, with or without a `checkpoint_dir`.

        Args:
            job: a job of this executor that is not over.

        Returns:
            The copy, which is there before the job is over and takes host memory as long as it is kept;
            `CheckpointFolder.write` writes it. `cancel()` where it is not wanted any more. Of a job that does not complete, or
            that had nothing to train when it began, a `CheckpointError`.

        Raises:
            CheckpointError: the job is over.
        """
        return (self._fusion or self._started()).copy_at_end(job)

    def find_checkpoint(self, name: str) -> FoundCheckpoint | None:
        """The last good checkpoint of the trial of this name, whichever process has made it.

        Args:
            name: as it was given to `submit`, as `saved_as` or else as `name`.

        Returns:
            What is known of it, for `submit(..., resume_from=found.path)`; None if there is none.

        Raises:
            ConfigError: the executor has no `checkpoint_dir`.
            CheckpointError: there are some, and none is whole.
        """
        return find_checkpoint(self._folder_of(name))

    def remove_checkpoint(self, name: str, *, waits: bool = True) -> None:
        """Remove the checkpoints of the trial of this name, if there are any.

        Args:
            name: as of `find_checkpoint`.
            waits: whether to wait until that is done; if not, what goes wrong is logged.

        Raises:
            ConfigError: the executor has no `checkpoint_dir`.
            CheckpointError: the trial is under way.
            FileError: the system refuses.
        """
        if waits:
            remove_checkpoint(self._folder_of(name))
        else:
            folder = self._folder_of(name, is_settled=False)
            self._started().checkpoints.start(lambda: remove_or_log(folder))

    def has_checkpoint(self, name: str) -> bool:
        """Whether there is a checkpoint of the trial of this name on disk now, whole or damaged; reads none.

        Args:
            name: as of `find_checkpoint`.

        Raises:
            ConfigError: the executor has no `checkpoint_dir`.
            FileError: the folder cannot be read.
        """
        if self.checkpoint_dir is None:
            raise ConfigError(_NO_CHECKPOINTS)
        return bool(generations(self.checkpoint_dir / folder_name(name)))

    def suspend(self, jobs: Iterable[Job] | None = None, *, seconds: float | None = None) -> None:
        """Save jobs and end them, so that they can be gone on with another time, here or in another process.

        Each is saved when its present step is over, at once where it waits at a report, and cancelled then. One that has not
        begun is cancelled: what it goes on from, if anything, is on disk already. What cannot be written is logged, and the
        last good checkpoint stays. Does not wait for the units that still run at the end; `shutdown()` does.

        Args:
            jobs: of this executor; None: all.
            seconds: how long to wait for them; who is not saved by then is cancelled. None: `stop_seconds`.

        Raises:
            ConfigError: the executor has no `checkpoint_dir`.
        """
        if self.checkpoint_dir is None:
            raise ConfigError(_NO_CHECKPOINTS)
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

        Each failure is logged when it happens, with its traceback, and the other trials go on.

        Args:
            tasks: any number of tasks, or a single one.
            on_error: "raise" raises `TrialsFailed` if a trial has failed; "return" returns its result among the others, with
                the error in `Result.error`.

        Returns:
            The results, in order; of a single task its result.

        Raises:
            TrialsFailed: trials have failed, and all have ended; its `results` are those of all trials.
            ConfigError: something that is no task, or another `on_error`; nothing is trained then.
        """
        if on_error not in ("raise", "return"):
            raise ConfigError(f"on_error must be 'raise' or 'return', not {on_error!r}")
        results = self._run([tasks] if isinstance(tasks, TrainTask) else _checked(tasks))
        if on_error == "raise" and any(result.status == "failed" for result in results):
            raise TrialsFailed(results) from next(result.error for result in results if result.status == "failed")
        return results[0] if isinstance(tasks, TrainTask) else results

    def _run(self, tasks: Iterable[TrainTask]) -> list[Result]:
        tasks = list(tasks)
        self._prepare_workers(tasks)  # of all, before the first makes a thread busy
        jobs = [self.submit(task) for task in tasks]
        try:
            return [job.result() for job in jobs]
        except BaseException as error:
            if is_interrupt(error) and self.checkpoint_dir is not None:
                self.suspend(jobs)
            for job in jobs:
                job.cancel()
            raise

    def events(self) -> EventStream:
        """A new stream of events, for one driver.

        Raises:
            HydraTuneError: the executor is shut down.
        """
        if self._isolated is None:
            self._started()
        else:
            self._check_is_up()
        return EventStream()

    def stats(self) -> PoolStats:
        """Figures since the pool began."""
        pool = self._pool  # figures may be read after the end as well
        return (pool or self._started()).stats()

    @contextmanager
    def live(self, *, goal: Goal = "minimize", name: str = "hydra-tune") -> Iterator[None]:
        """Show what the pool does until the block is left: its jobs, its devices, and when it will be over.

        On a terminal as `hydra-tune sweep` does, on the terminal's second screen: what is printed and logged meanwhile is shown
        below, and printed again on standard error at the end. In a notebook below the cell, where it stays. Elsewhere as lines:
        one for each job that ends, and one every half a minute. At the end, but for notebooks, the best jobs and the devices.

        Args:
            goal: which way the first of each task's metrics is better.
            name: what the whole is called.

        Raises:
            ConfigError: another goal.
            HydraTuneError: the executor is shut down.
        """
        if goal not in ("minimize", "maximize"):
            raise ConfigError(f"goal must be 'minimize' or 'maximize', not {goal!r}")
        pool = self._started()
        with shown(name, goal, pool.stats) as watch:
            self._watches.append(watch)
            try:
                watch.add((self._fusion or pool).jobs())
                yield
            finally:
                self._watches.remove(watch)

    def recording(self) -> Recording:
        """What the pool was told, decided and did since it began; best asked for after `shutdown()`.

        `recording().write(path)` writes a timeline that Perfetto and chrome://tracing show.

        Raises:
            HydraTuneError: the executor was made without `record=True`.
        """
        pool = self._pool
        return (pool or self._started()).recording()

    def profile(
        self, tasks: Iterable[TrainTask], *, bandwidth: str | int | None = None, steps: int | None = None
    ) -> dict[str, Any]:
        """What a sweep of these tasks would ask of the devices, for `hydra-tune simulate`; nothing is trained.

        Each model is built, captured, cut and run once on the host, for its times: those of a CPU core, whatever the devices
        are. Shards are what the pool would make of it.

        Args:
            tasks: the trials.
            bandwidth: bytes a second at which each device loads, e.g. "12GB/s"; None: loads take no time.
            steps: optimizer steps of each; None: as many as its data has.

        Returns:
            The content of a profile, for `json.dump` or `hydra_tune.simulate.profile.parse_profile`.

        Raises:
            ConfigError: a model that runs whole, whose times are not known beforehand; or data that does not tell its
                length, without `steps`.
            HydraTuneError: a task that the pool would refuse.
        """
        check_count("steps", steps)
        named = {f"trial{number}": task for number, task in enumerate(tasks)}
        loads = parse_bandwidth(bandwidth, what="bandwidth")
        return self._started().profile(named, bandwidth=loads, steps=steps, max_concurrent=self.width)

    def plan(self, tasks: Iterable[TrainTask], *, probe: bool = False, profile: bool | int = False) -> Forecast:
        """What these tasks would do in the pool together: shards, units, memory, and bytes moved in a step by kind.

        Each model is built, captured, cut and checked on the host with its first batch, as `submit` would have it; one that
        is too large for that is planned without being built, and not checked. For CPU devices a few steps of it are timed, on
        a device and with a model of their own. Then some steps are rehearsed on tensors without bytes, by the scheduler and
        pagers of a run, on a virtual clock; nothing touches the pool's devices. The bytes are those of `stats()`, in a step
        once all optimizer state is there; all trials are taken to have as many steps to go. Left out are evaluation, the
        shorter last batch of an epoch, the disk of `spill_dir`, and the batches of a step that run side by side when devices
        have nothing else to do.

        Args:
            tasks: the trials; at least one.
            probe: time a few steps of those that could be computed together, alone and stacked, on copies, as `fusion="auto"`
                does; see docs/fusion.md.
            profile: run the step of each kind of trial operator by operator, alone and for up to so many trials fused, and tell
                where its memory is and what less would cost: `forecast.trials[0].fusion.figures`, or why not
                (`why_no_figures`); see docs/planner.md. True: for as many as fill a group, up to 8.

        Returns:
            The figures; of several tasks without those that cannot be planned, which are in `failed` with the error.

        Raises:
            BudgetError: a model that the devices have no room for; its `enough_bytes` says how much would do.
            ConfigError: no tasks; a model that runs whole and whose code wants the values of its tensors; or one that is too
                large to be built, and runs whole or reads its weights when it is made.
            TaskError: a task whose own code fails, as it would in training; that error is its cause.
            HydraTuneError: a task that the pool would refuse. As all of these but for no tasks, only if no task can be planned.
        """
        named = {f"trial{number}": task for number, task in enumerate(tasks)}
        if not named:
            raise ConfigError("there is no task to plan; give at least one")
        size = self._settings.fusion_size
        if not isinstance(profile, bool):
            check_count("profile", profile)
        profiled = min(size, _MOST_PROFILED) if profile is True else int(profile)
        return self._started().plan(named, group_size=size, probe=probe, profiled=profiled)

    def add_device(self, name: str) -> None:
        """Have trials use one more device, from now on: one that was removed, or a new one.

        `width` stays what it was: give `max_concurrent` for as many trials as all devices are to share.

        Args:
            name: "cuda:1"; or "cpu:3", by any number that is free.

        Raises:
            ConfigError: there is no such device, it is in the pool, or it has less memory than models are cut for.
            HydraTuneError: the executor is shut down or records, or a trial's own code has called this.
        """
        pool = self._started()
        budget = pool.budget_bytes
        pool.add_device(
            name,
            lambda: open_device(name, self._settings.device_memory, self._settings.link_bandwidth, cpu_budget=budget),
        )

    def remove_device(self, name: str) -> None:
        """Take a device from the pool; waits until the unit that runs there is over and its memory is given back.

        What trials have there goes to the host, and they go on elsewhere, with the same numbers.

        Args:
            name: as in `device_names`.

        Raises:
            ConfigError: no such device, or the only one.
            HydraTuneError: the executor is shut down or records, or a trial's own code has called this.
        """
        self._started().remove_device(name)

    def shutdown(self) -> None:
        """Cancel what is not over, wait for the running units, end all threads. May be called again."""
        with self._lock:
            pool = self._pool
            self._is_shut_down = True
        if pool is not None:
            pool.shutdown()
        if self._isolated is not None:
            self._isolated.shutdown()
        workers.leave(self)

    def __enter__(self) -> Self:
        self._signals.enter_context(ends_in_order())
        try:
            if self._isolated is None:
                self._started()
            else:
                self._check_is_up()
        except BaseException:
            self._signals.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._signals:
            try:
                if is_interrupt(error) and self.checkpoint_dir is not None:
                    self.suspend()
            finally:
                self.shutdown()

    def _prepare_workers(self, tasks: Iterable[object]) -> None:
        handles = [handle for task in tasks if isinstance(task, TrainTask) for handle in (task.train, task.validate)]
        if not self._is_shut_down and self._isolated is None:
            workers.prepare(self, *handles)

    def _check_is_up(self) -> None:
        if self._is_shut_down:
            raise HydraTuneError("the executor is shut down; make a new HydraExecutor")

    def _started(self) -> Pool:
        with self._lock:
            self._check_is_up()
            if self._isolated is not None:
                raise ConfigError(THERE_IS)
            if self._pool is None:
                self._pool = self._start()
            return self._pool

    def _start(self) -> Pool:
        pool, self._fusion, self._width = self._settings.open_pool(self._only_way)
        _shut_down_at_exit(pool)
        return pool


def _options_of(cls: type[HydraExecutor]) -> list[str]:
    """The arguments that an executor, or a class made of it, takes by name."""
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    makers = [vars(kind)["__init__"] for kind in cls.__mro__[:-1] if "__init__" in vars(kind)]
    found = (parameter for maker in makers for parameter in signature(maker).parameters.values())
    return list(dict.fromkeys(p.name for p in found if p.kind in named and p.name != "self"))


def _checked(tasks: Iterable[TrainTask]) -> list[TrainTask]:
    """Tasks, all of them looked at before the first one is trained."""
    if not isinstance(tasks, Iterable):
        raise ConfigError(f"run takes a TrainTask, or an iterable of them, not {type(tasks).__name__}")
    listed = list(tasks)
    for number, task in enumerate(listed):
        if not isinstance(task, TrainTask):
            raise ConfigError(f"run takes TrainTasks, and item {number} is {type(task).__name__}; nothing was trained")
    return listed


def _shut_down_at_exit(pool: Pool | Isolated) -> None:
    """Threads that run torch while the interpreter ends can crash it; the executor may be forgotten before."""
    reference = weakref.ref(pool)

    def shut_down() -> None:
        found = reference()
        if found is not None:
            found.shutdown()

    atexit.register(shut_down)
