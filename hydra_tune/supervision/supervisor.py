"""The supervisor: starts a process, waits for the end, and restarts the process after a crash.

With isolation, `hydra-tune sweep` (`cli/commands/sweep.py`) calls `supervise` before the sweep begins, and
`IsolatedPoolClient` (`isolation/parent.py`) does so in a copy of the program at the first submitted task.
`cli/run/sweep_run.py` and `isolation/child.py` read the `RestartContext` in each new process, `cli/display/isolation.py` asks
`why_not_here`, and `cli/commands/sweep.py` and `pool/runtime/settings.py` name files by `numbered`.

Note: fork. The process is a copy of the supervisor, with the program and all functions. The supervisor only waits, and
runs no threads, so each copy is as sound as the first. `supervise` makes a new `TrialMarkTable` (`marks.py`) for each
process, and reads the marks after the process has ended. The module must not import torch: threads or CUDA begun in the
supervisor would spoil every later copy.

Note: signals. Ctrl-C in a terminal reaches both processes, `kill` only the supervisor, and some job systems signal all
processes of a job. The supervisor forwards a signal if the process has not counted the signal itself a moment later,
and never forwards a signal from a terminal. After the first signal nothing is restarted.

Note: no orphans. The system kills the process when its supervisor ends, for whatever reason (PR_SET_PDEATHSIG).
"""

import atexit
import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from hydra_tune.errors import TrialCrashedError
from hydra_tune.interrupts import SIGNALS
from hydra_tune.supervision.marks import TrialMarkTable

MOST_CRASHES = 2
"""Most crashes of a trial, and of a process that crashes while no trial runs."""

_FAILED = 1
# Time for a process to count a signal that was sent to it as well.
_GRACE_SECONDS = 0.2
_NUM_FRAMES = 3
_NUM_NAMED = 3
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# SI_KERNEL in `si_code`: the signal comes from a terminal, which signals all processes of the group itself.
_FROM_KERNEL = 0x80
_WAITED_FOR = {*SIGNALS, signal.SIGCHLD}


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartContext:
    """Facts about earlier processes, given to a new process.

    Attributes:
        aside: trials that must not run any more, with the error for each.
        said: messages about the crashes.
        parent: process id of the supervisor.
    """

    crashes: int = 0
    aside: Mapping[str, TrialCrashedError] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    parent: int = 0


@dataclass(slots=True, kw_only=True)
class CrashHistory:
    """Record of crashes."""

    counts: Counter[str] = field(default_factory=Counter)
    aside: dict[str, TrialCrashedError] = field(default_factory=dict)
    suspects: set[str] = field(default_factory=set)
    crashes: int = 0
    said: list[str] = field(default_factory=list)
    is_hopeless: bool = False
    # Crashes in a row while no trial was at work.
    blank: int = 0

    def note(self, marked: Mapping[int, str], how: str, dump: str) -> str:
        """Record a crash, and return the message about the crash.

        `marked` has the trials at work, by thread; `how` is the way in which the process ended, in words; `dump` is
        faulthandler's, or empty.
        """
        self.crashes += 1
        self.blank = 0 if marked else self.blank + 1
        self.is_hopeless = self.blank >= MOST_CRASHES
        frames = _frames(dump)
        where = f"; it was in {frames}" if frames else ""
        names = sorted(set(marked.values()))
        thread = _faulting_thread(dump)
        culprit = marked.get(thread)
        # A thread that is marked for no trial may be a helper of the marked one, or have nothing to do with any trial. So the
        # first such fault blames nobody, and a second while the same trial runs alone blames that trial.
        if culprit is None and len(names) == 1 and (not thread or names[0] in self.suspects):
            culprit = names[0]
        if culprit is None:
            self.suspects.update(names)
            if not names:
                return f"the pool's process was ended by {how}, while no trial was at work{where}"
            work = "were at work; they run one at a time now" if len(names) > 1 else "was at work; it runs alone now"
            return f"the pool's process was ended by {how} while {', '.join(names)} {work}{where}"
        self.counts[culprit] += 1
        self.is_hopeless = culprit in self.aside
        message = f"the pool's process was ended by {how} while {culprit} was at work{where}"
        if self.counts[culprit] < MOST_CRASHES:
            return message
        self.aside[culprit] = TrialCrashedError(culprit, self.counts[culprit], f"{how}{where}")
        return f"{message}, as before; it is set aside"


