"""A device that is lost: an error after which it fails at whatever it is asked, and takes what is there with it.

Only the device's own worker says that it is lost, so that nothing runs there any more by then. Others that have met its errors,
when they wanted a block of it, have it look, and wait for the answer.

Note: what is lost. Of a block that is clean the host has the bytes, or the disk; trials that had only such there go on
elsewhere from where they are, that whose unit had not begun to compute included. Of a dirty block nobody has them: its trial
fails, and begins again from its last checkpoint (`pool/faults.py`). The trial is marked before the block is given up, so that
nobody works on with what the host had before.
"""

import logging
from collections.abc import Callable, Mapping

from hydra_tune.devices.device import Device
from hydra_tune.errors import DeviceLostError, first_line
from hydra_tune.memory.loss import dirty_owners, give_up
from hydra_tune.memory.pager import Pager
from hydra_tune.pool.core import PROBE, Core
from hydra_tune.pool.faults import found_lost, may_be_the_devices
from hydra_tune.pool.record import Record
from hydra_tune.schedule import DeviceLost, Event, JobStopped

# Not `warnings`: a capture in another thread silences them for the whole process, and filters may turn them into errors.
_LOGGER = logging.getLogger(__name__)
_PATIENCE_SECONDS = 60.0  # for another device's worker, which may be running a unit


class Losses:
    """Deals with devices that are lost.

    Args:
        core: of the pool.
        devices, pagers: the pool's, by name; those that are added later as well.
        tell: told of a device that is lost, under the pool's lock.
    """

    def __init__(
        self, core: Core, devices: Mapping[str, Device], pagers: Mapping[str, Pager], tell: Callable[[str], None]
    ) -> None:
        self._core = core
        self._devices = devices
        self._pagers = pagers
        self._tell = tell

    def is_here(self, device: str, error: BaseException) -> bool:
        """Whether an error is that of a worker's own device, which is lost."""
        return may_be_the_devices(error) and found_lost(self._devices[device]) is not None

    def is_elsewhere(self, device: str, error: BaseException) -> bool:
        """Whether it is another device's, which is lost; waits until that one's worker has said so."""
        if not may_be_the_devices(error):
            return False
        core = self._core
        lost = [name for name, other in list(self._devices.items()) if name != device and found_lost(other)]
        with core.changed:
            for name in lost:
                if name not in core.gone:
                    core.inboxes[name].put(PROBE)
            core.changed.wait_for(
                lambda: core.is_closed or all(name in core.gone for name in lost), timeout=_PATIENCE_SECONDS
            )
        return bool(lost)

    def report(self, device: str, error: BaseException, ran: Record | None = None, *, is_intact: bool = False) -> None:
        """A worker's own device is lost; called by it, once nothing runs there any more.

        Args:
            device: its name.
            error: that has shown it.
            ran: the job whose unit ran there, if one did.
            is_intact: whether that unit had not begun to compute, and is due again.
        """
        core, pager = self._core, self._pagers[device]
        owners = dirty_owners(pager)
        with core.changed:
            hit = [other for other in core.records.values() if _owner(other) in owners]
            if ran is not None and ran not in hit and not is_intact:
                hit.append(ran)
            _LOGGER.error(
                "device %s is lost (%s), and is used no more; trials with state that was nowhere else: %s; all others go on",
                device,
                first_line(error),
                ", ".join(repr(other.job.name) for other in hit) or "none",
            )
            stopped: list[Event] = []
            for other in hit:
                if other.outcome is None:
                    other.fail(_error(device, other, error))
                    stopped.append(JobStopped(job=other.job.key))
            lost = [] if device in core.gone else [DeviceLost(device=device)]  # it may have been about to leave
            core.decide(*lost, *stopped)
            self._tell(device)
            core.changed.notify_all()
        give_up(pager)
        core.release_all()
        if not core.scheduler.has_devices:
            core.break_down(DeviceLostError(f"the pool's last device, {device}, is lost ({first_line(error)})"))


def _owner(record: Record) -> int | None:
    trial = record.trial
    return None if trial is None or trial.state is None else trial.state.number


def _error(device: str, record: Record, error: BaseException) -> DeviceLostError:
    found = DeviceLostError(
        f"device {device} was lost with state of trial {record.job.name!r} that was nowhere else ({first_line(error)}); a "
        "trial with checkpoints goes on from its last one: checkpoint_dir, and max_retries of at least 1"
    )
    found.__cause__ = error
    return found
