"""Faults of the system, not of a trial: their kinds, and how a trial begins again.

A lost device, an unreadable or unwritable spill file, and a killed worker process of a data loader say nothing about
the trial that they hit. The trial continues from its last checkpoint, or begins from scratch without a checkpoint, at
most `max_retries` times. The results are bitwise equal either way. An error of the trial's own code is never retried.
`JobDispatcher` (`pool/runtime/dispatcher.py`) asks `FaultRecovery` at the end of each job, before the job's keeper is
closed; `pool/fusion/group_completion.py` decides likewise, by `is_not_its_own`, at the end of each carrier or member of
a fused group, and reads saved states through `Pool.begin_again` and `Pool.last_saved` (`pool/pool.py`). Workers,
`DeviceReservations` (`pool/devices/device_reservation.py`) and `DeviceLossHandler` (`pool/devices/device_failure.py`)
ask `found_lost`; the handler asks `may_be_the_devices`, too. The dispatcher and the handler call `end_if_all_lost` before
a job that a lost device may have hit fails. `HydraExecutor` (`executor.py`) and `ExecutorSettings`
(`pool/runtime/settings.py`) check `max_retries` by `check_retries`.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from hydra_tune.checkpoint.folder import generations, load_checkpoint
from hydra_tune.devices.device import Device
from hydra_tune.errors import (
    CheckpointError,
    ConfigError,
    DeviceLostError,
    FileError,
    HydraTuneError,
    LoaderWorkerError,
    SpillError,
    first_line,
)
from hydra_tune.memory.pressure import is_out_of_memory
from hydra_tune.observe.event_log.writer import EventLog
from hydra_tune.pool.checkpointing.writer import PoolCheckpointWriter, TrialCheckpointer
from hydra_tune.pool.job import Job, Result
from hydra_tune.pool.runtime.job_state import JobState
from hydra_tune.supervision.marks import here
from hydra_tune.train.checkpoint.trial_checkpoint import StartCheckpoint

# A logger, not `warnings`: a capture in another thread silences warnings for the whole process, and filters may turn
# warnings into errors.
_LOGGER = logging.getLogger(__name__)
_NOT_ITS_OWN = (DeviceLostError, SpillError, LoaderWorkerError)
_FLUSH_SECONDS = 30.0  # for checkpoints under way as a process ends

DEVICES_LOST = 75
"""Exit code of a supervised process without a working device (EX_TEMPFAIL: another try may succeed)."""


def check_retries(value: object) -> int:
    """Check and return `max_retries`.

    Raises:
        ConfigError: not a whole number from 0.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"max_retries must be a whole number from 0, not {value!r}")
    return value


def found_lost(device: Device) -> BaseException | None:
    """Return the error of a lost device; None if the device works.

    Waits for the device's present work. A shortage of memory does not count as a loss.
    """
    try:
        device.synchronize()
    except Exception as error:  # noqa: BLE001 - a driver has many ways to say it
        return None if is_out_of_memory(error) else error
    return None


def may_be_the_devices(error: BaseException) -> bool:
    """Return whether an error may come from a device: not an error of this package, and not a shortage of memory."""
    return isinstance(error, RuntimeError) and not isinstance(error, HydraTuneError) and not is_out_of_memory(error)


def is_not_its_own(error: BaseException | None) -> bool:
    """Return whether an error says nothing about the trial that the error hit."""
    return isinstance(error, _NOT_ITS_OWN)


class JobRetryAccount(Protocol):
    """The retry account of a job: a `JobState` or a `FusedJob`."""

    job: Job
    keeper: TrialCheckpointer | None
    begin: Callable[[], StartCheckpoint | None]
    max_retries: int
    faults: tuple[str, ...]


