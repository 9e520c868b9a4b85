"""The pool's process: runs the program's requests, and reports on the jobs.

Messages are tuples with the kind as the first item. The program sends `submit`, `proceed`, `pruned`, `cancelled`,
`suspend` and `close`. The pool's process answers with `ready` or `broken`, with `placed`, `reported` and `over` for
jobs, and with `suspended`. `IsolatedPoolClient` (`parent.py`) runs an `IsolatedPoolServer` in each process that the
supervisor starts, until the program sends `close` or ends. `HydraExecutor._begin_isolated` (`executor.py`) makes the
executor of such a process. The module knows the executor only as a `ServedExecutor`, and must not know how a pool trains.

Note: one thread (`run`) submits, answers and sends; a second thread only receives, and puts requests into the stream of
the jobs' events, so requests and events have one order. The module takes no lock, because `run` alone uses the jobs. A task
is unpickled, and the result of an ended job pickled, under a mark (`at_work`): both run users' code, and a crash there could
otherwise not be blamed on the job.
"""

import contextlib
import gc
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from hydra_tune.checkpoint.folder import generations
from hydra_tune.isolation.sending import packed_error, packed_result, unpickled
from hydra_tune.pool.job import EventStream, Job, Reported, Result
from hydra_tune.supervision.marks import at_work, marked_as
from hydra_tune.supervision.supervisor import RestartContext
from hydra_tune.train.data.worker_server import SERVERS

_FAILED = 1


class ServedExecutor(Protocol):
    """The part of `HydraExecutor` used here."""

    @property
    def submit(self) -> Callable[..., Job]:
        """Queue a task."""

    @property
    def suspend(self) -> Callable[..., None]:
        """Save jobs and end them."""

    @property
    def shutdown(self) -> Callable[[], None]:
        """End the pool."""


class _UnansweredEventStream(EventStream):
    """Event stream of jobs that go on after reports without an answer."""

    def __init__(self, stream: EventStream) -> None:
        super().__init__()
        self.put = stream.put

    @property
    def waits(self) -> bool:
        return False


class IsolatedPoolServer:
    """One life of the pool.

    Args:
        known: objects shared by the program and this process since the copy of the program.
        make: returns a started executor, and a function from a job to the folder of its checkpoints.
    """

    def __init__(
        self,
        connection: Connection,
        known: Mapping[int, object],
        beginning: RestartContext,
        make: Callable[[], tuple[ServedExecutor, Callable[[Job], Path | None]]],
    ) -> None:
        self._connection = connection
        self._known = known
        self._aside = beginning.aside
        self._make = make
        self._stream = EventStream()
        self._unanswered = _UnansweredEventStream(self._stream)
        self._jobs: dict[str, Job] = {}
        self._keys: dict[int, str] = {}

    def run(self) -> int:
        """Serve until the program sends `close` or ends; return the exit code."""
        # Servers of loader workers belong to the program.
        SERVERS.forget()
        # A collection here would run finalizers of the user's on objects that belong to the program.
        gc.freeze()
        # The fork has not copied torch's other intra-op threads.
        torch.set_num_threads(1)
        try:
            executor, self._folder_of = self._make()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the program is told
            self._connection.send(("broken", packed_error(error, self._known)))
            return _FAILED
        threading.Thread(target=self._listen, name="hydra-words", daemon=True).start()
        # The program may end at any time.
        with contextlib.suppress(OSError):
            self._connection.send(("ready",))
            self._serve(executor)
            for job in self._jobs.values():
                job.cancel()
        executor.shutdown()
        # The ends that `shutdown` has brought about; requests that came late are dropped.
        with contextlib.suppress(OSError):
            event: Any = self._stream.get(timeout=0)
            while event is not None:
                if not isinstance(event, tuple):
                    self._tell(event)
                event = self._stream.get(timeout=0)
        return 0

    def _serve(self, executor: ServedExecutor) -> None:
        while True:
            event: Any = self._stream.get()
            if not isinstance(event, tuple):
                self._tell(event)
                continue
            request, *facts = event
            if request == "close":
                return
            if request == "submit":
                self._submit(executor, *facts)
            elif request == "suspend":
                keys, seconds = facts
                executor.suspend([self._jobs[key] for key in keys if key in self._jobs], seconds=seconds)
                self._connection.send(("suspended",))
            # A message may cross the job's `over` on its way; then there is nothing left to do.
            elif facts[0] in self._jobs:
                job = self._jobs[facts[0]]
                {"proceed": job.proceed, "pruned": job.prune, "cancelled": job.cancel}[request]()

    def _listen(self) -> None:
        put: Callable[[Any], None] = self._stream.put
        with contextlib.suppress(EOFError, OSError):
            while True:
                put(self._connection.recv())
        # The end of the connection is the end of the program.
        put(("close",))

    def _submit(
        self,
        executor: ServedExecutor,
        key: str,
        task: bytes,
        name: str,
        options: dict[str, Any],
        waits: bool,
        left: Path | None,
    ) -> None:
        if left is not None and generations(left):
            kept_options = ("priority", "staggered", "labels", "saved_as", "max_retries")
            options = {option: options[option] for option in kept_options} | {"resume_from": left}
        if (mark := marked_as(name)) in self._aside:
            self._over(key, name, Result(status="failed", error=self._aside[mark]))
            return
        try:
            events = self._stream if waits else self._unanswered
            with at_work(name):
                described_task = unpickled(task, self._known)
            job = executor.submit(described_task, name, events, **options)
        except Exception as error:  # noqa: BLE001 - the user's own classes are read here
            self._over(key, name, Result(status="failed", error=error))
            return
        self._jobs[key], self._keys[id(job)] = job, key
        self._connection.send(("placed", key, self._folder_of(job)))

    def _over(self, key: str, name: str, result: Result) -> None:
        # Pickling may run code of the module's or the error's own, and crash in it.
        with at_work(name):
            packed = packed_result(result, self._known)
        self._connection.send(("over", key, packed))

    def _tell(self, event: Any) -> None:
        key = self._keys[id(event.job)]
        if isinstance(event, Reported):
            self._connection.send(("reported", key, event.step, event.metrics, event.job.progress.history))
            return
        del self._jobs[key], self._keys[id(event.job)]
        self._over(key, event.job.name, event.result)
