"""Copies between a device and the host beside the computation: a thread on a CPU, a stream per direction on a GPU.

`runner.py` makes a `CopyEngine` when a planned step first runs on a device, and `interpreter.py` calls the engine at each
copy and each wait of a merged graph. `step_timer.py` adds `waited_seconds` to a step's CPU time.
`planner/profile/copy_handoff_cost.py` times a `ThreadCopyEngine`. The module must not decide what is copied.

Note: threads. The thread that runs the graphs calls the engine; `close` may come from another thread.
`ThreadCopyEngine` copies in a thread of its own, which `close` ends; an error of that thread is raised where the failed
copy is waited for. Each storage has a single host buffer, so a storage must have come back before its next copy to the
host begins. Engines take no lock, except to make the two copy streams of a GPU, which all engines of the GPU share.

Note: stream order. Device memory is taken and given back in the order of the compute stream alone. So a copy to the host
waits, by an event, for the computation queued before. The source's memory is given back behind the copy's end on the
compute stream, not when the copy is queued. A copy to the device also waits for all earlier users of its target's memory.
Readers of the returned bytes wait on the compute stream for the copy's end. The allocator then needs to know of no other
stream, and the host waits for the streams only in `give_up` and `close`.
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

from hydra_tune.devices.copying import SimulatedLink
from hydra_tune.devices.hardware.heap import PLAN_BYTES, keep_freed_memory
from hydra_tune.planner.ir.planner_ops import view_of

_STREAMS: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
_MAKING = threading.Lock()  # guards `_STREAMS`: several threads make engines


class CopyEngine(Protocol):
    """Copies that an interpreter starts in the background.

    Attributes:
        waited_seconds: seconds that the host has waited in `release` and `arrived`; 0 on a GPU.
    """

    waited_seconds: float

    def offload(self, value: Tensor, storage: str) -> Any:
        """Begin the copy of a value's storage to the host; return a handle."""

    def offload_at_once(self, value: Tensor, storage: str) -> Any:
        """Copy as `offload`, where copying takes no longer than handing over."""

    def release(self, handle: Any) -> Tensor:
        """Wait for a copy to the host, let go of the device memory, and return the host copy; on a GPU the stream waits."""

    def prefetch(self, copy: Tensor) -> Any:
        """Begin the copy back to the device; return a handle."""

    def prefetch_at_once(self, copy: Tensor) -> Any:
        """Copy as `prefetch`, where copying takes no longer than handing over."""

    def arrived(self, handle: Any) -> Tensor:
        """Wait for a copy back, as `release` waits, and return the bytes."""

    def give_up(self) -> None:
        """Let all copies under way end, and drop their memory: no caller will wait for them any more."""

    def close(self) -> None:
        """End the background work."""


def copies_for(device: torch.device, sizes: Mapping[str, int], link: SimulatedLink | None = None) -> CopyEngine:
    """Return the copies of a device.

    Args:
        device: of the computation.
        sizes: bytes of each storage that will be offloaded, by the name in the offload node.
        link: simulated link of a CPU device, which its other copies use as well; None: no such link.
    """
    if device.type == "cuda":
        return CudaCopyEngine(device, sizes)
    keep_freed_memory(PLAN_BYTES)
    return ThreadCopyEngine(sizes, link)


@dataclass(slots=True)
class _ThreadCopyHandle:
    to: Tensor
    source: Tensor | None
    is_done: threading.Event | None  # None: copied at once
    error: BaseException | None = None

    def wait(self) -> Tensor:
        """Wait until the copy has ended, and return the target.

        Raises:
            BaseException: the error of the thread that copied.
        """
        if self.is_done is None:
            return self.to
        self.is_done.wait()
        if self.error is not None:
            raise self.error
        # The handle may live on; the source's memory must not.
        self.source = None
        return self.to


