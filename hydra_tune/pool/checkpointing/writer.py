"""Checkpoints beside training: when a trial is saved, where to, and the writer thread.

`ExecutorSettings` (`pool/runtime/settings.py`) makes the `PoolCheckpointWriter` of a pool. `pool/pool.py` and
`pool/fusion/fused_pool.py` make a `TrialCheckpointer` for each job of a driver, as the trial's keeper; `train/trial.py`
and `train/own_loop/loop_trial.py` call the keeper between two steps of the trial. A driver's thread, the `timer` thread
(`pool/fusion/job_table.py`) or the thread that advances a group calls `answer` while the trial stands between two steps.
`FaultRecovery` (`pool/faults/retry.py`) and `HydraExecutor` (`executor.py`) call `flush` before they read checkpoints.
`cli/run/sweep_run.py` checks the folder of a sweep by `check_checkpoint_dir`. The module must not know the format:
`hydra_tune.checkpoint` does.

Note: waiting. Between two steps, the thread that runs a trial copies the trial's state to a host buffer. Training goes
on, and the writer thread writes the buffer to disk. A pool has a single buffer, so checkpoints take host memory for a
single trial at a time. While the buffer is in use, another due trial trains on and is saved between two later steps.
Only explicitly requested checkpoints and a trial's last state wait for the buffer. Where the host has no room for the
buffer, the trial waits, and its state is written in place.

Note: failures. A checkpoint that cannot be written is logged, earlier checkpoints stay whole, and training goes on. In
a pool with a folder for checkpoints, a trial with an object that no checkpoint can hold fails at the first step behind
which the trial may be saved; the error names the object.

Note: the slot. The slot's holder alone touches the buffer. Each way out of a save gives the room, if any, and then the
slot back, or the next save waits for ever. A folder is released (`leave`) only behind the trial's last write.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from hydra_tune.checkpoint.every import CheckpointInterval, parse_every
from hydra_tune.checkpoint.files import make_private_folder
from hydra_tune.checkpoint.folder import CheckpointFolder, check_private, generations, load_checkpoint
from hydra_tune.checkpoint.lock import is_locked
from hydra_tune.checkpoint.naming import folder_name
from hydra_tune.checkpoint.saved import CheckpointContent
from hydra_tune.errors import CheckpointError, ConfigError, HydraTuneError
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.paths import option_path
from hydra_tune.shard.python_state.state_guard import TaskStateGuard
from hydra_tune.train.checkpoint.snapshot import SnapshotSource
from hydra_tune.train.checkpoint.trial_checkpoint import StartCheckpoint

_LOGGER = logging.getLogger("hydra_tune.checkpoints")
_LOOK_SECONDS = 0.1  # between checks whether the writer thread has ended
_ROOM_SHARE = 0.5  # largest part of the free host memory that a copy may take where there is no ledger


def check_checkpoint_dir(path: object) -> Path:
    """Return the absolute path of the checkpoint folder; a missing folder is created.

    Raises:
        ConfigError: the path is no folder, or other users can write to the folder.
    """
    folder = option_path(path, "checkpoint_dir")
    try:
        make_private_folder(folder)
        check_private(folder)
    except HydraTuneError as error:
        raise ConfigError(f"checkpoint_dir cannot be used: {error}") from error
    return folder


def check_saving(folder: object, every: object) -> tuple[Path | None, CheckpointInterval]:
    """Check `checkpoint_dir` and `checkpoint_every`.

    Raises:
        ConfigError: an argument is invalid, or `checkpoint_every` is given without `checkpoint_dir`.
    """
    if every is not None and folder is None:
        raise ConfigError("checkpoint_every needs a folder for checkpoints; give checkpoint_dir")
    return None if folder is None else check_checkpoint_dir(folder), parse_every(every)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCheckpointSource:
    """The state that a job continues from; by default the job starts from scratch.

    Attributes:
        path: a checkpoint folder, or a manifest in a checkpoint folder; read when the job is prepared.
        saved: a state in memory.
        allows_changes: as of `StartCheckpoint`.
        only_weights: as of `StartCheckpoint`.
    """

    path: Path | None = None
    saved: CheckpointContent | None = None
    allows_changes: bool = False
    only_weights: bool = False

    @property
    def folder(self) -> Path | None:
        """The folder of the trial that continues in the job; None if no trial continues."""
        if self.path is None or self.only_weights:
            return None
        return self.path if self.path.is_dir() else self.path.parent

    def beginning(self) -> StartCheckpoint | None:
        """Read the state now.

        Raises:
            CheckpointError: there is no checkpoint, or no whole checkpoint.
        """
        content = self.saved if self.path is None else load_checkpoint(self.path)
        if content is None:
            return None
        return StartCheckpoint(saved=content, allows_changes=self.allows_changes, only_weights=self.only_weights)


class PoolCheckpointWriter:
    """All checkpoints of a pool.

    Args:
        root: the folder for checkpoints; None: states are only copied in memory, as a start for other trials.
        every: how often trials are saved, in addition to reports.
        host: host tier with the ledger of host memory; None: a copy may take half of the free memory.
    """

    def __init__(self, root: Path | None, every: CheckpointInterval, host: HostTier | None) -> None:
        self.root = root
        self.every = every
        self._host = host
        self._buffer: Tensor | None = None
        # A trial's thread takes the slot, and the writer thread gives the slot back.
        self._slot = threading.Semaphore()
        self._lock = threading.Lock()
        self._taken: set[Path] = set()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def place(self, name: str, resumed: Path | None) -> Path | None:
        """Reserve the folder for a new trial's checkpoints.

        Args:
            name: name of the trial.
            resumed: the folder that the trial continues from; reused if the folder lies directly in `root` and no
                other trial of this pool holds the folder.
        """
        if self.root is None:
            return None
        with self._lock:
            if resumed is not None and resumed.parent == self.root and resumed not in self._taken:
                folder = resumed
            else:
                first_choice, number = self.root / folder_name(name), 1
                folder = first_choice
                # A folder of another run, which may have no checkpoint yet, is never overwritten.
                while folder in self._taken or generations(folder) or _is_held(folder):
                    number += 1
                    folder = first_choice.with_name(f"{first_choice.name}~{number}")
            self._taken.add(folder)
            return folder

    def leave(self, folder: Path | None) -> None:
        """Release the folder of a trial that is over, so that another trial may use the folder."""
        with self._lock:
            if folder is not None:
                self._taken.discard(folder)

    def take_slot(self, *, waits: bool) -> bool:
        """Take the exclusive right to write; return False if another trial holds the right and `waits` is false."""
        return self._slot.acquire(blocking=waits)

    def give_slot_back(self) -> None:
        """Release the right to write, after success or failure of the write."""
        self._slot.release()

    def room(self, nbytes: int) -> Tensor | None:
        """Return the host buffer for a copy, or None without enough room; only the holder of the slot may call."""
        # Never waits for room: without room the state is written in place (see the note on waiting).
        if self._host is not None:
            if not self._host.ledger.try_take(nbytes):
                return None
        elif nbytes > psutil.virtual_memory().available * _ROOM_SHARE:
            return None
        # A buffer of a much larger trial is not kept, for nobody else would ever free its memory.
        if self._buffer is None or not nbytes <= self._buffer.numel() <= 2 * nbytes:
            self._buffer = None  # freed first: both buffers together would exceed the granted room
            try:
                self._buffer = torch.empty(nbytes, dtype=torch.uint8)
            # Torch raises a plain RuntimeError where the system refuses memory.
            except RuntimeError:
                self.give_room_back(nbytes)
                raise
        return self._buffer

    def give_room_back(self, nbytes: int) -> None:
        """Release the room of a finished copy."""
        if self._host is not None:
            # With a ledger, unused bytes have to be free for spilled blocks. Without a ledger the buffer stays for the
            # next copy.
            self._buffer = None
            self._host.ledger.give_back(nbytes)

    def start(self, job: Callable[[], None]) -> None:
        """Run a function on the writer thread, after all earlier functions."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hydra-checkpoints", daemon=True)
                self._thread.start()
        self._jobs.put(job)

    def flush(self, patience_seconds: float = math.inf) -> None:
        """Wait for the end of all earlier work on the writer thread, about as long as given; on that thread, do nothing."""
        thread = self._thread
        if thread is not None and threading.current_thread() is not thread:
            flushed, deadline = threading.Event(), time.monotonic() + patience_seconds
            self.start(flushed.set)
            # After `close`, or beside it, the thread ends without looking at the queue again; nothing is pending then.
            while not flushed.wait(_LOOK_SECONDS) and thread.is_alive() and time.monotonic() < deadline:
                pass

    def close(self) -> None:
        """Finish the outstanding writes, and end the writer thread."""
        # Behind all writes in the queue, which therefore end first.
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()
        self._buffer = None

    def _work(self) -> None:
        torch.set_num_threads(1)
        while (job := self._jobs.get()) is not None:
            job()
            # Otherwise the closure would keep the trial's folder and copy alive until the next job arrives.
            del job


