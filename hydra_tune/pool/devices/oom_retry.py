"""Real shortage of device memory under a unit: the worker makes room and repeats the unit.

The ledger had room, or the unit would not have begun. So the device has less memory than configured, or cannot give the
memory in one piece. `Worker` (`pool/runtime/worker.py`) runs every unit through `OutOfMemoryHandler`, which, after a
shortage, evicts the blocks that find room elsewhere, returns the allocator's cache to the system, and repeats the unit
where a repeat is bitwise equal (`train/loop/unit_rollback.py`). After a successful repeat, or where no repeat is
possible, the device's ledger is lowered. If the repeat fails or is impossible, the unit's trial fails with an error
that names the trial. Other trials lose only their residency on the device. The handler runs on the worker's thread,
without the pool's lock, because evicting takes the locks of blocks. The module must not choose units or advance a
trial.

Note: before the repeat, nothing may keep the first run's tensors alive: the error's frames are cleared, and the repeat
runs outside the `except` block.
"""

import gc
import logging
from collections.abc import Callable

from hydra_tune.devices.device import Device
from hydra_tune.errors import OutOfMemoryError
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.pressure import NotRepeatableError, is_out_of_memory
from hydra_tune.pool.runtime.job_state import forget_locals
from hydra_tune.quantities import format_bytes
from hydra_tune.train.loop.batch_units import PendingUnit
from hydra_tune.train.loop.burst import BURST

# A logger, not `warnings`: a capture in another thread silences warnings for the whole process, and filters may turn
# warnings into errors.
_LOGGER = logging.getLogger(__name__)


class OutOfMemoryHandler:
    """Handles real shortage of memory for a device's worker."""

    def __init__(self, device: Device, pager: Pager) -> None:
        self.units_repeated = 0
        self._device = device
        self._pager = pager

    def run(self, trial: str, unit: PendingUnit, attempt: Callable[[], float]) -> float:
        """Run a unit, and repeat the unit if memory runs out.

        Raises:
            OutOfMemoryError: memory ran out in the repeat, too, or the unit cannot be repeated.
        """
        try:
            return attempt()
        except Exception as error:
            if not _is_shortage(error):
                raise
            # The unit's lease has ended, and its workspace is off the ledger again.
            used_bytes = self._pager.ledger.used_bytes + unit.workspace_bytes
            forget_locals(error)  # else the unit's tensors would live as long as the error
            if isinstance(error, NotRepeatableError):
                message = self._message(trial, unit, error, f"it cannot be repeated, because {error.reason}")
                self._pager.shrink(used_bytes)  # else the next trial would run out, too
                raise OutOfMemoryError(message) from error
            reason = _told(error)
        # Outside the except block, where the interpreter no longer holds the error with the unit's frames.
        self._make_room()
        self.units_repeated += 1
        _LOGGER.warning(
            "device %s has run out of memory in the %s unit of shard %d of trial %r, with %s of its budget of %s taken (%s); "
            "the worker has evicted everything else, and runs the unit once more from its beginning",
            self._device.name,
            unit.kind,
            unit.shard,
            trial,
            format_bytes(used_bytes),
            format_bytes(self._device.budget_bytes),
            reason,
        )
        try:
            seconds = attempt()
        except Exception as error:
            if not _is_shortage(error):
                raise
            forget_locals(error)
            outcome = "it ran out again when it was repeated with nothing else on the device"
            raise OutOfMemoryError(self._message(trial, unit, error, outcome)) from error
        self._pager.shrink(used_bytes)
        return seconds

    def _make_room(self) -> int:
        """Empty the device as far as possible; return the free bytes afterwards."""
        gc.collect()  # an error may be part of a reference cycle that holds tensors
        self._pager.relieve()
        return self._device.reclaim()

    def _message(self, trial: str, unit: PendingUnit, error: Exception, outcome: str) -> str:
        blocks = sum(block.nbytes for block in dict.fromkeys(unit.blocks()))
        needed, room = format_bytes(blocks + unit.workspace_bytes), format_bytes(unit.workspace_bytes)
        # Measured with the device emptied, so that blocks of other trials do not count as taken by other programs.
        free = format_bytes(self._make_room())
        return (
            f"device {self._device.name} ran out of memory in {_place(unit)} of trial {trial!r}, and {outcome} "
            f"({_told(error)}); its pilot counted {needed} for the unit, {room} of it workspace, against a budget of "
            f"{format_bytes(self._device.budget_bytes)}; with everything else evicted, the system has {free} free there; end "
            "other programs that use the device, lower device_memory to the memory that is really there, so that the model is "
            "cut finer, or lower batch_size"
        )


def _place(unit: PendingUnit) -> str:
    return "a step of the own code" if unit.kind == BURST else f"the {unit.kind} unit of shard {unit.shard}"


def _is_shortage(error: Exception) -> bool:
    return isinstance(error, NotRepeatableError) or is_out_of_memory(error)


def _told(error: BaseException) -> str:
    """First line of the allocator's message, which goes on with statistics and advice."""
    cause = error.__cause__ if isinstance(error, NotRepeatableError) else error
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__
