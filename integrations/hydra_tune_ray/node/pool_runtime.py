"""The training side of a pool: the executor of the node's devices, and temporary folders.

`NodePool` (`node_pool.py`) makes a `NodePoolRuntime` when the pool opens, and calls the runtime in worker threads when
a trial begins, is saved, moves or ends, because the calls block. Only `copy_at_end` returns at once, and is called on the
event loop. The module imports torch, and must not import Ray Tune.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray

from hydra_tune import HydraExecutor, LoopTask, TrainTask
from hydra_tune.checkpoint.folder import CheckpointFolder
from hydra_tune.checkpoint.saved import CheckpointContent
from hydra_tune.errors import CheckpointError, TaskError
from hydra_tune.pool.job import EventStream, Job
from hydra_tune_ray.build_adapter import built
from hydra_tune_ray.checkpoint_transfer import read_files, write_files
from hydra_tune_ray.messages import BeginRequest, Files


class NodePoolRuntime:
    """See the module's docstring.

    Raises:
        HydraTuneError: as of `HydraExecutor`; or the devices cannot be opened.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.executor = HydraExecutor(**options)
        self.device_names = self.executor.device_names  # opens the devices, and raises here if one is missing
        # After the devices, so that a failed opening leaves no folder behind.
        self._scratch = Path(tempfile.mkdtemp(prefix="hydra-tune-ray-"))

    def submit(self, request: BeginRequest, files: Files | None, events: EventStream) -> Job:
        """Build a trial's task and submit the task, to resume from `files` if any.

        Raises:
            Exception: whatever `build` raises; `TaskError` if `build` returns no task that Ray can run.
        """
        build = ray.cloudpickle.loads(request.build)
        task = built(build, request.config)
        if isinstance(task, LoopTask):
            raise TaskError(
                "Ray Tune cannot run a LoopTask: Ray asks for a trial's place between reports, which only the loop's function "
                "knows; return a TrainTask, or search with Optuna"
            )
        if not isinstance(task, TrainTask):
            raise TaskError(f"build must return a TrainTask, not {type(task).__name__}")
        if files is None:
            return self.executor.submit(task, request.name, events)
        folder = self._scratch / request.key
        try:
            write_files(files, folder)
            return self.executor.submit(
                task,
                request.name,
                events,
                resume_from=folder,
                resume="allow-changes" if request.is_changed else "strict",
            )
        except BaseException:
            self.forget(request.key)
            raise

    def copy_at_end(self, job: Job) -> "Future[CheckpointContent] | None":
        """Copy a job's last state at the end, if the job may be over without waiting at a report known to be its last.

        Trials with `report_every` in steps may train on after their last report, and `stop=` may end a trial after any
        report. Every other trial waits at its last report to be saved: None.
        """
        if job.task.report_every == "epoch" and job.task.stop is None:
            return None
        with contextlib.suppress(CheckpointError):  # over already, as the job's own events say
            return self.executor.copy_at_end(job)
        return None

    def read_copied(self, copy: CheckpointContent) -> Files:
        """Convert a copied state to the files of a checkpoint."""
        with self._folder() as folder:
            with contextlib.closing(CheckpointFolder(folder)) as checkpoint_folder:
                checkpoint_folder.write(copy)
            return read_files(folder)

    def save(self, job: Job, folder: str) -> None:
        """Write the state of a job to a folder of this node, as `HydraExecutor.save_to`."""
        self.executor.save_to(job, folder)

    def read_saved(self, job: Job) -> Files:
        """Read the state of a job as files; the errors are those of `HydraExecutor.save_to`."""
        with self._folder() as folder:
            self.executor.save_to(job, folder)
            return read_files(folder)

    def forget(self, key: str) -> None:
        """Remove the files that a trial resumed from."""
        shutil.rmtree(self._scratch / key, ignore_errors=True)

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        """Make a folder that lives only within the block."""
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """End all jobs and free the devices."""
        try:
            self.executor.shutdown()
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
