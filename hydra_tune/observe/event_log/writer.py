"""`EventLog`: logs a pool's events, one JSON object a line, in a file that grows during the run.

The pool's threads append tuples to a buffer and continue; a single log thread turns the tuples into lines every half second,
or sooner once the buffer is half full. Lines already written stay readable after any end of the process
(`observe/event_log/reader.py`). The log takes names, numbers and times, and must hold no part of the engine.
`pool/runtime/settings.py` makes an `EventLog` when the pool starts, if a file is given, and `Pool` (`pool/pool.py`) closes the
log at shutdown. Workers, the dispatcher (`pool/runtime/dispatcher.py`), pagers (`memory/pager.py`), leases (`memory/lease.py`)
and the disk (`memory/host/disk.py`) write to the log. Jobs add their reports (`pool/runtime/job_state.py`), and
`hydra-tune sweep` adds facts about the study (`cli/run/sweep_run.py`). `cli/display/log_file.py` and the settings check the
path beforehand (`check_log_path`).

Note: training goes first. No training thread waits for the log; only `close` does. Records of units, copies and other
details are flat tuples of texts and numbers, because every nested object makes the garbage collector walk more often
through all objects of a run; records of jobs and sweeps hold a dict of facts. The buffer is bounded: records without
room are counted as lost, and a line in the log says so. If the file cannot be written, on a full disk for example, the
log is cut after its last whole line; one warning reports the end of the log, and training continues.

Note: the limit. Units and copies come by thousands a second. Once the file fills nine tenths of the limit, further
details are dropped and counted by kind. Records of jobs, above all reports and ends, are written beyond the limit, up to
the largest size of a file.
"""

import contextlib
import fcntl
import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra_tune.errors import ConfigError
from hydra_tune.observe.event_log.line_format import EventLogFormatter
from hydra_tune.paths import check_reachable, option_path
from hydra_tune.quantities import format_bytes

_MOST_RECORDS = 1 << 16
_MOST_BYTES = 1 << 30
_PERIOD_SECONDS = 0.5
_SHARE_OF_DETAILS = 0.9  # share of the limit
_DETAILS = frozenset(["unit", "copy", "wait", "saved", "host", "disk"])
_PIECE = 2048  # records turned into lines at a time
_PATIENCE_SECONDS = 30.0
_PLURALS = {
    "unit": "units",
    "copy": "copies",
    "wait": "waits",
    "saved": "records of saved activations",
    "host": "updates on the host",
    "disk": "reads and writes of the disk",
}

# A logger rather than `warnings`: a capture in another thread silences warnings for the whole process, and filters may
# turn warnings into errors.
_LOGGER = logging.getLogger(__name__)


def check_log_path(path: object, *, what: str = "event_log") -> Path:
    """Check the path of a log file and make the path absolute; missing folders will be made.

    Raises:
        ConfigError: not a path, a folder, or a place not writable by this user.
    """
    absolute = option_path(path, what, "a file, such as 'run.jsonl'")
    check_reachable(absolute, what)
    if absolute.is_dir():
        raise ConfigError(
            f"{what} {str(absolute)!r} is a folder; give a file in it, such as {str(absolute / 'run.jsonl')!r}"
        )
    # The nearest folder that exists decides whether the missing folders can be made.
    ancestor = absolute
    while not ancestor.exists():
        ancestor = ancestor.parent
    if ancestor is not absolute and not ancestor.is_dir():
        raise ConfigError(f"{what} {str(absolute)!r} cannot be made: {str(ancestor)!r} is a file; give another path")
    if not os.access(ancestor, os.W_OK):
        raise ConfigError(
            f"{what} {str(absolute)!r} cannot be written by this user; give a path that is yours to write"
        )
    return absolute


