"""The lines of an event log: what is told, as JSON. `observe/runlog.py` reads them back."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from hydra_tune.observe.text import plain

FORMAT = 1
"""Of the file; another one for every change that a reader would notice."""

KEY = "hydra_tune_event_log"
"""What the first line has the format under."""

_FAILED = ',"failed":true'
_STEPS = ',"steps":%d'


class Lines:
    """Makes lines. Times are given as `time.perf_counter_ns` has them, and written as nanoseconds since the start.

    Units, copies and waits, of which there are many, are put together by hand: `json.dumps` would take several times as long.
    What is the same step after step, all but the times, is kept.

    Attributes:
        start_ns: the start.
        workers: devices by the thread that is their worker.
    """

    def __init__(self) -> None:
        self.start_ns = 0
        self.workers: dict[int, str] = {}
        self._owners: dict[int, str] = {}
        self._owned: dict[str, int] = {}
        self._quoted: dict[str, str] = {}
        self._heads: dict[tuple[Any, ...], str] = {}  # of units and copies, up to the times
        self._makers: dict[str, Callable[..., str]] = {
            "unit": self.unit,
            "copy": self.copy,
            "wait": self.wait,
            "saved": self.saved,
            "host": self.host,
            "disk": self.disk,
            "job": self.job,
            "device": self.device,
        }

    def made(self, record: tuple[Any, ...]) -> str:
        """The line of a record: its event, and what the method of that name takes."""
        return self._makers[record[0]](*record[1:])

    def owns(self, job: str, owner: int) -> None:
        """Blocks of this owner are a job's."""
        self._owners[owner], self._owned[job] = job, owner
        self._heads.clear()

    def header(self, devices: Sequence[tuple[str, int]], facts: Mapping[str, Any]) -> str:
        """The first line: name and budget of each device, and whatever else."""
        ago = (time.perf_counter_ns() - self.start_ns) / 1e9
        started = datetime.fromtimestamp(datetime.now(UTC).timestamp() - ago, UTC).isoformat()
        listed = [{"name": name, "budget_bytes": budget} for name, budget in devices]
        return _object(**{KEY: FORMAT}, started_at=started, devices=listed, **facts)

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
        """A unit: when it began, when all it needed was there, when it ended, and the steps of a burst."""
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
        """A copy; as `EventLog.copied`, and the thread that has told."""
        zero, key = self.start_ns, (device, what, owner, kind, shard, nbytes, how, thread)
        head = self._heads.get(key)
        if head is None:
            head = self._copy_head(*key)
            if owner is None or owner in self._owners:  # else it may be told yet whose these are
                self._heads[key] = head
        return f'{head}"start_ns":{start_ns - zero},"end_ns":{end_ns - zero}}}\n'

    def _copy_head(
        self,
        device: str,
        what: str,
        owner: int | None,
        kind: str,
        shard: int | None,
        nbytes: int,
        how: str,
        thread: int,
    ) -> str:
        quote = self._quote
        by = None if how in ("background", "vain") else self.workers.get(thread)
        job = None if owner is None else self._owners.get(owner)
        return (
            f'{{"event":"copy","device":{quote(device)},"what":"{what}","job":{quote(job)},"kind":{quote(kind)},'
            f'"shard":{"null" if shard is None else shard},"bytes":{nbytes},"how":"{how}","by":{quote(by)},'
        )

    def wait(self, device: str, thread: int, start_ns: int, end_ns: int) -> str:
        """A thread has waited for a copy in the background, to or from a device."""
        by = self._quote(self.workers.get(thread))
        return f'{{"event":"wait","device":{self._quote(device)},"by":{by},{self._span(start_ns, end_ns)}}}\n'

    def saved(self, device: str, bytes_in: int, bytes_out: int, at_ns: int) -> str:
        """Activations that a unit had on the host meanwhile."""
        return _object(
            event="saved", device=device, bytes_in=bytes_in, bytes_out=bytes_out, at_ns=at_ns - self.start_ns
        )

    def host(self, device: str, owner: int, shard: int, start_ns: int, end_ns: int) -> str:
        """A shard was updated on the host, beside a device."""
        quote = self._quote
        job = quote(self._owners.get(owner))
        span = self._span(start_ns, end_ns)
        return f'{{"event":"host","device":{quote(device)},"job":{job},"shard":{shard},{span}}}\n'

    def disk(self, what: str, nbytes: int, start_ns: int, end_ns: int) -> str:
        """The disk was written to or read from."""
        return f'{{"event":"disk","what":"{what}","bytes":{nbytes},{self._span(start_ns, end_ns)}}}\n'

    def job(self, job: str, what: str, at_ns: int, more: Mapping[str, Any]) -> str:
        """Something has become of a job."""
        if what == "over":
            self._quoted.pop(job, None)
            self._heads.clear()
            self._owners.pop(self._owned.pop(job, -1), None)
        facts = {name: plain(value) for name, value in more.items()}
        return _object(event="job", job=job, what=what, at_ns=at_ns - self.start_ns, **facts)

    def device(self, device: str, budget_bytes: int, what: str, at_ns: int) -> str:
        """A device was added or removed."""
        return _object(event="device", device=device, what=what, budget_bytes=budget_bytes, at_ns=at_ns - self.start_ns)

    def lost(self, records: int) -> str:
        """So many more could not be kept."""
        return _object(event="lost", records=records, at_ns=time.perf_counter_ns() - self.start_ns)

    def dropped(self, records: Mapping[str, int]) -> str:
        """From now on units and copies are left out, or, at the end, so many of each kind were."""
        return _object(event="dropped", records=dict(records), at_ns=time.perf_counter_ns() - self.start_ns)

    def end(self, cpu_seconds: float) -> str:
        """The last line, and what the log's own thread has cost."""
        return _object(event="end", at_ns=time.perf_counter_ns() - self.start_ns, cpu_seconds=cpu_seconds)

    def _span(self, start_ns: int, end_ns: int) -> str:
        return f'"start_ns":{start_ns - self.start_ns},"end_ns":{end_ns - self.start_ns}'

    def _quote(self, text: str | None) -> str:
        """A text as JSON; they are few and come again and again."""
        if text is None:
            return "null"
        found = self._quoted.get(text)
        if found is None:
            found = self._quoted[text] = json.dumps(text)
        return found


def _object(**values: Any) -> str:
    return json.dumps(values, separators=(",", ":"), allow_nan=False, default=str) + "\n"
