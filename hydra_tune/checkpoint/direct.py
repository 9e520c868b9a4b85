"""Files written past the page cache: kept files are not read soon, and copying to the cache costs most CPU time.

`save_tensors` (`tensors.py`) writes the header and all tensors through `written_directly`. Where the system or the file
system refuses direct writes, the bytes go through the page cache. The module does not flush the file to the disk, and must
not know models, the pool or a tuner. A writer has no lock, and belongs to one thread.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from typing import BinaryIO

_ALIGNMENT = 4096
_BUFFER_BYTES = 8 * 2**20
_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectWriter:
    """Writes to an open, empty file, to which nothing else may write meanwhile, through one aligned buffer."""

    def __init__(self, file: BinaryIO) -> None:
        self._descriptor = file.fileno()
        # Whole pages, aligned as O_DIRECT requires.
        self._view = memoryview(mmap.mmap(-1, _BUFFER_BYTES))
        self._filled = 0
        self._offset = 0
        self._is_direct = self._set_direct(wanted=True)

    def write(self, piece: bytes | memoryview) -> None:
        """Append bytes."""
        remaining = memoryview(piece).cast("B")
        while remaining.nbytes:
            count = min(remaining.nbytes, _BUFFER_BYTES - self._filled)
            self._view[self._filled : self._filled + count] = remaining[:count]
            self._filled += count
            remaining = remaining[count:]
            if self._filled == _BUFFER_BYTES:
                self._put(_BUFFER_BYTES)

    def finish(self) -> None:
        """Write the rest; the file then has exactly the given bytes."""
        size = self._offset + self._filled
        if self._filled:
            self._put(-(-self._filled // _ALIGNMENT) * _ALIGNMENT)
        # A direct write must cover whole blocks, so the last write runs past the end.
        os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        """Switch direct writing off; the file stays open."""
        self._set_direct(wanted=False)

    def _put(self, count: int) -> None:
        num_written = 0
        while num_written < count:
            try:
                num_written += os.pwrite(self._descriptor, self._view[num_written:count], self._offset + num_written)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                # Some file systems accept the flag and then refuse the write, so the write is repeated through the
                # cache.
                self._is_direct = self._set_direct(wanted=False)
        self._offset += count
        self._filled = 0

    def _set_direct(self, *, wanted: bool) -> bool:
        """Return whether later writes bypass the page cache."""
        if not _DIRECT:
            return False
        with contextlib.suppress(OSError):
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | _DIRECT if wanted else flags & ~_DIRECT)
            return wanted
        return False


@contextlib.contextmanager
def written_directly(file: BinaryIO) -> Iterator[DirectWriter]:
    """Open a writer on an open, empty file; all given bytes are in the file when the block ends without an error.

    Raises:
        OSError: the system refuses.
    """
    writer = DirectWriter(file)
    try:
        yield writer
        writer.finish()
    finally:
        writer.close()