class TrialCheckpointer:
    """Saves a single trial.

    Args:
        name: name of the trial, for messages.
        path: the folder for the trial's checkpoints; None: no checkpoints.

    Attributes:
        has_any: whether the trial has been copied for a checkpoint, or continues from a checkpoint in its own folder.
    """

    def __init__(
        self,
        checkpoints: PoolCheckpointWriter,
        name: str,
        path: Path | None,
        labels: Mapping[str, Any],
    ) -> None:
        self.path = path
        self.has_any = False
        self._all = checkpoints
        self._name = name
        self._labels = labels
        self._folder: CheckpointFolder | None = None
        self._lock = threading.Lock()
        self._copies: list[Future[CheckpointContent]] = []
        self._files: list[Future[Path]] = []
        self._at_end: list[Future[CheckpointContent]] = []
        self._end: str | None = None
        self._is_refused = False
        self._is_owed = False
        self._steps = -1
        self._seconds = time.monotonic()
        self._python_state: TaskStateGuard | None = None  # of the moment from which the trial would begin again

    def open(self) -> None:
        """Lock the folder for the trial's exclusive use.

        Raises:
            CheckpointError: another trial, of the same or another process, holds the folder.
            FileError: the folder cannot be made.
        """
        if self.path is not None and self._folder is None:
            self._folder = CheckpointFolder(self.path)

    @property
    def is_asked(self) -> bool:
        """Whether a caller waits for a copy or a checkpoint."""
        return bool(self._copies or self._files)

    def begin_again(self) -> None:
        """Prepare for a restart of the trial from the last saved state, if any; open requests stay open.

        The user's functions go on from what they kept in Python at that state.
        """
        if self._python_state is not None and (name := self._python_state.restore()) is not None:
            _LOGGER.warning(
                "%s begins again, but %s may have changed meanwhile and cannot be put back; if its numbers depend on that "
                "value, they will be others",
                self._name,
                name,
            )
        self._steps, self._is_owed, self._seconds = -1, False, time.monotonic()

    def goes_on_from(self, manifest: Path | None) -> None:
        """Note the manifest that the trial continues from, and delete later checkpoints of the folder.

        Raises:
            FileError: the system refuses.
        """
        # A checkpoint of another folder is only read: its later checkpoints belong to that folder's trial.
        if self._folder is not None and manifest is not None and manifest.parent == self.path:
            self.has_any = True
            self._folder.go_back_to(manifest)

    def copy(self) -> Future[CheckpointContent]:
        """Request a copy of the trial's next state between two steps."""
        return self._ask(self._copies)

    def copy_at_end(self) -> Future[CheckpointContent]:
        """Request a copy of the trial's final state; the request may be cancelled."""
        return self._ask(self._at_end)

    def save(self) -> Future[Path]:
        """Request a checkpoint of the trial."""
        return self._ask(self._files)

    def _ask(self, asked: list[Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._end is None and not self._is_refused:
                asked.append(future)
                return future
        future.set_exception(self._ended())
        return future

    @property
    def every_steps(self) -> int | None:
        """As `SnapshotSaver.every_steps`."""
        return None if self._folder is None else self._all.every.steps

    def begins(self, python_state: TaskStateGuard) -> None:
        """As `SnapshotSaver.begins`."""
        self._python_state = python_state

    def reached(self, trial: SnapshotSource, *, steps: int, at_report: bool, is_last: bool) -> None:
        """As `SnapshotSaver.reached`."""
        if self._folder is None and not is_last and not self._copies:
            return  # the common case, without the lock; a request made right now is served after the next step
        with self._lock:
            # Taken in a single step: a request that comes later waits for the next call.
            copies, self._copies = self._copies, []
            files, self._files = self._files, []
            at_end: list[Future[CheckpointContent]] = []
            if is_last:
                at_end, self._at_end = self._at_end, []
        # Outside the `try`: the trial has finished, so an object that no checkpoint can hold fails these requests alone.
        _copy(trial, self._labels, at_end)
        try:
            self._check(trial)
            _copy(trial, self._labels, copies)
            if self._folder is not None and (files or self._is_due(steps, at_report=at_report, is_last=is_last)):
                # Only these two wait for the buffer: skipping them would lose a requested checkpoint, or the final
                # state.
                waits = bool(files) or is_last
                self._is_owed = not self._all.take_slot(waits=waits)
                if not self._is_owed:
                    self._save(trial, steps, files)
        except BaseException as error:
            requests: list[Future[Any]] = [*copies, *files]
            for future in requests:
                if not future.done():
                    future.set_exception(error)
            raise

    def answer(self, trial: SnapshotSource) -> None:
        """Serve requests now; the caller knows that the trial stands between two steps, and holds the trial's turn."""
        if self.is_asked:
            self.reached(trial, steps=self._steps, at_report=False, is_last=False)

    def _check(self, trial: SnapshotSource) -> None:
        """Refuse, at the first call, a trial with a folder whose state cannot be saved later."""
        if self._steps < 0 and self._folder is not None:
            trial.snapshot()
            self._steps = 0

    def _is_due(self, steps: int, *, at_report: bool, is_last: bool) -> bool:
        # Nothing has been trained since the last checkpoint; but a report adds to the history.
        if steps == self._steps and not (at_report or self._is_owed):
            return False
        every = self._all.every
        by_steps = every.steps is not None and steps % every.steps == 0
        by_time = every.seconds is not None and time.monotonic() - self._seconds >= every.seconds
        return at_report or is_last or by_steps or by_time or self._is_owed

    def _save(self, trial: SnapshotSource, steps: int, files: list[Future[Path]]) -> None:
        """Copy the state and queue the write, or write in place; the caller holds the slot."""
        buffer, nbytes = None, 0
        try:
            snapshot = trial.snapshot()
            nbytes = snapshot.nbytes
            buffer = self._all.room(nbytes)
            # In place means without a copy: the trial must not move on before the write ends, so this thread writes.
            content = snapshot.in_place(self._labels) if buffer is None else snapshot.copied(self._labels, buffer)
        except BaseException:
            if buffer is not None:
                self._all.give_room_back(nbytes)
            self._all.give_slot_back()
            raise
        # Never -1 again, which stands for a trial that `_check` has not seen.
        self._steps, self._seconds, self.has_any = max(steps, 0), time.monotonic(), True
        self._python_state = snapshot.python_state
        if buffer is None:
            try:
                self._write(content, files)
            finally:  # also after Ctrl-C on a driver's thread: the next holder would wait for ever
                self._all.give_slot_back()
            return

        def write() -> None:
            self._write(content, files)
            # Before the slot: the slot's next holder may replace the buffer.
            self._all.give_room_back(nbytes)
            self._all.give_slot_back()

        self._all.start(write)

    def _write(self, saved: CheckpointContent, files: list[Future[Path]]) -> None:
        assert self._folder is not None
        try:
            self._folder.write(saved)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with a file, the trial goes on
            _LOGGER.error(  # noqa: TRY400 - what the disk says is all there is to know
                "A checkpoint of %s could not be written; training goes on, and the last good checkpoint stays: %s",
                self._name,
                error,
            )
            for future in files:
                future.set_exception(error)
            return
        for future in files:
            future.set_result(self._folder.path)

    def refuse(self) -> None:
        """Fail all open and further requests after a breakdown of the pool; `close` follows at shutdown."""
        with self._lock:
            self._is_refused = True
        self._fail_requests()

    def close(self, status: str) -> None:
        """Mark the trial as over, and fail all open requests.

        Args:
            status: the trial's outcome; a completed or pruned trial keeps only the latest checkpoint.
        """
        with self._lock:
            if self._end is not None:
                return
            self._end = status
        self._python_state = None  # refers to the trial's module, which a result's owner may have let go
        self._fail_requests()
        if self._folder is None:
            self._all.leave(self.path)
        else:
            # On the writer thread, behind the trial's pending write.
            self._all.start(self._leave)

    def _fail_requests(self) -> None:
        """Fail all open requests; `_ask` adds none any more."""
        with self._lock:
            requests: list[Future[Any]] = [*self._copies, *self._files, *self._at_end]
            self._copies, self._files, self._at_end = [], [], []
        for future in requests:
            # False for a cancelled future, which must not receive an exception.
            if future.set_running_or_notify_cancel():
                future.set_exception(self._ended())

    def _leave(self) -> None:
        assert self._folder is not None
        try:
            if not generations(self._folder.path):
                self._folder.remove()  # a search with a thousand trials that fail leaves no thousand empty folders
            elif self._end in ("completed", "pruned"):
                self._folder.keep(1)
        except HydraTuneError as error:
            _LOGGER.warning("Old checkpoints of %s could not be removed: %s", self._name, error)
        finally:
            self._folder.close()
            self._all.leave(self.path)

    def _ended(self) -> CheckpointError:
        return CheckpointError(f"{self._name} is over ({self._end or 'failed'}) and was not saved before")


def _is_held(folder: Path) -> bool:
    """Whether another run holds a folder; a lock that cannot be opened counts as free, and the first write names the error."""
    try:
        return is_locked(folder)
    except OSError:
        return False


def _copy(trial: SnapshotSource, labels: Mapping[str, Any], asked: list[Future[CheckpointContent]]) -> None:
    """Copy the state for each request; an error goes to the request, and never fails the trial."""
    for copy in asked:
        if not copy.set_running_or_notify_cancel():
            continue
        try:
            copy.set_result(trial.snapshot().copied(labels))
        except Exception as error:  # noqa: BLE001 - whatever it is
            copy.set_exception(error)
