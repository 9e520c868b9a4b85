"""Corrects a GPU's ledger by the memory that GPU libraries really take.

The budget is chosen before any unit has run, with an estimate for the libraries. `Worker` (`pool/runtime/worker.py`)
measures the first complete unit of each kind and shard of each job, on the worker's thread and without the pool's lock,
since each such unit may be the first to use a kernel. On CPU devices, and where several devices share a GPU, nothing is
measured. If the libraries take more than estimated, the device holds fewer blocks. Plans stay as they are, and a unit
that needs the whole budget for itself may still have the budget. If the libraries take less, the rest is room for other
trials' state. The module must not choose units or advance a trial.
"""

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from hydra_tune.devices.device import Device
from hydra_tune.memory.pager import Pager
from hydra_tune.quantities import format_bytes

_LOGGER = logging.getLogger(__name__)


class LedgerFitter:
    """Fits a device's ledger to the memory left by its units."""

    def __init__(self, device: Device, pager: Pager) -> None:
        self._device = device
        self._pager = pager
        self._seen: set[Hashable] = set()

    @contextmanager
    def measured(self, unit: Hashable) -> Iterator[None]:
        """Measure the memory that a unit takes.

        The unit has to be complete on the device at the end of the context. A failed unit is ignored.

        Args:
            unit: key that is equal for units of a job that run the same code.
        """
        memory = None if unit in self._seen else self._device.unit_memory()
        if memory is None:
            yield
            return
        ledger = self._pager.ledger
        ledger.recent_peak_bytes = ledger.used_bytes
        yield
        # After the yield, so a unit that failed is measured again.
        self._seen.add(unit)
        limit_before_bytes = ledger.limit_bytes
        self._pager.fit(memory.room(ledger.recent_peak_bytes))
        if ledger.limit_bytes != limit_before_bytes:
            _LOGGER.info(
                "device %s holds at most %s from now on, %s before: units were seen to take that much beside the ledger",
                self._device.name,
                format_bytes(ledger.limit_bytes),
                format_bytes(limit_before_bytes),
            )
