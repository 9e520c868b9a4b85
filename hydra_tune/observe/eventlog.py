"""`EventLog`: what a pool does, one JSON object a line, in a file that grows while it runs.

Whoever works for the pool appends a tuple to a buffer and goes on; one thread makes lines of them, a few times a second. What
has been written stays readable whatever becomes of the process (`observe/runlog.py`). Reads no clock but for the pool's own
events, and holds no part of the engine: it is told names, numbers and times.

Note: training goes first. Nobody waits for the log. What is told is kept as flat tuples of texts and numbers: the more objects
that hold others a run makes, the more often the garbage collector walks through all it has. The buffer has an end: what finds
no room is counted as lost, and a line says so. A file that cannot be written, for a full disk say, is cut after its last whole
line; one warning says that the log ends there, and training goes on without.

Note: the limit. Units and copies are thousands a second. When they have filled nine tenths of the limit, no more of them are
written, and how many were dropped is counted by kind. What becomes of jobs, reports and ends above all, is written to the end.
"""

import contextlib
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
from hydra_tune.observe.log_lines import Lines
from hydra_tune.quantities import format_bytes

_MOST_RECORDS = 1 << 16
_MOST_BYTES = 1 << 30
_PERIOD_SECONDS = 0.5
_SHARE_OF_DETAILS = 0.9  # of the limit
_DETAILS = frozenset(["unit", "copy", "wait", "saved", "host", "disk"])
_PIECE = 2048  # records made into lines at a time
_PATIENCE_SECONDS = 30.0
_PLURALS = {
    "unit": "units",
    "copy": "copies",
    "wait": "waits",
    "saved": "records of saved activations",
    "host": "updates on the host",
    "disk": "reads and writes of the disk",
}

# Not `warnings`: a capture in another thread silences them for the whole process, and filters may turn them into errors.
_LOGGER = logging.getLogger(__name__)


