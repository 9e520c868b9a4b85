"""The pool's process: does what the program asks for, and says what becomes of its jobs.

Words are tuples, of which the first says what they are. The program sends `submit`, `proceed`, `stop`, `suspend` and `close`;
this sends `ready` or `broken`, of jobs `placed`, `reported` and `over`, and `suspended`.
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
from hydra_tune.supervision.supervisor import Beginning
from hydra_tune.train.worker_server import SERVERS

_FAILED = 1


class Executor(Protocol):
    """What is asked of the pool here; see `HydraExecutor`."""

    @property
    def submit(self) -> Callable[..., Job]:
        """Queue a task."""

    @property
    def suspend(self) -> Callable[..., None]:
        """Save jobs and end them."""

    @property
    def shutdown(self) -> Callable[[], None]:
        """End the pool."""


class _Unanswered(EventStream):
    """Of jobs that go on at their reports."""

    def __init__(self, stream: EventStream) -> None:
        super().__init__()
        self.put = stream.put

    @property
    def waits(self) -> bool:
        return False


class Server:
    """One life of the pool.

    Args:
        connection: to the program.
        known: what the program and this process both have.
        beginning: what the supervisor has seen before.
        make: makes the executor, begun, and what says where the checkpoints of a job are.
    """

    def __init__(
        self,
        connection: Connection,
        known: Mapping[int, object],
        beginning: Beginning,
        make: Callable[[], tuple[Executor, Callable[[Job], Path | None]]],
    ) -> None:
        self._connection = connection
        self._known = known
        self._aside = beginning.aside
        self._make = make
        self._stream = EventStream()
        self._unanswered = _Unanswered(self._stream)
        self._jobs: dict[str, Job] = {}
        self._keys: dict[int, str] = {}

    def run(self) -> int:
        """Serve until the program wants no more, or has ended; returns the exit code."""
        SERVERS.forget()
        gc.freeze()  # what the program has left to collect is not collected here, by code of the user's
        torch.set_num_threads(1)  # the program's others are not here
        try:
            executor, self._folder_of = self._make()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the program is told
            self._connection.send(("broken", packed_error(error, self._known)))
            return _FAILED
        threading.Thread(target=self._listen, name="hydra-words", daemon=True).start()
        with contextlib.suppress(OSError):  # the program has ended
            self._connection.send(("ready",))
            self._serve(executor)
            for job in self._jobs.values():
                job.cancel()
        executor.shutdown()
        with contextlib.suppress(OSError):
            last: Any = self._stream.get(timeout=0)
            while last is not None:
                if not isinstance(last, tuple):
                    self._tell(last)
                last = self._stream.get(timeout=0)
        return 0

    def _serve(self, executor: Executor) -> None:
        while True:
            event: Any = self._stream.get()
            if not isinstance(event, tuple):
                self._tell(event)
                continue
            word, *facts = event
            if word == "close":
                return
            if word == "submit":
                self._submit(executor, *facts)
            elif word == "suspend":
                keys, seconds = facts
                executor.suspend([self._jobs[key] for key in keys if key in self._jobs], seconds=seconds)
                self._connection.send(("suspended",))
            elif facts[0] in self._jobs:  # else it is over, and the program is about to hear so
                job = self._jobs[facts[0]]
                {"proceed": job.proceed, "pruned": job.prune, "cancelled": job.cancel}[word]()

    def _listen(self) -> None:
        put: Callable[[Any], None] = self._stream.put
        with contextlib.suppress(EOFError, OSError):
            while True:
                put(self._connection.recv())
        put(("close",))

    def _submit(
        self,
        executor: Executor,
        key: str,
        task: bytes,
        name: str,
        options: dict[str, Any],
        waits: bool,
        left: Path | None,
    ) -> None:
        """Queue a task, which goes on from what a process before this has left of it."""
        if left is not None and generations(left):
            kept = ("priority", "labels", "saved_as", "max_retries")
            options = {option: options[option] for option in kept} | {"resume_from": left}
        if (mark := marked_as(name)) in self._aside:
            self._fail(key, self._aside[mark])
            return
        try:
            events = self._stream if waits else self._unanswered
            with at_work(name):
                described = unpickled(task, self._known)
            job = executor.submit(described, name, events, **options)
        except Exception as error:  # noqa: BLE001 - the user's own classes are read here
            self._fail(key, error)
            return
        self._jobs[key], self._keys[id(job)] = job, key
        self._connection.send(("placed", key, self._folder_of(job)))

    def _fail(self, key: str, error: BaseException) -> None:
        self._connection.send(("over", key, packed_result(Result(status="failed", error=error), self._known)))

    def _tell(self, event: Any) -> None:
        key = self._keys[id(event.job)]
        if isinstance(event, Reported):
            self._connection.send(("reported", key, event.step, event.metrics, event.job.progress.history))
            return
        del self._jobs[key], self._keys[id(event.job)]
        with at_work(event.job.name):  # the module's own code may pickle it
            packed = packed_result(event.result, self._known)
        self._connection.send(("over", key, packed))
