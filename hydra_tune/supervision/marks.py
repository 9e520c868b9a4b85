"""Which trial each thread works for, written where it survives the process: in memory that a supervisor shares.

A mark is written before the trial's code runs, and taken away after it: two writes to memory, and nothing else. In a process
that nobody supervises nothing is written.

Note: which trial is to blame. It is the trial that is marked for the thread that the fault was in, if the system has said which
thread that was; else the trial that is marked, where a single one is and no other thread is known to be at fault. Where neither
is known, all that were marked are *suspects* of the process that is begun next: while one of them is marked there, no other
trial is, so that the next crash has a name.
"""

import hashlib
import mmap
import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_SLOTS, _SLOT_BYTES = 256, 512
_SLOT = struct.Struct("=QH")  # the thread; bytes of the name, 0 where the slot is free
_END = struct.Struct("=?i")  # whether the process has ended in order, and its exit code
_HEARD_AT = 64
_NAME_BYTES, _DIGEST_LENGTH = _SLOT_BYTES - _SLOT.size, 16


def marked_as(name: str) -> str:
    """The name of a trial as marks and crashes have it: a long one is shortened, and ends in a digest of the whole."""
    text = name.encode()
    if len(text) <= _NAME_BYTES:
        return name
    digest = hashlib.sha256(text).hexdigest()[:_DIGEST_LENGTH]
    return f"{text[: _NAME_BYTES - _DIGEST_LENGTH - 1].decode(errors='ignore')}~{digest}"


class Marks:
    """What a process writes of itself, and its supervisor reads when it has ended. Made by the supervisor, before the fork."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, (_SLOTS + 1) * _SLOT_BYTES)
        self._free = deque(range(1, _SLOTS + 1))
        self._suspects: frozenset[str] = frozenset()
        self._changed = threading.Condition()
        self._num_inside, self._is_alone = 0, False

    def begin(self, suspects: Iterable[str]) -> None:
        """This process writes here from now on.

        Args:
            suspects: the trials that no other is to be marked beside.
        """
        global _HERE  # noqa: PLW0603 - a process is supervised as a whole
        self._suspects = frozenset(suspects)
        _HERE = self

    @contextmanager
    def at_work(self, name: str) -> Iterator[None]:
        """As the function of the module."""
        name = marked_as(name)
        turn = self._turn(is_alone=name in self._suspects) if self._suspects else nullcontext()
        with turn:
            try:
                slot = self._free.popleft()
            except IndexError:  # more threads than anybody has; one that is not marked is not blamed
                yield
                return
            at, text = slot * _SLOT_BYTES, name.encode()
            self._memory[at + _SLOT.size : at + _SLOT.size + len(text)] = text
            _SLOT.pack_into(self._memory, at, threading.get_ident(), len(text))
            try:
                yield
            finally:
                _SLOT.pack_into(self._memory, at, 0, 0)
                self._free.append(slot)

    @contextmanager
    def _turn(self, *, is_alone: bool) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone and not (is_alone and self._num_inside))
            self._num_inside, self._is_alone = self._num_inside + 1, is_alone
        try:
            yield
        finally:
            with self._changed:
                self._num_inside, self._is_alone = self._num_inside - 1, False
                self._changed.notify_all()

    def end(self, code: int) -> None:
        """This process ends in order, with this exit code, and is not to be begun again."""
        _END.pack_into(self._memory, 0, True, code)

    def hear(self) -> None:
        """This process has been sent a signal that it acts on."""
        self._memory[_HEARD_AT] += 1

    # The supervisor's side.

    @property
    def ended(self) -> int | None:
        """The exit code with which the process ends in order; None: it does not."""
        is_ended, code = _END.unpack_from(self._memory, 0)
        return code if is_ended else None

    @property
    def num_heard(self) -> int:
        """Signals that the process has been sent, up to 255."""
        return self._memory[_HEARD_AT]

    def marked(self) -> dict[int, str]:
        """The trials that were marked, by thread."""
        found = {}
        for at in range(_SLOT_BYTES, len(self._memory), _SLOT_BYTES):
            thread, length = _SLOT.unpack_from(self._memory, at)
            if length:
                text = self._memory[at + _SLOT.size : at + _SLOT.size + length]
                found[thread] = text.decode()
        return found

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


_HERE: Marks | None = None


def here() -> Marks | None:
    """Where this process writes; None: nobody supervises it."""
    return _HERE


def at_work(name: str) -> AbstractContextManager[None]:
    """What this thread does meanwhile, it does for the trial of this name; for whoever looks for the cause of a crash."""
    return nullcontext() if _HERE is None else _HERE.at_work(name)
