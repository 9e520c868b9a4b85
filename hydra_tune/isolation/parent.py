"""The program's side of a pool in another process: jobs that outlive their process.

`HydraExecutor(isolate=True)` (`executor.py`) hands calls about jobs to `IsolatedPoolClient`, and so does each `Job`
(`pool/job.py`) of the program. The client sends the calls to `child.py` in the pool's process and gives the answers to the
program's own `Job` objects. A job outlives a crash: the supervisor (`supervision/supervisor.py`) restarts the process, and
the client sends the open jobs again. The module must not know how a pool trains.

Note: time of the copy. The pool's process descends from a copy of the program, made at the first submitted task. A
dedicated thread makes the copy and lives until the end, because the system ends the copy with its thread. The copy forks the
pool's process, and after each crash another, each with the program's objects as of the copy. So a global that the
program changes after the first task stays unchanged in the pool's process.

Note: threads. Drivers send on any thread, under the client's lock; the thread `hydra-isolated` alone receives, sends open
jobs to a new process, and hands results and events over. `check_may_copy` must pass before the copy: a lock that a busy
thread holds would stay held in the copy.
"""

import contextlib
import logging
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

from hydra_tune.checkpoint.folder import generations
from hydra_tune.errors import ConfigError, HydraTuneError
from hydra_tune.isolation.child import IsolatedPoolServer, ServedExecutor
from hydra_tune.isolation.sending import known_here, pickled_task, unpacked_error, unpacked_result
from hydra_tune.pool.job import OVER, EventStream, Failed, Finished, Job, JobProgress, Reported, Result
from hydra_tune.pool.runtime.job_state import ReportCursor
from hydra_tune.supervision.supervisor import RestartContext, dies_with, ended_by, supervise
from hydra_tune.task import TrainTask
from hydra_tune.train.data.worker_server import is_quiet
from hydra_tune.train.trial import PendingReport

_LOGGER = logging.getLogger("hydra_tune.isolation")
# Largest message of the supervisor.
_MOST_BYTES = 1 << 16
_LOOKS, _LOOK_SECONDS = 10, 0.02
# Beyond the time given to the jobs to be saved.
_PATIENCE_SECONDS = 5.0

THERE_IS = (
    "with isolate=True the pool is in another process, and offers only run, submit, loop, events, has_checkpoint, suspend and "
    "shutdown, and of a job only name, state, result, proceed, prune and cancel; for anything else, such as studies of Optuna, "
    "make the HydraExecutor without isolate"
)


@dataclass(slots=True, kw_only=True)
class _IsolatedJob:
    """An unfinished job, with everything needed to continue the job in another process."""

    job: Job
    task: bytes
    name: str
    options: dict[str, Any]
    left: Path | None = None
    told: ReportCursor = field(default_factory=ReportCursor)
    # Requested end of the job.
    wanted: str | None = None
    # Reports received so far.
    history: list[dict[str, float]] = field(default_factory=list)
    # Whether the job has moved to another process.
    is_again: bool = False

    @property
    def was_resumed(self) -> bool:
        """Whether the program submitted the job with `resume_from`: earlier reports are not delivered again."""
        return self.options["resume_from"] is not None

    def ended(self) -> Result:
        """Return the result of a job whose process crashed before the requested end."""
        assert self.wanted is not None
        metrics = _metrics(self.history[-1]) if self.history else {}
        has_any = self.left is not None and bool(generations(self.left))
        return Result(
            status=self.wanted, metrics=metrics, history=self.history, checkpoint=self.left if has_any else None
        )


