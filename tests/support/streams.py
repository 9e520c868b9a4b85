"""Streams of GPUs that are not here, and strict about their order: what nothing puts in order is a fault, and may go wrong.

A stand-in for `torch`, for code that puts copies and computing in order by streams and events. Memory of a GPU is ordinary
memory that is known to be a GPU's. What works on it is queued on the stream that is current on its thread, with clocks:

* *Order.* Each stream knows how far every other stream, and the host, has come for certain before its next operation: by its
  events and waits, and by what the thread that queues has waited for. Each piece of memory remembers its last writer and who
  has read since. Who works on memory without being behind whom it must be behind raises a `RaceError`, with both stacks.
* *Haste.* What is queued runs as early or as late as its order allows. An order that nothing demands is one that does not
  happen, so a wait that is missing gives other numbers as well.
* *The allocator.* Memory that nobody refers to is the allocator's at once, who gives it to the next operator on the stream
  that it was allocated on. So it is overwritten there, in line, and that is a race with whoever still works on it elsewhere.

What is in place is queued. An operator that makes tensors runs when it is asked for, and with it all that its stream waits for.

Note: what the host knows. Threads that copy, and those that compute on the host, know what they have waited for; who asks
them for their result (a future's) knows that too. All other threads count as one: whether they keep each other in order is a
matter of locks, and not of streams. Only threads that have a stream, or copy, are looked at; their operators are, that is,
and not what reads memory beside torch.
"""

import random
import sys
import threading
import traceback
import weakref
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hydra_tune.devices import copying, cuda, stopwatch
from hydra_tune.devices.single_thread import SingleThreadExecutor

LATE, COPIES_FIRST, COMPUTING_FIRST = "as late as somebody waits", "copies at once", "computing at once"
HASTES = (LATE, COPIES_FIRST, COMPUTING_FIRST)

BLOCK_BYTES = 512  # what the caching allocator rounds to
POISON = 0xFF  # not a number, where floats are read
_STACK_DEPTH = 24
_HOST = "the host"
_ATEN = torch.ops.aten
_WAITS = {_ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.nonzero.default, _ATEN.masked_select.default}
_POINTS = {
    _ATEN.set_.source_Storage,
    _ATEN.set_.source_Storage_storage_offset,
    _ATEN.set_.source_Tensor,
    _ATEN.set_.default,
}


class RaceError(AssertionError):
    """Work on memory that no event or stream puts behind other work on it."""


class Access:
    """One operation on one piece of memory."""

    def __init__(self, what, line, place):
        self.what, self.line, self.place = (
            what,
            line,
            place,
        )  # of a stream, or of the host; place: how far that was then
        self.stack = traceback.StackSummary.extract(
            traceback.walk_stack(sys._getframe(2)), limit=_STACK_DEPTH, lookup_lines=False
        )

    def is_before(self, clock):
        return clock.get(self.line, 0) >= self.place

    def __str__(self):
        return f"{self.what} on {self.line}, asked for at\n" + "".join(reversed(self.stack.format()))


class Memory:
    """What the allocator has given, and who works on it."""

    def __init__(self, block, device, stream):
        self.block, self.device, self.stream = block, device, stream  # of pinned memory these two are None
        self.written, self.read = None, {}

    def check(self, access, clock, *, writes):
        """What an operation that knows so much comes too early for."""
        others = [self.written, *(self.read.values() if writes else ())]
        for other in others:
            if other is not None and not other.is_before(clock) and {access.line, other.line} != {_HOST}:
                return f"{access}\nis not behind\n{other}"
        return None

    def note(self, access, *, writes):
        if writes:
            self.written, self.read = access, {}
        else:
            self.read[access.line] = access


class Stream:
    """One of a GPU's."""

    def __init__(self, gpus, device=None, priority=0):
        self.gpus, self.device, self.queue, self.done = gpus, gpus.named(device), [], 0
        self.name = f"stream {len(gpus.streams)}"
        self.clock = {}
        gpus.streams.append(self)

    def __str__(self):
        return self.name

    def knows(self, clock):
        _join(self.clock, clock)

    def wait_event(self, event):
        with self.gpus.lock:
            if event.at is None:
                return  # as CUDA has it
            stream, count = event.at
            self.gpus.add(self, lambda: stream.run_to(count), is_ready=lambda: stream.done >= count)
            self.knows(event.clock)

    def wait_stream(self, other):
        event = Event(self.gpus)
        event.record(other)
        self.wait_event(event)

    def synchronize(self):
        with self.gpus.lock:
            self.run_to(len(self.queue))
            _join(self.gpus.thread_clock, self.clock)

    def run_to(self, count):
        while self.done < count:
            action, _ = self.queue[self.done]
            action()
            self.queue[self.done] = None
            self.done += 1

    def run_what_can(self, most=None):
        while self.done < len(self.queue) and self.queue[self.done][1]() and most != 0:
            self.run_to(self.done + 1)
            most = None if most is None else most - 1


