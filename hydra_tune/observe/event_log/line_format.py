"""Formats the lines of an event log as JSON. `observe/event_log/reader.py` reads the lines back.

`EventLog` (`writer.py`) makes the line of each record here, on the log's own thread, just before the line is written;
`owns` and `workers` are set on other threads, by single operations of a dict, without a lock. `observe/event_log/run_state.py`
picks lines by their first characters, so `event` stays the first key of each line but the header. `CARRIER` also serves
`Pool` (`pool/pool.py`) and the readers of a log. A change that a reader sees raises `FORMAT`, and belongs into
docs/reference/events.md.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from hydra_tune.observe.live.text import plain

FORMAT = 1
"""Version of the file format; increases with every change visible to a reader."""

KEY = "hydra_tune_event_log"
"""Key of the format version in the first line."""

CARRIER = "carrier "
"""Beginning of a carrier's key. With fusion a carrier computes one trial or a group, and each trial is a job of its own."""

_FAILED = ',"failed":true'
_STEPS = ',"steps":%d'


class EventLogFormatter:
    """Makes whole lines. Times come from `time.perf_counter_ns`, and are written as nanoseconds since the start.

    The lines of units, copies, waits, updates on the host and the disk are formatted by hand, several times faster than by
    `json.dumps`. The part of a unit's or a copy's line that repeats at every step, all but the times, is cached.

    Attributes:
        workers: devices by the id of their worker's thread.
    """

    def __init__(self) -> None:
        self.start_ns = 0
        self.workers: dict[int, str] = {}
        self._owners: dict[int, str] = {}
        self._owned: dict[str, int] = {}
        self._quoted: dict[str, str] = {}
        self._heads: dict[tuple[Any, ...], str] = {}  # first parts of units' and copies' lines, up to the times
        self._makers: dict[str, Callable[..., str]] = {
            "unit": self.unit,
            "copy": self.copy,
            "wait": self.wait,
            "saved": self.saved,
            "host": self.host,
            "disk": self.disk,
            "job": self.job,
            "device": self.device,
            "sweep": self.sweep,
        }

    def made(self, record: tuple[Any, ...]) -> str:
        """Make the line of a record: the event's name, then the arguments of the method with this name."""
        return self._makers[record[0]](*record[1:])

    def owns(self, job: str, owner: int) -> None:
        """Assign all blocks of an owner to a job."""
        self._owners[owner], self._owned[job] = job, owner

    def header(self, devices: Sequence[tuple[str, int]], facts: Mapping[str, Any]) -> str:
        """Make the first line, with name and budget of each device, and other facts."""
        # The file opens a moment after the start: go back by the difference.
        ago = (time.perf_counter_ns() - self.start_ns) / 1e9
        started = datetime.fromtimestamp(datetime.now(UTC).timestamp() - ago, UTC).isoformat()
        device_facts = [{"name": name, "budget_bytes": budget} for name, budget in devices]
        return _object(**{KEY: FORMAT}, started_at=started, devices=device_facts, **facts)

    def unit(
        self,
        device: str,
        job: str,
        kind: str,
        shard: int,
        start_ns: int,
        ready_ns: int,
        end_ns: int,
        is_failed: bool,
        steps: int,
    ) -> str:
        """Line of a unit: its start, the time when all inputs were there, its end, and the steps of a burst."""
        zero, key = self.start_ns, (device, job, kind, shard)
        head = self._heads.get(key)
        if head is None:
            quote = self._quote
            head = self._heads[key] = (
                f'{{"event":"unit","device":{quote(device)},"job":{quote(job)},"kind":{quote(kind)},"shard":{shard},'
            )
        return (
            f'{head}"start_ns":{start_ns - zero},"ready_ns":{ready_ns - zero},"end_ns":{end_ns - zero}'
            f"{_FAILED if is_failed else ''}{'' if steps == 1 else _STEPS % steps}}}\n"
        )

    def copy(
        self,
        device: str,
        what: str,
        owner: int | None,
        kind: str,
        shard: int | None,
        nbytes: int,
        how: str,
        thread: int,
        start_ns: int,
        end_ns: int,
    ) -> str:
        """Line of a copy; arguments as of `EventLog.copied`, with the reporting thread."""
        # Read here once, because other threads change job and worker while this thread makes the line.
        job = None if owner is None else self._owners.get(owner)
        # A copy thread made these copies; the reporting thread's worker has no part in them.
        by = None if how in ("background", "vain") else self.workers.get(thread)
        zero, key = self.start_ns, (device, what, job, kind, shard, nbytes, how, by)
        head = self._heads.get(key)
        if head is None:
            head = self._heads[key] = self._copy_head(*key)
        return f'{head}"start_ns":{start_ns - zero},"end_ns":{end_ns - zero}}}\n'

    def _copy_head(
        self,
        device: str,
        what: str,
        job: str | None,
        kind: str,
        shard: int | None,
        nbytes: int,
        how: str,
        by: str | None,
    ) -> str:
        quote = self._quote
        return (
            f'{{"event":"copy","device":{quote(device)},"what":"{what}","job":{quote(job)},"kind":{quote(kind)},'
            f'"shard":{"null" if shard is None else shard},"bytes":{nbytes},"how":"{how}","by":{quote(by)},'
        )

    def wait(self, device: str, thread: int, start_ns: int, end_ns: int) -> str:
        """Line of a thread's wait for a background copy to or from a device."""
        by = self._quote(self.workers.get(thread))
        return f'{{"event":"wait","device":{self._quote(device)},"by":{by},{self._span(start_ns, end_ns)}}}\n'

    def saved(self, device: str, bytes_in: int, bytes_out: int, at_ns: int) -> str:
        """Line of the activations that a unit kept on the host."""
        return _object(
            event="saved", device=device, bytes_in=bytes_in, bytes_out=bytes_out, at_ns=at_ns - self.start_ns
        )

    def host(self, device: str, owner: int, shard: int, start_ns: int, end_ns: int) -> str:
        """Line of an update of a shard on the host, beside a device."""
        quote = self._quote
        job = quote(self._owners.get(owner))
        span = self._span(start_ns, end_ns)
        return f'{{"event":"host","device":{quote(device)},"job":{job},"shard":{shard},{span}}}\n'

    def disk(self, what: str, nbytes: int, start_ns: int, end_ns: int) -> str:
        """Line of a write to the disk or a read from the disk."""
        return f'{{"event":"disk","what":"{what}","bytes":{nbytes},{self._span(start_ns, end_ns)}}}\n'

    def job(self, job: str, what: str, at_ns: int, more: Mapping[str, Any]) -> str:
        """Line of an event of a job."""
        # Drop the caches of a finished job, or the log of a long run would take ever more memory.
        if what == "over":
            self._quoted.pop(job, None)
            self._heads.clear()
            self._owners.pop(self._owned.pop(job, -1), None)
        # A diverged trial reports NaN or infinity.
        facts = {name: plain(value) for name, value in more.items()}
        return _object(event="job", job=job, what=what, at_ns=at_ns - self.start_ns, **facts)

    def device(self, device: str, budget_bytes: int, what: str, at_ns: int) -> str:
        """Line of a device added or removed."""
        return _object(event="device", device=device, what=what, budget_bytes=budget_bytes, at_ns=at_ns - self.start_ns)

    def sweep(self, facts: Mapping[str, Any]) -> str:
        """Line of what a sweep says about its study or one of its trials."""
        return _object(event="sweep", **{name: plain(value) for name, value in facts.items()})

    def lost(self, records: int) -> str:
        """Line with the number of records lost since the last such line."""
        return _object(event="lost", records=records, at_ns=time.perf_counter_ns() - self.start_ns)

    def dropped(self, records: Mapping[str, int]) -> str:
        """Line of dropped details: empty at the first drop, with the count of each kind at the end."""
        return _object(event="dropped", records=dict(records), at_ns=time.perf_counter_ns() - self.start_ns)

    def end(self, cpu_seconds: float) -> str:
        """The last line, with the CPU time of the log's own thread."""
        return _object(event="end", at_ns=time.perf_counter_ns() - self.start_ns, cpu_seconds=cpu_seconds)

    def _span(self, start_ns: int, end_ns: int) -> str:
        return f'"start_ns":{start_ns - self.start_ns},"end_ns":{end_ns - self.start_ns}'

    def _quote(self, text: str | None) -> str:
        if text is None:
            return "null"
        quoted = self._quoted.get(text)
        if quoted is None:
            quoted = self._quoted[text] = json.dumps(text)
        return quoted


def _object(**values: Any) -> str:
    # NaN is refused, because JSON has none (`plain` makes texts of such numbers). A parameter may be of any type, hence
    # `str`.
    return json.dumps(values, separators=(",", ":"), allow_nan=False, default=str) + "\n"
