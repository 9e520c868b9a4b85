"""Checkpoints beside the work: when a trial is saved, where to, and the thread that writes.

Note: who waits. Between two of its steps a trial that is to be saved is copied to a buffer on the host, by the thread that runs
it; then it goes on, and one thread writes the buffer to disk. There is one buffer, so that checkpoints take host memory for one
trial at a time: while it is being written, another trial that is due goes on, and is saved between two later steps. Only what
somebody waits for, and a trial's last state, wait for the buffer. Where the host has no room for it, a trial is written from
where it lies, and waits.

Note: what fails. A checkpoint that cannot be written is said in the log, the ones before it stay whole, and training goes on. A
trial that has something that no checkpoint can hold fails after its first step, with the name of it.
"""

import logging
import os
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

from hydra_tune.checkpoint.every import Every, parse_every
from hydra_tune.checkpoint.files import make_private_folder
from hydra_tune.checkpoint.folder import CheckpointFolder, check_private, generations, load_checkpoint
from hydra_tune.checkpoint.naming import folder_name
from hydra_tune.checkpoint.saved import Saved
from hydra_tune.errors import CheckpointError, ConfigError, HydraTuneError
from hydra_tune.memory.host import HostTier
from hydra_tune.train.capture import Beginning
from hydra_tune.train.snapshot import Snapshots

_LOGGER = logging.getLogger("hydra_tune.checkpoints")
_ROOM_SHARE = 0.5  # of the free host memory, which a copy may take


def check_checkpoint_dir(path: object) -> Path:
    """The folder for checkpoints, absolute; made if it is not there.

    Raises:
        ConfigError: it is no folder, or others can write to it.
    """
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise ConfigError(f"checkpoint_dir must be the path of a folder, not {path!r}")
    folder = Path(os.fspath(path)).absolute()
    try:
        make_private_folder(folder)
        check_private(folder)
    except HydraTuneError as error:
        raise ConfigError(f"checkpoint_dir cannot be used: {error}") from error
    return folder


