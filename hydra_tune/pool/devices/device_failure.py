"""Loss of a device: after a fatal error, every call to the device fails, and its memory is gone.

Only the device's own worker declares the loss, which guarantees that nothing runs on the device any more. A worker that
meets the device's errors while it fetches a block asks the device's worker to check the device, and waits for the
answer, for a minute at most. `Pool` (`pool/pool.py`) makes the `DeviceLossHandler`. Each `Worker`
(`pool/runtime/worker.py`) asks the handler about the error when a unit or the worker itself fails, and reports the loss of
the worker's own device. The module must not choose units or advance a trial.

Note: locks. Synchronizing with a device and taking the locks of blocks happen without the pool's lock; jobs fail, and the
scheduler hears of the loss, under the pool's lock.

Note: lost processes. In a process under a supervisor the loss of all devices ends the process, before any trial is
told of the loss (`FaultRecovery.end_if_all_lost`), and all trials continue in the next process.

Note: lost state. The host or the disk holds the bytes of every clean block. Trials with only clean blocks on the device
continue elsewhere from where they are, including a trial whose unit had not begun to compute. A trial whose unit had begun
fails, because the unit's intermediate values are gone. No copy of a dirty block exists: the block's trial fails as well. A
failed trial begins again from its last checkpoint if `max_retries` allows (`pool/faults/retry.py`). The trial is marked as
failed before the block is given up, so no unit computes with the host's outdated copy.
"""

import logging
from collections.abc import Callable, Mapping

from hydra_tune.devices.device import Device
from hydra_tune.errors import DeviceLostError, first_line
from hydra_tune.memory.device_loss import dirty_owners, give_up
from hydra_tune.memory.pager import Pager
from hydra_tune.pool.faults.retry import FaultRecovery, found_lost, may_be_the_devices
from hydra_tune.pool.runtime.dispatcher import PROBE, JobDispatcher
from hydra_tune.pool.runtime.job_state import JobState, forget_locals
from hydra_tune.schedule import DeviceLost, Event, JobStopped

# A logger, not `warnings`: a capture in another thread silences warnings for the whole process, and filters may turn
# warnings into errors.
_LOGGER = logging.getLogger(__name__)
_PATIENCE_SECONDS = 60.0  # for another device's worker, which may be running a unit


class DeviceLossHandler:
    """Handles the loss of devices.

    Args:
        devices, pagers: live mappings by device name; devices added later appear in them.
        tell: called with the name of a lost device, under the pool's lock.
        faults: ends a supervised process without a working device; notes the first trial that lost a unit.
    """

    def __init__(
        self,
        core: JobDispatcher,
        devices: Mapping[str, Device],
        pagers: Mapping[str, Pager],
        tell: Callable[[str], None],
        faults: FaultRecovery,
    ) -> None:
        self._core = core
        self._devices = devices
        self._pagers = pagers
        self._tell = tell
        self._faults = faults

    def is_here(self, device: str, error: BaseException) -> bool:
        """Return whether an error may come from a worker's own device, and the device is lost; waits for the device."""
        return may_be_the_devices(error) and found_lost(self._devices[device]) is not None

    def is_elsewhere(self, device: str, error: BaseException) -> bool:
        """Return whether an error comes from the loss of another device.

        Waits until that device's worker has declared the loss, for a minute at most.
        """
        if not may_be_the_devices(error):
            return False
        core = self._core
        # Outside the lock, because the check synchronizes with the device and may take as long as a unit.
        lost_devices = [name for name, other in list(self._devices.items()) if name != device and found_lost(other)]
        with core.changed:
            for name in lost_devices:
                if name not in core.gone:
                    # An idle worker would not notice the loss by itself.
                    core.inboxes[name].put(PROBE)
            core.changed.wait_for(
                lambda: core.is_closed or all(name in core.gone for name in lost_devices), timeout=_PATIENCE_SECONDS
            )
        return bool(lost_devices)

    def report(
        self, device: str, error: BaseException, ran: JobState | None = None, *, is_intact: bool = False
    ) -> None:
        """Declare the loss of a worker's own device; called on the worker's thread, once nothing runs there any more.

        Args:
            device: name of the device.
            error: the error that revealed the loss.
            ran: the job whose unit ran on the device, if any.
            is_intact: whether that unit had not begun to compute, and is due again.
        """
        core, pager = self._core, self._pagers[device]
        self._faults.end_if_all_lost()
        # GPUs of a process may fail one after the other, the later GPUs under trials that have not done anything.
        if ran is not None and not is_intact:
            self._faults.first_loser = self._faults.first_loser or ran.job.name
        # Only now: freeing memory of a lost GPU may abort the process.
        forget_locals(error)
        # Without the pool's lock, because the search takes the locks of blocks.
        owners = dirty_owners(pager)
        with core.changed:
            hit_jobs = [other for other in core.records.values() if _owner(other) in owners]
            # A unit that had begun to compute is lost with its intermediate values.
            if ran is not None and ran not in hit_jobs and not is_intact:
                hit_jobs.append(ran)
            _LOGGER.error(
                "device %s is lost (%s) and no longer used; trials with state that only this device had: %s; all others go on",
                device,
                first_line(error),
                ", ".join(repr(other.job.name) for other in hit_jobs) or "none",
            )
            stop_events: list[Event] = []
            for other in hit_jobs:
                if other.outcome is None:
                    other.fail(_error(device, other, error))
                    stop_events.append(JobStopped(job=other.job.key))
            loss_events = (
                [] if device in core.gone else [DeviceLost(device=device)]
            )  # a device that was leaving may be gone already
            core.decide(*loss_events, *stop_events)
            self._tell(device)
            core.changed.notify_all()
        # After the jobs have failed: a block given up would otherwise be loaded again from the host's outdated copy.
        give_up(pager)
        core.given_up.add(device)
        core.release_all()
        # No event could ever run a unit again, so all jobs would wait for ever.
        if not core.scheduler.has_devices:
            core.break_down(DeviceLostError(f"the pool's last device, {device}, is lost ({first_line(error)})"))


def _owner(record: JobState) -> int | None:
    trial = record.trial
    return None if trial is None or trial.state is None else trial.state.number


def _error(device: str, record: JobState, error: BaseException) -> DeviceLostError:
    loss = DeviceLostError(
        f"device {device} was lost with state of trial {record.job.name!r} that no other place had ({first_line(error)}); give "
        "checkpoint_dir, and max_retries of at least 1, and such a trial goes on from its last checkpoint"
    )
    loss.__cause__ = error
    return loss
