"""Writing that fails: every call that changes files is counted, and a chosen one is refused with an errno of choice.

Patched are the calls of the system themselves, as Python's modules find them, and nothing of hydra-tune. Only what concerns a
chosen folder counts.
"""

import builtins
import io
import os
import threading
from contextlib import contextmanager
from pathlib import Path

_BY_PATH = ("mkdir", "replace", "link", "rename", "symlink")
_BY_DESCRIPTOR = ("write", "pwrite", "fsync", "fdatasync", "ftruncate", "posix_fallocate")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class FailingWrites:
    """Refuses one call, or all calls from one on.

    Args:
        folder: what lies below it counts.
        ending: how paths end that count.

    Attributes:
        calls: what has been counted since `arm`, as "NAME PATH".
        refused: those of them that were refused.
    """

    def __init__(self, folder, ending=""):
        self.folder, self.ending = str(folder), ending
        self._lock = threading.Lock()
        self.arm(None, 0)

    def arm(self, call, errno, *, lasting=False):
        """Refuse the call of this number, from 0, counted from now on; with `lasting`, all after it as well. None: none."""
        with self._lock:
            self._call, self._errno, self._lasting = call, errno, lasting
            self.calls, self.refused = [], []

    def seen(self, name, path):
        """A call is made."""
        if not (path.startswith(self.folder) and path.endswith(self.ending)):
            return
        with self._lock:
            number = len(self.calls)
            self.calls.append(f"{name} {path}")
            if self._call is None or not (number == self._call or (self._lasting and number > self._call)):
                return
            self.refused.append(self.calls[-1])
        raise OSError(self._errno, os.strerror(self._errno), path)

    @contextmanager
    def patched(self, monkeypatch):
        """Count and refuse inside."""
        with monkeypatch.context() as patch:
            for name in _BY_PATH:
                patch.setattr(os, name, self._by_path(name, getattr(os, name)))
            for name in _BY_DESCRIPTOR:
                if hasattr(os, name):
                    patch.setattr(os, name, self._by_descriptor(name, getattr(os, name)))
            patch.setattr(os, "open", self._opening(os.open))
            patch.setattr(os, "fdopen", self._wrapping(os.fdopen))
            patch.setattr(io, "open", self._opening_file(io.open))
            patch.setattr(builtins, "open", io.open)
            yield self

    def _by_path(self, name, call):
        def checked(path, *arguments, **named):
            target = arguments[0] if arguments and isinstance(arguments[0], str | Path) else path
            self.seen(name, os.fspath(target))
            return call(path, *arguments, **named)

        return checked

    def _by_descriptor(self, name, call):
        def checked(descriptor, *arguments, **named):
            self.seen(name, path_of(descriptor))
            return call(descriptor, *arguments, **named)

        return checked

    def _opening(self, call):
        def checked(path, flags, *arguments, **named):
            if flags & _WRITING and isinstance(path, str | Path):
                folder = "" if named.get("dir_fd") is None else path_of(named["dir_fd"])
                self.seen("open", os.path.join(folder, os.fspath(path)))  # noqa: PTH118
            return call(path, flags, *arguments, **named)

        return checked

    def _wrapping(self, call):
        def checked(descriptor, mode="r", *arguments, **named):
            if mode != "wb":
                return call(descriptor, mode, *arguments, **named)
            return io.BufferedWriter(_File(self, descriptor, mode))

        return checked

    def _opening_file(self, call):
        def checked(path, mode="r", *arguments, **named):
            if isinstance(path, str | Path) and set(mode) & set("wax+"):
                self.seen("open", os.fspath(path))
            return call(path, mode, *arguments, **named)

        return checked


class _File(io.FileIO):
    def __init__(self, writes, descriptor, mode):
        super().__init__(descriptor, mode)
        self._writes = writes

    def write(self, data):
        self._writes.seen("write", path_of(self.fileno()))
        return super().write(data)


def path_of(descriptor):
    """The file that a descriptor is of."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
    except OSError:
        return ""
