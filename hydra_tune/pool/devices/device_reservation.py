"""`DeviceReservations`: exclusive use of a device between two units, with all of its memory, for work that is not a unit.

`Pool` (`pool/pool.py`) makes the `DeviceReservations`, and each `Worker` (`pool/runtime/worker.py`) holds the device's
turn (`DeviceUseLock`) for a unit. `StepPlanner` (`fusion/runtime/step_planner.py`) borrows a GPU to lay out or profile
a step, on whichever thread makes the plan, `GroupJobLauncher` (`pool/fusion/group_jobs.py`) borrows a GPU to time a
group without a plan, and `StepProfileCache` (`pool/dry_run/step_profiles.py`) to profile a step for a forecast. Without
exclusive use, the profile's memory would be missing from the ledger, kernels of unit and profile would alternate, the
allocator's peak would include both, and either could run out of memory. CPU devices are not borrowed: a profile there
reads the thread's own CPU time, and uses host memory. The module must not choose units or advance a trial.

Note: lock order. First the turn on a device, then a unit's memory lease, then the turn with a GPU's generator, then the
capture gate. A borrower takes the first, the third and, if necessary, the fourth. A borrower must not hold the pool's lock.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from hydra_tune.devices.device import Device
from hydra_tune.devices.hardware.discovery import device_kind
from hydra_tune.errors import DeviceLostError, HydraTuneError, first_line
from hydra_tune.fusion.runtime.profiling_device import ProfilingDevice, host_of
from hydra_tune.memory.pager import Pager
from hydra_tune.pool.faults.retry import found_lost

_PATIENCE_SECONDS = 60.0  # for running units to end; a unit may hang in a data loader


class DeviceUseLock:
    """Grants a device either to its worker's units or to a borrower; a waiting borrower goes first.

    Several units may hold the turn together, because a device whose unit hangs in a data loader gets a second thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._units = 0
        self._asking = 0
        self._is_borrowed = False

    @contextmanager
    def unit(self) -> Iterator[None]:
        """Hold the turn for a unit."""
        with self._changed:
            # New units also wait for borrowers in the queue: otherwise a busy device would never become free.
            self._changed.wait_for(lambda: not self._is_borrowed and not self._asking)
            self._units += 1
        try:
            yield
        finally:
            with self._changed:
                self._units -= 1
                self._changed.notify_all()

    @contextmanager
    def borrowed(self, name: str) -> Iterator[None]:
        """Hold the turn exclusively, for work that is not a unit.

        Raises:
            HydraTuneError: running units or another borrower do not end within a minute.
        """
        with self._changed:
            self._asking += 1
            try:
                is_free = self._changed.wait_for(lambda: not self._units and not self._is_borrowed, _PATIENCE_SECONDS)
            finally:
                # Also after a timeout or Ctrl-C, because new units wait for this request.
                self._asking -= 1
                self._changed.notify_all()
            # Only ever set here: after a timeout, another borrower may still hold the turn.
            self._is_borrowed |= is_free
        if not is_free:
            raise HydraTuneError(
                f"device {name} has been busy for {_PATIENCE_SECONDS:g} s with units or a borrower that do not end"
            )
        try:
            yield
        finally:
            with self._changed:
                self._is_borrowed = False
                self._changed.notify_all()


class DeviceReservations:
    """Lends the devices of a pool.

    Args:
        devices, pagers: live mappings by device name; devices added later appear in them.
        away: returns the names of removed and lost devices.
    """

    def __init__(
        self, devices: Mapping[str, Device], pagers: Mapping[str, Pager], away: Callable[[], Collection[str]]
    ) -> None:
        self._devices, self._pagers, self._away = devices, pagers, away
        self._turns: dict[str, DeviceUseLock] = {}

    def turn(self, name: str) -> DeviceUseLock:
        """Return the turn of a device, made on first use; on any thread. The turn outlives a removal of the device."""
        return self._turns.setdefault(name, DeviceUseLock())

    @property
    def stands(self) -> tuple[ProfilingDevice, ...]:
        """Places for profiling steps: for each kind of GPU, the GPU with the least memory; without GPUs, the host."""
        away, named_devices = self._away(), list(self._devices.items())  # a copy: other threads may add devices
        kinds: dict[str, Device] = {}
        # The smallest device of each kind comes first, and stays.
        for name, device in sorted(named_devices, key=lambda candidate: candidate[1].budget_bytes):
            if not device.is_host and name not in away:
                kinds.setdefault(device_kind(device), device)
        return tuple(
            ProfilingDevice(candidate.torch_device, candidate.alignment, partial(self.borrowed, candidate))
            for candidate in kinds.values()
        ) or (host_of(device for name, device in named_devices if name not in away),)

    @contextmanager
    def borrowed(self, device: Device) -> Iterator[None]:
        """Give the calling thread exclusive use of a device, with the settings of the device's worker.

        Other devices on the same GPU compute nothing meanwhile, and keep their blocks.

        Raises:
            DeviceLostError: the device is lost.
            HydraTuneError: the device does not become free.
        """
        threads = torch.get_num_threads()
        try:
            with ExitStack() as turns:
                for name in self._beside(device):
                    turns.enter_context(self.turn(name).borrowed(name))
                # All blocks with room on the host or the disk leave the device, so that the borrower has the whole budget.
                with device.worker(), device.generator.in_turn():
                    self._pagers[device.name].relieve()
                    device.reclaim()
                    yield
        except Exception as error:  # of any type: the borrower may have wrapped the device's own error
            if found_lost(device) is not None:
                raise DeviceLostError(f"device {device.name} is lost ({first_line(error)})") from error
            raise
        finally:
            # `device.worker()` has changed the number of intra-op threads for the calling thread.
            torch.set_num_threads(threads)

    def _beside(self, device: Device) -> list[str]:
        """Names of a device and of all devices on the same hardware, sorted."""
        away, devices = self._away(), list(self._devices.items())
        place = device.torch_device
        beside = {name for name, other in devices if other.torch_device == place and name not in away}
        # Sorted, so two borrowers take the turns in the same order and cannot deadlock.
        return sorted({device.name} | beside)