class IsolatedPoolClient:
    """Steers a pool in another process, and sends unfinished jobs again after each crash.

    Args:
        make: called in the other process with the number of earlier crashes; returns as `make` of `IsolatedPoolServer`.
    """

    def __init__(self, make: Callable[[int], tuple[ServedExecutor, Callable[[Job], Path | None]]]) -> None:
        self._make = make
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._known: dict[int, object] = {}
        self._connection: connection.Connection | None = None
        self._entries: dict[str, _IsolatedJob] = {}
        self._names: set[str] = set()
        self._number = 0
        self._has_begun, self._is_suspended = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._is_closing = False

    # Requests of the program.

    def submit(self, task: TrainTask, name: str | None, events: EventStream | None, options: dict[str, Any]) -> Job:
        """Queue a task; `options` are those of `HydraExecutor.submit`.

        Raises:
            ConfigError: this process cannot be copied, or a task or its labels cannot be sent to the copy.
            HydraTuneError: the pool's process has ended for good.
            Exception: the pool could not be started; the error of the start.
        """
        self._begin()
        data = pickled_task(task, self._known)
        try:
            pickle.dumps(options)
        except Exception as error:
            raise ConfigError(
                f"labels of a job must be plain values, which can be sent to the pool's process: {error}"
            ) from error
        with self._lock:
            if self._error is not None:
                raise HydraTuneError(
                    f"the pool's process has ended: {self._error}; make a new HydraExecutor"
                ) from self._error
            number, self._number = self._number, self._number + 1
            name = name or f"job {number}"
            unique_name = name if name not in self._names else f"{name} ({number})"
            self._names.add(unique_name)
            job = Job(key=f"{number}:{name}", name=name, task=task, pool=self, events=events)
            options = options | {"saved_as": options["saved_as"] or name}
            entry = self._entries[job.key] = _IsolatedJob(job=job, task=data, name=unique_name, options=options)
            self._send_job(entry)
        return job

    def suspend(self, jobs: Iterable[Job] | None, seconds: float) -> None:
        """Suspend jobs, as `HydraExecutor.suspend`."""
        with self._lock:
            chosen_jobs = (
                [entry.job for entry in self._entries.values()]
                if jobs is None
                else [j for j in jobs if j.state not in OVER]
            )
            self._is_suspended.clear()
            self._send("suspend", [job.key for job in chosen_jobs], seconds)
            is_sent = self._connection is not None
        if is_sent and chosen_jobs:
            self._is_suspended.wait(seconds + _PATIENCE_SECONDS)
        for job in chosen_jobs:
            # Without effect on suspended jobs; the others could not be saved in time.
            job.cancel()

    def shutdown(self) -> None:
        """End the process, and wait for the end; unfinished jobs are cancelled. May be called again."""
        with self._lock:
            self._is_closing = True
            self._send("close")
        if self._thread is not None:
            self._thread.join()

    # Requests of jobs; see `JobController`.

    def proceed(self, job: Job) -> None:
        """Let a job that waits at a report go on."""
        with self._lock:
            entry = self._entries.get(job.key)
            if entry is not None:
                entry.told.is_answered = True
                if job.state == "waiting":
                    job.enter("running")
                    # Only a waiting job needs a message. After a crash the answer above is on record, and `_reported`
                    # answers the repeated report.
                    self._send("proceed", job.key)

    def stop(self, job: Job, status: str) -> None:
        """End a job."""
        with self._lock:
            entry = self._entries.get(job.key)
            if entry is not None:
                entry.wanted = entry.wanted or status
                self._send(entry.wanted, job.key)

    def pause(self, job: Job, *, paused: bool) -> None:
        """Refuse: an isolated pool does not support pausing."""
        raise _refused(job, "pause" if paused else "unpause")

    def prioritize(self, job: Job, priority: int) -> None:
        """Refuse: an isolated pool does not support new priorities."""
        raise _refused(job, f"set_priority({priority})")

    def progress(self, job: Job) -> JobProgress:
        """Refuse: an isolated pool does not report progress."""
        raise _refused(job, "progress")

    def refuse_own_code(self, what: str) -> None:
        """Do nothing: trials run in another process."""

    def save(self, job: Job, until: float = math.inf) -> "Future[Path]":
        """Refuse: an isolated pool does not save on request."""
        del until
        raise _refused(job, "checkpoint")

    # The thread.

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None:
                check_may_copy()
                self._thread = threading.Thread(target=self._work, name="hydra-isolated", daemon=True)
                self._thread.start()
        self._has_begun.wait()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            self._steer()
        except BaseException as error:  # noqa: BLE001 - it goes into every job's result
            self._error = self._error or error
        finally:
            self._end()

    def _steer(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._known = known_here()
        copy = multiprocessing.get_context("fork").Process(
            target=self._supervise, args=(ours, theirs, os.getpid()), name="hydra-supervisor"
        )
        with ours:
            # `theirs` is closed here after the fork, so the end of the copy closes the socket.
            with theirs, warnings.catch_warnings():
                # Of threads: they all wait, as `check_may_copy` has seen.
                warnings.simplefilter("ignore", DeprecationWarning)
                copy.start()
            try:
                while self._hear(ours):
                    pass
            except BaseException:
                # The system then kills the pool's process as well.
                copy.kill()
                raise
            finally:
                copy.join()
        if copy.exitcode is not None and copy.exitcode < 0:
            raise HydraTuneError(
                f"the process that supervises the pool's process was ended by {ended_by(copy.exitcode)}, and the pool's "
                "process with it; make a new HydraExecutor, which resumes jobs that have checkpoints with resume_from"
            )

    def _supervise(self, ours: socket.socket, theirs: socket.socket, parent: int) -> None:
        """Run the copy: start the pool's process, and further processes after crashes."""
        dies_with(parent)
        ours.close()

        def run(beginning: RestartContext) -> int:
            mine, other = socket.socketpair()
            socket.send_fds(theirs, [b"connection"], [other.fileno()])
            other.close()
            words = connection.Connection(mine.detach())
            return IsolatedPoolServer(words, self._known, beginning, lambda: self._make(beginning.crashes)).run()

        def say(text: str) -> None:
            theirs.send(text.encode()[:_MOST_BYTES])

        sys.exit(supervise(run, say, passes_signals=False))

    def _hear(self, ours: socket.socket) -> bool:
        """Handle the next message; return whether more can come.

        Messages of a process come before the connection of the next process, so no process's last messages are lost.
        """
        pool_connection = self._connection
        sources: list[Any] = [ours] if pool_connection is None else [pool_connection, ours]
        ready = connection.wait(sources)
        if pool_connection is not None and pool_connection in ready:
            try:
                word, *facts = pool_connection.recv()
            except (EOFError, OSError):
                with self._lock:
                    self._connection = None
            else:
                self._obey(word, *facts)
            return True
        data, descriptors, _, _ = socket.recv_fds(ours, _MOST_BYTES, 1)
        if descriptors:
            self._attach(connection.Connection(descriptors[0]))
        elif data:
            _LOGGER.warning("%s", data.decode(errors="replace"))
        return bool(data)

    def _attach(self, found: connection.Connection) -> None:
        """Connect to a new process, send the open jobs, and end the jobs whose end was requested."""
        with self._lock:
            self._connection = found
            if self._is_closing:
                self._send("close")
                return
            for entry in list(self._entries.values()):
                if entry.wanted is None:
                    entry.is_again = True
                    self._send_job(entry)
                else:
                    self._over(entry, entry.ended())

    def _send_job(self, entry: _IsolatedJob) -> None:
        waits = not entry.job.reports_freely
        self._send("submit", entry.job.key, entry.task, entry.name, entry.options, waits, entry.left)
        entry.job.enter("running")

    def _send(self, *word: Any) -> None:
        """Send a message to the process; without a process, the next process learns of the request with its jobs."""
        with self._lock, contextlib.suppress(OSError):
            if self._connection is not None:
                self._connection.send(word)

    def _obey(self, word: str, *facts: Any) -> None:
        if word == "ready":
            self._has_begun.set()
        elif word == "suspended":
            self._is_suspended.set()
        elif word == "broken":
            self._error = unpacked_error(facts[0], self._known)
        else:
            entry = self._entries[facts[0]]
            if word == "placed":
                entry.left = facts[1]
            elif word == "reported":
                step, metrics, history = facts[1:]
                last_step = entry.history[-1]["step"] if entry.history else -1
                entry.history += [report for report in history if report["step"] > last_step]
                self._tell_missed(entry, [report for report in history if report["step"] < step])
                self._reported(entry, PendingReport(step=step, metrics=metrics))
            else:
                result = unpacked_result(facts[1], entry.job.task, self._known)
                self._tell_missed(entry, result.history)
                # A job that was set aside after a crash has reported before.
                if not result.history:
                    result.history = entry.history
                    result.metrics = _metrics(entry.history[-1]) if entry.history else {}
                self._over(entry, result)

    def _tell_missed(self, entry: _IsolatedJob, history: Sequence[Mapping[str, float]]) -> None:
        """Deliver reports that a process saved before a crash, but did not deliver."""
        job, cursor = entry.job, entry.told
        if job.events is None or job.reports_freely or not entry.is_again or (cursor.step < 0 and entry.was_resumed):
            return
        for report in history:
            if report["step"] > cursor.step:
                cursor.step, cursor.is_answered = int(report["step"]), True
                job.events.put(Reported(job, cursor.step, _metrics(report)))

    def _reported(self, entry: _IsolatedJob, report: PendingReport) -> None:
        job = entry.job
        with self._lock:
            if not entry.told.takes(report):
                self._send("proceed", job.key)
                return
            job.enter("waiting")
            if not entry.told.tell(report):
                return
        if job.events is not None:
            job.events.put(Reported(job, report.step, report.metrics))

    def _over(self, entry: _IsolatedJob, result: Result) -> None:
        with self._lock:
            del self._entries[entry.job.key]
        entry.job.end(result)
        if entry.job.events is not None:
            entry.job.events.put((Failed if result.status == "failed" else Finished)(entry.job, result))

    def _end(self) -> None:
        with self._lock:
            self._connection = None
            self._error = self._error or HydraTuneError(
                "the executor is shut down"
                if self._is_closing
                else "the pool's process has ended and is not restarted; its output and the log say more"
            )
            live_entries = list(self._entries.values())
        for entry in live_entries:
            is_failed = not self._is_closing
            self._over(
                entry, Result(status="failed" if is_failed else "cancelled", error=self._error if is_failed else None)
            )
        self._known = {}
        # Wakes callers that wait for a start or a suspension that will never come.
        self._has_begun.set()
        self._is_suspended.set()


def _others_sleep() -> bool:
    """Whether all other Python threads sleep through one of a few short spans: threads of notebooks wait in libraries."""
    for _ in range(_LOOKS):
        before = _turns()
        time.sleep(_LOOK_SECONDS)
        if before is not None and _turns() == before:
            return True
    return False


def _turns() -> dict[int, str] | None:
    """Return how often each other Python thread has had a core; None if a thread has, or waits for, a core now."""
    turns_by_thread = {}
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.native_id is not None:
            folder = Path(f"/proc/self/task/{thread.native_id}")
            # The thread may have ended meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if (folder / "stat").read_text().rpartition(")")[2].split()[0] == "R":
                    return None
                # The third field counts the time slices run, so an equal number means that the thread has slept.
                turns_by_thread[thread.native_id] = (folder / "schedstat").read_text().split()[2]
    return turns_by_thread


def _metrics(entry: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in entry.items() if name not in ("step", "epoch", "seconds")}


def _refused(job: Job, what: str) -> ConfigError:
    return ConfigError(f"{what} of job {job.name!r}: {THERE_IS}")


def check_may_copy() -> None:
    """Refuse to copy this process where the copy would not be sound.

    Raises:
        ConfigError: names the reason and a remedy.
    """
    if not hasattr(signal, "sigwaitinfo"):
        raise ConfigError("isolate=True needs Linux; make the HydraExecutor without isolate")
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        raise ConfigError(
            "isolate=True needs a process without CUDA in use, because a copy of the process cannot use CUDA; submit the "
            "first task before anything is put on a GPU, or make the HydraExecutor without isolate"
        )
    if _has_autograd_threads():
        raise ConfigError(
            "isolate=True needs a process in which nothing has computed gradients yet: CUDA builds of torch have begun threads "
            "of autograd for devices, without which a copy of the process cannot train; submit the first task before any other "
            "training in this program, or run hydra-tune sweep, or make the HydraExecutor without isolate"
        )
    if not is_quiet() and not _others_sleep():
        raise ConfigError(
            "isolate=True needs a process whose other threads are idle, because a lock held by a busy thread stays locked in a "
            "copy; submit the first task before they start, or shut down other executors, or make this one without isolate"
        )


def _has_autograd_threads() -> bool:
    """Whether autograd has begun its threads for devices: torch refuses every backward in a copy made after that.

    CUDA builds begin them at the first backward where there is a GPU, or once a `FakeTensorMode` has been entered.
    """
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended
            if name.read_text(errors="replace").startswith("pt_autograd"):
                return True
    return False
