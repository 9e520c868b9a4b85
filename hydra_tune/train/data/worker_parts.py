"""Transfer of a loader's parts, such as the dataset, to worker processes in the present state.

`ready` (`loader_workers.py`) packs the parts of a loader before the workers of a pass start.

Note: large data. Tensors move to shared memory once, the program's own tensors included, and all workers map the same
memory: a write by a worker changes the program's tensor and every other worker's tensor. Numpy arrays are copied once
per pass to a file in memory, which each worker maps privately: a write by a worker changes no other worker's array, as
after a fork. An array mapped from a file is mapped again in the worker.
"""

import io
import mmap
import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing import reduction
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import Tensor

from hydra_tune.errors import TaskError
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.train.data.worker_server import LoaderForkServer, has_main_file

# From this size on, data is shared with the workers. Smaller data is sent, because each shared tensor takes a descriptor.
_SHARED_BYTES = 1 << 20

_HAS_MEMORY_FILES = hasattr(os, "memfd_create")


class LoaderWorkerPayload:
    """An object ready to be sent: pickled once for all workers of a pass, with large data beside the pickle.

    Args:
        pickled: everything but large data.
        tensors: tensors in shared memory.
        buffers: buffers of arrays, copied when the first worker is started.
    """

    def __init__(self, pickled: bytes, tensors: list[Tensor], buffers: list[pickle.PickleBuffer]) -> None:
        self._pickled, self._tensors, self._buffers = pickled, tensors, buffers
        self._file: _MemoryFile | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes sent to each worker."""
        return len(self._pickled)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        if not self._buffers:
            return _unpack, (self._pickled, self._tensors, None, ())
        if self._file is None:
            self._file = _MemoryFile(self._buffers)
        return _unpack, (self._pickled, self._tensors, reduction.DupFd(self._file.number), self._file.spans)


class _MemoryFile:
    """Consecutive buffers in an unnamed file; the file lives as long as the object or any mapping of the file."""

    def __init__(self, buffers: list[pickle.PickleBuffer]) -> None:
        self.number = os.memfd_create("hydra-data")
        self.spans: list[tuple[int, int]] = []
        end = 0
        for buffer in buffers:
            data = buffer.raw()
            self.spans.append((end, data.nbytes))
            num_written = 0
            while num_written < data.nbytes:
                num_written += os.pwrite(self.number, data[num_written:], end + num_written)
            # Each buffer starts on a page, so arrays keep the alignment of a fresh allocation.
            end += -(-data.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def __del__(self) -> None:
        os.close(self.number)


class _PayloadPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor], names: dict[str, object] | None) -> None:
        callback = self._is_sent if _HAS_MEMORY_FILES else None
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=callback)
        self.buffers: list[pickle.PickleBuffer] = []
        self._tensors = tensors
        self._names = names

    def _is_sent(self, buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < _SHARED_BYTES:
            return True
        self.buffers.append(buffer)
        return False

    def persistent_id(self, value: object) -> int | None:
        """Return the number of a large plain CPU tensor, to be sent in shared memory; None for values to pickle."""
        if (
            type(value) is not Tensor
            or value.device.type != "cpu"
            or value.requires_grad
            or value.nbytes < _SHARED_BYTES
        ):
            return None
        self._tensors.append(value)
        return len(self._tensors) - 1

    def reducer_override(self, value: object) -> Any:
        """Pickle maps of files as maps, and refuse names of `__main__` that a worker cannot import.

        Raises:
            PicklingError: the value was defined in a session, or after the workers had read the program.
        """
        # A worker imports every other module by its name; only `__main__` may be another module there.
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            name = value.__qualname__.partition(".")[0]
            if self._names is None and not has_main_file():
                raise pickle.PicklingError(
                    f"{value.__qualname__} was defined in a session, which a worker cannot import"
                )
            present_object = vars(sys.modules["__main__"]).get(name)
            if self._names is not None and present_object is not None and self._names.get(name) is not present_object:
                raise pickle.PicklingError(
                    f"{value.__qualname__} was defined after the executor got its first task with workers, and the workers "
                    "know the program as it was then; define it before that task, or make a new HydraExecutor"
                )
        return _mapped_again(value)


class _PayloadUnpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensors: list[Tensor], buffers: list[memoryview]) -> None:
        super().__init__(io.BytesIO(pickled), buffers=buffers)
        self._tensors = tensors

    def persistent_load(self, index: int) -> Tensor:
        return self._tensors[index]


def _unpack(pickled: bytes, tensors: list[Tensor], sent: Any, spans: list[tuple[int, int]]) -> object:
    buffers: list[memoryview] = []
    if sent is not None:
        number = sent.detach()
        mapped = memoryview(mmap.mmap(number, 0, access=mmap.ACCESS_COPY))
        os.close(number)
        buffers = [mapped[start : start + size] for start, size in spans]
    return _PayloadUnpickler(pickled, tensors, buffers).load()


def _mapped_again(value: Any) -> Any:
    """Return how a worker maps the file of a memory-mapped array; `NotImplemented` if the file may not hold the array."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.memmap or value.mode not in ("r", "r+", "w+"):
        return NotImplemented
    memory_map, path = value._mmap, value.filename  # noqa: SLF001 - numpy has no public name
    if (
        path is None
        or not isinstance(memory_map, mmap.mmap)
        or not value.flags.c_contiguous
        or not Path(path).is_file()
    ):
        return NotImplemented
    base_address = numpy.frombuffer(memory_map, numpy.uint8).ctypes.data
    start = value.offset - value.offset % mmap.ALLOCATIONGRANULARITY + value.ctypes.data - base_address
    # The file may have been truncated or replaced since.
    if Path(path).stat().st_size < start + value.nbytes:
        return NotImplemented
    mode = "r" if value.mode == "r" else "r+"
    return numpy.memmap, (path, value.dtype, mode, start, value.shape)


def packed(name: str, part: object, method: str, server: LoaderForkServer | None) -> object:
    """Prepare a part of a loader for workers.

    Args:
        name: name of the part.
        part: any object.
        method: start method of the workers.
        server: server that forks the workers, if any.

    Returns:
        A `LoaderWorkerPayload`, or the part itself if only a starting process may receive the part.

    Raises:
        TaskError: the part cannot be pickled, or a worker could not find an object that the part refers to.
    """
    tensors: list[Tensor] = []
    file = io.BytesIO()
    packer = _PayloadPickler(file, tensors, None if server is None else server.names)
    try:
        packer.dump(part)
        _share(tensors)
    except Exception as error:
        if isinstance(error, RuntimeError) and "through inheritance" in str(error):
            # A lock or a shared value of multiprocessing, which only a starting process may receive.
            return part
        label = getattr(part, "__qualname__", type(part).__qualname__)
        origin = f"started by {method}" if server is None else "forked by a process of their own"
        raise TaskError(
            f"{name}={label} of a DataLoader with num_workers > 0 cannot be sent to its workers: {error}. The workers are "
            f"{origin} and get pickled copies, because forking a process that runs threads may hang; define classes and "
            "functions at the top of a module, use num_workers=0, or take the risk with multiprocessing_context='fork'"
        ) from error
    return LoaderWorkerPayload(file.getvalue(), tensors, packer.buffers)


def _share(tensors: list[Tensor]) -> None:
    storages: list[Any] = [tensor.untyped_storage() for tensor in tensors]
    if all(storage.is_shared() for storage in storages):
        return
    # Moving a storage to shared memory frees the old memory, and another trial may be reading there.
    with GATE.exclusive():
        for storage in storages:
            storage.share_memory_()
