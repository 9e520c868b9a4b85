"""Copies between a device and the host beside the computing: a thread on a CPU, a stream in each direction on a GPU.

Note: stream order. Device memory is taken and given back in the order of the compute stream alone. So a copy to the
host waits for what was computed before it (an event), and its memory is given back behind the copy's end on the
compute stream, not when the copy is queued; a copy to the device waits, too, for whatever used its memory before; and
who uses what has come back waits for its end on the compute stream. The allocator then needs to know of no other
stream, and nothing waits on the host.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hydra_tune.devices.heap import PLAN_BYTES, keep_freed_memory
from hydra_tune.fusion.planner.nodes import view_of

_STREAMS: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
_MAKING = threading.Lock()


class Copies(Protocol):
    """What an interpreter has done in the background.

    Attributes:
        waited_seconds: that the host has waited for copies.
    """

    waited_seconds: float

    def offload(self, value: Tensor, storage: str) -> Any:
        """Begin to copy a value's storage to the host; gives a handle."""

    def offload_at_once(self, value: Tensor, storage: str) -> Any:
        """As `offload`, for a copy that takes less than it does to hand it over."""

    def release(self, handle: Any) -> Tensor:
        """Wait for that; gives the copy. What held the device's memory is dropped."""

    def prefetch(self, copy: Tensor) -> Any:
        """Begin to copy back to the device; gives a handle."""

    def prefetch_at_once(self, copy: Tensor) -> Any:
        """As `prefetch`, for a copy that takes less than it does to hand it over."""

    def arrived(self, handle: Any) -> Tensor:
        """Wait for that; gives the bytes."""

    def give_up(self) -> None:
        """Have what is under way over, and let go of it: whoever began it will not come for it."""

    def close(self) -> None:
        """End what runs in the background."""


def copies_for(device: torch.device, sizes: Mapping[str, int]) -> Copies:
    """Those of a device.

    Args:
        device: of the computing.
        sizes: bytes of each storage that will be offloaded, by the name that its node gives it.
    """
    if device.type == "cuda":
        return CudaCopies(device, sizes)
    keep_freed_memory(PLAN_BYTES)
    return ThreadCopies(sizes)


@dataclass(slots=True)
class _Flight:
    """A copy under way in a thread."""

    to: Tensor
    source: Tensor | None
    is_done: threading.Event | None  # None: it was copied at once
    error: BaseException | None = None

    def wait(self) -> Tensor:
        if self.is_done is None:
            return self.to
        self.is_done.wait()
        if self.error is not None:
            raise self.error
        self.source = None
        return self.to