def supervise(run: Callable[[RestartContext], int], say: Callable[[str], None], *, passes_signals: bool = True) -> int:
    """Run a function in a separate process, again after each crash, until the process ends in order.

    Call this in the main thread of a process without other threads and without CUDA in use.

    Args:
        run: called in the process; returns its exit code.
        say: called with a message about each crash, in the supervisor.
        passes_signals: whether SIGINT and SIGTERM are for the process; otherwise the process and the supervisor ignore
            both.

    Returns:
        The exit code of the process, or the code of a fatal signal; 1 after `MOST_CRASHES` crashes in a row while no
        trial was at work, or after a crash by a trial already set aside.
    """
    history, earlier_children = CrashHistory(), set(psutil.Process().children())
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Blocked, so that `sigwaitinfo` receives the signals and none is lost between two waits.
    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    try:
        while True:
            marks = TrialMarkTable()
            with tempfile.TemporaryFile() as dump:
                start = RestartContext(
                    crashes=history.crashes,
                    aside=dict(history.aside),
                    said=tuple(history.said),
                    parent=os.getpid(),
                )
                suspects = history.suspects - history.aside.keys()
                process = _begin(run, start, marks, suspects, dump, mask_before if passes_signals else None)
                first_signal = _wait(process, marks, passes_signals=passes_signals)
                # The marks are read before `close` unmaps their memory.
                code, ended, marked, why = process.exitcode, marks.ended, marks.marked(), marks.why
                process.close()
                marks.close()
                assert code is not None
                if ended is not None:
                    return ended
                if first_signal is not None:
                    return 128 - code if code < 0 else code
                # A process that has given a reason may still crash as it ends, in a thread that is not to blame.
                dump.seek(0, os.SEEK_END if why else os.SEEK_SET)
                # Workers of the crashed process would keep its file locks from the next process.
                _end_orphans(earlier_children)
                history.said.append(history.note(marked, why or ended_by(code), dump.read().decode(errors="replace")))
                say(history.said[-1])
            if history.is_hopeless:
                say(
                    "the process is not restarted, because it crashes whichever trials are set aside; its output says more"
                )
                return _FAILED
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)


def _begin(
    run: Callable[[RestartContext], int],
    start: RestartContext,
    marks: TrialMarkTable,
    suspects: set[str],
    dump: IO[bytes],
    mask: set[signal.Signals] | set[int] | None,
) -> multiprocessing.process.BaseProcess:
    def body() -> None:
        """Run the program in the forked process, note the exit code in the marks, and exit with that code."""
        dies_with(start.parent)
        if mask is None:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask or set())
        atexit._clear()  # noqa: SLF001 - those of the supervisor's program are for that to run
        faulthandler.enable(dump)
        marks.begin(suspects)
        code = _FAILED
        try:
            code = run(start)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else _FAILED
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except BaseException:  # noqa: BLE001 - it ends the process, as it would without a supervisor
            traceback.print_exc()
        marks.end(code)
        atexit._run_exitfuncs()  # noqa: SLF001 - which multiprocessing leaves out
        sys.exit(code)

    process = multiprocessing.get_context("fork").Process(target=body, name="hydra-pool")
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, and counts those of native libraries.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def numbered(path: Path | None, crashes: int) -> Path | None:
    """Return a file name for a process after earlier crashes: `log.jsonl`, then `log-2.jsonl`."""
    return path if path is None or not crashes else path.with_stem(f"{path.stem}-{crashes + 1}")


def why_not_here() -> str | None:
    """Explain why a copy of this process would not be sound; None for a sound copy.

    Returns:
        The end of a sentence, with a remedy.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return "the supervisor needs Linux"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return (
            "CUDA is in use in this process, and cannot be used in a copy of it; begin before anything is put on a GPU"
        )
    busy = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    if busy:
        return f"this process runs other threads ({', '.join(busy[:_NUM_NAMED])}), of which a copy has none; end them before"
    return None


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_orphans(own: set[psutil.Process]) -> None:
    """Kill child processes of the crashed process, such as workers of loaders: living children keep their files locked."""
    for child in set(psutil.Process().children()) - own:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
            child.wait()


def dies_with(parent: int) -> None:
    """Make the system kill this process at the end of the starting thread; `parent` is the process of the thread."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the request, and then no signal ever comes.
    if os.getppid() != parent:
        os._exit(_FAILED)


def _wait(process: multiprocessing.process.BaseProcess, marks: TrialMarkTable, *, passes_signals: bool) -> int | None:
    """Wait for the end of the process; return the first signal meant for the process."""
    first, count = None, 0
    while process.exitcode is None:
        received = signal.sigwaitinfo(_WAITED_FOR)
        if received.si_signo not in SIGNALS or not passes_signals:
            continue
        # A blocked signal comes here also if this process ignores it, as a shell's background jobs ignore Ctrl-C.
        if signal.getsignal(received.si_signo) == signal.SIG_IGN:
            continue
        first, count = first or received.si_signo, count + 1
        if received.si_code == _FROM_KERNEL:
            continue
        process.join(_GRACE_SECONDS)
        if marks.num_heard < count and process.exitcode is None and process.pid is not None:
            os.kill(process.pid, received.si_signo)
    return first


def ended_by(code: int) -> str:
    """Describe how a process has ended, from its exit code."""
    if code >= 0:
        return f"exit code {code}, out of order (os._exit, or a library's exit)"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"signal {-code}"
    hint = " (sent by somebody, or by the system where memory has run out)" if number == signal.SIGKILL else ""
    return f"{number.name}{hint}"


def _faulting_thread(dump: str) -> int:
    """Return the thread of the fault in faulthandler's dump; 0 if unknown."""
    match = re.search(r"^Current thread 0x([0-9a-f]+)", dump, re.MULTILINE)
    return 0 if match is None else int(match[1], 16)


def _frames(dump: str) -> str:
    """Return the location of a fault: the innermost frames of its thread."""
    stack = dump.partition("Current thread ")[2].partition("\n\n")[0]
    frames = re.findall(r'^  File "([^"]+)", line (\d+) in (.+)$', stack, re.MULTILINE)
    return ", called by ".join(f"{name} ({path}:{line})" for path, line, name in frames[:_NUM_FRAMES])