class FaultRecovery:
    """Decides which failed jobs begin again.

    Attributes:
        first_loser: name of the trial that computed on the first lost device, while another device worked on.
    """

    def __init__(
        self, devices: Mapping[str, Device], checkpoints: PoolCheckpointWriter, log: EventLog | None = None
    ) -> None:
        self.first_loser: str | None = None
        self._devices = devices
        self._checkpoints = checkpoints
        self._log = log
        self._ending = threading.Lock()

    def end_if_all_lost(self) -> None:
        """End a supervised process that has no working device left, so that the supervisor begins the process again.

        After an illegal access CUDA refuses every request of the process, on every GPU, until the process ends. Called
        before a trial that a lost device has hit is told of: the trial goes on in the next process. Returns where no
        supervisor is, and where a device works.
        """
        marks = here()
        if marks is None:
            return
        # Held until the end: a second thread that comes here must not tell anything meanwhile either.
        with self._ending:
            losses = {name: found_lost(device) for name, device in list(self._devices.items())}
            errors = [error for error in losses.values() if error is not None]
            if len(errors) < len(losses):
                return
            devices = "its last device" if len(losses) == 1 else "all its devices"
            marks.give_up(f"the loss of {devices}, {', '.join(losses)} ({first_line(errors[0])})", self.first_loser)
            with contextlib.suppress(Exception):  # the process ends, whatever is wrong with its files
                if self._log is not None:
                    self._log.close()
                # Last: the writer thread may free a trial's memory on a GPU, and abort the process once a file is whole.
                self._checkpoints.flush(_FLUSH_SECONDS)
            # Not sys.exit: objects with memory on a GPU cannot be freed any more, and some of them abort the process.
            os._exit(DEVICES_LOST)

    def may_begin_again(self, record: JobState, result: Result) -> bool:
        """Return whether a failed job, its memory given back, is to be retried.

        An error that comes from a lost device is replaced in `result` by a `DeviceLostError`.
        """
        error = result.error
        if result.status != "failed" or error is None:
            return False
        # A driver reports a lost device by a plain RuntimeError on any call, so only the devices themselves can tell.
        if may_be_the_devices(error):
            # A device lost before the trial's last unit began has nothing to do with an error of that unit.
            lost_devices = [
                name
                for name, device in list(self._devices.items())
                if name not in record.lost_before and found_lost(device)
            ]
            if lost_devices:
                self.end_if_all_lost()
                loss = DeviceLostError(
                    f"device {' and '.join(lost_devices)} was lost under trial {record.job.name!r} ({first_line(error)}), with "
                    "state that no other place had; with checkpoint_dir the trial would go on from its last checkpoint"
                )
                loss.__cause__ = error
                result.error = error = loss
        if not isinstance(error, _NOT_ITS_OWN):
            return False
        if len(record.faults) >= record.max_retries:
            if record.faults:
                error.add_note(
                    f"the trial was begun again {len(record.faults)} times before, as often as max_retries allows"
                )
            return False
        # A driver has asked for the end since, and gets that end.
        return record.wanted_end is None

    def beginning(self, record: JobRetryAccount, error: BaseException) -> Callable[[], StartCheckpoint | None]:
        """Log a retry, and return the function that reads the state for the retry when the job is prepared."""
        keeper = record.keeper
        has_saved = keeper is not None and keeper.has_any
        _LOGGER.warning(
            "trial %r has failed through no fault of its own, and begins again from %s (retry %d of %d): %s",
            record.job.name,
            "its last checkpoint" if has_saved else "its beginning",
            len(record.faults) + 1,
            record.max_retries,
            first_line(error),
        )
        return self.last_saved(record)

    def last_saved(self, record: JobRetryAccount) -> Callable[[], StartCheckpoint | None]:
        """Return the function that reads the last saved state, or else the job's first state, when the job is prepared."""
        # Read now: a fused job's `begin` becomes the function returned here, which would then call itself.
        first, keeper = record.begin, record.keeper
        return lambda: self._last_saved(record.job.name, keeper) or first()

    def _last_saved(self, name: str, keeper: TrialCheckpointer | None) -> StartCheckpoint | None:
        # The latest checkpoint may still be in the writer thread's queue.
        self._checkpoints.flush()
        try:
            if keeper is not None and keeper.path is not None and generations(keeper.path):
                return StartCheckpoint(saved=load_checkpoint(keeper.path), allows_changes=False, only_weights=False)
        except (CheckpointError, FileError) as error:
            # No reason to fail: from scratch the trial ends with the same bits, only later.
            _LOGGER.warning("trial %r has no checkpoint to go on from, and begins from scratch: %s", name, error)
        return None