class ThreadCopyEngine:
    """A single thread that copies in the order of the requests; host memory is allocated at the beginning.

    Without a link, the calling thread makes the copies at once (`offload_at_once`, `prefetch_at_once`) itself.
    """

    def __init__(self, sizes: Mapping[str, int], link: SimulatedLink | None = None) -> None:
        self.waited_seconds = 0.0
        self._link = link
        self._host = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
        self._asked: queue.SimpleQueue[_ThreadCopyHandle | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="planned copies", daemon=True)
        self._thread.start()

    def offload(self, value: Tensor, storage: str) -> _ThreadCopyHandle:
        """As of `CopyEngine`."""
        return self._ask(self._host[storage], _bytes_of(value))

    def offload_at_once(self, value: Tensor, storage: str) -> _ThreadCopyHandle:
        """As of `CopyEngine`."""
        if self._link is not None:  # where the computing thread would sleep
            return self.offload(value, storage)
        return _ThreadCopyHandle(self._host[storage].copy_(_bytes_of(value)), None, None)

    def release(self, handle: _ThreadCopyHandle) -> Tensor:
        """As of `CopyEngine`."""
        return self._awaited(handle)

    def prefetch(self, copy: Tensor) -> _ThreadCopyHandle:
        """As of `CopyEngine`."""
        return self._ask(torch.empty(copy.numel(), dtype=copy.dtype), copy)

    def prefetch_at_once(self, copy: Tensor) -> _ThreadCopyHandle:
        """As of `CopyEngine`."""
        if self._link is not None:
            return self.prefetch(copy)
        return _ThreadCopyHandle(torch.empty(copy.numel(), dtype=copy.dtype).copy_(copy), None, None)

    def arrived(self, handle: _ThreadCopyHandle) -> Tensor:
        """As of `CopyEngine`."""
        return self._awaited(handle)

    def give_up(self) -> None:
        """As of `CopyEngine`."""
        nothing = torch.empty(0)
        self._ask(nothing, nothing).wait()  # the thread copies in order, so all earlier copies have ended

    def close(self) -> None:
        """As of `CopyEngine`."""
        self._asked.put(None)
        self._thread.join()

    def _awaited(self, handle: _ThreadCopyHandle) -> Tensor:
        if handle.is_done is None or handle.is_done.is_set():
            return handle.wait()
        begin = time.perf_counter()
        target = handle.wait()
        self.waited_seconds += time.perf_counter() - begin
        return target

    def _copy(self, to: Tensor, source: Tensor) -> None:
        if self._link is None:
            to.copy_(source)
        else:
            self._link.send(lambda: to.copy_(source), to.nbytes, is_waited_for=False)

    def _ask(self, to: Tensor, source: Tensor) -> _ThreadCopyHandle:
        flight = _ThreadCopyHandle(to, source, threading.Event())
        self._asked.put(flight)
        return flight

    def _serve(self) -> None:
        while (flight := self._asked.get()) is not None:
            try:
                assert flight.source is not None, "copied once"
                self._copy(flight.to, flight.source)
            except BaseException as error:  # noqa: BLE001 - raised where the copy is waited for
                flight.error = error
            assert flight.is_done is not None, "handed over"
            # Set last: the waiting thread reads `error` without a lock.
            flight.is_done.set()
            # Otherwise the loop variable keeps both buffers alive until the next request comes.
            del flight


class CudaCopyEngine:
    """A stream for each direction, with events on the compute stream (see the note above)."""

    def __init__(self, device: torch.device, sizes: Mapping[str, int]) -> None:
        self.waited_seconds = 0.0  # the host waits for no single copy
        self._device = device
        self._host = {name: torch.empty(size, dtype=torch.uint8, pin_memory=True) for name, size in sizes.items()}
        self._out, self._in = _streams(device)
        # Buffers of copies under way. Buffers that no caller has waited for stay until `give_up` has synchronized all
        # streams.
        self._held: dict[int, Tensor] = {}

    def offload(self, value: Tensor, storage: str) -> tuple[Tensor, Tensor, torch.cuda.Event]:
        """As of `CopyEngine`."""
        source = _bytes_of(value)
        self._held[id(source)] = source
        return self._host[storage], source, self._queued(self._out, lambda: self._copied(storage, source))

    def offload_at_once(self, value: Tensor, storage: str) -> tuple[Tensor, Tensor, torch.cuda.Event]:
        """As of `CopyEngine`: a GPU is handed all copies."""
        return self.offload(value, storage)

    def release(self, handle: tuple[Tensor, Tensor, torch.cuda.Event]) -> Tensor:
        """As of `CopyEngine`: the compute stream waits, and its later allocations may reuse the device memory."""
        host, source, end = handle
        torch.cuda.current_stream(self._device).wait_event(end)
        # Behind the wait: the allocator gives the memory to later work of the compute stream, which comes after the
        # copy.
        del self._held[id(source)]
        return host

    def prefetch(self, copy: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """As of `CopyEngine`."""
        target = torch.empty(copy.size(), dtype=copy.dtype, device=self._device)
        self._held[id(target)] = target
        return target, self._queued(self._in, lambda: target.copy_(copy, non_blocking=True))

    def prefetch_at_once(self, copy: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """As of `CopyEngine`: a GPU is handed all copies."""
        return self.prefetch(copy)

    def arrived(self, handle: tuple[Tensor, torch.cuda.Event]) -> Tensor:
        """As of `CopyEngine`."""
        target, end = handle
        torch.cuda.current_stream(self._device).wait_event(end)
        del self._held[id(target)]
        return target

    def give_up(self) -> None:
        """As of `CopyEngine`."""
        try:
            for stream in (self._out, self._in, torch.cuda.current_stream(self._device)):
                stream.synchronize()
        finally:
            self._held.clear()

    def close(self) -> None:
        """As of `CopyEngine`."""
        with suppress(RuntimeError):  # a lost GPU raises, and its memory is gone in any case
            self.give_up()

    def _copied(self, storage: str, source: Tensor) -> Tensor:
        return self._host[storage].copy_(source, non_blocking=True)

    def _queued(self, stream: torch.cuda.Stream, action: Callable[[], Any]) -> torch.cuda.Event:
        # The copy waits for everything queued on the compute stream: the computation of its source, and earlier users
        # of the target's memory, which the allocator may have given out again without waiting.
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
    """Return the outward and the inward stream of a GPU, made once.

    torch gives its few streams out in rotation, so streams made for every run would sooner or later be the compute
    stream.
    """
    with _MAKING:
        if device not in _STREAMS:
            _STREAMS[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        return _STREAMS[device]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
