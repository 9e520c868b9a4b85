"""Tensors of several trials in one file of host memory, mapped privately for each user.

`SharedModule` (`train/shared_module.py`) puts the tensors of a base model into a `SharedFile` and gives each trial a
mapping of its own. All mappings show the same pages until a user writes: the system then gives the writer a page of its
own (copy on write), so no user ever sees another user's write, whichever way the write took. `SharedTensors`
(`train/state/shared_state.py`) asks `shared_source` which tensors of a trial are still the file's, and checkpoints
(`train/checkpoint/trial_checkpoint.py`) have a digest in place of such a tensor. `HostTier` (`memory/host/host_tier.py`) and
`pool/devices/host_admission.py` count each file once, and `shard/partition/trial_step.py` asks `shown_again` for frozen
parameters that show the same file. The module knows no models and no devices.

Note: the file itself. Only the constructor writes to the file's own pages; every later mapping must be private. A lock of the
module guards the table of mapped tensors.
"""

import contextlib
import ctypes
import hashlib
import itertools
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hydra_tune.errors import HydraTuneError
from hydra_tune.memory.block import TensorSlot, lay_out, whole_storage
from hydra_tune.quantities import format_bytes

_PAGE_BYTES = mmap.PAGESIZE
_ENTRY_BYTES = 8  # of a page in the system's page map
_PAGE_MAP = "/proc/self/pagemap"
# https://docs.kernel.org/admin-guide/mm/pagemap.html: bit 61 is set for a page of the file, 62 and 63 for one that exists.
_FIRST_BIT, _OF_FILE, _EXISTS = 61, 1, 6

_NUMBERS = itertools.count()
_LOCK = threading.Lock()
_SOURCES: "dict[int, tuple[weakref.ref[mmap.mmap], SharedTensor]]" = {}
"""The shared tensor that begins at an address of a mapping, with the mapping."""


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class SharedTensor:
    """A tensor of a file.

    Attributes:
        slot: shape, strides and dtype, at offset 0.
        flat: the bytes, uint8, on the host; never written.
    """

    file: "SharedFile"
    name: str
    slot: TensorSlot
    flat: Tensor
    _digests: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """The digest of the tensor (`digest_of`), computed once."""
        if not self._digests:
            self._digests.append(digest_of(self.slot.view(self.flat)))
        return self._digests[0]


class SharedFile:
    """A file without a name, gone with this object and the last mapping.

    Args:
        tensors: tensors to copy, by name: dense, on the host, and not empty.

    Attributes:
        name: differs between the files of a process.

    Raises:
        HydraTuneError: the host has no room for the file.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.name = f"base {next(_NUMBERS)}"
        # Each tensor begins a page, so that a write to one tensor gives its user no page of another tensor.
        slots, size = lay_out(list(tensors.values()), _PAGE_BYTES)
        self.nbytes = max(size, _PAGE_BYTES)
        self._file = _unnamed_file(self.nbytes)
        weakref.finalize(self, os.close, self._file)
        flat = torch.frombuffer(mmap.mmap(self._file, self.nbytes), dtype=torch.uint8)
        for slot, tensor in zip(slots, tensors.values(), strict=True):
            slot.view(flat).copy_(tensor.detach())
        self._places = {
            name: (slot.offset * slot.dtype.itemsize, tensor.numel() * slot.dtype.itemsize)
            for (name, tensor), slot in zip(tensors.items(), slots, strict=True)
        }
        present = self._mapping()
        self.tensors = {
            name: SharedTensor(
                self, name, TensorSlot(0, slot.shape, slot.stride, slot.dtype), self._flat(present, name)
            )
            for name, slot in zip(tensors, slots, strict=True)
        }

    def mapped(self) -> dict[str, Tensor]:
        """Map the file once more; return the tensors by name, each on a storage of its own, which may be written."""
        mapping = self._mapping()
        flats = {name: self._flat(mapping, name) for name in self.tensors}
        reference = weakref.ref(mapping)
        sources = {flats[name].data_ptr(): (reference, source) for name, source in self.tensors.items()}
        # Python unmaps the memory before the call, so another mapping may have the addresses again by then.
        weakref.finalize(mapping, _forget, list(sources), reference).atexit = False
        with _LOCK:
            _SOURCES.update(sources)
        with unseen():
            return {name: source.slot.view(flats[name]) for name, source in self.tensors.items()}

    def offset(self, name: str) -> int:
        """Place of a tensor in the file, in bytes."""
        return self._places[name][0]

    def _mapping(self) -> mmap.mmap:
        return mmap.mmap(self._file, self.nbytes, access=mmap.ACCESS_COPY)

    def _flat(self, mapping: mmap.mmap, name: str) -> Tensor:
        offset, size = self._places[name]
        return torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=offset)


def unseen() -> AbstractContextManager[object]:
    """Context in which no dispatch mode sees operators: a mode that limits or forgoes memory would take a mapping for more."""
    return torch._C._DisableTorchDispatch()  # noqa: SLF001 - torch has no other name for it


def shared_source(tensor: Tensor) -> SharedTensor | None:
    """Return the shared tensor that a tensor shows: its place and geometry are the file's, and nobody has written to it."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or not tensor.numel():
        return None
    with _LOCK:
        entry = _SOURCES.get(tensor.data_ptr())
    # Other memory may have the addresses of a mapping that has ended.
    if entry is None or entry[0]() is None:
        return None
    source = entry[1]
    slot = source.slot
    if (tensor.dtype, tensor.shape, tensor.stride()) != (slot.dtype, slot.shape, slot.stride):
        return None
    return None if _is_written(tensor, source) else source