def check_log_path(path: object, *, what: str = "event_log") -> Path:
    """The file to log to, absolute; folders that are missing will be made.

    Args:
        path: what was asked for.
        what: the name of the option, for the message.

    Raises:
        ConfigError: no path, a folder, or a place that this user cannot write to.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(f"{what} must be the path of a file, such as 'run.jsonl', not {path!r}")
    found = Path(os.fspath(path)).absolute()
    if found.is_dir():
        raise ConfigError(f"{what} {str(found)!r} is a folder; give a file in it, such as {str(found / 'run.jsonl')!r}")
    there = found
    while not there.exists():
        there = there.parent
    if there is not found and not there.is_dir():
        raise ConfigError(f"{what} {str(found)!r} cannot be made: {str(there)!r} is a file; give another path")
    if not os.access(there, os.W_OK):
        raise ConfigError(f"{what} {str(found)!r} cannot be written by this user; give a path that is yours to write")
    return found


class EventLog:
    """The log of one pool. The file is made, and one of that name replaced, when the first job is submitted.

    Args:
        path: of the file, as `check_log_path` returns it.
        devices: name and budget in bytes of each.
        facts: more for the first line: plain values by name.
        limit_bytes: the size at which units and copies are dropped; None: there is none.
        most_bytes: the file ends, with a warning, before it is larger.
        most_records: how many may wait to be written.

    Attributes:
        lost: records that there was no room for.
        dropped: records beyond the limit, by kind.
        written_bytes: of the file.
    """

    def __init__(
        self,
        path: Path,
        devices: Sequence[tuple[str, int]],
        facts: Mapping[str, Any],
        *,
        limit_bytes: int | None = None,
        most_bytes: int = _MOST_BYTES,
        most_records: int = _MOST_RECORDS,
    ) -> None:
        self.path = path
        self.lost = 0
        self._devices, self._facts = tuple(devices), dict(facts)
        self._most_bytes = most_bytes
        self._room = most_records
        self._buffer: deque[tuple[Any, ...]] = deque()
        self._lock = threading.Lock()
        self._awake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._lines = Lines()
        self.written_bytes = 0
        self.dropped: Counter[str] = Counter()
        self._room_for_details = sys.maxsize if limit_bytes is None else int(limit_bytes * _SHARE_OF_DETAILS)
        self._is_full = False  # of details
        self._told_lost = 0

    # What it is told. On any thread; times are those of `time.perf_counter_ns`.

    def at_work(self, device: str) -> None:
        """The calling thread is the worker of a device."""
        self._lines.workers[threading.get_ident()] = device

    def device(self, device: str, budget_bytes: int, what: str) -> None:
        """A device was "added" or "removed", after the start."""
        self._append(("device", device, budget_bytes, what, time.perf_counter_ns()))

    def owns(self, job: str, owner: int) -> None:
        """Blocks of this owner are a job's."""
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
        """A unit has run: when it began, when all it needed was there, when it ended, and the steps of a burst."""
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
        """A copy has been made.

        Args:
            device: it was loaded to, or spilled from.
            what: "in", "out", or "across" from another device.
            owner: of the block.
            kind: what the block holds.
            shard: whose parameters these are, if one shard's alone.
            nbytes: as `pool.stats()` counts them; 0 for one that has failed.
            how: "waited" for by this thread; "background"; "late": begun in the background, made by this thread in the end;
                "vain": loaded in the background for nothing.
            start_ns: when it began.
            end_ns: when it ended.
        """
        thread = threading.get_ident()
        self._append(("copy", device, what, owner, kind, shard, nbytes, how, thread, start_ns, end_ns))

    def waited(self, device: str, start_ns: int, end_ns: int) -> None:
        """This thread has waited for a copy in the background, to or from a device."""
        self._append(("wait", device, threading.get_ident(), start_ns, end_ns))

    def updated_on_host(self, device: str, owner: int, shard: int, start_ns: int, end_ns: int) -> None:
        """A shard has been updated on the host, beside a device; `owner` as of `copied`."""
        self._append(("host", device, owner, shard, start_ns, end_ns))

    def saved(self, device: str, bytes_in: int, bytes_out: int) -> None:
        """A unit has had activations kept on the host: bytes that came back, and that went, while it ran."""
        if bytes_in or bytes_out:
            self._append(("saved", device, bytes_in, bytes_out, time.perf_counter_ns()))

    def stored(self, what: str, nbytes: int, start_ns: int, end_ns: int) -> None:
        """The disk was written to ("write") or read from ("read")."""
        self._append(("disk", what, nbytes, start_ns, end_ns))

    def job(self, job: str, what: str, at_ns: int = 0, **more: Any) -> None:
        """Something has become of a job, now or at a time; the first of these opens the file."""
        self._append(("job", job, what, at_ns or time.perf_counter_ns(), more))
        if self._thread is None:
            self._begin(at_ns)

    def close(self) -> None:
        """Write what is left and end; nothing may be told any more."""
        with self._lock:
            thread, self._is_closing = self._thread, True
        self._awake.set()
        if thread is not None:
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
        if len(buffer) >= self._room:
            with self._lock:
                self.lost += 1
            return
        buffer.append(record)
        if len(buffer) * 2 >= self._room:
            self._awake.set()

    # The thread that writes.

    def _begin(self, at_ns: int) -> None:
        with self._lock:
            if self._thread is None and not self._is_closing:
                self._lines.start_ns = at_ns or time.perf_counter_ns()
                self._thread = threading.Thread(target=self._work, name="hydra-log", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("wb", buffering=0) as file:
                self._write(file.fileno(), [self._lines.header(self._devices, self._facts)])
                while not self._is_closing:
                    self._awake.wait(_PERIOD_SECONDS)
                    self._awake.clear()
                    self._drain(file.fileno())
                self._drain(file.fileno())
                if self._is_full:
                    self._write(file.fileno(), [self._lines.dropped(self.dropped)])
                self._write(file.fileno(), [self._lines.end(time.thread_time())])
            self._say_size()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the log is not wrong with the training
            self._give_up(error)

    def _drain(self, descriptor: int) -> None:
        """Write what has come up to now."""
        buffer = self._buffer
        for count in _pieces(len(buffer)):
            self._write(descriptor, self._fitting([buffer.popleft() for _ in range(count)]))
        if self.lost != self._told_lost:
            lost, self._told_lost = self.lost - self._told_lost, self.lost
            self._write(descriptor, [self._lines.lost(lost)])

    def _fitting(self, records: Iterable[tuple[Any, ...]]) -> Iterator[str]:
        """The lines of records, without details from the first on that is beyond the limit."""
        size = self.written_bytes
        for record in records:
            is_detail = record[0] in _DETAILS
            line = "" if self._is_full and is_detail else self._lines.made(record)
            if is_detail and (not line or size + len(line) > self._room_for_details):
                if not self._is_full:
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
        """Write whole lines, or none of those that do not fit.

        Raises:
            OSError: they do not.
        """
        data = "".join(lines).encode()
        if self.written_bytes + len(data) > self._most_bytes:
            raise OSError(0, f"it would be larger than {format_bytes(self._most_bytes)}")
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            with contextlib.suppress(OSError):  # else the last line is cut, which readers know of
                whole = data[: len(data) - len(left)].rfind(b"\n") + 1
                os.ftruncate(descriptor, self.written_bytes + whole)
            raise
        self.written_bytes += len(data)

    def _give_up(self, error: Exception) -> None:
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
    """Records that were left out, by kind: `12,345 units, 31 copies left out`."""
    listed = [f"{count:,} {_PLURALS.get(kind, kind)}" for kind, count in sorted(dropped.items()) if count]
    return f"{', '.join(listed) or 'nothing'} left out"


def _pieces(count: int) -> Iterable[int]:
    return (min(_PIECE, count - start) for start in range(0, count, _PIECE))
