"""When a device really runs out of memory under a unit: room is made, and the unit is run once more.

The ledger had room, or the unit would not have begun; so the device has less than the pool was told it may use, or cannot give
it in one piece. Everything that the unit does not need leaves the device, what the allocator has kept for itself goes back to
the system, and the unit is repeated where that gives the same bits (`train/undo.py`). If that helps, less is held there from
then on. If not, or where it cannot be repeated, its trial fails, by name. Other trials lose their places on the device and
nothing else.
"""

import gc
import logging
from collections.abc import Callable

from hydra_tune.devices.device import Device
from hydra_tune.errors import OutOfMemoryError
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.pressure import NotRepeatableError, is_out_of_memory
from hydra_tune.pool.record import forget_locals
from hydra_tune.quantities import format_bytes
from hydra_tune.train.burst import BURST
from hydra_tune.train.step import PendingUnit

# Not `warnings`: a capture in another thread silences them for the whole process, and filters may turn them into errors.
_LOGGER = logging.getLogger(__name__)


class Pressure:
    """What one device's worker does about real shortage of memory.

    Args:
        device: whose.
        pager: of the device.

    Attributes:
        units_repeated: units that were run once more.
    """

    def __init__(self, device: Device, pager: Pager) -> None:
        self.units_repeated = 0
        self._device = device
        self._pager = pager

    def run(self, trial: str, unit: PendingUnit, attempt: Callable[[], float]) -> float:
        """Run a unit, and once more if memory runs out.

        Args:
            trial: its name.
            unit: the unit.
            attempt: runs it; returns seconds.

        Raises:
            OutOfMemoryError: memory ran out in the repeat as well, or where there can be none.
        """
        try:
            return attempt()
        except Exception as error:
            if not _is_shortage(error):
                raise
            used_bytes = self._pager.ledger.used_bytes + unit.workspace_bytes
            forget_locals(error)  # or what the unit has made would live as long as its error
            if isinstance(error, NotRepeatableError):
                message = self._message(trial, unit, error, f"it cannot be repeated, because {error.reason}")
                self._pager.shrink(used_bytes)  # or it would be the next trial's turn
                raise OutOfMemoryError(message) from error
            what = _told(error)
        self._make_room()
        self.units_repeated += 1
        _LOGGER.warning(
            "device %s has run out of memory in the %s unit of shard %d of trial %r, with %s of its budget of %s taken (%s); "
            "everything else has been sent off the device, and the unit is run once more, from where it began",
            self._device.name,
            unit.kind,
            unit.shard,
            trial,
            format_bytes(used_bytes),
            format_bytes(self._device.budget_bytes),
            what,
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
        """Have the device as empty as it can be; returns the bytes that are free then."""
        gc.collect()  # an error may be part of a circle that holds tensors
        self._pager.relieve()
        return self._device.reclaim()

    def _message(self, trial: str, unit: PendingUnit, error: Exception, outcome: str) -> str:
        """What was needed against what there was, and what helps."""
        blocks = sum(block.nbytes for block in dict.fromkeys(unit.blocks()))
        needed, room = format_bytes(blocks + unit.workspace_bytes), format_bytes(unit.workspace_bytes)
        free = format_bytes(self._make_room())
        return (
            f"device {self._device.name} ran out of memory in {_place(unit)} of trial {trial!r}, and {outcome} "
            f"({_told(error)}); by its pilot the unit needs {needed} there at once, {room} of it to work in, and the budget is "
            f"{format_bytes(self._device.budget_bytes)}; with everything else off the device the system has {free} free there; "
            "end other programs that use it, lower device_memory to what there really is, so that the model is cut finer, or "
            "lower batch_size"
        )


def _place(unit: PendingUnit) -> str:
    return "a step of the own code" if unit.kind == BURST else f"the {unit.kind} unit of shard {unit.shard}"


def _is_shortage(error: Exception) -> bool:
    return isinstance(error, NotRepeatableError) or is_out_of_memory(error)


def _told(error: BaseException) -> str:
    """The first line of what the allocator has said."""
    cause = error.__cause__ if isinstance(error, NotRepeatableError) else error
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__