class Event:
    """Marks a place in a stream."""

    def __init__(self, gpus, blocking=False, enable_timing=False):
        self.gpus, self.at, self.clock = gpus, None, {}

    def record(self, stream):
        with self.gpus.lock:
            stream.knows(self.gpus.thread_clock)
            self.at, self.clock = (stream, len(stream.queue)), dict(stream.clock)

    def synchronize(self):
        with self.gpus.lock:
            if self.at is not None:
                self.at[0].run_to(self.at[1])
                _join(self.gpus.thread_clock, self.clock)

    def elapsed_time(self, other):
        for event in (self, other):
            assert event.at is not None, "not recorded"
            assert event.at[0].done >= event.at[1], "not over"
        return 1.0


class Queueing(TorchDispatchMode):
    """On a thread that works with GPUs."""

    def __init__(self, gpus):
        super().__init__()
        self.gpus = gpus

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if func in _POINTS or not all(_is_plain(one) for one in tensors):
            return func(*args, **kwargs)
        return self.gpus.asked(func, args, kwargs, tensors)


class Gpus:
    """Some, and the stand-in for `torch`.

    Args:
        haste: one of `HASTES`, or a seed by which what is queued runs when it likes to.
        raises: whether a race is raised where it is found, or only noted.

    Attributes:
        faults: races so far, which code under test may have caught.
    """

    def __init__(self, haste=LATE, *, raises=True):
        self.haste, self.raises = haste, raises
        self.streams, self.lock, self.faults = [], threading.RLock(), []
        self._random = random.Random(haste if isinstance(haste, int) else 0)
        self._own, self._memory, self._free = threading.local(), {}, defaultdict(list)
        self._host_clock, self._generators = {}, defaultdict(torch.Generator)  # which no operator draws from here
        self.computing = set()
        self._defaults = {index: Stream(self, torch.device("cuda", index)) for index in range(2)}
        self.cuda = SimpleNamespace(
            Stream=lambda device=None, priority=0: Stream(self, device, priority),
            Event=lambda **options: Event(self, **options),
            stream=self._stream,
            device=lambda _device: nullcontext(),
            set_device=lambda _device: None,
            current_stream=self.current,
            can_device_access_peer=lambda _there, _here: True,
            get_rng_state=lambda device: self._generators[device.index].get_state(),
            set_rng_state=lambda state, device: self._generators[device.index].set_state(state.clone()),
            empty_cache=lambda: None,
            mem_get_info=lambda _device: (1 << 30, 1 << 30),
            memory_allocated=lambda _device: 0,
            reset_peak_memory_stats=lambda _device: None,
            _sleep=lambda _cycles: None,
        )

    def __getattr__(self, name):
        return getattr(torch, name)

    def stand_in(self, monkeypatch, *modules):
        """For `torch` where the pool's devices use it, and in others; copying threads tell what they waited for."""
        for module in (cuda, stopwatch, *modules):
            monkeypatch.setattr(module, "torch", self)
        monkeypatch.setattr(copying, "SingleThreadExecutor", lambda *args, **options: _Executor(self, *args, **options))

    def named(self, device):
        return torch.device("cuda", 0) if device is None else torch.device(device)  # by the number alone

    def device(self, kind, index):
        """A GPU's tensors are the host's; the number tells which GPU is meant."""
        return torch.device("cpu" if kind == "cuda" else kind, index)

    def empty(self, *size, dtype=None, device=None, pin_memory=False):
        made = torch.empty(*size, dtype=dtype)
        return self._given(made, None if device is None else self.named(device), pins=pin_memory)

    def memory_of(self, tensor):
        """What a tensor lies on, if that is a GPU's, or pinned."""
        return self._memory.get(tensor.untyped_storage().data_ptr())

    def current(self, device):
        """A thread's current stream."""
        index = self.named(device).index
        return self._currents.get(index) or self._defaults[index]

    @property
    def thread_clock(self):
        """What a thread has waited for."""
        return getattr(self._own, "clock", self._host_clock)

    def add(self, stream, action, is_ready=lambda: True):
        """Ask something of a stream."""
        with self.lock:
            stream.knows(self.thread_clock)
            stream.queue.append((action, is_ready))
            stream.clock[stream] = len(stream.queue)
            if self.haste in (COPIES_FIRST, COMPUTING_FIRST):
                is_hasty = (stream in self.computing) == (self.haste == COMPUTING_FIRST)
                for one in self.streams if is_hasty else ():
                    if (one in self.computing) == (stream in self.computing):
                        one.run_what_can()
            elif self.haste != LATE and self._random.random() < 0.5:
                for one in self._random.sample(self.streams, len(self.streams)):
                    one.run_what_can(self._random.choice((0, 1, 3, None)))

    def asked(self, func, args, kwargs, tensors):
        """An operator, on a thread that works with GPUs."""
        with self.lock:
            known = {id(one): memory for one in tensors if (memory := self.memory_of(one)) is not None}
            asked = kwargs.get("device")
            is_asked = isinstance(asked, torch.device) and asked.type == "cpu" and asked.index is not None
            on_gpu = [memory.device for memory in known.values() if memory.device is not None]
            if not on_gpu and not is_asked:
                if known and not func.is_view:
                    self._host_works(func, args, kwargs, known)
                return func(*args, **kwargs)
            if func.is_view:
                return func(*args, **kwargs)
            place = on_gpu[-1] if on_gpu else asked  # a copy from another GPU is made by that one
            here, there = self.current(place), self.current(on_gpu[0] if on_gpu else asked)
            if there is not here:
                here.wait_stream(there)
            writes = _written(func, args, kwargs)
            made = self._queued(here, func, args, kwargs, known, writes, all(id(one) in known for one in tensors))
            if there is not here:
                there.wait_stream(here)
            is_copy = func in (_ATEN.copy_.default, _ATEN._to_copy.default)
            crosses = is_copy and any(id(one) not in known or known[id(one)].device is None for one in tensors)
            crosses = crosses or (is_copy and is_asked)
            if func in _WAITS or (crosses and not kwargs.get("non_blocking", len(args) > 2 and args[2])):
                here.synchronize()
            return made

    def _queued(self, stream, func, args, kwargs, known, writes, all_known):
        """Have a stream run an operator."""
        name = str(func)
        stream.knows(self.thread_clock)
        self._check(name, stream, len(stream.queue) + 1, stream.clock, known, writes)
        returned = func._schema.returns
        can_wait = (
            all_known
            and writes
            and len(returned) <= 1
            and all(one.alias_info is not None and one.alias_info.is_write for one in returned)
            and torch.Tag.nondeterministic_seeded not in func.tags
            and "resize" not in name
        )
        if can_wait:
            if func is _ATEN.copy_.default:
                args[1].expand_as(args[0])  # an error is the caller's, now
            args, kwargs = tree_map_only(torch.Tensor, self._alias, (args, kwargs))
            self.add(stream, lambda: _run(func, args, kwargs))
            return writes[0] if returned else None
        self.add(stream, lambda: None)
        stream.run_to(len(stream.queue))
        made = _run(func, args, kwargs)
        return tree_map_only(torch.Tensor, lambda one: self._own_memory(one, stream.device), made)

    def _check(self, name, line, place, clock, known, writes):
        written = {id(one) for one in writes}
        memories = {}
        for key, memory in known.items():
            memories[memory] = memories.get(memory, False) or key in written
        for memory, is_written in memories.items():
            access = Access(name, line, place)
            fault = memory.check(access, clock, writes=is_written)
            if fault is not None:
                self.faults.append(fault)
                if self.raises:
                    raise RaceError(fault)
            memory.note(access, writes=is_written)

    def _host_works(self, func, args, kwargs, known):
        """The host reads or writes pinned memory."""
        clock = self.thread_clock
        self._host_clock[_HOST] = place = self._host_clock.get(_HOST, 0) + 1
        clock[_HOST] = place
        self._check(str(func), _HOST, place, clock, known, _written(func, args, kwargs))

    def _given(self, like, device, *, pins=False):
        """Memory of the allocator's, for a tensor like another."""
        nbytes = like.untyped_storage().nbytes()
        if nbytes == 0 or (device is None and not pins):
            return torch.empty_like(like, device="cpu")
        with self.lock:
            stream = None if device is None else self.current(device)
            rounded = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
            free = self._free[stream, rounded]
            memory = Memory(free.pop() if free else np.full(rounded, POISON, np.uint8), device, stream)
            if stream is not None:  # for all that is known, it was the allocator's until now, and used until then
                memory.note(Access("the last use before it was allocated", stream, len(stream.queue)), writes=True)
            part = memory.block[:nbytes]
            flat = torch.from_numpy(part)
            self._memory[flat.data_ptr()] = memory
            weakref.finalize(part, self._freed, flat.data_ptr(), memory).atexit = False
        return _lain(flat, like)

    def _freed(self, pointer, memory):
        """Nobody refers to memory any more: the next operator on its stream may have it."""
        with self.lock:
            del self._memory[pointer]
            stream, block = memory.stream, memory.block
            if stream is None:
                return  # of pinned memory the allocator knows who copies, and waits
            self.add(stream, lambda: block.fill(POISON))
            fault = memory.check(
                Access("the next use after it was freed", stream, len(stream.queue)), stream.clock, writes=True
            )
            if fault is not None:
                self.faults.append(fault)
            self._free[stream, len(block)].append(block)

    def _own_memory(self, made, device):
        """What an operator has made, in memory of the GPU's."""
        if not _is_plain(made) or self.memory_of(made) is not None or made.untyped_storage().nbytes() == 0:
            return made
        storage = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage())
        flat = self.empty(storage.numel(), dtype=torch.uint8, device=device)
        flat.copy_(storage)
        return _lain(flat, made)

    def _alias(self, tensor):
        """The same, which keeps nobody's memory from being given back."""
        return _lain(torch.from_numpy(self.memory_of(tensor).block), tensor)

    @contextmanager
    def computing_on(self, stream):
        """A thread that computes there, and queues what it asks for."""
        with self._stream(stream):
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
        index = stream.device.index
        before = self._currents.get(index)
        self._currents[index] = stream
        try:
            if not getattr(self._own, "is_followed", False):
                self.computing.add(stream)  # a worker's own, which others are taken beside
            with self.following():
                yield
        finally:
            self._currents[index] = before

    @contextmanager
    def following(self):
        """What this thread asks of tensors is seen."""
        if getattr(self._own, "is_followed", False):
            yield
            return
        self._own.is_followed = True
        try:
            with Queueing(self):
                yield
        finally:
            self._own.is_followed = False

    @contextmanager
    def working(self, clock):
        """A thread that knows what those have waited for who have it work."""
        if not hasattr(self._own, "clock"):
            self._own.clock = {}
        with self.lock:
            _join(self._own.clock, clock)
        with self.following():
            yield

    def heard(self, clock):
        """A thread hears what another one knew."""
        with self.lock:
            _join(self.thread_clock, clock)

    def known(self):
        """What a thread knows by now."""
        with self.lock:
            return dict(self.thread_clock)


