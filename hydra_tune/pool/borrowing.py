"""`Borrowing`: a device for whoever runs something there that is no unit, with all of its memory, between two units.

Steps are profiled so on GPUs, by whichever thread plans them. Beside units that would be neither in the ledger nor undisturbed:
kernels of both would take turns, what the allocator has given out at most would be of both, and either might run out of memory.
On CPU devices nothing is borrowed: there a thread's own time is looked at, and memory is the host's.

Note: lock order. The turn on a device, then a unit's memory lease, then the turn with a GPU's generator, then the capture gate.
Who borrows has the first, the third and, as it needs it, the fourth.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from hydra_tune.devices.device import Device
from hydra_tune.devices.discovery import device_kind
from hydra_tune.errors import DeviceLostError, HydraTuneError, first_line
from hydra_tune.fusion.stand import HOST, Stand
from hydra_tune.memory.pager import Pager
from hydra_tune.pool.faults import found_lost

_PATIENCE_SECONDS = 60.0  # for units that have begun; one may hang in a data loader


class DeviceTurn:
    """Who has a device: its worker for a unit, or somebody who borrows it; who borrows goes first.

    Several units at once are let be: where one hangs in a data loader, the device has another worker.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._units = 0
        self._asking = 0
        self._is_borrowed = False

    @contextmanager
    def unit(self) -> Iterator[None]:
        """Around a unit."""
        with self._changed:
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
        """Around anything else.

        Args:
            name: the device's.

        Raises:
            HydraTuneError: a unit does not end.
        """
        with self._changed:
            self._asking += 1
            is_free = self._changed.wait_for(lambda: not self._units and not self._is_borrowed, _PATIENCE_SECONDS)
            self._asking -= 1
            self._is_borrowed |= is_free
            self._changed.notify_all()
        if not is_free:
            raise HydraTuneError(f"device {name} has been busy with one unit for {_PATIENCE_SECONDS:g} s")
        try:
            yield
        finally:
            with self._changed:
                self._is_borrowed = False
                self._changed.notify_all()


class Borrowing:
    """Lends the devices of a pool.

    Args:
        devices, pagers: the pool's, by name; those that are added later as well.
        away: names of devices that nothing runs on any more.
    """

    def __init__(
        self, devices: Mapping[str, Device], pagers: Mapping[str, Pager], away: Callable[[], Collection[str]]
    ) -> None:
        self._devices, self._pagers, self._away = devices, pagers, away
        self._turns: dict[str, DeviceTurn] = {}

    def turn(self, name: str) -> DeviceTurn:
        """That with a device; from before its worker begins. Under the pool's lock."""
        return self._turns.setdefault(name, DeviceTurn())

    @property
    def stands(self) -> tuple[Stand, ...]:
        """Where steps are profiled: on one device of each kind, that with the least memory first."""
        away, known = self._away(), list(self._devices.items())  # others may come meanwhile
        kinds: dict[str, Device] = {}
        for name, device in sorted(known, key=lambda one: one[1].budget_bytes):
            if not device.is_host and name not in away:
                kinds.setdefault(device_kind(device), device)
        return tuple(Stand(one.torch_device, one.alignment, partial(self.borrowed, one)) for one in kinds.values()) or (
            HOST,
        )

    @contextmanager
    def borrowed(self, device: Device) -> Iterator[None]:
        """Have the calling thread compute on a device on which nothing else is, as its worker does.

        Other devices that are parts of the same GPU compute nothing meanwhile, either, and keep what they have.

        Raises:
            DeviceLostError: it is lost.
            HydraTuneError: it is not to be had.
        """
        threads = torch.get_num_threads()
        try:
            with ExitStack() as turns:
                for name in self._beside(device):
                    turns.enter_context(self.turn(name).borrowed(name))
                with device.worker(), device.generator.in_turn():
                    self._pagers[device.name].relieve()
                    device.reclaim()
                    yield
        except Exception as error:  # whatever has been made of the device's own by whoever runs something there
            if found_lost(device) is not None:
                raise DeviceLostError(f"device {device.name} is lost ({first_line(error)})") from error
            raise
        finally:
            torch.set_num_threads(threads)

    def _beside(self, device: Device) -> list[str]:
        """Names of a device, and of others that are in the same place; in one order, whoever asks."""
        away, known = self._away(), list(self._devices.items())
        place = device.torch_device
        beside = {name for name, other in known if other.torch_device == place and name not in away}
        return sorted({device.name} | beside)
