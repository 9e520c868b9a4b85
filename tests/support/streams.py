"""Streams of GPUs that are not here: what is asked of a stream is queued, and runs as early or as late as its order allows.

A stand-in for `torch`, for code that puts copies in order by streams and events. Memory of a GPU is ordinary memory that is
known to be a GPU's, and what writes to it in place, or copies from it, is queued on the stream that is current. An order that
nothing demands is one that does not happen: so a wait that is missing gives other numbers.
"""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

QUEUED = {torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.add_.Tensor}
LATE, COPIES_FIRST, COMPUTING_FIRST = "as late as somebody waits", "copies at once", "computing at once"
HASTES = (LATE, COPIES_FIRST, COMPUTING_FIRST)


class Stream:
    """One of a GPU's."""

    def __init__(self, gpus, device=None, priority=0):
        self.gpus, self.device, self.queue, self.done = gpus, gpus.named(device), [], 0
        gpus.streams.append(self)

    def wait_event(self, event):
        stream, count = event.at
        self.gpus.add(self, lambda: stream.run_to(count), is_ready=lambda: stream.done >= count)

    def wait_stream(self, other):
        event = Event(self.gpus)
        event.record(other)
        self.wait_event(event)

    def synchronize(self):
        with self.gpus.lock:
            self.run_to(len(self.queue))

    def run_to(self, count):
        while self.done < count:
            self.queue[self.done][0]()
            self.done += 1

    def run_what_can(self):
        while self.done < len(self.queue) and self.queue[self.done][1]():
            self.run_to(self.done + 1)


class Event:
    """Marks a place in a stream."""

    def __init__(self, gpus, blocking=False):
        self.gpus, self.at = gpus, None

    def record(self, stream):
        with self.gpus.lock:
            self.at = stream, len(stream.queue)

    def synchronize(self):
        stream, count = self.at
        with self.gpus.lock:
            stream.run_to(count)


class Queueing(TorchDispatchMode):
    """On a thread that works with GPUs."""

    def __init__(self, gpus):
        super().__init__()
        self.gpus = gpus

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        places = [place for one in tensors if (place := self.gpus.place_of(one)) is not None]
        if func not in QUEUED or not places:
            return func(*args, **(kwargs or {}))
        here = self.gpus.current(places[-1])  # a copy from another GPU is made by that one
        there = self.gpus.current(places[0])
        if there is not here:
            here.wait_stream(there)

        def run():
            with _disable_current_modes():  # whichever thread it is that waits for it
                func(*args, **(kwargs or {}))

        self.gpus.add(here, run)
        if there is not here:
            there.wait_stream(here)
        return args[0]


class Gpus:
    """Some, and the stand-in for `torch`.

    Args:
        haste: one of `HASTES`.
    """

    def __init__(self, haste):
        self.haste, self.streams, self.lock = haste, [], threading.RLock()
        self._own, self._memory = threading.local(), {}
        self.computing = set()
        self._defaults = {index: Stream(self, torch.device("cuda", index)) for index in range(2)}
        self.cuda = SimpleNamespace(
            Stream=lambda device=None, priority=0: Stream(self, device, priority),
            Event=lambda blocking=False: Event(self, blocking),
            stream=self._stream,
            device=self._device,
            set_device=self._set_device,
            current_stream=self.current,
            can_device_access_peer=lambda _there, _here: True,
        )

    def __getattr__(self, name):
        return getattr(torch, name)

    def named(self, device):
        return torch.device("cuda", 0) if device is None else torch.device(device)

    def empty(self, *size, dtype=None, device=None, pin_memory=False):
        made = torch.empty(*size, dtype=dtype)
        if device is not None:
            self._memory[made.data_ptr()] = torch.device(device), made
        return made

    def place_of(self, tensor):
        """The GPU in whose memory a tensor lies, or None."""
        found = self._memory.get(tensor.untyped_storage().data_ptr())
        return None if found is None else found[0]

    def current(self, device):
        """A thread's current stream."""
        return self._currents.get(self.named(device).index) or self._defaults[self.named(device).index]

    def add(self, stream, action, is_ready=lambda: True):
        """Ask something of a stream."""
        with self.lock:
            stream.queue.append((action, is_ready))
            if self.haste != LATE:
                is_hasty = (stream in self.computing) == (self.haste == COMPUTING_FIRST)
                for one in self.streams if is_hasty else ():
                    if (one in self.computing) == (stream in self.computing):
                        one.run_what_can()

    @contextmanager
    def computing_on(self, stream):
        """A thread that computes there, and queues what it asks for."""
        self.computing.add(stream)
        with self._stream(stream), Queueing(self):
            yield

    def finish(self):
        """Everything that was asked for has run."""
        for stream in self.streams:
            stream.synchronize()

    @property
    def _currents(self):
        if not hasattr(self._own, "currents"):
            self._own.currents = {}
        return self._own.currents

    @contextmanager
    def _stream(self, stream):
        before = self._currents.get(stream.device.index)
        self._currents[stream.device.index] = stream
        try:
            yield
        finally:
            self._currents[stream.device.index] = before

    @contextmanager
    def _device(self, _device):
        yield

    def _set_device(self, _device):
        """The first thing that a copy thread does, which queues what it does from then on."""
        Queueing(self).__enter__()