class ThreadCopies:
    """One thread that copies in the order in which it is asked; host memory is there from the beginning.

    Args:
        sizes: bytes of each storage that will be offloaded.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.waited_seconds = 0.0
        self._host = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
        self._asked: queue.SimpleQueue[_Flight | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="planned copies", daemon=True)
        self._thread.start()

    def offload(self, value: Tensor, storage: str) -> _Flight:
        """As of `Copies`."""
        return self._ask(self._host[storage], _bytes_of(value))

    def offload_at_once(self, value: Tensor, storage: str) -> _Flight:
        """As of `Copies`."""
        return _Flight(self._host[storage].copy_(_bytes_of(value)), None, None)

    def release(self, handle: _Flight) -> Tensor:
        """As of `Copies`."""
        return self._awaited(handle)

    def prefetch(self, copy: Tensor) -> _Flight:
        """As of `Copies`."""
        return self._ask(torch.empty(copy.numel(), dtype=copy.dtype), copy)

    def prefetch_at_once(self, copy: Tensor) -> _Flight:
        """As of `Copies`."""
        return _Flight(torch.empty(copy.numel(), dtype=copy.dtype).copy_(copy), None, None)

    def arrived(self, handle: _Flight) -> Tensor:
        """As of `Copies`."""
        return self._awaited(handle)

    def give_up(self) -> None:
        """As of `Copies`."""
        nothing = torch.empty(0)
        self._ask(nothing, nothing).wait()  # behind all that was asked for before

    def close(self) -> None:
        """As of `Copies`."""
        self._asked.put(None)
        self._thread.join()

    def _awaited(self, handle: _Flight) -> Tensor:
        if handle.is_done is None or handle.is_done.is_set():
            return handle.wait()
        begin = time.perf_counter()
        found = handle.wait()
        self.waited_seconds += time.perf_counter() - begin
        return found

    def _ask(self, to: Tensor, source: Tensor) -> _Flight:
        flight = _Flight(to, source, threading.Event())
        self._asked.put(flight)
        return flight

    def _serve(self) -> None:
        while (flight := self._asked.get()) is not None:
            try:
                assert flight.source is not None, "copied once"
                flight.to.copy_(flight.source)
            except BaseException as error:  # noqa: BLE001 - raised where the copy is waited for
                flight.error = error
            assert flight.is_done is not None, "handed over"
            flight.is_done.set()
            del flight


class CudaCopies:
    """A stream for each direction, with events on the compute stream (see the note above).

    Args:
        device: the GPU.
        sizes: bytes of each storage that will be offloaded.
    """

    def __init__(self, device: torch.device, sizes: Mapping[str, int]) -> None:
        self.waited_seconds = 0.0  # the host never does
        self._device = device
        self._host = {name: torch.empty(size, dtype=torch.uint8, pin_memory=True) for name, size in sizes.items()}
        self._out, self._in = _streams(device)
        self._held: dict[int, Tensor] = {}  # under way; if nobody comes to wait for them, until all streams have ended

    def offload(self, value: Tensor, storage: str) -> tuple[Tensor, Tensor, torch.cuda.Event]:
        """As of `Copies`."""
        source = _bytes_of(value)
        self._held[id(source)] = source
        return self._host[storage], source, self._queued(self._out, lambda: self._copied(storage, source))

    def offload_at_once(self, value: Tensor, storage: str) -> tuple[Tensor, Tensor, torch.cuda.Event]:
        """As of `Copies`: a GPU is handed all copies."""
        return self.offload(value, storage)

    def release(self, handle: tuple[Tensor, Tensor, torch.cuda.Event]) -> Tensor:
        """As of `Copies`: the compute stream waits, and what it allocates from then on may be that memory."""
        host, source, end = handle
        torch.cuda.current_stream(self._device).wait_event(end)
        del self._held[id(source)]
        return host

    def prefetch(self, copy: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """As of `Copies`."""
        made = torch.empty(copy.size(), dtype=copy.dtype, device=self._device)
        self._held[id(made)] = made
        return made, self._queued(self._in, lambda: made.copy_(copy, non_blocking=True))

    def prefetch_at_once(self, copy: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """As of `Copies`: a GPU is handed all copies."""
        return self.prefetch(copy)

    def arrived(self, handle: tuple[Tensor, torch.cuda.Event]) -> Tensor:
        """As of `Copies`."""
        made, end = handle
        torch.cuda.current_stream(self._device).wait_event(end)
        del self._held[id(made)]
        return made

    def give_up(self) -> None:
        """As of `Copies`."""
        try:
            for stream in (self._out, self._in, torch.cuda.current_stream(self._device)):
                stream.synchronize()
        finally:
            self._held.clear()

    def close(self) -> None:
        """As of `Copies`."""
        with suppress(RuntimeError):  # of a GPU that is lost, whose memory is nobody's any more
            self.give_up()

    def _copied(self, storage: str, source: Tensor) -> Tensor:
        return self._host[storage].copy_(source, non_blocking=True)

    def _queued(self, stream: torch.cuda.Stream, action: Callable[[], Any]) -> torch.cuda.Event:
        begin, end = _event(), _event()
        begin.record(torch.cuda.current_stream(self._device))
        stream.wait_event(begin)
        with torch.cuda.stream(stream):
            action()
            end.record(stream)
        return end


def _bytes_of(value: Tensor) -> Tensor:
    return view_of(value, torch.uint8, [value.untyped_storage().nbytes()], [1], 0)


def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Those of a GPU, outward and inward: torch gives its few streams out again and again, that of the computing as well."""
    with _MAKING:
        if device not in _STREAMS:
            _STREAMS[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        return _STREAMS[device]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
