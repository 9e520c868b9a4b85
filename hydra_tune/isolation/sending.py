"""Transfer of objects between the program and the pool's process, a copy of the program.

Both processes have all objects from before the copy: tasks, and functions and classes without an importable name or of
the main script, are sent by memory address, equal in both processes. Such functions and classes made after the copy are
refused, and all other objects are pickled. `IsolatedPoolClient` (`parent.py`) packs each submitted task, and
`IsolatedPoolServer` (`child.py`) packs each job's result, and the error of a pool that does not start. In the pool's process,
an object sent by address has its state as of the copy. An object of `known_here` must stay alive in both processes, or its
address could be reused.
"""

import gc
import io
import logging
import pickle
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from hydra_tune.errors import ConfigError, HydraTuneError, first_line
from hydra_tune.pool.job import Result
from hydra_tune.task import TrainTask
from hydra_tune.train.checkpoint.weights import weights_of, with_weights
from hydra_tune.train.trained import WeightsAlone

_LOGGER = logging.getLogger(__name__)

_NOT_SENT = ("_module", "_optimizer", "error")
_BY_PLACE = (TrainTask, FunctionType, type)


def known_here() -> dict[int, object]:
    """Return the objects that are sent by address; called before the copy, and kept in both processes."""
    # The collector does not list frozen objects. They are not frozen again: that would freeze all others, too, and their
    # cycles would stay for ever.
    gc.unfreeze()
    # Kept alive in both processes, so no address is ever reused for another object.
    return {id(value): value for value in gc.get_objects() if issubclass(type(value), TrainTask) or _is_nameless(value)}


# By `type`, not `isinstance`: that reads `__class__`, which runs the code of proxies and of lazy objects.


def _is_nameless(value: object) -> bool:
    if not issubclass(type(value), (FunctionType, type)):
        return False
    return getattr(value, "__module__", None) == "__main__" or "<" in str(getattr(value, "__qualname__", ""))


class _SharedObjectPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, known: Mapping[int, object]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._known = known

    def persistent_id(self, value: object) -> int | None:
        return id(value) if issubclass(type(value), _BY_PLACE) and id(value) in self._known else None

    def reducer_override(self, value: object) -> Any:
        if _is_nameless(value):
            raise pickle.PicklingError(
                f"{getattr(value, '__qualname__', value)} was made after the pool's process had started"
            )
        return NotImplemented


class _SharedObjectUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, known: Mapping[int, object]) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known

    def persistent_load(self, place: int) -> object:
        return self._known[place]


def pickled(value: object, known: Mapping[int, object]) -> bytes:
    """Pickle an object, with shared objects by address.

    Raises:
        Exception: any error that pickling raises.
    """
    file = io.BytesIO()
    _SharedObjectPickler(file, known).dump(value)
    return file.getvalue()


def unpickled(data: bytes, known: Mapping[int, object]) -> Any:
    """Return the object of `pickled`, in the other process."""
    return _SharedObjectUnpickler(data, known).load()


def pickled_task(task: TrainTask, known: Mapping[int, object]) -> bytes:
    """Pickle a task for the pool's process.

    Raises:
        ConfigError: the task was made after the start of the pool's process, and cannot be pickled.
    """
    try:
        return pickled(task, known)
    except Exception as error:
        raise ConfigError(
            f"this task was made after the first run() or submit() of an executor with isolate=True, and cannot be sent to its "
            f"pool's process: {error}; make it before, or make it of functions and classes at the top of a "
            "module, and of functools.partial"
        ) from error


class _OptimizerStandIn:
    """Stand-in for a finished optimizer: holds its `state_dict()`, or the reason why the state is missing."""

    def __init__(self, found: dict[str, Any] | str) -> None:
        self._found = found

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self._found, str):
            raise HydraTuneError(f"the optimizer's state could not be sent from the pool's process: {self._found}")
        return self._found


def packed_result(result: Result, known: Mapping[int, object]) -> dict[str, Any]:
    """Return a result as values for plain pickle, in the pool's process."""
    packed: dict[str, Any] = {
        "fields": {spec.name: getattr(result, spec.name) for spec in fields(result) if spec.name not in _NOT_SENT}
    }
    if result.error is not None:
        packed["error"] = packed_error(result.error, known)
    if result.status == "completed":
        module = result.module()
        try:
            packed["module"] = pickled(module, known)
        except Exception as error:  # noqa: BLE001 - pickling runs the module's own code
            packed["no module"] = first_line(error)
            tensors = {name: kept for name, kept in module.state_dict().items() if isinstance(kept, Tensor)}
            packed["tensors"] = pickled(tensors, known)
            # From these the program builds the module again, if the module has no extra state that cannot be pickled.
            with suppress(Exception):
                packed["weights"] = pickled(weights_of(module), known)
        try:
            packed["state"] = pickled(result.optimizer_state_dict(), known)
        except Exception as error:  # noqa: BLE001 - as above
            packed["no state"] = first_line(error)
    return packed


def unpacked_result(packed: Mapping[str, Any], task: TrainTask, known: Mapping[int, object]) -> Result:
    """Return the result, in the program.

    The task rebuilds a module that cannot be pickled, and its weights are copied. Where the task cannot, as that of a loop,
    the result has the weights alone.
    """
    result = Result(**packed["fields"])
    if "error" in packed:
        result.error = unpacked_error(packed["error"], known)
    if result.status != "completed":
        return result
    try:
        module = unpickled(packed["module"], known) if "module" in packed else _built_anew(packed, task, known)
        state = unpickled(packed["state"], known) if "state" in packed else packed["no state"]
    except Exception as error:  # noqa: BLE001 - the module's own code, or the task's
        result.status, result.error = "failed", error
        error.add_note("while the program took the trained module over from the pool's process")
        return result
    result.keep(module, _OptimizerStandIn(state))  # type: ignore[arg-type]  # nothing else is asked of it
    return result


def _built_anew(packed: Mapping[str, Any], task: TrainTask, known: Mapping[int, object]) -> nn.Module | WeightsAlone:
    try:
        return with_weights(task, *unpickled(packed["weights"], known))
    except Exception as error:  # noqa: BLE001 - the module's own code, or the task's
        rebuilding = "its extra state cannot be sent either" if "weights" not in packed else first_line(error)
        why = (
            f"the trained module could not be sent from the pool's process ({packed['no module']}), and the program could not "
            f"build it again ({rebuilding})"
        )
        _LOGGER.warning("%s; the result has its weights, but not the module", why)
        return WeightsAlone(unpickled(packed["tensors"], known), why)


def packed_error(error: BaseException, known: Mapping[int, object]) -> tuple[bytes | None, str, str]:
    """Return an error as values for plain pickle."""
    try:
        data = pickled(error, known)
    except Exception:  # noqa: BLE001 - whatever an error of somebody's own has in it
        data = None
    return data, first_line(error), "".join(traceback.format_exception(error))


def unpacked_error(packed: tuple[bytes | None, str, str], known: Mapping[int, object]) -> BaseException:
    """Return the error, in the program, with its traceback as a note."""
    data, line, trace = packed
    error: BaseException = HydraTuneError(line)
    if data is not None:
        try:
            error = unpickled(data, known)
        except Exception:  # noqa: BLE001 - a class that this process has not, or that wants other arguments
            error = HydraTuneError(line)
    error.add_note(f"In the pool's process:\n{trace}")
    return error