def check_saving(folder: object, every: object) -> tuple[Path | None, Every]:
    """`checkpoint_dir` and `checkpoint_every`, checked.

    Raises:
        ConfigError: one of them makes no sense, or the second is there without the first.
    """
    if every is not None and folder is None:
        raise ConfigError("checkpoint_every needs a folder for checkpoints; give checkpoint_dir")
    return None if folder is None else check_checkpoint_dir(folder), parse_every(every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a job goes on from; nothing, unless said.

    Attributes:
        path: a folder of checkpoints, or a manifest in one; read when the job is prepared.
        saved: a state at hand.
        allows_changes: as of `Beginning`.
        only_weights: as of `Beginning`.
    """

    path: Path | None = None
    saved: Saved | None = None
    allows_changes: bool = False
    only_weights: bool = False

    @property
    def folder(self) -> Path | None:
        """The folder whose trial goes on in the job; None if none does."""
        if self.path is None or self.only_weights:
            return None
        return self.path if self.path.is_dir() else self.path.parent

    def beginning(self) -> Beginning | None:
        """The state, read now.

        Raises:
            CheckpointError: there is none, or none that is whole.
        """
        saved = self.saved if self.path is None else load_checkpoint(self.path)
        if saved is None:
            return None
        return Beginning(saved=saved, allows_changes=self.allows_changes, only_weights=self.only_weights)


class Checkpoints:
    """All checkpoints of a pool.

    Args:
        root: the folder for them; None: trials are only copied, for others to begin from.
        every: how often trials are saved beside their reports.
        host: has the ledger of host memory; None: half of what is free may be taken.
    """

    def __init__(self, root: Path | None, every: Every, host: HostTier | None) -> None:
        self.root = root
        self.every = every
        self._host = host
        self._buffer: Tensor | None = None
        self._slot = threading.Semaphore()
        self._lock = threading.Lock()
        self._taken: set[Path] = set()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def place(self, name: str, resumed: Path | None) -> Path | None:
        """The folder for a new trial's checkpoints, which no other has.

        Args:
            name: of the trial.
            resumed: the folder that it goes on from, which it keeps if it is one of these.
        """
        if self.root is None:
            return None
        with self._lock:
            if resumed is not None and resumed.parent == self.root and resumed not in self._taken:
                found = resumed
            else:
                plain, number = self.root / folder_name(name), 1
                found = plain
                while found in self._taken or generations(found):
                    number += 1
                    found = plain.with_name(f"{plain.name}~{number}")
            self._taken.add(found)
            return found

    def leave(self, folder: Path | None) -> None:
        """A trial is over: its folder may be another's."""
        with self._lock:
            if folder is not None:
                self._taken.discard(folder)

    def take_slot(self, *, waits: bool) -> bool:
        """Have the only right to write; False: another has it."""
        return self._slot.acquire(blocking=waits)

    def give_slot_back(self) -> None:
        """What was written is on disk, or will never be."""
        self._slot.release()

    def room(self, nbytes: int) -> Tensor | None:
        """Host memory for a copy, for whoever has the slot; None: there is none."""
        if self._host is not None:
            if not self._host.ledger.try_take(nbytes):
                return None
        elif nbytes > psutil.virtual_memory().available * _ROOM_SHARE:
            return None
        if self._buffer is None or not nbytes <= self._buffer.numel() <= 2 * nbytes:
            self._buffer = None  # first of all, or both would be there
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        return self._buffer

    def give_room_back(self, nbytes: int) -> None:
        """A copy is not needed any more."""
        if self._host is not None:
            self._buffer = None
            self._host.ledger.give_back(nbytes)

    def start(self, job: Callable[[], None]) -> None:
        """Run something on the thread that writes, after what was asked for before."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hydra-checkpoints", daemon=True)
                self._thread.start()
        self._jobs.put(job)

    def flush(self) -> None:
        """Wait until all that was asked for before is done."""
        if self._thread is not None and threading.current_thread() is not self._thread:
            done = threading.Event()
            self.start(done.set)
            done.wait()

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()
        self._buffer = None

    def _work(self) -> None:
        torch.set_num_threads(1)
        while (job := self._jobs.get()) is not None:
            job()
            del job


class TrialKeeper:
    """Saves one trial.

    Args:
        checkpoints: of the pool.
        name: of the trial, for messages.
        path: the folder for its checkpoints; None: there are none.
        labels: of its checkpoints.

    Attributes:
        path: as given.
        has_any: whether there is a checkpoint of it, or is one under way.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
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
        self._copies: list[Future[Saved]] = []
        self._files: list[Future[Path]] = []
        self._at_end: list[Future[Saved]] = []
        self._end: str | None = None
        self._is_owed = False
        self._steps = -1
        self._seconds = time.monotonic()

    def open(self) -> None:
        """Have the folder to itself.

        Raises:
            CheckpointError: another trial, here or elsewhere, has it.
            FileError: it cannot be made.
        """
        if self.path is not None and self._folder is None:
            self._folder = CheckpointFolder(self.path)

    @property
    def is_asked(self) -> bool:
        """Whether somebody waits for a copy or a checkpoint."""
        return bool(self._copies or self._files)

    def begin_again(self) -> None:
        """The trial begins again, from what it has saved last if there is anything; what was asked for is still to be made."""
        self._steps, self._is_owed, self._seconds = -1, False, time.monotonic()

    def goes_on_from(self, manifest: Path | None) -> None:
        """The trial does; what came after that in its folder goes.

        Raises:
            FileError: the system refuses.
        """
        if self._folder is not None and manifest is not None and manifest.parent == self.path:
            self.has_any = True
            self._folder.go_back_to(manifest)

    def copy(self) -> Future[Saved]:
        """Ask for a copy of the trial's next state between two steps."""
        return self._ask(self._copies)

    def copy_at_end(self) -> Future[Saved]:
        """Ask for a copy of the state that it has when it does nothing any more; may be cancelled."""
        return self._ask(self._at_end)

    def save(self) -> Future[Path]:
        """Ask for a checkpoint of it."""
        return self._ask(self._files)

    def _ask(self, asked: list[Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._end is None:
                asked.append(future)
                return future
        future.set_exception(self._ended())
        return future

    @property
    def every_steps(self) -> int | None:
        """As `Keeper.every_steps`."""
        return None if self._folder is None else self._all.every.steps

    def reached(self, trial: Snapshots, *, steps: int, at_report: bool, is_last: bool) -> None:
        """As `Keeper.reached`."""
        if self._folder is None and not is_last and not self._copies:
            return  # after nearly every step of a pool that saves nothing; who asks now is answered after the next
        with self._lock:
            copies, self._copies = self._copies, []
            files, self._files = self._files, []
            at_end: list[Future[Saved]] = []
            if is_last:
                at_end, self._at_end = self._at_end, []
        _copy_last(trial, self._labels, at_end)
        try:
            self._check(trial)
            for copy in copies:
                copy.set_result(trial.snapshot().copied(self._labels))
            if self._folder is not None and (files or self._is_due(steps, at_report=at_report, is_last=is_last)):
                waits = bool(files) or is_last
                self._is_owed = not self._all.take_slot(waits=waits)
                if not self._is_owed:
                    self._save(trial, steps, files)
        except BaseException as error:
            asked: list[Future[Any]] = [*copies, *files]
            for future in asked:
                if not future.done():
                    future.set_exception(error)
            raise

    def answer(self, trial: Snapshots) -> None:
        """Somebody has asked while the trial waits at a report."""
        if self.is_asked:
            self.reached(trial, steps=self._steps, at_report=False, is_last=False)

    def _check(self, trial: Snapshots) -> None:
        """Refuse at the first step what could not be saved later."""
        if self._steps < 0 and self._folder is not None:
            trial.snapshot()
            self._steps = 0

    def _is_due(self, steps: int, *, at_report: bool, is_last: bool) -> bool:
        if steps == self._steps and not (at_report or self._is_owed):
            return False  # nothing has been trained since
        every = self._all.every
        by_steps = every.steps is not None and steps % every.steps == 0
        by_time = every.seconds is not None and time.monotonic() - self._seconds >= every.seconds
        return at_report or is_last or by_steps or by_time or self._is_owed

    def _save(self, trial: Snapshots, steps: int, files: list[Future[Path]]) -> None:
        """Copy and have it written, or write it now. The slot is taken."""
        try:
            snapshot = trial.snapshot()
            nbytes = snapshot.nbytes
            buffer = self._all.room(nbytes)
            saved = snapshot.in_place(self._labels) if buffer is None else snapshot.copied(self._labels, buffer)
        except BaseException:
            self._all.give_slot_back()
            raise
        self._steps, self._seconds, self.has_any = max(steps, 0), time.monotonic(), True
        if buffer is None:
            self._write(saved, files)
            self._all.give_slot_back()
            return

        def write() -> None:
            self._write(saved, files)
            self._all.give_room_back(nbytes)
            self._all.give_slot_back()

        self._all.start(write)

    def _write(self, saved: Saved, files: list[Future[Path]]) -> None:
        assert self._folder is not None
        try:
            self._folder.write(saved)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with a file, the trial goes on
            _LOGGER.error(  # noqa: TRY400 - what the disk says is all there is to know
                "A checkpoint of %s could not be written; training goes on, and the last good one stays: %s",
                self._name,
                error,
            )
            for future in files:
                future.set_exception(error)
            return
        for future in files:
            future.set_result(self._folder.path)

    def close(self, status: str) -> None:
        """The trial is over; what was asked for and not made will not be.

        Args:
            status: how it has ended; one that has ended by itself needs no second generation.
        """
        with self._lock:
            if self._end is not None:
                return
            self._end = status
            asked: list[Future[Any]] = [*self._copies, *self._files, *self._at_end]
            self._copies, self._files, self._at_end = [], [], []
        for future in asked:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._ended())
        if self._folder is None:
            self._all.leave(self.path)
        else:
            self._all.start(self._leave)

    def _leave(self) -> None:
        assert self._folder is not None
        try:
            if not generations(self._folder.path):
                self._folder.remove()  # a thousand trials that fail at once leave no thousand empty folders
            elif self._end in ("completed", "pruned"):
                self._folder.keep(1)
        except HydraTuneError as error:
            _LOGGER.warning("Old checkpoints of %s could not be removed: %s", self._name, error)
        finally:
            self._folder.close()
            self._all.leave(self.path)

    def _ended(self) -> CheckpointError:
        return CheckpointError(f"{self._name} is over ({self._end}) and was not saved before")


def _copy_last(trial: Snapshots, labels: Mapping[str, Any], asked: list[Future[Saved]]) -> None:
    """What cannot be copied is said to who has asked, and fails no trial that has done all else."""
    for copy in asked:
        if not copy.set_running_or_notify_cancel():
            continue
        try:
            copy.set_result(trial.snapshot().copied(labels))
        except Exception as error:  # noqa: BLE001 - whatever it is
            copy.set_exception(error)
