"""Marks: the trial of each thread, written to memory shared with a supervisor, so marks survive the process.

A worker (`pool/runtime/worker.py`), a preparer (`JobDispatcher.preparing` in `pool/runtime/dispatcher.py`), the thread of a
user's loop (`train/own_loop/loop_trial.py`), the server of an isolated pool (`isolation/child.py`) and the objective of a sweep
(`integrations/hydra_tune_optuna/sweep.py`) enter `at_work` while a trial's code runs. `pool/faults/retry.py` gives up where the
GPUs are lost, and `cli/run/interrupt.py` counts signals and records an end by a signal. `pool/runtime/worker.py` and
`checkpoint/sweep_folder.py` ask `here` whether there is a supervisor. `supervise` (`supervisor.py`) makes the `TrialMarkTable`
before the process starts, and reads the marks once the process has ended. A process without a supervisor writes nothing.

Note: blame (`CrashHistory.note` in `supervisor.py`). A process that ends itself out of order may name the trial to blame
(`give_up`). Else the trial to blame is the trial marked for the faulting thread, if faulthandler has named the thread; or the
marked trial, if exactly one trial is marked, and either no thread was named or the trial ran alone as a suspect. If no rule
applies, all marked trials become *suspects* in the next process: while a suspect is marked there, no other trial is, so the
next crash has a single candidate.

Note: turns. While a process has suspects, `at_work` may wait for other trials to leave. So a thread must not wait, inside
`at_work`, for another thread that has yet to enter for another trial. Several threads may enter for one trial: a worker waits
for the thread of a user's loop.
"""

import hashlib
import mmap
import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_SLOTS, _SLOT_BYTES = 256, 512
# After the slot of the end, and before those of the threads.
_CULPRIT_SLOT = 1
# Header of a slot: the thread, and the bytes of the name (0 where the slot is free).
_SLOT = struct.Struct("=QH")
# Whether the process has ended in order, and its exit code.
_END = struct.Struct("=?i")
_HEARD_AT, _WHY_AT = 64, 80
# Bytes of the reason for an end out of order; 0: the process has given none.
_WHY = struct.Struct("=H")
_NAME_BYTES, _DIGEST_LENGTH = _SLOT_BYTES - _SLOT.size, 16


def marked_as(name: str) -> str:
    """Return the name of a trial in marks and crashes: a long name is shortened and ends in a digest of the full name."""
    # A name may be any object, or a file name whose bytes are no UTF-8.
    text = str(name).encode(errors="backslashreplace")
    if len(text) <= _NAME_BYTES:
        return text.decode()
    digest = hashlib.sha256(text).hexdigest()[:_DIGEST_LENGTH]
    return f"{text[: _NAME_BYTES - _DIGEST_LENGTH - 1].decode(errors='ignore')}~{digest}"


class TrialMarkTable:
    """Record that a process writes and the supervisor reads, in shared memory made by the supervisor before the fork.

    Suspects and turns belong to the writing process alone.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, (_SLOTS + 2) * _SLOT_BYTES)
        self._free = deque(range(2, _SLOTS + 2))
        self._suspects: frozenset[str] = frozenset()
        self._changed = threading.Condition()
        self._num_inside = 0
        # The suspect inside; None: no suspect is.
        self._lone: str | None = None
        self._is_given_up = False

    def begin(self, suspects: Iterable[str]) -> None:
        """Make this process write marks here from now on.

        Args:
            suspects: trials beside which no other trial may be marked.
        """
        global _HERE  # noqa: PLW0603 - a process is supervised as a whole
        self._suspects = frozenset(suspects)
        _HERE = self

    @contextmanager
    def at_work(self, name: str) -> Iterator[None]:
        """Mark a trial for this thread inside the context; with suspects, wait for a turn first."""
        name = marked_as(name)
        turn = self._turn(name) if self._suspects else nullcontext()
        with turn:
            try:
                slot = self._free.popleft()
            # More threads than slots; an unmarked thread is never blamed.
            except IndexError:
                yield
                return
            self._write(slot, name)
            try:
                yield
            finally:
                # The marks stay as they were when the process gave up, whatever its threads do until its end.
                if not self._is_given_up:
                    _SLOT.pack_into(self._memory, slot * _SLOT_BYTES, 0, 0)
                    self._free.append(slot)

    def _write(self, slot: int, name: str) -> None:
        if self._is_given_up:
            return
        at, text = slot * _SLOT_BYTES, name.encode()
        # The name before the header: a crash between the two writes leaves a free slot and no half-written mark.
        self._memory[at + _SLOT.size : at + _SLOT.size + len(text)] = text
        _SLOT.pack_into(self._memory, at, threading.get_ident(), len(text))

    @contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        is_suspect = name in self._suspects
        with self._changed:
            # A suspect runs alone, so that a crash has a single candidate; all other trials share the turn. Further threads
            # of the suspect inside enter at once: the first may wait for them.
            self._changed.wait_for(
                lambda: self._lone == name or (self._lone is None and not (is_suspect and self._num_inside))
            )
            self._num_inside += 1
            if is_suspect:
                self._lone = name
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                if not self._num_inside:
                    self._lone = None
                self._changed.notify_all()

    def end(self, code: int) -> None:
        """Record an orderly end of the process with an exit code, so the supervisor does not restart the process."""
        _END.pack_into(self._memory, 0, True, code)

    def give_up(self, why: str, culprit: str | None) -> None:
        """Record why the process is about to end out of order, and the trial to blame; None: the marks tell.

        From now on no thread changes a mark.
        """
        if culprit is not None:
            self._write(_CULPRIT_SLOT, marked_as(culprit))
        self._is_given_up = True
        text = why.encode(errors="backslashreplace")[: _SLOT_BYTES - _WHY_AT - _WHY.size]
        self._memory[_WHY_AT + _WHY.size : _WHY_AT + _WHY.size + len(text)] = text
        _WHY.pack_into(self._memory, _WHY_AT, len(text))

    def hear(self) -> None:
        """Count a signal handled by this process."""
        self._memory[_HEARD_AT] += 1

    # The supervisor's side.

    @property
    def ended(self) -> int | None:
        """Exit code with which the process ended in order; None: the process has not."""
        is_ended, code = _END.unpack_from(self._memory, 0)
        return code if is_ended else None

    @property
    def why(self) -> str:
        """The reason that the process gave for an end out of order; empty where the process gave none."""
        (length,) = _WHY.unpack_from(self._memory, _WHY_AT)
        text = self._memory[_WHY_AT + _WHY.size : _WHY_AT + _WHY.size + length]
        return text.decode(errors="ignore")

    @property
    def num_heard(self) -> int:
        """Signals counted by the process, up to 255."""
        return self._memory[_HEARD_AT]

    def marked(self) -> dict[int, str]:
        """Return the marked trials, by thread; only the trial to blame where the process has named one."""
        trials = {}
        for at in range(_SLOT_BYTES, len(self._memory), _SLOT_BYTES):
            thread, length = _SLOT.unpack_from(self._memory, at)
            if length:
                text = self._memory[at + _SLOT.size : at + _SLOT.size + length]
                trials[thread] = text.decode()
                if at == _CULPRIT_SLOT * _SLOT_BYTES:
                    return {thread: trials[thread]}
        return trials

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()


_HERE: TrialMarkTable | None = None


def here() -> TrialMarkTable | None:
    """Return the marks of this process; None without a supervisor."""
    return _HERE


def at_work(name: str) -> AbstractContextManager[None]:
    """Attribute the work of this thread inside the context to a trial, for the search for the cause of a crash."""
    return nullcontext() if _HERE is None else _HERE.at_work(name)
