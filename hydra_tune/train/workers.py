"""Worker processes of a `DataLoader`, started so that they cannot hang and ended so that none is left.

Note: fork. A process that runs many threads must not fork: a lock that another thread holds at that moment stays locked in
the child for ever. So unless the user chose a context, workers come from a fork server, a process that runs no threads. They
then inherit nothing, and what they need is pickled. Knows nothing of trials.
"""

import copy
import io
import multiprocessing
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe

from hydra_tune.errors import LoaderWorkerError, TaskError
from hydra_tune.shard.gate import GATE

_SHARED_BYTES = (
    1 << 20
)  # tensors from here on are shared with the workers, smaller ones are sent: each takes a descriptor

_REMEDY = (
    "what it printed says more. A worker imports the main script, whose own work must stand under "
    "if __name__ == '__main__':; num_workers=0 does without workers"
)


def ready(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Make a loader that may start its workers here. Not inside the capture gate.

    Args:
        loader: any; it is not changed, unless by sharing the memory of large tensors in its data.

    Returns:
        The loader itself where it starts no workers, else a copy that starts them without forking this process, unless the
        user has chosen a context, and that sends them what they need.

    Raises:
        TaskError: a dataset, `collate_fn` or `worker_init_fn` that cannot be pickled, or that a worker could not find again.
    """
    if loader.num_workers == 0:
        return loader
    made = copy.copy(loader)
    method = _start_method(loader)
    if loader.multiprocessing_context is None and method == "fork":
        made.multiprocessing_context = method = "forkserver"
    parts = vars(made)
    if method != "fork":
        for name in ("dataset", "collate_fn", "worker_init_fn"):
            if not isinstance(parts[name], IterDataPipe | MapDataPipe):  # a loader asks for these by their class
                parts[name] = _packed(name, parts[name], method)
    if method == "forkserver":
        _warm_up()
    made.worker_init_fn = _WorkerStart(made.worker_init_fn)
    return made


def end(iterator: object) -> None:
    """End the workers of a pass, if it has any that still run."""
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()


@contextmanager
def failed_start_explained() -> Iterator[None]:
    """Around the start of workers.

    Raises:
        LoaderWorkerError: the fork server has ended.
    """
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionError) as error:
        raise LoaderWorkerError(f"the workers of a DataLoader could not be started ({error!r}); {_REMEDY}") from error


@contextmanager
def death_explained() -> Iterator[None]:
    """Around the use of workers; what a worker raises comes through as it is.

    Raises:
        LoaderWorkerError: a worker has ended.
    """
    try:
        yield
    except (RuntimeError, FileNotFoundError, ConnectionError, EOFError) as error:
        # Where a worker dies with a batch on its way, what fails is fetching the tensor, from a process that is gone.
        lost = not isinstance(error, RuntimeError) and "in DataLoader worker process" not in str(error)
        if not lost and "exited unexpectedly" not in str(error):
            raise
        raise LoaderWorkerError(
            f"a worker of a DataLoader exited unexpectedly ({error!r}): it was killed, for want of memory perhaps, or crashed, "
            f"or never came up; {_REMEDY}"
        ) from error


def is_worker_starting() -> bool:
    """Whether this is a new worker process that is importing the user's main script."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def _start_method(loader: DataLoader[Any]) -> str:
    context: Any = loader.multiprocessing_context
    if context is not None:
        return str(context.get_start_method())
    # Asking without `allow_none` would fix the method for the whole process.
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def _warm_up() -> None:
    """Start the fork server with torch loaded, if nobody has: a worker starts in milliseconds then and not in seconds."""
    if getattr(forkserver, "_forkserver")._preload_modules == ["__main__"]:  # noqa: B009, SLF001 - as nobody changed it
        multiprocessing.set_forkserver_preload(["__main__", "torch.utils.data"])
    forkserver.ensure_running()


class _WorkerStart:
    """What runs first in a worker: makes it as a forked one would be, then the user's `worker_init_fn`."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init
        self._dtype = torch.get_default_dtype()

    def __call__(self, worker: int) -> None:
        torch.set_default_dtype(self._dtype)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that can end the trial in order
        if self._init is not None:
            self._init(worker)


class _Packed:
    """An object ready to be sent: pickled once for all workers of a pass, large tensors beside it in shared memory."""

    def __init__(self, pickled: bytes, tensors: list[Tensor]) -> None:
        self._content = pickled, tensors

    def __reduce__(self) -> tuple[Callable[..., object], tuple[bytes, list[Tensor]]]:
        return _unpack, self._content


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors
        main = sys.modules["__main__"]
        self._main_is_a_file = getattr(main, "__spec__", None) is not None or hasattr(main, "__file__")

    def persistent_id(self, value: object) -> int | None:
        if (
            type(value) is not Tensor
            or value.device.type != "cpu"
            or value.requires_grad
            or value.nbytes < _SHARED_BYTES
        ):
            return None
        self._tensors.append(value)
        return len(self._tensors) - 1

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__" and not self._main_is_a_file:
            raise pickle.PicklingError(f"{value.__qualname__} was defined in a session, which a worker cannot import")
        return NotImplemented


class _Unpacker(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, index: int) -> Tensor:
        return self._tensors[index]


def _unpack(pickled: bytes, tensors: list[Tensor]) -> object:
    return _Unpacker(pickled, tensors).load()


def _packed(name: str, part: object, method: str) -> object:
    tensors: list[Tensor] = []
    file = io.BytesIO()
    try:
        _Packer(file, tensors).dump(part)
        _share(tensors)
    except Exception as error:
        if isinstance(error, RuntimeError) and "through inheritance" in str(error):
            return part  # a lock or a shared value of multiprocessing, which only a starting process may be given
        label = getattr(part, "__qualname__", type(part).__qualname__)
        raise TaskError(
            f"{name}={label} of a DataLoader with num_workers > 0 cannot be sent to its workers: {error}. They are started "
            f"by {method} and given pickled copies, because forking a process that runs threads may hang; define classes and "
            "functions at the top of a module, or use num_workers=0, or take that risk with multiprocessing_context='fork'"
        ) from error
    return _Packed(file.getvalue(), tensors)


def _share(tensors: list[Tensor]) -> None:
    storages: list[Any] = [tensor.untyped_storage() for tensor in tensors]
    if all(storage.is_shared() for storage in storages):
        return
    with GATE.exclusive():  # what a storage held before is freed, and another trial may be reading it
        for storage in storages:
            storage.share_memory_()
