"""Transfer of a loader's parts, such as the dataset, to worker processes in the present state.

`ready` (`loader_workers.py`) packs the parts of a loader before training and before workers start. Pickling a
`LoaderWorkerPayload` for a starting worker sends the part, and the worker unpacks the part as the worker reads the pickle.
The module must not know models, steps or the pool's devices.

Note: large data, from a mebibyte on. Plain CPU tensors move to shared memory once, the program's own tensors included. Numpy
arrays are copied to a file in memory each time workers start. Each worker maps both privately: a write by a worker changes
neither the program's data nor another worker's data, as after a fork. Tensors in memory that the program itself shares, such as
a cache for all workers, stay shared. An array mapped from a file is mapped again in the worker.

Note: forks by the program. A tensor never leaves shared memory again, so workers that the program forks later write
into the program's tensor.

Note: locks. `packed` takes the capture gate (`GATE.exclusive`) for a move to shared memory, so no caller may hold the gate.
"""

import io
import mmap
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from hydra_tune.errors import TaskError
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.train.data.worker_server import LoaderForkServer, has_main_file

# Parts of torch without types.
_sharing: Any = reductions

# From this size on, data is shared with the workers. Smaller data is sent, because each shared tensor takes a descriptor.
_SHARED_BYTES = 1 << 20

# Strategy of sharing (`torch.multiprocessing`) by storage, for the storages that moved to shared memory here.
_MOVED: dict[Any, str] = {}

# In a worker: the storages that the worker maps.
_MAPPED: set[Any] = set()

_HAS_MEMORY_FILES = hasattr(os, "memfd_create")


class LoaderWorkerPayload:
    """An object ready to be sent: pickled once for all workers of a pass, with large data beside the pickle.

    Args:
        pickled: everything but large data.
        tensors: large tensors, in shared memory.
        buffers: buffers of arrays, copied when the first worker is started.
    """

    def __init__(self, pickled: bytes, tensors: list[Tensor], buffers: list[pickle.PickleBuffer]) -> None:
        self._pickled, self._tensors, self._buffers = pickled, tensors, buffers
        self._file: _MemoryFile | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the pickle, which each worker is sent."""
        return len(self._pickled)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        tensors, maps = _sent(self._tensors)
        if not self._buffers:
            return _unpack, (self._pickled, tensors, maps, None, ())
        if self._file is None:
            self._file = _MemoryFile(self._buffers)
        return _unpack, (self._pickled, tensors, maps, reduction.DupFd(self._file.number), self._file.spans)


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
        """Return the number of a large dense CPU tensor, to be sent in shared memory; None for values to pickle."""
        if (
            type(value) is not Tensor
            or value.layout is not torch.strided
            or value.is_nested
            # Conjugates and negatives that torch computes at the next read: the bytes alone are other numbers.
            or value.is_conj()
            or value.is_neg()
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


@dataclass(frozen=True, slots=True)
class _TensorPlace:
    """A tensor as a view of a storage, given by the storage's number."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, storages: list[torch.UntypedStorage]) -> Tensor:
        """Return the tensor."""
        return torch.empty(0, dtype=self.dtype).set_(storages[self.storage], self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _StorageMap:
    """A storage in shared memory, given by a descriptor or by a name, to be mapped privately."""

    file: Any
    nbytes: int

    def storage(self) -> torch.UntypedStorage:
        """Map the storage."""
        number = None if isinstance(self.file, str) else self.file.detach()
        path = f"/proc/self/fd/{number}" if number is not None else f"/dev/shm{self.file}"  # noqa: S108 - as torch names it
        # A file with a name begins with a count of its users.
        start = Path(path).stat().st_size - self.nbytes
        mapped = torch.UntypedStorage.from_file(path, shared=False, nbytes=start + self.nbytes)
        if number is not None:
            os.close(number)
        storage: Any = mapped[start:]
        _MAPPED.add(_sharing.StorageWeakRef(storage))
        reduction.ForkingPickler.register(Tensor, _reduced)
        return cast("torch.UntypedStorage", storage)


def _reduced(tensor: Tensor) -> Any:
    """Return how a worker sends a tensor: a view of mapped memory as a copy, because torch would copy all of the memory."""
    is_plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.requires_grad
    if is_plain and tensor.device.type == "cpu" and tensor.numel():
        storage = tensor.untyped_storage()
        if _sharing.StorageWeakRef(storage) in _MAPPED:
            span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            flat = torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), (span,), (1,)).clone()
            tensor = flat.as_strided(tensor.shape, tensor.stride())
    return _sharing.reduce_tensor(tensor)


def _sent(tensors: list[Tensor]) -> tuple[list[Tensor | _TensorPlace], list[_StorageMap]]:
    """Return how a worker gets tensors in shared memory, and the storages that the worker maps."""
    places: list[Tensor | _TensorPlace] = []
    maps: list[_StorageMap] = []
    numbers: dict[Any, int] = {}
    for tensor in tensors:
        storage: Any = tensor.untyped_storage()
        key = _sharing.StorageWeakRef(storage)
        strategy = _MOVED.get(key)
        if strategy is None:
            # The program shares the tensor, and may read its workers' writes.
            places.append(tensor)
            continue
        if key not in numbers:
            numbers[key] = len(maps)
            is_named = strategy == "file_system"
            file = (
                storage._share_filename_cpu_()[1].decode() if is_named else reduction.DupFd(storage._share_fd_cpu_()[0])
            )
            maps.append(_StorageMap(file, storage.nbytes()))
        places.append(
            _TensorPlace(numbers[key], tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
        )
    return places, maps


def _unpack(
    pickled: bytes,
    tensors: list[Tensor | _TensorPlace],
    maps: list[_StorageMap],
    sent: Any,
    spans: list[tuple[int, int]],
) -> object:
    buffers: list[memoryview] = []
    if sent is not None:
        number = sent.detach()
        mapped = memoryview(mmap.mmap(number, 0, access=mmap.ACCESS_COPY))
        os.close(number)
        buffers = [mapped[start : start + size] for start, size in spans]
    storages = [storage_map.storage() for storage_map in maps]
    found = [place.view(storages) if isinstance(place, _TensorPlace) else place for place in tensors]
    return _PayloadUnpickler(pickled, found, buffers).load()


def _mapped_again(value: Any) -> Any:
    """Return how a worker maps a memory-mapped array; `NotImplemented` for other values, or if the file may lack the array."""
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
    """Prepare a part of a loader for workers, which `server` forks, or which start by `method`.

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
        for key in list(_MOVED):
            if key.expired():
                del _MOVED[key]
        ranges = _shared_ranges()
        strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
        for storage in storages:
            address = storage.data_ptr()
            if not storage.is_shared() and not any(start <= address < end for start, end in ranges):
                # Before the move: another thread asks without the gate whether the storage is shared.
                _MOVED[_sharing.StorageWeakRef(storage)] = strategy
            storage.share_memory_()


def _shared_ranges() -> list[tuple[int, int]]:
    """Return the addresses of memory that this process shares with others, such as a `multiprocessing.Array`."""
    ranges = []
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        addresses, rights = line.split(maxsplit=2)[:2]
        if rights.endswith("s"):
            start, end = addresses.split("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges
