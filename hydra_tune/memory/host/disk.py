"""Blocks on disk: a flat file per block, read and written in large aligned pieces by a separate thread.

`HostTier` (`host_tier.py`) writes a block here when host memory runs short, and reads the block back before the block's
next use. When the tier frees a host copy whose bytes the file holds, a block under long-lived tensors has its file mapped
(`mapped`). `ExecutorSettings` (`pool/runtime/settings.py`) makes the `SpillDisk` of a pool, and `Pool` (`pool/pool.py`) sets
`log`. `read` and `write` wait for the disk's thread, or run at once where the disk's thread itself calls; the caller holds the
lock of the block. The module must not copy to devices.

Note: bypassing the page cache. A spilled block is read again only after the cache would long have evicted the pages;
otherwise the cache would have taken the very memory that spilling was to free. Files are therefore opened with O_DIRECT
if the file system supports O_DIRECT, and the pieces go through a single aligned buffer, as O_DIRECT requires. On other
file systems, written pages are flushed, and the pages of both ways are evicted (`posix_fadvise`), piece by piece.
"""

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from hydra_tune.devices.single_thread import SingleThreadExecutor
from hydra_tune.errors import SpillError
from hydra_tune.memory.host.spill_dir import SpillFolder, file_name
from hydra_tune.observe.event_log.writer import EventLog
from hydra_tune.quantities import format_bytes

T = TypeVar("T")

PIECE_BYTES = 8 * 2**20
ALIGNMENT = 4096  # for offsets, lengths and memory, whatever the block size of the disk
_TOO_SHORT = "the file is shorter than what was written to it"
_DIRECT: int = getattr(os, "O_DIRECT", 0)


