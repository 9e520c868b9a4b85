"""Safe start and end of a `DataLoader`'s worker processes.

`HydraExecutor` (`executor.py`) calls `prepare` when a task is submitted or planned, and `leave` at its own shutdown;
`TrialDataFeed` (`data_feed.py`) calls `ready` before training and before workers start, and `end` after a pass or, for
persistent workers, at the trial's end. `HydraExecutor` also asks `is_worker_starting`, because a new worker may import a
script that makes an executor.

Note: fork. A process with many threads must not fork: a lock held by another thread at the fork stays locked in the child
for ever. So unless the user chose a context or another start method, workers are forked by `worker_server`, a process
without threads. Unless the user chose "fork", a loader's parts are pickled each time workers start, so workers get the
present state. `ready` must run outside the capture gate, because moving tensors to shared memory needs the gate for itself.
This module knows nothing of trials.
"""

import copy
import logging
import multiprocessing
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

import torch
from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe

from hydra_tune.errors import LoaderWorkerError
from hydra_tune.quantities import format_bytes
from hydra_tune.train.data.worker_parts import LoaderWorkerPayload, packed
from hydra_tune.train.data.worker_server import SERVERS, LoaderForkContext

_LOGGER = logging.getLogger(__name__)

# A slower start of a worker is worth a warning.
_SLOW_SECONDS = 1.0

_REMEDY = (
    "read the worker's own output for the cause. A worker that is not forked from the program imports the main script, so the "
    "script's own work must stand under if __name__ == '__main__':; num_workers=0 does without workers"
)


def ready(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Make a loader that may start workers here. Do not call this inside the capture gate.

    Args:
        loader: any loader; left unchanged, except for a move of large tensors in its parts to shared memory.

    Returns:
        The loader itself if there are no workers. Otherwise a copy with three changes: workers receive packed parts of
        the loader unless the user has chosen "fork", start without a fork of this process unless the user has chosen a
        context or another start method, and begin with `_WorkerStart`.

    Raises:
        TaskError: a dataset, `collate_fn` or `worker_init_fn` cannot be pickled, or a worker could not find an object
            that the part refers to.
    """
    if loader.num_workers == 0:
        return loader
    ready_loader = copy.copy(loader)
    method, server = _start_method(loader), None
    if _is_served(loader):
        server = SERVERS.current()
        ready_loader.multiprocessing_context = LoaderForkContext(server)
    parts, num_bytes = vars(ready_loader), 0
    if method != "fork" or server is not None:
        for name in ("dataset", "collate_fn", "worker_init_fn"):
            # Data pipes stay unpacked: a loader recognizes data pipes by their class.
            if not isinstance(parts[name], IterDataPipe | MapDataPipe):
                parts[name] = part = packed(name, parts[name], method, server)
                num_bytes += part.num_bytes if isinstance(part, LoaderWorkerPayload) else 0
    if method == "forkserver":
        _warm_up()
    ready_loader.worker_init_fn = _WorkerStart(ready_loader, num_bytes)
    return ready_loader


def prepare(holder: object, *handles: object) -> None:
    """Start the server of an executor's workers before threads are busy, if a handle is a loader with workers.

    A callable may return such a loader later: the server then starts with the first pass, and the executor holds the server,
    too. `holder` is the executor; `leave` must be called in the end.
    """
    begins = any(isinstance(handle, DataLoader) and handle.num_workers > 0 and _is_served(handle) for handle in handles)
    if begins or any(map(callable, handles)):
        SERVERS.hold(holder, begins=begins)


def leave(holder: object) -> None:
    """Release the server after an executor has shut down and its workers have ended."""
    SERVERS.leave(holder)


def warn_if_slow(iterator: object) -> None:
    """Warn of a slow start of workers, once in the life of the process; call this after the iterator's first batch."""
    start = getattr(iterator, "_worker_init_fn", None)
    if isinstance(start, _WorkerStart) and not _WorkerStart.is_told and start.seconds > _SLOW_SECONDS:
        _WorkerStart.is_told = True
        _LOGGER.warning("%s", start.warning())


def end(iterator: object) -> None:
    """End the workers of a pass, if any still run."""
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()


@contextmanager
def failed_start_explained() -> Iterator[None]:
    """Explain errors at the start of workers inside the context.

    Raises:
        LoaderWorkerError: the fork server has ended.
    """
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionError) as error:
        raise LoaderWorkerError(f"the workers of a DataLoader could not be started ({error!r}); {_REMEDY}") from error