class _Executor(SingleThreadExecutor):
    """Its threads know what they have waited for, and whoever waits for what they do knows that, too."""

    def __init__(self, gpus, *args, **options):
        super().__init__(*args, **options)
        self._gpus = gpus

    def submit(self, function):
        gpus, before, after = self._gpus, self._gpus.known(), {}

        def run():
            try:
                with gpus.working(before):
                    return function()
            finally:
                after.update(gpus.known())

        future = super().submit(run)
        for name in ("result", "exception", "done"):
            setattr(future, name, _hearing(gpus, getattr(future, name), after))
        return future


def _hearing(gpus, asks, after):
    def ask(*args):
        try:
            return asks(*args)
        finally:
            gpus.heard(after)  # nothing, as long as it is not over

    return ask


def _join(clock, other):
    for line, place in other.items():
        if clock.get(line, 0) < place:
            clock[line] = place


def _is_plain(tensor):
    is_tensor = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return is_tensor and tensor.is_cpu and not torch._is_functional_tensor(tensor)


def _lain(flat, like):
    """A tensor like another, on other memory."""
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        size = like.element_size()
        whole = flat[: flat.numel() // size * size]
        return whole.view(like.dtype).as_strided(like.size(), like.stride(), like.storage_offset())


def _run(func, args, kwargs):
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        return func(*args, **kwargs)


def _written(func, args, kwargs):
    """The tensors that an operator writes to."""
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [one for one in tree_leaves(given) if isinstance(one, torch.Tensor)]
    return written