class SpillDisk:
    """Files of a pool's blocks.

    Args:
        folder: folder of the files; closed with the disk.

    Attributes:
        log: receives every read and write of a file; None: not logged.
    """

    def __init__(self, folder: SpillFolder) -> None:
        self.folder = folder
        self.log: EventLog | None = None
        self.bytes_read = 0
        self.bytes_written = 0
        self.seconds = 0.0
        self.is_direct = _DIRECT != 0 and _takes_direct(folder)
        self._sizes: dict[int, int] = {}
        self._buffer = mmap.mmap(-1, PIECE_BYTES)
        self._piece = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        # A single thread: `_buffer` has no lock, and requests keep their order.
        self._pool = SingleThreadExecutor("hydra-disk", self._begin)

    @property
    def stored_bytes(self) -> int:
        """Bytes in all files."""
        # Copied first, because other threads may add or remove files meanwhile.
        return sum(list(self._sizes.values()))

    def start(self, function: Callable[[], None]) -> None:
        """Run a function on the disk's thread after earlier requests; do nothing once the disk is being closed."""
        with contextlib.suppress(RuntimeError):
            self._pool.submit(function)

    def write(self, number: int, data: Tensor) -> None:
        """Write a block's bytes, in host memory, to its file; return when done.

        Raises:
            SpillError: the file cannot be written; earlier contents of the file are lost.
        """
        try:
            self._run(lambda: self._transfer("write", number, data))
        except BaseException:
            self.remove(number)  # a partial file is of no use, and other blocks may need the space
            raise
        self.bytes_written += data.numel()

    def read(self, number: int, data: Tensor) -> None:
        """Read a block's bytes from its file; return when done.

        Raises:
            SpillError: the file cannot be read.
        """
        self._run(lambda: self._transfer("read", number, data))
        self.bytes_read += data.numel()

    def mapped(self, number: int, size: int) -> Tensor:
        """Return a block's file as a tensor; reads and writes of the tensor act on the file.

        Raises:
            SpillError: the file cannot be mapped.
        """
        name = file_name(number)
        try:
            descriptor = self.folder.open(name, os.O_RDWR)
            try:
                return _map(descriptor, self.folder.path / name, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._error("map", name, size, error) from error

    def remove(self, number: int) -> None:
        """Remove a block's file, if any."""
        if self._sizes.pop(number, None) is not None:
            with contextlib.suppress(OSError):  # giving memory back must not fail; closing removes the folder
                self.folder.remove(file_name(number))

    def close(self) -> None:
        """End the thread and remove the folder."""
        self._pool.shutdown()
        self.folder.close()

    def _begin(self) -> None:
        # A copy to the buffer is bound by memory, and more threads would take cores from training.
        torch.set_num_threads(1)
        self._thread = threading.current_thread()

    def _run(self, function: Callable[[], T]) -> T:
        # Work ahead already runs on the disk's thread and would deadlock by waiting for a request of its own.
        return function() if threading.current_thread() is self._thread else self._pool.submit(function).result()

    def _transfer(self, what: str, number: int, data: Tensor) -> None:
        start_ns, name, is_done = time.perf_counter_ns(), file_name(number), False
        flags = os.O_RDWR | (_DIRECT if self.is_direct else 0)
        if what == "write":
            flags |= os.O_CREAT
            # Counted before the write, so that `stored_bytes` never leaves out a partial file.
            self._sizes[number] = _aligned(data.numel())
        try:
            descriptor = self.folder.open(name, flags)
            try:
                for offset in range(0, data.numel(), PIECE_BYTES):
                    part = data[offset : offset + PIECE_BYTES]
                    if what == "write":
                        self._write_piece(descriptor, offset, part)
                    else:
                        self._read_piece(descriptor, offset, part)
            finally:
                os.close(descriptor)
            is_done = True
        except OSError as error:
            raise self._error(what, name, data.numel(), error) from error
        finally:
            end_ns = time.perf_counter_ns()
            self.seconds += (end_ns - start_ns) / 1e9
            if self.log is not None:
                self.log.stored(what, data.numel() if is_done else 0, start_ns, end_ns)

    def _write_piece(self, descriptor: int, offset: int, part: Tensor) -> None:
        self._piece[: part.numel()].copy_(part)
        end = _aligned(part.numel())
        written_bytes = 0
        while written_bytes < end:
            written_bytes += os.pwrite(descriptor, memoryview(self._buffer)[written_bytes:end], offset + written_bytes)
        if not self.is_direct:
            # Flushed first: `posix_fadvise` evicts only clean pages.
            os.fdatasync(descriptor)
            _forget_pages(descriptor, offset, end)

    def _read_piece(self, descriptor: int, offset: int, part: Tensor) -> None:
        end = _aligned(part.numel())
        read_bytes = 0
        while read_bytes < end:
            count = os.preadv(descriptor, [memoryview(self._buffer)[read_bytes:end]], offset + read_bytes)
            if count == 0:
                raise OSError(0, _TOO_SHORT)
            read_bytes += count
        part.copy_(self._piece[: part.numel()])
        if not self.is_direct:
            _forget_pages(descriptor, offset, end)

    def _error(self, what: str, name: str, size: int, error: OSError) -> SpillError:
        path = self.folder.path / name
        return SpillError(
            f"cannot {what} {format_bytes(size)} {'from' if what == 'read' else 'to'} {str(path)!r}: [Errno {error.errno}] "
            f"{error.strerror}; make room there, give another spill_dir, or raise host_memory",
            path=str(path),
            errno=error.errno,
        )


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _map(descriptor: int, path: Path, size: int) -> Tensor:
    """Return an open file as a tensor.

    Torch's mapping, unlike a mapping of `mmap`, keeps no file handle, which matters because there may be a mapping for each
    block on disk.
    """
    if os.fstat(descriptor).st_size < size:
        raise OSError(0, _TOO_SHORT)
    # Torch opens the file again, and the file's name might lead to another file by now.
    link = Path(f"/proc/self/fd/{descriptor}")
    try:
        # At least a byte, because the system refuses empty mappings.
        return torch.from_file(str(link if link.exists() else path), shared=True, size=max(size, 1), dtype=torch.uint8)[
            :size
        ]
    except RuntimeError as error:
        raise OSError(0, str(error)) from error


def _forget_pages(descriptor: int, offset: int, size: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)


def _takes_direct(folder: SpillFolder) -> bool:
    """Whether the file system supports O_DIRECT, found by trying."""
    name = file_name(0)
    probe = mmap.mmap(-1, ALIGNMENT)
    try:
        descriptor = folder.open(name, os.O_RDWR | os.O_CREAT | _DIRECT)
        try:
            os.pwrite(descriptor, probe, 0)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    finally:
        folder.remove(name)
        probe.close()
    return True
