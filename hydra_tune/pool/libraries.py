"""When a GPU's libraries take another part of its memory than was left to them: the first units tell, and the ledger follows.

The budget is chosen before anything has run. The first unit of each kind of each trial is looked at, since each may be the
first to use a kernel. What proves too much is taken from what the pool holds on the device; plans stay as they are, and a unit
that needs the whole budget for itself may still have it. What proves to be free is room for other trials' state.
"""

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from hydra_tune.devices.device import Device
from hydra_tune.memory.pager import Pager
from hydra_tune.quantities import format_bytes

_LOGGER = logging.getLogger(__name__)


class Libraries:
    """Fits one device's ledger to what its units leave.

    Args:
        device: whose.
        pager: of the device.
    """

    def __init__(self, device: Device, pager: Pager) -> None:
        self._device = device
        self._pager = pager
        self._seen: set[Hashable] = set()

    @contextmanager
    def measured(self, unit: Hashable) -> Iterator[None]:
        """Around a unit, which has ended on the device when this ends; one that fails tells nothing.

        Args:
            unit: the same for units that run the same.
        """
        memory = None if unit in self._seen else self._device.unit_memory()
        if memory is None:
            yield
            return
        ledger = self._pager.ledger
        ledger.recent_peak_bytes = ledger.used_bytes
        yield
        self._seen.add(unit)
        before = ledger.limit_bytes
        self._pager.fit(memory.room(ledger.recent_peak_bytes))
        if ledger.limit_bytes != before:
            _LOGGER.info(
                "device %s holds at most %s from here on, where it held %s: by what units have taken beside the ledger",
                self._device.name,
                format_bytes(ledger.limit_bytes),
                format_bytes(before),
            )
