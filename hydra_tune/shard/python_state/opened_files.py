"""`noting_files`: the files and folders that a step's Python opens or asks for, and `FileHolder`, which sees their changes.

A graph repeats for ever what the step has read from a file during its capture. `capture` (`shard/capture/step_capture.py`)
notes the files. `PlanLibrary` (`shard/partition/plan_cache.py`) looks at the files before a plan serves a further trial.
`train/loop/plan_cache.py` and `fusion/group/member.py` add the files' holders to the guard of each trial that uses the plan,
by `PythonStateGuard.watch`. The module must not write a file.

Note: threads. The functions are replaced for the whole process, and note the calls of the capture's thread alone. So
files that another thread, another process, or the C++ code of an extension module reads remain unseen, and so do calls
of a function that a module of the user's has imported by name (`from io import open`). One thread at a time may be
inside `noting_files`.
"""

import builtins
import hashlib
import io
import os
import stat
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from hydra_tune.errors import CaptureError
from hydra_tune.shard.python_state.value_holder import ValueHolder

_MAX_BYTES = 1 << 20  # of a file whose contents are compared
_MAX_FILES = 256  # that a step reads
_SETTLED_NS = 2_000_000_000  # the coarsest clock of a file system in use has steps of two seconds
_OF_PROGRAMS = (".py", ".pyc", ".so")
_OF_SYSTEM = ("/proc/", "/sys/", "/dev/")
_INSTALLED = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib")})
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_OF_CAPTURES = ("torch._", "torch.export", "torch.fx")
_STATUS, _OPEN = os.stat, builtins.open

# Replaced functions: where code looks each up, its name, and whether its second argument tells reading from writing.
_FUNCTIONS: tuple[tuple[Any, str, bool], ...] = (
    (builtins, "open", True),
    (io, "open", True),
    (os, "open", True),
    (os, "stat", False),
    (os, "lstat", False),
    (os, "access", False),
    (os, "listdir", False),
    (os, "scandir", False),
)


class FileHolder(ValueHolder):
    """A file or a folder as a place that holds values: its status, and the contents of a small file.

    Args:
        path: an absolute path; there may be nothing.
    """

    __slots__ = ("_digest", "_is_settled", "_path")

    def __init__(self, path: str) -> None:
        self._path = path
        super().__init__([f"the file {path!r}"], lambda: [_status_of(path)])
        # After the status: where a write falls in between, the next look sees another status, and compares the contents.
        self._digest = _digest_of(path, self.noted[0])
        self._is_settled = _is_settled(self.noted[0])

    def _changed(self, *, ignores_tensors: bool) -> str | None:
        del ignores_tensors
        status = _status_of(self._path)
        if status == self.noted[0] and (self._is_settled or self._digest is None):
            return None
        is_settled = _is_settled(status)
        if self._digest is None or _digest_of(self._path, status) != self._digest:
            return self.labels[0]
        self.noted, self._is_settled = [status], is_settled
        return None


def _is_settled(status: tuple[int, ...] | None) -> bool:
    """Whether a further write would change the status, whose times advance in steps."""
    return status is None or abs(time.time_ns() - status[0]) > _SETTLED_NS


def _status_of(path: str) -> tuple[int, ...] | None:
    """Return what a write changes; None if there is nothing to read."""
    try:
        status = _STATUS(path)
    except (OSError, ValueError):
        return None
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_mode)


def _digest_of(path: str, status: tuple[int, ...] | None) -> bytes | None:
    """Return a digest of a small file; None for anything else."""
    if status is None or not stat.S_ISREG(status[4]) or status[2] > _MAX_BYTES:
        return None
    try:
        with _OPEN(path, "rb") as file:
            return hashlib.sha256(file.read()).digest()
    except OSError:
        return None


@contextmanager
def noting_files(noted: dict[str, FileHolder]) -> Iterator[None]:
    """Context in which `noted` receives a holder for each file and folder that the thread's Python is about to read.

    Files of installed packages and of the system, code files (`_OF_PROGRAMS`), and files that are only written are left
    out, and so is all that torch's compiler asks for.

    Raises:
        CaptureError: code in the context has read too many files to look at them before each step.
    """
    thread = threading.get_ident()
    is_open = True

    def note(path: object) -> None:
        if is_open and threading.get_ident() == thread and len(noted) <= _MAX_FILES:
            name = _name_of(path)
            if name is not None and name not in noted:
                noted[name] = FileHolder(name)

    originals = [(space, name, getattr(space, name)) for space, name, _ in _FUNCTIONS]
    try:
        for (space, name, original), (*_, has_mode) in zip(originals, _FUNCTIONS, strict=True):
            setattr(space, name, _noting(original, note, has_mode=has_mode))
        yield
    finally:
        is_open = False  # a module that was imported meanwhile may hold a replaced function
        for space, name, original in originals:
            setattr(space, name, original)
    if len(noted) > _MAX_FILES:
        raise CaptureError(f"the step reads more than {_MAX_FILES} files, which a graph would not read again")


def _noting(function: Callable[..., Any], note: Callable[[object], None], *, has_mode: bool) -> Callable[..., Any]:
    @wraps(function)
    def noted(*arguments: Any, **keywords: Any) -> Any:
        path = arguments[0] if arguments else keywords.get("file", keywords.get("path", "."))
        how = arguments[1] if len(arguments) > 1 else keywords.get("mode", keywords.get("flags", "r"))
        if (not has_mode or _reads(how)) and not _is_asked_by_capture():
            note(path)
        return function(*arguments, **keywords)

    return noted


def _is_asked_by_capture() -> bool:
    """Whether the code that calls a replaced function belongs to torch's compiler, which looks for its cache in `/tmp`."""
    frame: Any = sys._getframe(2)  # noqa: SLF001 - of the caller of the replaced function
    while frame is not None and _is_standard(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(_OF_CAPTURES)


def _is_standard(filename: str) -> bool:
    """Whether a file of code is the standard library's, below which installed packages may lie."""
    return filename.startswith(("<frozen", _STDLIB)) and "site-packages" not in filename


def _reads(how: object) -> bool:
    """Whether a mode of `open`, or flags of `os.open`, let the file be read."""
    if isinstance(how, int):
        return how & os.O_ACCMODE != os.O_WRONLY
    return isinstance(how, str) and ("r" in how or "+" in how)


def _name_of(path: object) -> str | None:
    """Return an absolute path; None for files of installed packages, of the system or of code, and for open files."""
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    name = str(Path(os.fsdecode(path)).absolute())
    return None if name.startswith((*_OF_SYSTEM, *_INSTALLED)) or name.endswith(_OF_PROGRAMS) else name