@contextmanager
def death_explained() -> Iterator[None]:
    """Explain the death of a worker inside the context; an exception raised by a worker's own code passes unchanged.

    Raises:
        LoaderWorkerError: a worker has ended.
    """
    try:
        yield
    except (RuntimeError, FileNotFoundError, ConnectionError, EOFError) as error:
        # Where a worker dies with a batch on its way, this process fails to fetch the batch's tensors from the dead process.
        is_lost_batch = not isinstance(error, RuntimeError) and "in DataLoader worker process" not in str(error)
        if not is_lost_batch and "exited unexpectedly" not in str(error):
            raise
        raise LoaderWorkerError(
            f"a worker of a DataLoader exited unexpectedly ({error!r}): it was killed (perhaps for lack of memory), crashed, "
            f"or never started; {_REMEDY}"
        ) from error


def is_worker_starting() -> bool:
    """Whether the present process is a new worker importing the user's main script."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def _start_method(loader: DataLoader[Any]) -> str:
    context: Any = loader.multiprocessing_context
    if context is not None:
        return str(context.get_start_method())
    # Asking without `allow_none` would fix the method for the whole process.
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def _is_served(loader: DataLoader[Any]) -> bool:
    """Whether a plain loop would fork the loader's workers because the user has chosen no other method."""
    return loader.multiprocessing_context is None and _start_method(loader) == "fork"


def _warm_up() -> None:
    """Start the fork server with torch loaded, if none runs: workers then start in milliseconds instead of seconds."""
    if getattr(forkserver, "_forkserver")._preload_modules == ["__main__"]:  # noqa: B009, SLF001 - Python's default
        multiprocessing.set_forkserver_preload(["__main__", "torch.utils.data"])
    forkserver.ensure_running()


class _WorkerStart:
    """The `worker_init_fn` of each worker: sets torch's default dtype, ignores Ctrl-C, then calls the user's function."""

    # Whether this process has already warned of slow starts.
    is_told = False

    def __init__(self, loader: DataLoader[Any], num_bytes: int) -> None:
        self._init = loader.worker_init_fn
        self._dtype = torch.get_default_dtype()
        self._why = _why_slow(loader.multiprocessing_context, num_bytes)
        self._is_persistent = loader.persistent_workers
        self._seconds = torch.zeros(loader.num_workers, dtype=torch.float64).share_memory_()  # type: ignore[no-untyped-call]
        self._begun = time.monotonic()

    def __call__(self, worker: int) -> None:
        self._seconds[worker] = time.monotonic() - self._begun
        torch.set_default_dtype(self._dtype)
        # Ctrl-C is for the main process, which ends the trial in order.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._init is not None:
            self._init(worker)

    @property
    def seconds(self) -> float:
        """Seconds until the first worker came up; 0 before."""
        return min((seconds for seconds in self._seconds.tolist() if seconds), default=0.0)

    def warning(self) -> str:
        """Text with the start time, the likely cause and remedies."""
        often = "once a trial" if self._is_persistent else "in every pass over the data"
        persistent = "" if self._is_persistent else "persistent_workers=True starts them once a trial; "
        return (
            f"workers of a DataLoader took {self.seconds:.1f} s to start, which happens {often}: {self._why}. {persistent}"
            "num_workers=0 does without workers"
        )


def _why_slow(how: Any, num_bytes: int) -> str:
    if not isinstance(how, LoaderForkContext):
        return (
            "with this start method each worker imports the main script anew; leave multiprocessing_context and the start "
            "method as Python has them on Linux"
        )
    if how.server.names is None:
        return (
            "a thread of this program was busy, so the workers were not forked from the program but imported its modules; "
            "give the DataLoader itself, not a callable that returns it, as train= or validate= of the executor's first task"
        )
    size = format_bytes(num_bytes)
    return f"each worker was sent {size} of the dataset and its parts; keep large data in tensors or arrays, which are shared"