class EventLog:
    """The log of one pool. The first event of a job creates the file, replacing a file of the same name.

    Args:
        limit_bytes: units and copies are dropped from nine tenths of this size on; None: no limit.

    Attributes:
        lost: records dropped for lack of room in the buffer.
        dropped: records beyond the limit, by kind.
    """

    def __init__(
        self,
        path: Path,
        devices: Sequence[tuple[str, int]],
        facts: Mapping[str, Any],
        *,
        limit_bytes: int | None = None,
    ) -> None:
        self.path = path
        self.lost = 0
        self._devices, self._facts = tuple(devices), dict(facts)
        self._room = _MOST_RECORDS
        self._buffer: deque[tuple[Any, ...]] = deque()
        # Guards only counters and the start of the thread; deque operations are atomic, so records need no lock.
        self._lock = threading.Lock()
        self._awake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._lines = EventLogFormatter()
        self.written_bytes = 0
        self.dropped: Counter[str] = Counter()
        self._room_for_details = sys.maxsize if limit_bytes is None else int(limit_bytes * _SHARE_OF_DETAILS)
        self._is_full = False  # no room for details any more
        self._told_lost = 0

    # Methods for any thread; times are those of `time.perf_counter_ns`.

    def at_work(self, device: str) -> None:
        """Register the calling thread as the worker of a device."""
        self._lines.workers[threading.get_ident()] = device

    def device(self, device: str, budget_bytes: int, what: str) -> None:
        """Note a device "added", "removed" or "lost" after the start."""
        self._append(("device", device, budget_bytes, what, time.perf_counter_ns()))

    def owns(self, job: str, owner: int) -> None:
        """Assign all blocks of an owner to a job, at once and without a line."""
        self._lines.owns(job, owner)

    def unit(
        self,
        device: str,
        job: str,
        kind: str,
        shard: int,
        start_ns: int,
        ready_ns: int,
        end_ns: int,
        *,
        is_failed: bool,
        steps: int = 1,
    ) -> None:
        """Note a unit: its start, the time when all inputs were there, its end, and the steps of a burst."""
        self._append(("unit", device, job, kind, shard, start_ns, ready_ns, end_ns, is_failed, steps))

    def copied(
        self,
        device: str,
        what: str,
        owner: int | None,
        kind: str,
        shard: int | None,
        nbytes: int,
        how: str,
        start_ns: int,
        end_ns: int,
    ) -> None:
        """Note a copy.

        Args:
            device: target of a load, or source of a spill.
            what: "in", "out", or "across" from another device.
            owner: of the block.
            kind: content of the block.
            shard: the shard, for parameters of a single shard.
            nbytes: as counted by `pool.stats()`; 0 for a failed copy.
            how: "waited" for by this thread; "background"; "late": queued in the background, and made by this thread;
                "vain": loaded in the background for nothing.
            start_ns: beginning of the copy.
            end_ns: end of the copy.
        """
        thread = threading.get_ident()
        self._append(("copy", device, what, owner, kind, shard, nbytes, how, thread, start_ns, end_ns))

    def waited(self, device: str, start_ns: int, end_ns: int) -> None:
        """Note that this thread has waited for a background copy to or from a device."""
        self._append(("wait", device, threading.get_ident(), start_ns, end_ns))

    def updated_on_host(self, device: str, owner: int, shard: int, start_ns: int, end_ns: int) -> None:
        """Note an update of a shard on the host, beside a device; `owner` as of `copied`."""
        self._append(("host", device, owner, shard, start_ns, end_ns))

    def saved(self, device: str, bytes_in: int, bytes_out: int) -> None:
        """Note activations that a unit had on the host: bytes that came back, and bytes that went, during the unit."""
        if bytes_in or bytes_out:
            self._append(("saved", device, bytes_in, bytes_out, time.perf_counter_ns()))

    def stored(self, what: str, nbytes: int, start_ns: int, end_ns: int) -> None:
        """Note a "write" to the disk or a "read" from the disk."""
        self._append(("disk", what, nbytes, start_ns, end_ns))

    def job(self, job: str, what: str, at_ns: int = 0, **more: Any) -> None:
        """Note an event of a job, now or at a given time; the first such event opens the file."""
        at_ns = at_ns or time.perf_counter_ns()
        self._append(("job", job, what, at_ns, more))
        # Without the lock, because every event of a job comes here; `_begin` looks again.
        if self._thread is None:
            self._begin(at_ns)

    def sweep(self, **facts: Any) -> None:
        """Note facts of a sweep about its study or a trial, for `hydra-tune status`; opens no file."""
        self._append(("sweep", facts))

    def close(self) -> None:
        """Write the remaining records and end the log; no further events may follow."""
        with self._lock:
            # Under the lock of `_begin`, so that no thread starts after the closing.
            thread, self._is_closing = self._thread, True
        self._awake.set()
        if thread is not None:
            # Bounded: a write that hangs, on a network disk for example, must not hold up the end of the program.
            thread.join(_PATIENCE_SECONDS)
            if thread.is_alive():
                _LOGGER.warning(
                    "the event log %s cannot be written just now; what is missing there is given up", self.path
                )

    def _append(self, record: tuple[Any, ...]) -> None:
        buffer = self._buffer
        if self._is_full and record[0] in _DETAILS:
            with self._lock:
                self.dropped[record[0]] += 1
            return
        # A racy read of the length: at worst a few records too many are kept, and records with room take no lock.
        if len(buffer) >= self._room:
            with self._lock:
                self.lost += 1
            return
        buffer.append(record)
        # Half full: wake the writer before its period is over.
        if len(buffer) * 2 >= self._room:
            self._awake.set()

    # The thread that writes.

    def _begin(self, at_ns: int) -> None:
        with self._lock:
            # Checked again under the lock: several threads may submit the first job.
            if self._thread is None and not self._is_closing:
                self._lines.start_ns = at_ns
                # A daemon, so that a write that hangs cannot keep the process from its end.
                self._thread = threading.Thread(target=self._work, name="hydra-log", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # A pool that is still alive may write a file of this name; its lines, and those of this log, would be cut up.
            if self.path.is_file() and not self.path.is_symlink():
                with contextlib.suppress(OSError):  # a folder that is not ours: the file itself is overwritten
                    self.path.unlink()
            # Unbuffered, so that every line written before a kill is in the file.
            with self.path.open("wb", buffering=0) as file:
                with contextlib.suppress(OSError):  # a file system without locks
                    # Held until the file is closed, or the process ends in whatever way: see `run_state.py`.
                    fcntl.flock(file.fileno(), fcntl.LOCK_EX)
                try:
                    self._write_all(file.fileno())
                except Exception as error:  # noqa: BLE001 - as below
                    self._give_up(error)
                    # The file stays open and locked, because the run goes on.
                    while not self._is_closing:
                        self._awake.wait()
                        self._awake.clear()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the log is not wrong with the training
            self._give_up(error)

    def _write_all(self, descriptor: int) -> None:
        self._write(descriptor, [self._lines.header(self._devices, self._facts)])
        while not self._is_closing:
            self._awake.wait(_PERIOD_SECONDS)
            self._awake.clear()
            self._drain(descriptor)
        self._drain(descriptor)
        if self._is_full:
            self._write(descriptor, [self._lines.dropped(self.dropped)])
        self._write(descriptor, [self._lines.end(time.thread_time())])
        self._say_size()

    def _drain(self, descriptor: int) -> None:
        buffer = self._buffer
        # Only this thread removes records, so this many are there, however many are appended meanwhile.
        for count in _pieces(len(buffer)):
            self._write(descriptor, self._fitting([buffer.popleft() for _ in range(count)]))
        if self.lost != self._told_lost:
            lost, self._told_lost = self.lost - self._told_lost, self.lost
            self._write(descriptor, [self._lines.lost(lost)])

    def _fitting(self, records: Iterable[tuple[Any, ...]]) -> Iterator[str]:
        """Make the lines of records, dropping details from the first detail beyond the limit."""
        size = self.written_bytes
        for record in records:
            is_detail = record[0] in _DETAILS
            line = "" if self._is_full and is_detail else self._lines.made(record)
            # Records of jobs are written beyond this limit: the last tenth is theirs.
            if is_detail and (not line or size + len(line) > self._room_for_details):
                if not self._is_full:
                    # Once, before the first detail that is dropped: readers take the time of this line for the end of
                    # the details.
                    self._is_full = True
                    yield self._lines.dropped({})
                with self._lock:
                    self.dropped[record[0]] += 1
                continue
            size += len(line)
            yield line

    def _say_size(self) -> None:
        left_out = f"; beyond its limit: {in_words(self.dropped)}" if self._is_full else ""
        _LOGGER.info("the event log %s has %s%s", self.path, format_bytes(self.written_bytes), left_out)

    def _write(self, descriptor: int, lines: Iterable[str]) -> None:
        """Write whole lines; cut off a line that does not fit.

        Raises:
            OSError: a line does not fit, or the system refuses.
        """
        data = "".join(lines).encode()
        if self.written_bytes + len(data) > _MOST_BYTES:
            # An OSError, to end the log like a full disk; without a number, which `_give_up` would print.
            raise OSError(0, f"it would be larger than {format_bytes(_MOST_BYTES)}")
        unwritten = memoryview(data)
        try:
            while unwritten:
                # The system may take a part only, for example before the disk is full.
                unwritten = unwritten[os.write(descriptor, unwritten) :]
        except OSError:
            with contextlib.suppress(OSError):  # otherwise a partial last line stays, and readers expect that
                whole = data[: len(data) - len(unwritten)].rfind(b"\n") + 1
                os.ftruncate(descriptor, self.written_bytes + whole)
            raise
        self.written_bytes += len(data)

    def _give_up(self, error: Exception) -> None:
        # Every later record finds no room, so the buffer stays empty.
        self._room = 0
        self._buffer.clear()
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            reason = f"[Errno {error.errno}] {error.strerror}" if error.errno else str(error.strerror)
        _LOGGER.warning(
            "the event log %s ends here, and training goes on without it: %s; give the next run another event_log, with room "
            "for it",
            self.path,
            reason,
        )


def in_words(dropped: Mapping[str, int]) -> str:
    """Describe left-out records by kind: `12,345 units, 31 copies left out`."""
    parts = [f"{count:,} {_PLURALS.get(kind, kind)}" for kind, count in sorted(dropped.items()) if count]
    return f"{', '.join(parts) or 'nothing'} left out"


def _pieces(count: int) -> Iterable[int]:
    return (min(_PIECE, count - start) for start in range(0, count, _PIECE))