def shown_again(parameters: Iterable[nn.Parameter]) -> dict[int, nn.Parameter]:
    """Return, by `id`, a frozen parameter that shows the same file for each frozen parameter that shows a file."""
    places: dict[SharedFile, dict[str, Tensor]] = {}
    shown: dict[int, nn.Parameter] = {}
    for parameter in parameters:
        source = None if parameter.requires_grad else shared_source(parameter)
        if source is None:
            continue
        if source.file not in places:
            places[source.file] = source.file.mapped()
        shown[id(parameter)] = nn.Parameter(places[source.file][source.name], requires_grad=False)
    return shown


def digest_of(tensor: Tensor) -> str:
    """Return a digest of a dense tensor on the host: of dtype, shape, strides and bytes."""
    content = hashlib.blake2b(digest_size=16)
    content.update(repr((tensor.dtype, tuple(tensor.shape), tensor.stride())).encode())
    # By ctypes, because numpy may not be installed.
    content.update((ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr()))
    return content.hexdigest()


def _is_written(tensor: Tensor, source: SharedTensor) -> bool:
    has_own_pages = _has_own_pages(tensor.data_ptr(), source.flat.numel())
    return not torch.equal(whole_storage(tensor.detach()), source.flat) if has_own_pages is None else has_own_pages


def _has_own_pages(address: int, nbytes: int) -> bool | None:
    """Whether a part of a private mapping has pages of its own; None where the system does not tell."""
    first, last = address // _PAGE_BYTES, (address + nbytes - 1) // _PAGE_BYTES
    try:
        with open(_PAGE_MAP, "rb", buffering=0) as pages:  # noqa: PTH123 - a Path would cost more than the read
            entries = os.pread(pages.fileno(), (last - first + 1) * _ENTRY_BYTES, first * _ENTRY_BYTES)
    except OSError:
        return None
    if len(entries) != (last - first + 1) * _ENTRY_BYTES:
        return None
    bits = (torch.frombuffer(bytearray(entries), dtype=torch.int64) >> _FIRST_BIT) & (_OF_FILE | _EXISTS)
    return bool(((bits & _EXISTS).bool() & ~(bits & _OF_FILE).bool()).any())


def _forget(addresses: Iterable[int], reference: "weakref.ref[mmap.mmap]") -> None:
    """Forget the tensors of a mapping that has ended, but not those of a later mapping at the same addresses."""
    with _LOCK:
        for address in addresses:
            if address in _SOURCES and _SOURCES[address][0] is reference:
                del _SOURCES[address]


def _unnamed_file(nbytes: int) -> int:
    """Return the descriptor of a new file without a name, in memory where the system can.

    Raises:
        HydraTuneError: there is no room.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hydra-tune")
    else:
        descriptor, path = tempfile.mkstemp()
        os.unlink(path)  # noqa: PTH108 - the name is a text
    try:
        # Now, because a page that finds no room later would end the process.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)
        else:
            os.ftruncate(descriptor, nbytes)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise HydraTuneError(
            f"a shared base of {format_bytes(nbytes)} finds no host memory: [Errno {error.errno}] {error.strerror}; make room, "
            "or build the base in a narrower dtype"
        ) from error
    return descriptor
